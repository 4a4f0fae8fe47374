"""`fully_shard`: checks, then one group."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.platform import Platform
from hp_fsdp._buffer import FlatBuffer
from hp_fsdp._group import ParameterGroup
from hp_fsdp._hooks import ModuleState, state_of
from hp_fsdp._module import with_methods
from hp_fsdp._parameters import Original, collect, problems_of
from hp_fsdp.communication import Communication, get_communication
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.layout import plan_buffers
from hp_fsdp.policies import MixedPrecisionPolicy
from hp_fsdp.storage import ParameterStorage, get_storage

Tensor = Any
Module = Any

FULL_PRECISION = MixedPrecisionPolicy()


def fully_shard(
    module: Module | Sequence[Module],
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = FULL_PRECISION,
    ignored_params: Collection[Tensor] = (),
    communication: str | Communication = "default",
) -> Any:
    """Shard the parameters of a module, or of several as one group, over a data-parallel mesh, in place.

    Parameters below `module` that no earlier call has taken become DTensors, cut into row-granular ragged
    shards on the last axis of `mesh`; forward and backward gather them, all of the group in one collective,
    and backward reduces their gradients in one. Call it on the inner modules first, then on those above.
    Names and meanings follow torch's `fully_shard`.

    Args:
        module: a module of the mesh's platform, or a list that forms one group.
        mesh: 1-D (shard) or 2-D (replicate, shard). Groups of one model may have different meshes.
        reshard_after_forward: free the full parameters after forward and gather them again for backward;
            None: yes, except for the root's own.
        mp_policy: dtypes of computation and communication.
        ignored_params: parameters that stay as they are.
        communication: how the group is gathered and reduced: a name that a plugin has registered, or a
            `Communication`; "default": the process group's own collectives.

    Returns:
        `module`; the class of each module gains `FSDPModule`.

    Raises:
        FullyShardError: listing every problem of mesh, modules and parameters; nothing has been changed.
        CapabilityError: the platform cannot compute in the policy's dtypes.
    """
    modules: list[Any] = list(module) if isinstance(module, (list, tuple)) else [module]
    _check_mesh(mesh)
    platform = mesh.platform
    _check_modules(platform, modules)
    storage = get_storage(platform)
    policy = mp_policy.resolve(platform)
    _check_dtypes(storage, policy)
    transport = get_communication(communication, platform)
    originals = collect(platform, modules, ignored_params)
    _check_parameters(originals, mesh)
    group = _make_group(storage, mesh, modules, originals, policy, transport, reshard_after_forward)
    ModuleState(storage, modules, group, policy).install()
    for each in modules:
        each.__class__ = with_methods(type(each))  # type: ignore[arg-type]
    return module


def _make_group(
    storage: ParameterStorage,
    mesh: DeviceMesh,
    modules: Sequence[Module],
    originals: Sequence[Original],
    policy: MixedPrecisionPolicy,
    communication: Communication,
    reshard_after_forward: bool | None,
) -> ParameterGroup:
    buffers = [
        buffer
        for alike in _alike(storage.platform, originals)
        for buffer in _make_buffers(storage, mesh, alike, policy, communication)
    ]
    name = ", ".join(type(module).__name__ for module in modules)
    group = ParameterGroup(name, storage, buffers, reshard_after_forward)
    group.exposed = True
    group.conceal()
    return group


def _alike(platform: Platform, originals: Sequence[Original]) -> list[list[Original]]:
    """Parameters that may share a buffer: of one dtype, and all trainable or all frozen."""
    kinds: dict[Any, list[Original]] = {}
    for original in originals:
        key = original.tensor.dtype, platform.requires_grad(original.tensor)
        kinds.setdefault(key, []).append(original)
    return list(kinds.values())


def _make_buffers(
    storage: ParameterStorage,
    mesh: DeviceMesh,
    originals: Sequence[Original],
    policy: MixedPrecisionPolicy,
    communication: Communication,
) -> Iterator[FlatBuffer]:
    dtypes = {originals[0].tensor.dtype, policy.param_dtype or originals[0].tensor.dtype}
    itemsize = min(storage.platform.itemsize(dtype) for dtype in dtypes)
    blocks = [original.block(itemsize) for original in originals]
    for indices, layout in plan_buffers(blocks, mesh.shape[-1]):
        yield FlatBuffer(storage, mesh, [originals[i] for i in indices], layout, policy, communication)


def _check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise FullyShardError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim not in (1, 2):
        raise FullyShardError(
            f"mesh: expected 1 axis (shard) or 2 (replicate, shard), got {mesh.describe()}; "
            'pick the data-parallel ones, such as mesh["dp_replicate", "dp_shard"]'
        )
    if mesh.get_coordinate() is None:
        raise FullyShardError(f"mesh: rank {mesh.world.rank} is outside mesh {mesh.describe()}")


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
    if len({id(module) for module in modules}) != len(modules):
        problems.append("module: the list names a module twice")
    if problems:
        raise FullyShardError("; ".join(problems))


def _check_dtypes(storage: ParameterStorage, policy: MixedPrecisionPolicy) -> None:
    for dtype in (policy.param_dtype, policy.reduce_dtype, policy.output_dtype):
        if dtype is not None:
            storage.check_dtype(dtype)


def _check_parameters(originals: Sequence[Original], mesh: DeviceMesh) -> None:
    problems = [problem for original in originals for problem in problems_of(original, mesh)]
    if problems:
        raise FullyShardError("; ".join(problems))
