"""`fully_shard`: check everything, then make one group."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh, init_device_mesh, require_mesh
from hp_dtensor.comm.world import joined_world
from hp_dtensor.exceptions import MeshError
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.spec.rank_checks import check_alike, telling_failure_to_alike
from hp_fsdp._argument_checks import check_policy, check_settings, parameters_given
from hp_fsdp._engine.flat_buffer import FlatBuffer
from hp_fsdp._engine.forward import FSDPState, state_of
from hp_fsdp._engine.gather_extension import ExtensionGathering, chunked_layout
from hp_fsdp._engine.layout import plan_buffers
from hp_fsdp._engine.param_group import ParameterGroup
from hp_fsdp._engine.parameters import (
    DataParallel,
    OriginalParameter,
    ShardPlacementFunction,
    check_ties,
    collect,
    find_extensions,
    mark_ignored,
    place,
)
from hp_fsdp._engine.settings import GroupSettings
from hp_fsdp._fsdp_module import with_methods
from hp_fsdp.communication import Communication
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.plugins import get_communication, get_storage
from hp_fsdp.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
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

    Parameters below `module` that no earlier call has taken become DTensors, cut into row-granular ragged shards on the
    last axis of `mesh`; forward and backward gather them, all of the group in one collective, and backward reduces
    their gradients in one. Call it on the inner modules first. Names and meanings follow torch's `fully_shard`.

    Args:
        module: a module of the mesh's platform, or a list that forms one group.
        mesh: 1-D (shard) or 2-D (replicate, shard); None: all ranks shard.
        zero_stage: what is sharded over the last axis of `mesh` (arXiv 1910.02054); the package's README has the
            memory and messages of each stage. Below 3, each forward first gathers again what any rank has written.
            0: nothing. 1: optimizer state. 2: gradients too, also those that `set_requires_gradient_sync(False)`
            accumulates. 3: parameters too.
        reshard_after_forward: in stage 3, free the full parameters after forward and gather them again for backward;
            None: yes, except for the root's own. A number k that divides the shard axis: each k consecutive ranks
            keep them among themselves (1: False; all: True).
        shard_placement_fn: called with each parameter; gives the dimension to cut, `Shard(dim)` (sizes need not
            divide), or a `ShardPlacementResult` with a mesh for this parameter alone, or None: the first dimension
            longer than 1. Each rank gets as many rows as fit: the placement is a `RaggedShard`.
        mp_policy: dtypes of computation and communication.
        offload_policy: keep shards (in stage 3 only), gradients, or both on the host.
        ignored_params: parameters that stay as they are; their gradients are this rank's own.
        dp_mesh_dims: which axes of `mesh`, then one over all ranks, are data parallel; the same as passing those axes.
        replicate_params: parameters that every rank keeps whole; their gradients are reduced together.
        threshold: in KB (1024 bytes) of the parameter on one rank; smaller ones are replicated likewise.
        bucket_size: in KB of the parameters on one rank; a group of more is gathered and reduced by several
            collectives, each of whole parameters of at most so much together (0: one for each); None: by one.
        communication: how the group is gathered and reduced: a `Communication`, or the name of one that a plugin has
            registered; "default": the process group's own collectives.

    Returns:
        `module`; the class of each module gains `FSDPModule`.

    Raises:
        FullyShardError: listing every problem of mesh, modules and parameters; nothing has been changed.
        RankMismatchError: ranks have other parameters, ways to cut them, dtypes, or settings, or one has raised; it
            names ranks and what each has, and nothing has been changed.
        CapabilityError: the platform cannot compute in the policy's dtypes.

    Example:
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
    # A rank that finds a problem alone tells the others, who wait for it in `_check_ranks`.
    with telling_failure_to_alike(mesh, f"fully_shard({name})"):
        stage = GroupSettings(
            zero_stage=zero_stage,
            reshard_after_forward=check_settings(mesh, zero_stage, reshard_after_forward, threshold, bucket_size),
        )
        _check_modules(mesh.platform, modules)
        storage = get_storage(mesh.platform)
        settings = _buffer_settings(storage, mesh, mp_policy, communication, bucket_size, offload_policy, zero_stage)
        ignored = parameters_given("ignored_params", () if ignored_params is None else ignored_params, mesh.platform)
        replicated = parameters_given("replicate_params", replicate_params, mesh.platform)
        _check_disjoint(ignored, replicated)
        originals = _collect(storage, modules, ignored, settings.policy)
        place(originals, mesh, shard_placement_fn, stage.reshard_after_forward, name)
        whole = _whole_parameters(mesh.platform, originals, replicated, threshold if zero_stage else math.inf)
    # Nothing has been changed so far: whatever is refused, on this rank or another one, leaves the modules as they
    # were.
    facts = f"zero_stage={zero_stage}, reshard_after_forward={stage.reshard_after_forward}, bucket_size={bucket_size}"
    _check_ranks(mesh, f"fully_shard({name})", originals, whole, [str(mp_policy), facts])
    buffers = list(_make_buffers(storage, originals, whole, settings))
    mark_ignored(mesh.platform, modules, ignored)
    _install(ParameterGroup(name, modules, storage, buffers, stage), settings.policy)
    return module


@dataclass(frozen=True, kw_only=True)
class _BufferSettings:
    """Settings of `fully_shard` that its flat buffers share, checked."""

    policy: MixedPrecisionPolicy
    communication: Communication
    bucket_size: float | None
    offload: CPUOffloadPolicy | None


def _buffer_settings(
    storage: ParameterStorage,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    communication: str | Communication,
    bucket_size: float | None,
    offload: OffloadPolicy | None,
    zero_stage: int,
) -> _BufferSettings:
    check_policy(storage.platform, policy)
    return _BufferSettings(
        policy=policy.resolve(storage.platform),
        communication=get_communication(communication, storage.platform),
        bucket_size=bucket_size,
        offload=_check_offload(storage, mesh, offload, zero_stage),
    )


def _collect(
    storage: ParameterStorage, modules: Sequence[Module], ignored: Collection[Tensor], policy: MixedPrecisionPolicy
) -> list[OriginalParameter]:
    """Return the parameters of a group, all of which can be sharded."""
    originals = collect(storage.platform, modules, ignored)
    check_ties(storage.platform, modules, originals)
    _check_dtypes(storage, policy, originals)
    _check_hooks(storage.platform, originals)
    find_extensions(storage, originals)
    return originals


def _data_parallel_mesh(modules: Sequence[Module], mesh: Any, dims: DataParallelMeshDims | None) -> Any:
    """Return the mesh to shard over: the one given or its data-parallel axes; by default all ranks in one axis."""
    if mesh is not None:
        with contextlib.suppress(MeshError):  # `check_settings` tells what it is instead
            mesh = require_mesh("fully_shard", mesh)
        return mesh if dims is None else dims.of(mesh)
    if dims is not None:
        raise FullyShardError(f"dp_mesh_dims={dims}: expected mesh=, the mesh with these axes, got None")
    platform = next((each.platform for each in modules if isinstance(each, nn.Module)), None) or get_platform()
    return init_device_mesh(
        platform.device_types[0], (joined_world(platform).size,), mesh_dim_names=("dp",), platform=platform
    )


def _check_ranks(
    mesh: DeviceMesh, what: str, originals: Sequence[OriginalParameter], whole: Collection[int], settings: Sequence[str]
) -> None:
    """Refuse parameters and settings that differ between ranks.

    Parameters with a mesh of their own are compared over that one only: ranks beyond it may have others, such as other
    experts, and other numbers of them.
    """
    alike: dict[DeviceMesh, list[OriginalParameter]] = {mesh: []}
    for original in originals:
        assert original.mesh is not None
        alike.setdefault(original.mesh, []).append(original)
    for each, held in alike.items():
        check_alike(each, what, [*_facts(mesh.platform, held, whole), *(settings if each is mesh else ())])


def _facts(platform: Platform, originals: Sequence[OriginalParameter], whole: Collection[int]) -> list[str]:
    """Describe each parameter by what must be alike on all ranks."""
    return [
        f"{original.name} {list(original.tensor.shape)} {original.tensor.dtype}, cut along {original.cut_dim}"
        f"{', whole' if id(original.tensor) in whole else ''}"
        f"{'' if platform.requires_grad(original.tensor) else ', frozen'}"
        f"{'' if original.extension is None else f', gathered by {original.extension.kind}'}"
        for original in originals
    ]


def _install(group: ParameterGroup, policy: MixedPrecisionPolicy) -> None:
    """Give the modules their sharded parameters, hooks and methods."""
    # The modules hold their original parameters, whole; from here on the sharded ones.
    group.uses_unsharded = True
    group.use_sharded()
    FSDPState(group.storage, group, policy).install()
    for each in group.modules:
        each.__class__ = with_methods(type(each))  # type: ignore[arg-type]


def _check_offload(
    storage: ParameterStorage, mesh: DeviceMesh, policy: OffloadPolicy | None, zero_stage: int
) -> CPUOffloadPolicy | None:
    """Return the policy if something is offloaded.

    Raises:
        FullyShardError: no policy, or one that does not go with `zero_stage`.
        CapabilityError: the platform cannot do it.
    """
    if policy is None or type(policy) is OffloadPolicy:
        return None
    if not isinstance(policy, CPUOffloadPolicy):
        raise FullyShardError(f"offload_policy: expected a CPUOffloadPolicy or None, got {type(policy).__name__}")
    if zero_stage != 3 and policy.parameters:
        raise FullyShardError(
            f"offload_policy: expected zero_stage=3, whose parameters are sharded, got {zero_stage}; "
            "CPUOffloadPolicy(parameters=False) offloads gradients in stages 1 to 3"
        )
    storage.check_offload(mesh.device_type)
    if policy.parameters != policy.gradients and not storage.is_host(mesh.device_type):
        storage.check_gradient_apart()
    return policy


def _make_buffers(
    storage: ParameterStorage,
    originals: Sequence[OriginalParameter],
    whole: Collection[int],
    settings: _BufferSettings,
) -> Iterator[FlatBuffer]:
    """Yield the flat buffers: parameters share one if dtype, mesh, trainability and membership in `whole` are alike.

    One whose class gathers it has a buffer to itself, cut as torch cuts it, as the class expects.
    """
    policy, common = settings.policy, (settings.policy, settings.communication, settings.offload)
    kinds: dict[Any, list[OriginalParameter]] = {}
    for original in originals:
        assert original.mesh is not None
        parallel = DataParallel(original.mesh, shards=id(original.tensor) not in whole)
        if original.extension is not None:
            layout = chunked_layout(original, parallel.num_shards)
            make_gathering = partial(ExtensionGathering, extension=original.extension)
            yield FlatBuffer(storage, parallel, [original], layout, *common, make_gathering)
            continue
        # Frozen parameters lie apart: their buffer has no gradients, and no reduction. So do other dtypes, as a
        # collective has one.
        key = original.tensor.dtype, storage.platform.requires_grad(original.tensor), parallel
        kinds.setdefault(key, []).append(original)
    for (dtype, _, parallel), alike in kinds.items():
        # Blocks are aligned in elements, which must do for the shard and for what is gathered in a narrower dtype.
        itemsize = min(storage.platform.itemsize(kind) for kind in (dtype, policy.param_dtype or dtype))
        for bucket in _buckets(storage.platform, alike, settings.bucket_size):
            blocks = [original.block(itemsize) for original in bucket]
            for indices, layout in plan_buffers(blocks, parallel.num_shards):
                yield FlatBuffer(storage, parallel, [bucket[i] for i in indices], layout, *common)


def _buckets(
    platform: Platform, alike: Sequence[OriginalParameter], bucket_size: float | None
) -> list[list[OriginalParameter]]:
    """Cut parameters, in order, into runs of at most `bucket_size` KB, or of one larger parameter."""
    buckets: list[list[OriginalParameter]] = []
    room = 0.0
    for original in alike:
        size = original.longest_numel * platform.itemsize(original.tensor.dtype)
        if not buckets or size > room:
            buckets.append([])
            room = math.inf if bucket_size is None else bucket_size * BYTES_PER_KB
        buckets[-1].append(original)
        room -= size
    return buckets


def _whole_parameters(
    platform: Platform, originals: Sequence[OriginalParameter], replicated: Collection[Tensor], threshold: float
) -> set[int]:
    """Return the ids of the parameters that every rank keeps whole: those named, and those below the threshold."""
    small = (
        original.tensor
        for original in originals
        if original.longest_numel * platform.itemsize(original.tensor.dtype) < threshold * BYTES_PER_KB
    )
    return {id(parameter) for parameter in (*replicated, *small)}


def _check_disjoint(ignored: Collection[Tensor], replicated: Collection[Tensor]) -> None:
    both = {id(parameter) for parameter in ignored} & {id(parameter) for parameter in replicated}
    if both:
        raise FullyShardError(f"ignored_params and replicate_params: {len(both)} parameters are in both; choose one")


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
                f"{where}: a {type(module).__name__} is never called itself; give the modules in it, each on its own "
                "or list(...) of them as one group"
            )
    if len({id(module) for module in modules}) != len(modules):
        problems.append("module: the list names a module twice")
    if problems:
        raise FullyShardError("; ".join(problems))


def _is_container(platform: Platform, module: Module) -> bool:
    """Return True if a module only holds others, as a `ModuleList` does, without a forward of its own."""
    forward = getattr(type(module), "forward", None)
    unwritten = forward is not None and forward in (nn.Module.forward, getattr(platform.Module, "forward", None))
    holds = hasattr(type(module), "__getitem__") and unwritten and "forward" not in vars(module)
    return holds or platform.is_container(module)


def _check_hooks(platform: Platform, originals: Sequence[OriginalParameter]) -> None:
    hooked = [original.name for original in originals if platform.has_gradient_hooks(original.tensor)]
    if hooked:
        raise FullyShardError(
            f"{', '.join(hooked)}: hooks have been registered on the gradient, which the sharded parameter would lack. "
            "Remove them (handle.remove()); on torch, what register_post_accumulate_grad_hook is given after "
            "fully_shard is called when the gradient has been reduced"
        )


def _check_dtypes(
    storage: ParameterStorage, policy: MixedPrecisionPolicy, originals: Sequence[OriginalParameter]
) -> None:
    for dtype in (policy.param_dtype, policy.reduce_dtype, policy.output_dtype):
        if dtype is not None:
            storage.check_dtype(dtype)
    if policy.grad_dtype is not None and any(original.tensor.dtype != policy.grad_dtype for original in originals):
        storage.check_grad_dtype(policy.grad_dtype)
