"""AdamW with moments stored as 8-bit codes, which take about a quarter of the memory.

A tensor is quantized in blocks: one byte per element and one float32 scale per block. The codes are those of dynamic
quantization (Dettmers et al., 2022, "8-bit optimizers via block-wise quantization", arXiv 2110.02861, section 1.3): the
larger a number, the more significant digits it keeps. Here the largest code stands for exactly 1, with either sign, so
that quantizing a tensor again in the same blocks changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of, zeros_placed_like
from hp_dtensor.tensor.dtensor import DTensor
from hp_trainer.config import AdamWConfig, section
from hp_trainer.optimizers.elementwise import ParameterOptimizer, adamw_update


@section
class AdamW8bitConfig(AdamWConfig):
    """AdamW with 8-bit moments (Dettmers et al., 2022, "8-bit optimizers via block-wise quantization")."""

    has_plain_state: ClassVar[bool] = False

    block_size: int = Field(256, ge=8, description="elements that share a scale, along the last dimension")
    min_elements: int = Field(4096, ge=1, description="parameters with fewer elements keep float32 moments")

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
        # Ten tensors of 4 bytes per element: weight, gradient, moments and temporaries of one parameter.
        return 40 * max((elements for _, _, elements in held), default=0)


class CodeSearch:
    """Finds the interval of a number between increasing float32 bounds by one table look-up and one addition.

    Numbers with the same upper 16 bits (sign, exponent and 7 bits of the fraction) are so close together that at most
    one bound is among them. For each upper half the table has an addend; the upper half of (bits + addend) is the index
    of the interval. The lower half carries into it exactly where the number is above the bound. Bits of negative
    numbers increase as the numbers decrease, so they are inverted first. A binary search takes twenty times as long.

    Attributes:
        bounds: float32, increasing, fewer than 256.
        addends: int32 `[65536]`, the addend for each upper half; sums wrap around.

    Examples:
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
        # The lower half above which a number passes the bound; 0xFFFF: never.
        carries_above = np.where(has_bound, _growing(next_bound) & 0xFFFF, 0xFFFF).astype(np.int64)
        addends = ((first - (_growing(halves) >> 16).astype(np.int64)) << 16) + 0xFFFF - carries_above
        self.bounds = bounds
        self.addends = addends.astype(np.int32)

    def find(self, x: np.ndarray) -> np.ndarray:
        """Return the index of each element's interval as uint8, for a float32 array."""
        bits = x.view(np.int32)
        # Arithmetic shifts: `bits >> 31` is all ones for negative numbers, so the XOR below inverts them.
        sums = np.take(self.addends, (bits >> 16) & 0xFFFF)
        sums += bits ^ (bits >> 31)
        codes: np.ndarray = (sums >> 16).astype(np.uint8)
        return codes


def _growing(bits: np.ndarray) -> np.ndarray:
    """Return the bits of floats (uint32), inverted if negative, so that larger numbers of one sign have larger bits."""
    inverted: np.ndarray = np.where(bits >= 2**31, ~bits, bits)
    return inverted


Tensor = Any
# Returns the index (uint8) of the interval that contains each element of a float32 tensor.
FindCodes = Callable[[Tensor, CodeSearch], Tensor]


def dynamic_values(*, signed: bool) -> np.ndarray:
    """Return the value of each code in increasing order: float32 `[255]` with signs, else `[256]`.

    Each power of ten from 10**-7 (10**-6 with signs) to 1 has twice as many codes as the one below, evenly spaced.
    """
    decades = 7 if signed else 8
    fractions = []
    for i in range(decades):
        # 2**i codes in the i-th decade, at the middles of equal intervals.
        bounds = np.linspace(0.1, 1, 2**i + 1)
        fractions.append((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (i + 1 - decades))
    positive = np.sort(np.concatenate(fractions))
    # The largest element of a block is stored exactly, as scale times 1.
    positive[-1] = 1.0
    below = -positive[::-1] if signed else np.zeros(0)
    return np.concatenate([below, [0.0], positive]).astype(np.float32)


@dataclass(frozen=True)
class Blocks:
    """A quantized tensor: uint8 codes `[blocks, size]`, and the largest absolute values, float32 `[blocks, 1]`."""

    codes: Tensor
    scales: Tensor


class BlockwiseCodes:
    """Quantizes float32 tensors, perhaps `signed`, and back, in spans of a row, the last of which may be shorter."""

    def __init__(self, platform: Platform, block_size: int, find_codes: FindCodes, *, signed: bool) -> None:
        self._platform, self._block_size, self._find_codes = platform, block_size, find_codes
        self._values, self._signed = dynamic_values(signed=signed), signed
        # Bounds half-way between neighbouring values: the nearest code is found.
        self._search = CodeSearch((self._values[:-1] + self._values[1:]) / 2)

    def quantize(self, x: Tensor) -> Blocks:
        """Return the codes of a tensor (float32 of any shape with at least one element)."""
        ops = self._platform.ops
        rows = self._in_blocks(x)
        scales = ops.amax(ops.abs(rows) if self._signed else rows, 1, True)
        # A block of zeros would divide by zero.
        safe = ops.where(ops.eq(scales, 0), ops.ones_like(scales), scales)
        return Blocks(self._find_codes(ops.div(rows, safe), self._search), scales)

    def dequantize(self, blocks: Blocks, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor of this shape, float32."""
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
        """Return a tensor as `[blocks, size]`, its rows padded with zeros."""
        platform, ops = self._platform, self._platform.ops
        shape = tuple(x.shape)
        size, filled = self._sizes(shape)
        if filled > shape[-1]:
            zeros = platform.from_numpy(np.zeros((*shape[:-1], filled - shape[-1]), np.float32), platform.device_of(x))
            x = ops.cat([x, zeros], len(shape) - 1)
        return ops.reshape(x, (-1, size))

    def _sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the elements of a block, and those of a row padded to a multiple of that."""
        size = min(self._block_size, shape[-1])
        return size, -(-shape[-1] // size) * size


# A platform's own update of AdamW. Takes a weight, which it updates in place, gradient and both moments (float32), the
# number of the update from 1, the learning rate and the settings. Returns the new moments.
Update = Callable[[Tensor, Tensor, Tensor, Tensor, int, float, AdamW8bitConfig], tuple[Tensor, Tensor]]


class AdamW8bit(ParameterOptimizer):
    """AdamW (arXiv 1711.05101) with block-wise 8-bit moments (arXiv 2110.02861).

    Each rank quantizes its own shards. No block spans two rows, so shards of full rows have the same codes in every
    layout; a shard of part of the last dimension has blocks of its own. Checkpoints hold the moments dequantized to
    float32, and loading quantizes them again: to the same codes if blocks have the same bounds, otherwise with an error
    of at most half the distance of two codes. So AdamW can continue from such a checkpoint, and this from one of AdamW.

    All computation is in float32, even if parameters and gradients are bfloat16 or float16.

    Args:
        parameters, options, platform: as for `ParameterOptimizer`.
        find_codes: the platform's search for the code of a number; None: NumPy's, on the host.
        update: the platform's own fused update; None: the update is composed of its operations.
    """

    options: AdamW8bitConfig

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor]],
        options: AdamW8bitConfig,
        platform: Platform,
        find_codes: FindCodes | None = None,
        update: Update | None = None,
    ) -> None:
        def find_on_host(x: Tensor, search: CodeSearch) -> Tensor:
            return platform.from_numpy(search.find(platform.to_numpy(x)), platform.device_of(x))

        find_codes = find_codes or find_on_host
        self._own_update = update
        self._kinds = {
            "exp_avg": BlockwiseCodes(platform, options.block_size, find_codes, signed=True),
            "exp_avg_sq": BlockwiseCodes(platform, options.block_size, find_codes, signed=False),
        }
        super().__init__(parameters, options, platform)

    def _initial(self, parameter: Tensor) -> dict[str, Any]:
        # `Blocks`, or float32 tensors for parameters that are too small to quantize.
        zeros = local_of(self.platform, zeros_placed_like(self.platform, parameter, self.platform.dtype("float32")))
        return {slot: self._stored(parameter, slot, zeros) for slot in self._kinds}

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return `exp_avg` and `exp_avg_sq` of each parameter by name, dequantized on access.

        Writing into them has no effect until `set_state` is called.
        """
        return _Moments(self)

    def moment(self, name: str, slot: str) -> Tensor:
        """Return a moment as float32, sharded as its parameter."""
        parameter = self._parameters[name]
        local = self._local_moment(name, slot)
        if not isinstance(parameter, DTensor):
            return local
        return self.platform.wrap(local, parameter.spec.with_dtype(local.dtype))

    def set_state(self, name: str, slot: str, values: Tensor) -> None:
        """Set a moment to values that are sharded as its parameter."""
        with self.platform.no_grad():
            local = self.platform.detach(local_of(self.platform, values))
            values = self.platform.ops.cast(local, self.platform.dtype("float32"))
            self._state[name][slot] = self._stored(self._parameters[name], slot, values)

    def state_bytes(self, platform: Platform) -> int:
        """Return the bytes of this rank's moments."""
        total = 0
        for name, slots in self._state.items():
            parameter = self._parameters[name]
            shape = tuple(platform.local_shape(parameter))
            for slot in slots:
                total += self._kinds[slot].num_bytes(shape) if self._is_coded(parameter) else 4 * math.prod(shape)
        return total

    def _update(self, name: str, parameter: Tensor, grad: Tensor, learning_rate: float) -> None:
        ops, options = self.platform.ops, self.options
        float32, local = self.platform.dtype("float32"), self.platform.detach(local_of(self.platform, parameter))
        weight, grad = ops.cast(local, float32), ops.cast(local_of(self.platform, grad), float32)
        # Bias correction counts updates from 1.
        count = self.num_steps + 1
        mean, square = (self._local_moment(name, slot) for slot in self._kinds)
        if self._own_update is not None:
            mean, square = self._own_update(weight, grad, mean, square, count, learning_rate, options)
            # In float32 the cast returned `local` itself, which the platform's update has written.
            if local.dtype != float32:
                self.platform.copy_(local, ops.cast(weight, local.dtype))
        else:
            updated, mean, square = adamw_update(
                self.platform, weight, grad, mean, square, count, learning_rate, options
            )
            self.platform.copy_(local, ops.cast(updated, local.dtype))
        for slot, values in (("exp_avg", mean), ("exp_avg_sq", square)):
            self._state[name][slot] = self._stored(parameter, slot, values)

    def _local_moment(self, name: str, slot: str) -> Tensor:
        stored = self._state[name][slot]
        if not isinstance(stored, Blocks):
            return stored
        shape = tuple(self.platform.local_shape(self._parameters[name]))
        return self._kinds[slot].dequantize(stored, shape)

    def _stored(self, parameter: Tensor, slot: str, values: Tensor) -> Any:
        if self._is_coded(parameter):
            return self._kinds[slot].quantize(values)
        # A copy: `values` may be shared, as the initial zeros of both moments are.
        return self.platform.ops.clone(values)

    def _is_coded(self, parameter: Tensor) -> bool:
        """Return whether a parameter's moments are quantized; its global size decides, so all layouts agree."""
        is_large = math.prod(parameter.shape) >= self.options.min_elements and len(parameter.shape) > 0
        # A rank with an empty shard has nothing to quantize.
        return is_large and math.prod(self.platform.local_shape(parameter)) > 0


class _Moments(Mapping[str, Mapping[str, Tensor]]):
    """The moments of every parameter, dequantized on access."""

    def __init__(self, optimizer: AdamW8bit) -> None:
        self._optimizer = optimizer

    def __getitem__(self, name: str) -> Mapping[str, Tensor]:
        return {slot: self._optimizer.moment(name, slot) for slot in self._optimizer._state[name]}

    def __contains__(self, name: object) -> bool:
        # The inherited method would dequantize the moments.
        return name in self._optimizer._state

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizer._state)

    def __len__(self) -> int:
        return len(self._optimizer._state)
