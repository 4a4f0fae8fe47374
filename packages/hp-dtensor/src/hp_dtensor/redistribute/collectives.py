"""Steps that are one collective of the framework on blocks of equal size."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.process_group import Work
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.plan import Step, after
from hp_dtensor.redistribute.segments import Placements, sharded_dim

Tensor = Any


class Collective(Step):
    """A collective of equal blocks, concatenated in dim 0.

    Attributes:
        op: the reduction, for those that reduce.
        blocks_sent, blocks_received: number of blocks in its input and in its output.
    """

    op = "sum"

    def run(self, local: Tensor) -> Tensor:
        return self._launch(local, False)()

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        return self._launch(local, True)

    def _launch(self, local: Tensor, async_op: bool) -> Callable[[], Tensor]:
        sent = self.pack(local)
        received = self.empty_output(sent)
        return after(self.communicate(received, sent, async_op), lambda: self.unpack(received))

    @property
    @abstractmethod
    def blocks_sent(self) -> int: ...

    @property
    @abstractmethod
    def blocks_received(self) -> int: ...

    @abstractmethod
    def pack(self, local: Tensor) -> Tensor:
        """Return the input blocks, contiguous."""

    @abstractmethod
    def communicate(self, received: Tensor, sent: Tensor, async_op: bool) -> Work:
        """Start the collective. It may write to `sent` too."""

    def unpack(self, received: Tensor) -> Tensor:
        """Return the result of the step from the output blocks."""
        return received

    def output_shape(self, sent: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the output blocks for input blocks of shape `sent`."""
        return (sent[0] // self.blocks_sent * self.blocks_received, *sent[1:])

    def empty_output(self, sent: Tensor) -> Tensor:
        """Return memory for the output blocks."""
        platform = self.platform
        return platform.empty(self.output_shape(sent.shape), sent.dtype, platform.device_of(sent))

    @functools.cached_property
    def _source_splits(self) -> list[tuple[int, int]]:
        return self._splits(self.source)

    @functools.cached_property
    def _target_splits(self) -> list[tuple[int, int]]:
        return self._splits(self.target)

    def _splits(self, placements: Placements) -> list[tuple[int, int]]:
        """Return (tensor dimension, number of shards) for each axis of the step, all of which are sharded."""
        return [(sharded_dim(placements[a]), self.mesh.shape[a]) for a in self.axes]


class AllGather(Collective):
    """All-gather: equal shards, innermost in their dimensions, are replicated on every rank of the axes."""

    blocks_sent = 1

    @property
    def blocks_received(self) -> int:
        return self.group.size

    def pack(self, local: Tensor) -> Tensor:
        return self.platform.contiguous(local)

    def communicate(self, received: Tensor, sent: Tensor, async_op: bool) -> Work:
        return self.group.all_gather_into(received, sent, async_op)

    def unpack(self, received: Tensor) -> Tensor:
        return _blocks_to_tensor(self.platform, received, self._source_splits)


class ReduceScatter(Collective):
    """Reduce-scatter: partial results become equal shards, innermost in their dimensions."""

    blocks_received = 1

    @property
    def blocks_sent(self) -> int:
        return self.group.size

    def pack(self, local: Tensor) -> Tensor:
        return _tensor_to_blocks(self.platform, local, self._target_splits)

    def communicate(self, received: Tensor, sent: Tensor, async_op: bool) -> Work:
        return self.group.reduce_scatter_into(received, sent, self.op, async_op)


class AllReduce(Collective):
    """All-reduce: partial results are reduced on every rank of the axes."""

    blocks_sent = blocks_received = 1

    def pack(self, local: Tensor) -> Tensor:
        # An all-reduce writes to its input, which may be an activation that autograd has saved. So it gets a copy.
        return self.platform.contiguous(self.platform.ops.clone(local))

    def output_shape(self, sent: Sequence[int]) -> tuple[int, ...]:
        return tuple(sent)

    def empty_output(self, sent: Tensor) -> Tensor:
        return sent

    def communicate(self, received: Tensor, sent: Tensor, async_op: bool) -> Work:
        return self.group.all_reduce(received, self.op, async_op)


class AllToAll(Collective):
    """All-to-all: equal shards of one dimension, innermost there, become equal shards of another, innermost there."""

    @property
    def blocks_sent(self) -> int:
        return self.mesh.shape[self.axes[0]]

    blocks_received = blocks_sent

    def pack(self, local: Tensor) -> Tensor:
        return _tensor_to_blocks(self.platform, local, self._target_splits)

    def communicate(self, received: Tensor, sent: Tensor, async_op: bool) -> Work:
        n = self.blocks_sent
        rows = (sent.shape[0] // n,) * n
        return self.group.all_to_all_into(received, sent, rows, rows, async_op)

    def unpack(self, received: Tensor) -> Tensor:
        return _blocks_to_tensor(self.platform, received, self._source_splits)


def _blocks_to_tensor(platform: Platform, blocks: Tensor, splits: Sequence[tuple[int, int]]) -> Tensor:
    """Return the tensor whose shards are `blocks`, concatenated in dim 0 in rank order.

    Args:
        splits: (dimension, number of shards) of each axis, the outermost first.
    """
    # Sharded along dim 0 only, the blocks in rank order already are the tensor.
    if all(dim == 0 for dim, _ in splits):
        return blocks
    counts = [n for _, n in splits]
    shape = (blocks.shape[0] // math.prod(counts), *blocks.shape[1:])
    x = platform.ops.reshape(blocks, (*counts, *shape))
    order, sizes = [], []
    for dim, size in enumerate(shape):
        mine = [i for i, (d, _) in enumerate(splits) if d == dim]
        order += [*mine, len(counts) + dim]
        sizes.append(size * math.prod(counts[i] for i in mine))
    return platform.contiguous(platform.ops.reshape(platform.ops.permute(x, order), sizes))


def _tensor_to_blocks(platform: Platform, x: Tensor, splits: Sequence[tuple[int, int]]) -> Tensor:
    """Return a copy of `x` as its shards, concatenated in dim 0 in rank order: the inverse of `_blocks_to_tensor`."""
    expanded: list[int] = []
    block: list[int] = []
    where: dict[int, int] = {}
    for dim, size in enumerate(x.shape):
        for i, (d, n) in enumerate(splits):
            if d == dim:
                where[i] = len(expanded)
                expanded.append(n)
                size //= n
        block.append(len(expanded))
        expanded.append(size)
    order = [*(where[i] for i in range(len(splits))), *block]
    num_blocks = math.prod(n for _, n in splits)
    first, *others = (expanded[i] for i in block)
    x = platform.ops.reshape(x, expanded)
    # A permutation that moves only dimensions of one element leaves `x` contiguous, so `contiguous` would return the
    # caller's memory, which a reduce-scatter may overwrite.
    if [i for i in order if expanded[i] > 1] == [i for i in range(len(order)) if expanded[i] > 1]:
        x = platform.ops.clone(x)  # otherwise `contiguous` copies
    x = platform.contiguous(platform.ops.permute(x, order))
    return platform.ops.reshape(x, (num_blocks * first, *others))
