"""Exponential moving average of the weights, sharded as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of, zeros_laid_out_as

Tensor = Any


class WeightAverage:
    """Average over the past of each trained weight: `average = decay * average + (1 - decay) * weight` after a step.

    In step n the decay is `min(decay, (1 + n) / (10 + n))`, so that the first, untrained weights are soon forgotten
    (as in TensorFlow's `ExponentialMovingAverage` with `num_updates`). Each rank averages its own shards and
    communicates nothing.

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
            self._averages = {name: zeros_laid_out_as(platform, x) for name, x in self._parameters.items()}
        self.restart()

    def state(self) -> Mapping[str, Tensor]:
        """Return the average of each parameter by name; writing into the tensors changes it."""
        return self._averages

    def restart(self) -> None:
        """Begin anew with the present weights."""
        with self._platform.no_grad():
            for average, weight in self._pairs():
                self._platform.copy_(average, weight)

    def update(self, num_steps: int) -> None:
        """Take the present weights in; `num_steps` optimizer steps have been done."""
        decay = min(self.decay, (1 + num_steps) / (10 + num_steps))
        ops = self._platform.ops
        with self._platform.no_grad():
            for average, weight in self._pairs():
                self._platform.copy_(average, ops.add(ops.mul(average, decay), ops.mul(weight, 1 - decay)))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averages as its weights in a block; afterwards it has its own again, bit for bit.

        Memory for one more shard is needed at a time: each weight changes places with its average.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        platform = self._platform
        with platform.no_grad():
            for average, weight in self._pairs():
                kept = platform.ops.clone(weight)
                platform.copy_(weight, average)
                platform.copy_(average, kept)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard of each average, and of its weight."""
        for name, parameter in self._parameters.items():
            weight = self._platform.detach(local_of(self._platform, parameter))
            yield local_of(self._platform, self._averages[name]), weight
