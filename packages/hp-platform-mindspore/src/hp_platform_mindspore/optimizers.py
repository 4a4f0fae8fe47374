"""AdamW in place on the parameters' own storage; MindSpore's has no CPU kernel, and its SGD changes nothing there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mindspore import Tensor

from hp_dtensor.dtensor import DTensor
from hp_platform_mindspore.memory import HOST_DTYPES, numbers, store

if TYPE_CHECKING:
    from hp_platform_mindspore.platform import MindSporePlatform
    from hp_trainer.config import AdamWConfig

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _Slots:
    """One parameter and its moments, laid out as it is."""

    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


@dataclass(frozen=True, slots=True)
class _Coefficients:
    """The numbers of one step."""

    decay: float
    beta1: float
    beta2: float
    step_size: float
    root_correction: float
    eps: float


class AdamW:
    """Loshchilov and Hutter, 2019, with the arithmetic of `torch.optim.AdamW`; see `hp_trainer.optimizers.Optimizer`.

    Args:
        parameters: (dotted name, parameter), DTensors or plain; floating-point leaves.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], options: AdamWConfig, platform: MindSporePlatform
    ) -> None:
        self.num_steps = 0
        self._options = options
        self._platform = platform
        self._slots = {
            name: _Slots(parameter, self._zeros_like(parameter), self._zeros_like(parameter))
            for name, parameter in parameters
        }

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, and count the update."""
        self.num_steps += 1
        coefficients = self._coefficients(learning_rate)
        update = self._update_on_host if self._platform.capabilities.host_memory else self._update_on_device
        for slots in self._slots.values():
            gradient = self._platform.get_grad(slots.parameter)
            if gradient is not None:
                update(slots, gradient, coefficients)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for slots in self._slots.values():
            self._platform.set_grad(slots.parameter, None)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """`exp_avg` and `exp_avg_sq` of each parameter by name; zeros before the first step."""
        return {name: {"exp_avg": slots.exp_avg, "exp_avg_sq": slots.exp_avg_sq} for name, slots in self._slots.items()}

    def _zeros_like(self, parameter: Tensor) -> Tensor:
        zeros = self._platform.zeros(self._platform.local_shape(parameter), parameter.dtype)
        return self._platform.wrap(zeros, parameter.spec) if isinstance(parameter, DTensor) else zeros

    def _coefficients(self, learning_rate: float) -> _Coefficients:
        beta1, beta2 = self._options.betas
        return _Coefficients(
            decay=1 - learning_rate * self._options.weight_decay,
            beta1=beta1,
            beta2=beta2,
            step_size=learning_rate / (1 - beta1**self.num_steps),
            root_correction=math.sqrt(1 - beta2**self.num_steps),
            eps=self._options.eps,
        )

    def _update_on_host(self, slots: _Slots, gradient: Tensor, c: _Coefficients) -> None:
        parameter, exp_avg, exp_avg_sq = (numbers(x) for x in (slots.parameter, slots.exp_avg, slots.exp_avg_sq))
        grad = numbers(gradient).astype(parameter.dtype, copy=False)
        scalar = parameter.dtype.type
        parameter *= scalar(c.decay)
        exp_avg += scalar(1 - c.beta1) * (grad - exp_avg)
        exp_avg_sq *= scalar(c.beta2)
        exp_avg_sq += scalar(1 - c.beta2) * grad * grad
        denominator = np.sqrt(exp_avg_sq) / scalar(c.root_correction) + scalar(c.eps)
        parameter -= scalar(c.step_size) * exp_avg / denominator
        if parameter.dtype != HOST_DTYPES[slots.parameter.dtype]:
            # bfloat16: these were float32 copies.
            for x, values in zip(
                (slots.parameter, slots.exp_avg, slots.exp_avg_sq), (parameter, exp_avg, exp_avg_sq), strict=True
            ):
                store(x, values)

    def _update_on_device(self, slots: _Slots, gradient: Tensor, c: _Coefficients) -> None:
        platform = self._platform
        with platform.no_grad(), platform.local_op():
            grad, parameter = platform.unwrap(gradient), platform.unwrap(slots.parameter)
            exp_avg, exp_avg_sq = platform.unwrap(slots.exp_avg), platform.unwrap(slots.exp_avg_sq)
            platform.copy_(exp_avg, exp_avg + (grad - exp_avg) * (1 - c.beta1))
            platform.copy_(exp_avg_sq, exp_avg_sq * c.beta2 + grad * grad * (1 - c.beta2))
            denominator = platform.ops.sqrt(exp_avg_sq) / c.root_correction + c.eps
            platform.copy_(parameter, parameter * c.decay - exp_avg / denominator * c.step_size)
