"""Stages of a model in the trainer: which parts of it each rank of the pipeline has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import PipelineError
from hp_trainer.models import DecoderConfig, DecoderParts
from hp_trainer.models.decoder.activations import head_flops_per_token, layer_flops_per_token
from hp_trainer.parallel import ParallelDims
from hp_trainer.pipeline import Schedule, balanced_stages, build_schedule, listed_stages, validate


@dataclass(frozen=True)
class StagePlan:
    """The stages of a model, and the schedule by which the ranks of the pipeline run them.

    Attributes:
        schedule: of one step.
        stages: the parts of the model that each stage has.
    """

    schedule: Schedule
    stages: tuple[DecoderParts, ...]

    def indices_of(self, place: int) -> list[int]:
        """Return the stages of a place in the pipeline."""
        return [stage for stage, owner in enumerate(self.schedule.rank_of_stage) if owner == place]

    def parts_of(self, place: int) -> DecoderParts:
        """Return everything that a place in the pipeline has of the model."""
        return functools.reduce(DecoderParts.union, (self.stages[index] for index in self.indices_of(place)))


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
        tuple(
            DecoderParts(embed=stage == 0, layers=tuple(each), head=stage == last) for stage, each in enumerate(layers)
        ),
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
    """Return the operations of each layer and of the head; of a model that does not tell them, layers are equal.

    A plugin's model tells them by a method `stage_costs(sequence_length)` of its options, which returns the two.
    """
    if isinstance(options, DecoderConfig):
        return layer_flops_per_token(options, sequence_length), head_flops_per_token(options)
    tell = getattr(options, "stage_costs", None)
    return ([1.0] * num_layers, 0.0) if tell is None else tell(sequence_length)
