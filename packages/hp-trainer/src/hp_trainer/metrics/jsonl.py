"""Metrics as JSON lines: one object per event, complete on disk as soon as it has happened."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from hp_trainer._files import write_atomically
from hp_trainer._json import strict_json
from hp_trainer.machine_errors import with_path
from hp_trainer.metrics.tracker import Tracker
from hp_trainer.records import CheckpointRecord, EvaluationRecord, RunRecord, StepRecord


class JsonLinesTracker(Tracker):
    """Appends to `path`. Each line has an `event`: `start`, `step`, `evaluation` or `checkpoint`.

    A resumed run first drops the lines of steps that it is going to do again, so that each step stands once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def start(self, run: RunRecord) -> None:
        for line in damaged_lines(self.path):
            print(f"hp-train: {self.path}: line {line} is damaged and is left out", file=sys.stderr)
        keep_steps(self.path, run.first_step)
        self._file = self.path.open("a", encoding="utf-8", buffering=1)
        self._write(
            "start",
            {
                "first_step": run.first_step,
                "platform": run.platform,
                "world_size": run.world_size,
                "num_parameters": run.num_parameters,
            },
        )

    def step(self, record: StepRecord) -> None:
        self._write("step", asdict(record) | {"tokens_per_second": record.tokens_per_second})

    def evaluation(self, record: EvaluationRecord) -> None:
        self._write("evaluation", asdict(record) | {"perplexity": record.perplexity})

    def checkpoint(self, record: CheckpointRecord) -> None:
        self._write("checkpoint", asdict(record))

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: str, values: dict[str, Any]) -> None:
        assert self._file is not None, "start was not called"
        try:
            self._file.write(strict_json({"event": event} | values) + "\n")
        except OSError as error:
            raise with_path(error, self.path) from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a metrics file in order; damaged lines, as one cut off by a crash, are left out."""
    for _, event in _lines(path):
        if event is not None:
            yield event


def damaged_lines(path: Path) -> list[int]:
    """List the numbers of the lines that are no events, from 1; the last one may be cut off by a crash, and is none."""
    lines = list(_lines(path))
    return [number for number, event in lines if event is None and number != len(lines)]


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield the number and the event of each line; None in place of an event that does not follow the format."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            yield number, event if _is_event(event) else None


def _is_event(value: Any) -> bool:
    """Return whether a JSON value has an event's name and, where it tells one, a step as a whole number."""
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        return False
    step = value.get("step", 0)
    return isinstance(step, int) and not isinstance(step, bool) and step >= 0


def keep_steps(path: Path, last_step: int) -> None:
    """Drop the events after `last_step`, in one step."""
    if not path.is_file():
        return
    kept = [event for event in read_metrics(path) if event.get("step", 0) <= last_step]
    write_atomically(path, "".join(strict_json(event) + "\n" for event in kept))
