"""Modules that have been through `fully_shard`, as methods and functions are given them.

Methods of torch's `FSDPModule` that are older names here, do nothing, or are refused with the way that there is.

`FSDPModule`: the methods that `fully_shard` adds to a module.

`register_fsdp_forward_method`: methods beside forward that run on gathered parameters.

The class of a sharded module: its own class, with the methods of `FSDPModule`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import CapabilityError
from hp_fsdp._argument_checks import checked_factor, checked_flag, reshard_problems, reshard_size
from hp_fsdp._engine.forward import ORIGINAL_CLASS, FSDPState, original_class, state_of, states_below
from hp_fsdp._engine.gathered_step import GatheredStep
from hp_fsdp._engine.param_group import ParameterGroup
from hp_fsdp._engine.parameters import STATE_ATTRIBUTE
from hp_fsdp._model_state import sharded_parameters
from hp_fsdp.communication import Communication
from hp_fsdp.exceptions import FullyShardError, StateDictError
from hp_fsdp.plugins import get_communication
from hp_fsdp.state_dict import IncompatibleKeys, StateDictOptions, get_model_state_dict, set_model_state_dict

Module = Any


def groups_of(method: str, modules: Sequence[Module]) -> list[ParameterGroup]:
    """Return the groups of sharded modules that were given to `method`, or raise `FullyShardError`."""
    if not isinstance(modules, (list, tuple)):
        raise FullyShardError(f"{method}: expected a list of modules, got {type(modules).__name__}")
    return [state_of_sharded(module).group for module in modules]


def state_of_sharded(module: Module) -> FSDPState:
    """Return the state that `fully_shard` gave a module, or raise `FullyShardError`."""
    state = state_of(module)
    if state is None:
        raise FullyShardError(f"{type(module).__name__} has not been through fully_shard")
    return state


Tensor = Any

_OUR_COMMUNICATION = (
    "it would be given a process group of torch, which other platforms lack; derive from hp_fsdp.Communication, "
    "override all_gather or reduce_scatter, and call set_communication(...)"
)
_NO_STAGING = (
    "gathers and reductions use the parameters' and gradients' own buffers, without staging buffers; derive from "
    "hp_fsdp.Communication to communicate through memory of another allocator, and call set_communication(...)"
)
_ONE_GROUP = (
    "ranks meet in one process group per mesh axis, whose order of collectives is compared; derive from "
    "hp_fsdp.Communication, whose reduce_scatter may use another group, and call set_communication(...)"
)


def _refused(method: str, why: str) -> CapabilityError:
    return CapabilityError(f"{method}: {why}")


class TorchMethods:
    """Mixin of `FSDPModule`, so that programs written for torch's class find every method of it."""

    _fsdp: Any
    reset: Callable[[], None]
    set_gradient_divide_factor: Callable[..., None]
    set_buffers_in_flight: Callable[..., None]

    def reset_iter_state(self) -> None:
        """Return to the resting state after an exception, torch's name of `reset`."""
        self.reset()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by `factor`, torch's older name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Limit full gradient buffers in flight, torch's name of `set_buffers_in_flight(gradients=...)`."""
        self.set_buffers_in_flight(gradients=max_input_buffers, recurse=recurse)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accept torch's setting for ranks that use different parameters, which may always do so here.

        Parameters that no rank has used have no gradient either way.
        """
        checked_flag("set_reduce_scatter_unused_params", reduce_scatter_unused_params)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accept torch's setting to reduce by sums only, and to scale apart from that, as is always done here."""
        checked_flag("set_force_sum_reduction_for_comms", enable)

    def set_post_optim_event(self, event: Any) -> None:
        """Wait for `event`, recorded after the optimizer's step, before what follows, gathers among it.

        Args:
            event: with `wait()`, such as a `torch.Event`.
        """
        if not callable(getattr(event, "wait", None)):
            raise FullyShardError(f"set_post_optim_event: expected an event with wait(), got {event!r}")
        event.wait()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: do not gather this module's own group for backward, which needs none of its values (an embedding).

        Where it needs them after all, backward raises `FSDPStateError`. On platforms that would compute with freed
        memory without a word (MindSpore), the group is gathered nevertheless.
        """
        self._fsdp.group.settings.unshard_in_backward = checked_flag("set_unshard_in_backward", unshard_in_backward)

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` with each reduced flat shard of this module's own group, which it may write in place.

        The shard has been divided, and reduced over both axes of a 2-D mesh. Hooks run in the order of reductions.

        Raises:
            FullyShardError: no function, or a stream: hooks run on the current one.
        """
        if not callable(hook):
            raise FullyShardError(f"set_all_reduce_hook: expected a function of the reduced shard, got {hook!r}")
        if stream is not None:
            raise FullyShardError(
                "set_all_reduce_hook: expected stream=None, because the hook runs on the current stream; let the hook "
                "itself use another one"
            )
        self._fsdp.group.settings.reduce.hook = hook

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refuse torch's `AllGather`, which uses a process group of torch; see `set_communication`."""
        raise _refused("set_custom_all_gather", _OUR_COMMUNICATION)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refuse torch's `ReduceScatter`, which uses a process group of torch; see `set_communication`."""
        raise _refused("set_custom_reduce_scatter", _OUR_COMMUNICATION)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refuse staging buffers from the process group's allocator: there are no staging buffers here."""
        if checked_flag("set_allocate_memory_from_process_group_for_comm", enable):
            raise _refused("set_allocate_memory_from_process_group_for_comm", _NO_STAGING)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refuse staging buffers in symmetric memory: there are no staging buffers here."""
        raise _refused("set_symm_mem_for_comm", _NO_STAGING)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Refuse a second process group for reductions; see `set_communication`."""
        if checked_flag("set_separate_reduce_scatter_group", enable):
            raise _refused("set_separate_reduce_scatter_group", _ONE_GROUP)


class FSDPModule(TorchMethods):
    """Mixin of the class of every module that has been through `fully_shard`; names as torch's `FSDPModule`.

    Example:
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp.run(self, super().__call__, args, kwargs)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError(f"{type(self).__name__}: a sharded module cannot be copied; copy it before fully_shard")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{type(self).__name__}: a sharded module cannot be pickled or copied; save get_model_state_dict(...) of it"
        )

    def _groups(self, recurse: bool) -> list[ParameterGroup]:
        states = states_below(self._fsdp.platform, self) if recurse else [self._fsdp]
        return [state.group for state in states]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the group's parameters and put them into the modules.

        Args:
            async_op: return at once; the handle's `wait` does the rest.
        """
        group = self._fsdp.group
        group.attach()
        group.check_filled()
        group.start_unshard()
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

    def gather_for_step(self) -> GatheredStep:
        """Gather everything below this module once, for a step of several forwards and backwards; see `GatheredStep`.

        Settings of when gradients are reduced and parameters resharded have no meaning meanwhile.

        Raises:
            FSDPStateError: within a forward, a backward, or another such step.
        """
        return self._fsdp.schedule_of_root().gather_for_step()

    def reshard(self) -> None:
        """Free the group's full parameters and put the sharded ones back into the modules.

        Raises:
            FSDPStateError: within the forward of one of them.
        """
        group = self._fsdp.group
        if not group.in_forward:
            group.use_sharded()
        group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """True: backward reduces gradients; False: it accumulates them unsharded, without communication."""
        wanted = checked_flag("set_requires_gradient_sync", requires_gradient_sync)
        for group in self._groups(recurse):
            group.settings.gradient_sync = wanted

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """True: backward reduces over the replicate axis too; False: what is reduced over the shard axis waits."""
        wanted = checked_flag("set_requires_all_reduce", requires_all_reduce)
        for group in self._groups(recurse):
            group.settings.reduce.all_reduce = wanted

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: another backward through the same forward follows, which may use parameters that this one does not."""
        wanted = checked_flag("set_is_last_backward", is_last_backward)
        for group in self._groups(recurse=True):
            group.settings.is_last_backward = wanted

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """Free full parameters after forward, keep them, or keep them over a number of ranks; see `fully_shard`.

        Raises:
            FullyShardError: a group's `zero_stage` keeps its parameters, or its shard axis has no such part.
        """
        groups = self._groups(recurse)
        problems = [
            f"group {group.name} of zero_stage={group.settings.zero_stage} keeps its full parameters"
            for group in groups
            if reshard_after_forward and group.settings.keeps_full
        ]
        for group in groups:
            for num_shards in group.shard_counts:
                wrong = reshard_problems(reshard_after_forward, num_shards)
                problems += [f"group {group.name}: {problem}" for problem in wrong]
        if problems:
            raise FullyShardError(f"set_reshard_after_forward({reshard_after_forward!r}): " + "; ".join(problems))
        for group in groups:
            group.settings.reshard_after_forward = reshard_size(
                reshard_after_forward, max(group.shard_counts, default=1)
            )

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """False: keep full parameters after a backward that does not reduce; one that reduces always frees them."""
        wanted = checked_flag("set_reshard_after_backward", reshard_after_backward)
        for group in self._groups(recurse):
            group.settings.reshard_after_backward = wanted

    def set_modules_to_forward_prefetch(self, modules: Sequence[Module]) -> None:
        """Gather these modules' groups before this one's forward, instead of the next in recorded order."""
        self._fsdp.group.forward_prefetch = groups_of("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Module]) -> None:
        """Gather these modules' groups before this one's backward, instead of the previous in recorded order."""
        self._fsdp.group.backward_prefetch = groups_of("set_modules_to_backward_prefetch", modules)

    def set_prefetch_order(self, name: Hashable) -> None:
        """Gather ahead, from the next forward on, in the order of the last forward that had this name.

        For a module whose forwards take turns at different parts of it, such as the stages of a pipeline: without
        names each would gather ahead what the one before has used.
        """
        self._fsdp.schedule_of_root().name_prefetch_order(name)

    def set_buffers_in_flight(
        self, *, gathered_ahead: int | None = None, gradients: int | None = None, recurse: bool = True
    ) -> None:
        """Limit the buffers that are held for the sake of overlap.

        Args:
            gathered_ahead: groups whose full parameters are gathered before they are needed, in recorded order
                (default 1; 0: none; prefetch lists are taken as they are).
            gradients: buffers of full gradients, including the one being written, before a reduction must have
                finished (default 1: a reduction runs during the backward of one further group).

        Raises:
            FullyShardError: a number that is none, or below 0 or 1.
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

    def set_gradient_scaling_factor(self, factor: float, *, recurse: bool = True) -> None:
        """Multiply every reduced gradient, mean or sum, by `factor`; default 1.

        Raises:
            FullyShardError: a factor that is no positive finite number.
        """
        for group in self._groups(recurse):
            group.settings.reduce.scaling_factor = checked_factor("set_gradient_scaling_factor", factor)

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divide the sum of gradients over all data-parallel ranks by `factor`; default: their number."""
        for group in self._groups(recurse):
            group.settings.reduce.divide_factor = checked_factor("set_gradient_divide_factor", factor)

    def set_reduce_op_type(self, op: str, *, recurse: bool = True) -> None:
        """Reduce gradients by their mean ("avg", the default) or their sum ("sum") over the data-parallel ranks."""
        if op not in ("avg", "sum"):
            raise FullyShardError(f"set_reduce_op_type: expected 'avg' or 'sum', got {op!r}")
        for group in self._groups(recurse):
            group.settings.reduce.op = op
            group.settings.reduce.divide_factor = None

    def set_communication(self, communication: str | Communication, *, recurse: bool = True) -> None:
        """Gather and reduce by a `Communication`, given or by its name, from now on; see `fully_shard`."""
        transport = get_communication(communication, self._fsdp.platform)
        for group in self._groups(recurse):
            for buffer in group.buffers:
                buffer.communication = transport

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the framework's own state dict, of DTensors that share the parameters' memory, always."""
        with sharded_parameters(self._fsdp.platform, self):
            return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Load DTensors of any layout, full tensors or this rank's shards; see `set_model_state_dict`.

        Every rank calls it. Values are copied, also into parameters that were on the meta device before fully_shard,
        and also with `assign`, which is taken because it asks for these values.

        Raises:
            StateDictError: on every rank; nothing has been changed.
        """
        return set_model_state_dict(self, state_dict, options=StateDictOptions(strict=strict))

    def reset(self) -> None:
        """Return to the resting state at once, and drop gradients that wait for a reduction.

        After an exception in backward the next forward does it by itself; one in forward needs nothing.
        """
        states = states_below(self._fsdp.platform, self)
        for schedule in dict.fromkeys(state.schedule for state in states):
            if schedule is not None:
                schedule.reset()
        for group in (state.group for state in states if state.schedule is None):
            group.use_sharded()
            group.reshard()


HSDPModule = FSDPModule


class UnshardHandle:
    """Handle of a gather under way, as `unshard(async_op=True)` returns it.

    Example:
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
        """Return when the modules hold their full parameters."""
        self._group.unshard()
        if not self._group.uses_unsharded:
            self._group.use_unsharded()


def share_comm_ctx(modules: Sequence[Module]) -> None:
    """Accept torch's call for roots that are to share streams: models share those of their device here anyway.

    Raises:
        FullyShardError: a module has not been through `fully_shard`.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     with nn.building(platform):
        ...         models = [fully_shard(nn.Linear(4, 4), mesh) for _ in range(2)]
        ...     share_comm_ctx(models)
        >>> run_ranks(program, 2)
        [None, None]
    """
    groups_of("share_comm_ctx", modules)


_RUN_LATER = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction


def register_fsdp_forward_method(module: Module, method_name: str) -> None:
    """Let `module.<method_name>(...)`, like its forward, run on gathered parameters.

    Raises:
        FullyShardError: `module` has not been through `fully_shard`, has no such method, or it is a generator or a
            coroutine, which computes when the call is over.

    Example:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)))
        ...     register_fsdp_forward_method(model, "forward")  # or any other method that computes
        >>> run_ranks(program, 2)[0]
        None
    """
    state = state_of_sharded(module)
    method = getattr(module, method_name, None)
    if not callable(method):
        raise FullyShardError(f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}")
    if any(runs_later(method) for runs_later in _RUN_LATER):
        raise FullyShardError(
            f"register_fsdp_forward_method: {type(module).__name__}.{method_name} is a generator or a coroutine, which "
            "computes when the call is over; register the methods that it calls"
        )

    def hooked(*args: Any, **kwargs: Any) -> Any:
        changed = state.pre_forward(module, args, kwargs)
        args, kwargs = changed if changed is not None else (args, kwargs)
        return state.post_forward(module, args, kwargs, method(*args, **kwargs))

    @functools.wraps(method)
    def sharded(*args: Any, **kwargs: Any) -> Any:
        return state.run(module, hooked, args, kwargs)

    object.__setattr__(module, method_name, sharded)


@functools.cache
def with_methods(cls: type, mixin: type | None = None) -> type:
    """Return a subclass of `cls` with the methods of `mixin` (default: `FSDPModule`): FSDPLinear of Linear."""
    mixin = mixin or FSDPModule
    if issubclass(cls, mixin):
        return cls
    namespace = {"__module__": cls.__module__, "__new__": _new_original, ORIGINAL_CLASS: original_class(cls)}
    if callable(getattr(cls, "save_pretrained", None)):
        namespace["save_pretrained"] = _saving_whole(cls)
    return type(f"{mixin.__name__[:4]}{cls.__name__}", (mixin, cls), namespace)


def _new_original(cls: type, *args: Any, **kwargs: Any) -> Any:
    """Make a module of the class that was sharded: a slice of a sharded `Sequential` is a plain `Sequential`.

    Its modules are the sharded ones themselves. Classes that users derive from `FSDPModule` make their own instances.
    """
    return original_class(cls)(*args, **kwargs)


def _saving_whole(cls: Any) -> Callable[..., None]:
    """Return `save_pretrained` of transformers' models for one that is sharded: rank 0 writes the whole parameters."""

    @functools.wraps(cls.save_pretrained)
    def save_pretrained(
        self: Any,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(self, options=options) if state_dict is None else state_dict
        # Every rank has taken part in gathering; only rank 0 writes, and the others hear how it went.
        world = current_world(self._fsdp.platform)
        problem: Exception | None = None
        if world.rank == 0:
            try:
                cls.save_pretrained(self, save_directory, is_main_process=True, state_dict=whole, **kwargs)
            except Exception as error:  # told to the other ranks, which would wait
                problem = error
        told = world.group(tuple(range(world.size))).all_gather_bytes(str(problem or "").encode())
        if problem is not None:
            raise problem
        if told[0]:
            raise StateDictError(f"save_pretrained: rank 0 could not save: {told[0].decode()}")

    return save_pretrained
