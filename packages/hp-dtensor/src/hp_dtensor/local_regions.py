"""Regions of plain local code inside distributed programs, with stated placements."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor import api
from hp_dtensor.dtensor import DTensor
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.layout import Layout, is_aliases, is_placements, placements_for
from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.placements import Placement, RaggedShard, Shard, StridedShard
from hp_dtensor.spec import TensorSpec

Placements = Sequence[Placement] | Sequence[str | tuple[str, ...]] | Layout
"""One specification: placements, alias names, or a layout."""


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

    The global shape of an output follows from the arguments: along a dimension that is cut as one of theirs, and as
    long on this rank, it is as long as that one; otherwise every rank's part is as long as this one's.

    Args:
        out_placements: placements (or alias names, or a `Layout`) of the only output, or one entry per output; None for
            what is no tensor.
        in_placements: one entry per positional argument; None for what is no DTensor. Default: as they come.
        in_grad_placements: how the gradient that `func` produces for an argument is placed; default: what
            follows from its placements (R -> R, S -> S, P -> R). An argument that is replicated but used
            differently per rank needs `[Partial()]`.
        device_mesh: default: that of the first DTensor argument.
        redistribute_inputs: bring arguments to `in_placements`; False: refuse others.

    Returns:
        A function with `func`'s name and signature. Without any DTensor argument it is `func` itself.

    Raises:
        PlacementError: counts that differ, an argument that is not placed as stated, or an output whose global
            shape cannot be known because arguments cut over the same axes are uneven there.
    """

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        mesh = device_mesh or _mesh_of(args)
        if mesh is None or not any(isinstance(x, DTensor) for x in args):
            return func(*args, **kwargs)
        wanted = _per_argument(in_placements, len(args), "in_placements")
        grads = _per_argument(in_grad_placements, len(args), "in_grad_placements")
        placed = [_placed(x, index, wanted[index], mesh, redistribute_inputs) for index, x in enumerate(args)]
        local_args = [_local(x, grads, mesh) for x, grads in zip(placed, grads, strict=True)]
        specs = [x.spec for x in placed if isinstance(x, DTensor)]
        return _leave(func(*local_args, **kwargs), out_placements, mesh, specs)

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


def _placed(x: Any, index: int, wanted: Placements | None, mesh: DeviceMesh, redistribute: bool) -> Any:
    """An argument as `wanted`."""
    if not isinstance(x, DTensor):
        if wanted is not None:
            raise PlacementError(f"local_map: argument {index} has placements {_shown(wanted)} but is no DTensor")
        return x
    placements = _placements(mesh, wanted, f"in_placements[{index}]")
    if placements is not None and placements != x.placements:
        if not redistribute:
            raise PlacementError(
                f"local_map: argument {index} must be placed {list(placements)}, got {x.spec.describe_placements()}; "
                "redistribute it, or pass redistribute_inputs=True"
            )
        x = x.redistribute(placements=placements)
    return x


def _local(x: Any, grads: Placements | None, mesh: DeviceMesh) -> Any:
    return x.to_local(_placements(mesh, grads, "in_grad_placements")) if isinstance(x, DTensor) else x


def _is_one(entry: Any) -> bool:
    """Whether this is one specification, not several."""
    return isinstance(entry, Layout) or is_placements(entry) or is_aliases(entry)


def _placements(mesh: DeviceMesh, entry: Any, where: str) -> tuple[Placement, ...] | None:
    if entry is None:
        return None
    if not _is_one(entry):
        raise PlacementError(f"local_map: {where} must be placements, alias names, a Layout or None, got {entry!r}")
    return placements_for(mesh, entry)


def _shown(entry: Any) -> Any:
    return list(entry) if isinstance(entry, (tuple, list)) else entry


def _leave(output: Any, placements: Any, mesh: DeviceMesh, inputs: Sequence[TensorSpec]) -> Any:
    several = isinstance(output, (tuple, list))
    values = list(output) if several else [output]
    entries = [placements] if placements is None or _is_one(placements) else list(placements)
    if len(values) != len(entries):
        raise PlacementError(f"local_map: the function gave {len(values)} outputs, out_placements has {len(entries)}")
    wrapped = [
        _wrapped(x, entry, index, mesh, inputs) for index, (x, entry) in enumerate(zip(values, entries, strict=True))
    ]
    return type(output)(wrapped) if several else wrapped[0]


def _wrapped(x: Any, entry: Any, index: int, mesh: DeviceMesh, inputs: Sequence[TensorSpec]) -> Any:
    placements = _placements(mesh, entry, f"out_placements[{index}]")
    if placements is None:
        return x
    if not isinstance(x, mesh.platform.Tensor):
        raise PlacementError(f"local_map: output {index} has placements but is no tensor: {type(x).__name__}")
    return api.from_local(x, mesh, placements, shape=_global_shape(tuple(x.shape), placements, index, mesh, inputs))


Cut = tuple[tuple[int, Any], ...]
"""How a dimension is cut: the axes, and how each does it."""


def _cuts(placements: Sequence[Placement]) -> dict[int, Cut]:
    """Dimension -> its cut."""
    found: dict[int, Cut] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, StridedShard, RaggedShard)):
            how = (type(placement), getattr(placement, "split_factor", None), getattr(placement, "units", None))
            found[placement.dim] = (*found.get(placement.dim, ()), (axis, how))
    return found


def _global_shape(
    local: tuple[int, ...], placements: Sequence[Placement], index: int, mesh: DeviceMesh, inputs: Sequence[TensorSpec]
) -> tuple[int, ...]:
    """See `local_map`."""
    shape = list(api.even_global_shape(local, mesh, placements))
    for dim, cut in _cuts(placements).items():
        if any(isinstance(p, RaggedShard) and p.dim == dim for p in placements) or dim >= len(local):
            continue  # the placement says it, or `from_local` refuses it
        alike = [
            (spec.shape[d], spec.local_shape[d])
            for spec in inputs
            for d, c in _cuts(spec.placements).items()
            if c == cut
        ]
        sizes = {size for size, length in alike if length == local[dim]}
        ranks = math.prod(mesh.shape[axis] for axis, _ in cut)
        if len(sizes) == 1:
            shape[dim] = sizes.pop()
        elif sizes or any(size % ranks for size, _ in alike):
            raise PlacementError(
                f"local_map: output {index} {list(local)} is cut along dimension {dim} as arguments with parts of "
                f"several lengths are (of {sorted({size for size, _ in alike})}); its own global size cannot be known. "
                "Return it as a plain tensor, and wrap it by from_local with its global shape."
            )
    return tuple(shape)
