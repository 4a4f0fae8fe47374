"""Rules of operations that move elements along a dimension: cat, stack, split, pad, repeat, diagonals, roll, flip.

The dimensions along which elements move are unsharded: the shards of the result would hold rows of other ranks'
shards. They are gathered, which is simpler than an exchange of rows, but sends up to ranks - 1 times as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.rules.factors import (
    LINEAR,
    Dim,
    Dims,
    Factorization,
    PartialResults,
    linear_rule,
    unsharded,
)
from hp_dtensor.rules.notation import line
from hp_dtensor.rules.registry import OpCall, RuleRegistry, dim_factors


def register(registry: RuleRegistry) -> None:
    registry.register("cat concat", "tensors dim=0", _cat)
    registry.register("stack", "tensors dim=0", _stack)
    registry.register("split", "input sizes dim=0", _split, view=True)
    registry.register("chunk", "input chunks dim=0", _chunk, view=True)
    registry.register("split_with_sizes_copy unsafe_split", "input sizes dim=0", _split)
    registry.register("unsafe_chunk", "input chunks dim=0", _chunk)
    registry.register("unbind", "input dim=0", _unbind, view=True, variants="_copy")
    registry.register("pad", "input pad mode=constant value=None", _pad)
    registry.register("repeat tile", "input *repeats", _repeat)
    registry.register("unfold", "input dimension size step", _unfold, view=True, variants="_copy")
    matrices = line("... rows! columns! -> ... rows columns", linear=True)
    registry.register("tril triu", "input diagonal=0", matrices, variants="_")
    registry.register("diagonal", "input offset=0 dim1=0 dim2=1", _diagonal, view=True, variants="_copy")
    registry.register("linalg_diagonal", "A * offset=0 dim1=-2 dim2=-1", _diagonal, view=True)
    registry.register("diag_embed", "input offset=0 dim1=-2 dim2=-1", _diag_embed)
    registry.register("roll", "input shifts dims=None", _roll)
    registry.register("flip", "input *dims", _flip)


def _cat(call: OpCall) -> Factorization:
    shapes = [spec.shape for spec in call.tensors]
    # torch ignores tensors of shape (0,), which empty key-value caches have.
    joined = [shape for shape in shapes if shape != (0,)] or shapes
    first = joined[0]
    dim = call["dim"] + len(first) if call["dim"] < 0 else call["dim"]
    if not 0 <= dim < len(first):
        raise call.refuse(f"dimension {call['dim']} of a {len(first)}-dimensional tensor")
    if any(len(s) != len(first) or s[:dim] + s[dim + 1 :] != first[:dim] + first[dim + 1 :] for s in joined):
        raise call.refuse("shapes differ outside the concatenated dimension")
    dims, sizes = dim_factors("d", first)
    # Each input has a factor of its own in the joined dimension: none of them is the same range of the result.
    own = {f"i{i}": 0 if shape == (0,) else shape[dim] for i, shape in enumerate(shapes)}
    own["joined"] = sum(own.values())
    inputs = tuple(
        ((f"i{i}",),) if shape == (0,) else (*dims[:dim], (f"i{i}",), *dims[dim + 1 :])
        for i, shape in enumerate(shapes)
    )
    output = (*dims[:dim], ("joined",), *dims[dim + 1 :])
    del sizes[f"d{dim}"]
    return Factorization(
        inputs, (output,), sizes | own, limits=unsharded(own), partial=PartialResults(terms=_each(len(shapes)))
    )


def _each(count: int) -> tuple[frozenset[int], ...]:
    """Return the terms of a sum of linear functions, each of one of `count` inputs (`PartialResults.terms`)."""
    return tuple(frozenset({i}) for i in range(count))


def _stack(call: OpCall) -> Factorization:
    shapes = {spec.shape for spec in call.tensors}
    if len(shapes) > 1:
        raise call.refuse(f"tensors to stack have one shape, got {' and '.join(map(str, map(list, sorted(shapes))))}")
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    dim, count = call.dim(call["dim"], extra=1), len(call.tensors)
    output = (*dims[:dim], ("stacked",), *dims[dim:])
    return Factorization(
        (dims,) * count,
        (output,),
        sizes | {"stacked": count},
        # A shard of the new dimension would be some of the tensors, each of which is spread over all ranks.
        limits=unsharded({"stacked"}),
        partial=PartialResults(terms=_each(count)),
    )


def with_lengths(call: OpCall, dim: int, lengths: Sequence[int], **options: Any) -> Factorization:
    """Return the rule of an operation whose outputs have the sizes `lengths` in dimension `dim`, which is unsharded."""
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    names = [f"o{i}" for i in range(len(lengths))]
    outputs = tuple((*dims[:dim], (name,), *dims[dim + 1 :]) for name in names)
    sizes |= zip(names, lengths, strict=True)
    # The borders of the outputs are not those of shards, so a shard of `dim` has rows of several outputs.
    return Factorization((dims,), outputs, sizes, limits=unsharded({f"d{dim}", *names}), **options)


def _split(call: OpCall) -> Factorization:
    dim = call.dim(call["dim"])
    total, sizes = call.tensors[0].shape[dim], call["sizes"]
    if isinstance(sizes, int) and sizes < 1:
        raise call.needs_replicated("its rule needs sizes of at least 1")
    lengths = _chunk_sizes(total, sizes) if isinstance(sizes, int) else list(sizes)
    if sum(lengths) != total:
        raise call.refuse(f"expected sizes that sum to {total}, got {lengths}")
    return with_lengths(call, dim, lengths, partial=LINEAR)


def _chunk(call: OpCall) -> Factorization:
    dim = call.dim(call["dim"])
    total, chunks = call.tensors[0].shape[dim], call["chunks"]
    if chunks < 1:
        raise call.needs_replicated("its rule needs at least one chunk")
    # torch may return fewer chunks than asked for, since all but the last have the size ceil(total / chunks).
    lengths = _chunk_sizes(total, -(-total // chunks)) if total else [0] * chunks
    return with_lengths(call, dim, lengths, partial=LINEAR)


def _chunk_sizes(total: int, length: int) -> list[int]:
    return [min(length, total - start) for start in range(0, total, length)] or [0]


def _unbind(call: OpCall) -> Factorization:
    dims, sizes = dim_factors("d", call.tensors[0].shape)
    dim = call.dim(call["dim"])
    output: Dims = (*dims[:dim], *dims[dim + 1 :])
    # Each output is one index of `dim`, which only one shard has.
    return linear_rule(dims, (output,) * call.tensors[0].shape[dim], sizes, {f"d{dim}"})


def _pad(call: OpCall) -> Factorization:
    """Pad with unsharded padded dimensions. `pad` holds (before, after) pairs from the last dimension backward."""
    shape, pad = call.tensors[0].shape, list(call["pad"])
    dims, sizes = dim_factors("d", shape)
    output = list(dims)
    fixed = set()
    for pair in range(len(pad) // 2):
        before, after = pad[2 * pair : 2 * pair + 2]
        dim = len(shape) - 1 - pair
        if before or after:
            sizes[f"o{dim}"] = shape[dim] + before + after
            fixed |= {f"d{dim}", f"o{dim}"}
            output[dim] = (f"o{dim}",)
    rule = linear_rule(dims, (tuple(output),), sizes, fixed)
    # Every rank would pad its contribution with the value, and the sum over ranks would have it as often.
    is_linear = call["mode"] == "constant" and not call["value"]
    return rule if is_linear else replace(rule, partial=PartialResults())


def _repeat(call: OpCall) -> Factorization:
    """Repeat along unsharded dimensions: the first shard of the result would need all shards of the input."""
    shape, repeats = call.tensors[0].shape, tuple(call["repeats"])
    # `tile` pads the repeats in front, as NumPy does; `repeat` needs one for each dimension.
    if call.name == "tile":
        repeats = (1,) * (len(shape) - len(repeats)) + repeats
    if len(repeats) < len(shape):
        raise call.needs_replicated("its rule needs a number of repeats for each dimension")
    dims, sizes = dim_factors("d", shape)
    aligned: Dims = (*((),) * (len(repeats) - len(shape)), *dims)
    output: list[Dim] = []
    for i, (dim, count) in enumerate(zip(aligned, repeats, strict=True)):
        sizes |= {f"r{i}": count}
        # Row-major, the copies are outermost: (copy, row). Only the outermost factor of a dimension may be sharded.
        output.append(dim if count == 1 else (f"r{i}", *dim))
    return linear_rule(dims, (tuple(output),), sizes, [f"r{i}" for i in range(len(repeats))])


def _unfold(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    dims, sizes = dim_factors("d", shape)
    dim = call.dim(call["dimension"])
    if call["step"] < 1:
        raise call.needs_replicated("its rule needs steps of at least 1")
    windows = (shape[dim] - call["size"]) // call["step"] + 1
    output = (*dims[:dim], ("windows",), *dims[dim + 1 :], ("window",))
    sizes |= {"windows": windows, "window": call["size"]}
    # Windows overlap, and those at a border have rows of two shards.
    return linear_rule(dims, (output,), sizes, {f"d{dim}", "windows", "window"})


def _diagonal(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    dims, sizes = dim_factors("d", shape)
    first, second, offset = call.dim(call["dim1"]), call.dim(call["dim2"]), call["offset"]
    rows, columns = shape[first] + min(offset, 0), shape[second] - max(offset, 0)
    sizes |= {"diagonal": max(0, min(rows, columns))}
    output = (*(dim for i, dim in enumerate(dims) if i not in (first, second)), ("diagonal",))
    # Element i needs row i and column i. Shard r of the rows has other elements than shard r of the diagonal.
    return linear_rule(dims, (output,), sizes, {f"d{first}", f"d{second}", "diagonal"})


def _diag_embed(call: OpCall) -> Factorization:
    shape = call.tensors[0].shape
    dims, sizes = dim_factors("d", shape)
    if {call["dim1"], call["dim2"]} - {-2, -1} or call["dim1"] == call["dim2"]:
        raise call.needs_replicated("its rule needs the diagonal in the last two dimensions")
    length = shape[-1] + abs(call["offset"])
    output = (*dims[:-1], ("row",), ("column",))
    return linear_rule(dims, (output,), sizes | {"row": length, "column": length}, {*dims[-1], "row", "column"})


def _roll(call: OpCall) -> Factorization:
    """Roll along dimensions. Without any, torch rolls the flattened tensor, so that all dimensions are unsharded."""
    ndim, dims = call.tensors[0].ndim, call["dims"]
    if dims is None or dims == ():
        return _reordered(call, range(ndim))
    return _reordered(call, [call.dim(dim) for dim in ([dims] if isinstance(dims, int) else dims)])


def _flip(call: OpCall) -> Factorization:
    return _reordered(call, [call.dim(dim) for dim in call["dims"]])


def _reordered(call: OpCall, dims: Iterable[int]) -> Factorization:
    names, sizes = dim_factors("d", call.tensors[0].shape)
    return linear_rule(names, (names,), sizes, [f"d{dim}" for dim in dims])
