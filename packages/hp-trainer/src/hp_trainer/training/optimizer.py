"""The interface of optimizers, the moving average of the weights, and schedules of the learning rate."""

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
    """Updates the parameters it was built with. It works on local shards and never communicates.

    An optimizer with another representation of its state, such as 8-bit AdamW, converts it to tensors in `state()`. It
    then needs two more methods: `set_state(name, slot, values)`, called after such a tensor was written to, and
    `state_bytes(platform)`, which returns the bytes of its state on this rank.

    Attributes:
        num_steps: number of updates done, for bias correction; set when a checkpoint is loaded.
    """

    num_steps: int

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, and increment `num_steps`."""

    def zero_grad(self) -> None:
        """Drop all gradients."""

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the state of each parameter by name and slot (`exp_avg`, ...), placed as the parameter.

        Slots exist before the first step, as zeros. Writing to the tensors changes the state.
        """


class WeightAverage:
    """Exponential moving average of weights: `average = decay * average + (1 - decay) * weight` after each step.

    In step n the decay is `min(decay, (1 + n) / (10 + n))`, so that the initial, untrained weights lose their influence
    quickly (as in TensorFlow's `ExponentialMovingAverage` with `num_updates`). Averages are sharded as the weights, and
    each rank updates its shards without communication. Averages are at least float32: in bfloat16, adding 0.001 of a
    weight would be rounded away.

    Args:
        parameters: pairs of a name and a parameter, DTensors or plain; the average starts with their values.
        decay: at least 0 and below 1.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], decay: float, platform: Platform) -> None:
        self.decay = decay
        self._platform = platform
        self._parameters = dict(parameters)
        with platform.no_grad():
            # Separate storage: sharing that of the weights would make the average follow them.
            self._averages = {name: self._zeros(x) for name, x in self._parameters.items()}
        self.restart()

    def state(self) -> Mapping[str, Tensor]:
        """Return the average of each parameter by name; writing to the tensors changes it."""
        return self._averages

    def restart(self) -> None:
        """Start again from the current weights."""
        with self._platform.no_grad():
            for average, weight in self._pairs():
                self._platform.copy_(average, self._platform.ops.cast(weight, average.dtype))

    def update(self, num_steps: int) -> None:
        """Add the current weights to the average, after `num_steps` updates."""
        # With the full decay, the initial weights would dominate for 1 / (1 - decay) steps.
        decay = min(self.decay, (1 + num_steps) / (10 + num_steps))
        ops = self._platform.ops
        with self._platform.no_grad():
            for average, weight in self._pairs():
                scaled = ops.mul(ops.cast(weight, average.dtype), 1 - decay)
                self._platform.copy_(average, ops.add(ops.mul(average, decay), scaled))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the averages as weights inside the block, by swaps; a narrower weight is copied, not to round."""
        copies = self._swap_in_averages()
        try:
            yield
        finally:
            self._swap_out_averages(copies)

    def _swap_in_averages(self) -> list[Tensor | None]:
        """Write the averages into the weights; return copies of the weights that were not swapped."""
        platform, copies = self._platform, []
        with platform.no_grad():
            for average, weight in self._pairs():
                # One shard at a time; it is freed in the next iteration if the average has taken the values.
                own = platform.ops.clone(weight)
                platform.copy_(weight, platform.ops.cast(average, weight.dtype))
                if average.dtype == weight.dtype:
                    platform.copy_(average, own)
                copies.append(None if average.dtype == weight.dtype else own)
        return copies

    def _swap_out_averages(self, copies: list[Tensor | None]) -> None:
        platform = self._platform
        with platform.no_grad():
            for (average, weight), own in zip(self._pairs(), copies, strict=True):
                if own is None:
                    # Swapped: the weights are in the average's storage, and the averages in the weight's.
                    own = platform.ops.clone(average)
                    platform.copy_(average, weight)
                platform.copy_(weight, own)

    def _zeros(self, parameter: Tensor) -> Tensor:
        platform = self._platform
        dtype = platform.dtype("float32") if platform.itemsize(parameter.dtype) < 4 else parameter.dtype
        return zeros_placed_like(platform, parameter, dtype)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's local shards of each average and its weight."""
        for name, parameter in self._parameters.items():
            # Looked up each time: sharding engines may exchange the local storage of a parameter.
            weight = self._platform.detach(local_of(self._platform, parameter))
            yield local_of(self._platform, self._averages[name]), weight


def learning_rate_factor(schedule: LrScheduleConfig, step: int, total_steps: int) -> float:
    """Return the factor on the peak learning rate, from 0 to 1: a pure function of the step.

    After `warmup_steps` steps of linear warm-up: `cosine` falls to `final_fraction` at the last step
    (Loshchilov and Hutter, 2017, "SGDR"); `wsd` stays at 1 and falls linearly during the last `decay_steps`
    (Hu et al., 2024, "MiniCPM"); `linear` falls linearly to `final_fraction` at the last step; `constant` stays at 1;
    `inverse_sqrt` falls with the root of the step, from 1 at the end of warm-up, and not below `final_fraction`
    (Vaswani et al., 2017, "Attention is all you need").

    Args:
        step: the next step; the first step is 0.
        total_steps: number of steps of the run; the last step is `total_steps - 1`.
    """
    if step < schedule.warmup_steps:
        # Never 0, so that the first step already changes the weights; the peak is reached right after warm-up.
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse_sqrt":
        # Counted from 1, so that the curve continues the last step of warm-up.
        return max(schedule.final_fraction, math.sqrt((schedule.warmup_steps + 1) / (step + 1)))
    start, end = schedule.warmup_steps, total_steps - 1
    if schedule.kind == "wsd":
        # The last step at the peak. The decay takes a tenth of the run by default (Hu et al., 2024), rounded up.
        decay = schedule.decay_steps if schedule.decay_steps is not None else -(-total_steps // 10)
        start = max(start, end - decay)
    # A run continued beyond its schedule stays at the final value.
    done = 0.0 if step <= start else min(1.0, (step - start) / (end - start)) if end > start else 1.0
    shape = (1 + math.cos(math.pi * done)) / 2 if schedule.kind == "cosine" else 1 - done
    return schedule.final_fraction + (1 - schedule.final_fraction) * shape
