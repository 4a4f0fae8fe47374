"""Methods of torch's `FSDPModule` that are older names here, do nothing, or are refused with the way that there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.exceptions import CapabilityError
from hp_fsdp._argument_checks import checked_flag
from hp_fsdp.exceptions import FullyShardError

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
