"""A run: its folder, the data in it, and the place of its checkpoints."""

from hp_trainer.run.folder import (
    RunFolder,
    check_model,
    checkpoint_storage,
    chosen_run_folder,
    complete_run,
    create_run,
    default_run_folder,
)
from hp_trainer.run.lock import RunLock

__all__ = [
    "RunFolder",
    "RunLock",
    "check_model",
    "checkpoint_storage",
    "chosen_run_folder",
    "complete_run",
    "create_run",
    "default_run_folder",
]
