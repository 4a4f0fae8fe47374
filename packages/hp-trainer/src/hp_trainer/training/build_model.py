"""Building of the model that a configuration names, on one rank and not laid out yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.meta import init_empty_weights
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import ConfigError, Problem
from hp_trainer.models.decoder import DecoderConfig
from hp_trainer.models.plain_module import PlainModel
from hp_trainer.plugins import registries


@contextlib.contextmanager
def without_data(config: TrainerConfig, platform: Platform) -> Iterator[None]:
    """Make parameters without data in the block, where the platform can: a rank gets memory for its shards alone.

    Only for the decoder, whose parameters get their values later; others may compute with theirs while they are built.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(config.model.options, DecoderConfig):
            # MindSpore has no such tensors.
            with contextlib.suppress(CapabilityError):
                stack.enter_context(init_empty_weights(platform))
        yield


def build_plain_model(config: TrainerConfig, platform: Platform, *parts: Any) -> Any:
    """Return the model of a configuration, its parameters plain.

    A module without a `parallelize` of its own is wrapped as `PlainModel`. Its own initial values come from the run's
    seed.

    Args:
        parts: given on to what builds the model: the parts of a pipeline stage.

    Raises:
        ConfigError: a plan for a plain module, and a model that lays itself out.
    """
    platform.manual_seed(config.training.seed)
    with nn.building(platform):
        model = registries().models.get(config.model.name, platform.name).build(config.model.options, platform, *parts)
    parallel = config.parallel
    if not hasattr(model, "parallelize"):
        with nn.building(platform):
            return PlainModel(model, config.model.options, parallel.tp_plan, parallel.fsdp_units)
    if parallel.tp_plan or parallel.fsdp_units:
        path = "parallel.tp_plan" if parallel.tp_plan else "parallel.fsdp_units"
        what = f"model.name = {config.model.name} lays itself out"
        raise ConfigError([Problem(path=path, what=what, expected="null", hint="leave it out")], "parallel")
    return model
