"""Factories: DTensors from a global shape. Every rank creates its own shard, without communication."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, get_current_mesh, require_mesh
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.rank_checks import check_created
from hp_dtensor.spec.tensor_spec import TensorSpec, normalize_placements
from hp_dtensor.tensor.conversions import integers
from hp_dtensor.tensor.redistribution import Placements, placements_on

Tensor = Any
DType = Any
Shape = int | Sequence[int]
Fill = Callable[[Platform, TensorSpec], Tensor]


def zeros(
    *size: Shape,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    dtype: DType | str | None = None,
    layout: Any = None,
    requires_grad: bool = False,
) -> Any:
    """Return a DTensor of zeros.

    Args:
        size: the global shape, as numbers or as one sequence.
        device_mesh: default: the current one (`with mesh:`).
        placements: one per mesh axis, or alias names, one per tensor dimension; default: replicated.
        dtype: the platform's, or a name such as `"bfloat16"`; default: the platform's for numbers
            (`torch.get_default_dtype()`, float32 on MindSpore).
        layout: for compatibility with torch; `torch.strided` or None.
        requires_grad: whether the result is a leaf that requires a gradient.

    Raises:
        PlacementError: placements that do not fit, or partial ones.
        ShardShapeError: sizes that are not integers of at least 0.
        ValueError: another layout.

    Examples:
        >>> def program():
        ...     x = zeros(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     return float(platform.to_numpy(platform.ops.sum(x).full_tensor()))
        >>> run_ranks(program, 2)[0]
        0.0
    """
    return _make(
        size, device_mesh, placements, dtype, layout, requires_grad, lambda p, s: p.zeros(s.local_shape, s.dtype)
    )


def empty(
    *size: Shape,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    dtype: DType | str | None = None,
    layout: Any = None,
    requires_grad: bool = False,
) -> Any:
    """Return an uninitialised DTensor. Arguments and errors are those of `zeros`.

    Examples:
        >>> def program():
        ...     x = empty(4, 2, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     return tuple(x.shape), tuple(x.to_local().shape)
        >>> run_ranks(program, 2)[0]
        ((4, 2), (2, 2))
    """
    return _make(
        size, device_mesh, placements, dtype, layout, requires_grad, lambda p, s: p.empty(s.local_shape, s.dtype)
    )


def full(
    size: Sequence[int],
    fill_value: float,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    dtype: DType | str | None = None,
    layout: Any = None,
    requires_grad: bool = False,
) -> Any:
    """Return a DTensor filled with one value. Arguments and errors are those of `zeros`.

    The default dtype follows from the value: bool, int64, or the platform's default for real or complex numbers.

    Examples:
        >>> def program():
        ...     x = full((4,), 0.5, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     return platform.to_numpy(x.to_local()).tolist()
        >>> run_ranks(program, 2)[0]
        [0.5, 0.5]
    """
    # torch infers the dtype from Python numbers only: a complex or bool scalar of NumPy would become a real one.
    number = fill_value.item() if hasattr(fill_value, "item") else fill_value
    return _make(
        (size,),
        device_mesh,
        placements,
        dtype,
        layout,
        requires_grad,
        lambda p, s: p.ops.full(s.local_shape, number, s.dtype),
        of=number,
    )


def ones(
    *size: Shape,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    dtype: DType | str | None = None,
    layout: Any = None,
    requires_grad: bool = False,
) -> Any:
    """Return a DTensor of ones. Arguments and errors are those of `zeros`.

    Examples:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     return float(platform.to_numpy(platform.ops.sum(x).full_tensor()))
        >>> run_ranks(program, 2)[0]
        4.0
    """
    return _make(
        size, device_mesh, placements, dtype, layout, requires_grad, lambda p, s: p.ops.ones(s.local_shape, s.dtype)
    )


def rand(
    *size: Shape,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    dtype: DType | str | None = None,
    layout: Any = None,
    requires_grad: bool = False,
) -> Any:
    """Return a DTensor of numbers drawn uniformly from [0, 1). The values do not depend on the placements.

    Every rank draws the full tensor and takes its shard, so the generators of all ranks must be in the same state
    (`manual_seed`). Afterwards they still are. Arguments and errors are those of `zeros`.

    Examples:
        >>> def program(placement):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     manual_seed(0, mesh)
        ...     return platform.to_numpy(rand(4, device_mesh=mesh, placements=[placement]).full_tensor()).tolist()
        >>> run_ranks(program, 2, platform, Shard(0)) == run_ranks(program, 2, platform, Replicate())
        True
    """
    return _make(size, device_mesh, placements, dtype, layout, requires_grad, lambda p, s: _drawn(p, s, "uniform"))


def randn(
    *size: Shape,
    device_mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    dtype: DType | str | None = None,
    layout: Any = None,
    requires_grad: bool = False,
) -> Any:
    """Return a DTensor of standard normal numbers; see `rand`.

    Examples:
        >>> def program(placement):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     manual_seed(0, mesh)
        ...     return platform.to_numpy(randn(4, device_mesh=mesh, placements=[placement]).full_tensor()).tolist()
        >>> run_ranks(program, 2, platform, Shard(0)) == run_ranks(program, 2, platform, Replicate())
        True
    """
    return _make(size, device_mesh, placements, dtype, layout, requires_grad, lambda p, s: _drawn(p, s, "normal"))


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seed this rank's default generator. All ranks of the mesh make the call, so that their states are equal.

    Examples:
        >>> def program(placement):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     manual_seed(0, mesh)
        ...     return platform.to_numpy(rand(4, device_mesh=mesh, placements=[placement]).full_tensor()).tolist()
        >>> run_ranks(program, 2, platform, Shard(0)) == run_ranks(program, 2, platform, Replicate())
        True
    """
    device_mesh.platform.manual_seed(seed)


def _make(
    size: Sequence[Shape],
    device_mesh: DeviceMesh | None,
    placements: Placements | None,
    dtype: DType | str | None,
    layout: Any,
    requires_grad: bool,
    fill: Fill,
    of: complex = 0.0,
) -> Any:
    """Return the DTensor whose shard `fill(platform, spec)` returns; see `zeros` for the other arguments.

    Args:
        of: the number whose default dtype is used if `dtype` is None.
    """
    if layout is not None and str(layout) != "torch.strided":
        raise ValueError(f"a factory creates dense tensors, layout torch.strided; got layout={layout!r}")
    mesh = require_mesh("a factory", device_mesh if device_mesh is not None else get_current_mesh())
    platform = mesh.platform
    # The numbers may be one sequence, as in torch.
    given: Any = size[0] if len(size) == 1 and not isinstance(size[0], numbers.Integral) else size
    sizes = integers("a factory", given)
    chosen = normalize_placements(mesh, placements_on("a factory", mesh, placements, len(sizes)), len(sizes))
    if any(placement.is_partial() for placement in chosen):
        raise PlacementError(f"a factory cannot make partial results, got {list(chosen)}; use DTensor.from_local")
    # A dtype may be given by name, so that programs for several platforms can state it.
    wanted = platform.dtype_of_number(of) if dtype is None else dtype
    spec = TensorSpec(mesh, chosen, sizes, platform.dtype(wanted) if isinstance(wanted, str) else wanted)
    platform.check_dtype(spec.dtype)
    check_created("a factory", spec)
    result = platform.wrap(fill(platform, spec), spec)
    # On the result and not on the local data: the leaf is the tensor that the caller holds.
    if requires_grad:
        platform.set_requires_grad(result, True)
    return result


def _drawn(platform: Platform, spec: TensorSpec, distribution: str) -> Tensor:
    """Return this rank's shard of a random tensor; see `Platform.random`."""
    # The state of a generator depends on how much was drawn before. If each rank drew only its shard, values would
    # depend on the placements.
    shard = platform.random(distribution, spec.shape, spec.dtype)
    offset, shape = spec.box()
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        shard = platform.ops.narrow(shard, dim, start, length)
    # A view would keep the full tensor in memory.
    return platform.ops.clone(shard)
