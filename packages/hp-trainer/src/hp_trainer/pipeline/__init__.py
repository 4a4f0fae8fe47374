"""Pipelines: schedules as data, made by pure functions and validated without ranks, and the stages that run them."""

from hp_trainer.pipeline.actions import Action, Kind, Schedule
from hp_trainer.pipeline.lowering import rank_actions
from hp_trainer.pipeline.microbatches import TensorChunkSpec
from hp_trainer.pipeline.partition import balanced_stages, listed_stages
from hp_trainer.pipeline.pipeline import Pipeline
from hp_trainer.pipeline.schedules import build_schedule, register_schedule, schedule_names
from hp_trainer.pipeline.simulation import ActionSeconds, Timeline, simulate
from hp_trainer.pipeline.stage import PipelineStage
from hp_trainer.pipeline.tied_weights import TiedWeights
from hp_trainer.pipeline.validation import validate

__all__ = [
    "Action",
    "ActionSeconds",
    "Kind",
    "Pipeline",
    "PipelineStage",
    "Schedule",
    "TensorChunkSpec",
    "TiedWeights",
    "Timeline",
    "balanced_stages",
    "build_schedule",
    "listed_stages",
    "rank_actions",
    "register_schedule",
    "schedule_names",
    "simulate",
    "validate",
]
