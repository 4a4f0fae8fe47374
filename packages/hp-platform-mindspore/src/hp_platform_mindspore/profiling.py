"""Traces of what a rank runs, by MindSpore's own profiler."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mindspore as ms
from mindspore.profiler import ProfilerActivity


@contextlib.contextmanager
def profiled(folder: Path, rank: int, *, on_npu: bool) -> Iterator[None]:
    """Profile the block; see `Platform.profile`. The tables of the profiler lie in `rank0-profiler`."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.NPU] if on_npu else [])]
    # The profiler names a folder of its own within the one given, by host, process and time.
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"rank{rank}-") as scratch:
        profiler = ms.profiler.profile(
            activities=activities,
            profile_memory=on_npu,
            on_trace_ready=ms.profiler.tensorboard_trace_handler(scratch),
        )
        profiler.start()
        try:
            yield
        finally:
            profiler.stop()
        (written,) = Path(scratch).iterdir()
        tables = folder / f"rank{rank}-profiler"
        shutil.rmtree(tables, ignore_errors=True)
        shutil.move(written, tables)
        for trace in tables.rglob("trace_view.json"):
            shutil.move(trace, folder / f"rank{rank}-trace.json")
