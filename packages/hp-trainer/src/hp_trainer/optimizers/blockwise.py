"""Block-wise 8-bit codes of a tensor: one byte an element, one float32 scale a block.

The codes are those of dynamic quantization (Dettmers et al., 2022, "8-bit optimizers via block-wise quantization",
arXiv 2110.02861, section 1.3): the larger a number, the more digits it keeps. The largest code stands for 1 exactly
here, with either sign, so that quantizing what was quantized in the same blocks changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.platform.interface import Platform
from hp_trainer.optimizers.code_search import CodeSearch

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
