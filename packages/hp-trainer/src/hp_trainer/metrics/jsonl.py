"""Metrics as JSON lines: one object per event, complete on disk as soon as it has happened."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from hp_trainer._files import write_atomically
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
        self._write("evaluation", asdict(record))

    def checkpoint(self, record: CheckpointRecord) -> None:
        self._write("checkpoint", asdict(record))

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: str, values: dict[str, Any]) -> None:
        assert self._file is not None, "start was not called"
        self._file.write(json.dumps({"event": event} | {k: _finite(v) for k, v in values.items()}) + "\n")


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a metrics file in order; a last line cut off by a crash is left out."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def keep_steps(path: Path, last_step: int) -> None:
    """Drop the events after `last_step`, in one step."""
    if not path.is_file():
        return
    kept = [event for event in read_metrics(path) if event.get("step", 0) <= last_step]
    write_atomically(path, "".join(json.dumps(event) + "\n" for event in kept))


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity; they become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
