"""Steps that are one collective of equal blocks."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.process_group import Work
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.plan import Step, after
from hp_dtensor.redistribute.segments import Placements

Tensor = Any


class Collective(Step):
    """A collective of equal blocks, one after the other in dim 0: `blocks_sent` go out, `blocks_landed` come in."""

    op = "sum"

    def run(self, local: Tensor) -> Tensor:
        return self._begin(local, False)()

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        return self._begin(local, True)

    def _begin(self, local: Tensor, async_op: bool) -> Callable[[], Tensor]:
        sent = self.pack(local)
        landed = self.landing(sent)
        return after(self.communicate(landed, sent, async_op), lambda: self.unpack(landed))

    @property
    @abstractmethod
    def blocks_sent(self) -> int: ...

    @property
    @abstractmethod
    def blocks_landed(self) -> int: ...

    @abstractmethod
    def pack(self, local: Tensor) -> Tensor:
        """Return the blocks that go out, contiguous."""

    @abstractmethod
    def communicate(self, landed: Tensor, sent: Tensor, async_op: bool) -> Work:
        """Start the collective, which may write to `sent` too."""

    def unpack(self, landed: Tensor) -> Tensor:
        """Return the step's result from the blocks that have come in."""
        return landed

    def landing_shape(self, sent: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the blocks that come in for blocks of shape `sent`."""
        return (sent[0] // self.blocks_sent * self.blocks_landed, *sent[1:])

    def landing(self, sent: Tensor) -> Tensor:
        """Return memory for the blocks that come in."""
        platform = self.platform
        return platform.empty(self.landing_shape(sent.shape), sent.dtype, platform.device_of(sent))

    @functools.cached_property
    def _source_digits(self) -> list[tuple[int, int]]:
        return self._digits(self.source)

    @functools.cached_property
    def _target_digits(self) -> list[tuple[int, int]]:
        return self._digits(self.target)

    def _digits(self, placements: Placements) -> list[tuple[int, int]]:
        """Return (dimension, number of parts) for each axis of the step, all of which cut one."""
        return [(placements[a].dim, self.mesh.shape[a]) for a in self.axes]  # type: ignore[attr-defined]


class AllGather(Collective):
    """All-gather: equal shards, innermost in their dimensions, become whole on every rank of the axes."""

    blocks_sent = 1

    @property
    def blocks_landed(self) -> int:
        return self.group.size

    def pack(self, local: Tensor) -> Tensor:
        return self.platform.contiguous(local)

    def communicate(self, landed: Tensor, sent: Tensor, async_op: bool) -> Work:
        return self.group.all_gather_into(landed, sent, async_op)

    def unpack(self, landed: Tensor) -> Tensor:
        return _digits_to_dims(self.platform, landed, self._source_digits)


class ReduceScatter(Collective):
    """Reduce-scatter: partial results become equal shards, innermost in their dimensions."""

    blocks_landed = 1

    @property
    def blocks_sent(self) -> int:
        return self.group.size

    def pack(self, local: Tensor) -> Tensor:
        return _dims_to_digits(self.platform, local, self._target_digits)

    def communicate(self, landed: Tensor, sent: Tensor, async_op: bool) -> Work:
        return self.group.reduce_scatter_into(landed, sent, self.op, async_op)


class AllReduce(Collective):
    """All-reduce: partial results are reduced on every rank of the axes."""

    blocks_sent = blocks_landed = 1

    def pack(self, local: Tensor) -> Tensor:
        # An all-reduce writes to its input, which here may be an activation that autograd has saved: a copy of its own.
        return self.platform.contiguous(self.platform.ops.clone(local))

    def landing_shape(self, sent: Sequence[int]) -> tuple[int, ...]:
        return tuple(sent)

    def landing(self, sent: Tensor) -> Tensor:
        return sent

    def communicate(self, landed: Tensor, sent: Tensor, async_op: bool) -> Work:
        return self.group.all_reduce(landed, self.op, async_op)


class AllToAll(Collective):
    """All-to-all: equal shards of one dimension, innermost there, become equal shards of another, innermost there."""

    @property
    def blocks_sent(self) -> int:
        return self.mesh.shape[self.axes[0]]

    blocks_landed = blocks_sent

    def pack(self, local: Tensor) -> Tensor:
        return _dims_to_digits(self.platform, local, self._target_digits)

    def communicate(self, landed: Tensor, sent: Tensor, async_op: bool) -> Work:
        n = self.blocks_sent
        rows = (sent.shape[0] // n,) * n
        return self.group.all_to_all_into(landed, sent, rows, rows, async_op)

    def unpack(self, landed: Tensor) -> Tensor:
        return _digits_to_dims(self.platform, landed, self._source_digits)


def _digits_to_dims(platform: Platform, blocks: Tensor, digits: Sequence[Any]) -> Tensor:
    """Return the tensor of which `blocks` holds equal blocks, one after the other in dim 0, each put where its digits
    (dim, number) say.
    """
    # Cut along dim 0 alone, blocks in rank order are the tensor itself.
    if all(dim == 0 for dim, _ in digits):
        return blocks
    counts = [n for _, n in digits]
    shape = (blocks.shape[0] // math.prod(counts), *blocks.shape[1:])
    x = platform.ops.reshape(blocks, (*counts, *shape))
    order, sizes = [], []
    for dim, size in enumerate(shape):
        mine = [i for i, (d, _) in enumerate(digits) if d == dim]
        order += [*mine, len(counts) + dim]
        sizes.append(size * math.prod(counts[i] for i in mine))
    return platform.contiguous(platform.ops.reshape(platform.ops.permute(x, order), sizes))


def _dims_to_digits(platform: Platform, x: Tensor, digits: Sequence[Any]) -> Tensor:
    """Return a copy of `x` as equal blocks, one after the other in dim 0 in the order of their digits (dim, number)."""
    expanded: list[int] = []
    block: list[int] = []
    where: dict[int, int] = {}
    for dim, size in enumerate(x.shape):
        for i, (d, n) in enumerate(digits):
            if d == dim:
                where[i] = len(expanded)
                expanded.append(n)
                size //= n
        block.append(len(expanded))
        expanded.append(size)
    order = [*(where[i] for i in range(len(digits))), *block]
    num_blocks = math.prod(n for _, n in digits)
    first, *others = (expanded[i] for i in block)
    x = platform.ops.reshape(x, expanded)
    # A permutation that moves only dimensions of one element is a view: `contiguous` would return the caller's own
    # memory, and a reduce-scatter may overwrite what it sends.
    if [i for i in order if expanded[i] > 1] == [i for i in range(len(order)) if expanded[i] > 1]:
        x = platform.ops.clone(x)  # else the permutation copies
    x = platform.contiguous(platform.ops.permute(x, order))
    return platform.ops.reshape(x, (num_blocks * first, *others))
