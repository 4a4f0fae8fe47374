"""Many redistributions at once: what their steps send over the same ranks goes in one collective.

Steps are taken position by position: the first ones of all plans, then the second ones. Which of them go together
depends on the plans alone, so every rank comes to the same collectives, whatever its shards hold.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.collectives import Collective
from hp_dtensor.redistribute.exchange import Exchange, Received
from hp_dtensor.redistribute.plan import IF_OTHERS_DIFFER, RedistributePlan, Step

Tensor = Any

BUCKET_BYTES = 32 * 2**20


def run_data_together(
    plans: Sequence[RedistributePlan], locals_: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES
) -> list[Tensor]:
    """Return the result of `run_data` for each plan and its local tensor, sharing collectives.

    Args:
        bucket_bytes: what is sent together at most, per rank; a tensor above that goes alone and is not copied.
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
    """Yield the indices of the steps that go together."""
    filling: dict[Hashable, tuple[float, list[int]]] = {}
    for index, step in due.items():
        key = _kind(step, data[index])
        # Popped and put back: the dictionary then lists the kinds by their latest step, alike on all ranks, for both
        # follow from the plans alone.
        held, indices = filling.pop(key, (0.0, []))
        if indices and held + step.wire_bytes > bucket_bytes:
            yield indices
            held, indices = 0.0, []
        filling[key] = held + step.wire_bytes, [*indices, index]
    for _, indices in filling.values():
        yield indices


def _kind(step: Step, x: Tensor) -> Hashable:
    """Return a key that is equal for steps which may share a collective."""
    if isinstance(step, Collective):
        return type(step), step.group, step.op, x.dtype, step.platform.device_of(x)
    if isinstance(step, Exchange) and step.axes:
        return Exchange, step.group, x.dtype, step.platform.device_of(x)
    # Equal to nothing else: local changes, and reductions by owners, whose sums must keep the order of ranks.
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
            f"{first.mesh.describe()}. {IF_OTHERS_DIFFER}"
        )
        raise


def _collect(steps: Sequence[Collective], locals_: Sequence[Tensor]) -> list[Tensor]:
    """Run steps as one collective, of which each block holds the blocks of all tensors, one after the other."""
    first = steps[0]
    platform, ops, num_blocks = first.platform, first.platform.ops, first.blocks_sent
    shapes = []
    blocks = []
    for step, local in zip(steps, locals_, strict=True):
        sent = step.pack(local)
        shapes.append(tuple(sent.shape))
        blocks.append(ops.reshape(sent, (num_blocks, math.prod(sent.shape) // num_blocks)))
    joint = platform.contiguous(ops.cat(blocks, 1))
    # The packed copies are not needed beside the joint one while the collective runs; the peak is two buckets, not
    # three.
    del blocks
    landed = first.landing(joint)
    first.communicate(landed, joint, False).wait()
    results, start = [], 0
    for step, shape in zip(steps, shapes, strict=True):
        length = math.prod(shape) // num_blocks
        part = _own(platform, ops.narrow(landed, 1, start, length))
        results.append(step.unpack(ops.reshape(part, step.landing_shape(shape))))
        start += length
    return results


def _exchange(steps: Sequence[Exchange], locals_: Sequence[Tensor]) -> list[Tensor]:
    """Run steps as one exchange, of which each message holds all that a rank gets, one tensor after the other."""
    platform, group, like = steps[0].platform, steps[0].group, locals_[0]
    leaving: list[list[Tensor]] = [[] for _ in range(group.size)]
    arriving: list[list[int]] = [[] for _ in range(group.size)]
    for step, local in zip(steps, locals_, strict=True):
        for i, message in step.leaving(local):
            leaving[i].append(platform.ops.reshape(message, (-1,)))
        for i, _, shape in step.arriving:
            arriving[i].append(math.prod(shape))
    sends = [platform.contiguous(platform.ops.cat(parts, 0)) if parts else None for parts in leaving]
    device = platform.device_of(like)
    receives = [platform.empty((sum(parts),), like.dtype, device) if parts else None for parts in arriving]
    group.exchange(sends, receives)
    passed = [0] * group.size
    results = []
    for step, local in zip(steps, locals_, strict=True):
        received: Received = {}
        for i, peer, shape in step.arriving:
            numel = math.prod(shape)
            received[peer] = platform.ops.reshape(
                _own(platform, platform.ops.narrow(receives[i], 0, passed[i], numel)), shape
            )
            passed[i] += numel
        results.append(step.assemble(local, received))
    return results


def _own(platform: Platform, part: Tensor) -> Tensor:
    """Return a contiguous copy, which neither keeps its bucket alive nor changes with its neighbours."""
    return platform.contiguous(platform.ops.clone(part))
