"""The backward of a model: what each group does when autograd reaches it, and the state that forward leaves for it.

Autograd decides when a group is reached. `BackwardSchedule.pre_backward` runs before gradients flow into its modules,
`post_backward` when the gradients of one of its buffers are complete. A loss need not use every group, and two ranks'
losses need not use the same ones, but the collectives of all ranks must match. Two things see to that:

- The *token* (`ForwardPass.token`) connects all gather nodes of a forward to one chain, so that autograd runs all of
  them, in the same order on every rank, also those whose parameters the loss does not use.
- `BackwardSchedule._advance` goes through the events that the forward has recorded, in reverse order, and does what
  this rank's autograd skips: it gathers, and reduces zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.recording import located
from hp_dtensor.spec.rank_checks import is_checking
from hp_fsdp._engine.flat_buffer import FlatBuffer, stale_buffers
from hp_fsdp._engine.param_group import Event, GroupState, ParameterGroup, ParameterUse
from hp_fsdp._engine.prefetch import BackwardRun, ForwardPass, Prefetcher
from hp_fsdp._engine.rank_checks import PATIENCE_SECONDS, CallOrders
from hp_fsdp._engine.reduction import Reducer
from hp_fsdp.exceptions import CallOrderError, FSDPStateError
from hp_fsdp.storage import Gradients

Tensor = Any
Module = Any


# The state of one model ----------------------------------------------------------------------------------


class RootContext:
    """State that the forwards and backwards of one model share.

    Attributes:
        root: the group whose forward is a complete pass.
        groups: all groups below the root, its own included.
        orders: the call orders that ranks compare.
        reducer: the running reductions.
        prefetcher: gathers groups ahead.
        forward_pass: the pass that records what is called now.
        root_module: the module whose forward is the running pass. None: no pass runs.
        backward: the running backward. None: none runs.
    """

    def __init__(self, root: ParameterGroup, groups: Iterable[ParameterGroup]) -> None:
        self.storage = root.storage
        self.platform = root.storage.platform
        self.root = root
        self.groups = list(groups)
        self.orders = CallOrders(buffer.actions for group in self.groups for buffer in group.buffers)
        self.reducer = Reducer()
        self.prefetcher = Prefetcher()
        self.forward_pass = ForwardPass(self.storage.anchor())
        self.root_module: Module | None = None
        self.backward: BackwardRun | None = None
        self._buffers = [buffer for group in self.groups for buffer in group.buffers]
        self._reading_host = [buffer.gathering for buffer in self._buffers if buffer.offload.parameters]
        self._owners = [owner for group in self.groups for owner in group.owners]
        self._synced: list[Any] = []

    def start_pass(self) -> None:
        """Start a new forward pass, with its own chain of gather nodes."""
        self.start_chain()
        self.prefetcher.start_pass()

    def start_chain(self) -> None:
        """Start a new chain of gather nodes. The prefetch cursor stays."""
        self.forward_pass.end()
        self.forward_pass = ForwardPass(self.storage.anchor())

    def sync_moved_parameters(self) -> None:
        """Do the same as `ParameterGroup.sync_moved_parameters` and `check_initialized` for all groups."""
        if self.is_synced:
            return
        for group in self.groups:
            group.sync_moved_parameters()
            group.check_initialized()
        # Unsharded parameters are freed some time, and other objects may then get their ids.
        self._synced = [] if any(group.uses_unsharded for group in self.groups) else self._identify_parameters()

    @property
    def is_synced(self) -> bool:
        """True if no parameter has been replaced, moved or converted since the last `sync_moved_parameters`."""
        return bool(self._synced) and self._identify_parameters() == self._synced

    def _identify_parameters(self) -> list[Any]:
        """Return what identifies the parameters that modules hold, and their memory."""
        with self.platform.local_op():
            dtypes = [x.dtype for buffer in self._buffers for x in buffer.without_memory]
        addresses = self.storage.addresses([x for buffer in self._buffers for x in buffer.in_shard])
        return [*map(id, self.storage.get_parameters(self._owners)), *addresses, *dtypes]

    def check_order(self, timeout_seconds: float | None = None) -> None:
        """Wait for the running comparison of call orders.

        Args:
            timeout_seconds: return after this time without a result, which a later call finds. None: no limit.

        Raises:
            CallOrderError: ranks have called different modules. Everything has been reset.
        """
        try:
            self.orders.check(timeout_seconds)
        except CallOrderError:
            # Gathered parameters and pending gradients may be other modules' data, and so would be prefetched ones.
            self.reset()
            self.prefetcher.expect_nothing()
            raise

    def finish_reading(self) -> None:
        """Wait until the device has read the shards on the host, which the user may write afterwards."""
        for gathering in self._reading_host:
            gathering.finish_reading()

    def finish_reductions(self) -> None:
        """Wait for all running reductions and set the gradients."""
        self.reducer.finish_all(self.check_order)
        # Hooks may take the optimizer's step, so during a backward they are called at its end.
        if self.backward is None:
            self.reducer.run_gradient_hooks()

    def gather_stale(self, groups: Sequence[ParameterGroup]) -> None:
        """Gather again the full parameters of these groups that any rank has changed since they were gathered."""
        # A running gather reads the shards. They are compared only when it has ended.
        for group in groups:
            if group.state is GroupState.GATHERING:
                group.wait_for_unshard()
        held = [group for group in groups if group.state is GroupState.UNSHARDED]
        stale = stale_buffers(self.storage, [buffer for group in held for buffer in group.buffers]) if held else set()
        self._check_accumulated(groups, [buffer for buffer in stale if buffer.gathering.retains_full])
        for group in held:
            group.regather([buffer for buffer in group.buffers if buffer in stale])

    def _check_accumulated(self, groups: Sequence[ParameterGroup], stale: Collection[FlatBuffer]) -> None:
        """Raise if parameters were changed while their gradients were pending. All ranks agree on `stale` ones."""
        if not self.platform.is_grad_enabled():
            return
        buffers = [(group.name, buffer) for group in groups for buffer in group.buffers]
        pending = [(name, each) for name, each in buffers if each.gradients.are_pending]
        late = dict.fromkeys(n for n, each in pending if each.versions.written_since_accumulation or each in stale)
        if late:
            rank = current_world(self.platform).rank
            raise FSDPStateError(
                f"rank {rank}: the parameters of {', '.join(late)} were changed while gradients that backward had "
                "accumulated were pending for their reduction; the step was taken without them, by this rank or one "
                "with which it shares these parameters. Call set_requires_gradient_sync(True) (and "
                "set_requires_all_reduce(True)) before the last backward of a step, or reset() to drop them"
            )

    def reset(self) -> None:
        """Return to the resting state, after an exception in forward or backward. Unreduced gradients are dropped."""
        self.reducer.reset()
        self.backward = None
        self.root_module = None
        for group in self.groups:
            group.in_gathered_step = False
            # Before `reshard`, which raises while modules hold unsharded parameters.
            group.use_sharded()
            group.reshard()
            group.use = None
            for buffer in group.buffers:
                buffer.gradients.drop()
        self.start_pass()


# The schedule --------------------------------------------------------------------------------------------


class BackwardSchedule:
    """Acts when autograd reaches a group, when it has finished with a group, and when it ends."""

    def __init__(self, context: RootContext) -> None:
        self._context = context
        self._platform = context.platform

    def current_run(self) -> BackwardRun:
        """Return the running backward, creating its record on the first call of this backward."""
        context = self._context
        # Autograd calls the callback at the end of a backward only if it succeeds. A failed one is noticed here, by the
        # next backward.
        if context.backward is not None and context.backward.end() is None:
            context.reset()
        if context.backward is None:
            # Ranks that have called other modules must raise before collectives of this backward wait for each other.
            context.check_order(PATIENCE_SECONDS)
            end = located(self._end)
            context.backward = BackwardRun(self._platform.is_for_parameters(), end)
            context.storage.at_end_of_backward(end)
        return context.backward

    def pre_backward(self, group: ParameterGroup, forward_pass: ForwardPass | None) -> None:
        """Unshard a group before gradients flow into its modules. Called by a hook on the gradients of its outputs."""
        run = self.current_run()
        # Every output of the group's modules has the hook. Only the first call gathers.
        if (group, forward_pass) in run.reached:
            return
        if forward_pass is not None:
            self._advance(run, forward_pass, group.end_event)
        self._unshard(run, group, forward_pass)

    def post_backward(self, group: ParameterGroup, use: ParameterUse, buffer: FlatBuffer, grads: Gradients) -> None:
        """Collect the complete gradients of a buffer, and start to reduce them. Called by the buffer's gather node.

        If this rank's loss does not use the group, the token still has autograd call this, without gradients.
        """
        forward_pass = use.forward_pass
        assert forward_pass is None or isinstance(forward_pass, ForwardPass)
        run = self.current_run()
        run.start_use(use)
        if buffer not in use.pending and all(grad is None for grad in grads):
            return  # `_advance` has reduced zeros already
        if (group, forward_pass) not in run.reached:
            # Autograd has not passed an output of the group (a loss on its parameters alone), so that no hook has
            # called `pre_backward`.
            self.pre_backward(group, forward_pass)
        # Before anything is reduced: the gradients would be wrong on every rank.
        if changed := use.changed_parameters(buffer, grads):
            raise FSDPStateError(
                f"{group.where}: {', '.join(changed)}: changed between a forward and its backward, by "
                "optimizer.step() or otherwise: the gradients would belong to other values. Run the backward of every "
                "loss before the step, or the forward again after it"
            )
        if forward_pass is not None:
            self._advance(run, forward_pass, group.start_event)
        self._collect_and_reduce(run, group, use, buffer, grads)

    def post_backward_frozen(self, group: ParameterGroup, forward_pass: ForwardPass) -> None:
        """Free a group without trainable parameters when backward has finished with the last of its calls."""
        run = self.current_run()
        key = group, forward_pass
        run.frozen_calls[key] = run.frozen_calls.get(key, 0) + 1
        # If the loss does not use it, the group may have been prefetched. `_advance` will free it.
        if run.frozen_calls[key] == forward_pass.frozen_calls[group] and key in run.reached:
            self._reshard(group)

    # One group -------------------------------------------------------------------------------------------

    def _advance(self, run: BackwardRun, forward_pass: ForwardPass, until: Event | None) -> None:
        """Go through the events of a pass up to `until`, and do for each what this rank's autograd has skipped.

        Invariant: every rank takes every event of a pass once, in the reverse of the forward's order. The collectives
        of an event (a gather at a group's end, reductions at its start) are started when it is taken, or by the caller
        right after it. So collectives match, whatever part of the model each rank's loss uses.

        Args:
            until: the event that the caller handles itself. Nothing happens if it has been taken. None: all events.
        """
        remaining = run.remaining.get(forward_pass)
        if remaining is None:
            forward_pass.check_conversions(self._context.is_synced)
            remaining = run.remaining[forward_pass] = forward_pass.events.copy()
        if until is not None and until not in remaining:
            return
        while remaining:
            # From the last recorded: autograd runs nodes in the reverse order of the forward, and the token makes that
            # order the same on all ranks.
            event, use = remaining.popitem()
            group = event.group
            if event == until:
                return
            if event.is_end:
                if group in forward_pass.reachable:
                    self._unshard(run, group, forward_pass)
            elif not self._context.root.settings.is_last_backward:
                continue  # another backward may still use it
            elif use is None:
                self._reshard(group)
            else:
                self._reduce_zeros(run, group, use, forward_pass)

    def _reduce_zeros(
        self, run: BackwardRun, group: ParameterGroup, use: ParameterUse, forward_pass: ForwardPass
    ) -> None:
        """Join the reductions of a group that this rank's loss does not depend on, contributing zeros."""
        run.start_use(use)
        if use.pending and (group, forward_pass) not in run.reached:
            # This backward runs inside of the group's forward, which has a start event and no end event yet.
            self._unshard(run, group, forward_pass)
        # In the order in which autograd runs their nodes on other ranks.
        for buffer in reversed(use.pending.copy()):
            self._collect_and_reduce(run, group, use, buffer, [None] * len(use.indices[buffer]))

    def _unshard(self, run: BackwardRun, group: ParameterGroup, forward_pass: ForwardPass | None) -> None:
        run.reached.add((group, forward_pass))
        # Without waiting: a disagreement that has arrived by now is raised before further collectives are started.
        if self._context.orders.is_comparing:
            self._context.check_order(0)
        if is_checking():
            group.check_same_action("starts the backward of")
        if group.settings.unshard_in_backward or not self._context.storage.refuses_released:
            group.unshard()
            # A recomputation reads the parameters from the modules.
            if not group.uses_unsharded:
                group.use_unsharded()
        if forward_pass is not None:
            self._context.prefetcher.prefetch_backward(group, forward_pass, run)

    def _collect_and_reduce(
        self, run: BackwardRun, group: ParameterGroup, use: ParameterUse, buffer: FlatBuffer, grads: Gradients
    ) -> None:
        """Free the group, collect a buffer's gradients, and start to reduce them unless they are to accumulate."""
        reducer, settings = self._context.reducer, group.settings
        # Wait for older reductions before memory for more gradients is allocated, which bounds what is held at once.
        # Accumulated gradients have their memory already. For them this frees memory as the backward proceeds.
        reducer.limit_in_flight(settings.max_gradient_buffers)
        if buffer in use.pending:
            use.pending.remove(buffer)
        if not use.pending:
            # A later forward may have made another use already.
            if group.use is use:
                group.use = None
            # A gradient may share memory with the full buffer. It is copied before that memory is freed.
            for each in group.buffers:
                grads = each.gradients.copy_if_aliased(each.gathering.releasable, grads)
            self._reshard(group)
        # A backward to inputs alone frees memory like any other, but collects no gradients of parameters.
        if not run.is_for_parameters:
            return
        # Full gradients are allocated after the full parameters are freed: the two never coexist.
        buffer.gradients.collect(use.indices[buffer], grads)
        if not settings.gradient_sync:
            buffer.versions.mark_accumulation()
        if settings.gradient_sync or settings.shards_every_gradient:
            if is_checking():
                group.check_same_action("reduces the gradients of")
            reducer.start(group, buffer, settings.reduce, settings.gradient_sync)

    def _reshard(self, group: ParameterGroup) -> None:
        """Free a group's full parameters after its backward, unless its forward continues around this backward."""
        if group.in_forward and self._is_computing(group):
            return
        group.use_sharded()
        if group.settings.reshard_after_backward and not group.settings.retains_full:
            group.reshard()

    def _is_computing(self, group: ParameterGroup) -> bool:
        """Return True if this backward runs inside of a forward of the group, which may differentiate its output."""
        # `in_forward` is also true after a forward whose other modules have not been called.
        return group.in_forward and (self._context.root_module is not None or bool(group.running))

    # The end of a backward -------------------------------------------------------------------------------

    def _end(self) -> None:
        """Complete the backward. Autograd calls this at its end."""
        context, run = self._context, self._context.backward
        if run is None:
            return
        is_last_backward = context.root.settings.is_last_backward
        if is_last_backward:
            # The token does not reach everything: frozen groups at the start have no gather nodes, and a loss may
            # bypass the output of the root.
            for forward_pass in run.remaining:
                self._advance(run, forward_pass, until=None)
            self._reduce_pending(run)
        # Ranks compare while the last reductions run. `finish_reductions` waits for it before it sets gradients.
        context.orders.start_comparing("backward")
        if not context.root.settings.defers_reduction:
            context.finish_reductions()
        for group in context.groups:
            if not (group.in_forward and self._is_computing(group)):
                if group.uses_unsharded or group.in_forward:
                    group.use_sharded()
                if group.state is not GroupState.SHARDED and group.settings.frees_after_backward:
                    group.reshard()
                # The next forward takes what is still unsharded, unless its parameters have been written since.
                group.unsharded_after_forward = False
        # The optimizer may write the shards on the host after this.
        context.finish_reading()
        context.backward = None
        if (
            is_last_backward
            and context.forward_pass in run.remaining
            and not any(map(self._is_computing, context.groups))
        ):
            # The calls of modules outside of the root have had their backward. The next one need not visit them again.
            context.start_chain()
            context.prefetcher.forget_ahead()
        # Last, because such a hook may take the optimizer's step.
        context.reducer.run_gradient_hooks()

    def _reduce_pending(self, run: BackwardRun) -> None:
        """Reduce accumulated gradients of buffers that this backward has not reached."""
        # All parameters of such a buffer have been frozen since the gradients accumulated.
        reducer = self._context.reducer
        for group in self._context.groups if run.is_for_parameters else ():
            for buffer in group.buffers if group.settings.gradient_sync else ():
                if reducer.needs_reduction(buffer, group.settings.reduce):
                    if buffer.gradients.unreduced is None:
                        reducer.limit_in_flight(group.settings.max_gradient_buffers)
                        buffer.gradients.collect((), ())
                    if is_checking():
                        group.check_same_action("reduces the gradients of")
                    reducer.start(group, buffer, group.settings.reduce, is_last=True)
