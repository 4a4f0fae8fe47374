"""Copies of rows in key order, and the way back: two linear maps that are each other's dual.

Every sum runs over a row's copies in slot order, so results do not depend on scheduling: no scatter-add.
"""

from __future__ import annotations

from typing import Any

from hp_dtensor.platform.interface import Platform

Tensor = Any


class RowCopies:
    """One copy of a row for each of its keys, sorted by key; copies of one key keep the order of rows.

    Args:
        keys: int `[rows, slots]`; a slot without a copy holds a key above all others.
        num_copies: how many slots have one.

    Attributes:
        entries: int `[copies]`: flat index of each copy's slot.
        rows: int `[copies]`: the row that each copy is of.
        positions: int `[rows * slots]`: where a slot's copy is; `num_copies` where it has none.
    """

    def __init__(self, platform: Platform, keys: Tensor, num_copies: int) -> None:
        ops = platform.ops
        self.platform = platform
        self.num_rows, self.num_slots = (int(size) for size in keys.shape)
        self.num_copies = num_copies
        size = self.num_rows * self.num_slots
        order = ops.argsort(ops.reshape(keys, (size,)), 0, stable=True)
        self.entries = ops.narrow(order, 0, 0, num_copies)
        self.positions = ops.clamp(ops.argsort(order, 0, stable=True), max=num_copies)
        self.rows = self._rows_of_entries()

    def _rows_of_entries(self) -> Tensor:
        if self.num_slots == 1 or self.num_copies == 0:
            return self.entries
        ops = self.platform.ops
        rows = ops.arange(self.num_rows, self.platform.dtype("int64"))
        return ops.index_select(ops.repeat_interleave(rows, self.num_slots, 0), 0, self.entries)

    def replicate(self, x: Tensor) -> Tensor:
        """`[rows, dim]` -> `[copies, dim]`; backward is `reduce`."""
        return self.platform.linear_map(x, self._replicate, self._reduce)

    def reduce(self, y: Tensor) -> Tensor:
        """`[copies, dim]` -> `[rows, dim]`, the sum over each row's copies; backward is `replicate`."""
        return self.platform.linear_map(y, self._reduce, self._replicate)

    def pick(self, values: Tensor) -> Tensor:
        """`[rows, slots]` -> `[copies, 1]`, the value at each copy's slot; differentiable."""
        shape = (self.num_rows, self.num_slots)
        ops = self.platform.ops

        def forward(values: Tensor) -> Tensor:
            flat = ops.reshape(values, (self.num_rows * self.num_slots, 1))
            return self._select(flat, self.entries, self.num_copies)

        return self.platform.linear_map(values, forward, lambda g: ops.reshape(self._at_slots(g), shape))

    def _replicate(self, x: Tensor) -> Tensor:
        return self._select(x, self.rows, self.num_copies)

    def _reduce(self, y: Tensor) -> Tensor:
        at_slots = self._at_slots(y)
        if self.num_slots == 1:
            return at_slots
        ops = self.platform.ops
        return ops.sum(ops.reshape(at_slots, (self.num_rows, self.num_slots, y.shape[1])), 1)

    def _at_slots(self, y: Tensor) -> Tensor:
        """`[copies, dim]` -> `[rows * slots, dim]`, zeros where a slot has no copy."""
        size = self.num_rows * self.num_slots
        if self.num_copies < size:
            y = self.platform.ops.cat([y, self.platform.ops.zeros((1, y.shape[1]), y.dtype)], 0)
        return self._select(y, self.positions, size)

    def _select(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        if size == 0:
            return self.platform.zeros((0, x.shape[1]), x.dtype)
        return self.platform.ops.index_select(x, 0, index)
