"""A model whose stages run as a pipeline, as the training loop uses it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.parallel.attention import use_sequence_sharding
from hp_dtensor.platform.interface import Platform
from hp_trainer.config import ParallelConfig
from hp_trainer.data import Batch
from hp_trainer.models import DecoderParts
from hp_trainer.pipeline import Pipeline, PipelineStage, TiedWeights
from hp_trainer.training.sequence_shares import SequenceShares
from hp_trainer.training.stages import StagePlan

Tensor = Any


class ModelStage(PipelineStage):
    """Some parts of a rank's model; the last stage returns the summed loss, others activations."""

    def __init__(self, model: Any, parts: DecoderParts, index: int, num_stages: int) -> None:
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
        self.group = pp.get_group()
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
