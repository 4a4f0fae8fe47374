"""The data of a DTensor beyond its local shard, as the functions on DTensors read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import TensorSpec


class AwaitedGradient(NamedTuple):
    """What sets a gradient that lies elsewhere, when somebody looks at it, and what is called when it is replaced."""

    fetch: Callable[[], None]
    drop: Callable[[], None]


class DTensorBase:
    """Mixed into each platform's tensor subclass; `isinstance(x, DTensor)` holds on every platform.

    The object is the local shard: autograd, hooks and memory are the framework's own. `shape` is the
    global shape; `spec.local_shape` the shard's.
    """

    _spec: TensorSpec
    _copied_by: str | None = None
    """The view operation that gave this tensor as a copy; writing it would not reach what it is a view of."""
    _awaited_gradient: AwaitedGradient | None = None
    """A platform's `grad` fetches it when there is none, and drops it when it is set."""
    _gradient_from: str | None = None
    """What sets the gradient of this parameter in a backward, where autograd itself does not reach it."""

    @property
    def spec(self) -> TensorSpec:
        return self._spec

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._spec.placements

    @property
    def local_shape(self) -> tuple[int, ...]:
        return self._spec.local_shape
