"""Initial weights of a model that is laid out: drawn from the run's seed, or read from a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of
from hp_dtensor.tensor.init import init_parameters
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import CheckpointError
from hp_trainer.models.hugging_face import ModelDirectory
from hp_trainer.training.state import box_of


def give_initial_weights(model: Any, config: TrainerConfig, platform: Platform) -> None:
    """Give every parameter its first values: those of `model.from`, and for what it does not have those of the seed.

    Raises:
        CheckpointError: the directory does not fit the model; no parameter has been changed.
    """
    if config.model.source is None:
        # A module of the framework's own has drawn its values when it was built.
        if hasattr(model, "initializer"):
            init_parameters(model, model.initializer, seed=config.training.seed)
        return
    directory = ModelDirectory(Path(config.model.source), config.model.options)
    problems = list(directory.problems())
    if problems:
        raise CheckpointError("; ".join(map(str, problems)))
    init_parameters(model, model.initializer, seed=config.training.seed, skip=directory.tensors)
    read_weights(model, directory, platform)


def read_weights(model: Any, directory: ModelDirectory, platform: Platform) -> None:
    """Fill this rank's shards from a directory, reading no more of each tensor than the shard takes."""
    with platform.no_grad():
        for name, tensor in [*platform.named_parameters(model), *platform.named_buffers(model)]:
            if name in directory.tensors:
                local = local_of(platform, tensor)
                values = directory.read(name, box_of(tensor)).reshape(tuple(local.shape))
                platform.copy_(local, platform.from_numpy(values, platform.device_of(local)))
