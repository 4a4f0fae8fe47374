"""Joining tensors along a dimension, which is whole, and splitting along one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_dtensor.rules.engine.factors import LINEAR, Dims, Factorization, PartialResults, uncut
from hp_dtensor.rules.engine.registry import OpCall, RuleRegistry, names_for


def register(registry: RuleRegistry) -> None:
    registry.register("cat concat", "tensors dim=0", _cat)
    registry.register("stack", "tensors dim=0", _stack)
    registry.register("split", "input sizes dim=0", _split, view=True)
    registry.register("chunk", "input chunks dim=0", _chunk, view=True)
    registry.register("split_with_sizes_copy unsafe_split", "input sizes dim=0", _split)
    registry.register("unsafe_chunk", "input chunks dim=0", _chunk)
    registry.register("unbind_copy", "input dim=0", _unbind)
    registry.register("unbind", "input dim=0", _unbind, view=True)


def _cat(call: OpCall) -> Factorization:
    shapes = [spec.shape for spec in call.tensors]
    # torch passes over tensors of the shape (0,), with which key-value caches begin.
    joined = [shape for shape in shapes if shape != (0,)] or shapes
    first = joined[0]
    dim = call["dim"] + len(first) if call["dim"] < 0 else call["dim"]
    if not 0 <= dim < len(first):
        raise call.refuse(f"dimension {call['dim']} of a {len(first)}-dimensional tensor")
    if any(len(s) != len(first) or s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in joined):
        raise call.refuse("shapes differ outside the dimension that is joined")
    dims, sizes = names_for("d", first)
    own = {f"i{i}": 0 if shape == (0,) else shape[dim] for i, shape in enumerate(shapes)}
    own["joined"] = sum(own.values())
    inputs = tuple(
        ((f"i{i}",),) if shape == (0,) else (*dims[:dim], (f"i{i}",), *dims[dim + 1 :])
        for i, shape in enumerate(shapes)
    )
    output = (*dims[:dim], ("joined",), *dims[dim + 1 :])
    del sizes[f"d{dim}"]
    return Factorization(
        inputs, (output,), sizes | own, cuts=uncut(own), partial=PartialResults(terms=_each(len(shapes)))
    )


def _each(count: int) -> tuple[frozenset[int], ...]:
    return tuple(frozenset({i}) for i in range(count))


def _stack(call: OpCall) -> Factorization:
    shapes = {spec.shape for spec in call.tensors}
    if len(shapes) > 1:
        raise call.refuse(f"tensors to stack have one shape, got {' and '.join(map(str, map(list, sorted(shapes))))}")
    dims, sizes = names_for("d", call.tensors[0].shape)
    dim, count = call.dim(call["dim"], extra=1), len(call.tensors)
    output = (*dims[:dim], ("stacked",), *dims[dim:])
    return Factorization(
        (dims,) * count,
        (output,),
        sizes | {"stacked": count},
        cuts=uncut({"stacked"}),
        partial=PartialResults(terms=_each(count)),
    )


def with_lengths(call: OpCall, dim: int, lengths: Sequence[int], **options: Any) -> Factorization:
    """One output per length, each the input with dimension `dim` replaced by one of that length."""
    dims, sizes = names_for("d", call.tensors[0].shape)
    names = [f"o{i}" for i in range(len(lengths))]
    outputs = tuple((*dims[:dim], (name,), *dims[dim + 1 :]) for name in names)
    fixed = frozenset({f"d{dim}", *names})
    all_sizes = {**sizes, **dict(zip(names, lengths, strict=True))}
    return Factorization((dims,), outputs, all_sizes, cuts=uncut(fixed), **options)


def _split(call: OpCall) -> Factorization:
    dim = call.dim(call["dim"])
    total, sizes = call.tensors[0].shape[dim], call["sizes"]
    lengths = _pieces(total, sizes) if isinstance(sizes, int) else list(sizes)
    if sum(lengths) != total:
        raise call.refuse(f"pieces {lengths} do not sum to {total}")
    return with_lengths(call, dim, lengths, partial=LINEAR)


def _chunk(call: OpCall) -> Factorization:
    dim = call.dim(call["dim"])
    total, chunks = call.tensors[0].shape[dim], call["chunks"]
    pieces = _pieces(total, -(-total // chunks)) if total else [0] * chunks
    return with_lengths(call, dim, pieces, partial=LINEAR)


def _pieces(total: int, length: int) -> list[int]:
    return [min(length, total - start) for start in range(0, total, length)] or [0]


def _unbind(call: OpCall) -> Factorization:
    dims, sizes = names_for("d", call.tensors[0].shape)
    dim = call.dim(call["dim"])
    output: Dims = (*dims[:dim], *dims[dim + 1 :])
    count = call.tensors[0].shape[dim]
    return Factorization((dims,), (output,) * count, sizes, cuts=uncut({f"d{dim}"}), partial=LINEAR)
