"""Sizes of a step on one rank, the part of the model that the rank has, and the buffers that hold its weights.

The rest of the plan is computed from these. Start reading here.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hp_fsdp import PlannedBuffer, PlannedParameter, plan_group
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import PlanError
from hp_trainer.models import ModelEstimates, ModelPart
from hp_trainer.models.estimates import ITEMSIZE, MicroBatchShape, ModelActivations, ModelParameters, estimates_of
from hp_trainer.models.recomputation import NOTHING_RECOMPUTED, BlockRecompute, recompute_by_settings, saved_kinds
from hp_trainer.parallel import ParallelDims
from hp_trainer.planning.pipeline import PipelineFacts, pipeline_facts
from hp_trainer.training.activation_budget import BudgetError, micro_batch_shape, plan_activations
from hp_trainer.training.pipelined_model import num_microbatches, stage_parts

T = TypeVar("T")
PLANNED_DISPATCHERS = (
    "all_to_all",
    "all_to_all_int8",
    "all_to_all_fp8",
    "copy_per_expert",
    "all_gather",
    "two_level",
    "auto",
)
Memo = dict[Hashable, Any]
# Estimates a model that cannot estimate itself, for micro-batches of so many samples.
EstimateModel = Callable[[int], ModelEstimates]


@dataclass(frozen=True)
class StepShape:
    """A configuration under a layout, with the sizes that follow from both.

    Attributes:
        config: the run's configuration.
        dims: degrees of parallelism, which fit the model and the batch.
        model: estimates of the model.
        is_host: the device is a CPU, which computes experts in one operation only in float32.
        memo: results that layouts share, see `shared`.
    """

    config: TrainerConfig
    dims: ParallelDims
    model: ModelEstimates = field(repr=False, compare=False)
    is_host: bool = False
    memo: Memo = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        config: TrainerConfig,
        dims: ParallelDims,
        memo: Memo | None = None,
        *,
        is_host: bool = False,
        estimate_model: EstimateModel | None = None,
    ) -> StepShape:
        """Return the shape of a configuration's step.

        Args:
            memo: the memo of other layouts; None: a new one.
            estimate_model: estimates a user's own module; None: the model's options have estimates.

        Raises:
            PlanError: the model has no estimates.
        """
        memo = {} if memo is None else memo
        if estimate_model is not None:
            samples = config.training.global_batch_size // dims.dp_size
            return cls(config, dims, estimate_model(samples // num_microbatches(config, dims)), is_host, memo)
        if "model" not in memo:
            memo["model"] = estimates_of(config.model.options)
        if memo["model"] is None:
            raise PlanError(
                f"model {config.model.name!r} has no estimates of its memory and operations; plans are made for the "
                "decoder (model.name=decoder), whose options describe many architectures, and for models whose options "
                "have a method `estimates`"
            )
        return cls(config, dims, memo["model"], is_host, memo)

    def shared(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the memoized result of `compute` for a key.

        The key must state everything of the layout that the result depends on. The configuration is not part of it,
        except for `training.recompute`: configurations that share a memo differ in that setting and in
        `parallel.reduce_gradients` alone.
        """
        if key not in self.memo:
            self.memo[key] = compute()
        found: T = self.memo[key]
        return found

    # Batch -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def samples(self) -> int:
        """Samples of a step that one rank reads."""
        return self.config.training.global_batch_size // self.dims.dp_size

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Forward and backward passes of a step."""
        return num_microbatches(self.config, self.dims)

    @functools.cached_property
    def micro_batch(self) -> int:
        """Samples of one micro-batch."""
        return self.samples // self.num_microbatches

    @functools.cached_property
    def micro_batch_shape(self) -> MicroBatchShape:
        """Sizes of one micro-batch on a rank, as the model's estimates take them."""
        dims = self.dims
        # Everything in the layout that it depends on. Many layouts differ only in other degrees.
        key = "micro batch", dims.tp, dims.cp, dims.ep, dims.etp, dims.expert_mesh, dims.dp_size, self.num_microbatches

        def compute() -> MicroBatchShape:
            found = micro_batch_shape(self.config, dims, fused_experts=self.fuses_experts)
            # Equal shapes are one object, so that its identity is a key.
            return self.shared(found, lambda: found)

        return self.shared(key, compute)

    @functools.cached_property
    def activations_key(self) -> Hashable:
        """The key by which layouts share activations: the micro-batch, and the recomputation, with a budget by rank."""
        training = self.config.training
        budget = None if training.activation_budget is None else self.dims
        return id(self.micro_batch_shape), training.recompute, budget

    # Layout ----------------------------------------------------------------------------------------------

    @property
    def fuses_experts(self) -> bool:
        """True if all experts are computed in one operation, which saves fewer activations."""
        # As `MicroBatchShape.fused_experts`: on the CPU torch has the grouped product in float32 only.
        return not self.is_host or self.config.training.dtype == "float32"

    @property
    def recomputes(self) -> bool:
        """True if some blocks are recomputed in backward."""
        training = self.config.training
        return training.recompute != "none" or training.activation_budget is not None

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold the same shard: replicas, and in the peer mesh also the `cp` ranks."""
        peer = self.dims.expert_mesh == "peer"
        return self.dims.dp_replicate * (self.dims.cp if peer else 1)

    @functools.cached_property
    def pipeline(self) -> PipelineFacts:
        """Properties of the schedule."""
        settings = self.config.pipeline
        number, stages = self.num_microbatches, settings.stages_per_rank
        return pipeline_facts(settings.schedule, self.dims.pp, number, stages, recomputes=self.recomputes)

    def part_of(self, rank: int) -> ModelPart:
        """Return the part of the model on one rank of the pipeline; without a pipeline, rank 0 has everything."""
        if not self.dims.pp_enabled:
            return ModelPart(layers=tuple(range(self.model.num_layers)))
        key = "part", self.pipeline.rank_of_stage, rank
        return self.shared(key, lambda: functools.reduce(ModelPart.union, self._stages_of(rank)))

    def last_layers(self, rank: int) -> frozenset[int]:
        """Return the last layer of each stage of a rank, whose activations are not offloaded."""
        if not self.dims.pp_enabled:
            # Its backward follows its forward at once, so a copy to the host would be needed back immediately.
            return frozenset(range(self.model.num_layers)[-1:])
        key = "last layers", self.pipeline.rank_of_stage, rank
        return self.shared(key, lambda: frozenset(max(each.layers) for each in self._stages_of(rank) if each.layers))

    def _stages_of(self, rank: int) -> list[ModelPart]:
        owners = self.pipeline.rank_of_stage
        stages = self.shared(("stages", len(owners)), lambda: stage_parts(self.config, len(owners)))
        return [stage for stage, owner in zip(stages, owners, strict=True) if owner == rank]


def unplanned_settings(shape: StepShape) -> list[str]:
    """Return a line for each setting that a plan does not know."""
    parallel = shape.config.parallel
    if not shape.dims.ep_enabled:
        return []
    found = []
    if parallel.ep_dispatcher not in PLANNED_DISPATCHERS:
        what = "plans do not know what it sends; it counts as all_to_all"
        found.append(f"parallel.ep_dispatcher: {parallel.ep_dispatcher}: {what}")
    if parallel.ep_copies:
        found.append("parallel.ep_copies: the weights of copies, and sending them, are not counted")
    if parallel.ep_move_interval is not None:
        found.append("parallel.ep_move_interval: moving experts to other ranks is not counted")
    if (parallel.ep_chunks or 1) > 1:
        what = "experts overlap with sending chunks as far as the device file says (hidden: ep), by default not at all"
        found.append(f"parallel.ep_chunks: {what}")
    return found


# Activations and their recomputation ---------------------------------------------------------------------


def activations_of(shape: StepShape) -> ModelActivations:
    """Return the activations of one micro-batch."""
    sizes = shape.micro_batch_shape
    return shape.shared(("activations", id(sizes)), lambda: shape.model.activations(sizes))


def budget_error(shape: StepShape) -> BudgetError | None:
    """Return the error of a budget of activations that no choice satisfies; None if there is none."""
    if shape.config.training.activation_budget is None or not shape.model.is_recomputable:
        return None
    found = _within_budget(shape)
    return found if isinstance(found, BudgetError) else None


def _within_budget(shape: StepShape) -> list[BlockRecompute] | BudgetError:
    """Return the cheapest recomputation within the budget of activations, or the error if there is none."""

    def find() -> list[BlockRecompute] | BudgetError:
        try:
            kinds = saved_kinds(shape.config.training.recompute_keep)
            return plan_activations(shape.config, shape.dims, kinds, fused_experts=shape.fuses_experts).of_layers()
        except BudgetError as error:
            # The frames of its traceback would live as long as the memo.
            return error.with_traceback(None)

    return shape.shared(("within budget", shape.dims), find)


def recompute_of(shape: StepShape) -> list[BlockRecompute]:
    """Return the recomputation of each block of the model."""
    training, num_layers = shape.config.training, shape.model.num_layers

    def compute() -> list[BlockRecompute]:
        if not shape.model.is_recomputable:
            return [NOTHING_RECOMPUTED] * num_layers
        if training.activation_budget is not None:
            # A budget that is too small is reported apart; the plan then shows the least memory there is.
            least = [BlockRecompute(mode="full", offloads=training.offload_activations)] * num_layers
            found = _within_budget(shape)
            return least if isinstance(found, BudgetError) else found
        return recompute_by_settings(training, num_layers)

    # With a budget it differs between layouts.
    budget = None if training.activation_budget is None else shape.dims
    return shape.shared(("recompute", training.recompute, budget), compute)


# Weights -------------------------------------------------------------------------------------------------


class GroupBytes(NamedTuple):
    """Sums over the buffers of one FSDP group, or arrays of these sums with an entry for each block.

    Attributes:
        shard, full, full_gradient, gradient, reduced, gather_wire, reduce_wire: sums of the attributes of
            `PlannedBuffer`.
        replicated: this rank's shard of the gradients, in the dtype in which replicas all-reduce it.
        leaving: bytes of `full_gradient` freed when its reduction ends. With one shard the reduction returns the full
            gradient itself, and nothing is freed.
        autograd: gradients that autograd holds of single weights, before they are copied into the flat buffer.
        embedding: the part of `autograd` for the embedding.
        state, average: the optimizer's state and the moving average on the rank that has most.
        buffers, trained: number of buffers, and of those that are trained.
    """

    shard: Any = 0.0
    full: Any = 0.0
    full_gradient: Any = 0.0
    gradient: Any = 0.0
    reduced: Any = 0.0
    gather_wire: Any = 0.0
    reduce_wire: Any = 0.0
    replicated: Any = 0.0
    leaving: Any = 0.0
    autograd: Any = 0.0
    embedding: Any = 0.0
    state: Any = 0.0
    average: Any = 0.0
    buffers: Any = 0
    trained: Any = 0


class Group(NamedTuple):
    """The buffers of one FSDP group, and their bytes."""

    buffers: tuple[PlannedBuffer, ...] = ()
    bytes: GroupBytes = GroupBytes()


@dataclass(frozen=True, kw_only=True)
class BlockKinds:
    """Blocks with equal groups on one rank of the pipeline.

    Attributes:
        first: the block whose groups serve for all of its kind.
        unreached: backward does not reach the blocks, because nothing is trained in or before them.
        times: number of blocks.
        of_block: for each block in the order of backward, the index of its kind.
        has_next: for each block in the order of backward, whether backward continues in the block before it.
    """

    first: tuple[int, ...]
    unreached: tuple[bool, ...]
    times: tuple[int, ...]
    of_block: Any
    has_next: Any


@dataclass(frozen=True, kw_only=True)
class StageBuffers:
    """The part of the model on one rank of the pipeline, and the FSDP groups that hold its weights.

    Attributes:
        rank: index in the pipeline; 0 without one.
        part: the part of the model.
        layers: indices of its blocks, in order.
        is_pipelined: the pipeline has other ranks.
        kinds: the kinds of its blocks.
        dense, experts: for each kind, the group of a block without its experts, and that of its experts.
        root: embedding, norm and head.
        tied: an embedding that another stage has a copy of.
    """

    rank: int
    part: ModelPart
    layers: tuple[int, ...]
    is_pipelined: bool
    kinds: BlockKinds
    dense: tuple[Group, ...]
    experts: tuple[Group, ...]
    root: Group
    tied: Group

    @property
    def counted(self) -> Iterator[tuple[Group, int]]:
        """Every different group, with the number of blocks that have one like it."""
        yield from zip(self.dense, self.kinds.times, strict=True)
        yield from ((self.root, 1), (self.tied, 1))
        yield from zip(self.experts, self.kinds.times, strict=True)

    @functools.cached_property
    def total(self) -> GroupBytes:
        """Sums over all groups."""
        groups, times = zip(*self.counted, strict=True)
        return GroupBytes(*(np.array(times, float) @ np.array([each.bytes for each in groups], float)).tolist())

    @functools.cached_property
    def outer(self) -> GroupBytes:
        """Sums of what is in no block: embedding, norm and head."""
        return GroupBytes(*map(sum, zip(self.root.bytes, self.tied.bytes, strict=True)))

    @functools.cached_property
    def expert_blocks(self) -> GroupBytes:
        """Bytes of each block's experts, in the order of backward."""
        return GroupBytes(*_table(self.experts)[self.kinds.of_block].T)

    @functools.cached_property
    def blocks(self) -> GroupBytes:
        """Bytes of each block, in the order of backward."""
        return GroupBytes(*(_table(self.dense) + _table(self.experts))[self.kinds.of_block].T)


def _table(groups: tuple[Group, ...]) -> Any:
    return np.array([each.bytes for each in groups], float).reshape(len(groups), len(GroupBytes._fields))


def stage_buffers(shape: StepShape, rank: int) -> StageBuffers:
    """Return the buffers of one rank of the pipeline; without a pipeline, rank 0 has everything."""
    dims = shape.dims
    # Everything in the layout that the buffers depend on. Replicas have equal buffers.
    sizes = dims.tp, dims.ep, dims.etp, dims.pp, dims.fsdp_size, dims.efsdp_size
    owners = shape.pipeline.rank_of_stage if dims.pp_enabled else ()
    return shape.shared(("stage", sizes, owners, rank), lambda: _stage_buffers(shape, rank))


def _stage_buffers(shape: StepShape, rank: int) -> StageBuffers:
    dims, part = shape.dims, shape.part_of(rank)
    layers, ends = tuple(part.layers or ()), (part.embed, part.head)
    first = shape.shared(("first of each kind", layers), lambda: _first_of_each_kind(shape, layers))
    outer = _parameters(shape, ModelPart(embed=part.embed, layers=(), head=part.head))
    blocks = {layer: _parameters(shape, ModelPart(embed=False, layers=(layer,), head=False)) for layer in set(first)}

    def group(parameters: tuple[PlannedParameter, ...], shards: int) -> Group:
        # By identity, which is unique because the memo keeps the parameters alive.
        return shape.shared(("group", id(parameters), shards), lambda: _plan_group(shape, parameters, shards))

    fsdp, efsdp = dims.fsdp_size, dims.efsdp_size
    kinds = shape.shared(("kinds", ends, rank > 0, layers), lambda: _kinds(shape, rank, layers, first, outer, blocks))
    return StageBuffers(
        rank=rank,
        part=part,
        layers=layers,
        is_pipelined=dims.pp_enabled,
        kinds=kinds,
        dense=tuple(group(blocks[layer].blocks[layer], fsdp) for layer in kinds.first),
        experts=tuple(group(blocks[layer].experts.get(layer, ()), efsdp) for layer in kinds.first),
        root=group(outer.root, fsdp),
        tied=group(outer.tied_embedding, fsdp),
    )


def _parameters(shape: StepShape, part: ModelPart) -> ModelParameters:
    """Return the parameters of the embedding and the head, or of one block; equal ones are the same objects."""
    dims, freeze = shape.dims, shape.config.training.freeze
    # Everything in the layout that they depend on; the second part counts for blocks with experts alone.
    has_experts = shape.shared(("has experts", part), lambda: any(shape.model.parameters(dims, part).experts.values()))
    sizes = (dims.tp, dims.pp_enabled), (dims.ep, dims.etp, dims.efsdp_size) if has_experts else ()

    def same(parameters: tuple[PlannedParameter, ...]) -> tuple[PlannedParameter, ...]:
        return shape.shared(("interned", parameters), lambda: parameters)

    def compute() -> ModelParameters:
        found = shape.model.parameters(dims, part, freeze=freeze)
        return ModelParameters(
            root=same(found.root),
            tied_embedding=same(found.tied_embedding),
            blocks={layer: same(each) for layer, each in found.blocks.items()},
            experts={layer: same(each) for layer, each in found.experts.items()},
        )

    return shape.shared(("parameters", part, sizes), compute)


def full_shapes(shape: StepShape) -> Mapping[str, tuple[int, ...]]:
    """Return the global shape of every parameter of the model, by name."""

    def compute() -> Mapping[str, tuple[int, ...]]:
        # `ParallelDims()` is one rank, on which a local shape is the global one.
        part = ModelPart(layers=tuple(range(shape.model.num_layers)))
        found = shape.model.parameters(ParallelDims(), part)
        groups = (found.root, *found.blocks.values(), *found.experts.values())
        return {each.name: each.shape for group in groups for each in group}

    return shape.shared("full shapes", compute)


def _first_of_each_kind(shape: StepShape, layers: tuple[int, ...]) -> list[int]:
    """Return for each block the first block of the model whose groups differ from its own in names only."""
    # Patterns of frozen names may distinguish blocks of one kind.
    if shape.config.training.freeze:
        return list(layers)
    kinds: dict[Hashable, int] = {}
    for layer in range(shape.model.num_layers):
        kinds.setdefault(shape.model.layer_kind(layer), layer)
    return [kinds[shape.model.layer_kind(layer)] for layer in layers]


def _kinds(
    shape: StepShape,
    rank: int,
    layers: tuple[int, ...],
    first: list[int],
    outer: ModelParameters,
    blocks: Mapping[int, ModelParameters],
) -> BlockKinds:
    """Group the blocks of a rank with equal groups (of the block in `first`), of which backward reaches all or none."""
    unreached = shape.model.unreached_blocks()
    if unreached is None:
        ends = (*outer.root, *outer.tied_embedding)
        # The stages before this one are assumed to train something.
        trains = rank > 0 or any(each.name == "embed.weight" and each.trainable for each in ends)
        every = [(*blocks[each].blocks[each], *blocks[each].experts.get(each, ())) for each in first]
        trained = itertools.accumulate((any(x.trainable for x in each) for each in every), max, initial=trains)
        unreached = tuple(layer for layer, reached in zip(layers, list(trained)[1:], strict=True) if not reached)
    pairs = [(like, layer in unreached) for layer, like in zip(layers, first, strict=True)]
    times = Counter(pairs)
    index = {pair: place for place, pair in enumerate(times)}
    return BlockKinds(
        first=tuple(like for like, _ in times),
        unreached=tuple(is_unreached for _, is_unreached in times),
        times=tuple(times.values()),
        of_block=np.array([index[pair] for pair in reversed(pairs)], int),
        has_next=np.array([layer - 1 in layers for layer in reversed(layers)], bool),
    )


def _plan_group(shape: StepShape, parameters: tuple[PlannedParameter, ...], shards: int) -> Group:
    training = shape.config.training
    # None: each parameter keeps its own item size, as in an unmodified module of mixed dtypes.
    retains_dtypes = shape.model.retains_dtypes and training.dtype == "float32"
    # Training in float32 ignores `training.reduce_dtype`: nothing is rounded for the reduction.
    reduce_dtype = "float32" if training.dtype == "float32" else training.reduce_dtype
    buffers = plan_group(
        parameters,
        shards,
        param_itemsize=None if retains_dtypes else ITEMSIZE[training.dtype],
        reduce_itemsize=None if retains_dtypes else ITEMSIZE[reduce_dtype],
    )
    every = [_buffer_bytes(shape, each) for each in buffers]
    return Group(tuple(buffers), GroupBytes(*map(sum, zip(*every, strict=True))) if every else GroupBytes())


def _buffer_bytes(shape: StepShape, buffer: PlannedBuffer) -> GroupBytes:
    alike: dict[str, Any] = {name: getattr(buffer, name) for name in GroupBytes._fields[:7]}
    if not buffer.trainable:
        return GroupBytes(**alike, buffers=1)
    blocks = zip(buffer.parameters, buffer.layout.blocks, strict=True)
    autograd = {each.name: block.numel * buffer.param_itemsize for each, block in blocks}
    full, shards = full_shapes(shape), buffer.largest_local_numels()
    # An optimizer that does not state its bytes is assumed to have two moments of each element.
    state_bytes = getattr(shape.config.optimizer.options, "state_bytes", lambda _, __, count, size: 2 * count * size)
    has_average = shape.config.training.ema.decay is not None
    return GroupBytes(
        **alike,
        replicated=buffer.layout.shard_numel * buffer.reduce_itemsize,
        leaving=0 if buffer.reduces_in_place else buffer.full_gradient,
        autograd=sum(autograd.values()),
        embedding=autograd.get("embed.weight", 0),
        state=sum(state_bytes(name, full[name], count, buffer.itemsize) for name, count in shards.items()),
        average=sum(shards.values()) * buffer.itemsize * has_average,
        buffers=1,
        trained=1,
    )
