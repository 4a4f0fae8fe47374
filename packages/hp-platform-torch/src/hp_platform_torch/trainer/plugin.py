"""Plugin for hp-trainer, loaded through the entry-point group `hp_trainer`.

Importing this module imports no framework: torch is imported when an optimizer is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hp_dtensor.platform.plugins import hookimpl

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform
    from hp_dtensor.platform.registry import Registry
    from hp_trainer.checkpoint import CheckpointFormat
    from hp_trainer.config import AdamWConfig
    from hp_trainer.models.hugging_face.reference import TransformersConfig
    from hp_trainer.optimizers import AdamW8bitConfig
    from hp_trainer.records import CountedStep
    from hp_trainer.training import Optimizer


@hookimpl
def hp_optimizers(registry: Registry) -> None:
    """Register AdamW as `adamw`, and with 8-bit moments as `adamw_8bit`."""
    from hp_trainer.config import AdamWConfig
    from hp_trainer.optimizers import AdamW8bitConfig

    registry.add("adamw", _build_adamw, options=AdamWConfig, platform="torch")
    registry.add("adamw_8bit", _build_adamw_8bit, options=AdamW8bitConfig, platform="torch")


@hookimpl
def hp_models(registry: Registry) -> None:
    """Register `transformers`: a model of transformers, computed by its own code."""
    from hp_trainer.models.hugging_face.reference import TransformersConfig

    registry.add("transformers", _build_transformers, options=TransformersConfig, platform="torch")


@hookimpl
def hp_checkpoint_formats(registry: Registry) -> None:
    """Register the folders of `torch.distributed.checkpoint` as `dcp`."""
    registry.add("dcp", _build_distributed_checkpoints)


@hookimpl
def hp_step_counter(platform: Platform) -> Callable[..., CountedStep] | None:
    """Return the counter of a module's step by torch's fake tensors."""
    if platform.name != "torch":
        return None
    from hp_platform_torch.trainer.counted_step import count_step

    def count(build: Any, *args: Any) -> CountedStep:
        def build_without_data() -> Any:
            with platform.default_device("meta"):
                return build()

        return count_step(build_without_data, *args)

    return count


def _build_distributed_checkpoints() -> CheckpointFormat:
    from hp_platform_torch.trainer.distributed_checkpoint import DistributedCheckpoints

    return DistributedCheckpoints()


def _build_transformers(options: TransformersConfig, platform: Platform) -> Any:
    from transformers import AutoModelForCausalLM

    # Its own plain attention is the definition of the model; the weights of the trainer are float32.
    return AutoModelForCausalLM.from_pretrained(options.path, dtype="float32", attn_implementation="eager").train()


def _build_adamw(parameters: Iterable[tuple[str, Any]], options: AdamWConfig, platform: Platform) -> Optimizer:
    from hp_platform_torch.trainer.optimizers import AdamW

    return AdamW(parameters, options)


def _build_adamw_8bit(parameters: Iterable[tuple[str, Any]], options: AdamW8bitConfig, platform: Platform) -> Optimizer:
    from hp_platform_torch.trainer.optimizers import find_codes, update
    from hp_trainer.optimizers import AdamW8bit

    return AdamW8bit(parameters, options, platform, find_codes, update)
