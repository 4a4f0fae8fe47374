"""Trackers: who is told about each step of a run."""

from hp_trainer.metrics.pictures import ExpertLoadsTracker, LossCurveTracker, draw_expert_loads, draw_loss_curve
from hp_trainer.metrics.progress import ProgressConfig, ProgressTracker
from hp_trainer.metrics.tracker import JsonLinesTracker, Tracker, keep_steps, read_metrics

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
