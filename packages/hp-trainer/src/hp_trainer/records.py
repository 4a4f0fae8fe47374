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


@dataclass(frozen=True, kw_only=True)
class CountedParameter:
    """A parameter of a counted module.

    Attributes:
        name: dotted name.
        shape: global shape.
        itemsize: bytes of an element as the module was built.
        trainable: whether it gets a gradient.
        part: index in `CountedStep.parts` of the part that has it; None: it is outside of all parts.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    trainable: bool
    part: int | None


@dataclass(frozen=True, kw_only=True)
class CountedPart:
    """Bytes alive during one part of a counted module, without parameters and their gradients.

    Attributes:
        name: dotted name.
        before, after: bytes alive when its forward starts and ends.
        peak: most bytes alive during its backward, including gradients of its own parameters.
        end: bytes alive when its backward ends.
        is_reached: backward reaches it; otherwise `peak` and `end` are 0.
    """

    name: str
    before: int
    after: int
    peak: int = 0
    end: int = 0
    is_reached: bool = False


@dataclass(frozen=True, kw_only=True)
class CountedStep:
    """Counts of one forward and backward of a module.

    Attributes:
        parameters: every parameter once, in the module's order.
        buffers: bytes of the module's other tensors, such as tables of positions.
        parts: the parts in the order of forward, preceded by those it does not call.
        after_forward: bytes alive between forward and backward.
        outside: most bytes alive from the end of the last part's forward to the start of its backward.
        flops: operations of matrix products and of attention regardless of its mask, forward and backward.
    """

    parameters: tuple[CountedParameter, ...]
    buffers: int
    parts: tuple[CountedPart, ...]
    after_forward: int
    outside: int
    flops: int
