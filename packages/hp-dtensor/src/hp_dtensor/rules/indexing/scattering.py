"""Writing by index and masks of positions: the written dimension is whole."""

from __future__ import annotations

from collections.abc import Sequence

from hp_dtensor.rules.engine.factors import Dim, Dims, Factorization
from hp_dtensor.rules.engine.registry import OpCall, Rule, RuleRegistry, names_for
from hp_dtensor.rules.indexing.advanced import DATA_DEPENDENT
from hp_dtensor.rules.views import LINEAR, _dim


def register(registry: RuleRegistry) -> None:
    for names, in_place in (("scatter scatter_add", False), ("scatter_ scatter_add_", True)):
        registry.register(names, "input dim index src=None * value=None reduce=None", _scatter, in_place=in_place)
    for names, in_place in (("index_add index_copy", False), ("index_add_ index_copy_", True)):
        registry.register(names, "input dim index source * alpha=1", _index_write, in_place=in_place)
    for names, in_place in (("index_fill", False), ("index_fill_", True)):
        registry.register(names, "input dim index value", _index_fill, in_place=in_place)
    for names, in_place in (("index_put", False), ("index_put_", True)):
        registry.register(names, "input indices values accumulate=False", _index_put, in_place=in_place)
    for names, in_place in (("scatter_reduce", False), ("scatter_reduce_", True)):
        registry.register(names, "input dim index src reduce include_self=True", _scatter, in_place=in_place)
    for names, in_place in (("index_reduce", False), ("index_reduce_", True)):
        registry.register(names, "input dim index source reduce * include_self=True", _index_write, in_place=in_place)
    registry.register("diag_embed", "input offset=0 dim1=-2 dim2=-1", _diag_embed)
    registry.register("take_along_dim", "input index dim", _take_along_dim)
    registry.register("tril triu", "input diagonal=0", _last_two_whole)
    registry.register("tril_ triu_", "input diagonal=0", _last_two_whole, in_place=True)
    registry.register("pad", "input pad mode=constant value=None", _pad)
    registry.register("repeat tile", "input *repeats", _repeat)
    registry.register("diagonal", "input offset=0 dim1=0 dim2=1", _diagonal, view=True)
    registry.register("unfold", "input dimension size step", _unfold, view=True)
    registry.register("searchsorted", "sorted_sequence input * out_int32=False right=False side=None", _sorted_whole(0))
    registry.register("bucketize", "input boundaries * out_int32=False right=False", _sorted_whole(1))
    registry.register(
        "masked_select nonzero argwhere unique unique_consecutive", "input ...", _data_dependent, data_dependent=True
    )


def _keep_shape(call: OpCall, whole: Sequence[int], linear: bool = True) -> Factorization:
    """The first tensor's shape, with the dimensions `whole` uncut."""
    dims, sizes = names_for("d", call.tensors[0].shape)
    fixed = frozenset(f"d{i}" for i in whole)
    return Factorization((dims,), (dims,), sizes, fixed=fixed, terms=LINEAR if linear else None)


def _scatter(call: OpCall) -> Factorization:
    """Input, index and (where it is a tensor) source; a dimension in which they all agree is parallel."""
    target, others = call.tensors[0].shape, [spec.shape for spec in call.tensors[1:]]
    dim = _dim(call, call["dim"])
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
    return Factorization(tuple(inputs), (dims,), sizes, fixed=frozenset(fixed))


def _index_write(call: OpCall) -> Factorization:
    """Input `[..., d, ...]`, index `[x]`, source `[..., x, ...]`."""
    dims, sizes = names_for("d", call.tensors[0].shape)
    dim = _dim(call, call["dim"])
    source = (*dims[:dim], ("x",), *dims[dim + 1 :])
    sizes = sizes | {"x": call.tensors[1].shape[0]}
    return Factorization((dims, (("x",),), source), (dims,), sizes, fixed=frozenset({f"d{dim}", "x"}))


def _index_fill(call: OpCall) -> Factorization:
    dims, sizes = names_for("d", call.tensors[0].shape)
    fixed = frozenset({f"d{_dim(call, call['dim'])}", "x"})
    return Factorization((dims, (("x",),)), (dims,), sizes | {"x": call.tensors[1].shape[0]}, fixed=fixed)


def _index_put(call: OpCall) -> Factorization:
    """Rows of the leading dimension(s) replaced; the trailing dimensions are parallel."""
    indices = call["indices"]
    if len(call.tensors) != len(indices) + 2 or any(spec.ndim != 1 for spec in call.tensors[1:-1]):
        raise call.refuse("index_put of a DTensor takes one-dimensional index DTensors and a DTensor of values")
    dims, sizes = names_for("d", call.tensors[0].shape)
    count = len(indices)
    sizes = sizes | {"x": call.tensors[1].shape[0]}
    fixed = frozenset({"x", *(f"d{i}" for i in range(count))})
    values = (("x",), *dims[count:])
    return Factorization((dims, *((("x",),),) * count, values), (dims,), sizes, fixed=fixed)


def _take_along_dim(call: OpCall) -> Factorization:
    shape, index = (spec.shape for spec in call.tensors)
    dim = _dim(call, call["dim"])
    if any(a != b for i, (a, b) in enumerate(zip(shape, index, strict=True)) if i != dim):
        raise call.refuse("take_along_dim of DTensors needs shapes that agree outside the dimension")
    dims, sizes = names_for("d", shape)
    output = (*dims[:dim], ("x",), *dims[dim + 1 :])
    sizes = sizes | {"x": index[dim]}
    return Factorization((dims, output), (output,), sizes, fixed=frozenset({f"d{dim}", "x"}), terms=LINEAR)


def _last_two_whole(call: OpCall) -> Factorization:
    ndim = call.tensors[0].ndim
    return _keep_shape(call, range(ndim - 2, ndim))


def _pad(call: OpCall) -> Factorization:
    """Padded dimensions, from the last one backward in pairs, are whole."""
    shape, pad = call.tensors[0].shape, list(call["pad"])
    dims, sizes = names_for("d", shape)
    output = list(dims)
    fixed = set()
    for pair in range(len(pad) // 2):
        before, after = pad[2 * pair : 2 * pair + 2]
        dim = len(shape) - 1 - pair
        if before or after:
            sizes[f"o{dim}"] = shape[dim] + before + after
            fixed |= {f"d{dim}", f"o{dim}"}
            output[dim] = (f"o{dim}",)
    linear = call["mode"] == "constant" and not call["value"]
    return Factorization((dims,), (tuple(output),), sizes, fixed=frozenset(fixed), terms=LINEAR if linear else None)


def _repeat(call: OpCall) -> Factorization:
    """A dimension that is repeated is whole; one repeated once is parallel."""
    shape, repeats = call.tensors[0].shape, tuple(call["repeats"])
    if call.name == "tile":
        repeats = (1,) * (len(shape) - len(repeats)) + repeats
    dims, sizes = names_for("d", shape)
    aligned: Dims = (*((),) * (len(repeats) - len(shape)), *dims)
    output: list[Dim] = []
    for i, (dim, count) in enumerate(zip(aligned, repeats, strict=True)):
        sizes |= {f"r{i}": count}
        output.append(dim if count == 1 else (f"r{i}", *dim))
    return Factorization(
        (dims,), (tuple(output),), sizes, fixed=frozenset(f"r{i}" for i in range(len(repeats))), terms=LINEAR
    )


def _diagonal(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    dims, sizes = names_for("d", shape)
    first, second, offset = _dim(call, call["dim1"]), _dim(call, call["dim2"]), call["offset"]
    rows, columns = shape[first] + min(offset, 0), shape[second] - max(offset, 0)
    sizes = sizes | {"diagonal": max(0, min(rows, columns))}
    output = (*(dim for i, dim in enumerate(dims) if i not in (first, second)), ("diagonal",))
    fixed = frozenset({f"d{first}", f"d{second}", "diagonal"})
    return Factorization((dims,), (output,), sizes, fixed=fixed, terms=LINEAR)


def _unfold(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    dims, sizes = names_for("d", shape)
    dim = _dim(call, call["dimension"])
    windows = (shape[dim] - call["size"]) // call["step"] + 1
    output = (*dims[:dim], ("windows",), *dims[dim + 1 :], ("window",))
    fixed = frozenset({f"d{dim}", "windows", "window"})
    sizes = sizes | {"windows": windows, "window": call["size"]}
    return Factorization((dims,), (output,), sizes, fixed=fixed, terms=LINEAR)


def _sorted_whole(which: int) -> Rule:
    """Elementwise on the values; the sorted boundaries are whole."""

    def rule(call: OpCall) -> Factorization:
        if len(call.tensors) != 2 or call.tensors[which].ndim != 1:
            raise call.refuse("it takes one-dimensional boundaries and a DTensor of values")
        dims, sizes = names_for("d", call.tensors[1 - which].shape)
        boundaries: Dims = (("boundaries",),)
        inputs = (boundaries, dims) if which == 0 else (dims, boundaries)
        sizes = sizes | {"boundaries": call.tensors[which].shape[0]}
        return Factorization(inputs, (dims,), sizes, fixed=frozenset({"boundaries"}))

    return rule


def _diag_embed(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    dims, sizes = names_for("d", shape)
    if {call["dim1"], call["dim2"]} - {-2, -1} or call["dim1"] == call["dim2"]:
        raise call.refuse("it puts the diagonal into the last two dimensions only; transpose its result")
    length = shape[-1] + abs(call["offset"])
    output = (*dims[:-1], ("row",), ("column",))
    fixed = frozenset({dims[-1][0], "row", "column"})
    return Factorization((dims,), (output,), sizes | {"row": length, "column": length}, fixed=fixed, terms=LINEAR)


def _data_dependent(call: OpCall) -> Factorization:
    raise call.refuse(DATA_DEPENDENT)
