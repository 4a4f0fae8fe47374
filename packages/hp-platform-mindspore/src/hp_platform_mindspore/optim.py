"""Optimizers with torch's interface: `param_groups`, `state` by parameter, `step()`.

On CPU `mindspore.mint.optim`'s AdamW has no kernel, and its SGD changes nothing. Those of
`mindspore.experimental.optim` accept DTensors (`patches/optimizers.py`), but have neither `state` nor `step()`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from mindspore import Tensor

from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.conversions import zeros_placed_like
from hp_platform_mindspore.platform_base import MindSporeBase
from hp_platform_mindspore.tensor.memory import HOST_DTYPES, numbers, store


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """Coefficients of one step of AdamW (arXiv 1711.05101, as `torch.optim.AdamW`), shared by a group's parameters.

    Attributes:
        decay: factor on the weights, 1 - lr * weight_decay.
        beta1, beta2: decay rates of the first and second moment.
        step_size: lr / (1 - beta1**count), which corrects the bias of the first moment.
        root_correction: sqrt(1 - beta2**count), the divisor that corrects the root of the second moment.
        eps: added to that root.
    """

    decay: float
    beta1: float
    beta2: float
    step_size: float
    root_correction: float
    eps: float

    @classmethod
    def of_step(cls, count: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> AdamWStep:
        """Return the coefficients of step `count`, which counts from 1."""
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
    """Update a parameter and its moments in place, from a gradient that is placed as the parameter is."""
    update = _adamw_on_host if platform.capabilities.host_memory else _adamw_on_device
    update(platform, parameter, gradient, exp_avg, exp_avg_sq, c)


def _adamw_on_host(
    platform: MindSporeBase, parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, c: AdamWStep
) -> None:
    weights, first, second = (_computable(numbers(x)) for x in (parameter, exp_avg, exp_avg_sq))
    grad = numbers(gradient).astype(weights.dtype, copy=False)
    # Typed scalars, so that NumPy does not promote float32 arrays to float64.
    scalar = weights.dtype.type
    # NumPy arrays over the tensors' memory: the update is in place, without MindSpore's operations.
    weights *= scalar(c.decay)
    # As torch's `lerp_`, which rounds differently from beta1 * m + (1 - beta1) * g.
    first += scalar(1 - c.beta1) * (grad - first)
    second *= scalar(c.beta2)
    second += scalar(1 - c.beta2) * grad * grad
    denominator = np.sqrt(second) / scalar(c.root_correction) + scalar(c.eps)
    weights -= scalar(c.step_size) * first / denominator
    if weights.dtype != HOST_DTYPES[parameter.dtype]:
        # 16-bit tensors were updated as float32 copies, which are rounded back here.
        for x, values in zip((parameter, exp_avg, exp_avg_sq), (weights, first, second), strict=True):
            store(x, values)
    # The parameter's memory changed without autograd's knowledge.
    platform.count_write(parameter)


def _computable(values: np.ndarray) -> np.ndarray:
    """Return the same memory, or for float16 a float32 copy."""
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


Group = dict[str, Any]


class Optimizer(ABC):
    """Base of optimizers that update parameters, DTensors or plain floating-point leaves, in place.

    Args:
        params: parameters, or groups of them: mappings with `params` and options of their own.
        defaults: options of groups that do not set them.

    Attributes:
        param_groups: mappings with `params` and all options, which may be changed between steps.
        state: by parameter, once it has been updated: tensors placed as the parameter, and AdamW's `step`.

    Raises:
        ValueError: no parameters, a parameter given twice, or an unknown option.
    """

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        given = list(params)
        groups = given if given and isinstance(given[0], Mapping) else [{"params": given}]
        self.platform = cast("MindSporeBase", get_platform("mindspore"))
        self.defaults = defaults
        self.param_groups: list[Group] = [{**defaults, **group, "params": list(group["params"])} for group in groups]
        self.state: dict[Tensor, dict[str, Any]] = {}
        self._check()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the result of `closure`, which is called first."""
        loss = None
        if closure is not None:
            with self.platform.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = self.platform.get_grad(parameter)
                if gradient is not None:
                    self._update(parameter, gradient, self.state.setdefault(parameter, {}), group)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, or fill them with zeros unless `set_to_none`."""
        for parameter in self._parameters():
            gradient = None if set_to_none else self.platform.get_grad(parameter)
            if gradient is not None:
                self.platform.copy_(gradient, zeros_placed_like(self.platform, gradient))
            else:
                self.platform.set_grad(parameter, None)

    def state_dict(self) -> dict[str, Any]:
        """Return `state` and `param_groups`, with indices in place of the parameters."""
        positions = {id(parameter): index for index, parameter in enumerate(self._parameters())}
        return {
            "state": {positions[id(parameter)]: dict(slots) for parameter, slots in self.state.items()},
            "param_groups": [
                {**group, "params": [positions[id(parameter)] for parameter in group["params"]]}
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the `state_dict` of an optimizer with the same groups.

        Raises:
            ValueError: its groups differ.
        """
        saved = state_dict["param_groups"]
        expected, got = ([len(group["params"]) for group in groups] for groups in (self.param_groups, saved))
        if expected != got:
            raise ValueError(f"load_state_dict: expected groups of {expected} parameters, got {got}")
        # Indices in the saved groups may be in any order; they are matched by position.
        order = [index for group in saved for index in group["params"]]
        parameters = dict(zip(order, self._parameters(), strict=True))
        self.state = {parameters[index]: dict(slots) for index, slots in state_dict["state"].items()}
        for group, other in zip(self.param_groups, saved, strict=True):
            group.update({name: value for name, value in other.items() if name != "params"})

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _check(self) -> None:
        parameters = self._parameters()
        if not parameters:
            raise ValueError(f"{type(self).__name__}: expected parameters, got none")
        if len({id(parameter) for parameter in parameters}) < len(parameters):
            raise ValueError(f"{type(self).__name__}: a parameter is given twice")
        unknown = sorted({name for group in self.param_groups for name in group} - {"params", *self.defaults})
        if unknown:
            raise ValueError(
                f"{type(self).__name__}: unknown options {', '.join(unknown)}; expected {', '.join(self.defaults)}"
            )

    @abstractmethod
    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        """Update one parameter and its tensors in `state`, which is empty at first; `group` has the options."""


class AdamW(Optimizer):
    """Decoupled weight decay (arXiv 1711.05101), with the arithmetic and the defaults of `torch.optim.AdamW`."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        step = state.get("step", 0) + 1
        coefficients = AdamWStep.of_step(step, group["lr"], group["betas"], group["eps"], group["weight_decay"])
        for slot in ("exp_avg", "exp_avg_sq"):
            # State is created at the first step, as in torch.
            if slot not in state:
                state[slot] = zeros_placed_like(self.platform, parameter)
        state["step"] = step
        adamw_(self.platform, parameter, gradient, state["exp_avg"], state["exp_avg_sq"], coefficients)


class SGD(Optimizer):
    """Gradient descent with momentum and weight decay, with the arithmetic of `torch.optim.SGD`."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        platform, ops = self.platform, self.platform.ops
        with platform.no_grad(), platform.local_op():
            local, change = platform.unwrap(parameter), platform.unwrap(gradient)
            if group["weight_decay"]:
                change = ops.add(change, self._times(local, group["weight_decay"]))
            if group["momentum"]:
                change = self._with_momentum(parameter, change, state, group["momentum"])
            platform.copy_(local, ops.sub(local, self._times(change, group["lr"])))

    def _times(self, x: Tensor, factor: float) -> Tensor:
        """Multiply by a number in the tensor's dtype; MindSpore itself rounds numbers to float32."""
        ops = self.platform.ops
        return ops.mul(x, ops.full((), factor, x.dtype))

    def _with_momentum(self, parameter: Tensor, change: Tensor, state: dict[str, Any], momentum: float) -> Tensor:
        platform, ops = self.platform, self.platform.ops
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = zeros_placed_like(platform, parameter)
        buffer = platform.unwrap(state["momentum_buffer"])
        platform.copy_(buffer, ops.add(self._times(buffer, momentum), change))
        return buffer
