"""AdamW, SGD and Lion: each element is updated from its own gradient and state, so shards need no communication."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of, zeros_placed_like
from hp_trainer.config import AdamWConfig, section
from hp_trainer.config.schema import DecayRate

Tensor = Any


class ParameterOptimizer(ABC):
    """Base of optimizers that update one parameter after the other; see `hp_trainer.training.Optimizer`.

    Args:
        parameters: (name, parameter), DTensors or plain.
        options: settings of the optimizer.
        platform: the platform of the tensors.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], options: Any, platform: Platform) -> None:
        self.num_steps = 0
        self.options, self.platform = options, platform
        self._parameters = dict(parameters)
        with platform.no_grad():
            self._state = {name: self._initial(x) for name, x in self._parameters.items()}

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, and count the update."""
        with self.platform.no_grad():
            for name, parameter in self._parameters.items():
                grad = self.platform.get_grad(parameter)
                if grad is not None:
                    self._update(name, parameter, grad, learning_rate)
        self.num_steps += 1

    @abstractmethod
    def _initial(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before the first update, by slot."""

    @abstractmethod
    def _update(self, name: str, parameter: Tensor, grad: Tensor, learning_rate: float) -> None:
        """Update a parameter and its state. `num_steps` is the number of updates before this one."""

    def zero_grad(self) -> None:
        """Remove all gradients."""
        for parameter in self._parameters.values():
            self.platform.set_grad(parameter, None)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the state of each parameter by name and slot."""
        return self._state


class ElementwiseOptimizer(ParameterOptimizer):
    """Base of elementwise optimizers.

    Attributes:
        slots: names of a parameter's state tensors, which are sharded as the parameter and initially zero.
    """

    slots: ClassVar[tuple[str, ...]] = ()

    def _initial(self, parameter: Tensor) -> dict[str, Any]:
        return {slot: zeros_placed_like(self.platform, parameter) for slot in self.slots}

    def _update(self, name: str, parameter: Tensor, grad: Tensor, learning_rate: float) -> None:
        # Elementwise updates need no other rank's elements, so they bypass DTensor dispatch.
        platform, state = self.platform, self._state[name]
        local = {slot: local_of(platform, x) for slot, x in state.items()}
        self.update(local_of(platform, parameter), local_of(platform, grad), local, learning_rate)

    @abstractmethod
    def update(self, parameter: Tensor, grad: Tensor, state: Mapping[str, Tensor], learning_rate: float) -> None:
        """Update a parameter and its state in place; all are local tensors of one shape."""


class AdamW(ElementwiseOptimizer):
    """AdamW (arXiv 1711.05101) with the arithmetic of `torch.optim.AdamW`; half precision is computed in float32."""

    slots = ("exp_avg", "exp_avg_sq")
    options: AdamWConfig

    def update(self, parameter: Tensor, grad: Tensor, state: Mapping[str, Tensor], learning_rate: float) -> None:
        platform = self.platform
        is_wide = platform.dtype_name(parameter.dtype) in ("float32", "float64")
        dtype = parameter.dtype if is_wide else platform.dtype("float32")
        moments = [state[slot] for slot in self.slots]
        weight, grad, mean, square = (platform.ops.cast(x, dtype) for x in (parameter, grad, *moments))
        # Bias correction counts updates from 1.
        count = self.num_steps + 1
        found = adamw_update(platform, weight, grad, mean, square, count, learning_rate, self.options)
        for into, values in zip((parameter, *moments), found, strict=True):
            platform.copy_(into, values)


def adamw_update(
    platform: Platform,
    weight: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    count: int,
    learning_rate: float,
    options: AdamWConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weight and both moments after update number `count` (from 1); all are local tensors of one dtype."""
    ops, (beta1, beta2) = platform.ops, options.betas
    mean = ops.add(ops.mul(mean, beta1), ops.mul(grad, 1 - beta1))
    square = ops.add(ops.mul(square, beta2), ops.mul(ops.square(grad), 1 - beta2))
    # The bias corrections are folded into the denominator and the step size.
    size = ops.add(ops.mul(ops.sqrt(square), 1 / math.sqrt(1 - beta2**count)), options.eps)
    step = ops.mul(ops.div(mean, size), learning_rate / (1 - beta1**count))
    return ops.sub(ops.mul(weight, 1 - learning_rate * options.weight_decay), step), mean, square


@section
class SGDConfig:
    """Stochastic gradient descent with momentum, as `torch.optim.SGD`."""

    lr: float = Field(1e-2, gt=0, description="peak learning rate")
    momentum: float = Field(0.9, ge=0, lt=1, description="decay rate of the velocity; 0: none")
    nesterov: bool = Field(False, description="look ahead by the velocity")
    weight_decay: float = Field(0.0, ge=0, description="added to the gradient, times the weight")

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of the velocity; see the hook `hp_optimizers`."""
        return elements * itemsize


class SGD(ElementwiseOptimizer):
    """Stochastic gradient descent with momentum and the arithmetic of `torch.optim.SGD`."""

    slots = ("momentum_buffer",)
    options: SGDConfig

    def update(self, parameter: Tensor, grad: Tensor, state: Mapping[str, Tensor], learning_rate: float) -> None:
        ops, options = self.platform.ops, self.options
        # Coupled, as in `torch.optim.SGD`: the decay is part of the gradient and enters the velocity.
        if options.weight_decay:
            grad = ops.add(grad, ops.mul(parameter, options.weight_decay))
        # Starting from zero, the first velocity is the gradient itself, as torch initializes it (no dampening).
        velocity = ops.add(ops.mul(state["momentum_buffer"], options.momentum), grad)
        self.platform.copy_(state["momentum_buffer"], velocity)
        # Nesterov's step uses the velocity after the next decay.
        step = ops.add(grad, ops.mul(velocity, options.momentum)) if options.nesterov else velocity
        self.platform.copy_(parameter, ops.sub(parameter, ops.mul(step, learning_rate)))


@section
class LionConfig:
    """Lion (Chen et al., 2023, "Symbolic discovery of optimization algorithms", arXiv 2302.06675)."""

    lr: float = Field(1e-4, gt=0, description="peak learning rate; a third to a tenth of AdamW's")
    betas: tuple[DecayRate, DecayRate] = Field((0.9, 0.99), description="decay rates of the update and of the momentum")
    weight_decay: float = Field(1.0, ge=0, description="decoupled weight decay; three to ten times AdamW's")

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of the momentum; see the hook `hp_optimizers`."""
        return elements * itemsize


class Lion(ElementwiseOptimizer):
    """Lion: the sign of an interpolated momentum (arXiv 2302.06675, algorithm 2)."""

    slots = ("exp_avg",)
    options: LionConfig

    def update(self, parameter: Tensor, grad: Tensor, state: Mapping[str, Tensor], learning_rate: float) -> None:
        ops, momentum, (beta1, beta2) = self.platform.ops, state["exp_avg"], self.options.betas
        mixed = ops.add(ops.mul(momentum, beta1), ops.mul(grad, 1 - beta1))
        # The sign, from two comparisons; 0 stays 0.
        sign = ops.sub(ops.cast(ops.gt(mixed, 0), grad.dtype), ops.cast(ops.lt(mixed, 0), grad.dtype))
        decayed = ops.mul(parameter, 1 - learning_rate * self.options.weight_decay)
        self.platform.copy_(parameter, ops.sub(decayed, ops.mul(sign, learning_rate)))
        # After the update, which uses the old momentum: beta1 is for the update, beta2 for the momentum.
        self.platform.copy_(momentum, ops.add(ops.mul(momentum, beta2), ops.mul(grad, 1 - beta2)))
