"""Interface of an optimizer, as a platform registers it and the training loop uses it.

The learning rate as a pure function of the step, so that a resumed run needs no state for it.

Exponential moving average of the weights, sharded as they are.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of, zeros_placed_like
from hp_trainer.config import LrScheduleConfig

Tensor = Any


class Optimizer(Protocol):
    """Updates the parameters it was built with; works on local shards and never communicates.

    One that keeps its state in another form, such as 8-bit AdamW, makes the tensors of `state()` when they are asked
    for, and has two more methods: `set_state(name, slot, values)`, called after such a tensor has been written into,
    and `state_bytes(platform)`, the bytes that its state takes on this rank.

    Attributes:
        num_steps: updates done, which bias correction depends on; set when a checkpoint is loaded.
    """

    num_steps: int

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, with this learning rate, and count the update."""

    def zero_grad(self) -> None:
        """Forget all gradients."""

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the state of each parameter by name and slot (`exp_avg`, ...), laid out as the parameter.

        Slots that no step has made yet are there, as zeros. Writing into the tensors changes the state.
        """


def learning_rate_factor(schedule: LrScheduleConfig, step: int, total_steps: int) -> float:
    """Return the factor on the peak learning rate.

    After `warmup_steps` steps of linear warm-up: `cosine` falls to `final_fraction` at the last step
    (Loshchilov and Hutter, 2017, "SGDR"); `wsd` stays at 1 and falls linearly during the last `decay_steps`
    (Hu et al., 2024, "MiniCPM"); `linear` falls linearly to `final_fraction` at the last step; `constant` stays at 1;
    `inverse_sqrt` falls with the root of the step, from 1 at the end of warm-up, and not below `final_fraction`
    (Vaswani et al., 2017, "Attention is all you need").

    Args:
        step: the step about to be done; the first one is 0.
        total_steps: steps of the whole run; the last one is `total_steps - 1`.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse_sqrt":
        # Counted from 1, so that the curve goes on from warm-up's last step.
        return max(schedule.final_fraction, math.sqrt((schedule.warmup_steps + 1) / (step + 1)))
    begin = _wsd_begin(schedule, total_steps) if schedule.kind == "wsd" else schedule.warmup_steps
    done = _fraction_done(step, begin, total_steps - 1)
    shape = (1 + math.cos(math.pi * done)) / 2 if schedule.kind == "cosine" else 1 - done
    return schedule.final_fraction + (1 - schedule.final_fraction) * shape


def _wsd_begin(schedule: LrScheduleConfig, total_steps: int) -> int:
    """Return the last step at the peak."""
    decay = schedule.decay_steps if schedule.decay_steps is not None else -(-total_steps // 10)
    return max(schedule.warmup_steps, total_steps - 1 - decay)


def _fraction_done(step: int, begin: int, end: int) -> float:
    if step <= begin:
        return 0.0
    return min(1.0, (step - begin) / (end - begin)) if end > begin else 1.0


class WeightAverage:
    """Average over the past of each trained weight: `average = decay * average + (1 - decay) * weight` after a step.

    In step n the decay is `min(decay, (1 + n) / (10 + n))`, so that the first, untrained weights are soon forgotten
    (as in TensorFlow's `ExponentialMovingAverage` with `num_updates`). Each rank averages its own shards and
    communicates nothing. Averages are float32 at least: in bfloat16 a share of 0.001 would be rounded away.

    Args:
        parameters: (name, parameter), DTensors or plain; the average begins with their values.
        decay: from 0 to below 1.
        platform: whose tensors they are.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], decay: float, platform: Platform) -> None:
        self.decay = decay
        self._platform = platform
        self._parameters = dict(parameters)
        with platform.no_grad():
            self._averages = {name: self._zeros(x) for name, x in self._parameters.items()}
        self.restart()

    def state(self) -> Mapping[str, Tensor]:
        """Return the average of each parameter by name; writing into the tensors changes it."""
        return self._averages

    def restart(self) -> None:
        """Begin anew with the present weights."""
        with self._platform.no_grad():
            for average, weight in self._pairs():
                self._platform.copy_(average, self._platform.ops.cast(weight, average.dtype))

    def update(self, num_steps: int) -> None:
        """Take the present weights in; `num_steps` optimizer steps have been done."""
        # Shorter at first, else the initial weights would count for 1 / (1 - decay) steps.
        decay = min(self.decay, (1 + num_steps) / (10 + num_steps))
        ops = self._platform.ops
        with self._platform.no_grad():
            for average, weight in self._pairs():
                share = ops.mul(ops.cast(weight, average.dtype), 1 - decay)
                self._platform.copy_(average, ops.add(ops.mul(average, decay), share))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averages as its weights in a block; afterwards it has its own again, bit for bit.

        Memory for one more shard is needed at a time: each weight changes places with its average. Only weights of
        fewer bits than their averages are kept beside them.
        """
        kept = self._use_averages()
        try:
            yield
        finally:
            self._use_weights(kept)

    def _use_averages(self) -> list[Tensor | None]:
        """Write averages into the weights; return the weights that do not stand in the place of their average."""
        platform, kept = self._platform, []
        with platform.no_grad():
            for average, weight in self._pairs():
                own = platform.ops.clone(weight)
                platform.copy_(weight, platform.ops.cast(average, weight.dtype))
                if average.dtype == weight.dtype:
                    platform.copy_(average, own)
                kept.append(None if average.dtype == weight.dtype else own)
        return kept

    def _use_weights(self, kept: list[Tensor | None]) -> None:
        platform = self._platform
        with platform.no_grad():
            for (average, weight), own in zip(self._pairs(), kept, strict=True):
                if own is None:
                    own = platform.ops.clone(average)
                    platform.copy_(average, weight)
                platform.copy_(weight, own)

    def _zeros(self, parameter: Tensor) -> Tensor:
        platform = self._platform
        dtype = platform.dtype("float32") if platform.itemsize(parameter.dtype) < 4 else parameter.dtype
        return zeros_placed_like(platform, parameter, dtype)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard of each average, and of its weight."""
        for name, parameter in self._parameters.items():
            weight = self._platform.detach(local_of(self._platform, parameter))
            yield local_of(self._platform, self._averages[name]), weight
