"""Rules of operations that move elements along a dimension: cat, stack, split, pad, repeat, diagonals, roll, flip.

The dimensions whose size changes are unsharded: the shards of the result would hold rows of other ranks' shards. They
are gathered, which is simpler than an exchange of rows, but sends up to ranks - 1 times as much. `roll` and `flip` keep
the input's sharding: ranks send each other the rows that change their owner, at most what each rank holds.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.comm.collectives import RowMove
from hp_dtensor.rules.factors import (
    LINEAR,
    Dim,
    Dims,
    Factorization,
    LocalCall,
    LocalWork,
    PartialResults,
    ShardingLimits,
    Span,
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


Tensor = Any
Targets = Callable[[Span], list[Span]]
"""Span of a shard -> the spans of global positions to which its rows move, in the order of the rows."""


def _move_rule(call: OpCall, dims: Sequence[int], local: Callable[[LocalCall], Tensor]) -> Factorization:
    """Return the rule of an operation that moves rows along `dims`; `local` runs where one of these is sharded."""
    # Ranks compute who sends which rows to whom without a message, so each of them needs the spans of all shards.
    names, sizes = dim_factors("d", call.tensors[0].shape)
    factors = [f"d{dim}" for dim in dims]
    return Factorization(
        (names,),
        (names,),
        sizes,
        limits=ShardingLimits(known_spans=frozenset(factors)),
        partial=LINEAR,
        work=LocalWork(by_factor=dict.fromkeys(factors, local)),
    )


def _roll(call: OpCall) -> Factorization:
    """Roll along dimensions. Without any, torch rolls the flattened tensor, which must then be unsharded if n-D."""
    (spec,) = call.tensors
    dims, shifts = call["dims"], call["shifts"]
    if dims is None or dims == ():
        if spec.ndim != 1:
            rule = _move_rule(call, range(spec.ndim), _rolled_by({}))
            return replace(
                rule, limits=replace(rule.limits, fixed=frozenset(rule.sizes)), work=replace(rule.work, by_factor={})
            )
        dims = 0
    pairs = zip(*((value,) if isinstance(value, int) else tuple(value) for value in (shifts, dims)), strict=True)
    by_dim: dict[int, int] = {}
    for shift, dim in pairs:
        # A dimension may be given several times; rolls along it add up.
        by_dim[call.dim(dim)] = by_dim.get(call.dim(dim), 0) + shift
    return _move_rule(call, [*by_dim], _rolled_by(by_dim))


def _flip(call: OpCall) -> Factorization:
    dims = [call.dim(dim) for dim in call["dims"]]

    def flipped(local: LocalCall) -> Tensor:
        # Each rank flips its shard, then shards swap places: a span [a, b) of the input becomes [size - b, size - a).
        x = local.on(local.arguments["input"])
        for dim in dims:
            if f"d{dim}" in local.spans:

                def mirrored(span: Span, size: int = local.sizes[f"d{dim}"]) -> list[Span]:
                    return [(size - span[0] - span[1], span[1])]

                x = _move_shards(local, x, dim, mirrored)
        return x

    return _move_rule(call, dims, flipped)


def _rolled_by(by_dim: dict[int, int]) -> Callable[[LocalCall], Tensor]:
    """Return the local function that rolls each dimension by its shift."""

    def local(call: LocalCall) -> Tensor:
        ops, x = call.platform.ops, call.arguments["input"]
        for dim, shift in by_dim.items():
            size = call.sizes[f"d{dim}"]
            # The row that becomes the first one. The shift may be negative or larger than the dimension.
            first = -shift % size if size else 0
            if f"d{dim}" in call.spans:
                x = _move_shards(call, x, dim, functools.partial(_rolled_spans, first, size))
            elif first:
                x = ops.cat([ops.narrow(x, dim, first, size - first), ops.narrow(x, dim, 0, first)], dim)
        return x

    return local


def _rolled_spans(first: int, size: int, span: Span) -> list[Span]:
    """Return the new positions of the rows of `span` if position `first` becomes position 0."""
    start, length = span
    before = max(0, min(first, start + length) - start)
    return [(start + size - first, before), (start + before - first, length - before)]


def _move_shards(call: LocalCall, x: Tensor, dim: int, targets: Targets) -> Tensor:
    """Exchange rows of `dim` between ranks: those of each shard move to its `targets`. The sharding stays the same."""
    if f"d{dim}" not in call.all_spans:  # a rank outside the mesh
        return x
    group, spans = call.all_spans[f"d{dim}"]
    return collectives.move_rows(x, group, dim, row_moves(spans, [targets(span) for span in spans]))


def row_moves(spans: Sequence[Span], targets: Sequence[Sequence[Span]]) -> list[RowMove]:
    """Return the rows that ranks send each other if the rows of shard i go to targets[i] and the sharding stays."""
    # The owner of a position is found by bisection, so this costs O((ranks + moves) log ranks), whatever the lengths.
    holders = [(start, rank) for rank, (start, length) in enumerate(spans) if length]
    starts = [start for start, _ in holders]
    moves = []
    for source, ranges in enumerate(targets):
        row = 0
        for start, length in ranges:
            end = start + length
            while start < end:
                target = holders[bisect_right(starts, start) - 1][1]
                first, held = spans[target]
                count = min(end, first + held) - start
                moves.append(RowMove(source, row, target, start - first, count))
                row, start = row + count, start + count
    return moves
