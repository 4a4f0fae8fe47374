"""Metrics in MLflow, through its own client."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_trainer.config import setting, settings_by_path
from hp_trainer.exceptions import Problem
from hp_trainer.metrics.optional import missing_library
from hp_trainer.metrics.scalars import evaluation_scalars, step_scalars
from hp_trainer.metrics.tracker import Tracker
from hp_trainer.records import EvaluationRecord, RunRecord, StepRecord

# The longest value that MLflow's own stores take for a parameter.
_LONGEST_PARAMETER = 500


@dataclass(frozen=True, kw_only=True)
class MlflowConfig:
    """A run of MLflow."""

    tracking_uri: str | None = setting(
        None, help="a server or a store; null: MLFLOW_TRACKING_URI, else mlflow.db in the run folder"
    )
    experiment: str = setting("hp-train", help="experiment of the run, made where there is none")
    run_name: str | None = setting(None, help="name shown; null: the name of the run folder")

    def check(self) -> Iterator[Problem]:
        yield from missing_library("mlflow", extra="mlflow")


class MlflowTracker(Tracker):
    """Logs every step, and the settings as parameters. A resumed run goes on in the same MLflow run.

    A server that cannot be reached for a while costs its metrics, which `metrics.jsonl` has, and not the training.

    Args:
        run_id: identity of the run, the same after a resume; it is the tag `hp_run_id`.
    """

    def __init__(self, options: MlflowConfig, run_id: str, folder: Path) -> None:
        self._options, self._run_id, self._folder = options, run_id, folder
        self._client: Any = None
        self._run = ""
        self._last_step = self._steps = 0
        self._has_warned = False

    def start(self, run: RunRecord) -> None:
        import os

        from mlflow.tracking import MlflowClient

        uri = self._options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{(self._folder / 'mlflow.db').absolute()}")
        self._steps = run.config.training.steps
        self._run = self._find() or self._create(run)
        self._client.update_run(self._run, status="RUNNING")

    def step(self, record: StepRecord) -> None:
        self._last_step = record.step
        self._log(step_scalars(record), record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._log(evaluation_scalars(record), record.step)

    def finish(self) -> None:
        if self._run:
            status = "FINISHED" if self._last_step >= self._steps else "FAILED"
            self._tolerant(lambda: self._client.set_terminated(self._run, status))

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._options.experiment)
        made: str = self._client.create_experiment(self._options.experiment) if found is None else found.experiment_id
        return made

    def _find(self) -> str:
        """Return the MLflow run that this run began earlier, or nothing."""
        found = self._client.search_runs([self._experiment()], f"tags.hp_run_id = '{self._run_id}'")
        return found[0].info.run_id if found else ""

    def _create(self, run: RunRecord) -> str:
        from mlflow.entities import Param

        name = self._options.run_name or run.folder.name
        made = self._client.create_run(self._experiment(), run_name=name, tags={"hp_run_id": self._run_id})
        settings = settings_by_path(run.config)
        parameters = [Param(path, str(value)[:_LONGEST_PARAMETER]) for path, value in settings.items()]
        # A store takes 100 of them at once.
        for begin in range(0, len(parameters), 100):
            self._client.log_batch(made.info.run_id, params=parameters[begin : begin + 100])
        return str(made.info.run_id)

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in scalars.items()]
        self._tolerant(lambda: self._client.log_batch(self._run, metrics=metrics))

    def _tolerant(self, call: Callable[[], None]) -> None:
        from mlflow.exceptions import MlflowException

        try:
            call()
        except MlflowException as error:
            if not self._has_warned:
                print(f"hp-train: MLflow takes no metrics at the moment: {error}", file=sys.stderr)
            self._has_warned = True
