"""Pipeline schedules as data: made by pure functions, validated and simulated without ranks."""

from hp_trainer.pipeline.actions import Action, Kind, Schedule
from hp_trainer.pipeline.schedules import build_schedule, register_schedule, schedule_names
from hp_trainer.pipeline.simulation import ActionSeconds, Timeline, simulate
from hp_trainer.pipeline.validation import validate

__all__ = [
    "Action",
    "ActionSeconds",
    "Kind",
    "Schedule",
    "Timeline",
    "build_schedule",
    "register_schedule",
    "schedule_names",
    "simulate",
    "validate",
]
