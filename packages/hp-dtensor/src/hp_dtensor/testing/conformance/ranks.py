"""Simulated or real ranks behind one interface, and exact conversion of tensors of any dtype to and from NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.launch import RankPool
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing.simulated import run_ranks

Tensor = Any
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Ranks:
    """`size` ranks: processes of `pool`, or simulated ranks if it is None."""

    size: int
    platform: Platform
    pool: RankPool | None

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `program(platform, *args)` on every rank, and return the results by rank."""
        if self.pool is None:
            return run_ranks(program, self.size, self.platform, self.platform, *args)
        # By name: a platform is an object of one process, and each rank has its own.
        return self.pool.run(program, self.platform.name, *args)


def groups(platform: Platform) -> Iterator[ProcessGroup]:
    """Yield the groups of this rank: all ranks, all but rank 0, the first and the last, and this rank alone."""
    world = current_world(platform)
    last = world.size - 1
    # Without rank 0, ranks in the group differ from global ones. First and last are not adjacent. A group of one must
    # work without a backend.
    for members in (range(world.size), range(1, world.size), sorted({0, last}), (world.rank,)):
        # Members alone create a group. With torch's `new_group` all ranks of the job would have to call it.
        if world.rank in members:
            yield world.group(tuple(members))


def tensor(platform: Platform, array: Any, dtype_name: str = "float32", requires_grad: bool = False) -> Tensor:
    """Return a tensor with a copy of the array's values, which the dtype must represent exactly."""
    if dtype_name == "bfloat16":
        # NumPy has no bfloat16: its bits are the upper half of a float32's.
        bits = (np.asarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        made = platform.from_bits(bits, platform.dtype("bfloat16"))
    else:
        made = platform.from_numpy(np.array(array, dtype_name))
    if requires_grad:
        platform.set_requires_grad(made, True)
    return made


def read(platform: Platform, x: Tensor) -> Array:
    """Return the values as an array; bfloat16 as float32."""
    values = platform.to_numpy(x)
    if platform.dtype_name(x.dtype) == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.array(values)


def small_integers(dtype_name: str, shape: Sequence[int], seed: int) -> Array:
    """Return small integers that differ between seeds. Sums of a few of them are exact in every dtype."""
    # 3 and 7 are coprime, so neighbours differ. At most 6, so sums stay within int8 and within bfloat16's exact
    # integers, which end at 256.
    numbers = (np.arange(math.prod(shape)) * 3 + seed * 5 + 1) % 7
    if dtype_name == "bool":
        return (numbers % 2).reshape(shape).astype(bool)
    return (numbers if dtype_name.startswith("u") else numbers - 2).reshape(shape)


def assert_values(platform: Platform, x: Tensor, expected: Any, context: str = "") -> None:
    """Assert that `x` has exactly the values and the shape of `expected`."""
    found = read(platform, x)
    assert found.shape == np.shape(expected), f"{context}: expected shape {np.shape(expected)}, got {found.shape}"
    np.testing.assert_array_equal(found, expected, err_msg=context)
