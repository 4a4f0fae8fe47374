"""Search for the code of a number, by a table of the upper half of its bits instead of a search through all codes.

Block-wise 8-bit codes of a tensor: one byte an element, one float32 scale a block.

The codes are those of dynamic quantization (Dettmers et al., 2022, "8-bit optimizers via block-wise quantization",
arXiv 2110.02861, section 1.3): the larger a number, the more digits it keeps. The largest code stands for 1 exactly
here, with either sign, so that quantizing what was quantized in the same blocks changes nothing.

AdamW whose moments are kept as 8-bit codes: about a quarter of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of, zeros_placed_like
from hp_dtensor.tensor.dtensor import DTensor
from hp_trainer.config import AdamWConfig, setting


@dataclass(frozen=True, kw_only=True)
class AdamW8bitConfig(AdamWConfig):
    """AdamW with 8-bit moments (Dettmers et al., 2022, "8-bit optimizers via block-wise quantization")."""

    has_plain_state: ClassVar[bool] = False

    block_size: int = setting(256, help="elements that share a scale, along the last dimension", minimum=8)
    min_elements: int = setting(4096, help="parameters with fewer elements keep float32 moments", minimum=1)

    def state_bytes(self, name: str, shape: tuple[int, ...], elements: int, itemsize: int) -> int:
        """Return the bytes of the codes and scales of both moments; see the hook `hp_optimizers`."""
        if not elements or not shape or math.prod(shape) < self.min_elements:
            return 2 * elements * itemsize
        row = shape[-1] if len(shape) > 1 else elements
        size = min(self.block_size, row)
        blocks = -(-elements // row) * -(-row // size)
        return 2 * blocks * (size + 4)

    def update_bytes(self, held: Sequence[tuple[str, tuple[int, ...], int]], *, is_host: bool) -> int:
        """Return the bytes of float32 copies while one parameter is updated; see the hook `hp_optimizers`."""
        return 40 * max((elements for _, _, elements in held), default=0)


class CodeSearch:
    """Finds in which stretch between increasing float32 bounds a number lies, by one look into a table and one sum.

    Numbers with the same upper 16 bits (sign, exponent and 7 bits of the fraction) are so near to each other that at
    most one bound lies among them. The table has for them the number that, added to the bits, leaves the stretch in the
    upper half of the sum: the lower half carries over where the number is above the bound. Bits of negative numbers,
    which grow as the numbers fall, are inverted first. This takes a twentieth of the time of a binary search.

    Attributes:
        bounds: float32, increasing, fewer than 256.
        addends: what to add to the bits of a number with each upper half, int32 `[65536]`, overflow ignored.

    Example:
        >>> search = CodeSearch(np.array([-0.5, 0.0, 0.25], np.float32))
        >>> search.find(np.array([-1.0, -0.5, 0.1, 0.25, 9.0], np.float32)).tolist()
        [0, 0, 2, 2, 3]
    """

    def __init__(self, bounds: np.ndarray) -> None:
        halves = np.arange(2**16, dtype=np.uint32) << 16
        is_negative = halves >= 2**31
        # The lower bits of a negative number make it smaller.
        smallest, largest = (halves | np.where(is_negative ^ last, 0xFFFF, 0).astype(np.uint32) for last in (0, 1))
        first = np.searchsorted(bounds, smallest.view(np.float32))
        last = np.searchsorted(bounds, largest.view(np.float32))
        assert np.all((last - first <= 1) | ~np.isfinite(smallest.view(np.float32))), "bounds too close for the table"
        has_bound = (last - first == 1) & np.isfinite(smallest.view(np.float32))
        next_bound = np.append(bounds, bounds[-1:]).astype(np.float32)[first].view(np.uint32)
        carries_above = np.where(has_bound, _growing(next_bound) & 0xFFFF, 0xFFFF).astype(np.int64)
        addends = ((first - (_growing(halves) >> 16).astype(np.int64)) << 16) + 0xFFFF - carries_above
        self.bounds = bounds
        self.addends = addends.astype(np.int32)

    def find(self, x: np.ndarray) -> np.ndarray:
        """Return the number of the stretch of each element of a float32 array, as uint8."""
        bits = x.view(np.int32)
        sums = np.take(self.addends, (bits >> 16) & 0xFFFF)
        sums += bits ^ (bits >> 31)
        codes: np.ndarray = (sums >> 16).astype(np.uint8)
        return codes


def _growing(bits: np.ndarray) -> np.ndarray:
    """Return bits of floats (uint32), inverted where negative: of one sign, larger numbers have larger bits."""
    inverted: np.ndarray = np.where(bits >= 2**31, ~bits, bits)
    return inverted


Tensor = Any
# Returns the number (uint8) of the stretch in which each element of a float32 tensor lies.
FindCodes = Callable[[Tensor, CodeSearch], Tensor]


def dynamic_values(*, signed: bool) -> np.ndarray:
    """Return what each code stands for, in increasing order: float32 `[255]` with signs, else `[256]`.

    Numbers from 10**-7 (10**-6 with signs) to 1 have as many fractions in each power of ten as there are codes for it.
    """
    decades = 7 if signed else 8
    parts = []
    for i in range(decades):
        bounds = np.linspace(0.1, 1, 2**i + 1)
        parts.append((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (i + 1 - decades))
    positive = np.sort(np.concatenate(parts))
    positive[-1] = 1.0
    below = -positive[::-1] if signed else np.zeros(0)
    return np.concatenate([below, [0.0], positive]).astype(np.float32)


@dataclass(frozen=True)
class Blocks:
    """Codes of a tensor.

    Attributes:
        codes: uint8 `[blocks, size]`.
        scales: the largest absolute value of each block, float32 `[blocks, 1]`.
    """

    codes: Tensor
    scales: Tensor


class BlockwiseCodes:
    """Turns float32 tensors into codes and back.

    A block is a stretch of the last dimension, which begins anew in each row; the last one of a row may be shorter.

    Args:
        platform: whose tensors they are.
        block_size: elements of a block.
        find_codes: the platform's search.
        signed: whether numbers may be negative.
    """

    def __init__(self, platform: Platform, block_size: int, find_codes: FindCodes, *, signed: bool) -> None:
        self._platform, self._block_size, self._find_codes = platform, block_size, find_codes
        self._values, self._signed = dynamic_values(signed=signed), signed
        self._search = CodeSearch((self._values[:-1] + self._values[1:]) / 2)

    def quantize(self, x: Tensor) -> Blocks:
        """Return the codes of a tensor (float32 of any shape with at least one element)."""
        ops = self._platform.ops
        rows = self._in_blocks(x)
        scales = ops.amax(ops.abs(rows) if self._signed else rows, 1, True)
        safe = ops.where(ops.eq(scales, 0), ops.ones_like(scales), scales)
        return Blocks(self._find_codes(ops.div(rows, safe), self._search), scales)

    def dequantize(self, blocks: Blocks, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor of this shape that the codes stand for."""
        platform, ops = self._platform, self._platform.ops
        size, filled = self._sizes(shape)
        table = platform.from_numpy(self._values, platform.device_of(blocks.scales))
        codes = ops.cast(ops.reshape(blocks.codes, (-1,)), platform.dtype("int32"))
        rows = ops.mul(ops.reshape(ops.index_select(table, 0, codes), (-1, size)), blocks.scales)
        return ops.narrow(ops.reshape(rows, (*shape[:-1], filled)), len(shape) - 1, 0, shape[-1])

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the codes and scales of a tensor of this shape."""
        size, filled = self._sizes(shape)
        elements = math.prod(shape[:-1]) * filled
        return elements + 4 * (elements // size)

    def _in_blocks(self, x: Tensor) -> Tensor:
        """Return a tensor as `[blocks, size]`, rows filled up with zeros."""
        platform, ops = self._platform, self._platform.ops
        shape = tuple(x.shape)
        size, filled = self._sizes(shape)
        if filled > shape[-1]:
            zeros = platform.from_numpy(np.zeros((*shape[:-1], filled - shape[-1]), np.float32), platform.device_of(x))
            x = ops.cat([x, zeros], len(shape) - 1)
        return ops.reshape(x, (-1, size))

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the elements of a block, and those of a row that is filled up to whole blocks."""
        size = min(self._block_size, shape[-1])
        return size, -(-shape[-1] // size) * size


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
                zeros = zeros_placed_like(platform, parameter, platform.dtype("float32"))
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
