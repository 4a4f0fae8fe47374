"""The built-in plugin: the components of hp_trainer itself, registered through the same hooks as any plugin's.

Each hook imports what it registers only when it is called, since every command loads this module.
"""

from __future__ import annotations

from typing import Any

from hp_dtensor.platform.plugins import hookimpl
from hp_dtensor.platform.registry import Registry


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
