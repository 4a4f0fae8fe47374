"""The plugin for hp-fsdp, loaded through the entry-point group `hp_fsdp`: flat buffers that are never freed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.plugins import hookimpl
from hp_fsdp.storage import ParameterStorage, moved_to_front
from hp_platform_numpy import tape
from hp_platform_numpy.tensor import Tensor


@hookimpl
def hp_fsdp_parameter(platform: Platform) -> ParameterStorage | None:
    return NumpyStorage(platform) if platform.name == "numpy" else None


class NumpyStorage(ParameterStorage):
    def view(self, buffer: Tensor, start: int, shape: Sequence[int], outer_dim: int = 0) -> Tensor:
        stored = buffer.data[start : start + math.prod(shape)].reshape(moved_to_front(shape, outer_dim))
        made = Tensor.__new__(Tensor)
        Tensor.__init__(made, stored, buffer.dtype)
        made.data = stored if outer_dim == 0 else stored.swapaxes(0, outer_dim)
        return made

    def address(self, x: Tensor) -> int:
        return x.data.__array_interface__["data"][0]

    def on_gradient(self, tensor: Tensor, hook: Callable[[], None]) -> None:
        tape.on_gradient(tensor, hook)

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        tape.at_end(callback)
