"""What hp_trainer itself registers, through the same hooks as any plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hp_dtensor.platform.plugins import hookimpl
from hp_trainer.config import setting
from hp_trainer.registry import NoOptions, Registry

if TYPE_CHECKING:
    from pathlib import Path

    from hp_trainer.checkpoint import LocalStorage
    from hp_trainer.metrics import JsonLinesTracker, LossCurveTracker, ProgressTracker
    from hp_trainer.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class ProgressConfig:
    """Live progress on the terminal."""

    interval_seconds: float = setting(5.0, help="between lines where the output is no terminal", minimum=0)


@hookimpl
def hp_models(registry: Registry) -> None:
    from hp_trainer.models import MoEDecoderConfig, build_moe_decoder

    registry.add("moe_decoder", build_moe_decoder, options=MoEDecoderConfig)


@hookimpl
def hp_datasets(registry: Registry) -> None:
    from hp_trainer.data import TextDataConfig, TextSource

    registry.add("text", TextSource, options=TextDataConfig)


@hookimpl
def hp_trackers(registry: Registry) -> None:
    registry.add("jsonl", _jsonl)
    registry.add("progress", _progress, options=ProgressConfig)
    registry.add("loss_curve", _loss_curve)


def _jsonl(options: NoOptions, run_folder: RunFolder) -> JsonLinesTracker:
    from hp_trainer.metrics import JsonLinesTracker

    return JsonLinesTracker(run_folder.metrics_file)


def _progress(options: ProgressConfig, run_folder: RunFolder) -> ProgressTracker:
    from hp_trainer.metrics import ProgressTracker

    return ProgressTracker(options.interval_seconds)


def _loss_curve(options: NoOptions, run_folder: RunFolder) -> LossCurveTracker:
    from hp_trainer.metrics import LossCurveTracker

    return LossCurveTracker(run_folder.metrics_file, run_folder.loss_picture)


@hookimpl
def hp_checkpoint_storages(registry: Registry) -> None:
    registry.add("local", _local_storage)


def _local_storage(options: NoOptions, folder: Path) -> LocalStorage:
    from hp_trainer.checkpoint import LocalStorage

    return LocalStorage(folder)
