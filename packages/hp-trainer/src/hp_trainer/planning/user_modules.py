"""Estimates of a user's own module, such as one of transformers, counted by a run on tensors without memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hp_dtensor.platform.selection import get_platform
from hp_fsdp import PlannedParameter
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import ConfigError, PlanError
from hp_trainer.models import ModelEstimates, ModelPart
from hp_trainer.models.estimates import (
    BlockActivations,
    MicroBatchShape,
    ModelActivations,
    ModelParameters,
    SavedActivation,
)
from hp_trainer.models.plain_module import PlainModel
from hp_trainer.parallel import ParallelDims
from hp_trainer.plugins import plugin_manager, registries
from hp_trainer.records import CountedParameter, CountedPart, CountedStep
from hp_trainer.registries import is_python_name, register_python_name
from hp_trainer.training.setup import build_plain_model

Tensor = Any


class ModuleCounter:
    """Counts a user's own module for plans, once for each size of a micro-batch.

    Args:
        dims: the layout, which must be one that such modules support.
        platform_name: the framework that the module belongs to.
    """

    def __init__(self, dims: ParallelDims, platform_name: str) -> None:
        self._dims, self._platform_name = dims, platform_name
        self._counted: dict[tuple[int, int, str], CountedModule] = {}

    def of(self, config: TrainerConfig) -> Callable[[int], ModelEstimates]:
        """Return a function that estimates the module of a configuration for micro-batches of so many samples.

        Raises:
            PlanError: the layout shards more than samples and weights, or activations are recomputed or offloaded.
        """
        training = config.training
        settings = [f"parallel.{name}" for name in ("cp", "tp", "pp", "ep") if getattr(self._dims, name) > 1]
        # Counts hold for one rank that saves all activations; these settings would change them.
        settings += ["training.recompute"] * (training.recompute != "none")
        settings += ["training.activation_budget"] * (training.activation_budget is not None)
        settings += ["training.offload_activations"] * training.offload_activations
        if settings:
            raise PlanError(
                f"model {config.model.name!r} is a module of your own: plans of such modules support data parallelism "
                "and sharded weights (parallel.dp_shard, dp_replicate), with all activations saved; leave out "
                f"{', '.join(settings)}"
            )
        return functools.partial(self._count, config)

    def _count(self, config: TrainerConfig, micro_batch: int) -> ModelEstimates:
        key = micro_batch, config.training.sequence_length, config.training.dtype
        if key not in self._counted:
            self._counted[key] = _count(config, self._platform_name, micro_batch)
        return self._counted[key]


def _count(config: TrainerConfig, platform_name: str, micro_batch: int) -> CountedModule:
    """Count one forward and backward of so many samples.

    Raises:
        PlanError: the model parallelizes itself or cannot run without memory, or the platform cannot run it so.
    """
    platform = get_platform(platform_name)
    training, name = config.training, config.model.name
    count_step = plugin_manager().hook.hp_step_counter(platform=platform)
    if count_step is None:
        raise PlanError(
            f"model {name!r} is a module of your own, which plans count by running it on tensors without memory: "
            f"no plugin does so for platform {platform_name!r} (hook hp_step_counter). Plan it on a platform that "
            "computes on tensors without memory, or plan model.name=decoder"
        )
    if is_python_name(name):
        # Plans read configurations with registries of their own, because no platform need be installed for them.
        register_python_name(registries().models, name, Path())

    def build() -> PlainModel:
        model = build_plain_model(config, platform)
        if not isinstance(model, PlainModel):
            raise PlanError(
                f"model {name!r} has a `parallelize` of its own, which plans do not know; they are made for the "
                "decoder (model.name=decoder), for models whose options have a method `estimates`, and for "
                "modules without `parallelize`"
            )
        return model

    def run(model: PlainModel) -> Tensor:
        # The values do not matter: the platform counts shapes only.
        ids = platform.zeros((micro_batch, training.sequence_length), platform.dtype("int64"), "cpu")
        return model(ids, ids)

    dtype = None if training.dtype == "float32" else training.dtype
    try:
        return CountedModule(count_step(build, run, _outermost_units, dtype), micro_batch)
    except (PlanError, ConfigError):
        raise
    except Exception as error:
        raise PlanError(
            f"model {name!r} cannot be run on tensors without memory, by which plans count it: "
            f"{type(error).__name__}: {error}. Code that depends on the values of tensors (item(), masks as indices, "
            "files of weights) does not work there"
        ) from error


def _outermost_units(model: PlainModel) -> dict[str, Any]:
    """Return the modules that form an FSDP group each, without those nested in another one."""
    units = model.units()
    return {name: unit for name, unit in units.items() if not any(name.startswith(f"{other}.") for other in units)}


class CountedModule:
    """A counted module as `ModelEstimates`. Its blocks are the modules that form an FSDP group each.

    Args:
        step: the counts of one forward and backward.
        micro_batch: samples of that forward.
    """

    hidden_size = 0
    is_recomputable = False
    retains_dtypes = True
    has_micro_batch_statistics = False

    def __init__(self, step: CountedStep, micro_batch: int) -> None:
        self._step, self._micro_batch = step, micro_batch
        self.num_layers, self.buffer_bytes = len(step.parts), step.buffers
        of_part = {index: [x for x in step.parameters if x.part == index] for index in range(self.num_layers)}
        self._parameters = ModelParameters(
            root=_planned(each for each in step.parameters if each.part is None),
            blocks={index: _planned(parameters) for index, parameters in of_part.items()},
        )
        self._activations = _activations(step)

    def block_name(self, layer: int) -> str:
        return self._step.parts[layer].name

    def layer_kind(self, layer: int) -> int:
        """See `ModelEstimates`. Every block is a kind of its own, because names alone do not show which are alike."""
        return layer

    def unreached_blocks(self) -> tuple[int, ...]:
        return tuple(index for index, _ in enumerate(itertools.takewhile(lambda x: not x.is_reached, self._step.parts)))

    def parameters(self, dims: ParallelDims, part: ModelPart, *, freeze: tuple[str, ...] = ()) -> ModelParameters:
        """See `ModelEstimates`. `freeze` is ignored: frozen parameters were counted as not trainable."""
        return self._parameters

    def activations(self, shape: MicroBatchShape) -> ModelActivations:
        return self._activations

    def step_flops(self, samples: int, length: int) -> float:
        return float(self._step.flops) / self._micro_batch * samples


def _activations(step: CountedStep) -> ModelActivations:
    blocks, before = [], 0
    kinds: dict[BlockActivations, BlockActivations] = {}
    for part in step.parts:
        activations = _block_activations(part, before)
        # Equal blocks share an object, as those of the decoder do.
        blocks.append(kinds.setdefault(activations, activations))
        before = part.after
    # What is alive after forward beyond the blocks: the head's and the loss's activations.
    # Operations are counted for the full step, of which forward is a third.
    saved, flops = step.after_forward - before, step.flops / 3
    rest = SavedActivation(name="outside of the blocks", kind="rest", saved=saved, flops=flops)
    head = BlockActivations(tensors=(rest,), working=step.outside - step.after_forward)
    return ModelActivations(blocks=tuple(blocks), head=head)


def _block_activations(part: CountedPart, before: int) -> BlockActivations:
    """Return activations of a block with which the plan of its backward has the bytes that were counted.

    Args:
        before: bytes alive after the forward of the preceding block.
    """
    saved = part.after - before
    # What is still alive after the block's backward counts as its input.
    left = part.end - before if part.is_reached else 0
    tensors = (
        SavedActivation(name="input", kind="input", saved=left, result=left),
        SavedActivation(name="everything else", kind="rest", saved=saved - left),
    )
    return BlockActivations(tensors=tensors, working=part.peak - part.after if part.is_reached else 0)


def _planned(parameters: Iterable[CountedParameter]) -> tuple[PlannedParameter, ...]:
    return tuple(
        PlannedParameter(each.name, each.shape, itemsize=each.itemsize, trainable=each.trainable) for each in parameters
    )
