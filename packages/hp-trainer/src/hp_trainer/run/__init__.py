"""A run: its folder, the data in it, and the place of its checkpoints."""

from hp_trainer.run.create import complete_run, create_run
from hp_trainer.run.folder import RunFolder, chosen_run_folder, default_run_folder
from hp_trainer.run.lock import RunLock
from hp_trainer.run.storage import check_model, checkpoint_storage

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
