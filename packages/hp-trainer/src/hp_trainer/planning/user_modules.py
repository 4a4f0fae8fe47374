"""A user's own module as plans need it: parameters, bytes of its activations, operations of a forward and backward.

Counting of a user's own module, such as one of transformers, by a platform that computes without memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.counted_step import CountedParameter, CountedPart, CountedStep
from hp_dtensor.platform.selection import get_platform
from hp_fsdp import PlannedParameter
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import ConfigError, PlanError
from hp_trainer.models.estimates import BlockActivations, KeptTensor
from hp_trainer.models.plain_module import PlainModel
from hp_trainer.parallel import ParallelDims
from hp_trainer.plugins import registries
from hp_trainer.registries import is_python_name, register_python_name
from hp_trainer.training.setup import build_plain_model


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """A user's own module, whose parts are those that are gathered one by one.

    Attributes:
        names: of the parts, in the order of forward.
        root: parameters outside of all parts.
        parameters: of each part, in the order of forward.
        buffers: bytes of tensors that are no parameters; every rank has them whole.
        blocks: activations of each part, of one micro-batch.
        head: those of all that comes after the last part, the loss included.
        unreached: first parts that backward does not come to.
        flops: operations of a micro-batch, forward and backward.
    """

    names: tuple[str, ...]
    root: tuple[PlannedParameter, ...]
    parameters: tuple[tuple[PlannedParameter, ...], ...]
    buffers: int
    blocks: tuple[BlockActivations, ...]
    head: BlockActivations
    unreached: tuple[int, ...]
    flops: float

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every parameter, by name."""
        return {each.name: each.shape for group in (self.root, *self.parameters) for each in group}


# Counts a module for so many samples of a forward.
CountModule = Callable[[int], ModuleFacts]


def module_facts(step: CountedStep) -> ModuleFacts:
    """Return what plans need of a counted step."""
    groups = [[each for each in step.parameters if each.part == index] for index in range(len(step.parts))]
    blocks, in_front = [], 0
    alike: dict[BlockActivations, BlockActivations] = {}
    for part in step.parts:
        activations = _activations(part, in_front)
        # Parts of one kind share an object, as a decoder's blocks do.
        blocks.append(alike.setdefault(activations, activations))
        in_front = part.after
    unreached = next((index for index, part in enumerate(step.parts) if part.is_reached), len(step.parts))
    kept = step.after_forward - in_front
    head = BlockActivations(
        tensors=(KeptTensor(name="outside of the parts", kind="rest", saved=kept),),
        working=step.outside - step.after_forward,
    )
    return ModuleFacts(
        names=tuple(part.name for part in step.parts),
        root=_planned([each for each in step.parameters if each.part is None]),
        parameters=tuple(map(_planned, groups)),
        buffers=step.buffers,
        blocks=tuple(blocks),
        head=head,
        unreached=tuple(range(unreached)),
        flops=float(step.flops),
    )


def _activations(part: CountedPart, in_front: int) -> BlockActivations:
    """Return a part's activations, such that plans hold at its backward what was counted.

    Args:
        in_front: bytes that are alive when the parts before have computed.
    """
    kept = part.after - in_front
    # What stays when its backward has ended is called its input.
    left = part.end - in_front if part.is_reached else 0
    tensors = (
        KeptTensor(name="input", kind="input", saved=left, result=left),
        KeptTensor(name="everything else", kind="rest", saved=kept - left),
    )
    return BlockActivations(tensors=tensors, working=part.peak - part.after if part.is_reached else 0)


def _planned(parameters: list[CountedParameter]) -> tuple[PlannedParameter, ...]:
    return tuple(
        PlannedParameter(each.name, each.shape, itemsize=each.itemsize, trainable=each.trainable) for each in parameters
    )


Tensor = Any


class ModuleCounter:
    """Counts a user's own module for plans, once for each size of a forward.

    Args:
        dims: the layout, which such a module must have.
        platform_name: of the framework that it is a module of.
    """

    def __init__(self, dims: ParallelDims, platform_name: str) -> None:
        self._dims, self._platform_name = dims, platform_name
        self._known: dict[tuple[int, int, str], ModuleFacts] = {}

    def of(self, config: TrainerConfig) -> CountModule:
        """Return what counts the module of a configuration.

        Raises:
            PlanError: the layout cuts more than samples and weights, or activations are not to be kept.
        """
        training = config.training
        settings = [f"parallel.{name}" for name in ("cp", "tp", "pp", "ep") if getattr(self._dims, name) > 1]
        settings += ["training.recompute"] * (training.recompute != "none")
        settings += ["training.activation_budget"] * (training.activation_budget is not None)
        settings += ["training.offload_activations"] * training.offload_activations
        if settings:
            raise PlanError(
                f"model {config.model.name!r} is a module of your own: plans of such are made for ranks that share "
                "samples and weights (parallel.dp_shard, dp_replicate), with all activations kept; leave out "
                f"{', '.join(settings)}"
            )
        return functools.partial(self._counted, config)

    def _counted(self, config: TrainerConfig, micro_batch: int) -> ModuleFacts:
        key = micro_batch, config.training.sequence_length, config.training.dtype
        if key not in self._known:
            self._known[key] = _count(config, self._platform_name, micro_batch)
        return self._known[key]


def _count(config: TrainerConfig, platform_name: str, micro_batch: int) -> ModuleFacts:
    """Return what one forward and backward of so many samples take.

    Raises:
        PlanError: the model lays itself out, cannot compute without memory, or the platform cannot.
    """
    platform = get_platform(platform_name)
    training, name = config.training, config.model.name
    if is_python_name(name):
        # Plans read configurations with registries of their own, where no platform need be installed.
        register_python_name(registries().models, name, Path())

    def build() -> PlainModel:
        model = build_plain_model(config, platform)
        if not isinstance(model, PlainModel):
            raise PlanError(
                f"model {name!r} lays itself out by a `parallelize` of its own, which plans do not know; they are made "
                "for the decoder (model.name=decoder) and for modules without one"
            )
        return model

    def run(model: PlainModel) -> Tensor:
        ids = platform.zeros((micro_batch, training.sequence_length), platform.dtype("int64"), "cpu")
        return model(ids, ids)

    dtype = None if training.dtype == "float32" else training.dtype
    try:
        return module_facts(platform.count_step(build, run, _parts, dtype))
    except CapabilityError as error:
        raise PlanError(
            f"model {name!r} is a module of your own, of which plans count parameters and activations without memory: "
            f"{platform_name}: {error}. Plan it on torch, or model.name=decoder on any platform"
        ) from error
    except (PlanError, ConfigError):
        raise
    except Exception as error:
        raise PlanError(
            f"model {name!r} could not be run on tensors without memory, by which plans count it: "
            f"{type(error).__name__}: {error}. What is built or computed by the values of tensors (item(), masks as "
            "indices, files of weights) has none there"
        ) from error


def _parts(model: PlainModel) -> dict[str, Any]:
    """Return the modules that are gathered one by one; one within another is counted as a part of that."""
    units = model.units()
    return {name: unit for name, unit in units.items() if not any(name.startswith(f"{other}.") for other in units)}
