"""Writing at positions along a dimension, which is whole: `scatter`, `index_add`, `index_put` and their kin."""

from __future__ import annotations

from hp_dtensor.rules.engine.factors import Dim, Dims, Factorization, uncut
from hp_dtensor.rules.engine.notation import line
from hp_dtensor.rules.engine.registry import DATA_DEPENDENT, OpCall, RuleRegistry, names_for


def register(registry: RuleRegistry) -> None:
    filled = line("... dim! ..., x!, [] -> ... dim ...")
    written = line("... dim! ..., x!, ... x! ... -> ... dim ...")
    for names, in_place in (("scatter scatter_add", False), ("scatter_ scatter_add_", True)):
        registry.register(names, "input dim index src=None * value=None reduce=None", _scatter, in_place=in_place)
    for names, in_place in (("scatter_reduce", False), ("scatter_reduce_", True)):
        registry.register(names, "input dim index src reduce include_self=True", _scatter, in_place=in_place)
    for names, in_place in (("index_add index_copy", False), ("index_add_ index_copy_", True)):
        registry.register(names, "input dim index source * alpha=1", written, in_place=in_place)
    for names, in_place in (("index_reduce", False), ("index_reduce_", True)):
        registry.register(names, "input dim index source reduce * include_self=True", written, in_place=in_place)
    for names, in_place in (("index_fill", False), ("index_fill_", True)):
        registry.register(names, "input dim index value", filled, in_place=in_place)
    for names, in_place in (("index_put", False), ("index_put_", True)):
        registry.register(names, "input indices values accumulate=False", _index_put, in_place=in_place)
    registry.register(
        "masked_select nonzero argwhere unique unique_consecutive", "input ...", _data_dependent, data_dependent=True
    )


def _scatter(call: OpCall) -> Factorization:
    """Input, index and (where it is a tensor) source; a dimension in which they all agree is parallel."""
    target, others = call.tensors[0].shape, [spec.shape for spec in call.tensors[1:]]
    dim = call.dim(call["dim"])
    dims, sizes = names_for("d", target)
    fixed = {f"d{dim}"}
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
    return Factorization(tuple(inputs), (dims,), sizes, cuts=uncut(fixed))


def _index_put(call: OpCall) -> Factorization:
    """Rows of the leading dimension(s) replaced; the trailing dimensions are parallel."""
    indices = call["indices"]
    if len(call.tensors) != len(indices) + 2 or any(spec.ndim != 1 for spec in call.tensors[1:-1]):
        raise call.whole("its rule is of one-dimensional index DTensors and a DTensor of values")
    dims, sizes = names_for("d", call.tensors[0].shape)
    count = len(indices)
    sizes = sizes | {"x": call.tensors[1].shape[0]}
    fixed = frozenset({"x", *(f"d{i}" for i in range(count))})
    values = (("x",), *dims[count:])
    if call.tensors[-1].shape != (sizes["x"], *call.tensors[0].shape[count:]) or any(
        spec.shape != (sizes["x"],) for spec in call.tensors[1:-1]
    ):
        raise call.whole("its rule is of values that are not broadcast")
    return Factorization((dims, *((("x",),),) * count, values), (dims,), sizes, cuts=uncut(fixed))


def _data_dependent(call: OpCall) -> Factorization:
    raise call.refuse(DATA_DEPENDENT)
