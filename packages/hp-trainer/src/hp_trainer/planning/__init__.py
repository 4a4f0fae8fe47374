"""The planner: memory, traffic and time of a step under a layout, computed from a configuration without ranks.

`plan_step` plans one layout, `search_layouts` all layouts of a number of ranks, and `find_changes` looks for settings
that make a layout fit. The rest of the trainer imports only what is listed here.
"""

from hp_trainer.planning.advice import Settings, changes_as_json, describe_changes, find_changes
from hp_trainer.planning.devices import Device, find_device
from hp_trainer.planning.plan import StepPlan, describe_plan, draw_memory, plan_as_json, plan_step
from hp_trainer.planning.search import describe_fitting, describe_ranking, ranking_as_json, search_layouts
from hp_trainer.planning.user_modules import ModuleCounter

__all__ = [
    "Device",
    "ModuleCounter",
    "Settings",
    "StepPlan",
    "changes_as_json",
    "describe_changes",
    "describe_fitting",
    "describe_plan",
    "describe_ranking",
    "draw_memory",
    "find_changes",
    "find_device",
    "plan_as_json",
    "plan_step",
    "ranking_as_json",
    "search_layouts",
]
