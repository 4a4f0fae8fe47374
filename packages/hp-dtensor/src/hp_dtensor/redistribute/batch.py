"""Several redistributions at once: steps of one kind over the same ranks share one collective.

Plans run in lock-step: the first steps of all plans, then the second ones. Which of them share a collective depends on
the plans alone and not on the data of a rank, so every rank calls the same collectives.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.collectives import Collective
from hp_dtensor.redistribute.exchange import Exchange, Received
from hp_dtensor.redistribute.plan import HINT_IF_RANKS_DIFFER, RedistributePlan, Step

Tensor = Any

BUCKET_BYTES = 32 * 2**20


def run_data_together(
    plans: Sequence[RedistributePlan], locals_: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES
) -> list[Tensor]:
    """Return the result of `run_data` for each plan and its local tensor. Plans share collectives where they can.

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
    outgoing: list[list[Tensor]] = [[] for _ in range(group.size)]
    incoming: list[list[int]] = [[] for _ in range(group.size)]
    for step, local in zip(steps, locals_, strict=True):
        for i, message in step.outgoing(local):
            outgoing[i].append(platform.ops.reshape(message, (-1,)))
        for i, _, shape in step.incoming:
            incoming[i].append(math.prod(shape))
    sends = [platform.contiguous(platform.ops.cat(messages, 0)) if messages else None for messages in outgoing]
    device = platform.device_of(like)
    receives = [platform.empty((sum(sizes),), like.dtype, device) if sizes else None for sizes in incoming]
    group.exchange(sends, receives)
    passed = [0] * group.size
    results = []
    for step, local in zip(steps, locals_, strict=True):
        received: Received = {}
        for i, peer, shape in step.incoming:
            numel = math.prod(shape)
            received[peer] = platform.ops.reshape(
                _owned_copy(platform, platform.ops.narrow(receives[i], 0, passed[i], numel)), shape
            )
            passed[i] += numel
        results.append(step.assemble(local, received))
    return results


def _owned_copy(platform: Platform, view: Tensor) -> Tensor:
    """Return a contiguous copy of a view of a bucket.

    The result then neither keeps the bucket alive nor shares its version counter.
    """
    return platform.contiguous(platform.ops.clone(view))
