"""The cost of a step: bytes on the wire, and seconds by latency and bandwidth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

AxisValues = tuple[tuple[str, float], ...]

# An all-reduce goes round twice: reduce-scatter, then all-gather.
_ROUNDS = {"slice": 0, "scale": 0, "all_reduce": 2}


@dataclass(frozen=True, slots=True)
class CostModel:
    """Latency and bandwidth of the mesh's axes.

    Attributes:
        latency: seconds that a collective takes at least; a number, or a mapping from axis names (`default`
            for the others). A collective over several axes takes the largest.
        bandwidth: bytes per second that a rank sends; as `latency`, several axes have the smallest.
        minimize: `bytes`: fewest bytes, among those the least time; `seconds`: the least time.

    Example:
        >>> costs = CostModel(bandwidth={"node": 25e9, "gpu": 400e9}, minimize="seconds")
        >>> with fake_world(16):
        ...     mesh = DeviceMesh("cuda", (2, 8), mesh_dim_names=("node", "gpu"))
        ...     plan = plan_redistribute(mesh, [Shard(0)] * 2, [Replicate()] * 2, (1024, 1024), costs=costs)
        >>> plan.seconds > 0
        True
    """

    latency: float | Mapping[str, float] | AxisValues = 10e-6
    bandwidth: float | Mapping[str, float] | AxisValues = 50e9
    minimize: Literal["bytes", "seconds"] = "bytes"

    def __post_init__(self) -> None:
        for name in ("latency", "bandwidth"):
            values = getattr(self, name)
            if isinstance(values, Mapping):
                object.__setattr__(self, name, tuple(sorted(values.items())))
            numbers = [values] if isinstance(values, (int, float)) else dict(values).values()
            if any(value < 0 or (value == 0 and name == "bandwidth") for value in numbers):
                raise ValueError(f"CostModel.{name} must be positive, got {values}")
        if self.minimize not in ("bytes", "seconds"):
            raise ValueError(f"CostModel.minimize must be 'bytes' or 'seconds', got {self.minimize!r}")

    @property
    def depends_on_size(self) -> bool:
        """Return whether tensors of different sizes that are cut alike may have different cheapest plans."""
        # With one latency and one bandwidth for all axes, and bytes counted first, size changes no ranking.
        same_everywhere = isinstance(self.latency, (int, float)) and isinstance(self.bandwidth, (int, float))
        return self.minimize == "seconds" or not same_everywhere

    def seconds(self, name: str, axes: Iterable[str], wire_bytes: float) -> float:
        """Return the time of a step over named axes in which a rank sends `wire_bytes` on average."""
        axes = list(axes)
        if not axes:
            return 0.0
        latency = max(_value(self.latency, axis, 10e-6) for axis in axes)
        bandwidth = min(_value(self.bandwidth, axis, 50e9) for axis in axes)
        return latency * _ROUNDS.get(name, 1) + wire_bytes / bandwidth


def _value(values: float | Mapping[str, float] | AxisValues, axis: str, default: float) -> float:
    if isinstance(values, (int, float)):
        return values
    by_name = dict(values)
    return by_name.get(axis, by_name.get("default", default))


DEFAULT_COSTS = CostModel()
