"""DTensors made from a global shape: every rank makes its own shard, nothing is communicated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.exceptions import PlacementError
from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Placement, Replicate
from hp_dtensor.spec import TensorSpec

Tensor = Any
DType = Any
Shape = int | Sequence[int]
Fill = Callable[[TensorSpec], Tensor]


def zeros(
    *shape: Shape,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """A DTensor of zeros.

    Args:
        shape: global, as numbers or as one sequence.
        placements: default: replicated.
        dtype: the platform's, or a name such as `"bfloat16"`.

    Raises:
        PlacementError: placements that do not fit, or partial ones.
    """
    platform = device_mesh.platform
    return _make(shape, device_mesh, placements, dtype, lambda spec: platform.zeros(spec.local_shape, spec.dtype))


def empty(
    *shape: Shape,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """An uninitialised DTensor; arguments and errors as `zeros`."""
    platform = device_mesh.platform
    return _make(shape, device_mesh, placements, dtype, lambda spec: platform.empty(spec.local_shape, spec.dtype))


def full(
    shape: Sequence[int],
    fill_value: float,
    *,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """A DTensor of one value; arguments and errors as `zeros`."""
    ops = device_mesh.platform.ops

    def fill(spec: TensorSpec) -> Tensor:
        return ops.full(spec.local_shape, fill_value, spec.dtype)

    return _make((shape,), device_mesh, placements, dtype, fill)


def ones(
    *shape: Shape,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """A DTensor of ones; arguments and errors as `zeros`."""
    ops = device_mesh.platform.ops
    return _make(shape, device_mesh, placements, dtype, lambda spec: ops.ones(spec.local_shape, spec.dtype))


def rand(
    *shape: Shape,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """Uniform in [0, 1): the single-device numbers under every layout, as every rank draws them all and keeps its
    part. The generators of all ranks must be in the same state (`manual_seed`), and stay so. Arguments and errors
    as `zeros`."""
    return _make(shape, device_mesh, placements, dtype, lambda spec: _drawn(spec, "uniform"))


def randn(
    *shape: Shape,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    dtype: DType | str = "float32",
) -> Any:
    """Standard normal; see `rand`."""
    return _make(shape, device_mesh, placements, dtype, lambda spec: _drawn(spec, "normal"))


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Bring the generator of every rank of the mesh's platform to the same state; call it on all of them."""
    device_mesh.platform.manual_seed(seed)


def _make(
    shape: Sequence[Shape],
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    dtype: DType | str,
    fill: Fill,
) -> Any:
    platform = mesh.platform
    chosen = tuple(placements) if placements is not None else (Replicate(),) * mesh.ndim
    if any(placement.is_partial() for placement in chosen):
        raise PlacementError(f"a factory cannot make partial results, got {list(chosen)}; use DTensor.from_local")
    spec = TensorSpec(mesh, chosen, _flat(shape), platform.dtype(dtype) if isinstance(dtype, str) else dtype)
    return platform.wrap(fill(spec), spec)


def _flat(shape: Sequence[Shape]) -> tuple[int, ...]:
    if len(shape) == 1 and not isinstance(shape[0], int):
        return tuple(shape[0])
    return tuple(shape)  # type: ignore[arg-type]


def _drawn(spec: TensorSpec, distribution: str) -> Tensor:
    platform = spec.mesh.platform
    part = platform.random(distribution, spec.shape, spec.dtype)
    offset, shape = spec.box()
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        part = platform.ops.narrow(part, dim, start, length)
    return platform.ops.clone(part)
