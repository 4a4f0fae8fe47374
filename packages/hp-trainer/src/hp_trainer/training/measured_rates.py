"""Rates of this job's devices by which recomputation, transfers and copies to the host are weighed, measured now."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.platform.interface import Platform
from hp_trainer.training.activation_budget import ESTIMATED, CostRates
from hp_trainer.training.pipelined_model import exchange_over

_LEAST_SECONDS = 2e-3
"""Time of a product that is long enough to be measured."""
_BYTES = 2**22
"""Size of the tensors that are written, sent and copied."""


def measure_rates(platform: Platform, dtype: str, group: ProcessGroup, *, offloads: bool = False) -> CostRates:
    """Return the time of a byte that is written, sent, or copied to the host, in operations of a matrix product.

    Takes a fraction of a second. Every rank of the group calls it, and gets the medians of what all have measured.

    Args:
        dtype: of computation.
        offloads: measure copies to the host too, which the platform must be able to make; else they are estimated.
    """
    with platform.no_grad():
        operations = _product_rate(platform, platform.dtype(dtype))
        x = platform.zeros((_BYTES // 4,), platform.dtype("float32"))
        found = {"moved": operations * _seconds(platform, lambda: platform.ops.mul(x, 2.0)) / _BYTES}
        if group.size > 1:
            found["sent"] = operations * _seconds(platform, lambda: _send(platform, group, x)) / _BYTES
        if offloads:
            found["host"] = (
                operations * _seconds(platform, functools.partial(_there_and_back, platform, x)) / _BYTES / 2
            )
    return agreed_rates(found, exchange_over(group))


def agreed_rates(found: dict[str, float], everyones: Callable[[Any], list[Any]]) -> CostRates:
    """Return the medians of what all ranks have measured, with estimates for what nobody has.

    Args:
        everyones: takes a value of this rank, and returns those of all ranks in one order.

    Example:
        >>> agreed_rates({"moved": 3.0}, lambda mine: [mine, {"moved": 5.0}, {"moved": 4.0}]).moved
        4.0
    """
    ranks = everyones(found)
    return dataclasses.replace(ESTIMATED, **{name: statistics.median(each[name] for each in ranks) for name in found})


def _product_rate(platform: Platform, dtype: Any) -> float:
    """Return operations of a product per second, of a size that keeps the device busy."""
    size = 256
    while True:
        x = platform.zeros((size, size), dtype)
        seconds = _seconds(platform, functools.partial(platform.ops.linear, x, x))
        if seconds >= _LEAST_SECONDS or size >= 8192:
            return 2.0 * size**3 / seconds
        size *= 2


def _send(platform: Platform, group: ProcessGroup, x: Any) -> None:
    """Exchange as many bytes as `x` has: a ring's all-reduce sends each twice, of half as many elements."""
    group.all_reduce(platform.ops.mul(x[: x.shape[0] // 2], 1.0)).wait()


def _there_and_back(platform: Platform, x: Any) -> None:
    copies = platform.host_copies()
    host, wait = copies.to_host(copies.memory(x))
    wait()
    _, wait = copies.to_device(host)
    wait()


def _seconds(platform: Platform, run: Callable[[], Any]) -> float:
    """Return the shortest of three times, after one that is not counted."""
    run()
    times = []
    for _ in range(3):
        platform.synchronize()
        begin = time.perf_counter()
        run()
        platform.synchronize()
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)
