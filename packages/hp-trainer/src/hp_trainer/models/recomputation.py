"""Recomputation of a model's blocks as the settings of a training ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.interface import Platform
from hp_trainer.memory import KINDS, BlockRecompute, Kind, recompute_by_pattern

if TYPE_CHECKING:
    from hp_trainer.config import TrainingConfig


def block_names(num_layers: int) -> list[str]:
    """Return the names of a model's blocks, which patterns are compared with."""
    return [f"layers.{index}" for index in range(num_layers)]


def recompute_by_settings(training: TrainingConfig, num_layers: int, platform: Platform) -> list[BlockRecompute]:
    """Return what each block of the whole model computes again, and what it has in host memory.

    Raises:
        ValueError: a pattern that no block matches.
        CapabilityError: the platform cannot keep what is to be kept.
    """
    keep = kept_kinds(training.recompute_keep, platform) if training.recompute == "selective" else ()
    chosen = BlockRecompute(mode=training.recompute, keep=keep, offloads=training.offload_activations)
    return recompute_by_pattern(
        block_names(num_layers), chosen, every=training.recompute_every, patterns=training.recompute_blocks
    )


def kept_kinds(asked: Sequence[Kind] | None, platform: Platform) -> tuple[Kind, ...]:
    """Return the kinds of results to keep; None: all that the platform can keep.

    Raises:
        CapabilityError: it cannot keep one that is asked for.
    """
    if asked is not None:
        platform.kept_operations(asked)
        return tuple(asked)
    return tuple(kind for kind in KINDS if _can_keep(kind, platform))


def _can_keep(kind: Kind, platform: Platform) -> bool:
    try:
        platform.kept_operations((kind,))
    except CapabilityError:
        return False
    return True
