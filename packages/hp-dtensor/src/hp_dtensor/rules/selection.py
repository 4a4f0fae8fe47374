"""Indexing, joining and splitting: the dimension that is cut apart or put together must be whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.rules.factors import Dim, Dims, Factorization
from hp_dtensor.rules.registry import OpCall, RuleRegistry, names_for
from hp_dtensor.rules.views import LINEAR, _dim


def register(registry: RuleRegistry) -> None:
    registry.register("narrow", "input dim start length", _narrow, view=True)
    registry.register("select", "input dim index", _select, view=True)
    registry.register("getitem", "input index", _getitem, view=True)
    registry.register("cat concat", "tensors dim=0", _cat)
    registry.register("stack", "tensors dim=0", _stack)
    registry.register("split", "input sizes dim=0", _split, view=True)
    registry.register("chunk", "input chunks dim=0", _chunk, view=True)
    registry.register("unbind", "input dim=0", _unbind, view=True)
    registry.register("gather", "input dim index", _gather)
    registry.register("index_select", "input dim index", _index_select)
    registry.register("topk", "input k dim=-1", _topk)
    registry.register("sort", "input dim=-1 descending=False", _sort)
    registry.register("argsort", "input dim=-1 descending=False", _argsort)
    registry.register("one_hot", "input num_classes=-1", _one_hot)
    registry.register("bincount", "input weights=None minlength=0", _bincount)


def _changed(call: OpCall, dim: int, lengths: Sequence[int], **options: Any) -> Factorization:
    """One output per length, each the input with dimension `dim` replaced by one of that length."""
    dims, sizes = names_for("d", call.tensors[0].shape)
    names = [f"o{i}" for i in range(len(lengths))]
    outputs = tuple((*dims[:dim], (name,), *dims[dim + 1 :]) for name in names)
    fixed = frozenset({f"d{dim}", *names})
    all_sizes = {**sizes, **dict(zip(names, lengths, strict=True))}
    return Factorization((dims,), outputs, all_sizes, fixed=fixed, **options)


def _narrow(call: OpCall) -> Factorization:
    return _changed(call, _dim(call, call["dim"]), [call["length"]], terms=LINEAR)


def _select(call: OpCall) -> Factorization:
    dims, sizes = names_for("d", call.tensors[0].shape)
    dim = _dim(call, call["dim"])
    return Factorization((dims,), ((*dims[:dim], *dims[dim + 1 :]),), sizes, fixed=frozenset({f"d{dim}"}), terms=LINEAR)


def _getitem(call: OpCall) -> Factorization:
    """Basic indexing: integers, slices, None and Ellipsis."""
    shape = call.tensors[0].shape
    dims, sizes = names_for("d", shape)
    output: list[Dim] = []
    fixed = set()
    position = 0
    for item in _expanded_index(call, len(shape)):
        if item is None:
            output.append(())
            continue
        if isinstance(item, int):
            fixed.add(f"d{position}")
        elif item == slice(None):
            output.append(dims[position])
        else:
            sizes[f"o{position}"] = len(range(*item.indices(shape[position])))
            fixed |= {f"d{position}", f"o{position}"}
            output.append((f"o{position}",))
        position += 1
    return Factorization((dims,), (tuple(output),), sizes, fixed=frozenset(fixed), terms=LINEAR)


def _expanded_index(call: OpCall, ndim: int) -> list[Any]:
    index = call["index"] if isinstance(call["index"], tuple) else (call["index"],)
    if any(not (item is None or item is Ellipsis or type(item) in (int, slice)) for item in index):
        raise call.refuse("only integers, slices, None and ... index a DTensor so far; use index_select or gather")
    used = sum(item is not None and item is not Ellipsis for item in index)
    if used > ndim:
        raise call.refuse(f"{used} indices for a {ndim}-dimensional tensor")
    rest = [slice(None)] * (ndim - used)
    if Ellipsis in index:
        where = index.index(Ellipsis)
        return [*index[:where], *rest, *index[where + 1 :]]
    return [*index, *rest]


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
    total = call.tensors[0].shape[dim]
    return _changed(call, dim, _pieces(total, max(1, -(-total // call["chunks"]))), terms=LINEAR)


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
    return Factorization((dims, tuple(index_dims)), (tuple(index_dims),), sizes, fixed=frozenset(fixed), terms=LINEAR)


def _index_select(call: OpCall) -> Factorization:
    shape, index = (spec.shape for spec in call.tensors)
    dim = _dim(call, call["dim"])
    if len(index) != 1:
        raise call.refuse(f"its index must have one dimension, got {list(index)}")
    dims, sizes = names_for("d", shape)
    output = (*dims[:dim], ("x",), *dims[dim + 1 :])
    return Factorization(
        (dims, (("x",),)), (output,), sizes | {"x": index[0]}, fixed=frozenset({f"d{dim}"}), terms=LINEAR
    )


def _topk(call: OpCall) -> Factorization:
    dim = _dim(call, call["dim"])
    rule = _changed(call, dim, [call["k"]])
    return Factorization(rule.inputs, rule.outputs * 2, rule.sizes, fixed=rule.fixed)


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
    if not call["minlength"] or call["weights"] is not None:
        raise call.refuse("bincount of a DTensor needs minlength, which must exceed every value, and no weights")
    dims, sizes = names_for("d", call.tensors[0].shape)
    return Factorization(
        (dims,),
        ((("bins",),),),
        sizes | {"bins": call["minlength"]},
        fixed=frozenset({"bins"}),
        reduced=dict.fromkeys(sizes, "sum"),
    )
