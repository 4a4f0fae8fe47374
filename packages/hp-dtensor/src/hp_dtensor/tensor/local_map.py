"""local_map: plain local functions called on DTensors, with declared placements."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.comm.world import World
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.placements import (
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    is_specification,
    placements_for,
)
from hp_dtensor.spec.tensor_spec import TensorSpec, normalize_placements, wrong_count
from hp_dtensor.tensor import conversions
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import flattened

Placements = Any
"""One specification: placements, alias names, or a layout."""
Outputs = tuple[Placement, ...] | None
"""The placements of one output; None for an output that is not a tensor."""


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Placements | Sequence[Placements | None] | None = None,
    in_placements: Sequence[Placements | None] | None = None,
    in_grad_placements: Sequence[Placements | None] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Return a function of DTensors that calls `func` on their local tensors.

    Follows torch's `torch.distributed.tensor.experimental.local_map`. Without `func` it is a decorator:

        @local_map(out_placements=[Partial()])
        def total(x): ...

    The global shape of an output is inferred. A dimension that is sharded like a dimension of an argument, with a local
    shard of the same size, has the global size of that one. Otherwise all ranks' shards count as equal in size. On the
    first call of a function (and on every call in `check_mode`) ranks compare the shapes, in a few bytes.

    Gradients follow from the placements. Along a mesh axis on which outputs are sharded or partial, each rank computes
    something else, so the gradient of a replicated argument is summed over the ranks. Along an axis on which outputs
    are replicated all ranks compute the same, and nothing is summed.

    Args:
        out_placements: placements (or alias names, or a `Layout`) of the only output, or one entry per output; None for
            an output that is not a tensor. Nested lists, tuples and mappings are flattened, in inputs too.
        in_placements: one entry per positional argument; None for one that is not a tensor. Plain tensors are passed to
            `func` unchanged. Default: DTensors are accepted with any placements.
        in_grad_placements: the placements of the gradient that `func` computes for an argument: sharded like the
            argument, on other axes `Replicate()` or `Partial()`. Default (also for an entry None): inferred as above.
        device_mesh: the mesh of the outputs; default: that of the first DTensor argument. Arguments may be on other
            meshes. Their gradients are inferred for axes that the outputs' mesh has too.
        redistribute_inputs: redistribute arguments to `in_placements`; False: raise if their placements differ.

    Returns:
        A function with `func`'s name and signature. Without any DTensor argument it is `func` itself.

    Raises:
        MeshError: `device_mesh` is not a mesh.
        PlacementError: numbers of entries that differ; a DTensor by keyword or without an entry; an argument with other
            placements; a non-tensor with an entry; an output whose global shape cannot be inferred because arguments
            sharded over the same axes are uneven; a replicated argument whose gradient cannot be inferred because only
            some outputs are replicated, because replicated outputs are computed from arguments that are not, or because
            the outputs' mesh lacks the axis.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     double = local_map(lambda x: platform.ops.mul(x, 2.0), [Shard(0)])
        ...     y = double(ones(4, device_mesh=mesh, placements=[Shard(0)]))
        ...     return tuple(y.shape), y.placements
        >>> run_ranks(program, 2)[0]
        ((4,), (Shard(0),))
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    entries = out_placements, in_placements, in_grad_placements
    return _mapped(func, entries, device_mesh, redistribute_inputs, plain_inputs=True)


def _mapped(
    func: Callable[..., Any],
    entries: tuple[Any, Any, Any],
    device_mesh: DeviceMesh | None,
    redistribute_inputs: bool,
    plain_inputs: bool,
) -> Callable[..., Any]:
    """Return the result of `local_map`. Without `plain_inputs` a plain tensor must not have `in_placements`."""
    out_placements, in_placements, in_grad_placements = entries
    if device_mesh is not None:
        device_mesh = require_mesh("local_map", device_mesh)
    if not callable(func):
        raise TypeError(f"local_map takes a function, got {func!r}")
    # Ranks compare the shapes of an output on the first call only. By world, because a function may outlive a job.
    checked: weakref.WeakKeyDictionary[World, set[Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        by_name = [name for name, x in kwargs.items() if isinstance(x, DTensor)]
        if by_name:
            raise PlacementError(f"local_map: DTensors are passed by position, got {', '.join(by_name)} by keyword")
        flat, rebuilt = flattened(args)
        mesh = device_mesh or next((x.device_mesh for x in flat if isinstance(x, DTensor)), None)
        # With plain arguments only, there are no placements to map.
        if mesh is None or not any(isinstance(x, DTensor) for x in flat):
            return func(*args, **kwargs)
        wanted = _per_argument(in_placements, flat, "in_placements")
        grads = _per_argument(in_grad_placements, flat, "in_grad_placements")
        is_one = out_placements is None or is_specification(out_placements)
        placed = [
            _placements(mesh, entry, f"out_placements[{index}]")
            for index, entry in enumerate([out_placements] if is_one else out_placements)
        ]
        outs = _Outputs(mesh, placed, checked.setdefault(mesh.world, set()))
        if in_placements is not None:
            plain = mesh.platform.Tensor if plain_inputs else ()
            flat = [_check_argument(x, i, wanted[i], plain, redistribute_inputs) for i, x in enumerate(flat)]
        specs = [x.spec if isinstance(x, DTensor) else None for x in flat]
        local_args = rebuilt([_local_argument(x, index, grads[index], specs, outs) for index, x in enumerate(flat)])
        return outs.wrap(func(*local_args, **kwargs), [spec for spec in specs if spec is not None])

    return mapped


def custom_shard(
    func: Callable[..., Any],
    device_mesh: DeviceMesh,
    out_placements: Any,
    in_placements: Any = None,
    redistribute_inputs: bool = True,
) -> Callable[..., Any]:
    """Same as `local_map`, under its older name and with its older argument order.

    Inputs are redistributed by default, and the `in_placements` of anything but a DTensor must be None.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     rows = [[Shard(0)]]
        ...     double = custom_shard(lambda x: platform.ops.mul(x, 2.0), mesh, rows, rows)
        ...     return double(ones(4, device_mesh=mesh, placements=[Replicate()])).placements
        >>> run_ranks(program, 2)[0]
        (Shard(0),)
    """
    return _mapped(func, (out_placements, in_placements, None), device_mesh, redistribute_inputs, plain_inputs=False)


def _per_argument(entries: Sequence[Any] | None, args: Sequence[Any], name: str) -> Sequence[Any]:
    if entries is None:
        return [None] * len(args)
    if len(entries) != len(args):
        raise PlacementError(f"local_map: {len(entries)} {name} for {len(args)} positional arguments")
    return entries


def _check_argument(x: Any, index: int, wanted: Placements | None, plain: Any, redistribute: bool) -> Any:
    """Return an argument placed as `wanted`. Tensors of the type `plain` are returned unchanged."""
    if not isinstance(x, DTensor):
        if wanted is not None and not isinstance(x, plain):
            shown = list(wanted) if isinstance(wanted, (tuple, list)) else wanted
            raise PlacementError(f"local_map: argument {index} has placements {shown} but is not a DTensor")
        return x
    mesh = x.device_mesh
    placements = _placements(mesh, wanted, f"in_placements[{index}]")
    if placements is None:
        is_one = f"is a DTensor {x.spec.describe_placements()}"
        raise PlacementError(f"local_map: argument {index} {is_one}, but in_placements[{index}] is None")
    # Normalized, because `Shard(-1)` and `Shard(1)` of a matrix are the same.
    if normalize_placements(mesh, placements, x.spec.ndim) != x.placements:
        if not redistribute:
            raise PlacementError(
                f"local_map: argument {index} must be placed {list(placements)}, got {x.spec.describe_placements()}; "
                "redistribute it, or pass redistribute_inputs=True"
            )
        x = x.redistribute(placements=placements)
    return x


def _local_argument(
    x: Any, index: int, grads: Placements | None, specs: Sequence[TensorSpec | None], outs: _Outputs
) -> Any:
    """Return an argument as a local tensor whose gradient is placed as `grads` or, if None, as inferred."""
    spec = specs[index]
    if spec is None:
        return x
    mesh = spec.mesh
    stated = _placements(mesh, grads, f"in_grad_placements[{index}]")
    platform = mesh.platform
    # Inferred only for a gradient that is computed: what cannot be inferred raises.
    if stated is None and platform.is_grad_enabled() and platform.requires_grad(platform.unwrap(x)):
        stated = tuple(_grad_along(axis, index, specs, outs) for axis in range(mesh.ndim))
    return x.to_local(stated)


def _grad_along(axis: int, index: int, specs: Sequence[TensorSpec | None], outs: _Outputs) -> Placement:
    """Return the placement of the gradient of argument `index` along an axis of its mesh."""
    spec = specs[index]
    assert spec is not None
    placement = spec.placements[axis]
    if placement.is_shard():
        return placement
    if not placement.is_replicate() or spec.mesh.shape[axis] == 1 or not any(outs.entries):
        return Replicate()
    # Replicated argument. If ranks compute different outputs along the axis, each computes its own contribution to the
    # gradient. If all outputs and all other arguments are replicated too, each rank computes all of it.
    same = outs.replicated_along(spec.mesh, axis)
    if same and not any(same):
        return Partial()
    others_replicated = True
    for other in specs:
        if other is not None:
            own = _axis_of(other.mesh, spec.mesh, axis)
            # A tensor on a mesh without this axis counts only if it is replicated on all axes of its own.
            others_replicated &= other.is_replicated() if own is None else other.placements[own].is_replicate()
    if same and all(same) and others_replicated:
        return Replicate()
    name = spec.mesh.mesh_dim_names[axis]
    why = "the mesh of the outputs has no such axis"
    if same:
        mixed = "outputs are replicated but computed from arguments that are not"
        why = mixed if all(same) else "not all outputs are replicated"
    raise PlacementError(
        f"local_map: the gradient of argument {index}, replicated over axis {name!r}, does not follow from the "
        f"placements: {why} there. Pass in_grad_placements: Partial() if the gradient is the sum over the ranks, "
        "Replicate() if each rank computes all of it."
    )


def _axis_of(mesh: DeviceMesh, other: DeviceMesh, axis: int) -> int | None:
    """Return the axis of `mesh` along which this rank has the same ranks as along `axis` of another mesh, or None."""
    if mesh == other:
        return axis
    if mesh.get_coordinate() is None or other.get_coordinate() is None:
        return None
    # Compared by ranks: meshes sliced from different ones may have the same axis under another name or index.
    line = other.group_over((axis,)).ranks
    return next((each for each in range(mesh.ndim) if mesh.group_over((each,)).ranks == line), None)


def _placements(mesh: DeviceMesh, entry: Any, where: str) -> tuple[Placement, ...] | None:
    if entry is None:
        return None
    if not is_specification(entry):
        raise PlacementError(f"local_map: {where} must be placements, alias names, a Layout or None, got {entry!r}")
    placements = placements_for(mesh, entry)
    if (count := wrong_count(mesh, placements)) is not None:
        raise PlacementError(f"local_map: {where}: {count}")
    return placements


class _Outputs:
    """Placements of the outputs of one call, on their mesh.

    Args:
        checked: keys of the outputs whose global shape ranks have already compared. Shared by all calls of a function
            in a world.
    """

    def __init__(self, mesh: DeviceMesh, entries: Sequence[Outputs], checked: set[Any]) -> None:
        self.mesh, self.entries, self.checked = mesh, entries, checked

    def replicated_along(self, mesh: DeviceMesh, axis: int) -> list[bool]:
        """Return whether each output tensor is replicated along an axis of `mesh`. Empty if there is no such axis."""
        own = _axis_of(self.mesh, mesh, axis)
        return [] if own is None else [entry[own].is_replicate() for entry in self.entries if entry is not None]

    def wrap(self, output: Any, inputs: Sequence[TensorSpec]) -> Any:
        """Return the output of the function with its tensors as DTensors."""
        values, rebuilt = flattened(output)
        count = len(self.entries)
        if len(values) != count:
            raise PlacementError(f"local_map: the function returned {len(values)} outputs, out_placements has {count}")
        # Sizes are inferred from arguments on the same mesh: axes of another mesh shard in another way.
        on_mesh = [spec for spec in inputs if spec.mesh == self.mesh]
        return rebuilt([self._wrapped(values[i], self.entries[i], i, on_mesh) for i in range(count)])

    def _wrapped(self, x: Any, placements: Outputs, index: int, inputs: Sequence[TensorSpec]) -> Any:
        if placements is None:
            return x
        mesh = self.mesh
        if not isinstance(x, mesh.platform.Tensor):
            raise PlacementError(f"local_map: output {index} has placements but is not a tensor: {type(x).__name__}")
        placements = normalize_placements(mesh, placements, len(x.shape))
        what = f"local_map, output {index}"
        # All ranks must take part in the exchange or none. So nothing that may differ between them, such as the shapes
        # of shards or ragged units, may decide about it.
        key = index, mesh._identity, tuple((type(p), getattr(p, "dim", None)) for p in placements)
        is_first = bool(_shardings(placements)) and key not in self.checked and not mesh.platform.is_meta(x)
        with rank_checks.reporting_failure(mesh, what, exchanges=is_first):
            shape = _global_shape(tuple(x.shape), placements, index, mesh, inputs)
            spec = TensorSpec(mesh, placements, shape, x.dtype)
        if is_first:
            rank_checks.require_same(what, spec)
            self.checked.add(key)
        return conversions.from_local(x, mesh, placements, shape=shape)


Sharding = tuple[tuple[int, Any], ...]
"""The sharding of a dimension: the axes, each with the kind of its placement."""


def _shardings(placements: Sequence[Placement]) -> dict[int, Sharding]:
    """Return the sharding of each sharded dimension."""
    found: dict[int, Sharding] = {}
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
    for dim, sharding in _shardings(placements).items():
        if any(isinstance(p, RaggedShard) and p.dim == dim for p in placements):
            continue  # the units of the placement sum to the global size
        alike = [
            (spec.shape[d], spec.local_shape[d])
            for spec in inputs
            for d, other in _shardings(spec.placements).items()
            if other == sharding
        ]
        sizes = {size for size, length in alike if length == local[dim]}
        ranks = math.prod(mesh.shape[axis] for axis, _ in sharding)
        if len(sizes) == 1:
            shape[dim] = sizes.pop()
        elif sizes or any(size % ranks for size, _ in alike):
            raise PlacementError(
                f"local_map: output {index} {list(local)} is sharded along dimension {dim} like arguments with uneven "
                f"shards (global sizes {sorted({size for size, _ in alike})}); its global size cannot be inferred. "
                "Return it as a plain tensor, and wrap it by from_local with its global shape."
            )
    return tuple(shape)
