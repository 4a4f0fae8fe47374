"""Collectives of simulated ranks, done for all ranks by the last one that comes to them.

Data moves as host arrays, which every platform has; reductions use the platform's own arithmetic, in rank order, so
that low-precision dtypes round as they do on real ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hp_dtensor.exceptions import CollectiveError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing.simulated_job import Call

Tensor = Any


def describe_tensor(platform: Platform, x: Tensor, shape: Sequence[int] | None = None) -> str:
    """Return dtype and shape, such as `float32[2, 3]`."""
    return f"{platform.dtype_name(x.dtype)}{list(x.shape if shape is None else shape)}"


# The collectives. Data moves as host arrays, which every platform has; reductions use the platform's own
# arithmetic, in rank order, so that low-precision dtypes round as they do on real ranks.


def all_reduce(platform: Platform, calls: list[Call]) -> None:
    total = _reduce(platform, [call.payload for call in calls], calls[0].facts["op"])
    for call in calls:
        platform.copy_(call.payload, total)


def reduce_scatter(platform: Platform, calls: list[Call]) -> None:
    total = _reduce(platform, [call.payload[1] for call in calls], calls[0].facts["op"])
    parts = np.split(_flat(platform, total), len(calls))
    for call, part in zip(calls, parts, strict=True):
        _put(platform, call.payload[0], part)


def all_gather(platform: Platform, calls: list[Call]) -> None:
    whole = np.concatenate([_flat(platform, call.payload[1]) for call in calls])
    for call in calls:
        _put(platform, call.payload[0], whole)


def all_to_all(platform: Platform, calls: list[Call]) -> None:
    _check_rows(calls)
    sent = [_pieces(platform, call.payload[1], call.payload[3]) for call in calls]
    for receiver, call in enumerate(calls):
        _put(platform, call.payload[0], np.concatenate([pieces[receiver] for pieces in sent]))


def exchange(platform: Platform, calls: list[Call]) -> None:
    _check_exchange(platform, calls)
    moves = [
        (calls[target].payload[1][source], _flat(platform, calls[source].payload[0][target]).copy())
        for source in range(len(calls))
        for target in range(len(calls))
        if source != target and not _is_nothing(calls[source].payload[0][target])
    ]
    for into, data in moves:
        _put(platform, into, data)


def broadcast(platform: Platform, calls: list[Call]) -> None:
    source = calls[calls[0].facts["source"]].payload
    for call in calls:
        if call.payload is not source:
            platform.copy_(call.payload, source)


def all_gather_bytes(platform: Platform, calls: list[Call]) -> None:
    everything = [call.payload for call in calls]
    for call in calls:
        call.result = list(everything)


def _reduce(platform: Platform, tensors: list[Tensor], op: str) -> Tensor:
    ops = platform.ops
    pairwise = {"max": ops.maximum, "min": ops.minimum, "product": ops.mul}.get(op, ops.add)
    total = functools.reduce(pairwise, tensors)
    return ops.div(total, len(tensors)) if op == "avg" else total


def _flat(platform: Platform, x: Tensor) -> np.ndarray:
    return np.asarray(platform.to_numpy(x)).reshape(-1)


def _put(platform: Platform, output: Tensor, flat: np.ndarray) -> None:
    values = platform.from_bits(flat.reshape(tuple(output.shape)), output.dtype, platform.device_of(output))
    platform.copy_(output, values)


def _pieces(platform: Platform, x: Tensor, rows: Sequence[int]) -> list[np.ndarray]:
    row = math.prod(x.shape[1:])
    ends = np.cumsum(rows)[:-1] * row
    return np.split(_flat(platform, x), ends)


def _is_nothing(x: Tensor | None) -> bool:
    return x is None or math.prod(x.shape) == 0


def _check_rows(calls: list[Call]) -> None:
    problems = [
        f"\n  rank {sender.ranks[i]} sends {sender.payload[3][j]} rows to rank {receiver.ranks[j]}, "
        f"which expects {receiver.payload[2][i]}"
        for i, sender in enumerate(calls)
        for j, receiver in enumerate(calls)
        if sender.payload[3][j] != receiver.payload[2][i]
    ]
    if problems:
        raise CollectiveError(f"the splits of all_to_all in group {calls[0].ranks} do not agree:{''.join(problems)}")


def _check_exchange(platform: Platform, calls: list[Call]) -> None:
    def kind(x: Tensor | None) -> str:
        return "nothing" if x is None or _is_nothing(x) else describe_tensor(platform, x)

    pairs = [
        (i, j, kind(calls[i].payload[0][j]), kind(calls[j].payload[1][i]))
        for i in range(len(calls))
        for j in range(len(calls))
        if i != j
    ]
    ranks = calls[0].ranks
    problems = [
        f"\n  rank {ranks[i]} sends {sent} to rank {ranks[j]}, which expects {expected}"
        for i, j, sent, expected in pairs
        if sent != expected
    ]
    if problems:
        raise CollectiveError(f"exchange in group {ranks} does not agree:{''.join(problems)}")
