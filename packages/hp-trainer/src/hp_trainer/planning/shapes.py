"""Sizes of a step on one rank: what every part of the plan is computed from.

The parts of the model that one rank has, and the buffers in which its weights lie.

The blocks that a rank computes again in backward, by settings or by a budget of activations.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hp_fsdp import PlannedBuffer, PlannedParameter, plan_group
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import PlanError
from hp_trainer.models import DecoderConfig, DecoderParts
from hp_trainer.models.decoder.parameters import DecoderParameters, planned_parameters
from hp_trainer.models.recomputation import (
    KINDS,
    NOTHING_AGAIN,
    BlockRecompute,
    Kind,
    block_names,
    recompute_by_pattern,
)
from hp_trainer.parallel import ParallelDims
from hp_trainer.planning.pipeline import PipelineFacts, pipeline_facts
from hp_trainer.planning.user_modules import CountModule, ModuleFacts
from hp_trainer.training.activation_budget import BudgetError, plan_activations
from hp_trainer.training.pipelined import cut_layers, num_microbatches

T = TypeVar("T")
Memo = dict[Hashable, Any]
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class StepShape:
    """A configuration under a layout, with the sizes that follow from both.

    Attributes:
        config: of the run; its model is the decoder, unless there is a `module`.
        dims: degrees of parallelism, which fit the model and the batch.
        is_host: the device is a CPU, which computes experts in one operation in float32 alone.
        memo: what many layouts of one configuration have in common, see `shared`.
        module: of a user's own module, what was counted of it.
    """

    config: TrainerConfig
    dims: ParallelDims
    is_host: bool = False
    memo: Memo = field(default_factory=dict, repr=False, compare=False)
    module: ModuleFacts | None = None

    @classmethod
    def of(
        cls,
        config: TrainerConfig,
        dims: ParallelDims,
        memo: Memo | None = None,
        *,
        is_host: bool = False,
        count_module: CountModule | None = None,
    ) -> StepShape:
        """Return the shape of a configuration's step.

        Args:
            memo: of other layouts of the same configuration; None: there are none.
            count_module: counts a user's own module for so many samples of a forward; None: the model is the decoder.

        Raises:
            PlanError: the model does not tell its parameters.
        """
        shape = cls(config, dims, is_host, {} if memo is None else memo)
        if count_module is not None:
            return replace(shape, module=count_module(shape.micro_batch))
        if not isinstance(config.model.options, DecoderConfig):
            raise PlanError(
                f"model {config.model.name!r} does not tell its parameters and operations before it is built; plans "
                "are made for the decoder (model.name=decoder), whose options describe many architectures"
            )
        return shape

    def shared(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what `compute` gave for the first layout with this key, which holds all that the result depends on.

        The configuration itself is left out: layouts of one configuration alone share a memo.
        """
        if key not in self.memo:
            self.memo[key] = compute()
        found: T = self.memo[key]
        return found

    @property
    def model(self) -> DecoderConfig:
        """The model's options."""
        options = self.config.model.options
        assert isinstance(options, DecoderConfig)
        return options

    @functools.cached_property
    def samples(self) -> int:
        """Samples of a step that one rank reads."""
        return self.config.training.global_batch_size // self.dims.dp_size

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Forwards and backwards of a step."""
        if self.dims.pp_enabled:
            return num_microbatches(self.config, self.dims)
        return self.samples // (self.config.training.micro_batch_size or self.samples)

    @functools.cached_property
    def facts(self) -> PipelineFacts:
        """Facts of the pipeline's schedule."""
        settings = self.config.pipeline
        number, stages = self.num_microbatches, settings.stages_per_rank
        return _facts(settings.schedule, self.dims.pp, number, stages, recomputes=self.recomputes)

    def parts_of(self, place: int) -> DecoderParts:
        """Return the parts of the model at a place of the pipeline."""
        owners = self.facts.rank_of_stage
        return self.shared(("parts", owners, place), lambda: self._parts_of(owners, place))

    def _parts_of(self, owners: tuple[int, ...], place: int) -> DecoderParts:
        layers = self._cut(len(owners))
        mine = [stage for stage, owner in enumerate(owners) if owner == place]
        return DecoderParts(
            embed=0 in mine,
            layers=tuple(layer for stage in mine for layer in layers[stage]),
            head=len(owners) - 1 in mine,
        )

    def block_name(self, layer: int) -> str:
        """Return the name of a block, or of a part of a user's own module."""
        return f"layers.{layer}" if self.module is None else self.module.names[layer]

    def ends_of(self, place: int) -> frozenset[int]:
        """Return the last layer of each stage at a place of the pipeline, whose activations are not offloaded."""
        if not self.dims.pp_enabled:
            return frozenset({(self.model.num_hidden_layers if self.module is None else len(self.module.blocks)) - 1})
        owners = self.facts.rank_of_stage
        stages = self._cut(len(owners))
        return frozenset(max(stages[each]) for each, owner in enumerate(owners) if owner == place and stages[each])

    def _cut(self, num_stages: int) -> list[range]:
        return self.shared(("cut", num_stages), lambda: cut_layers(self.config, num_stages))

    @functools.cached_property
    def micro_batch(self) -> int:
        """Samples of one forward."""
        return self.samples // self.num_microbatches

    @property
    def itemsize(self) -> int:
        """Bytes of an element in computation."""
        return _ITEMSIZE[self.config.training.dtype]

    @property
    def reduce_itemsize(self) -> int:
        """Bytes of an element of gradients that are summed over ranks."""
        training = self.config.training
        return 4 if training.dtype == "float32" else _ITEMSIZE[training.reduce_dtype]

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of one forward on the context parallel rank that has most."""
        return self.micro_batch * math.ceil(self.config.training.sequence_length / self.dims.cp)

    @property
    def fuses_experts(self) -> bool:
        """True if all experts are computed in one operation, which keeps less."""
        return not self.is_host or self.config.training.dtype == "float32"

    @property
    def recomputes(self) -> bool:
        """True if some blocks are computed again in backward."""
        training = self.config.training
        return training.recompute != "none" or training.activation_budget is not None

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same shard: replicas, and in the peer mesh the ranks that share a sequence."""
        peer = self.dims.expert_mesh == "peer"
        return self.dims.dp_replicate * (self.dims.cp if peer else 1)


_facts = functools.lru_cache(maxsize=512)(pipeline_facts)


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


def recompute_of(shape: StepShape) -> list[BlockRecompute]:
    """Return what each block of the model computes again in backward; a user's own module computes nothing again."""
    if shape.module is not None:
        return [NOTHING_AGAIN] * len(shape.module.blocks)
    return shape.shared(("recompute", recompute_key(shape)), lambda: _recompute(shape))


def recompute_key(shape: StepShape) -> Hashable:
    """Return what the choice depends on: with a budget on the whole layout."""
    return None if shape.config.training.activation_budget is None else shape.dims


def keeps_budget(shape: StepShape) -> bool:
    """Return whether activations can stay within their budget, if there is one: runs whose cannot are refused."""
    return budget_error(shape) is None


def budget_error(shape: StepShape) -> BudgetError | None:
    """Return why activations cannot stay within their budget; None if they can, or there is none."""
    if shape.config.training.activation_budget is None or shape.module is not None:
        return None
    found = _within_budget(shape)
    return found if isinstance(found, BudgetError) else None


def _within_budget(shape: StepShape) -> list[BlockRecompute] | BudgetError:
    """Return the choice that stays within the budget of activations, or why there is none."""

    def find() -> list[BlockRecompute] | BudgetError:
        try:
            return plan_activations(
                shape.config, shape.dims, _kept(shape), fused_experts=shape.fuses_experts
            ).of_layers()
        except BudgetError as error:
            return error.with_traceback(None)  # whose frames would stay as long as the memo

    return shape.shared(("within budget", shape.dims), find)


def _kept(shape: StepShape) -> Sequence[Kind]:
    keep = shape.config.training.recompute_keep
    return KINDS if keep is None else keep


def _recompute(shape: StepShape) -> list[BlockRecompute]:
    training, num_layers = shape.config.training, shape.model.num_hidden_layers
    if training.activation_budget is not None:
        # Without a choice the memory shown is the least, and above the budget.
        least = [BlockRecompute(mode="full", offloads=training.offload_activations)] * num_layers
        found = _within_budget(shape)
        return least if isinstance(found, BudgetError) else found
    kept = tuple(_kept(shape)) if training.recompute == "selective" else ()
    chosen = BlockRecompute(mode=training.recompute, keep=kept, offloads=training.offload_activations)
    patterns = training.recompute_blocks
    return recompute_by_pattern(block_names(num_layers), chosen, every=training.recompute_every, patterns=patterns)
