"""State shared by the forwards and backwards of one model: its groups, the pass and backward under way, reductions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from hp_dtensor.comm.world import current_world
from hp_fsdp._engine.buffer_call_orders import CallOrders
from hp_fsdp._engine.flat_buffer import FlatBuffer, stale_buffers
from hp_fsdp._engine.group import GroupState, ParameterGroup
from hp_fsdp._engine.pass_records import BackwardRun, ForwardPass
from hp_fsdp._engine.prefetch import Prefetcher
from hp_fsdp._engine.reduction import Reducer
from hp_fsdp.exceptions import CallOrderError, FSDPStateError
from hp_fsdp.storage import ParameterStorage

Module = Any


class RootContext:
    """The state of one model between its hooks.

    Attributes:
        root: the group whose forward is a whole pass.
        groups: all groups below the root, its own included.
        orders: the call orders that ranks compare.
        reducer: the reductions under way.
        prefetcher: gathers groups ahead.
        forward_pass: the pass that records what is called now.
        root_module: the module whose forward is the whole pass that runs; None: none does.
        backward: the backward that runs; None: none does.
    """

    def __init__(self, storage: ParameterStorage, root: ParameterGroup, groups: Iterable[ParameterGroup]) -> None:
        self.storage = storage
        self.platform = storage.platform
        self.root = root
        self.groups = list(groups)
        self.orders = CallOrders(buffer.actions for group in self.groups for buffer in group.buffers)
        self.reducer = Reducer()
        self.prefetcher = Prefetcher()
        self.forward_pass = ForwardPass(storage.anchor())
        self.root_module: Module | None = None
        self.backward: BackwardRun | None = None

    def start_pass(self) -> None:
        """Begin a new forward pass, with a chain of gather nodes of its own."""
        self.start_chain()
        self.prefetcher.start_pass()

    def start_chain(self) -> None:
        """Begin a new chain of gather nodes; prefetching goes on where it was."""
        self.forward_pass.end()
        self.forward_pass = ForwardPass(self.storage.anchor())

    def check_order(self, timeout_seconds: float | None = None) -> None:
        """Wait for the comparison of call orders that is under way.

        Args:
            timeout_seconds: go on after so long, and look later; None: wait for it.

        Raises:
            CallOrderError: ranks have called different modules; everything has been reset.
        """
        try:
            self.orders.check(timeout_seconds)
        except CallOrderError:
            # What is gathered and what waits for a reduction may be other modules' data.
            self.reset()
            # What is gathered ahead would be different, too.
            self.prefetcher.expect_nothing()
            raise

    def finish_reading(self) -> None:
        """Wait until the device has read shards on the host, which may be written after a forward or a backward."""
        for group in self.groups:
            for buffer in group.buffers:
                buffer.gathering.finish_reading()

    def finish_reductions(self) -> None:
        """Wait for all reductions under way; the gradients are then there."""
        self.reducer.drain(self.check_order)
        if self.backward is None:
            self.reducer.run_gradient_hooks()

    def gather_stale(self, groups: Sequence[ParameterGroup]) -> None:
        """Gather again what these groups have kept whole since parameters changed, by whomever, on any rank."""
        for group in groups:
            group.wait_for_unshard()
        held = [group for group in groups if group.state is GroupState.UNSHARDED]
        stale = stale_buffers(self.storage, [buffer for group in held for buffer in group.buffers]) if held else set()
        self._check_accumulated(groups, [buffer for buffer in stale if buffer.gathering.keeps_full])
        for group in held:
            group.gather_again([buffer for buffer in group.buffers if buffer in stale])

    def _check_accumulated(self, groups: Sequence[ParameterGroup], stale: Collection[FlatBuffer]) -> None:
        """Raise if parameters were changed while gradients waited; of `stale` ones all ranks know that together."""
        if not self.platform.is_grad_enabled():
            return
        late = [
            group.name
            for group in groups
            if any(
                buffer.gradients.are_out_of_date or (buffer.gradients.are_waiting and buffer in stale)
                for buffer in group.buffers
            )
        ]
        if late:
            rank = current_world(self.platform).rank
            raise FSDPStateError(
                f"rank {rank}: the parameters of {', '.join(late)} were changed while gradients that backward had "
                "accumulated waited for their reduction; the step was taken without them, by this rank or one with "
                "which it shares these parameters. Call set_requires_gradient_sync(True) (and "
                "set_requires_all_reduce(True)) before the last backward of a step, or reset() to drop them"
            )

    def reset(self) -> None:
        """Return to the resting state after an exception in forward or backward; unreduced gradients are lost."""
        self.reducer.drop()
        self.backward = None
        self.root_module = None
        for group in self.groups:
            group.is_held = False
            group.use_sharded()
            group.reshard()
            group.use = None
            for buffer in group.buffers:
                buffer.gradients.forget()
        self.start_pass()
