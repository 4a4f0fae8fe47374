"""`FSDPModule`, the methods that `fully_shard` adds to a module, and the functions that take sharded modules."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import CapabilityError
from hp_fsdp._engine.forward import ORIGINAL_CLASS, FSDPState, groups_below, original_class, state_of, states_below
from hp_fsdp._engine.gathered_step import GatheredStep
from hp_fsdp._engine.param_group import ParameterGroup
from hp_fsdp._engine.parameters import STATE_ATTRIBUTE, normalize_reshard_size, reshard_problems
from hp_fsdp._model_state import sharded_parameters
from hp_fsdp.communication import Communication
from hp_fsdp.exceptions import FullyShardError, StateDictError
from hp_fsdp.plugins import get_communication
from hp_fsdp.state_dict import IncompatibleKeys, StateDictOptions, get_model_state_dict, set_model_state_dict

Tensor = Any
Module = Any

# Why some methods of torch's class are refused, and what to do instead.
_NO_TORCH_GROUP = (
    "it would be given a process group of torch, which other platforms lack; derive from hp_fsdp.Communication, "
    "override all_gather or reduce_scatter, and call set_communication(...)"
)
_NO_STAGING = (
    "gathers and reductions use the parameters' and gradients' own buffers, without staging buffers; derive from "
    "hp_fsdp.Communication to communicate through memory of another allocator, and call set_communication(...)"
)
_ONE_GROUP = (
    "there is one process group per mesh axis, whose order of collectives is compared between ranks; derive from "
    "hp_fsdp.Communication, whose reduce_scatter may use another group, and call set_communication(...)"
)


class FSDPModule:
    """Mixin of the class of every sharded module. It has the methods of torch's `FSDPModule`.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     model.set_requires_gradient_sync(False)  # accumulate micro-batches
        ...     return isinstance(model, FSDPModule)
        >>> run_ranks(program, 2)[0]
        True
    """

    @property
    def _fsdp(self) -> FSDPState:
        state: FSDPState = self.__dict__[STATE_ATTRIBUTE]
        return state

    def _groups(self, recurse: bool) -> list[ParameterGroup]:
        return groups_below(self._fsdp.platform, self) if recurse else [self._fsdp.group]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state: FSDPState = self.__dict__[STATE_ATTRIBUTE]
        return state.call(self, super().__call__, args, kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(f"{type(self).__name__}: a sharded module cannot be copied; copy it before fully_shard")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__}: a sharded module cannot be pickled or copied; save get_model_state_dict(...) of it"
        )

    # Parameters ------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the group's parameters and set them on the modules.

        Args:
            async_op: return a handle at once, whose `wait` completes it.
        """
        group = self._fsdp.group
        group.sync_moved_parameters()
        group.check_initialized()
        group.start_unshard()
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the group's full parameters and set the sharded ones on the modules.

        Raises:
            FSDPStateError: called inside of the forward of one of the modules.
        """
        group = self._fsdp.group
        if not group.in_forward:
            group.use_sharded()
        group.reshard()

    def gather_for_step(self) -> GatheredStep:
        """Gather all parameters below this module once, for a step of several forwards and backwards.

        Settings of when gradients are reduced and parameters resharded do not apply in the step. See `GatheredStep`.

        Raises:
            FSDPStateError: called inside of a forward, a backward, or another such step.
        """
        return GatheredStep(self._fsdp.schedule_of_root().context)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the framework's own state dict. Its DTensors share the memory of the sharded parameters."""
        # Modules may hold unsharded parameters now, as in a forward or after `unshard`.
        with sharded_parameters(self._fsdp.platform, self):
            return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Load DTensors of any layout, full tensors, or this rank's shards; see `set_model_state_dict`.

        Every rank calls it. Values are copied, also into parameters that were on the meta device before `fully_shard`,
        and also with `assign`: sharded parameters must stay views of their buffer.

        Raises:
            StateDictError: on every rank. Nothing has been changed.
        """
        return set_model_state_dict(self, state_dict, options=StateDictOptions(strict=strict))

    def reset(self) -> None:
        """Return to the resting state at once, and drop gradients that are pending for a reduction.

        It is never required: a forward that raises resets itself, and after a backward that raises the next forward
        does.
        """
        states = states_below(self._fsdp.platform, self)
        for schedule in dict.fromkeys(state.schedule for state in states):
            if schedule is not None:
                schedule.context.reset()
        for group in (state.group for state in states if state.schedule is None):
            group.use_sharded()
            group.reshard()

    def reset_iter_state(self) -> None:
        """Do the same as `reset`. This is torch's name."""
        self.reset()

    # When parameters are gathered and freed --------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Free full parameters after forward, retain them, or shard them over a number of ranks; see `fully_shard`.

        Raises:
            FullyShardError: a group's `zero_stage` retains its parameters, or the number does not divide its shard
                axis.
        """
        groups = self._groups(recurse)
        problems = [
            f"group {group.name} of zero_stage={group.settings.zero_stage} retains its full parameters"
            for group in groups
            if reshard_after_forward and group.settings.retains_full
        ]
        for group in groups:
            for num_shards in group.shard_counts:
                wrong = reshard_problems(reshard_after_forward, num_shards)
                problems += [f"group {group.name}: {problem}" for problem in wrong]
        if problems:
            raise FullyShardError(f"set_reshard_after_forward({reshard_after_forward!r}): " + "; ".join(problems))
        for group in groups:
            group.settings.reshard_after_forward = normalize_reshard_size(
                reshard_after_forward, max(group.shard_counts, default=1)
            )

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: retain full parameters after a backward that does not reduce. One that reduces always frees them."""
        wanted = _flag("set_reshard_after_backward", reshard_after_backward)
        for group in self._groups(recurse):
            group.settings.reshard_after_backward = wanted

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: do not gather this module's own group for backward. For modules whose backward reads no parameters.

        An embedding is such a module. If backward reads them after all, torch raises a RuntimeError: their storage has
        been released. Platforms that would silently compute with freed memory (MindSpore) ignore the setting.
        """
        self._fsdp.group.settings.unshard_in_backward = _flag("set_unshard_in_backward", unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[Module]) -> None:
        """Prefetch the groups of these modules in this one's forward, instead of the next ones in recorded order."""
        self._fsdp.group.forward_prefetch = _groups_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Module]) -> None:
        """Prefetch the groups of these modules in this one's backward, instead of those before it in recorded order."""
        self._fsdp.group.backward_prefetch = _groups_of("set_modules_to_backward_prefetch", modules)

    def set_prefetch_order(self, name: Hashable) -> None:
        """From the next forward on, prefetch in the order of the last forward that had this name.

        For a module whose forwards alternate between different parts of it, such as the stages of a pipeline. Without
        names each forward would prefetch the groups of the previous one.
        """
        self._fsdp.schedule_of_root().context.prefetcher.order_name = name

    def set_buffers_in_flight(
        self, *, gathered_ahead: int | None = None, gradients: int | None = None, recurse: bool = True
    ) -> None:
        """Limit the buffers that are held so that communication and computation overlap.

        Args:
            gathered_ahead: number of groups whose full parameters are gathered before they are needed, in recorded
                order (default 1; 0: none). Lists of modules to prefetch are not limited.
            gradients: number of full gradient buffers, including the one being written, above which a reduction must
                have ended (default 1: a reduction runs during the backward of one further group).

        Raises:
            FullyShardError: not an int, or below 0 or 1.
        """
        problems = [
            f"{name}: expected a number from {least}, got {number!r}"
            for name, number, least in (("gathered_ahead", gathered_ahead, 0), ("gradients", gradients, 1))
            if number is not None and (type(number) is not int or number < least)
        ]
        if problems:
            raise FullyShardError("set_buffers_in_flight: " + "; ".join(problems))
        for group in self._groups(recurse):
            if gathered_ahead is not None:
                group.settings.prefetch_depth = gathered_ahead
            if gradients is not None:
                group.settings.max_gradient_buffers = gradients

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Do the same as `set_buffers_in_flight(gradients=...)`. This is torch's name."""
        self.set_buffers_in_flight(gradients=max_input_buffers, recurse=recurse)

    # How gradients are reduced ---------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """True: backward reduces gradients. False: it accumulates them unsharded, without communication."""
        wanted = _flag("set_requires_gradient_sync", requires_gradient_sync)
        for group in self._groups(recurse):
            group.settings.gradient_sync = wanted

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """True: backward reduces over the replicate axis too. False: the reduced shards accumulate until it does."""
        wanted = _flag("set_requires_all_reduce", requires_all_reduce)
        for group in self._groups(recurse):
            group.settings.reduce.all_reduce = wanted

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: another backward through the same forward follows, which may use parameters that this one does not."""
        wanted = _flag("set_is_last_backward", is_last_backward)
        for group in self._groups(recurse=True):
            group.settings.is_last_backward = wanted

    def set_gradient_scaling_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Multiply every reduced gradient, mean or sum, by `factor` (default 1).

        Raises:
            FullyShardError: the factor is not a positive finite number.
        """
        for group in self._groups(recurse):
            group.settings.reduce.scaling_factor = _factor("set_gradient_scaling_factor", factor)

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divide the sum of gradients over all data-parallel ranks by `factor` (default: the number of ranks)."""
        for group in self._groups(recurse):
            group.settings.reduce.divide_factor = _factor("set_gradient_divide_factor", factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do the same as `set_gradient_divide_factor`. This is an older name in torch."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_op_type(self, op: str, *, recurse: bool = True) -> None:
        """Reduce gradients to their mean ("avg", the default) or sum ("sum"). Resets `set_gradient_divide_factor`."""
        if op not in ("avg", "sum"):
            raise FullyShardError(f"set_reduce_op_type: expected 'avg' or 'sum', got {op!r}")
        for group in self._groups(recurse):
            group.settings.reduce.op = op
            # The default of the new operation applies: the number of ranks for a mean, 1 for a sum.
            group.settings.reduce.divide_factor = None

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with each reduced flat shard of this module's own group. It may write the shard in place.

        The shard has been divided, and reduced over both axes of a 2-D mesh. Hooks run in the order of reductions.

        Raises:
            FullyShardError: not a function; or a stream, because hooks run on the current one.
        """
        if not callable(hook):
            raise FullyShardError(f"set_all_reduce_hook: expected a function of the reduced shard, got {hook!r}")
        if stream is not None:
            raise FullyShardError(
                "set_all_reduce_hook: expected stream=None, because the hook runs on the current stream; use another "
                "stream inside of the hook"
            )
        self._fsdp.group.settings.reduce.hook = hook

    def set_communication(self, communication: str | Communication, *, recurse: bool = True) -> None:
        """Gather and reduce by this `Communication`, or the registered one of this name; see `fully_shard`."""
        communication = get_communication(communication, self._fsdp.platform)
        for group in self._groups(recurse):
            for buffer in group.buffers:
                buffer.communication = communication

    # Methods of torch that need no setting here ----------------------------------------------------------

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accept torch's setting for ranks that use different parameters, which is always supported here.

        Parameters that no rank has used have no gradient either way.
        """
        _flag("set_reduce_scatter_unused_params", reduce_scatter_unused_params)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept torch's setting to communicate sums only and to scale them apart, which is always done here."""
        _flag("set_force_sum_reduction_for_comms", enable)

    def set_post_optim_event(self, event: Any) -> None:
        """Have the current stream wait for `event`, recorded after the optimizer's step.

        Args:
            event: an object with `wait()`, such as a `torch.Event`.
        """
        if not callable(getattr(event, "wait", None)):
            raise FullyShardError(f"set_post_optim_event: expected an event with wait(), got {event!r}")
        event.wait()

    # Methods of torch that are not supported -------------------------------------------------------------

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refuse torch's `AllGather`, which uses a process group of torch; see `set_communication`."""
        raise _refusal("set_custom_all_gather", _NO_TORCH_GROUP)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refuse torch's `ReduceScatter`, which uses a process group of torch; see `set_communication`."""
        raise _refusal("set_custom_reduce_scatter", _NO_TORCH_GROUP)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refuse staging buffers from the process group's allocator: there are no staging buffers here."""
        if _flag("set_allocate_memory_from_process_group_for_comm", enable):
            raise _refusal("set_allocate_memory_from_process_group_for_comm", _NO_STAGING)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse staging buffers in symmetric memory: there are no staging buffers here."""
        raise _refusal("set_symm_mem_for_comm", _NO_STAGING)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Refuse a second process group for reductions; see `set_communication`."""
        if _flag("set_separate_reduce_scatter_group", enable):
            raise _refusal("set_separate_reduce_scatter_group", _ONE_GROUP)


HSDPModule = FSDPModule


class UnshardHandle:
    """Handle of a running gather, returned by `unshard(async_op=True)`.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     handle = model.unshard(async_op=True)
        ...     handle.wait()
        ...     model.reshard()
        ...     return tuple(model.weight.shape)
        >>> run_ranks(program, 2)[0]
        (6, 4)
    """

    def __init__(self, group: ParameterGroup) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait for the gather, and set the full parameters on the modules."""
        self._group.unshard()
        if not self._group.uses_unsharded:
            self._group.use_unsharded()


def share_comm_ctx(modules: Sequence[Module]) -> None:
    """Accept torch's call for roots that are to share streams. Here all models on a device share them anyway.

    Raises:
        FullyShardError: a module has not been through `fully_shard`.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     with nn.building(platform):
        ...         models = [fully_shard(nn.Linear(4, 4), mesh) for _ in range(2)]
        ...     share_comm_ctx(models)
        >>> run_ranks(program, 2)
        [None, None]
    """
    _groups_of("share_comm_ctx", modules)


def register_fsdp_forward_method(module: Module, method_name: str) -> None:
    """Let `module.<method_name>(...)` run on gathered parameters, like its forward.

    Raises:
        FullyShardError: `module` has not been through `fully_shard` or has no such method, or the method is a generator
            or coroutine, whose body runs after the call has returned.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     register_fsdp_forward_method(model, "forward")  # or any other method that computes
        >>> run_ranks(program, 2)[0]
        None
    """
    state = _state_of_sharded(module)
    method = getattr(module, method_name, None)
    if not callable(method):
        raise FullyShardError(f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}")
    run_later = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    if any(is_kind(method) for is_kind in run_later):
        raise FullyShardError(
            f"register_fsdp_forward_method: {type(module).__name__}.{method_name} is a generator or a coroutine, whose "
            "body runs after the call has returned; register the methods that it calls"
        )

    @functools.wraps(method)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        return state.call(module, method, args, kwargs)

    # Not by the framework's own `__setattr__`, which is for parameters and modules.
    object.__setattr__(module, method_name, sharded)


# The class of a sharded module ---------------------------------------------------------------------------


@functools.cache
def with_methods(cls: type, mixin: type | None = None) -> type:
    """Return a subclass of `cls` with the methods of `mixin` (default: `FSDPModule`), such as FSDPLinear of Linear."""
    mixin = mixin or FSDPModule
    if issubclass(cls, mixin):
        return cls
    namespace: dict[str, Any] = {"__module__": cls.__module__, ORIGINAL_CLASS: original_class(cls)}
    # A slice of a sharded `Sequential` is a plain `Sequential`, which holds the sharded modules themselves. Classes
    # that users derive from `FSDPModule` make their own instances.
    namespace["__new__"] = lambda new_class, *args, **kwargs: original_class(new_class)(*args, **kwargs)
    if callable(getattr(cls, "save_pretrained", None)):
        namespace["save_pretrained"] = _sharded_save_pretrained(cls)
    # The mixin comes first, so that its `__call__` and `state_dict` wrap those of the module. The name starts with FSDP
    # or HSDP.
    return type(f"{mixin.__name__[:4]}{cls.__name__}", (mixin, cls), namespace)


def _sharded_save_pretrained(cls: Any) -> Callable[..., None]:
    """Return `save_pretrained` of a transformers model for its sharded form: rank 0 writes the full parameters."""

    @functools.wraps(cls.save_pretrained)
    def save_pretrained(
        self: Any,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = get_model_state_dict(self, options=options) if state_dict is None else state_dict
        # Every rank has taken part in the gathers. Rank 0 writes, and reports an error to the others.
        world = current_world(self._fsdp.platform)
        problem: Exception | None = None
        if world.rank == 0:
            try:
                cls.save_pretrained(self, save_directory, is_main_process=True, state_dict=full, **kwargs)
            except Exception as error:  # reported to the other ranks, which would wait
                problem = error
        # With its class: an error may have no message.
        report = "" if problem is None else f"{type(problem).__name__}: {problem}"
        reports = world.group(tuple(range(world.size))).all_gather_bytes(report.encode())
        if problem is not None:
            raise problem
        if reports[0]:
            raise StateDictError(f"save_pretrained: rank 0 could not save: {reports[0].decode()}")

    return save_pretrained


# Arguments -----------------------------------------------------------------------------------------------


def _groups_of(method: str, modules: Sequence[Module]) -> list[ParameterGroup]:
    """Return the groups of sharded modules that were passed to `method`, or raise `FullyShardError`."""
    if not isinstance(modules, (list, tuple)):
        raise FullyShardError(f"{method}: expected a list of modules, got {type(modules).__name__}")
    return [_state_of_sharded(module).group for module in modules]


def _state_of_sharded(module: Module) -> FSDPState:
    """Return the state that `fully_shard` has set on a module, or raise `FullyShardError`."""
    state = state_of(module)
    if state is None:
        raise FullyShardError(f"{type(module).__name__} has not been through fully_shard")
    return state


def _flag(method: str, flag: bool) -> bool:
    """Return `flag` if it is a bool, else raise `FullyShardError`."""
    if not isinstance(flag, bool):
        raise FullyShardError(f"{method}: expected a bool, got {flag!r}")
    return flag


def _factor(method: str, factor: float) -> float:
    """Return `factor` if it is positive and finite, else raise `FullyShardError`."""
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise FullyShardError(f"{method}: expected a positive finite number, got {factor!r}")
    return float(factor)


def _refusal(method: str, why: str) -> CapabilityError:
    return CapabilityError(f"{method}: {why}")
