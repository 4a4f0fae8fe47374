"""The data of a DTensor beyond its local shard, as the functions on DTensors read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import TensorSpec


class AwaitedGradient(NamedTuple):
    """The way to a gradient that lies elsewhere, as on the host.

    Attributes:
        fetch: sets the gradient; called when somebody looks at it.
        drop: called when it is replaced.
    """

    fetch: Callable[[], None]
    drop: Callable[[], None]


class DTensorBase:
    """The attributes of a `DTensor`, without its methods, for the functions that those call."""

    _spec: TensorSpec
    _copied_by: str | None = None
    """The view operation that gave this tensor as a copy; writing it would not reach what it is a view of."""
    _awaited_gradient: AwaitedGradient | None = None
    """A platform's `grad` fetches it when there is none, and drops it when it is set."""
    _gradient_from: str | None = None
    """The name of what sets this parameter's gradient in a backward, where autograd itself does not reach it."""

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
