"""Tensors that cover stretches of tokens, put together where they overlap: results and gradients of blocks."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from hp_dtensor.parallel.attention.blocks import Rows
from hp_dtensor.platform.interface import Platform

Tensor: TypeAlias = Any
Tensors: TypeAlias = tuple[Tensor, ...]
Combine: TypeAlias = Callable[[Tensors, Tensors], Tensors]
"""Puts two tuples of tensors of the same tokens together. It may write into the first and return its very tensors."""
Missing: TypeAlias = Callable[[int, int], Tensors]
"""Makes the tensors of so many rows and tokens of which nothing was added."""


def of_tokens(platform: Platform, x: Tensor, start: int, stop: int) -> Tensor:
    """Return the stretch of `x` along dimension 2, that of tokens."""
    return x if stop - start == x.shape[2] else platform.ops.narrow(x, 2, start, stop - start)


def of_rows(platform: Platform, rows: Rows, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of the batch of each tensor."""
    if rows.stop is None:
        return tensors
    return tuple(platform.ops.narrow(x, 0, rows.start, rows.stop - rows.start) for x in tensors)


class Stretches:
    """Tensors `[batch, heads, tokens, ...]` of which each call of `add` gives a stretch of some rows' tokens.

    Rows of the batch are the same in every call, or the same stretches of them. What is added belongs to this object,
    which may write into its memory.

    Args:
        batch, tokens: the sizes of the whole.
    """

    def __init__(self, platform: Platform, combine: Combine, missing: Missing, batch: int, tokens: int) -> None:
        self._platform, self._combine, self._missing = platform, combine, missing
        self._batch, self._tokens = batch, tokens
        self._of_rows: dict[Rows, _Pieces] = {}

    def add(self, rows: Rows, start: int, stop: int, tensors: Tensors) -> None:
        """Combine `tensors` with what there is of these rows' tokens `start` to `stop`."""
        key = Rows(rows.start, rows.stop, ())
        if key not in self._of_rows:
            self._of_rows[key] = _Pieces(self._platform, self._combine)
        self._of_rows[key].add(start, stop, tensors)

    def whole(self) -> Tensors:
        """Return the tensors of all rows and tokens."""
        parts, at = [], 0
        for rows in sorted(self._of_rows, key=lambda each: each.start):
            stop = self._batch if rows.stop is None else rows.stop
            if at < rows.start:
                parts.append(self._missing(rows.start - at, self._tokens))
            missing = functools.partial(self._missing, stop - rows.start)
            parts.append(self._of_rows[rows].whole(self._tokens, missing))
            at = stop
        if at < self._batch or not parts:
            parts.append(self._missing(self._batch - at, self._tokens))
        return _joined(self._platform, parts, 0)

    def added_to(self, total: Tensors) -> Tensors:
        """Return `total`, the tensors of all rows and tokens, with everything combined into it."""
        if list(self._of_rows) == [Rows(0, None, ())]:
            return self._of_rows[Rows(0, None, ())].added_to(total, self._tokens)
        whole = self.whole()
        return self._combine(total, whole)


class _Pieces:
    """The tensors of some rows, as pieces that lie beside each other or apart: (start, stop, tensors), in order."""

    def __init__(self, platform: Platform, combine: Combine) -> None:
        self._platform, self._combine = platform, combine
        self._pieces: list[tuple[int, int, Tensors]] = []

    def add(self, start: int, stop: int, tensors: Tensors) -> None:
        first = bisect.bisect_right(self._pieces, start, key=lambda piece: piece[1])
        last = bisect.bisect_left(self._pieces, stop, key=lambda piece: piece[0])
        found: list[tuple[int, int, Tensors]] = []
        at = start
        for piece in self._pieces[first:last]:
            if at < piece[0]:
                found.append((at, piece[0], self._cut(tensors, start, at, piece[0])))
            a, b = max(start, piece[0]), min(stop, piece[1])
            found += self._combined(piece, a, b, self._cut(tensors, start, a, b))
            at = b
        if at < stop:
            found.append((at, stop, self._cut(tensors, start, at, stop)))
        self._pieces[first:last] = found

    def whole(self, tokens: int, missing: Callable[[int], Tensors]) -> Tensors:
        parts, at = [], 0
        for start, stop, tensors in self._pieces:
            if at < start:
                parts.append(missing(start - at))
            parts.append(tensors)
            at = stop
        if at < tokens or not parts:
            parts.append(missing(tokens - at))
        return _joined(self._platform, parts, 2)

    def added_to(self, total: Tensors, tokens: int) -> Tensors:
        sums = _Pieces(self._platform, self._combine)
        sums._pieces = [(0, tokens, total)]
        for piece in self._pieces:
            sums.add(*piece)
        return _joined(self._platform, [tensors for _, _, tensors in sums._pieces], 2)

    def _combined(
        self, piece: tuple[int, int, Tensors], a: int, b: int, tensors: Tensors
    ) -> list[tuple[int, int, Tensors]]:
        """Return what `piece` becomes with `tensors` of its tokens `a` to `b` combined into it."""
        start, stop, known = piece
        own = self._cut(known, start, a, b)
        result = self._combine(own, tensors)
        if all(x is y for x, y in zip(result, own, strict=True)):
            return [piece]  # the combination is in its memory
        before = [(start, a, self._cut(known, start, start, a))] if start < a else []
        after = [(b, stop, self._cut(known, start, b, stop))] if b < stop else []
        return [*before, (a, b, result), *after]

    def _cut(self, tensors: Tensors, start: int, a: int, b: int) -> Tensors:
        """Return the tokens `a` to `b` of tensors that begin at token `start`."""
        return tuple(of_tokens(self._platform, x, a - start, b - start) for x in tensors)


def _joined(platform: Platform, parts: Sequence[Tensors], dim: int) -> Tensors:
    if len(parts) == 1:
        return parts[0]
    return tuple(platform.ops.cat(list(each), dim) for each in zip(*parts, strict=True))
