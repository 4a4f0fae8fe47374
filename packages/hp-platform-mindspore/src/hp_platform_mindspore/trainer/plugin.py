"""The plugin for hp-trainer, loaded through the entry-point group `hp_trainer`.

Importing this module imports no framework: MindSpore is imported when an optimizer is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from hp_dtensor.platform.plugins import hookimpl

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform
    from hp_dtensor.platform.registry import Registry
    from hp_trainer.config import AdamWConfig
    from hp_trainer.optimizers import AdamW8bitConfig
    from hp_trainer.training import Optimizer


@hookimpl
def hp_optimizers(registry: Registry) -> None:
    """Register AdamW as `adamw`, and AdamW with 8-bit moments as `adamw_8bit`."""
    from hp_trainer.config import AdamWConfig
    from hp_trainer.optimizers import AdamW8bitConfig

    registry.add("adamw", _build_adamw, options=AdamWConfig, platform="mindspore")
    registry.add("adamw_8bit", _build_adamw_8bit, options=AdamW8bitConfig, platform="mindspore")


def _build_adamw(parameters: Iterable[tuple[str, Any]], options: AdamWConfig, platform: Platform) -> Optimizer:
    from hp_platform_mindspore.trainer.optimizers import AdamW

    return AdamW(parameters, options, platform)


def _build_adamw_8bit(parameters: Iterable[tuple[str, Any]], options: AdamW8bitConfig, platform: Platform) -> Optimizer:
    from hp_platform_mindspore.trainer.optimizers import find_codes
    from hp_trainer.optimizers import AdamW8bit

    return AdamW8bit(parameters, options, platform, partial(find_codes, platform))
