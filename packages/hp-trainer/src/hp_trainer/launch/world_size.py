"""The number of ranks of a job."""

from __future__ import annotations

from hp_dtensor.launch import is_launched, rank_environment
from hp_trainer.config import TrainerConfig
from hp_trainer.launch.platforms import num_accelerators


def world_size_of(config: TrainerConfig) -> int:
    """Return the number of ranks of the job.

    Those of the launcher that started this process, else `launch.local_ranks`, else one for each accelerator of this
    machine, else `launch.cpu_ranks`.
    """
    found = rank_environment() if is_launched() else None
    if found is not None:
        return found.size
    return config.launch.local_ranks or num_accelerators(config.platform) or config.launch.cpu_ranks
