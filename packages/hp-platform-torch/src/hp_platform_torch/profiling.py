"""Profiles of a rank by torch's profiler, and the peak rates of devices."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_ROWS = 40  # in the tables of operations
_MOST_EVENTS = 200_000  # allocations in a memory snapshot


@contextlib.contextmanager
def profiled(folder: Path, rank: int, device_type: str) -> Iterator[None]:
    """Profile the block on the host and on a device type; see `Platform.profile`.

    Besides the trace it writes `rank0-operations.txt` and `rank0-memory.txt`, tables of operations by their own time
    and by allocated memory, and on accelerators `rank0-memory.pickle`, a snapshot for
    https://pytorch.org/memory_viz, which is never read here. torch_npu's profiler, for Ascend, has no tables.
    """
    with _recorded_memory(folder / f"rank{rank}-memory.pickle", device_type):
        if device_type == "npu":
            with _ascend_profile() as profiler:
                yield
            # torch_npu refuses other endings.
            profiler.export_chrome_trace(str(folder / f"rank{rank}-trace.json"))
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device_type == "cuda" else [])]
        with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
            yield
        profiler.export_chrome_trace(str(folder / f"rank{rank}-trace.json.gz"))
        operations = profiler.key_averages()
        for name, column in (
            ("operations", f"self_{device_type}_time_total"),
            ("memory", f"self_{device_type}_memory_usage"),
        ):
            (folder / f"rank{rank}-{name}.txt").write_text(operations.table(sort_by=column, row_limit=_ROWS))


def _ascend_profile() -> Any:
    from torch_npu import profiler

    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]
    return profiler.profile(activities=activities, record_shapes=True, profile_memory=True)


@contextlib.contextmanager
def _recorded_memory(path: Path, device_type: str) -> Iterator[None]:
    """Write a snapshot of the accelerator's allocations in the block; do nothing on the CPU."""
    if device_type == "cpu":
        yield
        return
    memory = getattr(torch, device_type).memory
    memory._record_memory_history(max_entries=_MOST_EVENTS)
    try:
        yield
        memory._dump_snapshot(str(path))
    finally:
        memory._record_memory_history(enabled=None)


# In TFLOP/s: dense products of 16-bit operands with 32-bit sums, from the makers' data sheets. Keys are parts of the
# driver's device names; the longest match counts, since an `NVIDIA H100 PCIe` is slower than an `H100`.
_TERAFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "B200": 2250.0,
    "B100": 1750.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "T4": 65.0,
    "MI300X": 1307.4,
    # The matrix units alone, as in https://gitcode.com/Ascend/torchtitan-npu. Data sheets add the vector units (376 for
    # a 910B2). A 910_93xx is one of the two dies of an Atlas A3 module, each of which is a device.
    "910B1": 373.88,
    "910B2": 353.8944,
    "910B3": 294.912,
    "910B4": 245.76,
    "910_9362": 353.8944,
    "910_9392": 353.8944,
}
# These have no matrix units for bfloat16.
_FLOAT16_ALONE = ("V100", "T4")


def peak_flops(device: str, dtype: str) -> float | None:
    """Return the peak rate of a device in floating-point operations per second, or None if it is unknown.

    Args:
        device: the driver's name of it, such as `NVIDIA H100 80GB HBM3`.
        dtype: name of the operands' dtype. float32 has no rate here: it depends on the allowed precision (TF32).
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    # A name followed by a digit belongs to another device: an RTX A1000 is no A100.
    part = max((each for each in _TERAFLOPS if re.search(rf"{each}(?!\d)", device)), key=len, default=None)
    if part is None or (part in _FLOAT16_ALONE and dtype == "bfloat16"):
        return None
    return _TERAFLOPS[part] * 1e12
