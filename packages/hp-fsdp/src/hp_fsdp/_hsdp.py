"""`hsdp`: the interface of HyperParallel, implemented by `fully_shard`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, init_device_mesh
from hp_dtensor.comm.world import World, current_world
from hp_dtensor.exceptions import MeshError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_fsdp._engine.forward import FSDPState, state_of, states_below
from hp_fsdp._fsdp_module import FSDPModule, with_methods
from hp_fsdp._fully_shard import fully_shard
from hp_fsdp.exceptions import HSDPError
from hp_fsdp.policies import MixedPrecisionPolicy, dtype_problem

Module = Any
DType = Any

ZERO_STAGES = {"level1": 1, "level2": 2, "level3": 3}
# `hsdp_sync_stream` has no argument and finds its cells here. Weak, so that a model that is dropped can be freed. The
# world tells ranks apart that are threads of one process.
_asynchronous: weakref.WeakKeyDictionary[FSDPState, World] = weakref.WeakKeyDictionary()


def hsdp(
    cell: Module,
    shard_size: int = -1,
    threshold: int = 64,
    optimizer_level: str = "level1",
    enable_grad_accumulation: bool = False,
    use_eager_hook: bool = True,
    grad_scale: float = 1.0,
    reduce_dtype: DType | str | None = None,
    comm_async: bool = False,
    comm_fusion: bool = False,
    bucket_size: int = -1,
    *,
    mesh: DeviceMesh | None = None,
) -> Any:
    """Shard the parameters of `cell` over groups of data-parallel ranks, in place; see `fully_shard`.

    Args:
        cell: a module of the platform. Parameters that an inner `hsdp` or `fully_shard` has sharded are not changed.
        shard_size: number of consecutive ranks that share one parameter. The other ranks hold replicas. -1: all ranks.
        threshold: in KB. Smaller parameters are replicated.
        optimizer_level: what is sharded. "level1": optimizer state and weights (the full weights are retained besides
            their shards). "level2": gradients too. "level3": also frees the full weights after forward and gathers
            them again for backward. These are the `zero_stage` 1, 2 and 3 of `fully_shard`.
        enable_grad_accumulation: reduce gradients only after `set_requires_grad_sync(True)`.
        use_eager_hook: has no effect: the hooks are the framework's in eager (PyNative) mode, and graphs over sharded
            parameters are refused when they are made.
        grad_scale: every reduced gradient, the mean over all ranks, is multiplied by this positive number.
        reduce_dtype: dtype of the reduction: the platform's, or a name. None: the parameters'.
        comm_async: reductions may still run when backward returns. Call `hsdp_sync_stream` before gradients are used.
            Otherwise they may be None or those of an older backward, and the optimizer's step does nothing or uses
            those, without an error.
        comm_fusion: gather and reduce several parameters in one collective. False: each in its own.
        bucket_size: with `comm_fusion`, KB of parameters in one collective. -1: no limit, 0: one parameter. Without
            `comm_fusion` it has no effect.
        mesh: the data-parallel ranks, one axis. None: the ranks that hold the same shards of all parameters as this
            one. After `shard_module` and `parallelize_module` these are the ranks of the axes that shard nothing. For
            plain parameters they are all ranks.

    Returns:
        `cell`, whose class gains `HSDPCell`.

    Raises:
        HSDPError: a `ValueError` that lists every invalid argument. Nothing has been changed.
        FullyShardError: the same, for the parameters of `cell`.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     hsdp(model, optimizer_level="level3")
        ...     return isinstance(model, HSDPCell)
        >>> run_ranks(program, 2)[0]
        True
    """
    if mesh is None:
        mesh = _mesh_of_parameters(cell)
    platform = mesh.platform if isinstance(mesh, DeviceMesh) else get_platform()
    num_ranks = mesh.size() if isinstance(mesh, DeviceMesh) else current_world(platform).size
    problems = [
        *_cell_problems(cell, platform, mesh),
        *_size_problems(shard_size, num_ranks, threshold, bucket_size),
        *_choice_problems(optimizer_level, grad_scale, platform, reduce_dtype),
        *_flag_problems(
            enable_grad_accumulation=enable_grad_accumulation,
            use_eager_hook=use_eager_hook,
            comm_async=comm_async,
            comm_fusion=comm_fusion,
        ),
    ]
    if problems:
        raise HSDPError("hsdp: " + "; ".join(problems))
    original_class: Any = type(cell)
    data_mesh = _data_mesh(platform, mesh, shard_size, num_ranks)
    fully_shard(
        cell,
        data_mesh,
        zero_stage=ZERO_STAGES[optimizer_level],
        mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        threshold=threshold,
        # Without fusion each parameter has a bucket of its own.
        bucket_size=0 if not comm_fusion else None if bucket_size == -1 else bucket_size,
    )
    cell.__class__ = with_methods(original_class, HSDPCell)
    cell.set_requires_gradient_sync(not enable_grad_accumulation, recurse=False)
    cell.set_gradient_scaling_factor(grad_scale, recurse=False)
    if comm_async:
        state = cell._fsdp
        state.group.settings.defers_reduction = True
        _asynchronous[state] = data_mesh.world
    return cell


def hsdp_sync_stream() -> None:
    """Wait for the running reductions of this rank's cells with `comm_async=True`, after which their gradients are set.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     hsdp(model, optimizer_level="level3", comm_async=True)
        ...     platform.backward(platform.ops.sum(model(platform.ops.ones((3, 4), platform.dtype("float32")))))
        ...     hsdp_sync_stream()  # now the gradients are set
        ...     return platform.get_grad(model.weight) is not None
        >>> run_ranks(program, 2)[0]
        True
    """
    for state, world in list(_asynchronous.items()):
        if state.schedule is not None and world is current_world(state.platform):
            state.schedule.context.finish_reductions()


class HSDPCell(FSDPModule):
    """Mixin of the class of every cell that has been through `hsdp`. It has the methods of `FSDPModule` too.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     hsdp(model).set_requires_grad_sync(False)  # accumulate micro-batches
        ...     return isinstance(model, HSDPCell)
        >>> run_ranks(program, 2)[0]
        True
    """

    @property
    def _fsdp(self) -> FSDPState:
        state = state_of(self)
        if state is None:
            raise HSDPError(f"{type(self).__name__} has not been through hsdp; call hsdp(cell, ...) first")
        return state

    def set_requires_grad_sync(self, requires_grad_sync: bool) -> None:
        """True: backward reduces the gradients of this cell and those below it. False: it accumulates them.

        Raises:
            HSDPError: not a bool, or before `hsdp`.
        """
        if not isinstance(requires_grad_sync, bool):
            raise HSDPError(f"set_requires_grad_sync: expected a bool, got {requires_grad_sync!r}")
        self.set_requires_gradient_sync(requires_grad_sync)

    def zero_grads(self) -> None:
        """Set all gradients of this cell and those below it to None. Discards accumulated gradients and reductions too.

        Raises:
            HSDPError: before `hsdp`.
        """
        # A running reduction would set gradients after they have been cleared.
        if self._fsdp.schedule is not None:
            self._fsdp.schedule.context.finish_reductions()
        for state in states_below(self._fsdp.platform, self):
            for buffer in state.group.buffers:
                buffer.gradients.drop()
                for parameter in buffer.parameters:
                    state.platform.set_grad(parameter.sharded, None)

    def set_forward_prefetch_cells(self, hsdp_cell_list: Sequence[Module]) -> None:
        """Prefetch the parameters of these cells in this one's forward, instead of the next ones in recorded order.

        Raises:
            HSDPError: not a list of cells that have been through `hsdp`, or before `hsdp`.
        """
        self._fsdp.group.forward_prefetch = _groups_of("set_forward_prefetch_cells", hsdp_cell_list)

    def set_backward_prefetch_cells(self, hsdp_cell_list: Sequence[Module]) -> None:
        """Do the same as `set_forward_prefetch_cells` for this cell's backward."""
        self._fsdp.group.backward_prefetch = _groups_of("set_backward_prefetch_cells", hsdp_cell_list)


def _groups_of(method: str, cells: Any) -> list[Any]:
    if not isinstance(cells, (list, tuple)):
        raise HSDPError(f"{method}: expected a list of cells that have been through hsdp, got {type(cells).__name__}")
    states = [state_of(cell) if isinstance(cell, HSDPCell) else None for cell in cells]
    wrong = [f"number {i}, {type(c).__name__}" for i, (c, s) in enumerate(zip(cells, states, strict=True)) if s is None]
    if wrong:
        raise HSDPError(f"{method}: expected cells that have been through hsdp, got {'; '.join(wrong)}")
    return [state.group for state in states if state is not None]


def _mesh_of_parameters(cell: Module) -> DeviceMesh | None:
    """Return the mesh of the ranks with the same shards of the DTensor parameters. None: there are no DTensors.

    Raises:
        HSDPError: the meshes of the parameters cannot be combined.
    """
    platform = get_platform()
    if not isinstance(cell, platform.Module):
        return None
    own = [each for _, each in platform.named_parameters(cell) if getattr(each, "_gradient_from", None) is None]
    specs = list(dict.fromkeys(each.spec for each in own if isinstance(each, DTensor)))
    sharded_axes: dict[Any, DeviceMesh] = {}
    for spec in specs:
        for axis, placement in zip(spec.mesh.axes, spec.placements, strict=True):
            if not placement.is_replicate():
                sharded_axes[axis] = spec.mesh[axis.name]
    if not specs:
        return None
    # Together the sharded axes describe which ranks hold different shards.
    first, *others = sharded_axes.values() if sharded_axes else (specs[0].mesh,)
    try:
        for other in others:
            first = first.concatenate(other)
    except MeshError as error:
        raise HSDPError(
            f"hsdp: mesh=None, and it does not follow from the parameters' own meshes: {error}; pass mesh="
        ) from None
    # The data-parallel ranks are those that differ on the axis over which nothing is sharded.
    return first.along([first.remaining_axis("hsdp", first.mesh_dim_names if sharded_axes else ())])


def _data_mesh(platform: Platform, mesh: DeviceMesh | None, shard_size: int, num_ranks: int) -> DeviceMesh:
    """Build the mesh for `fully_shard`: one axis, or (replicate, shard)."""
    if mesh is None:
        kind = platform.device_types[0]
        mesh = init_device_mesh(kind, (num_ranks,), mesh_dim_names=("hsdp",), platform=platform)
    if shard_size in (-1, num_ranks):
        return mesh
    # Shards are innermost: consecutive ranks are usually on one machine, whose links are the fastest.
    return mesh.unflatten(
        mesh.mesh_dim_names[0], (num_ranks // shard_size, shard_size), ("hsdp_replicate", "hsdp_shard")
    )


# Checks ---------------------------------------------------------------------------------------------------


def _cell_problems(cell: Any, platform: Platform, mesh: Any) -> Iterator[str]:
    if not isinstance(cell, platform.Module):
        yield f"cell: expected a module of platform {platform.name!r}, got {type(cell).__name__}"
    if mesh is None:
        return
    if not isinstance(mesh, DeviceMesh):
        yield f"mesh: expected a DeviceMesh, got {type(mesh).__name__}"
    elif mesh.ndim != 1:
        yield f"mesh: expected one axis of data-parallel ranks, which shard_size divides, got {mesh.describe()}"


def _size_problems(shard_size: Any, num_ranks: int, threshold: Any, bucket_size: Any) -> Iterator[str]:
    # By type: for isinstance, True is the int 1.
    if type(shard_size) is not int or shard_size < -1 or shard_size == 0:
        yield f"shard_size: expected a number of ranks, or -1 for all, got {shard_size!r}"
    elif shard_size > 0 and num_ranks % shard_size:
        divisors = ", ".join(str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0)
        yield f"shard_size={shard_size} does not divide the {num_ranks} data-parallel ranks; expected one of {divisors}"
    if type(threshold) is not int or threshold < 0:
        yield f"threshold: expected KB, an int that is not negative, got {threshold!r}"
    if type(bucket_size) is not int or bucket_size < -1:
        yield f"bucket_size: expected KB, -1 for no limit, or 0 for no fusion, got {bucket_size!r}"


def _flag_problems(**flags: Any) -> list[str]:
    return [f"{name}: expected a bool, got {flag!r}" for name, flag in flags.items() if not isinstance(flag, bool)]


def _choice_problems(level: Any, grad_scale: Any, platform: Platform, reduce_dtype: Any) -> Iterator[str]:
    if not isinstance(level, str) or level not in ZERO_STAGES:
        yield f"optimizer_level: expected one of {', '.join(map(repr, ZERO_STAGES))}, got {level!r}"
    if not isinstance(grad_scale, float) or not 0 < grad_scale < math.inf:
        yield f"grad_scale: expected a float above 0, got {grad_scale!r}"
    problem = dtype_problem(platform, "reduce_dtype", reduce_dtype)
    if problem is not None:
        yield problem
