"""Numbers in and out of tensors of any dtype, exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hp_dtensor.platform.interface import Platform

Tensor = Any
Array = np.ndarray[Any, Any]


def tensor(platform: Platform, array: Any, dtype_name: str = "float32", requires_grad: bool = False) -> Tensor:
    """A tensor of its own memory with the array's values, which the dtype must hold exactly."""
    if dtype_name == "bfloat16":
        bits = (np.asarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        made = platform.from_bits(bits, platform.dtype("bfloat16"))
    else:
        made = platform.from_numpy(np.array(array, dtype_name))
    if requires_grad:
        platform.set_requires_grad(made, True)
    return made


def read(platform: Platform, x: Tensor) -> Array:
    """The values as an array; bfloat16 as float32."""
    values = platform.to_numpy(x)
    if platform.dtype_name(x.dtype) == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.array(values)


def whole_numbers(dtype_name: str, shape: Sequence[int], seed: int) -> Array:
    """Small integers that differ between seeds and that sums of a few keep exact in every dtype."""
    numbers = (np.arange(math.prod(shape)) * 3 + seed * 5 + 1) % 7
    if dtype_name == "bool":
        return (numbers % 2).reshape(shape).astype(bool)
    return (numbers if dtype_name.startswith("u") else numbers - 2).reshape(shape)


def assert_values(platform: Platform, x: Tensor, expected: Any, context: str = "") -> None:
    """`x` holds exactly `expected`, in its shape."""
    found = read(platform, x)
    assert found.shape == np.shape(expected), f"{context}: expected shape {np.shape(expected)}, got {found.shape}"
    np.testing.assert_array_equal(found, expected, err_msg=context)
