"""Sizes of a step on one rank, the part of the model that the rank has, and the buffers that hold its weights.

The rest of the plan is computed from these. Start reading here.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hp_dtensor.parallel.attention import ContextCost
from hp_fsdp import PlannedBuffer, PlannedParameter, plan_group
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import PlanError
from hp_trainer.models import ModelEstimates, ModelPart
from hp_trainer.models.estimates import ITEMSIZE, MicroBatchShape, ModelActivations, ModelParameters, estimates_of
from hp_trainer.models.recomputation import NOTHING_RECOMPUTED, BlockRecompute, recompute_by_settings, saved_kinds
from hp_trainer.parallel import ParallelDims
from hp_trainer.parallel.context import context_cost
from hp_trainer.planning.pipeline import PipelineFacts, pipeline_facts
from hp_trainer.training.activation_budget import micro_batch_shape, plan_activations
from hp_trainer.training.pipelined import num_microbatches, split_layers
from hp_trainer.training.recompute_search import BudgetError

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
        memo: results that layouts of one configuration share, see `shared`.
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
            memo: the memo of other layouts of the same configuration; None: a new one.
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

        The key must state everything of the layout that the result depends on. The configuration is not part of it:
        only layouts of one configuration share a memo.
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
        return micro_batch_shape(self.config, self.dims, fused_experts=self.fuses_experts)

    def attention_cost(self, window: int | None = None) -> ContextCost:
        """Return the cost of one layer's attention over context parallel ranks."""
        dims, training, options = self.dims, self.config.training, self.config.model.options
        # Everything in the layout that `context_cost` reads. Many layouts differ only in other degrees.
        key = "context", dims.tp, dims.cp, dims.dp_size, self.micro_batch, window
        return self.shared(key, lambda: context_cost(dims, options, training, window=window, batch=self.micro_batch))

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
        owners = self.pipeline.rank_of_stage

        def compute() -> ModelPart:
            stages = self._stages(len(owners))
            own = [stage for stage, owner in enumerate(owners) if owner == rank]
            layers = tuple(layer for stage in own for layer in stages[stage])
            return ModelPart(embed=0 in own, layers=layers, head=len(owners) - 1 in own)

        return self.shared(("part", owners, rank), compute)

    def last_layers(self, rank: int) -> frozenset[int]:
        """Return the last layer of each stage of a rank, whose activations are not offloaded."""
        if not self.dims.pp_enabled:
            # Its backward follows its forward at once, so a copy to the host would be needed back immediately.
            return frozenset({self.model.num_layers - 1})
        owners = self.pipeline.rank_of_stage
        stages = self._stages(len(owners))
        return frozenset(max(stages[each]) for each, owner in enumerate(owners) if owner == rank and stages[each])

    def _stages(self, num_stages: int) -> list[range]:
        return self.shared(("stages", num_stages), lambda: split_layers(self.config, num_stages))


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
    return shape.shared(("activations", sizes), lambda: shape.model.activations(sizes))


def recompute_key(shape: StepShape) -> Hashable:
    """Return the key by which layouts share a recomputation: None, or with a budget all degrees of the layout."""
    return None if shape.config.training.activation_budget is None else shape.dims


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

    return shape.shared(("recompute", recompute_key(shape)), compute)


# Weights -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageBuffers:
    """The part of the model on one rank of the pipeline, and the FSDP buffers that hold its weights.

    Attributes:
        rank: index in the pipeline; 0 without one.
        part: the part of the model, whose `layers` are stated.
        root: buffers of embedding, norm and head, a tied embedding in a group of its own included.
        tied: buffers of `root` that another stage has a copy of.
        blocks: buffers of each block without its experts; blocks of one kind share the tuple.
        block_experts: buffers of each block's experts.
        is_pipelined: the pipeline has other ranks.
        unreached_blocks: first blocks, which backward does not reach; None: those before the first trained parameter.
    """

    rank: int
    part: ModelPart
    root: tuple[PlannedBuffer, ...]
    tied: tuple[PlannedBuffer, ...]
    blocks: dict[int, tuple[PlannedBuffer, ...]]
    block_experts: dict[int, tuple[PlannedBuffer, ...]]
    is_pipelined: bool
    unreached_blocks: tuple[int, ...] | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the blocks, in order."""
        layers = self.part.layers
        assert isinstance(layers, tuple)
        return layers

    @property
    def head(self) -> bool:
        """True if the part has the final norm and the head."""
        return self.part.head

    @functools.cached_property
    def counted(self) -> tuple[tuple[PlannedBuffer, int], ...]:
        """Every different buffer once, with the number of blocks that have one like it."""
        # Blocks of one kind share the tuple itself, so counting identities avoids comparing buffers.
        groups = [*self.blocks.values(), *self.block_experts.values(), self.root]
        kinds = {id(group): group for group in groups}
        times = Counter(map(id, groups))
        return tuple((each, times[key]) for key, group in kinds.items() for each in group)

    @functools.cached_property
    def buffers(self) -> tuple[PlannedBuffer, ...]:
        """The buffers of all blocks, then of the root, then of experts."""
        dense = (*itertools.chain(*self.blocks.values()), *self.root)
        return (*dense, *itertools.chain(*self.block_experts.values()))

    def total(self, name: str) -> float:
        """Return the sum of one attribute over all buffers."""
        return float(sum(times * getattr(each, name) for each, times in self.counted))

    def block_buffers(self, layer: int) -> tuple[PlannedBuffer, ...]:
        """Return all buffers of a block."""
        return (*self.blocks[layer], *self.block_experts.get(layer, ()))

    @functools.cached_property
    def unreached(self) -> tuple[int, ...]:
        """First blocks of the model that backward does not reach, because nothing is trained in or before them."""
        if self.unreached_blocks is not None:
            return self.unreached_blocks
        found: list[int] = []
        trains = any(each.name == "embed.weight" and each.trainable for b in self.root for each in b.parameters)
        for layer in () if self.rank > 0 or trains else self.layers:
            if any(each.trainable for each in self.block_buffers(layer)):
                break
            found.append(layer)
        return tuple(found)

    def kind(self, layer: int) -> tuple[int, int]:
        """Return a key that is equal for blocks with equal buffers."""
        return id(self.blocks[layer]), id(self.block_experts.get(layer))


def stage_buffers(shape: StepShape, rank: int) -> StageBuffers:
    """Return the buffers of one rank of the pipeline; without a pipeline, rank 0 has everything."""

    def first_of_each_kind() -> dict[Hashable, int]:
        # Filled from the last layer to the first, so that the first one of a kind remains.
        return {shape.model.layer_kind(layer): layer for layer in reversed(range(shape.model.num_layers))}

    dims, freeze, part = shape.dims, shape.config.training.freeze, shape.part_of(rank)
    layers = tuple(part.layers or ())
    # Blocks of one kind differ only in names, so the first block's buffers serve for all. Patterns of frozen names may
    # tell them apart.
    first = {} if freeze else shape.shared("first of each kind", first_of_each_kind)
    representative = {layer: layer if freeze else first[shape.model.layer_kind(layer)] for layer in layers}
    # Everything that the buffers depend on: data-parallel degrees count only by their products.
    sizes = dims.tp, dims.ep, dims.etp, dims.pp_enabled, dims.fsdp_size, dims.efsdp_size, shape.num_replicas
    chosen = ModelPart(embed=part.embed, layers=tuple(sorted(set(representative.values()))), head=part.head)
    found = shape.shared(("groups", sizes, chosen), lambda: _groups(shape, chosen))
    return StageBuffers(
        rank=rank,
        part=ModelPart(embed=part.embed, layers=layers, head=part.head),
        root=(*found.root, *found.tied),
        tied=found.tied,
        blocks=_by_layer(found.blocks, representative),
        block_experts=_by_layer(found.experts, representative),
        is_pipelined=dims.pp_enabled,
        unreached_blocks=shape.model.unreached_blocks(),
    )


def full_shapes(shape: StepShape) -> Mapping[str, tuple[int, ...]]:
    """Return the global shape of every parameter of the model, by name."""

    def compute() -> Mapping[str, tuple[int, ...]]:
        # `ParallelDims()` is one rank, on which a local shape is the global one.
        part = ModelPart(layers=tuple(range(shape.model.num_layers)))
        found = shape.model.parameters(ParallelDims(), part)
        groups = (found.root, *found.blocks.values(), *found.experts.values())
        return {each.name: each.shape for group in groups for each in group}

    return shape.shared("full shapes", compute)


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """The buffers of a part of the model, by the index of each block."""

    root: tuple[PlannedBuffer, ...]
    tied: tuple[PlannedBuffer, ...]
    blocks: dict[int, tuple[PlannedBuffer, ...]]
    experts: dict[int, tuple[PlannedBuffer, ...]]


def _groups(shape: StepShape, part: ModelPart) -> _Groups:
    dims = shape.dims
    sizes = dims.tp, dims.ep, dims.etp, dims.pp_enabled, dims.efsdp_size

    def plan_parameters() -> ModelParameters:
        return shape.model.parameters(dims, part, freeze=shape.config.training.freeze)

    planned = shape.shared(("parameters", sizes, part), plan_parameters)

    def buffers(parameters: tuple[PlannedParameter, ...], shards: int) -> tuple[PlannedBuffer, ...]:
        # By identity, which is unique because the memo keeps the parameters alive.
        key = "buffers", id(parameters), shards, shape.num_replicas
        return shape.shared(key, lambda: _plan_buffers(shape, parameters, shards))

    return _Groups(
        root=buffers(planned.root, dims.fsdp_size),
        tied=buffers(planned.tied_embedding, dims.fsdp_size),
        blocks={layer: buffers(each, dims.fsdp_size) for layer, each in planned.blocks.items()},
        experts={layer: buffers(each, dims.efsdp_size) for layer, each in planned.experts.items()},
    )


def _plan_buffers(shape: StepShape, parameters: tuple[PlannedParameter, ...], shards: int) -> tuple[PlannedBuffer, ...]:
    training = shape.config.training
    # None: each parameter keeps its own item size, as in an unmodified module of mixed dtypes.
    retains_dtypes = shape.model.retains_dtypes and training.dtype == "float32"
    # Training in float32 ignores `training.reduce_dtype`: nothing is rounded for the reduction.
    reduce_dtype = "float32" if training.dtype == "float32" else training.reduce_dtype
    return tuple(
        plan_group(
            parameters,
            shards,
            param_itemsize=None if retains_dtypes else ITEMSIZE[training.dtype],
            reduce_itemsize=None if retains_dtypes else ITEMSIZE[reduce_dtype],
            num_replicas=shape.num_replicas,
        )
    )


def _by_layer(
    groups: Mapping[int, tuple[PlannedBuffer, ...]], representative: Mapping[int, int]
) -> dict[int, tuple[PlannedBuffer, ...]]:
    """Return the buffers of each block: those planned for its representative, the first block of its kind.

    Blocks with frozen parameters get copies of their own, because whether backward reaches one depends on the blocks
    before it, and traffic tells buffers apart by identity.
    """
    trained = {layer for layer, group in groups.items() if all(each.trainable for each in group)}
    return {
        layer: groups[like] if like in trained else tuple(map(copy.copy, groups[like]))
        for layer, like in representative.items()
        if like in groups
    }
