"""AdamW for hp-trainer by torch's fused or foreach kernels on local shards, and the kernels of its 8-bit form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim.adamw import adamw

from hp_platform_torch.tensor.dtensor import unwrap
from hp_trainer.optimizers.adamw_8bit import CodeSearch

if TYPE_CHECKING:
    from hp_trainer.config import AdamWConfig
    from hp_trainer.optimizers import AdamW8bitConfig


Tensor = torch.Tensor

# Device types with torch's fused kernel; on CPU it takes a fifth of the time of the foreach kernels.
_FUSED_DEVICES = ("cpu", "cuda")


class AdamW:
    """AdamW (arXiv 1711.05101): decoupled weight decay on every parameter. See `hp_trainer.training.Optimizer`.

    Args:
        parameters: (name, parameter), DTensors or plain; floating-point leaves.
        options: betas, epsilon and weight decay; the learning rate comes with each step.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], options: AdamWConfig) -> None:
        self.num_steps = 0
        self._options = options
        self._parameters = dict(parameters)
        self._exp_avgs = _zeros(self._parameters)
        self._exp_avg_sqs = _zeros(self._parameters)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        # Selected each time: a parameter that took no part in the step keeps its value and its moments.
        names = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        apply_adamw(
            # On local shards, since the update is elementwise; intercepting each operation would cost more than the
            # kernel.
            [unwrap(self._parameters[name]) for name in names],
            [unwrap(self._parameters[name].grad) for name in names],
            [unwrap(self._exp_avgs[name]) for name in names],
            [unwrap(self._exp_avg_sqs[name]) for name in names],
            self.num_steps,
            learning_rate,
            self._options,
        )
        # After the update: torch's kernel increments the count that it is given.
        self.num_steps += 1

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {
            name: {"exp_avg": self._exp_avgs[name], "exp_avg_sq": self._exp_avg_sqs[name]} for name in self._parameters
        }


def apply_adamw(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    num_steps: int,
    learning_rate: float,
    options: AdamWConfig | AdamW8bitConfig,
) -> None:
    """Update weights and moments in place, by torch's fused kernel if it exists and all tensors have one memory layout.

    Args:
        num_steps: number of earlier updates.
    """
    grads = [with_strides_of(x, grad) for x, grad in zip(weights, grads, strict=True)]
    fused = all(
        x.device.type in _FUSED_DEVICES and have_one_layout(x, *others)
        for x, *others in zip(weights, grads, means, squares, strict=True)
    )
    beta1, beta2 = options.betas
    adamw(
        list(weights),
        grads,
        list(means),
        list(squares),
        [],
        [_step_count(num_steps, x.device if fused else "cpu") for x in weights],
        fused=fused,
        foreach=not fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=learning_rate,
        weight_decay=options.weight_decay,
        eps=options.eps,
        maximize=False,
    )


def with_strides_of(x: Tensor, grad: Tensor) -> Tensor:
    """Return a gradient with the parameter's strides. Autograd's gradients have them; others may not."""
    return grad if grad.stride() == x.stride() else torch.empty_like(x, dtype=grad.dtype).copy_(grad)


def have_one_layout(x: Tensor, *others: Tensor) -> bool:
    """Return True if equal indices have equal offsets in all tensors, and the memory has no gaps.

    Torch's fused kernel walks through the memory of parameters, gradients and moments in parallel. On CPU it ignores
    their strides.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.numel() == 0 or (extent == x.numel() and all(each.stride() == x.stride() for each in others))


def _step_count(count: int, device: torch.device | str) -> Tensor:
    """Return a step count as torch's optimizers store it: in float32, whatever torch's default dtype is."""
    # Filled on the device: copying a number from the host would wait for the device's queue.
    return torch.full((), count, dtype=torch.float32, device=device)


def _zeros(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name -> zeros with the placements of the parameter."""
    with torch.no_grad():
        return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}


def find_codes(x: torch.Tensor, search: CodeSearch) -> torch.Tensor:
    """Return the index of the interval between bounds that contains each element, as uint8; see `FindCodes`."""
    if x.device.type != "cpu":
        return torch.bucketize(x, torch.from_numpy(search.bounds).to(x.device), out_int32=True).to(torch.uint8)
    # On a CPU bucketize takes 20 times as long as this table of the upper 16 bits of each float.
    bits = x.contiguous().view(torch.int32).view(-1)
    # The sign is shifted in and must be removed for the index.
    halves = (bits >> 16).bitwise_and_(0xFFFF)
    sums = torch.from_numpy(search.addends).index_select(0, halves)
    sums.add_(torch.bitwise_xor(bits, bits >> 31, out=halves))
    return sums.bitwise_right_shift_(16).to(torch.uint8).view(x.shape)


def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    num_steps: int,
    learning_rate: float,
    options: AdamW8bitConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do update number `num_steps` (from 1) of AdamW, by torch's fused kernel if there is one; see `Update`."""
    # `apply_adamw` takes the number of earlier updates.
    apply_adamw([weight], [grad], [mean], [square], num_steps - 1, learning_rate, options)
    return mean, square
