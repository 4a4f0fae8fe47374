"""Steps that are one collective on blocks of equal size, also for several tensors at once."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from hp_dtensor.comm.collectives import all_reduce_data, exchange_packed
from hp_dtensor.comm.process_group import Work
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.exchange import Exchange
from hp_dtensor.redistribute.plan import HINT_IF_RANKS_DIFFER, RedistributePlan, Step, after
from hp_dtensor.redistribute.segments import Placements, sharded_dim

Tensor = Any


class Collective(Step):
    """A collective of equal blocks in dim 0, `blocks_sent` in its input and `blocks_received` in its output."""

    op = "sum"

    def run(self, local: Tensor) -> Tensor:
        sent = self.pack(local)
        received = self.empty_output(sent)
        self.communicate(received, sent, False).wait()
        return self.unpack(received)

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        sent = self.pack(local)
        received = self.empty_output(sent)
        return after(self.communicate(received, sent, True), lambda: self.unpack(received))

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

    def run(self, local: Tensor) -> Tensor:
        return all_reduce_data(local, self.mesh.group_over(self.axes), self.op)

    def pack(self, local: Tensor) -> Tensor:
        # An all-reduce writes to its input, which may be an activation that autograd has saved. So it gets a copy.
        return _owned_copy(self.platform, local)

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
    """Return the tensor whose shards are `blocks`; `splits` has (dimension, shards) of each axis, outermost first."""
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


BUCKET_BYTES = 32 * 2**20


def run_data_together(
    plans: Sequence[RedistributePlan], locals_: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES
) -> list[Tensor]:
    """Return the result of `run_data` for each plan and its local tensor, on a rank of all plans' meshes.

    Plans share collectives where they can. All ranks must pass the same plans in the same order.

    Args:
        bucket_bytes: the most bytes that a rank sends in one collective. A larger tensor is sent alone and not copied.
    """
    data = list(locals_)
    steps = [plan.steps for plan in plans]
    for position in range(max(map(len, steps), default=0)):
        due = {index: own[position] for index, own in enumerate(steps) if position < len(own)}
        for indices in _buckets(due, data, bucket_bytes):
            results = _run_together([due[index] for index in indices], [data[index] for index in indices])
            for index, result in zip(indices, results, strict=True):
                data[index] = result
    return data


def _buckets(due: dict[int, Step], data: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[int]]:
    """Yield the indices of steps that share a collective."""
    filling: dict[Hashable, tuple[float, list[int]]] = {}
    for index, step in due.items():
        key = _kind(step, data[index])
        # Removed and inserted again, so that the dictionary is ordered by the latest step of each kind. Ranks must run
        # the collectives in the same order, and this order follows from the plans alone.
        held, indices = filling.pop(key, (0.0, []))
        if indices and held + step.wire_bytes > bucket_bytes:
            yield indices
            held, indices = 0.0, []
        filling[key] = held + step.wire_bytes, [*indices, index]
    for _, indices in filling.values():
        yield indices


def _kind(step: Step, x: Tensor) -> Hashable:
    """Return a key that is equal for steps that may share a collective."""
    if isinstance(step, Collective):
        return type(step), step.group, step.op, x.dtype, step.platform.device_of(x)
    if isinstance(step, Exchange) and step.axes:
        return Exchange, step.group, x.dtype, step.platform.device_of(x)
    # A key that equals no other: local changes run alone, and so do reductions to owners, which sum in rank order.
    return object()


def _run_together(steps: Sequence[Any], locals_: Sequence[Tensor]) -> list[Tensor]:
    """Run steps of one kind as one collective, and add rank and mesh to its errors."""
    first = steps[0]
    try:
        if len(steps) == 1:
            return [first.run(locals_[0])]
        return (_collect if isinstance(first, Collective) else _exchange)(steps, locals_)
    except Exception as error:
        error.add_note(
            f"On rank {first.mesh.world.rank}, in {first.name} of a batch of {len(steps)} redistributions on mesh "
            f"{first.mesh.describe()}. {HINT_IF_RANKS_DIFFER}"
        )
        raise


def _collect(steps: Sequence[Collective], locals_: Sequence[Tensor]) -> list[Tensor]:
    """Run several steps as one collective by concatenating the blocks of all tensors."""
    first = steps[0]
    platform, ops, num_blocks = first.platform, first.platform.ops, first.blocks_sent
    shapes = []
    blocks = []
    for step, local in zip(steps, locals_, strict=True):
        sent = step.pack(local)
        shapes.append(tuple(sent.shape))
        blocks.append(ops.reshape(sent, (num_blocks, math.prod(sent.shape) // num_blocks)))
    joint = platform.contiguous(ops.cat(blocks, 1))
    # Free the packed copies before the collective allocates its result: the peak is two buckets, not three.
    del blocks
    received = first.empty_output(joint)
    first.communicate(received, joint, False).wait()
    results, start = [], 0
    for step, shape in zip(steps, shapes, strict=True):
        length = math.prod(shape) // num_blocks
        blocks_of_step = _owned_copy(platform, ops.narrow(received, 1, start, length))
        results.append(step.unpack(ops.reshape(blocks_of_step, step.output_shape(shape))))
        start += length
    return results


def _exchange(steps: Sequence[Exchange], locals_: Sequence[Tensor]) -> list[Tensor]:
    """Run several steps as one exchange by concatenating all messages from one rank to another."""
    platform, group, like = steps[0].platform, steps[0].group, locals_[0]
    sends: list[list[Tensor]] = [[] for _ in range(group.size)]
    shapes: list[list[tuple[int, ...]]] = [[] for _ in range(group.size)]
    for step, local in zip(steps, locals_, strict=True):
        for i, message in step.outgoing(local):
            sends[i].append(message)
        for i, _, shape in step.incoming:
            shapes[i].append(shape)
    arrived = list(map(iter, exchange_packed(group, sends, shapes, like.dtype, platform.device_of(like))))
    return [
        step.assemble(local, {peer: _owned_copy(platform, next(arrived[i])) for i, peer, _ in step.incoming})
        for step, local in zip(steps, locals_, strict=True)
    ]


def _owned_copy(platform: Platform, view: Tensor) -> Tensor:
    """Return a contiguous copy, which neither keeps a bucket alive nor shares its version counter."""
    return platform.contiguous(platform.ops.clone(view))
