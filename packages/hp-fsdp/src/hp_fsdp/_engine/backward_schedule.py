"""A group in backward: it is unsharded, its gradients are collected and reduced, it is resharded; then the end."""

from __future__ import annotations

from typing import Any

from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.recording import located
from hp_fsdp._engine.call_order import PATIENCE_SECONDS
from hp_fsdp._engine.flat_buffer import FlatBuffer
from hp_fsdp._engine.group import GroupState, ParameterGroup
from hp_fsdp._engine.parameter_use import ParameterUse
from hp_fsdp._engine.pass_records import BackwardRun, Event, ForwardPass
from hp_fsdp._engine.root_context import RootContext
from hp_fsdp.exceptions import FSDPStateError
from hp_fsdp.storage import Gradients

Tensor = Any


class BackwardSchedule:
    """Acts when autograd comes to a group, when it is through with a group, and when it ends.

    Autograd decides when: `pre_backward` is called before gradients flow into a group's modules, `post_backward` when
    all gradients of one of its buffers are there. A loss need not use every group, and the losses of two ranks need not
    use the same; their collectives must meet all the same, so `_advance` puts in what a rank's autograd leaves out.
    """

    def __init__(self, context: RootContext) -> None:
        self._context = context
        self._platform = context.platform

    def begin(self) -> BackwardRun:
        """Return the backward that runs; it begins here if this is the first that is heard of it."""
        context = self._context
        # Autograd calls back at the end of a backward only if it succeeds: one that failed is known by its successor.
        if context.backward is not None and context.backward.has_failed:
            context.reset()
        if context.backward is None:
            # Ranks that called other modules are told before collectives of this backward could wait for each other.
            context.check_order(PATIENCE_SECONDS)
            end = located(self._end)
            context.backward = BackwardRun(self._platform.is_for_parameters(), end)
            context.storage.at_end_of_backward(end)
            context.storage.explain_released(self._explain_released)
        return context.backward

    def pre_backward(self, group: ParameterGroup, forward_pass: ForwardPass | None) -> None:
        """Have a group's parameters unsharded before gradients flow into its modules."""
        run = self.begin()
        # Several outputs of a group, or modules that share it, announce the same backward: the first one gathers.
        if (group, forward_pass) in run.reached:
            return
        if forward_pass is not None:
            self._advance(run, forward_pass, Event(group, is_end=True))
        self._unshard(run, group, forward_pass)

    def post_backward(self, group: ParameterGroup, use: ParameterUse, buffer: FlatBuffer, grads: Gradients) -> None:
        """Take the gradients of a buffer's parameters, which autograd has all now, and begin to reduce them.

        A rank whose loss does not use the group comes here too, led by the token, with no gradients.
        """
        forward_pass = use.forward_pass
        assert forward_pass is None or isinstance(forward_pass, ForwardPass)
        run = self.begin()
        run.begin_use(use)
        if buffer not in use.waiting and all(grad is None for grad in grads):
            return  # `_advance` has put it in already
        # Autograd need not come past an output of the group (a loss on its parameters alone), so nothing may have
        # announced this.
        self.pre_backward(group, forward_pass)
        # Before anything is reduced: gradients of values that were written since are wrong on every rank.
        if changed := use.changed_parameters(buffer, grads):
            raise FSDPStateError(
                f"{group.place}: {', '.join(changed)}: changed between a forward and its backward, by "
                "optimizer.step() or otherwise: gradients would be those of other values. Run the backward of every "
                "loss before the step, or the forward again after it"
            )
        if forward_pass is not None:
            self._advance(run, forward_pass, Event(group, is_end=False))
        self._take_gradients(run, group, use, buffer, grads)

    def post_backward_frozen(self, group: ParameterGroup, forward_pass: ForwardPass) -> None:
        """Free a group without trainable parameters when backward is through the last of its calls."""
        run = self.begin()
        key = group, forward_pass
        run.frozen_calls[key] = run.frozen_calls.get(key, 0) + 1
        # A group that the loss does not use may have been gathered ahead: `_advance` will come to it.
        if run.frozen_calls[key] == forward_pass.frozen_calls[group] and key in run.reached:
            self._reshard(group)

    # One group -------------------------------------------------------------------------------------------

    def _advance(self, run: BackwardRun, forward_pass: ForwardPass, until: Event | None) -> None:
        """Go through the events of a pass up to `until`, and do for each what this rank's autograd has left out.

        Invariant: every rank takes every event of a pass once, in the reverse of the forward's order, and an event's
        collectives (a gather at a group's end, reductions at its beginning) are started when it is taken, or by the
        caller right after it. So collectives meet, whatever part of the model each rank's loss uses.

        Args:
            until: the event that the caller sees to; nothing happens if it has been taken. None: all that remain.
        """
        remaining = run.remaining_events(forward_pass)
        if until is not None and until not in remaining:
            return
        while remaining:
            # The last recorded first: autograd runs nodes in the reverse order of the forward, and the token makes that
            # so on all ranks.
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
                self._take_zeros(run, group, use, forward_pass)

    def _take_zeros(
        self, run: BackwardRun, group: ParameterGroup, use: ParameterUse, forward_pass: ForwardPass
    ) -> None:
        """Take part in the reductions of a use that this rank's loss does not come to."""
        run.begin_use(use)
        if use.waiting and (group, forward_pass) not in run.reached:
            # Its forward still runs around this backward: it has begun, and has no end yet.
            self._unshard(run, group, forward_pass)
        # In the order in which autograd runs their nodes.
        for buffer in reversed(use.waiting.copy()):
            self._take_gradients(run, group, use, buffer, [None] * len(use.indices[buffer]))

    def _unshard(self, run: BackwardRun, group: ParameterGroup, forward_pass: ForwardPass | None) -> None:
        run.reached.add((group, forward_pass))
        self._context.check_order(0)
        group.check_order("begins the backward of")
        if group.settings.unshard_in_backward or not self._context.storage.refuses_released:
            group.unshard()
            if not group.uses_unsharded:
                group.use_unsharded()
        if forward_pass is not None:
            self._context.prefetcher.gather_previous(group, forward_pass, run)

    def _explain_released(self) -> FSDPStateError | None:
        """Return why a backward found parameters without memory, if that is known."""
        groups = self._context.groups
        left = [g.name for g in groups if not g.settings.unshard_in_backward and g.state is GroupState.SHARDED]
        converted = [g.name for g in groups if any(buffer.versions.num_conversions for buffer in g.buffers)]
        rank = current_world(self._platform).rank
        if left:
            return FSDPStateError(
                f"rank {rank}: set_unshard_in_backward(False) was called for {', '.join(left)}, and this backward "
                "needs values of parameters there; it is for modules whose backward needs none, such as embeddings"
            )
        if converted:
            return FSDPStateError(
                f"rank {rank}: parameters of {', '.join(converted)} may have been converted to another dtype between a "
                "forward and its backward; convert modules between steps"
            )
        return None

    def _take_gradients(
        self, run: BackwardRun, group: ParameterGroup, use: ParameterUse, buffer: FlatBuffer, grads: Gradients
    ) -> None:
        """Collect a buffer's gradients, and begin to reduce them unless they are to accumulate."""
        reducer, settings = self._context.reducer, group.settings
        # Wait for older reductions before memory for another gradient is taken: this bounds what is held at once. Where
        # gradients have accumulated it is there already, and theirs is freed as the backward goes.
        reducer.make_room(settings.max_gradient_buffers)
        if buffer in use.waiting:
            use.waiting.remove(buffer)
        if not use.waiting:
            if group.use is use:
                group.use = None
            # A gradient may itself be a view of the full buffer; it is copied out before that memory goes.
            for each in group.buffers:
                grads = each.gradients.outlive(each.gathering.freed, grads)
            self._reshard(group)
        # `grad(loss, inputs)`: nobody asked for the parameters' gradients, but memory is freed all the same.
        if not run.is_for_parameters:
            return
        # Full gradients are allocated after the full parameters are freed: the two are never there at once.
        buffer.gradients.collect(use.indices[buffer], grads)
        if not settings.gradient_sync:
            buffer.versions.mark_awaiting_reduction()
        if settings.gradient_sync or settings.shards_every_gradient:
            group.check_order("reduces the gradients of")
            reducer.start(group, buffer, settings.gradient_sync)

    def _reshard(self, group: ParameterGroup) -> None:
        """Free a group's full parameters after its backward, unless its forward goes on around this backward."""
        if self._is_computing(group):
            return
        group.use_sharded()
        if group.settings.reshard_after_backward and not group.settings.keeps_full:
            group.reshard()

    def _is_computing(self, group: ParameterGroup) -> bool:
        """Return True if a group's forward goes on after this backward, which runs within that forward."""
        return group.in_forward and (self._context.root_module is not None or bool(group.forward_depth))

    # The end of a backward -------------------------------------------------------------------------------

    def _end(self) -> None:
        context, run = self._context, self._context.backward
        if run is None:
            return
        is_last_backward = context.root.settings.is_last_backward
        if is_last_backward:
            # What the loss does not reach even through the token: frozen groups in front, or all groups where the loss
            # bypasses the root's output.
            for forward_pass in run.remaining:
                self._advance(run, forward_pass, until=None)
            self._reduce_what_waits(run)
        # Compared while the last reductions still run; `finish_reductions` looks at the answer before it stores a
        # gradient.
        context.orders.start_comparing("backward")
        if not context.root.settings.defers_reduction:
            context.finish_reductions()
        for group in context.groups:
            if not self._is_computing(group):
                group.use_sharded()
                if group.settings.frees_after_backward:
                    group.reshard()
                # What stays is meant to: the next forward takes it unless its parameters have been written since.
                group.kept_after_forward = False
        # Gradients are stored, and the optimizer may write the shards on the host from here on.
        context.finish_reading()
        context.backward = None
        if (
            is_last_backward
            and context.forward_pass in run.remaining
            and not any(map(self._is_computing, context.groups))
        ):
            # Modules called on their own have had their backward: the next one need not go through these calls again.
            context.start_chain()
            context.prefetcher.forget_ahead()
        # After all else, because such a hook may take the optimizer's step.
        context.reducer.run_gradient_hooks()

    def _reduce_what_waits(self, run: BackwardRun) -> None:
        """Reduce gradients accumulated by earlier backwards in buffers that this one does not come to.

        Their parameters have all been frozen since.
        """
        reducer = self._context.reducer
        for group in self._context.groups if run.is_for_parameters else ():
            for buffer in group.buffers if group.settings.gradient_sync else ():
                if reducer.leaves_waiting(buffer, group.settings.reduce):
                    if buffer.gradients.unreduced is None:
                        reducer.make_room(group.settings.max_gradient_buffers)
                        buffer.gradients.collect((), ())
                    group.check_order("reduces the gradients of")
                    reducer.start(group, buffer, is_last=True)
