"""`fully_shard`: check all arguments, compare them between ranks, then replace the parameters by sharded ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, init_device_mesh, require_mesh
from hp_dtensor.comm.world import joined_world
from hp_dtensor.exceptions import MeshError
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.rank_checks import check_alike, reporting_failure
from hp_fsdp._engine.buffer_layout import block_of, plan_buffers
from hp_fsdp._engine.flat_buffer import FlatBuffer
from hp_fsdp._engine.forward import FSDPState, state_of
from hp_fsdp._engine.gather_extension import ExtensionGathering, chunked_layout
from hp_fsdp._engine.param_group import GroupSettings, ParameterGroup
from hp_fsdp._engine.parameters import (
    MeshInfo,
    OriginalParameter,
    ShardPlacementFunction,
    check_ties,
    collect_parameters,
    find_extensions,
    mark_ignored,
    mesh_problems,
    normalize_reshard_size,
    place_parameters,
    reshard_problems,
)
from hp_fsdp._fsdp_module import with_methods
from hp_fsdp.communication import Communication
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.plugins import get_communication, get_storage
from hp_fsdp.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy, resolve_policy
from hp_fsdp.storage import ParameterStorage

Tensor = Any
Module = Any

FULL_PRECISION = MixedPrecisionPolicy()
BYTES_PER_KB = 1024


def fully_shard(
    module: Module | Sequence[Module],
    mesh: DeviceMesh | None = None,
    *,
    zero_stage: int = 3,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFunction | None = None,
    mp_policy: MixedPrecisionPolicy = FULL_PRECISION,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[Tensor] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    replicate_params: Iterable[Tensor] = (),
    threshold: float = 0,
    bucket_size: float | None = None,
    communication: str | Communication = "default",
) -> Any:
    """Shard the parameters of a module, or of several as one group, over a data-parallel mesh, in place.

    Parameters below `module` that no earlier call has sharded become DTensors, split by rows into ragged shards over
    the last axis of `mesh`. Forward and backward gather them, all of the group in one collective, and backward reduces
    their gradients in one. Call it on inner modules first. Names and meanings follow torch's `fully_shard`.

    Args:
        module: a module of the mesh's platform, or a list of modules that form one group.
        mesh: 1-D (shard) or 2-D (replicate, shard). None: one shard axis over all ranks.
        zero_stage: what is sharded over the last axis of `mesh` (arXiv 1910.02054). The package's README has the
            memory and messages of each stage. Below 3, each forward first gathers again what any rank has written.
            0: nothing. 1: optimizer state. 2: gradients too, also those that `set_requires_gradient_sync(False)`
            accumulates. 3: parameters too.
        reshard_after_forward: in stage 3, free the full parameters after forward and gather them again for backward.
            None: yes, except for the root's own group. A number k that divides the shard axis: each k consecutive ranks
            keep the full parameters sharded among them (1: same as False; all ranks: same as True).
        shard_placement_fn: called with each parameter. It returns the dimension to shard, `Shard(dim)` (sizes need not
            be divisible), or a `ShardPlacementResult` with a mesh for this parameter alone, or None for the first
            dimension longer than 1. The numbers of rows of the ranks may differ: the placement is a `RaggedShard`.
        mp_policy: dtypes of computation and communication.
        offload_policy: keep shards (in stage 3 only), gradients, or both on the host.
        ignored_params: parameters that are not sharded. Their gradients are not reduced.
        dp_mesh_dims: which axes of `mesh`, then a mesh over all ranks, are data parallel. Same as passing those axes.
        replicate_params: parameters that every rank holds in full. Their gradients are reduced over all ranks.
        threshold: in KB (1024 bytes) of the parameter on one rank. Smaller parameters are replicated too.
        bucket_size: in KB of the parameters on one rank. A larger group is gathered and reduced by several collectives,
            each of complete parameters of at most this size together (0: one each). None: one collective.
        communication: how the group is gathered and reduced: a `Communication`, or the name of one that a plugin has
            registered. "default": the process group's own collectives.

    Returns:
        `module`. The class of each module gains `FSDPModule`.

    Raises:
        FullyShardError: listing every problem of mesh, modules and parameters. Nothing has been changed.
        RankMismatchError: ranks have different parameters, shard dimensions, dtypes, or settings, or one has raised.
            It names the ranks and what each has. Nothing has been changed.
        CapabilityError: the platform cannot compute in the policy's dtypes.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     x = platform.ops.ones((3, 4), platform.dtype("float32"))
        ...     platform.backward(platform.ops.sum(model(x)))
        ...     return tuple(model.weight.shape), tuple(platform.get_grad(model.weight).to_local().shape)
        >>> run_ranks(program, 2)[0]
        ((6, 4), (3, 4))
    """
    modules: list[Any] = list(module) if isinstance(module, (list, tuple)) else [module]
    mesh = _data_parallel_mesh(modules, mesh, dp_mesh_dims)
    name = ", ".join(type(module).__name__ for module in modules)
    # If one rank finds a problem, this reports it to the others, which would wait for it in `_check_ranks`.
    with reporting_failure(mesh, f"fully_shard({name})"):
        settings = _group_settings(mesh, zero_stage, reshard_after_forward, threshold, bucket_size)
        _check_modules(mesh.platform, modules)
        storage = get_storage(mesh.platform)
        mp_policy = resolve_policy(mesh.platform, mp_policy)
        communication = get_communication(communication, mesh.platform)
        offload_policy = _check_offload(storage, mesh, offload_policy, zero_stage)
        ignored, replicated = _parameter_lists(
            mesh.platform,
            ignored_params=() if ignored_params is None else ignored_params,
            replicate_params=replicate_params,
        )
        originals = _collect(storage, modules, ignored, mp_policy)
        place_parameters(originals, mesh, shard_placement_fn, settings.reshard_after_forward, name)
        replicated_ids = _replicated_ids(mesh.platform, originals, replicated, threshold if zero_stage else math.inf)
    # Up to here nothing has been changed: an error on this rank or another one leaves the modules as they were.
    facts = (
        f"zero_stage={zero_stage}, reshard_after_forward={settings.reshard_after_forward}, bucket_size={bucket_size}"
    )
    _check_ranks(mesh, f"fully_shard({name})", originals, replicated_ids, [str(mp_policy), facts])
    buffers = list(
        _make_buffers(storage, originals, replicated_ids, mp_policy, communication, offload_policy, bucket_size)
    )
    mark_ignored(mesh.platform, modules, ignored)
    _install(ParameterGroup(name, modules, storage, buffers, settings), mp_policy)
    return module


# Arguments -----------------------------------------------------------------------------------------------


def _data_parallel_mesh(modules: Sequence[Module], mesh: Any, dims: DataParallelMeshDims | None) -> Any:
    """Return the mesh to shard over: the given one, or its data-parallel axes. By default one axis over all ranks."""
    if mesh is not None:
        with contextlib.suppress(MeshError):  # `_group_settings` reports what it is instead
            mesh = require_mesh("fully_shard", mesh)
        return mesh if dims is None else dims.of(mesh)
    if dims is not None:
        raise FullyShardError(f"dp_mesh_dims={dims}: expected mesh=, the mesh with these axes, got None")
    platform = next((each.platform for each in modules if isinstance(each, nn.Module)), None) or get_platform()
    return init_device_mesh(
        platform.device_types[0], (joined_world(platform).size,), mesh_dim_names=("dp",), platform=platform
    )


def _group_settings(
    mesh: DeviceMesh,
    zero_stage: int,
    reshard_after_forward: bool | int | None,
    threshold: float,
    bucket_size: float | None,
) -> GroupSettings:
    """Return the settings of the group, or raise `FullyShardError` with all that are invalid or contradict others."""
    problems = mesh_problems(mesh)
    if problems:
        raise FullyShardError("; ".join(problems))
    if isinstance(zero_stage, bool) or zero_stage not in (0, 1, 2, 3):
        problems.append(f"zero_stage: expected 0, 1, 2 or 3, got {zero_stage!r}")
    elif zero_stage < 3 and reshard_after_forward:
        problems.append(
            f"reshard_after_forward={reshard_after_forward!r} frees full parameters, which zero_stage={zero_stage} "
            "retains; use zero_stage=3, or leave reshard_after_forward out"
        )
    problems += reshard_problems(reshard_after_forward, mesh.shape[-1])
    for name, size in (("threshold", threshold), ("bucket_size", 0 if bucket_size is None else bucket_size)):
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not size >= 0:
            problems.append(f"{name}: expected a size in KB of at least 0, got {size!r}")
    if problems:
        raise FullyShardError("; ".join(problems))
    reshard = normalize_reshard_size(reshard_after_forward, mesh.shape[-1])
    return GroupSettings(zero_stage=zero_stage, reshard_after_forward=reshard)


def _check_modules(platform: Platform, modules: Sequence[Module]) -> None:
    problems = []
    if not modules:
        problems.append("module: expected at least one module, got an empty list")
    for position, module in enumerate(modules):
        where = f"module {position}" if len(modules) > 1 else "module"
        if not isinstance(module, platform.Module):
            expected = f"a module of platform {platform.name!r}"
            problems.append(f"{where}: expected {expected}, got {type(module).__name__}")
        elif state_of(module) is not None:
            problems.append(f"{where}: {type(module).__name__} has been through fully_shard already")
        elif _is_container(platform, module):
            problems.append(
                f"{where}: a {type(module).__name__} is never called itself; pass the modules in it, each on its own "
                "or list(...) of them as one group"
            )
    if len({id(module) for module in modules}) != len(modules):
        problems.append("module: the list names a module twice")
    if problems:
        raise FullyShardError("; ".join(problems))


def _is_container(platform: Platform, module: Module) -> bool:
    """Return True if a module only holds others, without a forward of its own, as a `ModuleList` does."""
    forward = getattr(type(module), "forward", None)
    is_inherited = forward is not None and forward in (nn.Module.forward, getattr(platform.Module, "forward", None))
    holds = hasattr(type(module), "__getitem__") and is_inherited and "forward" not in vars(module)
    return holds or platform.is_container(module)


def _check_offload(
    storage: ParameterStorage, mesh: DeviceMesh, offload_policy: OffloadPolicy | None, zero_stage: int
) -> CPUOffloadPolicy | None:
    """Return the policy if it offloads anything, else None. Raises if stage or platform do not allow it."""
    # torch's base class is a policy that offloads nothing.
    if offload_policy is None or type(offload_policy) is OffloadPolicy:
        return None
    if not isinstance(offload_policy, CPUOffloadPolicy):
        got = type(offload_policy).__name__
        raise FullyShardError(f"offload_policy: expected a CPUOffloadPolicy or None, got {got}")
    if zero_stage != 3 and offload_policy.parameters:
        raise FullyShardError(
            f"offload_policy: expected zero_stage=3, whose parameters are sharded, got {zero_stage}; "
            "CPUOffloadPolicy(parameters=False) offloads gradients in stages 1 to 3"
        )
    storage.check_offload(mesh.device_type)
    if offload_policy.parameters != offload_policy.gradients and not storage.is_host(mesh.device_type):
        storage.check_separate_gradients()
    return offload_policy


def _parameter_lists(platform: Platform, **arguments: Any) -> list[list[Tensor]]:
    """Return the parameters of each argument as a list, because a generator can be consumed only once."""
    lists: list[list[Tensor]] = []
    for name, given in arguments.items():
        if isinstance(given, (str, platform.Tensor)) or not isinstance(given, Iterable):
            raise FullyShardError(f"{name}: expected several parameters, as a list, got {type(given).__name__}")
        lists.append(list(given))
        wrong = [repr(each) for each in lists[-1] if not isinstance(each, platform.Tensor)]
        if wrong:
            raise FullyShardError(f"{name}: expected parameters, such as module.weight, got {', '.join(wrong)}")
    both = set.intersection(*({id(parameter) for parameter in each} for each in lists))
    if both:
        raise FullyShardError(f"{' and '.join(arguments)}: {len(both)} parameters are in both; choose one")
    return lists


# Parameters ----------------------------------------------------------------------------------------------


def _collect(
    storage: ParameterStorage, modules: Sequence[Module], ignored: Collection[Tensor], mp_policy: MixedPrecisionPolicy
) -> list[OriginalParameter]:
    """Return the parameters of the group, after all checks that need no mesh."""
    originals = collect_parameters(storage.platform, modules, ignored)
    check_ties(storage.platform, modules, originals)
    _check_dtypes(storage, mp_policy, originals)
    _check_hooks(storage.platform, originals)
    find_extensions(storage, originals)
    return originals


def _check_dtypes(
    storage: ParameterStorage, mp_policy: MixedPrecisionPolicy, originals: Sequence[OriginalParameter]
) -> None:
    for dtype in (mp_policy.param_dtype, mp_policy.reduce_dtype, mp_policy.output_dtype):
        if dtype is not None:
            storage.check_dtype(dtype)
    grad_dtype = mp_policy.grad_dtype
    if grad_dtype is not None and any(original.tensor.dtype != grad_dtype for original in originals):
        storage.check_grad_dtype(grad_dtype)


def _check_hooks(platform: Platform, originals: Sequence[OriginalParameter]) -> None:
    hooked = [original.name for original in originals if platform.has_gradient_hooks(original.tensor)]
    if hooked:
        raise FullyShardError(
            f"{', '.join(hooked)}: hooks have been registered on the gradient, which the sharded parameter would lack. "
            "Remove them (handle.remove()); on torch, a function registered by register_post_accumulate_grad_hook "
            "after fully_shard is called when the gradient has been reduced"
        )


def _replicated_ids(
    platform: Platform, originals: Sequence[OriginalParameter], replicated: Collection[Tensor], threshold: float
) -> set[int]:
    """Return the ids of the parameters to replicate: the listed ones, and those below the threshold (in KB)."""
    small = (
        original.tensor
        for original in originals
        if original.longest_numel * platform.itemsize(original.tensor.dtype) < threshold * BYTES_PER_KB
    )
    return {id(parameter) for parameter in (*replicated, *small)}


def _check_ranks(
    mesh: DeviceMesh,
    what: str,
    originals: Sequence[OriginalParameter],
    replicated_ids: Collection[int],
    settings: Sequence[str],
) -> None:
    """Check that all ranks of the mesh have the same parameters and settings."""
    # Parameters with a mesh of their own are compared over that mesh only: ranks outside of it may have others, such as
    # other experts.
    by_mesh: dict[DeviceMesh, list[OriginalParameter]] = {mesh: []}
    for original in originals:
        assert original.mesh is not None
        by_mesh.setdefault(original.mesh, []).append(original)
    for each, sharing in by_mesh.items():
        facts = [
            f"{original.name} {list(original.tensor.shape)} {original.tensor.dtype}, sharded along {original.shard_dim}"
            f"{', replicated' if id(original.tensor) in replicated_ids else ''}"
            f"{'' if mesh.platform.requires_grad(original.tensor) else ', frozen'}"
            f"{'' if original.extension is None else f', gathered by {original.extension.kind}'}"
            for original in sharing
        ]
        check_alike(each, what, [*facts, *(settings if each is mesh else ())])


# Buffers and group ---------------------------------------------------------------------------------------


def _make_buffers(
    storage: ParameterStorage,
    originals: Sequence[OriginalParameter],
    replicated_ids: Collection[int],
    mp_policy: MixedPrecisionPolicy,
    communication: Communication,
    offload_policy: CPUOffloadPolicy | None,
    bucket_size: float | None,
) -> Iterator[FlatBuffer]:
    """Yield the flat buffers. Parameters share one if they have the same dtype, mesh and trainability."""
    common = (mp_policy, communication, offload_policy)
    kinds: dict[Any, list[OriginalParameter]] = {}
    for original in originals:
        assert original.mesh is not None
        mesh_info = MeshInfo(original.mesh, is_sharded=id(original.tensor) not in replicated_ids)
        if original.extension is not None:
            layout = chunked_layout(original, mesh_info.num_shards)
            make_gathering = partial(ExtensionGathering, extension=original.extension)
            yield FlatBuffer(storage, mesh_info, [original], layout, *common, make_gathering)
            continue
        # A collective has one dtype. Frozen parameters have a buffer of their own, which needs no gradients and no
        # reduction.
        key = original.tensor.dtype, storage.platform.requires_grad(original.tensor), mesh_info
        kinds.setdefault(key, []).append(original)
    for (dtype, _, mesh_info), same_kind in kinds.items():
        # Blocks are aligned in elements. The alignment must hold in the shard, and in the narrower dtype of a gather.
        itemsize = min(storage.platform.itemsize(kind) for kind in (dtype, mp_policy.param_dtype or dtype))
        for bucket in _buckets(storage.platform, same_kind, bucket_size):
            blocks = [block_of(each.local_shape, each.shard_dim, itemsize) for each in bucket]
            for indices, layout in plan_buffers(blocks, mesh_info.num_shards):
                yield FlatBuffer(storage, mesh_info, [bucket[i] for i in indices], layout, *common)


def _buckets(
    platform: Platform, originals: Sequence[OriginalParameter], bucket_size: float | None
) -> list[list[OriginalParameter]]:
    """Split parameters, in order, into buckets of at most `bucket_size` KB, or of one larger parameter."""
    buckets: list[list[OriginalParameter]] = []
    # Sizes are those of the longest shard of any rank, so that all ranks make the same buckets.
    room = 0.0
    for original in originals:
        size = original.longest_numel * platform.itemsize(original.tensor.dtype)
        if not buckets or size > room:
            buckets.append([])
            room = math.inf if bucket_size is None else bucket_size * BYTES_PER_KB
        buckets[-1].append(original)
        room -= size
    return buckets


def _install(group: ParameterGroup, mp_policy: MixedPrecisionPolicy) -> None:
    """Set the sharded parameters, the state, and the methods of `FSDPModule` on the modules."""
    # The modules hold unsharded parameters, the original ones. `use_sharded` replaces them.
    group.uses_unsharded = True
    group.use_sharded()
    FSDPState(group, mp_policy).install()
    for each in group.modules:
        each.__class__ = with_methods(type(each))  # type: ignore[arg-type]
