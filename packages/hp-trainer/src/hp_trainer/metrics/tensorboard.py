"""Metrics as TensorBoard event files, through `tensorboardX`, which needs no framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_trainer.config import dump_config, setting
from hp_trainer.exceptions import Problem
from hp_trainer.metrics.optional import missing_library
from hp_trainer.metrics.scalars import evaluation_scalars, step_scalars
from hp_trainer.metrics.tracker import Tracker
from hp_trainer.records import EvaluationRecord, RunRecord, StepRecord


@dataclass(frozen=True, kw_only=True)
class TensorBoardConfig:
    """Event files for `tensorboard --logdir`."""

    folder: str = setting("tensorboard", help="folder of the event files, within the run folder")

    def check(self) -> Iterator[Problem]:
        yield from missing_library("tensorboardX", extra="tensorboard")


class TensorBoardTracker(Tracker):
    """Writes scalars, and the configuration as text. A resumed run hides the steps that it does again.

    Args:
        folder: where the event files go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, run: RunRecord) -> None:
        from tensorboardX import SummaryWriter

        # tensorboardX names a file by the second of its making; a file of before is not to be replaced.
        self._writer = SummaryWriter(
            str(self._folder), purge_step=run.first_step + 1, filename_suffix=f".from-{run.first_step}"
        )
        text = "\n".join(f"    {line}" for line in dump_config(run.config).splitlines())
        self._writer.add_text("configuration", text, run.first_step)

    def step(self, record: StepRecord) -> None:
        self._add(step_scalars(record), record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._add(evaluation_scalars(record), record.step)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
