"""A run on disk: a folder with everything needed to continue it, and the lock that gives it to one job at a time.

One process creates the run before any rank uses it. Files are replaced atomically, so that a crash leaves either the
old content or the new one.
"""

from hp_trainer.run.folder import (
    RunFolder,
    check_model,
    checkpoint_storage,
    chosen_run_folder,
    complete_run,
    create_run,
    default_run_folder,
    prepare_again,
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
    "prepare_again",
]
