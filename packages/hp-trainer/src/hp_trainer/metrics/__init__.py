"""Trackers of a run's metrics. Rank 0 passes them a frozen record of each step, evaluation and checkpoint.

`metrics.jsonl` is the source of everything that is drawn later. A tracker of your own subclasses `Tracker` and is
registered by the hook `hp_trackers`.
"""

from hp_trainer.metrics.pictures import PictureTracker, draw_expert_loads, draw_loss_curve
from hp_trainer.metrics.tracker import (
    BackgroundTracker,
    JsonLinesTracker,
    ProgressConfig,
    ProgressTracker,
    Tracker,
    keep_steps,
    read_metrics,
)

__all__ = [
    "BackgroundTracker",
    "JsonLinesTracker",
    "PictureTracker",
    "ProgressConfig",
    "ProgressTracker",
    "Tracker",
    "draw_expert_loads",
    "draw_loss_curve",
    "keep_steps",
    "read_metrics",
]
