"""Records of one forward pass, and of the backward that runs.

Gathering ahead: the groups that follow, in the order that the last forward of the root recorded.

State shared by the forwards and backwards of one model: its groups, the pass and backward under way, reductions.

A group in backward: it is unsharded, its gradients are collected and reduced, it is resharded; then the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.recording import located
from hp_fsdp._engine.flat_buffer import FlatBuffer, stale_buffers
from hp_fsdp._engine.param_group import GroupState, ParameterGroup, ParameterUse
from hp_fsdp._engine.rank_checks import PATIENCE_SECONDS, CallOrders
from hp_fsdp._engine.reduction import Reducer
from hp_fsdp.exceptions import CallOrderError, FSDPStateError
from hp_fsdp.storage import Gradients, ParameterStorage

Tensor = Any


class Event(NamedTuple):
    """The beginning of a group's forwards in a pass, or the last end of one."""

    group: ParameterGroup
    is_end: bool


class ForwardPass:
    """One forward of the root; or calls of modules on their own, until a backward has gone through them.

    Attributes:
        token: threads the gather nodes in the order in which they are made: each takes the token of the one before as
            input. So autograd runs all of them, those whose parameters the loss does not use too, in the reverse order
            on every rank.
        uses: of parameters with autograd nodes, in that order.
        events: in forward order, with the use that a group's beginning makes. Backward comes to them in reverse: it
            comes to a group at its end, and is through with it at its beginning.
        reachable: groups that the backward of some rank may come to: not frozen ones in front of all that requires a
            gradient. Behind that, a rank may have detached what it gives to a group, and others not.
        frozen_calls: how often groups without trainable parameters have been called.
    """

    def __init__(self, token: Tensor) -> None:
        self.token = token
        self.uses: list[ParameterUse] = []
        self.events: dict[Event, ParameterUse | None] = {}
        self.reachable: set[ParameterGroup] = set()
        self.frozen_calls: dict[ParameterGroup, int] = {}

    def end(self) -> None:
        """Let go of the tensors: their autograd nodes hold the uses, a cycle that the collector cannot see into."""
        del self.token
        for use in self.uses:
            use.unsharded.clear()

    def begin_group(self, group: ParameterGroup) -> None:
        """Record that the first forward of a group begins."""
        self.events.setdefault(Event(group, is_end=False), None)

    def add_use(self, group: ParameterGroup, use: ParameterUse) -> None:
        """Record that autograd nodes of a group are made here, whose forwards may have begun before, without nodes."""
        self.uses.append(use)
        self._move_last(Event(group, is_end=False), use)

    def end_group(self, group: ParameterGroup, has_outputs: bool) -> None:
        """Record that a forward of a group's module has ended; `has_outputs`: with outputs that require gradients."""
        if has_outputs or group.use is not None or self.reachable:
            self.reachable.add(group)
        self._move_last(Event(group, is_end=True), None)

    def _move_last(self, event: Event, use: ParameterUse | None) -> None:
        self.events.pop(event, None)
        self.events[event] = use


class BackwardRun:
    """One backward: the passes that it goes through, and how far it has come.

    Attributes:
        is_for_parameters: False: for inputs alone, as that of `torch.autograd.grad`; no gradient is collected.
        uses: those that this backward has come to.
        frozen_calls: calls of groups without trainable parameters that are behind it, by group and pass.
        tokens: of the gather nodes of modules that are being recomputed.
        reached: groups that it has come to, with the pass (None: in recomputation).
        remaining: of each pass that it goes through, the events that it has not come to, the next one last.
    """

    def __init__(self, is_for_parameters: bool, end: Callable[[], None]) -> None:
        self.is_for_parameters = is_for_parameters
        # Weak: autograd holds the callback as long as the backward runs. Once it is dead without having been called,
        # the backward has failed.
        self._end = weakref.ref(end)
        self.uses: set[ParameterUse] = set()
        self.frozen_calls: dict[tuple[ParameterGroup, ForwardPass], int] = {}
        self.tokens: dict[ParameterGroup, Tensor] = {}
        self.reached: set[tuple[ParameterGroup, ForwardPass | None]] = set()
        self.remaining: dict[ForwardPass, dict[Event, ParameterUse | None]] = {}

    @property
    def has_failed(self) -> bool:
        """True if an exception has ended it: the framework has then dropped the callback for its end."""
        return self._end() is None

    def begin_use(self, use: ParameterUse) -> None:
        """Expect gradients of all buffers of a use, when a backward first comes to it: it may be the second one."""
        if use not in self.uses:
            self.uses.add(use)
            use.waiting = use.waiting or list(use.indices)

    def remaining_events(self, forward_pass: ForwardPass) -> dict[Event, ParameterUse | None]:
        """Return the events of a pass that are still to come, all of them when the backward first comes to it."""
        if forward_pass not in self.remaining:
            self.remaining[forward_pass] = forward_pass.events.copy()
        return self.remaining[forward_pass]


class Prefetcher:
    """Begins the gathers of the groups that come next, while the present one computes.

    In forward the next groups are known from the forward before: each forward of the root records the order in which
    groups begin, with repetitions, and the next one of its name follows it with a cursor. In backward they are known
    from the events of the pass itself. All ranks call the same modules, so that all gather ahead the same.

    Attributes:
        order_name: of the forwards to come. Stages of a pipeline that take turns on a rank have a name each.
    """

    def __init__(self) -> None:
        self.order_name: Hashable = None
        self._expected: dict[Hashable, Sequence[ParameterGroup]] = {}
        self._recorded: list[ParameterGroup] = []
        self._cursor = 0
        self._ahead: list[ParameterGroup] = []

    def start_pass(self) -> None:
        """Begin at the start of the expected order, and to record a new one."""
        self._recorded, self._cursor, self._ahead = [], 0, []

    def end_pass(self) -> None:
        """Expect in the next forward of the root what has been recorded in this one."""
        self._expected[self.order_name] = self._recorded
        self.start_pass()

    def forget_ahead(self) -> None:
        """Count no group as gathered ahead, as after a backward, and stay where the cursor is."""
        self._recorded, self._ahead = [], []

    def expect_nothing(self) -> None:
        """Forget the expected order, after ranks have called different modules."""
        self._expected.clear()

    def gather_next(self, group: ParameterGroup, in_root_forward: bool) -> None:
        """Begin to gather what the forward will use after `group`, whose forward begins now."""
        if in_root_forward:
            self._recorded.append(group)
        following = self._following(group)
        if group.forward_prefetch is not None:
            for other in group.forward_prefetch:
                other.start_unshard()
            return
        for other in following:
            if other.state is not GroupState.UNSHARDED and other not in self._ahead:
                other.start_unshard()
                self._ahead.append(other)

    def gather_previous(self, group: ParameterGroup, forward_pass: ForwardPass, run: BackwardRun) -> None:
        """Begin to gather what the backward will use after `group`, to which it comes now."""
        following: Iterable[ParameterGroup] | None = group.backward_prefetch
        if following is None:
            remaining, reachable = run.remaining_events(forward_pass), forward_pass.reachable
            ends = (event.group for event in reversed(remaining) if event.is_end and event.group in reachable)
            following = islice(ends, group.settings.prefetch_depth)
        for other in following:
            if other.settings.unshard_in_backward or not other.storage.refuses_released:
                other.start_unshard()

    def _following(self, group: ParameterGroup) -> Sequence[ParameterGroup]:
        """Return the groups expected after `group`; where another one was expected, free what is gathered ahead."""
        if group in self._ahead:
            self._ahead.remove(group)
        cursor, expected = self._cursor, self._expected.get(self.order_name, ())
        if cursor < len(expected) and expected[cursor] is group:
            found = cursor
        else:
            found = next((i for i in range(cursor, len(expected)) if expected[i] is group), -1)
            for other in self._ahead:
                if other.state is GroupState.GATHERING:
                    other.reshard()
            self._ahead.clear()
        if found < 0:
            return ()
        self._cursor = found + 1
        return expected[found + 1 : found + 1 + group.settings.prefetch_depth]


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
