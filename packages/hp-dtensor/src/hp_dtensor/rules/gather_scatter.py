"""Rules of operations that read or write along one dimension at positions given by a tensor.

Reading: `gather`, `index_select`, `take_along_dim`. The dimension is unsharded, unless few positions are picked: then
each rank returns those that it owns and zeros for the others, and the partial result is sent instead of the input.
Writing: `scatter`, `index_add`, `index_put` and similar. The dimension is unsharded.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hp_dtensor.rules.factors import LINEAR, Dim, Dims, Factorization, LocalCall, unsharded
from hp_dtensor.rules.notation import line
from hp_dtensor.rules.registry import DATA_DEPENDENT, OpCall, RuleRegistry, dim_factors

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


Tensor = Any


def own_ids(ops: Any, ids: Tensor, start: int, length: int, size: int) -> tuple[Tensor, Tensor]:
    """Return ids relative to a shard (0 outside of it, `length` for invalid ones), and the mask of those inside."""
    # The mask is arithmetic, without a branch on data: the host need not wait for the device.
    relative = ops.sub(ids, start)
    inside = ops.logical_and(ops.ge(relative, 0), ops.lt(relative, length))
    own = ops.mul(relative, ops.cast(inside, ids.dtype))
    return ops.add(own, ops.mul(ops.cast(_outside(ops, ids, size), ids.dtype), length)), inside


def check_ids(platform: Platform, ids: Tensor, size: int) -> None:
    """Fail as an embedding does if an id is outside `size`: in a kernel, without waiting for the device."""
    ops = platform.ops
    # A table with one row: id 1, where an id is outside, is out of range there.
    ops.embedding(ops.cast(_outside(ops, ids, size), ids.dtype), ops.zeros((1, 1), platform.dtype("float32")))


def zeros_outside(platform: Platform, rows: Tensor, inside: Tensor) -> Tensor:
    """Return `rows` with zeros where the mask `inside`, which broadcasts to their shape, is false."""
    ops = platform.ops
    if platform.is_floating(rows.dtype):
        return ops.masked_fill(rows, ops.logical_not(inside), 0.0)  # not a product: rows may be infinite
    return ops.mul(rows, ops.cast(inside, rows.dtype))


def _outside(ops: Any, ids: Tensor, size: int) -> Tensor:
    return ops.logical_or(ops.lt(ids, 0), ops.ge(ids, size))


def register(registry: RuleRegistry) -> None:
    registry.register("gather", "input dim index * sparse_grad=False", _gather)
    registry.register("index_select", "input dim index", _index_select)
    registry.register(
        "take_along_dim", "input index dim=None", line("... dim! ..., ... x! ... -> ... x ...", linear="0")
    )
    filled = line("... dim! ..., x!, [] -> ... dim ...")
    written = line("... dim! ..., x!, ... x! ... -> ... dim ...")
    for names, signature, rule in (
        ("scatter scatter_add", "input dim index src=None * value=None reduce=None", _scatter),
        ("scatter_reduce", "input dim index src reduce include_self=True", _scatter),
        ("index_add index_copy", "input dim index source * alpha=1", written),
        ("index_reduce", "input dim index source reduce * include_self=True", written),
        ("index_fill", "input dim index value", filled),
        ("index_put", "input indices values accumulate=False", _index_put),
    ):
        registry.register(names, signature, rule, variants="_")
    # Their results are as long as the data of all ranks says, which no rank knows without a message.
    registry.register(
        "masked_select nonzero argwhere unique unique_consecutive", "input ...", _data_dependent, data_dependent=True
    )


def _gather(call: OpCall) -> Factorization:
    """Gather with parallel dimensions where input and index have the same size. The others are unsharded."""
    shape, index = (spec.shape for spec in call.tensors)
    dim = call.dim(call["dim"])
    if len(shape) != len(index):
        raise call.needs_replicated("its rule needs an index with as many dimensions as the input")
    dims, sizes = dim_factors("d", shape)
    index_dims = []
    fixed = {f"d{dim}"}
    for i, size in enumerate(index):
        if i != dim and size == shape[i]:
            index_dims.append((f"d{i}",))
            continue
        sizes[f"x{i}"] = size
        fixed |= {f"d{i}", f"x{i}"}
        index_dims.append((f"x{i}",))
    rule = Factorization(
        (dims, tuple(index_dims)), (tuple(index_dims),), sizes, limits=unsharded(fixed), partial=LINEAR
    )
    return _picked_by_owners(call, rule, dim)


def _index_select(call: OpCall) -> Factorization:
    shape, index = (spec.shape for spec in call.tensors)
    dim = call.dim(call["dim"])
    if len(index) != 1:
        raise call.refuse(f"expected an index of one dimension, got the shape {list(index)}")
    dims, sizes = dim_factors("d", shape)
    output = (*dims[:dim], ("x",), *dims[dim + 1 :])
    rule = Factorization(
        (dims, (("x",),)), (output,), sizes | {"x": index[0]}, limits=unsharded({f"d{dim}"}), partial=LINEAR
    )
    return _picked_by_owners(call, rule, dim)


def _picked_by_owners(call: OpCall, rule: Factorization, dim: int) -> Factorization:
    """Return the rule; if few positions are picked, with a sharded dimension and zeros for those of other ranks."""
    shape, index = (spec.shape for spec in call.tensors)
    picked = index[0] if call.name == "index_select" else index[dim]
    # Reducing a partial result sends up to twice its size (all-reduce), gathering the input its size once.
    if 2 * picked > shape[dim] or call.is_bool:
        return rule
    factor = f"d{dim}"
    return replace(
        rule,
        limits=replace(rule.limits, fixed=rule.limits.fixed - {factor}),
        partial=replace(rule.partial, reduced={factor: "sum"}),
        work=replace(rule.work, by_factor={factor: functools.partial(_pick_own, dim)}),
    )


def _pick_own(dim: int, call: LocalCall) -> Any:
    """Return the picked elements that this rank owns, and zeros for the others."""
    platform, ops = call.platform, call.platform.ops
    x, index, size = call.arguments["input"], call.arguments["index"], call.sizes[f"d{dim}"]
    start, length = call.spans[f"d{dim}"]
    # A kernel would fail on an empty shard even if no id is in it.
    if not length:
        check_ids(platform, index, size)
        return ops.cast(_picked_zeros(call, dim), x.dtype)
    own, inside = own_ids(ops, index, start, length, size)
    rows = call.on(x, index=own)
    # The mask of `gather` has the result's shape, that of `index_select` only its dimension of positions.
    if call.name == "index_select":
        inside = ops.reshape(inside, (-1, *[1] * (len(x.shape) - dim - 1)))
    return zeros_outside(platform, rows, inside)


def _picked_zeros(call: LocalCall, dim: int) -> Any:
    """Return the zeros of a rank with an empty shard. They depend on the input, for autograd."""
    ops, index = call.platform.ops, call.arguments["index"]
    zeros = ops.sum(call.arguments["input"], dim, True)
    shape = list(zeros.shape)
    shape[dim] = index.shape[0]
    if call.name == "gather":
        shape = list(index.shape)
        for other, length in enumerate(shape):
            zeros = zeros if other == dim else ops.narrow(zeros, other, 0, length)
    return ops.expand(zeros, tuple(shape))


def _scatter(call: OpCall) -> Factorization:
    """Scatter with parallel dimensions where input, index and source (if it is a tensor) have the same size."""
    target, others = call.tensors[0].shape, [spec.shape for spec in call.tensors[1:]]
    dim = call.dim(call["dim"])
    if any(len(shape) != len(target) for shape in others):
        raise call.needs_replicated("its rule needs an index and a source with as many dimensions as the input")
    dims, sizes = dim_factors("d", target)
    fixed = {f"d{dim}"}
    # A source element is written to the row of its own index, so a rank needs index, source and target at the same
    # positions of every dimension but `dim`. Where sizes differ, shards of one tensor would not be those of the other.
    inputs: list[Dims] = [dims]
    for number, shape in enumerate(others):
        row: list[Dim] = []
        for i, size in enumerate(shape):
            if i != dim and all(other[i] == target[i] for other in others):
                row.append((f"d{i}",))
                continue
            sizes[f"s{number}_{i}"] = size
            fixed |= {f"d{i}", f"s{number}_{i}"}
            row.append((f"s{number}_{i}",))
        inputs.append(tuple(row))
    return Factorization(tuple(inputs), (dims,), sizes, limits=unsharded(fixed))


def _index_put(call: OpCall) -> Factorization:
    """Replace rows of the indexed leading dimensions. The trailing dimensions are parallel."""
    indices = call["indices"]
    if len(call.tensors) != len(indices) + 2 or any(spec.ndim != 1 for spec in call.tensors[1:-1]):
        raise call.needs_replicated("its rule needs one-dimensional index DTensors and a DTensor of values")
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    count = len(indices)
    sizes |= {"x": call.tensors[1].shape[0]}
    fixed = {"x", *(f"d{i}" for i in range(count))}
    values = (("x",), *dims[count:])
    if call.tensors[-1].shape != (sizes["x"], *call.tensors[0].shape[count:]) or any(
        spec.shape != (sizes["x"],) for spec in call.tensors[1:-1]
    ):
        raise call.needs_replicated("its rule needs values that are not broadcast")
    return Factorization((dims, *((("x",),),) * count, values), (dims,), sizes, limits=unsharded(fixed))


def _data_dependent(call: OpCall) -> Factorization:
    raise call.refuse(DATA_DEPENDENT)
