"""`fully_shard` and what it adds to a module."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hp_dtensor.mesh import DeviceMesh
from hp_dtensor.platform import Platform
from hp_fsdp._buffer import FlatBuffer
from hp_fsdp._group import ParameterGroup
from hp_fsdp._hooks import ModuleState, state_of, states_below
from hp_fsdp._parameters import STATE_ATTRIBUTE, Original, collect, problems_of
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
        each.__class__ = _with_methods(type(each))  # type: ignore[arg-type]
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


@functools.cache
def _with_methods(cls: type) -> type:
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})


class FSDPModule:
    """Mixed into the class of every module that has been through `fully_shard`."""

    @property
    def _fsdp(self) -> ModuleState:
        state: ModuleState = self.__dict__[STATE_ATTRIBUTE]
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(f"{type(self).__name__}: a sharded module cannot be copied; copy it before fully_shard")

    def _groups(self, recurse: bool) -> list[ParameterGroup]:
        states = states_below(self._fsdp.platform, self) if recurse else [self._fsdp]
        return [state.group for state in states]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the group's parameters and put them into the modules.

        Args:
            async_op: return at once; the handle's `wait` does the rest.
        """
        group = self._fsdp.group
        group.start_unshard()
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the group's full parameters and put the sharded ones back into the modules."""
        self._fsdp.group.conceal()
        self._fsdp.group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients, or accumulates them unsharded without communication."""
        for group in self._groups(recurse):
            group.gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward also reduces over the replicate axis, or accumulates reduced shards."""
        for group in self._groups(recurse):
            group.reduce_options.all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: another backward through the same forward follows, so unused parameters may still be used."""
        if self._fsdp.context is not None:
            self._fsdp.context.is_last_backward = is_last_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> None:
        """Whether full parameters are freed after forward."""
        for group in self._groups(recurse):
            group.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether full parameters are freed after a backward that does not reduce (one that does always frees)."""
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[Module]) -> None:
        """Gather these modules' groups before this one's forward, instead of the next in recorded order."""
        self._fsdp.group.forward_prefetch = [_state_of(module).group for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[Module]) -> None:
        """Gather these modules' groups before this one's backward, instead of the previous in recorded order."""
        self._fsdp.group.backward_prefetch = [_state_of(module).group for module in modules]

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """What the sum of gradients over all data-parallel ranks is divided by; default: their number."""
        for group in self._groups(recurse):
            group.reduce_options.divide_factor = float(factor)

    def set_reduce_op_type(self, op: str, *, recurse: bool = True) -> None:
        """ "avg" or "sum" over the data-parallel ranks."""
        if op not in ("avg", "sum"):
            raise FullyShardError(f"set_reduce_op_type: expected 'avg' or 'sum', got {op!r}")
        for group in self._groups(recurse):
            group.reduce_options.op = op
            group.reduce_options.divide_factor = None

    def set_communication(self, communication: str | Communication, *, recurse: bool = True) -> None:
        """How the groups are gathered and reduced from now on; see `fully_shard`."""
        transport = get_communication(communication, self._fsdp.platform)
        for group in self._groups(recurse):
            for buffer in group.buffers:
                buffer.communication = transport

    def reset(self) -> None:
        """Back to the resting state after an exception in forward or backward; unreduced gradients are lost."""
        if self._fsdp.context is not None:
            self._fsdp.context.reset()


class UnshardHandle:
    """A gather under way."""

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group

    def wait(self) -> None:
        """Return when the modules hold their full parameters."""
        self._group.unshard()
        if not self._group.exposed:
            self._group.expose()


def register_fsdp_forward_method(module: Module, name: str) -> None:
    """Let `module.<name>(...)`, like its forward, run on gathered parameters.

    Raises:
        FullyShardError: `module` has not been through `fully_shard`, or has no such method.
    """
    state = _state_of(module)
    method = getattr(module, name, None)
    if not callable(method):
        raise FullyShardError(f"register_fsdp_forward_method: {type(module).__name__} has no method {name!r}")

    @functools.wraps(method)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        changed = state.before_forward(module, args, kwargs)
        args, kwargs = changed if changed is not None else (args, kwargs)
        return state.after_forward(module, args, kwargs, method(*args, **kwargs))

    object.__setattr__(module, name, sharded)


def _state_of(module: Module) -> ModuleState:
    state = state_of(module)
    if state is None:
        raise FullyShardError(f"{type(module).__name__} has not been through fully_shard")
    return state
