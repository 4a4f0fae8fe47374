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
        return zeros_laid_out_as(platform, parameter, dtype)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard of each average, and of its weight."""
        for name, parameter in self._parameters.items():
            weight = self._platform.detach(local_of(self._platform, parameter))
            yield local_of(self._platform, self._averages[name]), weight
