"""Trackers: their interface, the names of metrics, JSON lines, and the progress that a terminal shows."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TextIO

from pydantic import BaseModel, Field, ValidationError

from hp_trainer._coordination import report
from hp_trainer._files import mismatch, strict_json, write_atomically
from hp_trainer.config import section
from hp_trainer.exceptions import TrainingError, with_path
from hp_trainer.records import CheckpointRecord, EvaluationRecord, RunRecord, StepRecord, Straggler


class Tracker:
    """Base class of trackers. Rank 0 calls the methods; a tracker overrides those it needs."""

    def start(self, run: RunRecord) -> None:
        """Called before the first step."""

    def step(self, record: StepRecord) -> None:
        """Called after an optimizer step."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """Called after an evaluation."""

    def checkpoint(self, record: CheckpointRecord) -> None:
        """Called once a checkpoint is complete."""

    def finish(self) -> None:
        """Called once after the last event, also if the run failed."""


class BackgroundTracker(Tracker):
    """Calls another tracker in a thread, so that a server which is slow or silent does not block training.

    `start` and `finish` wait for at most a time. After that, or when a record cannot be delivered, training continues
    and a message names the tracker; `metrics.jsonl` has all metrics.

    Args:
        tracker: the tracker, all of whose methods the thread calls.
        name: its name in messages.

    Raises:
        TrainingError: by `start`, if the tracker fails while `start` waits.
    """

    START_SECONDS = 60.0
    FINISH_SECONDS = 300.0
    # Records of a tracker that is behind; a record of many experts may have 100 KB.
    MOST_PENDING = 1000

    def __init__(self, tracker: Tracker, name: str) -> None:
        self._tracker, self._name = tracker, name
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._was_slow = False

    def start(self, run: RunRecord) -> None:
        self._calls, self._failure, self._started = queue.Queue(self.MOST_PENDING), None, threading.Event()
        arguments = (self._calls, run, self._started)
        # A daemon: a process must not wait for it at exit.
        self._thread = threading.Thread(target=self._serve, args=arguments, name=f"tracker {self._name}", daemon=True)
        self._thread.start()
        if not self._started.wait(self.START_SECONDS):
            self._warn_slow(f"does not answer since {self.START_SECONDS:g} s")
        elif self._failure is not None:
            failure, self._thread = self._failure, None
            advice = "repair it, or leave it out of metrics.trackers"
            raise TrainingError(f"tracker {self._name} cannot start: {_first_line(failure)}; {advice}") from failure

    def step(self, record: StepRecord) -> None:
        self._put(lambda: self._tracker.step(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._put(lambda: self._tracker.evaluation(record))

    def checkpoint(self, record: CheckpointRecord) -> None:
        self._put(lambda: self._tracker.checkpoint(record))

    def finish(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None or not thread.is_alive():
            return
        # A tracker that has not even started is not waited for again. If it does start, it finishes by itself.
        if not self._started.is_set():
            with contextlib.suppress(queue.Empty, queue.Full):
                if self._calls.full():
                    self._calls.get_nowait()
                self._calls.put_nowait(None)
            return
        deadline = time.monotonic() + self.FINISH_SECONDS
        with contextlib.suppress(queue.Full):
            self._calls.put(None, timeout=self.FINISH_SECONDS)
            thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            self._warn_slow(f"has not taken all metrics within {self.FINISH_SECONDS:g} s")

    def _serve(self, calls: queue.Queue[Callable[[], None] | None], run: RunRecord, started: threading.Event) -> None:
        try:
            self._tracker.start(run)
            started.set()
            while (call := calls.get()) is not None:
                call()
        # SystemExit too: it would end the thread silently.
        except BaseException as error:
            self._failure = error
            if started.is_set():
                self._warn(f"has failed: {_first_line(error)}")
        finally:
            started.set()
            try:
                self._tracker.finish()
            except BaseException as error:
                if self._failure is None:
                    self._warn(f"has failed: {_first_line(error)}")

    def _put(self, call: Callable[[], None]) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._warn_slow(f"is behind by {self.MOST_PENDING} records, and further ones are dropped")

    def _warn_slow(self, what: str) -> None:
        # Once, since every further step would repeat it.
        if not self._was_slow:
            self._was_slow = True
            self._warn(what)

    def _warn(self, what: str) -> None:
        report(f"tracker {self._name} {what}; training continues")


def _first_line(error: BaseException) -> str:
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"


# Prefix of the metrics of single experts. A large model has thousands of them, so only the heatmap uses them.
EXPERT_LOAD = "expert_load/"


def step_scalars(record: StepRecord) -> dict[str, float]:
    """Return the metrics of a step by name (`train/loss`), without missing ones and without loads of single experts."""
    values = {
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "learning_rate": record.learning_rate,
        "tokens_per_second": record.tokens_per_second,
        "samples": record.samples,
        "peak_memory_gib": record.peak_memory_gib,
        "model_flops_per_second": record.model_flops_per_second,
        "utilization": record.utilization,
        **{name: value for name, value in record.metrics.items() if not name.startswith(EXPERT_LOAD)},
    }
    return {f"train/{name}": float(value) for name, value in values.items() if value is not None}


def evaluation_scalars(record: EvaluationRecord) -> dict[str, float]:
    """Return the metrics of an evaluation by name: loss in nats per token, and perplexity `exp(loss)`."""
    # exp overflows above 709 nats.
    return {"evaluation/loss": record.loss, "evaluation/perplexity": math.exp(min(record.loss, 700.0))}


class JsonLinesTracker(Tracker):
    """Appends one JSON object per event to `path`: a `start`, `step`, `evaluation` or `checkpoint`.

    A resumed run first drops the lines of the steps that it repeats, so that each step occurs once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def start(self, run: RunRecord) -> None:
        report_damaged_lines(self.path)
        # Before the file is opened: `keep_steps` replaces it, and an open file would be the deleted one.
        keep_steps(self.path, run.first_step)
        # Line buffered: every event is on disk as soon as it has happened.
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        values = {
            "first_step": run.first_step,
            "platform": run.platform,
            "world_size": run.world_size,
            "num_parameters": run.num_parameters,
        }
        self._write("start", values | ({"lost_replicas": run.lost_replicas} if run.lost_replicas else {}))

    def step(self, record: StepRecord) -> None:
        values = asdict(record) | {"tokens_per_second": record.tokens_per_second}
        # Empty in most steps.
        rare = ("stragglers", "rank_seconds")
        self._write("step", {name: value for name, value in values.items() if value or name not in rare})

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write("evaluation", asdict(record) | {"perplexity": record.perplexity})

    def checkpoint(self, record: CheckpointRecord) -> None:
        self._write("checkpoint", asdict(record))

    def finish(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            # After a failed write, on a full disk, closing fails too.
            with self._named_errors():
                file.close()

    def _write(self, event: str, values: dict[str, Any]) -> None:
        assert self._file is not None, "start was not called"
        with self._named_errors():
            self._file.write(strict_json({"event": event} | values) + "\n")

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Errors of a write to an open file name no path.
            raise with_path(error, self.path) from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a metrics file in order, skipping damaged lines, such as one truncated by a crash."""
    for _, event, problem in _lines(path):
        if not problem:
            yield event


def report_damaged_lines(path: Path) -> None:
    """Print the damaged lines of a metrics file for the user. A crash may truncate the last one, which is not named."""
    problems = [(number, problem) for number, _, problem in _lines(path)]
    for number, problem in problems[:-1]:
        if problem:
            report(f"{path}, line {number} is damaged and is skipped: {problem}")


def _lines(path: Path) -> Iterator[tuple[int, Any, str]]:
    """Yield the number and the JSON value of each line, None for other text, and what is damaged in it or ""."""
    if not path.is_file():
        return
    # A crash may leave bytes that are not UTF-8.
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            kind = str(value.get("event")) if isinstance(value, dict) else ""
            try:
                _EVENTS.get(kind, _Event).model_validate_json(line)
                problem = "" if value is not None else "expected a JSON object"
            except ValidationError as error:
                problem = mismatch(error)
            yield number, value, problem


# Numbers that are not finite are text, see `strict_json`.
_Number = Annotated[float, Field(strict=False)]
_Count = Annotated[int, Field(ge=0)]


class _Event(BaseModel, strict=True):
    """The fields of an event that reports and pictures read. Others may have any value."""

    event: str
    step: _Count = 0
    first_step: _Count = 0
    lost_replicas: _Count = 0
    tokens: _Count = 0
    loss: _Number | None = None
    metrics: dict[str, _Number] = {}
    stragglers: list[Straggler] = []
    rank_seconds: dict[str, list[float]] = {}


class _Start(_Event):
    platform: str
    world_size: Annotated[int, Field(ge=1)]
    num_parameters: _Count


class _AtStep(_Event):
    step: _Count


class _Checkpoint(_AtStep):
    folder: str
    seconds: float


_EVENTS: dict[str, type[_Event]] = {"start": _Start, "step": _AtStep, "evaluation": _AtStep, "checkpoint": _Checkpoint}


def keep_steps(path: Path, last_step: int) -> None:
    """Drop the events after `last_step`, and lines that are no events, replacing the file atomically.

    Events of which `read_metrics` cannot read a field are retained: they may be a plugin's.
    """
    if not path.is_file():
        return
    events = [value for _, value, _ in _lines(path) if isinstance(value, dict) and isinstance(value.get("event"), str)]
    retained = [each for each in events if isinstance(step := each.get("step", 0), int) and 0 <= step <= last_step]
    write_atomically(path, "".join(strict_json(event) + "\n" for event in retained))


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
        self._replicas = ""
        self._last_line = 0.0  # time of the last plain line
        self._bar: Any = None
        self._task: Any = None

    def start(self, run: RunRecord) -> None:
        self._steps = run.config.training.steps
        self._first_step = run.first_step
        self._started = time.monotonic()
        ranks = "1 rank" if run.world_size == 1 else f"{run.world_size} ranks"
        if run.lost_replicas:
            replicas = run.config.parallel.dp_replicate
            self._replicas = f"{replicas} of {replicas + run.lost_replicas} replicas"
            ranks += f" ({self._replicas})"
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
        parts += [self._replicas] if self._replicas else []
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
