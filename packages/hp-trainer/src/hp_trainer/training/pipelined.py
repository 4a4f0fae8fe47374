"""The part of each sample that a rank computes, where context parallel ranks share a sequence.

Stages of a model in the trainer: which parts of it each rank of the pipeline has.

A model whose stages run as a pipeline, as the training loop uses it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.parallel.attention import ContextParallel, use_sequence_sharding
from hp_dtensor.platform.interface import Platform
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


class SequenceShares:
    """Cuts batches, which all ranks of a sequence read whole, to this rank's tokens.

    Ids, targets and positions are cut alike, so that every token keeps its target, which was shifted before, and its
    position in its document. The numbers of tokens and targets stay those of the whole global batch. Rows of packed
    documents are cut so that attention within documents is as much work for every rank; the part says by which cut.

    Args:
        style: how the model's attention shares sequences.
        ranks: that share one.
        rank: this one among them.
    """

    def __init__(self, style: ContextParallel, ranks: int, rank: int) -> None:
        self.style, self.ranks, self.rank = style, ranks, rank

    def own(self, batch: Batch) -> Batch:
        """Return this rank's part of each sample, always with positions and the cut."""
        length = batch.ids.shape[1]
        cut = self.style.sharding(length, self.ranks, positions=batch.positions)
        positions = batch.positions
        if positions is None:
            positions = np.broadcast_to(np.arange(length, dtype=np.int64), batch.ids.shape)
        ids, targets, positions = (cut.shard(x, self.rank) for x in (batch.ids, batch.targets, positions))
        return replace(batch, ids=ids, targets=targets, positions=positions, cut=cut)


@dataclass(frozen=True)
class StagePlan:
    """The stages of a model, and the schedule by which the ranks of the pipeline run them.

    Attributes:
        schedule: of one step.
        stages: the parts of the model that each stage has.
    """

    schedule: Schedule
    stages: tuple[ModelPart, ...]

    def indices_of(self, place: int) -> list[int]:
        """Return the stages of a place in the pipeline."""
        return [stage for stage, owner in enumerate(self.schedule.rank_of_stage) if owner == place]

    def parts_of(self, place: int) -> ModelPart:
        """Return everything that a place in the pipeline has of the model."""
        return functools.reduce(ModelPart.union, (self.stages[index] for index in self.indices_of(place)))


def plan_stages(config: TrainerConfig, dims: ParallelDims) -> StagePlan:
    """Cut the model of a configuration into stages, and make its schedule.

    Raises:
        ScheduleError: as `make_schedule`.
        PipelineError: the layers cannot be cut so.
    """
    schedule = make_schedule(config, dims)
    layers = cut_layers(config, schedule.num_stages)
    last = schedule.num_stages - 1
    return StagePlan(
        schedule,
        tuple(ModelPart(embed=stage == 0, layers=tuple(each), head=stage == last) for stage, each in enumerate(layers)),
    )


def make_schedule(config: TrainerConfig, dims: ParallelDims, max_microbatches: int | None = None) -> Schedule:
    """Return the schedule of a configuration's step.

    Args:
        max_microbatches: make it for so many at most; None: for those of the step.

    Raises:
        ScheduleError: it does not exist for these numbers, or would hang.
    """
    settings, number = config.pipeline, num_microbatches(config, dims)
    schedule = build_schedule(
        settings.schedule,
        num_ranks=dims.pp,
        num_microbatches=number if max_microbatches is None else min(number, max_microbatches),
        stages_per_rank=settings.stages_per_rank,
    )
    validate(schedule)
    return schedule


def num_microbatches(config: TrainerConfig, dims: ParallelDims) -> int:
    """Return the micro-batches of a step; one for each sample unless something is set."""
    share = config.training.global_batch_size // dims.dp_size
    if config.pipeline.microbatches is not None:
        return config.pipeline.microbatches
    return max(1, share // (config.training.micro_batch_size or 1))


def cut_layers(config: TrainerConfig, num_stages: int) -> list[range]:
    """Return the layers of each stage: as listed, or even in estimated cost.

    Raises:
        PipelineError: the layers cannot be cut so, or the model has no `num_hidden_layers`.
    """
    options = config.model.options
    num_layers = getattr(options, "num_hidden_layers", None)
    if num_layers is None:
        raise PipelineError(f"model {config.model.name!r} has no num_hidden_layers by which to cut it into stages")
    if config.pipeline.layers is not None:
        return listed_stages(config.pipeline.layers, num_layers, num_stages)
    costs, last_cost = _estimated_costs(options, config.training.sequence_length, num_layers)
    return list(_even_stages(tuple(costs), num_stages, last_cost))


@functools.lru_cache(maxsize=64)
def _even_stages(costs: tuple[float, ...], num_stages: int, last_cost: float) -> tuple[range, ...]:
    # Plans of many layouts and settings ask for the same stages.
    return tuple(balanced_stages(costs, num_stages, last_cost=last_cost))


def _estimated_costs(options: Any, sequence_length: int, num_layers: int) -> tuple[Sequence[float], float]:
    """Return the operations per token of each layer and of the head, by the method `stage_costs` of the options.

    Without that method all layers cost the same.
    """
    stage_costs = getattr(options, "stage_costs", None)
    return ([1.0] * num_layers, 0.0) if stage_costs is None else stage_costs(sequence_length)


Tensor = Any


class ModelStage(PipelineStage):
    """Some parts of a rank's model; the last stage returns the summed loss, others activations."""

    def __init__(self, model: Any, parts: ModelPart, index: int, num_stages: int) -> None:
        super().__init__(model, index, num_stages)
        self._parts = parts

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run these parts; the targets are the last stage's alone."""
        targets = kwargs["targets"] if self.is_last else None
        with use_sequence_sharding(kwargs["cut"]):
            return self.submod(*args, targets, kwargs["positions"], self._parts, kwargs["rows"])


def exchange_over(group: ProcessGroup) -> Callable[[Any], list[Any]]:
    """Return a function that takes a JSON value on every rank of a group and returns them all, in order."""
    return lambda fact: [json.loads(part) for part in group.all_gather_bytes(json.dumps(fact).encode())]


class PipelinedModel:
    """The stages of this rank, and what the ranks of a pipeline settle together.

    Args:
        model: everything that this rank has of the model, laid out over the other axes.
        plan: which stages there are.
        mesh: of the job; `mesh["pp"]` are the ranks of this pipeline.
        parallel: says when weights are gathered, and when gradients are reduced.
        shares: cuts micro-batches to this rank's tokens; None: each rank has whole samples.

    Attributes:
        tied: weights that several stages have copies of.
    """

    def __init__(
        self,
        platform: Platform,
        model: Any,
        plan: StagePlan,
        mesh: DeviceMesh,
        parallel: ParallelConfig,
        shares: SequenceShares | None = None,
    ) -> None:
        self.platform, self.model, self._shares = platform, model, shares
        pp = mesh["pp"]
        self.group = pp.group_along()
        num_stages = len(plan.stages)
        stages = [
            ModelStage(model, plan.stages[index], index, num_stages) for index in plan.indices_of(self.group.rank)
        ]
        self.tied = TiedWeights(platform.named_parameters(model), pp)
        self._scale: Callable[[Tensor], Tensor] = lambda loss: loss
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
        """Run a step of the pipeline; return the sum of the losses on the last stage's rank, zero on others.

        Args:
            batch: this rank's share; every rank of the pipeline has the same.
            scale: from the summed loss of a micro-batch to what the backward begins with.
        """
        self._scale = scale
        return self._run(batch, forward_only=False)

    def loss_sum(self, batch: Batch) -> Tensor:
        """Return the summed loss on the last stage's rank, zero on others; nothing is recorded."""
        return self._run(batch, forward_only=True)

    def _run(self, batch: Batch, *, forward_only: bool) -> Tensor:
        parts = batch.micro_batches(len(batch.samples) // self._pipeline.num_microbatches)
        if self._shares is not None:
            parts = [self._shares.own(part) for part in parts]
        positions = [None if part.positions is None else self._tensor(part.positions) for part in parts]
        targets: Sequence[Any] = [None] * len(parts)
        if self._pipeline.has_last_stage:
            targets = [self._tensor(part.targets) for part in parts]
        ids = [(self._tensor(part.ids),) for part in parts] if self._pipeline.has_first_stage else []
        kwargs = [
            {"targets": target, "positions": place, "rows": part.rows, "cut": part.cut}
            for target, place, part in zip(targets, positions, parts, strict=True)
        ]
        self._loss_sums.clear()
        self._pipeline.run_microbatches(ids, kwargs, forward_only=forward_only)
        total = self.platform.zeros((), self.platform.dtype("float32"))
        for loss in self._loss_sums:
            total = self.platform.ops.add(total, loss)
        self._loss_sums.clear()
        return total

    def _scaled(self, loss_sum: Tensor, _: Any) -> Tensor:
        # Records get the loss itself, backward begins with the scaled one.
        self._loss_sums.append(self.platform.detach(loss_sum))
        return self._scale(loss_sum)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return self.platform.from_numpy(np.ascontiguousarray(array))

    # What all stages know together ----------------------------------------------------------------------------

    def everyones(self, fact: Any) -> list[Any]:
        """Return a JSON value of every rank of the pipeline, in order."""
        return exchange_over(self.group)(fact)

    def after_optimizer_step(self) -> Mapping[str, float]:
        """Let the model follow the step; return its metrics over all stages."""
        metrics: Mapping[str, float] = self.model.after_optimizer_step(self.everyones)
        return metrics

    def num_parameters(self) -> int:
        """Return the number of elements of all stages' parameters, tied ones once."""
        parameters = [p for _, p in self.platform.named_parameters(self.model) if not self.tied.is_copy(p)]
        return sum(self.everyones(sum(math.prod(p.shape) for p in parameters)))
