"""Trackers: who is told about each step of a run."""

from hp_trainer.metrics.expert_loads import ExpertLoadsTracker, draw_expert_loads
from hp_trainer.metrics.jsonl import JsonLinesTracker, keep_steps, read_metrics
from hp_trainer.metrics.loss_curve import LossCurveTracker, draw_loss_curve
from hp_trainer.metrics.progress import ProgressConfig, ProgressTracker
from hp_trainer.metrics.tracker import Tracker

__all__ = [
    "ExpertLoadsTracker",
    "JsonLinesTracker",
    "LossCurveTracker",
    "ProgressConfig",
    "ProgressTracker",
    "Tracker",
    "draw_expert_loads",
    "draw_loss_curve",
    "keep_steps",
    "read_metrics",
]
