"""Links: latency and bandwidth of communication along the axes of a mesh, set by hand or measured."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import ProcessGroup

AxisValues = tuple[tuple[str, float], ...]

LATENCY, BANDWIDTH = 10e-6, 50e9
# An all-reduce is a reduce-scatter followed by an all-gather; local steps start no communication.
_ROUNDS = {"slice": 0, "scale": 0, "all_reduce": 2}


@dataclass(frozen=True, slots=True)
class Links:
    """Latency and bandwidth of communication, per mesh axis. The defaults are those of one fast interconnect.

    The time of a collective is `latency * rounds + bytes sent per rank / bandwidth` (the alpha-beta model), where an
    all-reduce has two rounds and every other collective one.

    Attributes:
        latency: seconds that a collective takes at least. A number for all axes, or a mapping from axis names, with
            `default` for the others. A collective over several axes has the largest latency of them.
        bandwidth: bytes per second that one rank sends, given like `latency`. A collective over several axes has the
            smallest bandwidth of them.

    Raises:
        ValueError: a negative latency, or a bandwidth that is not positive.

    Examples:
        >>> links = Links(bandwidth={"node": 25e9, "gpu": 400e9})
        >>> links.seconds("all_gather", ["node", "gpu"], 25e6)
        0.00101
    """

    latency: float | Mapping[str, float] | AxisValues = LATENCY
    bandwidth: float | Mapping[str, float] | AxisValues = BANDWIDTH

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth"):
            values = getattr(self, name)
            # Stored as a tuple, so that links are hashable and can be part of the key of cached plans.
            if isinstance(values, Mapping):
                object.__setattr__(self, name, tuple(sorted(values.items())))
            numbers = [values] if isinstance(values, (int, float)) else dict(values).values()
            if any(value < 0 or (value == 0 and name == "bandwidth") for value in numbers):
                raise ValueError(f"Links.{name} must be positive, got {values}")

    @property
    def is_uniform(self) -> bool:
        """Return whether latency and bandwidth are numbers for all axes, rather than mappings."""
        return isinstance(self.latency, (int, float)) and isinstance(self.bandwidth, (int, float))

    def seconds(self, collective: str, axes: Iterable[str], wire_bytes: float) -> float:
        """Return the time of a collective over the named axes in which a rank sends `wire_bytes` on average."""
        axes = list(axes)
        if not axes:
            return 0.0
        latency, bandwidth = max(map(self.latency_along, axes)), min(map(self.bandwidth_along, axes))
        return latency * _ROUNDS.get(collective, 1) + wire_bytes / bandwidth

    def latency_along(self, axis: str) -> float:
        """Return the seconds that a collective over one axis takes at least."""
        return _value(self.latency, axis, LATENCY)

    def bandwidth_along(self, axis: str) -> float:
        """Return the bytes per second that one rank sends along one axis."""
        return _value(self.bandwidth, axis, BANDWIDTH)


def _value(values: float | Mapping[str, float] | AxisValues, axis: str, default: float) -> float:
    if isinstance(values, (int, float)):
        return values
    by_name = dict(values)
    return by_name.get(axis, by_name.get("default", default))


DEFAULT_LINKS = Links()


def measure_links(mesh: DeviceMesh, num_bytes: int = 2**24, repeats: int = 5) -> Links:
    """Measure latency and bandwidth along each axis of a mesh by timing all-gathers. All its ranks make the call.

    Every rank gets the same links: per axis the slowest of all ranks, each by its fastest repeat. Axes of one rank keep
    the default values.

    Args:
        num_bytes: bytes that each rank contributes to the large all-gather.

    Raises:
        MeshError: this rank is outside the mesh.

    Examples:
        >>> def program():
        ...     links = measure_links(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), num_bytes=1024)
        ...     return dict(links.bandwidth)["dp"] > 0
        >>> run_ranks(program, 2)
        [True, True]
    """
    measured: dict[str, tuple[float, float]] = {}
    for axis, name in enumerate(mesh.mesh_dim_names):
        if mesh.shape[axis] > 1:
            measured[name] = measure_group(mesh.group_along(axis), num_bytes, repeats)
    # Ranks must plan alike, so they agree on the values before any of them uses them.
    everywhere = mesh.group_over(tuple(range(mesh.ndim))).all_gather_bytes(json.dumps(measured).encode())
    of_ranks = [json.loads(each) for each in everywhere]
    return Links(
        latency={name: max(each[name][0] for each in of_ranks) for name in measured},
        bandwidth={name: min(each[name][1] for each in of_ranks) for name in measured},
    )


def measure_group(group: ProcessGroup, num_bytes: int = 2**24, repeats: int = 5) -> tuple[float, float]:
    """Return the latency and bandwidth of all-gathers of `num_bytes` per rank in a group. All its ranks call this."""
    small, large = (all_gather_seconds(group, size, repeats) for size in (1, num_bytes))
    # The small all-gather is latency only. On a noisy machine the large one may appear no slower.
    return small, num_bytes * (group.size - 1) / max(large - small, 1e-9)


def all_gather_seconds(group: ProcessGroup, num_bytes: int, repeats: int) -> float:
    """Return the time of the fastest of several all-gathers, after one that sets up buffers and connections."""
    platform = group.platform
    assert platform is not None
    x = platform.zeros((num_bytes,), platform.dtype("uint8"))
    output = platform.empty((num_bytes * group.size,), x.dtype)
    times = []
    for _ in range(repeats + 1):
        platform.synchronize()
        group.barrier()
        start = time.perf_counter()
        group.all_gather_into(output, x)
        # A device runs collectives asynchronously: without waiting only their launch would be timed.
        platform.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
