"""Regions of plain local code inside distributed programs, with stated placements."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor import api
from hp_dtensor.dtensor import DTensor
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Placement

Placements = Sequence[Placement]


def local_map(
    func: Callable[..., Any],
    out_placements: Placements | Sequence[Placements | None] | None,
    in_placements: Sequence[Placements | None] | None = None,
    in_grad_placements: Sequence[Placements | None] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = True,
) -> Callable[..., Any]:
    """`func` on local tensors, as a function of DTensors. Follows torch's `local_map`.

    Args:
        out_placements: placements of the only output, or one entry per output; None for what is no tensor.
        in_placements: one entry per positional argument; None for what is no DTensor. Default: as they come.
        in_grad_placements: how the gradient that `func` produces for an argument is placed; default: what
            follows from its placements (R -> R, S -> S, P -> R). An argument that is replicated but used
            differently per rank needs `[Partial()]`.
        device_mesh: default: that of the first DTensor argument.
        redistribute_inputs: bring arguments to `in_placements`; False: refuse others.

    Returns:
        A function with `func`'s name and signature. Without any DTensor argument it is `func` itself.

    Raises:
        PlacementError: counts that differ, or an argument that is not placed as stated.
    """

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        mesh = device_mesh or _mesh_of(args)
        if mesh is None or not any(isinstance(x, DTensor) for x in args):
            return func(*args, **kwargs)
        wanted = _per_argument(in_placements, len(args), "in_placements")
        grads = _per_argument(in_grad_placements, len(args), "in_grad_placements")
        local_args = [
            _enter(x, index, wanted[index], grads[index], redistribute_inputs) for index, x in enumerate(args)
        ]
        return _leave(func(*local_args, **kwargs), out_placements, mesh)

    return mapped


def custom_shard(
    func: Callable[..., Any],
    device_mesh: DeviceMesh,
    out_placements: Any,
    in_placements: Any = None,
    redistribute_inputs: bool = True,
) -> Callable[..., Any]:
    """`local_map` under its older name and argument order."""
    return local_map(
        func, out_placements, in_placements, device_mesh=device_mesh, redistribute_inputs=redistribute_inputs
    )


def _mesh_of(args: tuple[Any, ...]) -> DeviceMesh | None:
    return next((x.device_mesh for x in args if isinstance(x, DTensor)), None)


def _per_argument(entries: Sequence[Any] | None, count: int, name: str) -> Sequence[Any]:
    if entries is None:
        return [None] * count
    if len(entries) != count:
        raise PlacementError(f"local_map: {len(entries)} {name} for {count} positional arguments")
    return entries


def _enter(x: Any, index: int, wanted: Placements | None, grads: Placements | None, redistribute: bool) -> Any:
    if not isinstance(x, DTensor):
        if wanted is not None:
            raise PlacementError(f"local_map: argument {index} has placements {list(wanted)} but is no DTensor")
        return x
    if wanted is not None and tuple(wanted) != x.placements:
        if not redistribute:
            raise PlacementError(
                f"local_map: argument {index} must be placed {list(wanted)}, got {x.spec.describe_placements()}; "
                "redistribute it, or pass redistribute_inputs=True"
            )
        x = x.redistribute(placements=wanted)
    return x.to_local(grads)


def _leave(output: Any, placements: Any, mesh: DeviceMesh) -> Any:
    several = isinstance(output, (tuple, list))
    values = list(output) if several else [output]
    entries = list(placements) if several and placements is not None else [placements]
    if len(values) != len(entries):
        raise PlacementError(f"local_map: the function gave {len(values)} outputs, out_placements has {len(entries)}")
    wrapped = [x if entry is None else api.from_local(x, mesh, entry) for x, entry in zip(values, entries, strict=True)]
    return type(output)(wrapped) if several else wrapped[0]
