"""Progress of a run: a live bar on a terminal, or plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, TextIO

from pydantic import Field

from hp_trainer.config import section
from hp_trainer.metrics.tracker import Tracker
from hp_trainer.records import CheckpointRecord, EvaluationRecord, RunRecord, StepRecord


@section
class ProgressConfig:
    """Live progress on the terminal."""

    interval_seconds: float = Field(5.0, ge=0, description="seconds between lines if the output is not a terminal")


class ProgressTracker(Tracker):
    """Shows step, loss, tokens per second, learning rate and time left.

    Args:
        interval_seconds: seconds between lines if `stream` is not a terminal; the first and last step always have one.
        stream: output; default: standard output.
    """

    def __init__(self, interval_seconds: float = 5.0, stream: TextIO | None = None) -> None:
        self._interval = interval_seconds
        self._stream = stream if stream is not None else sys.stdout
        self._steps = 0
        self._first_step = 0
        self._started = 0.0
        self._last_line = 0.0  # time of the last plain line
        self._bar: Any = None
        self._task: Any = None

    def start(self, run: RunRecord) -> None:
        self._steps = run.config.training.steps
        self._first_step = run.first_step
        self._started = time.monotonic()
        ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
        self._say(
            f"{run.config.model.name}: {run.num_parameters:,} parameters, {ranks} on {run.platform}, "
            f"run folder {run.folder}"
        )
        # In a log file every redraw of the bar would be another line.
        if self._stream.isatty():
            self._open_bar()

    def step(self, record: StepRecord) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, status=self._status(record))
            return
        now = time.monotonic()
        if now - self._last_line >= self._interval or record.step in (self._first_step + 1, self._steps):
            self._last_line = now
            # Only steps of this start: those before a resume may have run on other machines.
            done = record.step - self._first_step
            left = (now - self._started) / done * (self._steps - record.step) if done > 0 else 0.0
            self._say(f"step {record.step}/{self._steps}  {self._status(record)}  left {format_seconds(left)}")

    def evaluation(self, record: EvaluationRecord) -> None:
        self._say(f"step {record.step}: evaluation loss {record.loss:.4f}, perplexity {record.perplexity:.4g}")

    def checkpoint(self, record: CheckpointRecord) -> None:
        self._say(f"step {record.step}: checkpoint {record.folder}")

    def finish(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()
            self._bar = None

    def _open_bar(self) -> None:
        # Imported here, since most runs write to a log and need no bar.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
            refresh_per_second=4,
        )
        self._bar.start()
        self._task = self._bar.add_task("train", total=self._steps, completed=self._first_step, status="")

    def _status(self, record: StepRecord) -> str:
        loss = "-" if record.loss is None else f"{record.loss:.4f}"
        speed = "-" if not record.tokens_per_second else f"{record.tokens_per_second:,.0f}"
        parts = [f"loss {loss}", f"{speed} tokens/s", f"lr {record.learning_rate:.2e}"]
        if record.peak_memory_gib is not None:
            parts.append(f"{record.peak_memory_gib:.1f} GiB")
        if record.model_flops_per_second:
            parts.append(format_flops(record.model_flops_per_second))
        if record.utilization is not None:
            parts.append(f"{record.utilization:.0%} of peak")
        parts += map(str, record.stragglers)
        return "  ".join(parts)

    def _say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
            return
        # A closed pipe (`hp-train ... | head`) or terminal must not end a run.
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._stream, flush=True)


def format_flops(rate: float) -> str:
    """Format floating-point operations per second: `387 TFLOP/s`, `0.25 GFLOP/s`."""
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:.3g} GFLOP/s"


def format_seconds(seconds: float) -> str:
    """Format a duration: `0:05`, `12:34`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
