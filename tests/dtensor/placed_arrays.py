"""Full NumPy arrays as DTensors of any placement on simulated ranks, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hp_dtensor import DeviceMesh, from_local
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

Array = np.ndarray[Any, Any]


MATRIX = np.arange(20, dtype=np.float32).reshape(5, 4) % 7 - 3


def place(platform: Platform, mesh: DeviceMesh, array: Array, placements: Sequence[Any]) -> tuple[Any, Any]:
    """(leaf, DTensor) of a full array; partial ones hold it on the first rank."""
    from hp_dtensor.testing.rule_proof import local_values

    local = platform.from_numpy(local_values(array, mesh, placements))
    if platform.is_floating(local.dtype):
        platform.set_requires_grad(local, True)
    return local, from_local(local, mesh, placements, shape=array.shape)


def on_ranks(platform: Platform, program: Callable[..., Any], size: int = 4, shape: tuple[int, ...] = (4,)) -> Any:
    def run() -> Any:
        return program(platform, DeviceMesh("cpu", shape, platform=platform))

    return run_ranks(run, size, platform)[0]


def full_array(platform: Platform, x: Any) -> Array:
    return platform.to_numpy(platform.detach(x.full_tensor()))
