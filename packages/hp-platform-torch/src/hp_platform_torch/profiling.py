"""Traces of what a rank runs, by torch's own profiler, and of what its memory holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_ROWS = 40  # of a table of operations
_MOST_EVENTS = 200_000  # allocations that a memory snapshot keeps


@contextlib.contextmanager
def profiled(folder: Path, rank: int) -> Iterator[None]:
    """Profile the block; see `Platform.profile`.

    Beside the trace: `rank0-operations.txt` and `rank0-memory.txt`, tables of operations by their own time and by the
    memory that they allocate, and on CUDA `rank0-memory.pickle`, a snapshot for https://pytorch.org/memory_viz, which
    is never read here.
    """
    has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_cuda else [])]
    if has_cuda:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
    try:
        with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
            yield
        profiler.export_chrome_trace(str(folder / f"rank{rank}-trace.json.gz"))
        operations = profiler.key_averages()
        device = "cuda" if has_cuda else "cpu"
        for name, column in (("operations", f"self_{device}_time_total"), ("memory", f"self_{device}_memory_usage")):
            (folder / f"rank{rank}-{name}.txt").write_text(operations.table(sort_by=column, row_limit=_ROWS))
        if has_cuda:
            torch.cuda.memory._dump_snapshot(str(folder / f"rank{rank}-memory.pickle"))
    finally:
        if has_cuda:
            torch.cuda.memory._record_memory_history(enabled=None)
