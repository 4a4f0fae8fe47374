"""The arithmetic of AdamW (arXiv 1711.05101), as `torch.optim.AdamW` has it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor

from hp_platform_mindspore.platform_base import MindSporeBase
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, numbers, store


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """Coefficients of one step, the same for all parameters of a group."""

    decay: float
    beta1: float
    beta2: float
    step_size: float
    root_correction: float
    eps: float

    @classmethod
    def number(cls, count: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> AdamWStep:
        """Compute the coefficients of step `count`, which counts from 1."""
        beta1, beta2 = betas
        return cls(
            decay=1 - lr * weight_decay,
            beta1=beta1,
            beta2=beta2,
            step_size=lr / (1 - beta1**count),
            root_correction=math.sqrt(1 - beta2**count),
            eps=eps,
        )


def adamw_(
    platform: MindSporeBase, parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, c: AdamWStep
) -> None:
    """Update a parameter and its moments in place."""
    update = _adamw_on_host if platform.capabilities.host_memory else _adamw_on_device
    update(platform, parameter, gradient, exp_avg, exp_avg_sq, c)


def _adamw_on_host(
    platform: MindSporeBase, parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, c: AdamWStep
) -> None:
    weights, first, second = (_computable(numbers(x)) for x in (parameter, exp_avg, exp_avg_sq))
    grad = numbers(gradient).astype(weights.dtype, copy=False)
    scalar = weights.dtype.type
    weights *= scalar(c.decay)
    first += scalar(1 - c.beta1) * (grad - first)
    second *= scalar(c.beta2)
    second += scalar(1 - c.beta2) * grad * grad
    denominator = np.sqrt(second) / scalar(c.root_correction) + scalar(c.eps)
    weights -= scalar(c.step_size) * first / denominator
    if weights.dtype != HOST_DTYPES[parameter.dtype]:
        # Of 16 bits: these were float32 copies.
        for x, values in zip((parameter, exp_avg, exp_avg_sq), (weights, first, second), strict=True):
            store(x, values)
    platform.count_write(parameter)


def _computable(values: np.ndarray) -> np.ndarray:
    """Return the same memory, or of float16 a copy in float32."""
    return values.astype(np.float32) if values.dtype == np.float16 else values


def _adamw_on_device(
    platform: MindSporeBase, parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, c: AdamWStep
) -> None:
    with platform.no_grad(), platform.local_op():
        grad, weights = platform.unwrap(gradient), platform.unwrap(parameter)
        first, second = platform.unwrap(exp_avg), platform.unwrap(exp_avg_sq)
        platform.copy_(first, first + (grad - first) * (1 - c.beta1))
        platform.copy_(second, second * c.beta2 + grad * grad * (1 - c.beta2))
        denominator = platform.ops.sqrt(second) / c.root_correction + c.eps
        platform.copy_(weights, weights * c.decay - first / denominator * c.step_size)
