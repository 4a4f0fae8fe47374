"""Optimizers for hp-trainer: AdamW, and the search for 8-bit codes of optimizer states."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import Tensor, mint

from hp_dtensor.tensor.conversions import zeros_placed_like
from hp_platform_mindspore.optim import AdamWStep, adamw_
from hp_platform_mindspore.platform_base import MindSporeBase
from hp_trainer.optimizers.adamw_8bit import CodeSearch

if TYPE_CHECKING:
    from hp_trainer.config import AdamWConfig


@dataclass(frozen=True, slots=True)
class _Slots:
    """A parameter and its moments, which are placed as it is."""

    parameter: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor


class AdamW:
    """AdamW (arXiv 1711.05101) with the arithmetic of `torch.optim.AdamW`; see `hp_trainer.training.Optimizer`.

    Args:
        parameters: (dotted name, parameter), DTensors or plain; floating-point leaves.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], options: AdamWConfig, platform: MindSporeBase) -> None:
        self.num_steps = 0
        self._options = options
        self._platform = platform
        self._slots = {
            name: _Slots(parameter, zeros_placed_like(platform, parameter), zeros_placed_like(platform, parameter))
            for name, parameter in parameters
        }

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, and count the step."""
        # Before the update: bias correction counts steps from 1.
        self.num_steps += 1
        options = self._options
        coefficients = AdamWStep.of_step(
            self.num_steps, learning_rate, options.betas, options.eps, options.weight_decay
        )
        for slots in self._slots.values():
            gradient = self._platform.get_grad(slots.parameter)
            # A parameter that took no part in the step keeps its value and its moments.
            if gradient is not None:
                adamw_(self._platform, slots.parameter, gradient, slots.exp_avg, slots.exp_avg_sq, coefficients)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for slots in self._slots.values():
            self._platform.set_grad(slots.parameter, None)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return `exp_avg` and `exp_avg_sq` of each parameter by name; zeros before the first step."""
        return {name: {"exp_avg": slots.exp_avg, "exp_avg_sq": slots.exp_avg_sq} for name, slots in self._slots.items()}


def find_codes(platform: MindSporeBase, x: Tensor, search: CodeSearch) -> Tensor:
    """Return, as uint8, the index of the interval of a search that contains each element; see `FindCodes`."""
    # On a CPU NumPy reads the tensor's memory; elsewhere the search runs on the device.
    if platform.capabilities.host_memory:
        return platform.from_numpy(search.find(platform.to_numpy(x)))
    return mint.searchsorted(platform.from_numpy(search.bounds, platform.device_of(x)), x).astype(ms.uint8)
