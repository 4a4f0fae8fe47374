"""Base of a plan's steps: each acts on this rank's local data; the plan has the gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import ProcessGroup, Work, no_average_of
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute.segments import Placements

Tensor = Any

IF_OTHERS_DIFFER = "If other ranks did not come to it: hp_dtensor.check_mode() tells what they do instead."


class Step(ABC):
    """One collective, or one change of the local data alone.

    Attributes:
        name: `slice`, `scale`, `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all` (one axis from one
            dimension to another), `exchange` (each rank receives what it lacks), `reduce_to_owners`.
        axes: the mesh axes whose ranks communicate, or whose placement changes.
        source, target: placements before and after, one per mesh axis.
        wire_bytes: sent per rank, the mean over ranks.
        seconds: by the cost model.
    """

    __slots__ = ("__dict__", "axes", "mesh", "name", "seconds", "source", "target", "wire_bytes")

    def __init__(
        self,
        name: str,
        mesh: DeviceMesh,
        axes: tuple[int, ...],
        source: Placements,
        target: Placements,
        wire_bytes: float,
        seconds: float,
    ) -> None:
        self.name, self.mesh, self.axes, self.source, self.target = name, mesh, axes, source, target
        self.wire_bytes, self.seconds = wire_bytes, seconds

    @abstractmethod
    def run(self, local: Tensor) -> Tensor:
        """Return this rank's local tensor after the step, as data; the result is a tensor of its own."""

    def start(self, local: Tensor) -> Callable[[], Tensor]:
        """Begin the step; return a function that waits and gives the result. `local` must not change before."""
        result = self.run(local)
        return lambda: result

    @property
    def group(self) -> ProcessGroup:
        return self.mesh.group_over(self.axes)

    @property
    def platform(self) -> Platform:
        return self.mesh.platform

    @property
    def coordinate(self) -> tuple[int, ...]:
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return coordinate


class Scale(Step):
    """Scaling of averages to sums, or of sums to averages: times `up`, divided by `down`."""

    up, down = 1, 1

    def run(self, local: Tensor) -> Tensor:
        platform = self.platform
        if not platform.is_floating(local.dtype):
            raise no_average_of(platform.dtype_name(local.dtype))
        return scaled(platform, local, self.up, self.down)


def scaled(platform: Platform, x: Tensor, up: int, down: int) -> Tensor:
    if up != 1:
        x = platform.ops.mul(x, up)
    return x if down == 1 else platform.ops.div(x, down)


def after(work: Work, finish: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def wait() -> Tensor:
        work.wait()
        return finish()

    return wait
