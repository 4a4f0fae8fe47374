"""A model whose stages run as a pipeline, its split into stages, and the sharding of samples over cp ranks."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.parallel.attention import ContextParallel, use_sequence_sharding
from hp_dtensor.platform.interface import Platform
from hp_trainer._coordination import all_gather_object
from hp_trainer.config import ParallelConfig, TrainerConfig
from hp_trainer.data import Batch
from hp_trainer.exceptions import PipelineError
from hp_trainer.models import ModelPart
from hp_trainer.parallel import ParallelDims
from hp_trainer.pipeline import (
    Pipeline,
    PipelineStage,
    Schedule,
    TiedWeights,
    balanced_stages,
    build_schedule,
    listed_stages,
    validate,
)
from hp_trainer.pipeline.schedules import repeats_itself


class SequenceSharder:
    """Shards the sequences of batches, which all cp ranks read in full, to this rank's tokens.

    Ids, targets and positions are sharded alike, so that each token keeps its target, which is already shifted, and its
    position in its document. The numbers of tokens and targets remain those of the global batch. Packed documents are
    sharded so that attention is equal work on all ranks; the batch carries its sharding.
    """

    def __init__(self, style: ContextParallel, ranks: int, rank: int) -> None:
        self.style, self.ranks, self.rank = style, ranks, rank

    def shard(self, batch: Batch) -> Batch:
        """Return this rank's shard of each sample, with positions and the sharding."""
        # Sharded on the host, before the copy to the device: a cp rank's device only has its own tokens.
        length = batch.ids.shape[1]
        sharding = self.style.sharding(length, self.ranks, positions=batch.positions)
        positions = batch.positions
        if positions is None:
            # Explicit, since after sharding an index in the shard is no longer the token's position.
            positions = np.broadcast_to(np.arange(length, dtype=np.int64), batch.ids.shape)
        ids, targets, positions = (sharding.shard(x, self.rank) for x in (batch.ids, batch.targets, positions))
        return replace(batch, ids=ids, targets=targets, positions=positions, sharding=sharding)


@dataclass(frozen=True)
class StagePlan:
    """The stages of a model, and the schedule in which the ranks of the pipeline run them."""

    schedule: Schedule
    stages: tuple[ModelPart, ...]

    def indices_of(self, rank: int) -> list[int]:
        """Return the indices of the stages of a pipeline rank."""
        return [stage for stage, owner in enumerate(self.schedule.rank_of_stage) if owner == rank]

    def parts_of(self, rank: int) -> ModelPart:
        """Return the parts of the model in all stages of a pipeline rank."""
        return functools.reduce(ModelPart.union, (self.stages[index] for index in self.indices_of(rank)))


def plan_stages(config: TrainerConfig, dims: ParallelDims) -> StagePlan:
    """Split the model of a configuration into stages, and build its schedule."""
    schedule = make_schedule(config, dims)
    return StagePlan(schedule, stage_parts(config, schedule.num_stages))


def stage_parts(config: TrainerConfig, num_stages: int) -> tuple[ModelPart, ...]:
    """Return the part of the model in each stage."""
    layers, last = split_layers(config, num_stages), num_stages - 1
    return tuple(ModelPart(embed=i == 0, layers=tuple(each), head=i == last) for i, each in enumerate(layers))


def make_schedule(config: TrainerConfig, dims: ParallelDims, *, is_shortened: bool = False) -> Schedule:
    """Build and validate the schedule of a step; `is_shortened`: of few micro-batches, validating foreign ones."""
    settings = config.pipeline
    schedule = build_schedule(
        settings.schedule,
        num_ranks=dims.pp,
        num_microbatches=(checked_microbatches if is_shortened else num_microbatches)(config, dims),
        stages_per_rank=settings.stages_per_rank,
    )
    # On the host: a schedule that deadlocks would otherwise hang all ranks until the timeout. A plan starts no rank,
    # and would spend most of its time on built-in schedules, of which tests show that they end.
    if not (is_shortened and repeats_itself(settings.schedule)):
        validate(schedule)
    return schedule


def checked_microbatches(config: TrainerConfig, dims: ParallelDims) -> int:
    """Return a number of micro-batches for which the schedule is valid only if it is for those of a step."""
    number = num_microbatches(config, dims)
    # A built-in schedule that works for two rounds of micro-batches works for any number of them.
    return min(number, 2 * dims.pp) if repeats_itself(config.pipeline.schedule) else number


def num_microbatches(config: TrainerConfig, dims: ParallelDims) -> int:
    """Return the number of micro-batches of a rank's step; by default one, and in a pipeline one per sample."""
    share = config.training.global_batch_size // dims.dp_size
    if dims.pp_enabled and config.pipeline.microbatches is not None:
        return config.pipeline.microbatches
    return max(1, share // (config.training.micro_batch_size or (1 if dims.pp_enabled else share)))


def split_layers(config: TrainerConfig, num_stages: int) -> list[range]:
    """Return the layers of each stage: those of `pipeline.layers`, or balanced by estimated cost."""
    options = config.model.options
    num_layers = getattr(options, "num_hidden_layers", None)
    if num_layers is None:
        raise PipelineError(f"model {config.model.name!r} has no num_hidden_layers, and cannot be split into stages")
    if config.pipeline.layers is not None:
        return listed_stages(config.pipeline.layers, num_layers, num_stages)
    # Operations per token of each layer, and of the head in the last stage, which with a large vocabulary costs as much
    # as several layers. Without `stage_costs` all layers cost the same.
    stage_costs = getattr(options, "stage_costs", lambda length: ([1.0] * num_layers, 0.0))
    costs, last_cost = stage_costs(config.training.sequence_length)
    return list(_even_stages(tuple(costs), num_stages, last_cost))


@functools.lru_cache(maxsize=64)
def _even_stages(costs: tuple[float, ...], num_stages: int, last_cost: float) -> tuple[range, ...]:
    # Cached: the search over layouts and settings splits the same layers many times.
    return tuple(balanced_stages(costs, num_stages, last_cost=last_cost))


Tensor = Any


class ModelStage(PipelineStage):
    """One stage of a rank's model. The last stage returns the summed loss, the others activations."""

    def __init__(self, model: Any, parts: ModelPart, index: int, num_stages: int) -> None:
        super().__init__(model, index, num_stages)
        self._parts = parts
        # Called before each forward with its rows and their sharding.
        self.before_call: Callable[[np.ndarray | None, Any], None] = lambda rows, sharding: None
        # Returns a context of each forward, which measures its time.
        self.measure: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the stage; only the last stage gets the targets."""
        # A rank with several stages passes the same kwargs to all of them: see `PipelinedModel._run`.
        targets = kwargs["targets"] if self.is_last else None
        self.before_call(kwargs["rows"], kwargs["sharding"])
        with self.measure(), use_sequence_sharding(kwargs["sharding"]):
            return self.submod(*args, targets, kwargs["positions"], self._parts, kwargs["rows"])


class PipelinedModel:
    """The stages of this rank, parallelized, as a pipeline; `sharder` shards micro-batches over the cp ranks."""

    def __init__(
        self,
        platform: Platform,
        model: Any,
        plan: StagePlan,
        mesh: DeviceMesh,
        parallel: ParallelConfig,
        sharder: SequenceSharder | None = None,
    ) -> None:
        self.platform, self.model, self._sharder = platform, model, sharder
        pp = mesh["pp"]
        self.group = pp.group_along()
        num_stages = len(plan.stages)
        stages = [
            ModelStage(model, plan.stages[index], index, num_stages) for index in plan.indices_of(self.group.rank)
        ]
        self.tied = TiedWeights(platform.named_parameters(model), pp)
        self.stages = stages
        self._scale: Callable[[Tensor], Tensor] = lambda loss: loss
        # The loss is scaled by a method that reads `_scale`, because the scale changes between steps.
        self._pipeline = Pipeline(
            stages,
            plan.schedule,
            pp,
            self._scaled,
            tied=self.tied,
            gathers_for_step=parallel.gathers_for_step,
            reduces_once=parallel.reduce_gradients == "step",
        )
        self._loss_sums: list[Tensor] = []

    def accumulate_gradients(self, batch: Batch, scale: Callable[[Tensor], Tensor]) -> Tensor:
        """Run forward, and backward from `scale(loss)`, of a step; return the summed loss on the last stage, else 0."""
        self._scale = scale
        return self._run(batch, forward_only=False)

    def loss_sum(self, batch: Batch) -> Tensor:
        """Return the summed loss on the rank of the last stage, zero on others, without gradients."""
        return self._run(batch, forward_only=True)

    def _run(self, batch: Batch, *, forward_only: bool) -> Tensor:
        # A fixed number of micro-batches, since the schedule was built for it; evaluation uses the same one.
        batches = batch.micro_batches(len(batch.samples) // self._pipeline.num_microbatches)
        if self._sharder is not None:
            batches = [self._sharder.shard(micro) for micro in batches]
        positions = [None if micro.positions is None else self._tensor(micro.positions) for micro in batches]
        # Only the first stage needs ids and only the last one targets; other ranks copy nothing to their device.
        targets: Sequence[Any] = [None] * len(batches)
        if self._pipeline.has_last_stage:
            targets = [self._tensor(micro.targets) for micro in batches]
        ids = [(self._tensor(micro.ids),) for micro in batches] if self._pipeline.has_first_stage else []
        kwargs = [
            {"targets": target, "positions": position, "rows": micro.rows, "sharding": micro.sharding}
            for target, position, micro in zip(targets, positions, batches, strict=True)
        ]
        self._loss_sums.clear()
        self._pipeline.run_microbatches(ids, kwargs, forward_only=forward_only)
        # Zero on ranks without the last stage; `OptimizerStep.agree` sums over the pipeline.
        total = self.platform.zeros((), self.platform.dtype("float32"))
        for loss in self._loss_sums:
            total = self.platform.ops.add(total, loss)
        self._loss_sums.clear()
        return total

    def _scaled(self, loss_sum: Tensor, _: Any) -> Tensor:
        # Records use the loss itself, but backward starts from the scaled one.
        self._loss_sums.append(self.platform.detach(loss_sum))
        return self._scale(loss_sum)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return self.platform.from_numpy(np.ascontiguousarray(array))

    def after_optimizer_step(self) -> Mapping[str, float]:
        """Run the model's own updates after a step, and return its metrics over all stages."""
        metrics: Mapping[str, float] = self.model.after_optimizer_step(functools.partial(all_gather_object, self.group))
        return metrics

    def num_parameters(self) -> int:
        """Return the number of elements of the parameters of all stages, counting tied weights once."""
        # Global shapes, so the ranks of one stage agree, and the sum is over stages only.
        parameters = [p for _, p in self.platform.named_parameters(self.model) if not self.tied.is_copy(p)]
        return sum(all_gather_object(self.group, sum(math.prod(p.shape) for p in parameters)))
