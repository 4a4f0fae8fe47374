"""Matrix products: contracted dimensions that are cut give partial results."""

from __future__ import annotations

from dataclasses import replace

from hp_dtensor.rules.engine.factors import Dims, Factorization, PartialResults
from hp_dtensor.rules.engine.notation import line
from hp_dtensor.rules.engine.registry import OpCall, RuleRegistry, broadcast_shape

BOTH: tuple[frozenset[int], ...] = (frozenset({0, 1}),)


def register(registry: RuleRegistry) -> None:
    registry.register("matmul bmm mm mv dot", "input other", _matmul)
    registry.register("linear", "input weight bias=None", _linear)
    registry.register("outer ger", "input other", line("m, n -> m n", linear=True))
    registry.register("cdist", "input other p=2.0 compute_mode=None", line("... m k!, ... n k! -> ... m n"))
    registry.register("addmm", "input mat1 mat2 beta=1 alpha=1", _with_addend)
    registry.register("baddbmm", "input batch1 batch2 beta=1 alpha=1", _with_addend)


def _matmul(call: OpCall) -> Factorization:
    """`... m k, ... k n -> ... m n`, one-dimensional operands as in NumPy."""
    left, right = (spec.shape for spec in call.tensors)
    if not left or not right:
        raise call.refuse("a matrix product needs at least one dimension on each side")
    contracted = right[-2] if len(right) > 1 else right[0]
    if left[-1] != contracted:
        raise call.refuse(f"the contracted dimensions differ: {left[-1]} and {contracted}")
    try:
        batch = broadcast_shape([left[:-2], right[:-2]])
    except ValueError as error:
        raise call.refuse(f"batch {error}") from None
    sizes = {f"b{i}": size for i, size in enumerate(batch)} | {"k": left[-1]}
    rows: Dims = (("m",),) if len(left) > 1 else ()
    columns: Dims = (("n",),) if len(right) > 1 else ()
    if rows:
        sizes["m"] = left[-2]
    if columns:
        sizes["n"] = right[-1]
    inputs = (
        (*batch_dims(left[:-2], batch), *rows, ("k",)),
        (*batch_dims(right[:-2], batch), ("k",), *columns),
    )
    output = (*((f"b{i}",) for i in range(len(batch))), *rows, *columns)
    return Factorization(
        inputs=inputs, outputs=(output,), sizes=sizes, partial=PartialResults(reduced={"k": "sum"}, terms=BOTH)
    )


def batch_dims(shape: tuple[int, ...], batch: tuple[int, ...]) -> Dims:
    start = len(batch) - len(shape)
    return tuple((f"b{start + i}",) if size == batch[start + i] else () for i, size in enumerate(shape))


def _linear(call: OpCall) -> Factorization:
    """`... k, n k (, n) -> ... n`; a bias may be anything that broadcasts to the output."""
    shape, weight = call.tensors[0].shape, call.tensors[1].shape
    if len(weight) != 2 or not shape or shape[-1] != weight[1]:
        raise call.refuse(f"input {list(shape)} does not fit weight {list(weight)}")
    leading: Dims = tuple((f"x{i}",) for i in range(len(shape) - 1))
    sizes = {f"x{i}": size for i, size in enumerate(shape[:-1])} | {"n": weight[0], "k": weight[1]}
    inputs: tuple[Dims, ...] = ((*leading, ("k",)), (("n",), ("k",)))
    product = Factorization(
        inputs=inputs,
        outputs=((*leading, ("n",)),),
        sizes=sizes,
        partial=PartialResults(reduced={"k": "sum"}, terms=BOTH),
    )
    if len(call.tensors) < 3:
        return product
    bias = _broadcast_to(call, product, call.tensors[2].shape)
    return replace(product, inputs=(*inputs, bias), partial=replace(product.partial, terms=(*BOTH, frozenset({2}))))


def _broadcast_to(call: OpCall, product: Factorization, shape: tuple[int, ...]) -> Dims:
    """The dimensions of an addend of `shape`."""
    whole, start = product.output_shape(0), len(product.outputs[0]) - len(shape)
    if start < 0 or any(size not in (1, wanted) for size, wanted in zip(shape, whole[start:], strict=True)):
        raise call.refuse(f"{list(shape)} does not broadcast to the product, which is {list(whole)}")
    aligned = zip(shape, product.outputs[0][start:], whole[start:], strict=True)
    return tuple(dim if size == wanted else () for size, dim, wanted in aligned)


def _with_addend(call: OpCall) -> Factorization:
    """`input + left @ right`, the input broadcast to the product."""
    product = _matmul(OpCall(call.name, {}, call.tensors[1:]))
    return Factorization(
        inputs=(_broadcast_to(call, product, call.tensors[0].shape), *product.inputs),
        outputs=product.outputs,
        sizes=product.sizes,
        partial=PartialResults(reduced=product.partial.reduced, terms=(frozenset({0}), frozenset({1, 2}))),
    )
