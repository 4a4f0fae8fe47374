"""Pipeline parallelism: schedules as data, built and validated without ranks, and the stages that execute them.

Read `actions` (what a rank executes), `stage` (a module and its micro-batches), `transfers` (messages between stages)
and `execution` (the loop that executes a step), in this order.
"""

from hp_trainer.pipeline.actions import Action, Kind, Schedule, rank_actions
from hp_trainer.pipeline.execution import Pipeline, TensorChunkSpec
from hp_trainer.pipeline.partition import balanced_stages, listed_stages
from hp_trainer.pipeline.schedules import build_schedule, register_schedule, schedule_names
from hp_trainer.pipeline.simulation import ActionSeconds, Timeline, describe_timeline, draw_timeline, simulate, validate
from hp_trainer.pipeline.stage import PipelineStage, TiedWeights
from hp_trainer.pipeline.torch_schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

__all__ = [
    "Action",
    "ActionSeconds",
    "Kind",
    "Pipeline",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "Schedule",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "TensorChunkSpec",
    "TiedWeights",
    "Timeline",
    "balanced_stages",
    "build_schedule",
    "describe_timeline",
    "draw_timeline",
    "get_schedule_class",
    "listed_stages",
    "rank_actions",
    "register_schedule",
    "schedule_names",
    "simulate",
    "validate",
]
