"""The parts of the model that one rank has, and the buffers in which its weights lie."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hp_fsdp import PlannedBuffer, PlannedParameter, plan_group
from hp_trainer.models import DecoderConfig
from hp_trainer.models.decoder.planned_parameters import DecoderParameters, planned_parameters
from hp_trainer.parallel import ParallelDims
from hp_trainer.planning.module_facts import ModuleFacts
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
        blocks: buffers of each block but its experts; blocks of one kind share the tuple.
        block_experts: buffers of each block's experts.
        is_pipelined: there are other places.
        unreached_parts: `unreached`, where it is known from elsewhere.
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
    unreached_parts: tuple[int, ...] | None = None

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

    @functools.cached_property
    def counted(self) -> tuple[tuple[PlannedBuffer, int], ...]:
        """Every buffer once, with the number of blocks that have one like it."""
        groups = [*self.blocks.values(), *self.block_experts.values(), self.root]
        kinds = {id(group): group for group in groups}
        times = Counter(map(id, groups))
        return tuple((each, times[key]) for key, group in kinds.items() for each in group)

    def total(self, name: str) -> float:
        """Return the sum of one attribute of all buffers."""
        return float(sum(times * getattr(each, name) for each, times in self.counted))

    def block_buffers(self, layer: int) -> tuple[PlannedBuffer, ...]:
        """Return all buffers of a block."""
        return (*self.blocks[layer], *self.block_experts.get(layer, ()))

    @functools.cached_property
    def unreached(self) -> tuple[int, ...]:
        """First blocks of the model that nothing is trained in or before: backward does not come to them."""
        if self.unreached_parts is not None:
            return self.unreached_parts
        found: list[int] = []
        trains = any(each.name == "embed.weight" and each.trainable for b in self.root for each in b.parameters)
        for layer in () if self.place > 0 or trains else self.layers:
            if any(each.trainable for each in self.block_buffers(layer)):
                break
            found.append(layer)
        return tuple(found)

    def kind(self, layer: int) -> tuple[int, int]:
        """Return what is equal for blocks whose buffers are."""
        return id(self.blocks[layer]), id(self.block_experts.get(layer))


def every_stage(shape: StepShape) -> list[StageParts]:
    """Return the parts of each place in the pipeline, in order; one for a model in one piece."""
    return [stage_parts(shape, place) for place in range(shape.dims.pp)]


def stage_parts(shape: StepShape, place: int) -> StageParts:
    """Return the parts of one place in the pipeline; without one, place 0 has everything."""
    if shape.module is not None:
        return _module_parts(shape, shape.module)
    if not shape.dims.pp_enabled:
        return _parts(shape, place, tuple(range(shape.model.num_hidden_layers)), embed=True, head=True)
    parts = shape.parts_of(place)
    return _parts(shape, place, tuple(parts.layers or ()), embed=parts.embed, head=parts.head)


def whole_shapes(shape: StepShape) -> Mapping[str, tuple[int, ...]]:
    """Return the whole shape of every parameter of the model, by name."""
    return _whole_shapes(shape.model) if shape.module is None else shape.module.shapes()


def num_parameters(shape: StepShape) -> int:
    """Return the number of elements of all parameters of the model."""
    return sum(math.prod(each) for each in whole_shapes(shape).values())


@functools.lru_cache(maxsize=16)
def _whole_shapes(model: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    found = planned_parameters(model, ParallelDims(), layers=range(model.num_hidden_layers))
    groups = (found.root, *found.blocks.values(), *found.experts.values())
    return {each.name: each.shape for group in groups for each in group}


def _module_parts(shape: StepShape, module: ModuleFacts) -> StageParts:
    """Return the parts of a user's own module, which every rank has whole but for the shards."""
    # In float32 a module computes in the dtypes that it was built with.
    is_mixed = shape.config.training.dtype != "float32"

    def buffers(parameters: tuple[PlannedParameter, ...]) -> tuple[PlannedBuffer, ...]:
        return tuple(
            plan_group(
                parameters,
                shape.dims.fsdp_size,
                param_itemsize=shape.itemsize if is_mixed else None,
                reduce_itemsize=shape.reduce_itemsize if is_mixed else None,
                num_replicas=shape.num_replicas,
            )
        )

    return StageParts(
        place=0,
        layers=tuple(range(len(module.blocks))),
        embed=True,
        head=True,
        root=buffers(module.root),
        tied=(),
        blocks={index: buffers(each) for index, each in enumerate(module.parameters)},
        block_experts={},
        is_pipelined=False,
        unreached_parts=module.unreached,
    )


def _parts(shape: StepShape, place: int, layers: tuple[int, ...], *, embed: bool, head: bool) -> StageParts:
    """Return the parts of a place, whose buffers are those of any other place with the same kinds of blocks."""
    dims, model, freeze = shape.dims, shape.model, shape.config.training.freeze
    # Blocks of one kind have the same buffers but for the names, which those of the first stand for.
    first = {} if freeze else shape.shared("first of each kind", lambda: _first_of_each_kind(model))
    named = {layer: layer if freeze else first[model.is_dense(layer)] for layer in layers}
    sizes = dims.tp, dims.ep, dims.etp, dims.pp_enabled, dims.fsdp_size, dims.efsdp_size, shape.num_replicas
    chosen = tuple(sorted(set(named.values())))
    found = shape.shared(("groups", sizes, chosen, embed, head), lambda: _groups(shape, chosen, embed, head))
    return StageParts(
        place=place,
        layers=layers,
        embed=embed,
        head=head,
        root=(*found.root, *found.tied),
        tied=found.tied,
        blocks=_told_apart(found.blocks, named),
        block_experts=_told_apart(found.experts, named),
        is_pipelined=dims.pp_enabled,
    )


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """The buffers of the parts that one rank has, by the index of each block."""

    root: tuple[PlannedBuffer, ...]
    tied: tuple[PlannedBuffer, ...]
    blocks: dict[int, tuple[PlannedBuffer, ...]]
    experts: dict[int, tuple[PlannedBuffer, ...]]


def _groups(shape: StepShape, layers: tuple[int, ...], embed: bool, head: bool) -> _Groups:
    dims = shape.dims
    sizes = dims.tp, dims.ep, dims.etp, dims.pp_enabled, dims.efsdp_size
    planned = shape.shared(("planned", sizes, layers, embed, head), lambda: _planned(shape, layers, embed, head))

    def buffers(parameters: tuple[PlannedParameter, ...], shards: int) -> tuple[PlannedBuffer, ...]:
        # By identity: the memo holds the parameters.
        key = "buffers", id(parameters), shards, shape.num_replicas
        return shape.shared(key, lambda: _buffers(shape, parameters, shards))

    return _Groups(
        root=buffers(planned.root, dims.fsdp_size),
        tied=buffers(planned.tied_embedding, dims.fsdp_size),
        blocks={layer: buffers(each, dims.fsdp_size) for layer, each in planned.blocks.items()},
        experts={layer: buffers(each, dims.efsdp_size) for layer, each in planned.experts.items()},
    )


def _planned(shape: StepShape, layers: tuple[int, ...], embed: bool, head: bool) -> DecoderParameters:
    freeze = shape.config.training.freeze
    return planned_parameters(shape.model, shape.dims, layers=layers, embed=embed, head=head, freeze=freeze)


def _buffers(shape: StepShape, parameters: tuple[PlannedParameter, ...], shards: int) -> tuple[PlannedBuffer, ...]:
    return tuple(
        plan_group(
            parameters,
            shards,
            param_itemsize=shape.itemsize,
            reduce_itemsize=shape.reduce_itemsize,
            num_replicas=shape.num_replicas,
        )
    )


def _first_of_each_kind(model: DecoderConfig) -> dict[bool, int]:
    """Return the first dense block and the first one with experts."""
    first: dict[bool, int] = {}
    for layer in range(model.num_hidden_layers):
        first.setdefault(model.is_dense(layer), layer)
    return first


def _told_apart(
    groups: Mapping[int, tuple[PlannedBuffer, ...]], named: Mapping[int, int]
) -> dict[int, tuple[PlannedBuffer, ...]]:
    """Return the buffers of each block; of its own where blocks are told apart, by what is trained before them.

    Args:
        groups: buffers by the block that stands for those of its kind.
        named: the block that stands for each.
    """
    trained = {like for like, group in groups.items() if all(each.trainable for each in group)}
    return {
        layer: groups[like] if like in trained else tuple(map(copy.copy, groups[like]))
        for layer, like in named.items()
        if like in groups
    }
