"""Metrics in Weights & Biases, through its own library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hp_trainer.config import setting, to_plain
from hp_trainer.exceptions import Problem
from hp_trainer.metrics.optional import missing_library
from hp_trainer.metrics.scalars import evaluation_scalars, step_scalars
from hp_trainer.metrics.tracker import Tracker
from hp_trainer.records import EvaluationRecord, RunRecord, StepRecord


@dataclass(frozen=True, kw_only=True)
class WandbConfig:
    """A run of Weights & Biases; its key comes from `wandb login` or WANDB_API_KEY."""

    project: str = setting("hp-train", help="project of the run")
    entity: str | None = setting(None, help="user or team; null: your default")
    run_name: str | None = setting(None, help="name shown; null: the name of the run folder")
    mode: Literal["online", "offline"] = setting(
        "online", help="offline: files in the run folder, sent later by `wandb sync`"
    )

    def check(self) -> Iterator[Problem]:
        yield from missing_library("wandb", extra="wandb")


class WandbTracker(Tracker):
    """Logs every step against its own number, and the configuration. A resumed run goes on under the same id.

    Args:
        run_id: identity of the run, the same after a resume.
    """

    def __init__(self, options: WandbConfig, run_id: str) -> None:
        self._options, self._run_id = options, run_id
        self._run: Any = None

    def start(self, run: RunRecord) -> None:
        import wandb

        options = self._options
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.run_name or run.folder.name,
            id=self._run_id,
            dir=str(run.folder),
            mode=options.mode,
            resume="allow",
            config=to_plain(run.config),
        )
        # wandb's own step counter never goes back, but a resumed run does some steps again.
        self._run.define_metric("*", step_metric="step")

    def step(self, record: StepRecord) -> None:
        self._run.log({"step": record.step} | step_scalars(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._run.log({"step": record.step} | evaluation_scalars(record))

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
