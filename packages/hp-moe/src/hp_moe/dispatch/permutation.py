"""Permutation of tokens into key order, and its transpose: two linear maps that are each other's backward.

Every sum runs over a row's copies in slot order. Results therefore do not depend on scheduling, which a
scatter-add on a GPU would.
"""

from __future__ import annotations

import functools
from typing import Any

from hp_dtensor.platform.interface import Platform

Tensor = Any


class TokenPermutation:
    """One copy of a row for each of its keys, sorted by key; copies with equal keys keep the order of rows.

    A key is what the copies are sorted by: an expert, or a destination rank. A row has `slots` of them
    (`top_k`, usually), not all of which need a copy.

    Args:
        keys: int `[rows, slots]`; a slot without a copy holds a key above all others.
        num_copies: number of slots with a copy.

    The orders are sorted when first asked for: fused experts may have a quicker way to them.

    Attributes:
        keys: as given.

    Example:
        >>> keys = platform.from_numpy(np.array([[2, 0], [1, 2]]))  # two rows, a copy for each of two keys
        >>> permutation = TokenPermutation(platform, keys, num_copies=4)
        >>> platform.to_numpy(permutation.rows).tolist()  # in key order
        [0, 1, 0, 1]
    """

    def __init__(self, platform: Platform, keys: Tensor, num_copies: int) -> None:
        self.platform = platform
        self.keys = keys
        self.num_rows, self.num_slots = (int(size) for size in keys.shape)
        self.num_copies = num_copies

    @functools.cached_property
    def entries(self) -> Tensor:
        """The flat index of each copy's slot, int `[copies]`."""
        return self.platform.ops.narrow(self._order, 0, 0, self.num_copies)

    @functools.cached_property
    def positions(self) -> Tensor:
        """The copy of each slot, int `[rows * slots]`; `num_copies` for a slot without one."""
        ops = self.platform.ops
        # The argsort of a permutation is its inverse: from slots to places in the sorted order.
        return ops.clamp(ops.argsort(self._order, 0, stable=True), max=self.num_copies)

    @functools.cached_property
    def rows(self) -> Tensor:
        """The row that each copy is of, int `[copies]`."""
        if self.num_slots == 1 or self.num_copies == 0:
            return self.entries
        ops = self.platform.ops
        rows = ops.arange(self.num_rows, self.platform.dtype("int64"))
        return ops.index_select(ops.repeat_interleave(rows, self.num_slots, 0), 0, self.entries)

    @functools.cached_property
    def _order(self) -> Tensor:
        """The flat indices of all slots, sorted by key."""
        ops = self.platform.ops
        # Stable, so that copies with equal keys keep the order of rows: every sum over them has one order.
        return ops.argsort(ops.reshape(self.keys, (self.num_rows * self.num_slots,)), 0, stable=True)

    def permute(self, x: Tensor) -> Tensor:
        """Copy rows into key order: `[rows, dim]` -> `[copies, dim]`; backward is `unpermute`."""
        return self.platform.linear_map(x, self._permute, self._unpermute)

    def unpermute(self, y: Tensor) -> Tensor:
        """Sum the copies of each row: `[copies, dim]` -> `[rows, dim]`; backward is `permute`."""
        return self.platform.linear_map(y, self._unpermute, self._permute)

    def permute_scores(self, scores: Tensor) -> Tensor:
        """Take the score of each copy's slot: `[rows, slots]` -> `[copies, 1]`; differentiable."""
        shape = (self.num_rows, self.num_slots)
        ops = self.platform.ops

        def forward(scores: Tensor) -> Tensor:
            flat = ops.reshape(scores, (self.num_rows * self.num_slots, 1))
            return self._select(flat, self.entries, self.num_copies)

        return self.platform.linear_map(scores, forward, lambda g: ops.reshape(self._at_slots(g), shape))

    def _permute(self, x: Tensor) -> Tensor:
        return self._select(x, self.rows, self.num_copies)

    def _unpermute(self, y: Tensor) -> Tensor:
        at_slots = self._at_slots(y)
        if self.num_slots == 1:
            return at_slots
        ops = self.platform.ops
        return ops.sum(ops.reshape(at_slots, (self.num_rows, self.num_slots, y.shape[1])), 1)

    def _at_slots(self, y: Tensor) -> Tensor:
        """Put copies back at their slots, zeros elsewhere: `[copies, dim]` -> `[rows * slots, dim]`."""
        size = self.num_rows * self.num_slots
        if self.num_copies < size:
            # A slot without a copy reads the row of zeros that is added at the end.
            y = self.platform.ops.cat([y, self.platform.ops.zeros((1, y.shape[1]), y.dtype)], 0)
        return self._select(y, self.positions, size)

    def _select(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        if size == 0:
            return self.platform.zeros((0, x.shape[1]), x.dtype)
        return self.platform.ops.index_select(x, 0, index)
