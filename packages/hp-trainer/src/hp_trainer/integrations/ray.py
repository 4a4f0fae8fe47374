"""`hp-train run` as a trainer of Ray Train 2: each worker is a rank; metrics and checkpoints are reported to Ray."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
from ray import train
from ray.train.backend import Backend, BackendConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from hp_trainer.cli.shared import load
from hp_trainer.cli.train import start
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import ConfigError, Problem, RunFolderError
from hp_trainer.metrics.tracker import evaluation_scalars, step_scalars
from hp_trainer.plugins import hookimpl, plugin_manager
from hp_trainer.records import CheckpointRecord, EvaluationRecord, StepRecord
from hp_trainer.run import RunFolder

__all__ = ["HPTrainer", "train_loop"]

RUN_FOLDER = "hp-train"


class HPTrainer(DataParallelTrainer):  # type: ignore[misc]
    """Trains a configuration of `hp-train` on workers of Ray.

    The run folder is `hp-train` in Ray's folder of the run, `RunConfig(storage_path=..., name=...)`, which all workers
    must share. A run that exists there is continued, also after failures (`FailureConfig`) and on another number of
    workers (`ScalingConfig(num_workers=(2, 8))`). `fit` returns Ray's result: the metrics of the newest checkpoint,
    and the checkpoint itself, a folder that `hp-train` and `hp_trainer.checkpoint` read in place.

    Args:
        config: the YAML file, which all workers can read.
        settings: settings that override the file, by dotted path.
        scaling_config: number of workers and their resources.
        run_config: name, storage, failures and callbacks of the run. `CheckpointConfig.num_to_keep` is better left out:
            `checkpoint.keep` of the configuration deletes old checkpoints.

    Raises:
        ray.train.TrainingFailedError: by `fit`, if the workers failed more often than `FailureConfig` allows.

    Examples:
        >>> trainer = HPTrainer(  # doctest: +SKIP
        ...     "run.yaml",
        ...     {"optimizer.lr": 1e-3},
        ...     scaling_config=train.ScalingConfig(num_workers=(2, 8), use_gpu=True),
        ...     run_config=train.RunConfig("first", "/shared/runs", failure_config=train.FailureConfig(max_failures=3)),
        ... )
        >>> result = trainer.fit()  # doctest: +SKIP
    """

    def __init__(
        self,
        config: str | os.PathLike[str],
        settings: Mapping[str, Any] | None = None,
        *,
        scaling_config: train.ScalingConfig | None = None,
        run_config: train.RunConfig | None = None,
    ) -> None:
        super().__init__(
            train_loop,
            train_loop_config=loop_config(config, settings),
            scaling_config=scaling_config,
            run_config=run_config,
            backend_config=_RanksConfig(),
        )


def loop_config(config: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the argument of `train_loop`: the absolute path of the file, the settings, and this working directory."""
    return {"config": str(Path(config).absolute()), "settings": dict(settings or {}), "directory": str(Path.cwd())}


def train_loop(config: Mapping[str, Any]) -> None:
    """Run this worker's rank: the function for a Ray trainer of your own, such as `TorchTrainer`.

    Args:
        config: `{"config": path of the YAML file}`, optionally with `settings` by dotted path, and `directory`, from
            which relative paths of the configuration are resolved if it exists.

    Raises:
        RunFolderError: the storage of the run is no folder that the workers share.
        ConfigError: the configuration has `launch.nodes`.
        HPError: whatever `hp-train run` reports.
    """
    folder = _run_folder()
    settings = {**config.get("settings", {}), "run.folder": str(folder)}
    directory = config.get("directory")
    # Ray has changed to a folder of its own.
    is_here = directory is not None and Path(directory).is_dir()
    working_folder = contextlib.chdir(str(directory)) if is_here else contextlib.nullcontext()
    overrides = [(path, value if isinstance(value, str) else json.dumps(value)) for path, value in settings.items()]
    with working_folder:
        loaded = load(config["config"], overrides)
        _check_ranks(loaded.config)
        with _launched(), _reported(_Reports(folder)):
            start(config["config"], loaded, may_continue=True)


def _check_ranks(config: TrainerConfig) -> None:
    """Raise if the configuration wants processes that start ranks, as each worker of Ray is a rank."""
    if config.launch.nodes is not None:
        problem = Problem(
            path="launch.nodes",
            what="each worker of Ray is a rank, and Ray starts all of them again when one dies",
            expected="null, with ScalingConfig(num_workers=RANKS) and FailureConfig(max_failures=...)",
            got=str(config.launch.nodes),
        )
        raise ConfigError([problem], "a worker of Ray")


def _run_folder() -> Path:
    storage = train.get_context().get_storage()
    if not isinstance(storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
        raise RunFolderError(
            f"the run folder needs a file system that all workers mount, but RunConfig.storage_path is "
            f"{storage.storage_fs_path} on {storage.storage_filesystem.type_name}. Set it to a shared folder; "
            "checkpoints can go to an object store with the setting checkpoint.storage"
        )
    return Path(storage.experiment_fs_path) / RUN_FOLDER


@contextlib.contextmanager
def _launched() -> Iterator[None]:
    """Set the variables by which `hp-train` recognizes its rank, inside the block."""
    context, before = train.get_context(), dict(os.environ)
    address, port = broadcast_from_rank_zero(_free_address() if context.get_world_rank() == 0 else None)
    place = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
        "GROUP_RANK": context.get_node_rank(),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        yield
    finally:
        # In Ray's local mode this is the process of the caller.
        for name in place:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _free_address() -> tuple[str, int]:
    """Return this node's address and a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


@contextlib.contextmanager
def _reported(reports: _Reports) -> Iterator[None]:
    """Call `reports` for the events of runs inside the block."""
    manager = plugin_manager()
    manager.register(reports)
    try:
        yield
    finally:
        manager.unregister(reports)


_STEPS_UNTIL_CHECKPOINT = 1000


class _Reports:
    """Reports metrics and checkpoints to Ray, equally often on every rank: `ray.train.report` waits for all workers."""

    def __init__(self, folder: Path) -> None:
        self._checkpoints = RunFolder(folder).checkpoints
        # Of the steps since the last checkpoint, which may be complete some steps after its own.
        self._metrics: dict[int, dict[str, float]] = {}

    @hookimpl
    def hp_after_step(self, record: StepRecord) -> None:
        self._metrics[record.step] = {"step": record.step, **step_scalars(record)}
        # A checkpoint is complete within fewer steps. Runs without checkpoints would accumulate all steps.
        self._metrics.pop(record.step - _STEPS_UNTIL_CHECKPOINT, None)
        train.report(self._metrics[record.step])

    @hookimpl
    def hp_after_evaluation(self, record: EvaluationRecord) -> None:
        metrics = self._metrics.setdefault(record.step, {"step": record.step})
        metrics |= evaluation_scalars(record)
        train.report(metrics)

    @hookimpl
    def hp_after_checkpoint(self, record: CheckpointRecord) -> None:
        metrics = self._metrics.get(record.step, {"step": record.step})
        self._metrics = {step: values for step, values in self._metrics.items() if step > record.step}
        path = self._checkpoints / str(record.folder)
        # Not uploaded: it is in Ray's storage already, unless it is in an object store of `checkpoint.storage`.
        is_first = train.get_context().get_world_rank() == 0
        checkpoint = train.Checkpoint(str(path)) if is_first and path.is_dir() else None
        train.report(metrics, checkpoint, checkpoint_upload_mode=train.CheckpointUploadMode.NO_UPLOAD)


class _Ranks(Backend):  # type: ignore[misc]
    """Shows each worker the GPUs of all workers on its node: its local rank is the index of its own."""

    share_cuda_visible_devices = True


@dataclass
class _RanksConfig(BackendConfig):  # type: ignore[misc]
    @property
    def backend_cls(self) -> type[Backend]:
        return _Ranks
