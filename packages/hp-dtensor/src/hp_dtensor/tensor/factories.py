"""DTensors made from a global shape: every rank makes its own shard, nothing is communicated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.current_mesh import get_current_mesh
from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.rank_checks import check_created
from hp_dtensor.spec.tensor_spec import TensorSpec, normalize_placements
from hp_dtensor.tensor.redistribution import placements_on

Tensor = Any
DType = Any
Shape = int | Sequence[int]
Fill = Callable[[Platform, TensorSpec], Tensor]


def zeros(
    *shape: Shape,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """A DTensor of zeros.

    Args:
        shape: global, as numbers or as one sequence.
        device_mesh: default: the current one (`with mesh:`).
        placements: default: replicated.
        dtype: the platform's, or a name such as `"bfloat16"`.

    Raises:
        PlacementError: placements that do not fit, or partial ones.
    """
    return _make(shape, device_mesh, placements, dtype, lambda p, spec: p.zeros(spec.local_shape, spec.dtype))


def empty(
    *shape: Shape,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """An uninitialised DTensor; arguments and errors as `zeros`."""
    return _make(shape, device_mesh, placements, dtype, lambda p, spec: p.empty(spec.local_shape, spec.dtype))


def full(
    shape: Sequence[int],
    fill_value: float,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """A DTensor of one value; arguments and errors as `zeros`."""

    def fill(platform: Platform, spec: TensorSpec) -> Tensor:
        return platform.ops.full(spec.local_shape, fill_value, spec.dtype)

    return _make((shape,), device_mesh, placements, dtype, fill)


def ones(
    *shape: Shape,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """A DTensor of ones; arguments and errors as `zeros`."""
    return _make(shape, device_mesh, placements, dtype, lambda p, spec: p.ops.ones(spec.local_shape, spec.dtype))


def rand(
    *shape: Shape,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """Uniform in [0, 1): the single-device numbers under every layout, as every rank draws them all and keeps its
    part. The generators of all ranks must be in the same state (`manual_seed`), and stay so. Arguments and errors
    as `zeros`."""
    return _make(shape, device_mesh, placements, dtype, lambda p, spec: _drawn(p, spec, "uniform"))


def randn(
    *shape: Shape,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """Standard normal; see `rand`."""
    return _make(shape, device_mesh, placements, dtype, lambda p, spec: _drawn(p, spec, "normal"))


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Bring the generator of every rank of the mesh's platform to the same state; call it on all of them."""
    device_mesh.platform.manual_seed(seed)


def _make(
    shape: Sequence[Shape],
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    dtype: DType | str,
    fill: Fill,
) -> Any:
    mesh = require_mesh("a factory", device_mesh if device_mesh is not None else get_current_mesh())
    platform = mesh.platform
    chosen = normalize_placements(mesh, placements_on("a factory", mesh, placements), len(_flat(shape)))
    if any(placement.is_partial() for placement in chosen):
        raise PlacementError(f"a factory cannot make partial results, got {list(chosen)}; use DTensor.from_local")
    spec = TensorSpec(mesh, chosen, _flat(shape), platform.dtype(dtype) if isinstance(dtype, str) else dtype)
    check_created("a factory", spec)
    return platform.wrap(fill(platform, spec), spec)


def _flat(shape: Sequence[Shape]) -> tuple[int, ...]:
    if len(shape) == 1 and not isinstance(shape[0], int):
        return tuple(shape[0])
    return tuple(shape)  # type: ignore[arg-type]


def _drawn(platform: Platform, spec: TensorSpec, distribution: str) -> Tensor:
    part = platform.random(distribution, spec.shape, spec.dtype)
    offset, shape = spec.box()
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        part = platform.ops.narrow(part, dim, start, length)
    return platform.ops.clone(part)
