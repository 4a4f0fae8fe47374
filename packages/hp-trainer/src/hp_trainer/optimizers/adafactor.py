"""Adafactor: a second moment of one row and one column for each matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from hp_dtensor.tensor.conversions import replicate_like, to_full, zeros_placed_like
from hp_dtensor.tensor.dtensor import DTensor
from hp_trainer.config import section
from hp_trainer.optimizers.elementwise import ParameterOptimizer

Tensor = Any


@section
class AdafactorConfig:
    """Adafactor (Shazeer and Stern, 2018, "Adaptive learning rates with sublinear memory cost", arXiv 1804.04235)."""

    lr: float = Field(1e-2, gt=0, description="peak learning rate, relative to the root mean square of the weights")
    decay_power: float = Field(0.8, gt=0, le=1, description="the second moment decays by 1 - step**-decay_power")
    eps: float = Field(1e-30, gt=0, description="added to squared gradients")
    smallest_scale: float = Field(
        1e-3, gt=0, description="least root mean square of weights that the learning rate is relative to"
    )
    clip_threshold: float = Field(1.0, gt=0, description="largest root mean square of an update")
    weight_decay: float = Field(0.0, ge=0, description="decoupled weight decay")

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of a matrix's row and column, which are replicated; see the hook `hp_optimizers`."""
        if len(shape) < 2:
            return elements * itemsize
        return (math.prod(shape[:-1]) + math.prod((*shape[:-2], shape[-1]))) * itemsize


class Adafactor(ParameterOptimizer):
    """Adafactor without momentum (arXiv 1804.04235, algorithms 4 and 5).

    The state of a parameter `[..., rows, columns]` is the means of its squared gradients over columns and over rows,
    replicated on every rank. The state of a vector is its squared gradients, sharded as the vector. Means over a
    sharded dimension are DTensor operations, so every layout has the same numbers up to rounding.
    """

    options: AdafactorConfig

    def _update(self, name: str, parameter: Tensor, grad: Tensor, learning_rate: float) -> None:
        ops, options = self.platform.ops, self.options
        # beta2_t = 1 - t**-c (section 7): 0 at the first step, so the moment needs no bias correction.
        decay = 1.0 - (self.num_steps + 1) ** -options.decay_power
        data = self.platform.detach(parameter)
        # eps_1 is added to the squares, before the mean (algorithm 4), so that zero gradients do not divide by zero.
        squares = ops.add(ops.mul(grad, grad), options.eps)
        moment = self._moment(squares, self._state[name], decay)
        update = ops.mul(grad, ops.rsqrt(moment))
        # Updates are clipped by their root mean square (section 6), then scaled by that of the weights (section 8).
        size = ops.sqrt(self._mean_square(update))
        one = ops.ones((), self.platform.dtype("float32"))
        update = ops.div(update, replicate_like(ops.maximum(ops.div(size, options.clip_threshold), one), update))
        scale = ops.clamp(ops.sqrt(self._mean_square(data)), min=options.smallest_scale)
        update = ops.mul(update, replicate_like(ops.mul(scale, learning_rate), update))
        # Decoupled weight decay, as in AdamW.
        decayed = ops.mul(data, 1 - learning_rate * options.weight_decay)
        self._copy(parameter, ops.sub(decayed, update))

    def _moment(self, squares: Tensor, state: Mapping[str, Tensor], decay: float) -> Tensor:
        """Update the second moment with squared gradients, and return it sharded as they are."""
        ops = self.platform.ops
        if "square" in state:
            self._mix(state["square"], squares, decay)
            return state["square"]
        row, column = state["row"], state["column"]
        # Means over a sharded dimension are partial sums; `to_full` reduces them, so that every rank has the same
        # state.
        self._mix(row, to_full(ops.mean(squares, -1)), decay)
        self._mix(column, to_full(ops.mean(squares, -2)), decay)
        # The moment is the outer product of row and column means, divided by the mean of all (section 3).
        share = ops.div(row, ops.mean(row, -1, True))
        rows = replicate_like(ops.unsqueeze(share, -1), squares)
        return ops.mul(rows, replicate_like(ops.unsqueeze(column, -2), squares))

    def _mix(self, moment: Tensor, new: Tensor, decay: float) -> None:
        ops = self.platform.ops
        self._copy(moment, ops.add(ops.mul(moment, decay), ops.mul(new, 1 - decay)))

    def _mean_square(self, x: Tensor) -> Tensor:
        return to_full(self.platform.ops.mean(self.platform.ops.mul(x, x)))

    def _copy(self, to: Tensor, x: Tensor) -> None:
        if isinstance(to, DTensor):
            # The local shards can be copied only if both have the same placements.
            x = x.redistribute(to.spec.mesh, to.spec.placements)
            self.platform.copy_(self.platform.unwrap(to), self.platform.unwrap(x))
        else:
            self.platform.copy_(to, x)

    def _initial(self, parameter: Tensor) -> dict[str, Any]:
        platform, shape = self.platform, tuple(parameter.shape)
        if len(shape) >= 2:
            # Plain, not DTensors: row and column are small, and every rank has all of them.
            row, column = shape[:-1], (*shape[:-2], shape[-1])
            return {"row": platform.zeros(row, parameter.dtype), "column": platform.zeros(column, parameter.dtype)}
        return {"square": zeros_placed_like(platform, parameter)}
