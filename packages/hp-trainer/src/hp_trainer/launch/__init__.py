"""Launching of a job: all checks before a rank starts, then the ranks.

A check of a single setting belongs to its dataclass (`check`). A check that needs the number of ranks, the machine or
two sections belongs here.
"""

from hp_trainer.launch.job import launch_training
from hp_trainer.launch.platforms import (
    chosen_platform,
    import_platform,
    is_first_process,
    no_platform,
    take_node,
    world_size_of,
)
from hp_trainer.launch.preflight import (
    batch_problems,
    check_evaluation,
    check_new_run,
    check_resumed_run,
    check_settings,
    layout_problems,
    training_problems,
)
from hp_trainer.launch.step_checks import chosen_activations, microbatch_problems, schedule_problems

__all__ = [
    "batch_problems",
    "check_evaluation",
    "check_new_run",
    "check_resumed_run",
    "check_settings",
    "chosen_activations",
    "chosen_platform",
    "import_platform",
    "is_first_process",
    "launch_training",
    "layout_problems",
    "microbatch_problems",
    "no_platform",
    "schedule_problems",
    "take_node",
    "training_problems",
    "world_size_of",
]
