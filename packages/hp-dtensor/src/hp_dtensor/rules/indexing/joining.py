"""Indexing, joining and splitting: the dimension that is cut apart or put together must be whole."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.rules.engine import part_results
from hp_dtensor.rules.engine.factors import Dims, Factorization
from hp_dtensor.rules.engine.local_call import LocalCall
from hp_dtensor.rules.engine.registry import OpCall, RuleRegistry, names_for
from hp_dtensor.rules.indexing.ids import check_ids, own_ids
from hp_dtensor.rules.views import LINEAR, _dim


def register(registry: RuleRegistry) -> None:
    registry.register("cat concat", "tensors dim=0", _cat)
    registry.register("stack", "tensors dim=0", _stack)
    registry.register("split", "input sizes dim=0", _split, view=True)
    registry.register("chunk", "input chunks dim=0", _chunk, view=True)
    registry.register("unbind", "input dim=0", _unbind, view=True)
    registry.register("gather", "input dim index * sparse_grad=False", _gather)
    registry.register("index_select", "input dim index", _index_select)
    registry.register("topk", "input k dim=-1 largest=True sorted=True", _topk)
    registry.register("sort", "input dim=-1 descending=False * stable=False", _sort)
    registry.register("argsort", "input dim=-1 descending=False * stable=False", _argsort)
    registry.register("one_hot", "input num_classes=-1", _one_hot, data_dependent=True)
    registry.register("bincount", "input weights=None minlength=0", _bincount, data_dependent=True)


def _changed(call: OpCall, dim: int, lengths: Sequence[int], **options: Any) -> Factorization:
    """One output per length, each the input with dimension `dim` replaced by one of that length."""
    dims, sizes = names_for("d", call.tensors[0].shape)
    names = [f"o{i}" for i in range(len(lengths))]
    outputs = tuple((*dims[:dim], (name,), *dims[dim + 1 :]) for name in names)
    fixed = frozenset({f"d{dim}", *names})
    all_sizes = {**sizes, **dict(zip(names, lengths, strict=True))}
    return Factorization((dims,), outputs, all_sizes, fixed=fixed, **options)


def _cat(call: OpCall) -> Factorization:
    shapes = [spec.shape for spec in call.tensors]
    dim = _dim(call, call["dim"])
    first = shapes[0]
    if any(len(s) != len(first) or s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in shapes):
        raise call.refuse("shapes differ outside the dimension that is joined")
    dims, sizes = names_for("d", first)
    own = {f"i{i}": shape[dim] for i, shape in enumerate(shapes)} | {"joined": sum(shape[dim] for shape in shapes)}
    inputs = tuple((*dims[:dim], (f"i{i}",), *dims[dim + 1 :]) for i in range(len(shapes)))
    output = (*dims[:dim], ("joined",), *dims[dim + 1 :])
    del sizes[f"d{dim}"]
    return Factorization(inputs, (output,), sizes | own, fixed=frozenset(own), terms=_each(len(shapes)))


def _each(count: int) -> tuple[frozenset[int], ...]:
    return tuple(frozenset({i}) for i in range(count))


def _stack(call: OpCall) -> Factorization:
    shapes = {spec.shape for spec in call.tensors}
    if len(shapes) > 1:
        raise call.refuse(f"tensors to stack have one shape, got {' and '.join(map(str, map(list, sorted(shapes))))}")
    dims, sizes = names_for("d", call.tensors[0].shape)
    dim, count = _dim(call, call["dim"], extra=1), len(call.tensors)
    output = (*dims[:dim], ("stacked",), *dims[dim:])
    return Factorization(
        (dims,) * count,
        (output,),
        sizes | {"stacked": count},
        fixed=frozenset({"stacked"}),
        terms=_each(count),
    )


def _split(call: OpCall) -> Factorization:
    dim = _dim(call, call["dim"])
    total, sizes = call.tensors[0].shape[dim], call["sizes"]
    lengths = _pieces(total, sizes) if isinstance(sizes, int) else list(sizes)
    if sum(lengths) != total:
        raise call.refuse(f"pieces {lengths} do not sum to {total}")
    return _changed(call, dim, lengths, terms=LINEAR)


def _chunk(call: OpCall) -> Factorization:
    dim = _dim(call, call["dim"])
    total, chunks = call.tensors[0].shape[dim], call["chunks"]
    pieces = _pieces(total, -(-total // chunks)) if total else [0] * chunks
    return _changed(call, dim, pieces, terms=LINEAR)


def _pieces(total: int, length: int) -> list[int]:
    return [min(length, total - start) for start in range(0, total, length)] or [0]


def _unbind(call: OpCall) -> Factorization:
    dims, sizes = names_for("d", call.tensors[0].shape)
    dim = _dim(call, call["dim"])
    output: Dims = (*dims[:dim], *dims[dim + 1 :])
    count = call.tensors[0].shape[dim]
    return Factorization((dims,), (output,) * count, sizes, fixed=frozenset({f"d{dim}"}), terms=LINEAR)


def _gather(call: OpCall) -> Factorization:
    """Dimensions in which input and index agree are parallel; the others must be whole."""
    shape, index = (spec.shape for spec in call.tensors)
    dim = _dim(call, call["dim"])
    dims, sizes = names_for("d", shape)
    index_dims = []
    fixed = {f"d{dim}"}
    for i, size in enumerate(index):
        if i != dim and size == shape[i]:
            index_dims.append((f"d{i}",))
            continue
        sizes[f"x{i}"] = size
        fixed |= {f"d{i}"} if i != dim else set()
        fixed |= {f"x{i}"}
        index_dims.append((f"x{i}",))
    rule = Factorization((dims, tuple(index_dims)), (tuple(index_dims),), sizes, fixed=frozenset(fixed), terms=LINEAR)
    return _picked_by_owners(call, rule, dim)


def _index_select(call: OpCall) -> Factorization:
    shape, index = (spec.shape for spec in call.tensors)
    dim = _dim(call, call["dim"])
    if len(index) != 1:
        raise call.refuse(f"its index must have one dimension, got {list(index)}")
    dims, sizes = names_for("d", shape)
    output = (*dims[:dim], ("x",), *dims[dim + 1 :])
    rule = Factorization(
        (dims, (("x",),)), (output,), sizes | {"x": index[0]}, fixed=frozenset({f"d{dim}"}), terms=LINEAR
    )
    return _picked_by_owners(call, rule, dim)


def _picked_by_owners(call: OpCall, rule: Factorization, dim: int) -> Factorization:
    """The rule with the dimension cut where few are picked: each rank gives those that it has, zeros otherwise."""
    shape, index = (spec.shape for spec in call.tensors)
    picked = index[dim] if len(index) > 1 or call.name != "index_select" else index[0]
    platform = call.tensors[0].mesh.platform
    if 2 * picked > shape[dim] or platform.dtype_name(call.tensors[0].dtype) == "bool":
        return rule
    factor = f"d{dim}"
    return replace(
        rule, fixed=rule.fixed - {factor}, reduced={factor: "sum"}, local={factor: functools.partial(_own_picked, dim)}
    )


def _own_picked(dim: int, call: LocalCall) -> Any:
    platform, ops = call.platform, call.platform.ops
    x, index, size = call.arguments["input"], call.arguments["index"], call.sizes[f"d{dim}"]
    start, length = call.spans[f"d{dim}"]
    if not length:
        check_ids(platform, index, size)
        return ops.cast(_zeros_picked(call, dim), x.dtype)
    own, inside = own_ids(ops, index, start, length, size)
    rows = call.on(x, index=own)
    if call.name == "index_select":
        inside = ops.reshape(inside, (-1, *[1] * (len(x.shape) - dim - 1)))
    if platform.is_floating(rows.dtype):
        return ops.masked_fill(rows, ops.logical_not(inside), 0.0)  # which may be infinite
    return ops.mul(rows, ops.cast(inside, rows.dtype))


def _zeros_picked(call: LocalCall, dim: int) -> Any:
    """What a rank that holds nothing of the dimension picks, in the graph of the input."""
    ops, index = call.platform.ops, call.arguments["index"]
    zeros = ops.sum(call.arguments["input"], dim, True)
    shape = list(zeros.shape)
    shape[dim] = index.shape[0]
    if call.name == "gather":
        shape = list(index.shape)
        for other, length in enumerate(shape):
            zeros = zeros if other == dim else ops.narrow(zeros, other, 0, length)
    return ops.expand(zeros, tuple(shape))


def _topk(call: OpCall) -> Factorization:
    """Along a cut dimension the best of each part, then of these, where that is fewer bytes."""
    if not call.tensors[0].shape:
        raise call.refuse("a tensor of no dimension")
    dim, k = _dim(call, call["dim"]), call["k"]
    rule = _changed(call, dim, [k])
    rule = replace(rule, outputs=rule.outputs * 2)
    if k > call.tensors[0].shape[dim] or not part_results.candidates_are_fewer(call, dim, k):
        return rule
    factor = frozenset({f"d{dim}"})
    local = {f"d{dim}": part_results.first_k_of_parts(dim, k)}
    return replace(rule, fixed=rule.fixed - factor, complete=factor, local=local)


def _sort(call: OpCall) -> Factorization:
    rule = _argsort(call)
    return Factorization(rule.inputs, rule.outputs * 2, rule.sizes, fixed=rule.fixed)


def _argsort(call: OpCall) -> Factorization:
    dims, sizes = names_for("d", call.tensors[0].shape)
    return Factorization((dims,), (dims,), sizes, fixed=frozenset({f"d{_dim(call, call['dim'])}"}))


def _one_hot(call: OpCall) -> Factorization:
    if call["num_classes"] < 0:
        raise call.refuse("num_classes must be given: otherwise it depends on data of all ranks")
    dims, sizes = names_for("d", call.tensors[0].shape)
    return Factorization(
        (dims,),
        ((*dims, ("classes",)),),
        sizes | {"classes": call["num_classes"]},
        fixed=frozenset({"classes"}),
    )


def _bincount(call: OpCall) -> Factorization:
    (spec,) = call.tensors[:1]
    if spec.is_replicated():
        raise call.refuse("the number of bins depends on data")  # which all ranks have: it runs as on one device
    if not call["minlength"] or call["weights"] is not None:
        raise call.refuse("bincount of a cut DTensor needs minlength, which must exceed every value, and no weights")
    dims, sizes = names_for("d", spec.shape)
    return Factorization(
        (dims,),
        ((("bins",),),),
        sizes | {"bins": call["minlength"]},
        fixed=frozenset({"bins"}),
        reduced=dict.fromkeys(sizes, "sum"),
        local=dict.fromkeys(sizes, functools.partial(_bins_of_part, call)),
    )


def _bins_of_part(refused: OpCall, call: LocalCall) -> Any:
    """Every rank learns of a value beyond the bins, wherever it is."""
    platform, bins = call.platform, call.sizes["bins"]
    counts = call.on(call.arguments["input"])
    most = platform.ops.full((), int(counts.shape[0]), platform.dtype("int64"))
    for group in call.groups["d0"]:
        most = collectives.all_reduce_data(most, group, "max")
    highest = int(platform.to_numpy(most)) - 1
    if highest >= bins:
        raise refused.refuse(f"a value {highest} is beyond minlength={bins}")
    return counts
