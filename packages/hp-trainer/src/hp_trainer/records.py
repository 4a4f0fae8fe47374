"""Frozen records that life-cycle hooks and trackers receive in place of the trainer."""

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
    """A run on one rank.

    Attributes:
        folder: the run folder.
        config: the resolved configuration.
        platform: name of the platform.
        rank, world_size: this rank and the number of ranks.
        first_step: number of optimizer steps done before this start; 0 unless resumed.
        num_parameters: number of elements of all parameters, unsharded.
        lost_replicas: data parallel replicas that have been lost in this job; `config.parallel` is that of the others.
    """

    folder: Path
    config: TrainerConfig
    platform: str
    rank: int
    world_size: int
    first_step: int
    num_parameters: int
    lost_replicas: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """Ranks whose own work takes longer than that of the others.

    Attributes:
        ranks: one rank, or all ranks of a node.
        node: index of the node, if all of its ranks are slow; otherwise None.
        since: the first step in which they were slow.
        factor: time of their own work relative to the median of the others.
        work: the kind of work with the largest excess over the others: `data`, `forward`, `backward` or `update`.
    """

    ranks: tuple[int, ...]
    node: int | None
    since: int
    factor: float
    work: str

    def __str__(self) -> str:
        ranks = "-".join(map(str, dict.fromkeys((self.ranks[0], self.ranks[-1]))))
        who = f"rank {ranks}" if self.node is None else f"node {self.node} (ranks {ranks})"
        return f"{who} {self.factor:.1f}x slower since step {self.since} ({self.work})"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step. All fields but `peak_memory_gib` are the same on every rank.

    Attributes:
        step: number of optimizer steps done, including this one; the first step is 1.
        loss: mean cross entropy per target of the global batch, in nats; None before the step.
        learning_rate: learning rate of this step.
        gradient_norm: global 2-norm of the gradients before clipping; None if it was not computed.
        tokens: tokens of the global batch, including those without a target.
        samples: samples read so far in the run, including this step.
        seconds: wall time of the step; None before it.
        peak_memory_gib: peak memory of this rank's device so far, in GiB; None before the step.
        model_flops_per_second: model FLOP/s of all ranks together, without recomputation (PaLM, arXiv 2204.02311,
            appendix B); None if the model does not report its FLOPs.
        utilization: `model_flops_per_second` as a fraction of the peak rate of all devices (MFU); None if unknown.
        metrics: further metrics of the model, by name; empty before the step.
        stragglers: ranks that are slower than the others by `metrics.straggler_factor`.
        rank_seconds: seconds per step of each rank, by kind: `data` (with hooks before the step), `forward`,
            `backward`, `update`, and `waiting` in collectives. Given every ten steps, of the steps since; else empty.
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
    stragglers: tuple[Straggler, ...] = ()
    rank_seconds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecord:
    """An evaluation after `step` steps; `loss` is the mean cross entropy over its `tokens` targets, in nats."""

    step: int
    loss: float
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """Return exp(loss), or infinity where it overflows."""
        return perplexity_of(self.loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A checkpoint of `step`.

    Attributes:
        folder: name of its folder; None before it is complete.
        seconds: time from its start until it was complete; None before.
        waited_seconds: the part of `seconds` in which training waited; None before.
    """

    step: int
    folder: str | None = None
    seconds: float | None = None
    waited_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRecord:
    """An exception that ends the run on this rank, with the phase and step in which it was raised."""

    during: str
    step: int
    error: BaseException


def perplexity_of(loss: float) -> float:
    """Return exp(loss) of a loss in nats per token, or infinity where it overflows."""
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
