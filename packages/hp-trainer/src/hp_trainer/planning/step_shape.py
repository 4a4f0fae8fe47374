"""Sizes of a step on one rank: what every part of the plan is computed from."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import PlanError
from hp_trainer.models import DecoderConfig
from hp_trainer.parallel import ParallelDims
from hp_trainer.pipeline import Kind, simulate
from hp_trainer.training.stages import StagePlan, num_microbatches, plan_stages

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class StepShape:
    """A configuration under a layout, with the sizes that follow from both.

    Attributes:
        config: of the run; its model is the decoder.
        dims: degrees of parallelism, which fit the model and the batch.
    """

    config: TrainerConfig
    dims: ParallelDims

    @classmethod
    def of(cls, config: TrainerConfig, dims: ParallelDims) -> StepShape:
        """Return the shape of a configuration's step.

        Raises:
            PlanError: the model does not tell its parameters.
        """
        if not isinstance(config.model.options, DecoderConfig):
            raise PlanError(
                f"model {config.model.name!r} does not tell its parameters and operations before it is built; plans "
                "are made for the decoder (model.name=decoder), whose options describe many architectures"
            )
        return cls(config, dims)

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
    def stage_plan(self) -> StagePlan:
        """Stages and schedule of the pipeline."""
        return plan_stages(self.config, self.dims)

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The place in the pipeline of each stage."""
        return self.stage_plan.schedule.rank_of_stage

    @functools.cached_property
    def in_flight(self) -> tuple[float, ...]:
        """Micro-batches whose activations each place of the pipeline holds at once, over all its stages."""
        schedule = self.stage_plan.schedule
        peaks = simulate(schedule).peak_activations
        return tuple(peak / schedule.rank_of_stage.count(place) for place, peak in enumerate(peaks))

    @functools.cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs."""
        return any(action.kind is Kind.INPUT_GRAD for each in self.stage_plan.schedule.actions for action in each)

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
    def recomputes(self) -> bool:
        """Whether blocks are computed again in backward."""
        return self.config.training.activation_checkpointing

    @property
    def num_replicas(self) -> int:
        """Ranks that hold the same shard: replicas, and in the peer mesh the ranks that share a sequence."""
        peer = self.dims.expert_mesh == "peer"
        return self.dims.dp_replicate * (self.dims.cp if peer else 1)
