"""Regions of plain local code inside distributed programs, with stated placements."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.exceptions import MixedOperandsError, PlacementError
from hp_dtensor.spec.aliases import is_specification, placements_for
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec, normalize_placements, wrong_count
from hp_dtensor.tensor import conversions
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import like_sequence

Placements = Any
"""One specification: placements, alias names, or a layout."""
Outputs = tuple[Placement, ...] | None
"""The placements of one output; None for what is no tensor."""


def local_map(
    func: Callable[..., Any],
    out_placements: Placements | Sequence[Placements | None] | None,
    in_placements: Sequence[Placements | None] | None = None,
    in_grad_placements: Sequence[Placements | None] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = True,
) -> Callable[..., Any]:
    """Return a function of DTensors that calls `func` on their local tensors. Follows torch's `local_map`.

    The global shape of an output follows from the arguments: along a dimension that is cut as one of theirs, and as
    long on this rank, it is as long as that one; otherwise every rank's part is as long as this one's.

    Gradients follow from the placements. Along a mesh axis where outputs are cut or partial, every rank computes
    another part of them, so that of a replicated argument is summed over ranks; where outputs are replicated, every
    rank computes the same.

    Args:
        out_placements: placements (or alias names, or a `Layout`) of the only output, or one entry per output; None for
            what is no tensor.
        in_placements: one entry per positional argument; None for what is no DTensor. Default: as they come.
        in_grad_placements: how the gradient that `func` produces for an argument is placed: cut as the argument,
            elsewhere `Replicate()` or `Partial()`. Default (also for an entry that is None): see above.
        device_mesh: default: that of the first DTensor argument.
        redistribute_inputs: bring arguments to `in_placements`; False: refuse others.

    Returns:
        A function with `func`'s name and signature. Without any DTensor argument it is `func` itself.

    Raises:
        MeshError: `device_mesh` is no mesh.
        MixedOperandsError: an argument on another mesh.
        PlacementError: counts that differ, a DTensor by keyword or without an entry, an argument that is not placed as
            stated; an output whose global shape cannot be known because arguments cut over the same axes are uneven
            there; a replicated argument whose gradient does not follow, because some outputs are replicated and others
            not, or because replicated outputs come of arguments that are not.
    """
    if device_mesh is not None:
        device_mesh = require_mesh("local_map", device_mesh)
    if not callable(func):
        raise TypeError(f"local_map takes a function, got {func!r}")

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        _check_keywords(kwargs)
        mesh = device_mesh or _mesh_of(args)
        if mesh is None or not any(isinstance(x, DTensor) for x in args):
            return func(*args, **kwargs)
        _check_meshes(args, mesh)
        wanted = _per_argument(in_placements, args, "in_placements")
        grads = _per_argument(in_grad_placements, args, "in_grad_placements")
        outs = _out_entries(out_placements, mesh)
        if in_placements is not None:
            args = tuple(_placed(x, i, wanted[i], mesh, redistribute_inputs) for i, x in enumerate(args))
        specs = [x.spec if isinstance(x, DTensor) else None for x in args]
        local_args = [_local(x, index, grads[index], specs, outs) for index, x in enumerate(args)]
        return _leave(func(*local_args, **kwargs), outs, mesh, [spec for spec in specs if spec is not None])

    return mapped


def custom_shard(
    func: Callable[..., Any],
    device_mesh: DeviceMesh,
    out_placements: Any,
    in_placements: Any = None,
    redistribute_inputs: bool = True,
) -> Callable[..., Any]:
    """Return `local_map` of `func`, under its older name and argument order."""
    return local_map(
        func, out_placements, in_placements, device_mesh=device_mesh, redistribute_inputs=redistribute_inputs
    )


def _mesh_of(args: tuple[Any, ...]) -> DeviceMesh | None:
    return next((x.device_mesh for x in args if isinstance(x, DTensor)), None)


def _check_keywords(kwargs: Mapping[str, Any]) -> None:
    given = [name for name, x in kwargs.items() if isinstance(x, DTensor)]
    if given:
        raise PlacementError(f"local_map: DTensors are given by position, got {', '.join(given)} by keyword")


def _check_meshes(args: Sequence[Any], mesh: DeviceMesh) -> None:
    for index, x in enumerate(args):
        if isinstance(x, DTensor) and x.device_mesh != mesh:
            raise MixedOperandsError(
                f"local_map: argument {index} is on mesh {x.device_mesh.describe()}, the region on {mesh.describe()}; "
                "redistribute it"
            )


def _per_argument(entries: Sequence[Any] | None, args: Sequence[Any], name: str) -> Sequence[Any]:
    if entries is None:
        return [None] * len(args)
    if len(entries) != len(args):
        raise PlacementError(f"local_map: {len(entries)} {name} for {len(args)} positional arguments")
    return entries


def _placed(x: Any, index: int, wanted: Placements | None, mesh: DeviceMesh, redistribute: bool) -> Any:
    """Return an argument placed as `wanted`."""
    if not isinstance(x, DTensor):
        if wanted is not None:
            raise PlacementError(f"local_map: argument {index} has placements {_shown(wanted)} but is no DTensor")
        return x
    placements = _placements(mesh, wanted, f"in_placements[{index}]")
    if placements is None:
        is_one = f"is a DTensor {x.spec.describe_placements()}"
        raise PlacementError(f"local_map: argument {index} {is_one}, but in_placements[{index}] is None")
    if normalize_placements(mesh, placements, x.spec.ndim) != x.placements:
        if not redistribute:
            raise PlacementError(
                f"local_map: argument {index} must be placed {list(placements)}, got {x.spec.describe_placements()}; "
                "redistribute it, or pass redistribute_inputs=True"
            )
        x = x.redistribute(placements=placements)
    return x


def _local(
    x: Any, index: int, grads: Placements | None, specs: Sequence[TensorSpec | None], outs: Sequence[Outputs]
) -> Any:
    """Return an argument as `func` takes it; its gradient comes back as `grads` or as the placements say."""
    spec = specs[index]
    if spec is None:
        return x
    mesh = spec.mesh
    stated = _placements(mesh, grads, f"in_grad_placements[{index}]")
    platform = mesh.platform
    if stated is None and platform.is_grad_enabled() and platform.requires_grad(platform.unwrap(x)):
        stated = tuple(_grad_along(axis, index, specs, outs) for axis in range(mesh.ndim))
    return x.to_local(stated)


def _grad_along(axis: int, index: int, specs: Sequence[TensorSpec | None], outs: Sequence[Outputs]) -> Placement:
    """Return the placement of the gradient of argument `index` along a mesh axis."""
    spec = specs[index]
    assert spec is not None
    placement = spec.placements[axis]
    if placement.is_shard():
        return placement
    placed = [out[axis] for out in outs if out is not None]
    if not placement.is_replicate() or spec.mesh.shape[axis] == 1 or not placed:
        return Replicate()
    same = [out.is_replicate() for out in placed]
    others = [other for other in specs if other is not None and not other.placements[axis].is_replicate()]
    if not any(same):
        return Partial()
    if all(same) and not others:
        return Replicate()
    name = spec.mesh.mesh_dim_names[axis]
    why = "outputs are replicated and come of arguments that are not" if all(same) else "not all outputs are replicated"
    raise PlacementError(
        f"local_map: the gradient of argument {index}, replicated over axis {name!r}, does not follow from the "
        f"placements: {why} there. Say it by in_grad_placements: Partial() where each rank computes a part of it, "
        "Replicate() where each computes the whole."
    )


def _placements(mesh: DeviceMesh, entry: Any, where: str) -> tuple[Placement, ...] | None:
    if entry is None:
        return None
    if not is_specification(entry):
        raise PlacementError(f"local_map: {where} must be placements, alias names, a Layout or None, got {entry!r}")
    placements = placements_for(mesh, entry)
    if (count := wrong_count(mesh, placements)) is not None:
        raise PlacementError(f"local_map: {where}: {count}")
    return placements


def _shown(entry: Any) -> Any:
    return list(entry) if isinstance(entry, (tuple, list)) else entry


def _out_entries(placements: Any, mesh: DeviceMesh) -> list[Outputs]:
    """Return the placements of each output."""
    entries = [placements] if placements is None or is_specification(placements) else list(placements)
    return [_placements(mesh, entry, f"out_placements[{index}]") for index, entry in enumerate(entries)]


def _leave(output: Any, placements: Sequence[Outputs], mesh: DeviceMesh, inputs: Sequence[TensorSpec]) -> Any:
    several = isinstance(output, (tuple, list))
    values = list(output) if several else [output]
    count = len(placements)
    if len(values) != count:
        raise PlacementError(f"local_map: the function gave {len(values)} outputs, out_placements has {count}")
    wrapped = [_wrapped(values[index], placements[index], index, mesh, inputs) for index in range(count)]
    return like_sequence(output, wrapped) if several else wrapped[0]


def _wrapped(x: Any, placements: Outputs, index: int, mesh: DeviceMesh, inputs: Sequence[TensorSpec]) -> Any:
    if placements is None:
        return x
    if not isinstance(x, mesh.platform.Tensor):
        raise PlacementError(f"local_map: output {index} has placements but is no tensor: {type(x).__name__}")
    placements = normalize_placements(mesh, placements, len(x.shape))
    return conversions.from_local(
        x, mesh, placements, shape=_global_shape(tuple(x.shape), placements, index, mesh, inputs)
    )


Cut = tuple[tuple[int, Any], ...]
"""How a dimension is cut: the axes, and how each does it."""


def _cuts(placements: Sequence[Placement]) -> dict[int, Cut]:
    """Return the cut of each dimension that is cut."""
    found: dict[int, Cut] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, StridedShard, RaggedShard)):
            how = (type(placement), getattr(placement, "split_factor", None), getattr(placement, "units", None))
            found[placement.dim] = (*found.get(placement.dim, ()), (axis, how))
    return found


def _global_shape(
    local: tuple[int, ...], placements: Sequence[Placement], index: int, mesh: DeviceMesh, inputs: Sequence[TensorSpec]
) -> tuple[int, ...]:
    """Return the global shape of output `index`; see `local_map`."""
    shape = list(conversions.even_global_shape(local, mesh, placements))
    for dim, cut in _cuts(placements).items():
        if any(isinstance(p, RaggedShard) and p.dim == dim for p in placements):
            continue  # the placement says it
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
