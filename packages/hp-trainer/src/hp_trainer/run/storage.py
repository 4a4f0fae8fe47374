"""The place of a run's checkpoints, and the model that they must be of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hp_trainer.checkpoint import Checkpoint, Storage
from hp_trainer.config import TrainerConfig, to_plain
from hp_trainer.plugins import registries
from hp_trainer.run.folder import RunFolder


def checkpoint_storage(run: RunFolder, config: TrainerConfig) -> Storage:
    """Return the storage that holds the run's checkpoints: `checkpoint.folder`, else `checkpoints/` of the run."""
    folder = run.checkpoints if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    component = config.checkpoint.storage
    storage: Storage = registries().checkpoint_storages.get(component.name).build(component.options, folder)
    return storage


def check_model(checkpoint: Checkpoint, config: TrainerConfig) -> None:
    """Refuse a checkpoint of another model than a configuration's.

    Raises:
        CheckpointError: naming every option that differs.
    """
    checkpoint.check_model(to_plain(config.model), model_defaults(config))


def model_defaults(config: TrainerConfig) -> dict[str, Any]:
    """Return the defaults of those options of the model that have one, as plain values."""
    found = {}
    for field in dataclasses.fields(config.model.options):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    return {name: to_plain(value) for name, value in found.items()}
