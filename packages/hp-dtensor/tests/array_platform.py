"""A platform of bare NumPy arrays, just enough for collectives: these tests need no framework."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np

from hp_dtensor.comm.world import SilentWorld
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.plugins import hookimpl


class ArrayPlatform(Platform):
    """Arrays without gradients; what is not defined here is not needed by the tests of ranks and meshes."""

    name = "array"
    device_types = ("cpu",)
    ops = SimpleNamespace(add=np.add, mul=np.multiply, div=np.divide, maximum=np.maximum, minimum=np.minimum)

    def __init__(self) -> None:
        self.state: Any = "start"

    def connect(self, rank, size, address, timeout_seconds=300.0, local_rank=0):
        self.address, self.local_rank = address, local_rank
        self._world = SilentWorld(rank, size, self)
        return self._world

    def disconnect(self):
        self._world = None

    def dtype(self, name):
        return np.dtype(name)

    def dtype_name(self, dtype):
        return np.dtype(dtype).name

    def itemsize(self, dtype):
        return np.dtype(dtype).itemsize

    def to_numpy(self, x):
        return x

    def from_bits(self, array, dtype, device=None):
        return array

    def copy_(self, target, source):
        assert target.shape == source.shape
        target[...] = source

    def device_of(self, x):
        return None

    def no_grad(self):
        return contextlib.nullcontext()

    def rank_state(self):
        return self.state

    def set_rank_state(self, state):
        self.state = state


ArrayPlatform.__abstractmethods__ = frozenset()
ARRAY = ArrayPlatform()


@hookimpl
def hp_platform():
    return ARRAY
