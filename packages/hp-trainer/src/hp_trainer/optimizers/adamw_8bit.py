"""AdamW whose moments are kept as 8-bit codes: about a quarter of the memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of, zeros_laid_out_as
from hp_dtensor.tensor.dtensor import DTensor
from hp_trainer.optimizers.blockwise import Blocks, BlockwiseCodes, FindCodes
from hp_trainer.optimizers.options import AdamW8bitConfig

Tensor = Any
# A platform's own update of AdamW: takes a weight, which it writes, gradient and both moments (float32), the number of
# the update from 1, the learning rate, and the settings; returns the new moments.
Update = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, AdamW8bitConfig], tuple[Tensor, Tensor]]


class AdamW8bit:
    """AdamW (arXiv 1711.05101) with block-wise 8-bit moments (arXiv 2110.02861); see `hp_trainer.training.Optimizer`.

    Each rank quantizes its own shards. A block never reaches over the end of a row, so shards of whole rows have the
    same codes in every layout; a shard whose last dimension is cut begins blocks of its own. Checkpoints hold the
    moments as the float32 numbers that the codes stand for: they are quantized anew where they are loaded, which gives
    the same codes where blocks have the same borders, and else an error of at most half the distance of two codes.
    So plain AdamW goes on from such a checkpoint, and this from one of plain AdamW.

    All is computed in float32, also where parameters and gradients are bfloat16 or float16.

    Args:
        parameters: (name, parameter), DTensors or plain.
        options: its settings.
        platform: whose tensors they are.
        find_codes: the platform's search for the code of a number.
        update: the platform's own update, quicker than one of its operations after the other; None: by these.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        options: AdamW8bitConfig,
        platform: Platform,
        find_codes: FindCodes,
        update: Update | None = None,
    ) -> None:
        self.num_steps = 0
        self._own_update = update
        self._options, self._platform = options, platform
        self._parameters = dict(parameters)
        self._kinds = {
            "exp_avg": BlockwiseCodes(platform, options.block_size, find_codes, signed=True),
            "exp_avg_sq": BlockwiseCodes(platform, options.block_size, find_codes, signed=False),
        }
        # Codes, or the float32 tensor itself of a parameter that is too small.
        self._state: dict[str, dict[str, Any]] = {}
        with platform.no_grad():
            for name, parameter in self._parameters.items():
                zeros = zeros_laid_out_as(platform, parameter, platform.dtype("float32"))
                self._state[name] = dict.fromkeys(self._kinds)
                for slot in self._kinds:
                    self.set_state(name, slot, zeros)

    def step(self, learning_rate: float) -> None:
        """Update every parameter that has a gradient, and count the update."""
        self.num_steps += 1
        with self._platform.no_grad():
            for name, parameter in self._parameters.items():
                grad = self._platform.get_grad(parameter)
                if grad is not None:
                    self._update(name, parameter, local_of(self._platform, grad), learning_rate)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters.values():
            self._platform.set_grad(parameter, None)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return `exp_avg` and `exp_avg_sq` of each parameter by name, as float32 made when they are asked for.

        What is written into them is taken over by `set_state`.
        """
        return _Moments(self)

    def moment(self, name: str, slot: str) -> Tensor:
        """Return a moment as float32, laid out as its parameter."""
        parameter = self._parameters[name]
        local = self._local_moment(name, slot)
        if not isinstance(parameter, DTensor):
            return local
        return self._platform.wrap(local, parameter.spec.with_dtype(local.dtype))

    def set_state(self, name: str, slot: str, values: Tensor) -> None:
        """Take over the values of a moment, laid out as its parameter."""
        with self._platform.no_grad():
            local = self._platform.detach(local_of(self._platform, values))
            self._keep(name, slot, self._platform.ops.cast(local, self._platform.dtype("float32")))

    def state_bytes(self, platform: Platform) -> int:
        """Return the bytes that this rank's moments take."""
        total = 0
        for name, slots in self._state.items():
            shape = tuple(platform.local_shape(self._parameters[name]))
            for slot in slots:
                total += self._kinds[slot].num_bytes(shape) if self._is_coded(name) else 4 * math.prod(shape)
        return total

    def _update(self, name: str, parameter: Tensor, grad: Tensor, learning_rate: float) -> None:
        ops, options = self._platform.ops, self._options
        float32, local = self._platform.dtype("float32"), self._platform.detach(local_of(self._platform, parameter))
        weight, grad = ops.cast(local, float32), ops.cast(grad, float32)
        mean, square = (self._local_moment(name, slot) for slot in self._kinds)
        if self._own_update is not None:
            mean, square = self._own_update(weight, grad, mean, square, self.num_steps, learning_rate, options)
            if local.dtype != float32:
                self._platform.copy_(local, ops.cast(weight, local.dtype))
        else:
            mean, square = self._updated(local, weight, grad, mean, square, learning_rate)
        self._keep(name, "exp_avg", mean)
        self._keep(name, "exp_avg_sq", square)

    def _updated(
        self, local: Tensor, weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, learning_rate: float
    ) -> tuple[Tensor, Tensor]:
        """Write the new weight into `local`; return the new moments."""
        ops, options = self._platform.ops, self._options
        (beta1, beta2), count = options.betas, self.num_steps
        mean = ops.add(ops.mul(mean, beta1), ops.mul(grad, 1 - beta1))
        square = ops.add(ops.mul(square, beta2), ops.mul(ops.square(grad), 1 - beta2))
        # AdamW (arXiv 1711.05101), the corrections of the two means folded into size and step.
        size = ops.add(ops.mul(ops.sqrt(square), 1 / math.sqrt(1 - beta2**count)), options.eps)
        step = ops.mul(ops.div(mean, size), learning_rate / (1 - beta1**count))
        decayed = ops.mul(weight, 1 - learning_rate * options.weight_decay)
        self._platform.copy_(local, ops.cast(ops.sub(decayed, step), local.dtype))
        return mean, square

    def _local_moment(self, name: str, slot: str) -> Tensor:
        kept = self._state[name][slot]
        if not isinstance(kept, Blocks):
            return kept
        shape = tuple(self._platform.local_shape(self._parameters[name]))
        return self._kinds[slot].dequantize(kept, shape)

    def _keep(self, name: str, slot: str, values: Tensor) -> None:
        if self._is_coded(name):
            self._state[name][slot] = self._kinds[slot].quantize(values)
        else:
            self._state[name][slot] = self._platform.ops.clone(values)

    def _is_coded(self, name: str) -> bool:
        """Tell whether a parameter's moments are codes: by its whole size, so that every layout says the same."""
        parameter = self._parameters[name]
        is_large = math.prod(parameter.shape) >= self._options.min_elements and len(parameter.shape) > 0
        return is_large and math.prod(self._platform.local_shape(parameter)) > 0


class _Moments(Mapping[str, Mapping[str, Tensor]]):
    """The moments of every parameter; those of one are made when it is asked for."""

    def __init__(self, optimizer: AdamW8bit) -> None:
        self._optimizer = optimizer

    def __getitem__(self, name: str) -> Mapping[str, Tensor]:
        return {slot: self._optimizer.moment(name, slot) for slot in self._optimizer._state[name]}

    def __contains__(self, name: object) -> bool:
        # The inherited one would make the moments.
        return name in self._optimizer._state

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizer._state)

    def __len__(self) -> int:
        return len(self._optimizer._state)
