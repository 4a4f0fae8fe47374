"""`FSDPModule`: the methods that `fully_shard` adds to a module."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from hp_fsdp._argument_checks import checked_factor, checked_flag, reshard_problems, reshard_size
from hp_fsdp._engine.fsdp_state import FSDPState, states_below
from hp_fsdp._engine.gathered_step import GatheredStep
from hp_fsdp._engine.group import ParameterGroup
from hp_fsdp._engine.original_parameters import STATE_ATTRIBUTE
from hp_fsdp._sharded_modules import groups_of
from hp_fsdp._torch_methods import TorchMethods
from hp_fsdp.communication import Communication
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.plugins import get_communication
from hp_fsdp.state.model_state import sharded_parameters
from hp_fsdp.state.options import IncompatibleKeys, StateDictOptions
from hp_fsdp.state.state_dict import set_model_state_dict

Tensor = Any
Module = Any


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
