"""The permutation of tokens: rows are copied and sorted by expert, or by destination rank, and summed back.

All sums over the copies of a token are in the order of slots. Unlike those of a scatter-add on a GPU, their results do
not depend on scheduling.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_moe.routing import is_on_host

Tensor = Any


class TokenPermutation:
    """A linear map that copies each row once for each of its keys and sorts the copies by key; and its transpose.

    Copies with equal keys stay in the order of rows. A key is an expert or a destination rank. A row has `slots` keys
    (usually `top_k`), some of which may be empty. Sorting is deferred to the first use, since fused experts may compute
    the order themselves.

    Args:
        keys: int `[rows, slots]`; empty slots hold a key larger than all others.
        num_copies: number of slots that are not empty.
        order: all slots sorted by key and their rows (`sorted_slots`, `rows_of_slots`), if these were computed before
            the number of copies was known.

    Attributes:
        keys: the argument.

    Examples:
        >>> keys = platform.from_numpy(np.array([[2, 0], [1, 2]]))  # two rows, a copy for each of two keys
        >>> permutation = TokenPermutation(platform, keys, num_copies=4)
        >>> platform.to_numpy(permutation.rows).tolist()  # in key order
        [0, 1, 0, 1]
    """

    def __init__(
        self, platform: Platform, keys: Tensor, num_copies: int, order: tuple[Tensor, Tensor] | None = None
    ) -> None:
        self.platform = platform
        self.keys = keys
        self.num_rows, self.num_slots = (int(size) for size in keys.shape)
        self.num_copies = num_copies
        self._all_rows: Tensor | None = None
        if order is not None:
            self._order, self._all_rows = order

    @functools.cached_property
    def entries(self) -> Tensor:
        """Flat index of the slot of each copy, int `[copies]`."""
        return self.platform.ops.narrow(self._order, 0, 0, self.num_copies)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Index of the copy of each slot, int `[rows * slots]`; `num_copies` for empty slots."""
        ops = self.platform.ops
        # The argsort of a permutation is its inverse: it maps slots to positions in the sorted order. Empty slots sort
        # last, and share the first position behind all copies.
        return ops.clamp(ops.argsort(self._order, 0, stable=True), max=self.num_copies)

    @functools.cached_property
    def rows(self) -> Tensor:
        """Index of the row of each copy, int `[copies]`."""
        if self._all_rows is not None:
            return self.platform.ops.narrow(self._all_rows, 0, 0, self.num_copies)
        # Of the copies alone, which are few among the slots where experts choose their tokens.
        return rows_of_slots(self.platform, self.entries, self.num_rows, self.num_slots)

    @functools.cached_property
    def _order(self) -> Tensor:
        return sorted_slots(self.platform, self.keys)

    def permute(self, x: Tensor) -> Tensor:
        """Copy rows into key order: `[rows, dim]` -> `[copies, dim]`; backward is `unpermute`."""
        return self.platform.linear_map(x, self.copies, self.sums)

    def unpermute(self, y: Tensor) -> Tensor:
        """Sum the copies of each row: `[copies, dim]` -> `[rows, dim]`; backward is `permute`."""
        return self.platform.linear_map(y, self.sums, self.copies)

    def permute_scores(self, scores: Tensor) -> Tensor:
        """Gather the score of each copy: `[rows, slots]` -> `[copies, 1]`; differentiable."""
        shape = (self.num_rows, self.num_slots)
        ops = self.platform.ops

        def forward(scores: Tensor) -> Tensor:
            flat = ops.reshape(scores, (self.num_rows * self.num_slots, 1))
            return self._select(flat, self.entries, self.num_copies)

        return self.platform.linear_map(scores, forward, lambda g: ops.reshape(self._at_slots(g), shape))

    def copies(self, x: Tensor) -> Tensor:
        """`permute` without autograd."""
        return self._select(x, self.rows, self.num_copies)

    def sums(self, y: Tensor) -> Tensor:
        """`unpermute` without autograd."""
        if self.num_slots == 1:
            return self._at_slots(y)
        embedding_bag = self._embedding_bag(y)
        if embedding_bag is not None and self.num_copies:
            copies, starts = self._bags
            return embedding_bag(copies, y, starts, mode="sum")
        ops = self.platform.ops
        return ops.sum(ops.reshape(self._at_slots(y), (self.num_rows, self.num_slots, y.shape[1])), 1)

    def _embedding_bag(self, y: Tensor) -> Callable[..., Tensor] | None:
        """Return a function that gathers and sums in one pass, without a tensor of all slots. None: there is none."""
        # In 16 bits, torch on the host rounds ties up instead of to even.
        applies = is_on_host(self.platform, y) and self.platform.dtype_name(y.dtype) in ("float32", "float64")
        return self.platform.operation("embedding_bag") if applies else None

    @functools.cached_property
    def _bags(self) -> tuple[Tensor, Tensor]:
        """Indices of the copies of all rows in slot order, int `[copies]`, and the first one of each row, `[rows]`."""
        ops = self.platform.ops
        counts = ops.bincount(self.rows, self.num_rows)
        # Entries are flat indices of slots, so their order is that of rows, and of slots within each row.
        return ops.argsort(self.entries, 0, stable=True), ops.sub(ops.cumsum(counts, 0), counts)

    def _at_slots(self, y: Tensor) -> Tensor:
        """Gather the copy of each slot, zeros for empty slots: `[copies, dim]` -> `[rows * slots, dim]`."""
        size = self.num_rows * self.num_slots
        if self.num_copies < size:
            # Empty slots read the row of zeros appended here.
            y = self.platform.ops.cat([y, self.platform.ops.zeros((1, y.shape[1]), y.dtype)], 0)
        return self._select(y, self.positions, size)

    def _select(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        """Gather rows. An empty index returns zeros without rows, because `x` may have no rows to index."""
        if size == 0:
            return self.platform.zeros((0, x.shape[1]), x.dtype)
        return self.platform.ops.index_select(x, 0, index)


def sorted_slots(platform: Platform, keys: Tensor) -> Tensor:
    """Return the flat indices of all slots of `keys` `[rows, slots]`, sorted by key."""
    # Stable, so that copies with equal keys keep the order of rows: every sum over them has one order.
    return platform.ops.argsort(platform.ops.reshape(keys, (-1,)), 0, stable=True)


def rows_of_slots(platform: Platform, slots: Tensor, num_rows: int, num_slots: int) -> Tensor:
    """Return the row of each slot, given flat indices of slots of keys `[num_rows, num_slots]`."""
    if num_slots == 1 or slots.shape[0] == 0:
        return slots
    ops = platform.ops
    # The row of a slot is its number divided by `num_slots`; a gather from a table avoids the integer division.
    rows = ops.repeat_interleave(ops.arange(num_rows, platform.dtype("int64")), num_slots, 0)
    return ops.index_select(rows, 0, slots)
