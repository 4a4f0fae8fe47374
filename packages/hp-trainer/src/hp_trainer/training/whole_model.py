"""The whole model of a checkpoint on one rank, to be used and not trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hp_dtensor.comm.world import SilentWorld, use_world
from hp_dtensor.platform.interface import Platform
from hp_trainer.checkpoint import Checkpoint
from hp_trainer.config import TrainerConfig
from hp_trainer.run import check_model
from hp_trainer.training.build_model import build_plain_model
from hp_trainer.training.state import load_weights


@contextlib.contextmanager
def whole_model(
    config: TrainerConfig, platform: Platform, checkpoint: Checkpoint, *, averaged: bool = False
) -> Iterator[Any]:
    """Give the model of a checkpoint, written by any layout on any platform, in a block that records no gradients.

    Args:
        averaged: with the moving average of its weights.

    Raises:
        CheckpointError: the checkpoint is of another model, damaged, or without averages.
    """
    check_model(checkpoint, config)
    with use_world(SilentWorld(0, 1, platform)), platform.no_grad():
        model = build_plain_model(config, platform)
        load_weights(platform, model, checkpoint, averaged=averaged)
        yield model
