"""`roll` and `flip` along cut dimensions: the result is cut as the input, and ranks send the rows that others need."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hp_dtensor.comm import collectives
from hp_dtensor.comm.collectives import RowMove
from hp_dtensor.rules.engine.factors import LINEAR, Cuts, Factorization, LocalWork, Part
from hp_dtensor.rules.engine.local_call import LocalCall
from hp_dtensor.rules.engine.registry import OpCall, RuleRegistry, names_for

Tensor = Any
Targets = Callable[[Part], list[Part]]
"""Where the rows of a part go: (start, length) ranges of positions, in the order of the rows."""


def register(registry: RuleRegistry) -> None:
    registry.register("roll", "input shifts dims=None", _roll)
    registry.register("flip", "input *dims", _flip)


def _moving(call: OpCall, dims: Sequence[int], local: Callable[[LocalCall], Tensor]) -> Factorization:
    names, sizes = names_for("d", call.tensors[0].shape)
    factors = [f"d{dim}" for dim in dims]
    return Factorization(
        (names,),
        (names,),
        sizes,
        cuts=Cuts(known=frozenset(factors)),
        partial=LINEAR,
        work=LocalWork(by_factor=dict.fromkeys(factors, local)),
    )


def _roll(call: OpCall) -> Factorization:
    """Without dimensions it rolls the flattened tensor, which must be whole unless it is flat."""
    (spec,) = call.tensors
    dims, shifts = call["dims"], call["shifts"]
    if dims is None or dims == ():
        if spec.ndim != 1:
            rule = _moving(call, range(spec.ndim), _rolled_by({}))
            return replace(
                rule, cuts=replace(rule.cuts, fixed=frozenset(rule.sizes)), work=replace(rule.work, by_factor={})
            )
        dims = 0
    pairs = zip(*((value,) if isinstance(value, int) else tuple(value) for value in (shifts, dims)), strict=True)
    by_dim: dict[int, int] = {}
    for shift, dim in pairs:
        by_dim[call.dim(dim)] = by_dim.get(call.dim(dim), 0) + shift
    return _moving(call, [*by_dim], _rolled_by(by_dim))


def _flip(call: OpCall) -> Factorization:
    dims = [call.dim(dim) for dim in call["dims"]]
    return _moving(call, dims, functools.partial(_flipped, dims))


def _rolled_by(by_dim: dict[int, int]) -> Callable[[LocalCall], Tensor]:
    def local(call: LocalCall) -> Tensor:
        ops, x = call.platform.ops, call.arguments["input"]
        for dim, shift in by_dim.items():
            size = call.sizes[f"d{dim}"]
            cut = -shift % size if size else 0
            if f"d{dim}" in call.spans:
                x = _moved(call, x, dim, functools.partial(_rolled_part, cut, size))
            elif cut:
                x = ops.cat([ops.narrow(x, dim, cut, size - cut), ops.narrow(x, dim, 0, cut)], dim)
        return x

    return local


def _rolled_part(cut: int, size: int, part: Part) -> list[Part]:
    """Position `cut` becomes the first."""
    start, length = part
    before = max(0, min(cut, start + length) - start)
    return [(start + size - cut, before), (start + before - cut, length - before)]


def _flipped(dims: Sequence[int], call: LocalCall) -> Tensor:
    x = call.on(call.arguments["input"])
    for dim in dims:
        if f"d{dim}" in call.spans:
            x = _moved(call, x, dim, functools.partial(_flipped_part, call.sizes[f"d{dim}"]))
    return x


def _flipped_part(size: int, part: Part) -> list[Part]:
    start, length = part
    return [(size - start - length, length)]


def _moved(call: LocalCall, x: Tensor, dim: int, targets: Targets) -> Tensor:
    if f"d{dim}" not in call.parts:  # a rank outside the mesh
        return x
    group, parts = call.parts[f"d{dim}"]
    return collectives.move_rows(x, group, dim, row_moves(parts, [targets(part) for part in parts]))


def row_moves(parts: Sequence[Part], targets: Sequence[Sequence[Part]]) -> list[RowMove]:
    """Return the rows that ranks send to each other, when the rows of part i go to targets[i] and are cut as before."""
    holders = [(start, rank) for rank, (start, length) in enumerate(parts) if length]
    starts = [start for start, _ in holders]
    moves = []
    for source, ranges in enumerate(targets):
        row = 0
        for start, length in ranges:
            end = start + length
            while start < end:
                target = holders[bisect_right(starts, start) - 1][1]
                first, held = parts[target]
                count = min(end, first + held) - start
                moves.append(RowMove(source, row, target, start - first, count))
                row, start = row + count, start + count
    return moves
