"""Trackers for TensorBoard, Weights & Biases and MLflow. Their libraries are optional, and imported only when used."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hp_trainer._coordination import report
from hp_trainer.config import dump_config, section, settings_by_path, to_plain
from hp_trainer.exceptions import Problem
from hp_trainer.metrics.tracker import Tracker, evaluation_scalars, step_scalars
from hp_trainer.records import EvaluationRecord, RunRecord, StepRecord


def missing_library(module: str, *, extra: str) -> Iterator[Problem]:
    """Yield a problem if the library of a tracker is not installed."""
    if importlib.util.find_spec(module) is None:
        what = f"needs the library {module}, which is not installed"
        yield Problem(
            path="name", what=what, hint=f"pip install {module}, or in a clone './packages/hp-trainer[{extra}]'"
        )


@section
class TensorBoardConfig:
    """Event files for `tensorboard --logdir`."""

    folder: str = Field("tensorboard", description="folder of the event files, within the run folder")

    def check(self) -> Iterator[Problem]:
        yield from missing_library("tensorboardX", extra="tensorboard")


class TensorBoardTracker(Tracker):
    """Writes scalars, and the configuration as text. A resumed run hides the steps that it repeats."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, run: RunRecord) -> None:
        from tensorboardX import SummaryWriter

        # tensorboardX names files by the second of their creation. The suffix keeps earlier files from being replaced.
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


@section
class WandbConfig:
    """A run of Weights & Biases. The API key comes from `wandb login` or WANDB_API_KEY."""

    project: str = Field("hp-train", description="project of the run")
    entity: str | None = Field(None, description="user or team; null: your default")
    run_name: str | None = Field(None, description="name shown; null: the name of the run folder")
    mode: Literal["online", "offline"] = Field(
        "online", description="offline: files in the run folder, sent later by `wandb sync`"
    )

    def check(self) -> Iterator[Problem]:
        yield from missing_library("wandb", extra="wandb")


class WandbTracker(Tracker):
    """Logs every step under its own number, and the configuration. A resumed run continues with the same id."""

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
            # A run with this id is continued, otherwise created.
            resume="allow",
            config=to_plain(run.config),
        )
        # wandb's own step counter never decreases, but a resumed run repeats some steps.
        self._run.define_metric("*", step_metric="step")

    def step(self, record: StepRecord) -> None:
        self._run.log({"step": record.step} | step_scalars(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        self._run.log({"step": record.step} | evaluation_scalars(record))

    def finish(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


# The longest value of a parameter in MLflow's own stores.
_LONGEST_PARAMETER = 500


@section
class MlflowConfig:
    """A run of MLflow."""

    tracking_uri: str | None = Field(
        None, description="a server or a store; null: MLFLOW_TRACKING_URI, else mlflow.db in the run folder"
    )
    experiment: str = Field("hp-train", description="experiment of the run, created if there is none")
    run_name: str | None = Field(None, description="name shown; null: the name of the run folder")

    def check(self) -> Iterator[Problem]:
        yield from missing_library("mlflow", extra="mlflow")


class MlflowTracker(Tracker):
    """Logs every step, and the settings as parameters. A resumed run continues the same MLflow run.

    While the server cannot be reached, training continues without logging; `metrics.jsonl` still has the metrics.

    Args:
        run_id: id of the run, the same after a resume; stored as the tag `hp_run_id`.
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
        # Known here only; `finish` also runs after a failure and must distinguish the two.
        self._steps = run.config.training.steps
        # The MLflow run of an earlier start of this run, if there is one.
        found = self._client.search_runs([self._experiment()], f"tags.hp_run_id = '{self._run_id}'")
        self._run = found[0].info.run_id if found else self._create(run)
        # An earlier start of this run has set it to FAILED.
        self._client.update_run(self._run, status="RUNNING")

    def step(self, record: StepRecord) -> None:
        self._last_step = record.step
        self._log(step_scalars(record), record.step)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._log(evaluation_scalars(record), record.step)

    def finish(self) -> None:
        if self._run:
            # A run that was stopped early is no success either.
            status = "FINISHED" if self._last_step >= self._steps else "FAILED"
            self._tolerant(lambda: self._client.set_terminated(self._run, status))

    def _experiment(self) -> str:
        found = self._client.get_experiment_by_name(self._options.experiment)
        made: str = self._client.create_experiment(self._options.experiment) if found is None else found.experiment_id
        return made

    def _create(self, run: RunRecord) -> str:
        from mlflow.entities import Param

        name = self._options.run_name or run.folder.name
        made = self._client.create_run(self._experiment(), run_name=name, tags={"hp_run_id": self._run_id})
        settings = settings_by_path(run.config)
        parameters = [Param(path, str(value)[:_LONGEST_PARAMETER]) for path, value in settings.items()]
        # MLflow accepts at most 100 parameters per call.
        for start in range(0, len(parameters), 100):
            self._client.log_batch(made.info.run_id, params=parameters[start : start + 100])
        return str(made.info.run_id)

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        # MLflow's unit is milliseconds.
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in scalars.items()]
        self._tolerant(lambda: self._client.log_batch(self._run, metrics=metrics))

    def _tolerant(self, call: Callable[[], None]) -> None:
        from mlflow.exceptions import MlflowException

        try:
            call()
        except MlflowException as error:
            # Once, since every further step would repeat it.
            if not self._has_warned:
                report(f"MLflow does not accept metrics at the moment: {error}")
            self._has_warned = True
