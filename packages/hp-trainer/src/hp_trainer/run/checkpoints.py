"""The place of a run's checkpoints."""

from __future__ import annotations

from pathlib import Path

from hp_trainer.checkpoint import Storage
from hp_trainer.config import TrainerConfig
from hp_trainer.plugins import registries
from hp_trainer.run.folder import RunFolder


def checkpoint_storage(run: RunFolder, config: TrainerConfig) -> Storage:
    """Return the storage that holds the run's checkpoints: `checkpoint.folder`, else `checkpoints/` of the run."""
    folder = run.checkpoints if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    component = config.checkpoint.storage
    storage: Storage = registries().checkpoint_storages.get(component.name).build(component.options, folder)
    return storage
