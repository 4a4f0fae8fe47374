"""The plugin manager of hp_trainer and its registries, and the built-in plugin.

The built-in plugin is this module. It registers the components of hp_trainer through the same hooks as any plugin, and
imports what a hook registers only when the hook is called, since every command loads this module.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from hp_dtensor.platform.plugins import PluginManager, create_plugin_manager, hookimpl
from hp_dtensor.platform.registry import Registry
from hp_trainer import hookspecs
from hp_trainer.registries import Registries, fill_registries

__all__ = ["hookimpl", "plugin_manager", "registries"]


@functools.cache
def plugin_manager() -> PluginManager:
    """Return the plugin manager of hp_trainer, with the built-in plugin and all installed ones."""
    manager = create_plugin_manager("hp_trainer", hookspecs)
    manager.register(sys.modules[__name__], name="hp_trainer")
    return manager


@functools.cache
def registries() -> Registries:
    """Return the registries with the components of every plugin."""
    return fill_registries(plugin_manager())


@hookimpl
def hp_models(registry: Registry) -> None:
    """Register `decoder`."""
    from hp_trainer.models import DecoderConfig, build_decoder

    registry.add("decoder", build_decoder, options=DecoderConfig)


@hookimpl
def hp_datasets(registry: Registry) -> None:
    """Register `text` and `chat`."""
    from hp_trainer.data import ChatDataConfig, ChatSource, TextDataConfig, TextSource

    registry.add("text", TextSource, options=TextDataConfig)
    registry.add("chat", ChatSource, options=ChatDataConfig)


@hookimpl
def hp_optimizers(registry: Registry) -> None:
    """Register the optimizers, which run on every platform. Platforms may add faster ones under the same names."""
    from hp_trainer.config import AdamWConfig
    from hp_trainer.optimizers import (
        SGD,
        Adafactor,
        AdafactorConfig,
        AdamW,
        AdamW8bit,
        AdamW8bitConfig,
        Lion,
        LionConfig,
        MuonConfig,
        SGDConfig,
        build_muon,
    )

    def muon(parameters: Any, options: Any, platform: Any) -> Any:
        return build_muon(parameters, options, platform, registry.get("adamw", platform.name).build)

    registry.add("adamw", AdamW, options=AdamWConfig)
    registry.add("adamw_8bit", AdamW8bit, options=AdamW8bitConfig)
    registry.add("sgd", SGD, options=SGDConfig)
    registry.add("lion", Lion, options=LionConfig)
    registry.add("adafactor", Adafactor, options=AdafactorConfig)
    registry.add("muon", muon, options=MuonConfig)


@hookimpl
def hp_trackers(registry: Registry) -> None:
    """Register the trackers that write to the run folder and the terminal, and those of other libraries."""
    from hp_trainer.metrics import (
        BackgroundTracker,
        JsonLinesTracker,
        PictureTracker,
        ProgressConfig,
        ProgressTracker,
        draw_expert_loads,
        draw_loss_curve,
    )
    from hp_trainer.metrics.libraries import (
        MlflowConfig,
        MlflowTracker,
        TensorBoardConfig,
        TensorBoardTracker,
        WandbConfig,
        WandbTracker,
    )

    registry.add("jsonl", lambda options, run: JsonLinesTracker(run.metrics_file))
    registry.add("progress", lambda options, run: ProgressTracker(options.interval_seconds), options=ProgressConfig)
    registry.add("loss_curve", lambda options, run: PictureTracker(run.metrics_file, run.loss_picture, draw_loss_curve))
    registry.add(
        "expert_loads", lambda options, run: PictureTracker(run.metrics_file, run.loads_picture, draw_expert_loads)
    )
    registry.add(
        "tensorboard", lambda options, run: TensorBoardTracker(run.path / options.folder), options=TensorBoardConfig
    )

    # Both speak to a server, at least where they are configured to.
    def wandb(options: Any, run: Any) -> BackgroundTracker:
        return BackgroundTracker(WandbTracker(options, run.run_id), "wandb")

    def mlflow(options: Any, run: Any) -> BackgroundTracker:
        return BackgroundTracker(MlflowTracker(options, run.run_id, run.path), "mlflow")

    registry.add("wandb", wandb, options=WandbConfig)
    registry.add("mlflow", mlflow, options=MlflowConfig)


@hookimpl
def hp_checkpoint_storages(registry: Registry) -> None:
    """Register `local`, a folder of a file system, and `object_store`, a URL of any file system of fsspec."""
    from hp_trainer.checkpoint import LocalStorage
    from hp_trainer.checkpoint.storage import ObjectStorage, ObjectStorageConfig

    registry.add("local", lambda options, folder: LocalStorage(folder))
    registry.add("object_store", lambda options, folder: ObjectStorage(options.url), options=ObjectStorageConfig)
