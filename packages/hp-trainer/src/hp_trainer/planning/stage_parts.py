"""The parts of the model that one rank has, and the buffers in which its weights lie."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Collection
from dataclasses import dataclass

from hp_fsdp import PlannedBuffer, PlannedParameter, plan_group
from hp_trainer.models import DecoderConfig
from hp_trainer.models.decoder.planned_parameters import planned_parameters
from hp_trainer.parallel import ParallelDims
from hp_trainer.planning.step_shape import StepShape


@dataclass(frozen=True)
class StageParts:
    """The parts of the model on the ranks of one place in the pipeline; without one, all of it.

    Attributes:
        place: index of the rank in its pipeline.
        layers: indices of its blocks, in order.
        embed: it has the embedding.
        head: it has the final norm and the head.
        root: buffers of embedding, norm and head, and of a tied embedding that has a group of its own.
        tied: those of `root` of which another stage has a copy.
        blocks: buffers of each block but its experts.
        block_experts: buffers of each block's experts.
        is_pipelined: weights are gathered once for all micro-batches of a step.
    """

    place: int
    layers: tuple[int, ...]
    embed: bool
    head: bool
    root: tuple[PlannedBuffer, ...]
    tied: tuple[PlannedBuffer, ...]
    blocks: dict[int, tuple[PlannedBuffer, ...]]
    block_experts: dict[int, tuple[PlannedBuffer, ...]]
    is_pipelined: bool

    @functools.cached_property
    def dense(self) -> tuple[PlannedBuffer, ...]:
        """All buffers but those of experts."""
        return (*itertools.chain(*self.blocks.values()), *self.root)

    @functools.cached_property
    def experts(self) -> tuple[PlannedBuffer, ...]:
        """The buffers of experts."""
        return tuple(itertools.chain(*self.block_experts.values()))

    @functools.cached_property
    def buffers(self) -> tuple[PlannedBuffer, ...]:
        """All buffers."""
        return (*self.dense, *self.experts)

    def block_buffers(self, layer: int) -> tuple[PlannedBuffer, ...]:
        """Return all buffers of a block."""
        return (*self.blocks[layer], *self.block_experts.get(layer, ()))


def stage_parts(shape: StepShape, places: Collection[int] | None = None) -> list[StageParts]:
    """Return the parts of each place in the pipeline, in order; one for a model in one piece.

    Args:
        places: of a pipeline, these alone; None: all.
    """
    dims, model = shape.dims, shape.model
    if not dims.pp_enabled:
        return [_parts(shape, 0, tuple(range(model.num_hidden_layers)), embed=True, head=True)]
    found = []
    for place in range(dims.pp) if places is None else sorted(places):
        parts = shape.parts_of(place)
        found.append(_parts(shape, place, tuple(parts.layers or ()), embed=parts.embed, head=parts.head))
    return found


def whole_shapes(shape: StepShape) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every parameter of the model, by name."""
    return dict(_whole_shapes(shape.model))


def num_parameters(shape: StepShape) -> int:
    """Return the number of elements of all parameters of the model."""
    return sum(math.prod(each) for _, each in _whole_shapes(shape.model))


@functools.lru_cache(maxsize=16)
def _whole_shapes(model: DecoderConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found = planned_parameters(model, ParallelDims(), layers=range(model.num_hidden_layers))
    groups = (found.root, *found.blocks.values(), *found.experts.values())
    return tuple((each.name, each.shape) for group in groups for each in group)


def _parts(shape: StepShape, place: int, layers: tuple[int, ...], *, embed: bool, head: bool) -> StageParts:
    dims, freeze = shape.dims, shape.config.training.freeze
    # Blocks of one kind have the same buffers but for the names, which those of the first stand for.
    kinds = {layer: layer if freeze else -1 - shape.model.is_dense(layer) for layer in layers}
    first = {kind: layer for layer, kind in reversed(kinds.items())}
    planned = planned_parameters(
        shape.model, dims, layers=sorted(first.values()), embed=embed, head=head, freeze=freeze
    )
    sizes = shape.itemsize, shape.reduce_itemsize, shape.num_replicas

    def buffers(parameters: tuple[PlannedParameter, ...], shards: int) -> tuple[PlannedBuffer, ...]:
        found = _planned_group(parameters, shards, *sizes)
        # Where blocks are told apart by what is trained before them, it is by the identity of their buffers.
        return found if all(each.trainable for each in found) else tuple(map(copy.copy, found))

    def of_layers(found: dict[int, tuple[PlannedParameter, ...]], shards: int) -> dict[int, tuple[PlannedBuffer, ...]]:
        return {layer: buffers(found[first[kind]], shards) for layer, kind in kinds.items() if first[kind] in found}

    tied = buffers(planned.tied_embedding, dims.fsdp_size)
    return StageParts(
        place=place,
        layers=layers,
        embed=embed,
        head=head,
        root=(*buffers(planned.root, dims.fsdp_size), *tied),
        tied=tied,
        blocks=of_layers(planned.blocks, dims.fsdp_size),
        block_experts=of_layers(planned.experts, dims.efsdp_size),
        is_pipelined=dims.pp_enabled,
    )


@functools.lru_cache(maxsize=4096)
def _planned_group(
    parameters: tuple[PlannedParameter, ...], shards: int, itemsize: int, reduce_itemsize: int, num_replicas: int
) -> tuple[PlannedBuffer, ...]:
    return tuple(
        plan_group(
            parameters,
            shards,
            param_itemsize=itemsize,
            reduce_itemsize=reduce_itemsize,
            num_replicas=num_replicas,
        )
    )
