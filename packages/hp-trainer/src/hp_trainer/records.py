"""Frozen records that life-cycle hooks and trackers receive, never the trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hp_trainer.config import TrainerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run as one rank sees it.

    Attributes:
        folder: the run folder.
        config: the resolved configuration.
        platform: name of the platform.
        rank, world_size: this rank and how many there are.
        first_step: optimizer steps done before this start; 0 unless resumed.
        num_parameters: elements of all parameters, unsharded.
    """

    folder: Path
    config: TrainerConfig
    platform: str
    rank: int
    world_size: int
    first_step: int
    num_parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step, the same on every rank but for the memory.

    Attributes:
        step: optimizer steps done, this one included; the first one is 1.
        loss: mean cross entropy per target of the global batch, in nats; None before the step.
        learning_rate: the one of this step.
        gradient_norm: global 2-norm before clipping; None where it was not computed.
        tokens: tokens of the global batch, those without a target included.
        samples: samples of the run read so far, this step included.
        seconds: wall time of the step; None before it.
        peak_memory_gib: the most that this rank has held at once so far, in GiB; the one field that differs between
            ranks. None before the step.
        model_flops_per_second: floating-point operations that the model needs for the step, over its time, of all
            ranks together (PaLM, arXiv 2204.02311, appendix B: nothing is counted that is computed again); None where
            the model does not tell.
        utilization: `model_flops_per_second` as a fraction of the peak rate of all devices; None where that is
            not known.
        metrics: what the model tells of the step, by name; empty before it.
    """

    step: int
    learning_rate: float
    tokens: int
    samples: int
    loss: float | None = None
    gradient_norm: float | None = None
    seconds: float | None = None
    peak_memory_gib: float | None = None
    model_flops_per_second: float | None = None
    utilization: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """A pass over evaluation samples after `step` steps; `loss` is the mean over its `tokens` targets, in nats."""

    step: int
    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """Return exp(loss); infinite where that is too large a number."""
        return perplexity_of(self.loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A checkpoint of `step`.

    Attributes:
        folder: its name; None before it is complete.
        seconds: from its begin until it was complete; None before.
        waited_seconds: of these, how long training has waited; None before.
    """

    step: int
    folder: str | None = None
    seconds: float | None = None
    waited_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRecord:
    """An exception that ends the run on this rank, and what was being done."""

    during: str
    step: int
    error: BaseException


def perplexity_of(loss: float) -> float:
    """Return exp(loss) of a loss in nats per token; infinite where that is too large a number."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
