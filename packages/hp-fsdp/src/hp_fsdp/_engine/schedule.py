"""The schedule of one model: forward passes, the backward that runs, prefetching and reductions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.recording import located
from hp_fsdp._engine.call_order import PATIENCE_SECONDS, CallOrders
from hp_fsdp._engine.flat_buffer import FlatBuffer, stale_buffers
from hp_fsdp._engine.group import GatherRecord, GroupState, ParameterGroup
from hp_fsdp._engine.reduction import Reducer
from hp_fsdp._engine.replicas import check_replicas
from hp_fsdp.exceptions import CallOrderError, FSDPStateError
from hp_fsdp.storage import Gradients, ParameterStorage

Tensor = Any
Module = Any


class Event(NamedTuple):
    """In a forward pass: the last end of a group's forwards, or their beginning."""

    group: ParameterGroup
    ends: bool


class ForwardPass:
    """One forward of the root; or calls of modules on their own, until a backward has gone through them.

    Attributes:
        token: threads the gathers in the order in which they happen, so that backward runs their nodes, all
            of them, in the reverse order on every rank.
        records: uses with autograd nodes, in that order.
        used: in a forward of the root, groups in the order in which their forwards began (with repetitions).
        cursor: position in the recorded order up to which this pass has come.
        ahead: groups gathered ahead in that order and not used yet.
        events: in order, with the record of the parameters for those that begin a group's use. A backward comes to
            them in the reverse order: it enters a group at its end, and is through with it at its beginning.
        reachable: groups that the backward of some rank may come to: not frozen ones in front of all that requires a
            gradient. Behind that, a rank may have detached what it gives to a group, and others not.
        frozen_calls: how often groups without trainable parameters have been called.
    """

    def __init__(self, token: Tensor) -> None:
        self.token = token
        self.records: list[GatherRecord] = []
        self.used: list[ParameterGroup] = []
        self.cursor = 0
        self.ahead: list[ParameterGroup] = []
        self.events: dict[Event, GatherRecord | None] = {}
        self.reachable: set[ParameterGroup] = set()
        self.frozen_calls: dict[ParameterGroup, int] = {}

    def end(self) -> None:
        """Let go of the tensors: their autograd nodes hold the records, which the collector could not free."""
        del self.token
        for record in self.records:
            record.unsharded.clear()

    def begin(self, group: ParameterGroup) -> None:
        """The first forward of a group begins."""
        self.events.setdefault(Event(group, ends=False), None)

    def note(self, record: GatherRecord) -> None:
        """Autograd nodes of a group are made here, whose forwards may have begun without."""
        self.records.append(record)
        self._move_last(Event(record.group, ends=False), record)

    def leave(self, group: ParameterGroup, has_outputs: bool) -> None:
        """A forward of one of a group's modules is over, with outputs that require gradients or without."""
        if has_outputs or group.record is not None or self.reachable:
            self.reachable.add(group)
        self._move_last(Event(group, ends=True), None)

    def _move_last(self, event: Event, record: GatherRecord | None) -> None:
        self.events.pop(event, None)
        self.events[event] = record


class BackwardRun:
    """One backward: which passes it goes through and which of their groups it has reached.

    Attributes:
        is_for_parameters: else for inputs alone, as that of `torch.autograd.grad`: it goes through groups, no more.
        met: uses of parameters that this backward has come to.
        frozen_calls: those of a pass that are behind it, by group and pass.
        tokens: of the gathers of modules that are being recomputed.
        reached: groups entered, with the pass (None: in recomputation).
        to_come: events of each pass met that are not behind it, the next one last.
    """

    def __init__(self, is_for_parameters: bool, end: Callable[[], None]) -> None:
        self.is_for_parameters = is_for_parameters
        self._end = weakref.ref(end)
        self.met: set[GatherRecord] = set()
        self.frozen_calls: dict[tuple[ParameterGroup, ForwardPass], int] = {}
        self.tokens: dict[ParameterGroup, Tensor] = {}
        self.reached: set[tuple[ParameterGroup, ForwardPass | None]] = set()
        self.to_come: dict[ForwardPass, dict[Event, GatherRecord | None]] = {}

    @property
    def has_failed(self) -> bool:
        """Whether an exception has ended it: the framework then has let go of what it was to call at the end."""
        return self._end() is None

    def meet(self, record: GatherRecord) -> None:
        """All buffers of a use have gradients to come in each backward through the same forward."""
        if record not in self.met:
            self.met.add(record)
            record.waiting = record.waiting or list(record.indices)

    def events_to_come(self, forward_pass: ForwardPass) -> dict[Event, GatherRecord | None]:
        """See `to_come`."""
        if forward_pass not in self.to_come:
            self.to_come[forward_pass] = forward_pass.events.copy()
        return self.to_come[forward_pass]


class Context:
    """What the groups below one root share.

    Attributes:
        root: the group whose forward is a whole pass.
        groups: all, the root's included.
    """

    def __init__(self, storage: ParameterStorage, root: ParameterGroup, groups: Iterable[ParameterGroup]) -> None:
        self.storage = storage
        self.platform = storage.platform
        self.root = root
        self.groups = list(groups)
        self._reducer = Reducer()
        self._orders = CallOrders(order for group in self.groups for order in group.orders)
        self._pass = ForwardPass(storage.anchor())
        self._outermost: Module | None = None
        self._expected: Sequence[ParameterGroup] = ()
        self._backward: BackwardRun | None = None

    @property
    def in_backward(self) -> bool:
        return self._backward is not None

    @property
    def reducing_bytes(self) -> int:
        """Bytes of gradients under reduction."""
        return self._reducer.held_bytes

    # Forward ---------------------------------------------------------------------------------------------

    def enter(self, group: ParameterGroup, module: Module, inputs: Callable[[], Iterable[Tensor]]) -> None:
        """Before the forward of `module`, one of `group`'s, called with tensors `inputs()`."""
        if group.summoned:
            group.start_unshard()
        if self._backward is not None and (self._backward.has_failed or not self.platform.is_in_backward()):
            self.reset()
        if self._is_whole_pass(group, module) and self._backward is None:
            self._begin_pass(module)
        elif self._outermost is None and not group.entered and self._backward is None:
            group.attach()
            group.check_filled()
            self._refresh([group])
        group.check_order("calls")
        begins = self._backward is None and not group.entered
        if begins:
            group.drop_outdated()
        group.unshard()
        group.entered = group.entered or begins
        if begins:
            self._pass.begin(group)
        # Modules of the group called before, or the same one in the forward of a checkpoint, may have had no graph.
        if begins or not group.exposed or (self.platform.is_grad_enabled() and not self._is_recorded(group)):
            self._expose(group)
        if begins:
            self._prefetch_next(group)
        if self._backward is None:
            self._watch_frozen(group, inputs)

    def leave(self, group: ParameterGroup, module: Module, outputs: list[Tensor], is_last_module: bool) -> list[Tensor]:
        """After the forward of `module`, one of `group`'s, which gave `outputs` that require gradients.

        Returns the outputs to use instead.
        """
        if self._backward is not None:
            # All buffers of a recomputed group have their turn, those without gradients too.
            token = self._backward.tokens.pop(group, None)
            return self.storage.join(token, outputs) if token is not None and outputs else outputs
        ends_pass = self._is_whole_pass(group, module)
        if ends_pass and outputs and self._pass.records:
            outputs = self.storage.join(self._pass.token, outputs)
        # A root without parameters too: a backward begins at its outputs, not in what is recomputed further in.
        if outputs and (group.buffers or ends_pass):
            outputs = self.storage.before_backward(outputs, located(partial(self._reach, group, self._pass)))
        self._pass.leave(group, bool(outputs))
        if is_last_module:
            group.check_unwritten()
            group.conceal()
            self._reshard_after_forward(group, bool(outputs))
        if ends_pass:
            self._end_pass()
        elif self._outermost is None and not any(each.entered for each in self.groups):
            self._compare_forward()
        return outputs

    def _is_whole_pass(self, group: ParameterGroup, module: Module) -> bool:
        """Whether a module's forward is a pass: the root's group may have others inside of that module."""
        return group is self.root and (self._outermost is None or self._outermost is module)

    def _begin_pass(self, module: Module) -> None:
        self._check_order(PATIENCE_SECONDS)
        for group in self.groups:
            group.attach()
            group.check_filled()
            group.conceal()
            group.record = None
            # A forward without a backward, or a backward that left it, has kept what may be out of date by now.
            if group.kept_after_forward and self._frees_after_backward(group):
                group.reshard()
        check_replicas(self.groups)
        self._refresh(self.groups)
        self._start_pass()
        self._outermost = module

    def _start_pass(self) -> None:
        """What is called from now on begins a chain of gathers of its own."""
        self._pass.end()
        self._pass = ForwardPass(self.storage.anchor())

    def fail(self, group: ParameterGroup) -> None:
        """A forward of `group` ended with an exception; that of the root is the end of all."""
        if self._backward is not None:
            return
        if group is self.root:
            self._outermost = None
            self._start_pass()
        for each in self.groups if group is self.root else [group]:
            each.conceal()
            each.reshard()
            each.record = None

    def _check_pending(self, groups: Sequence[ParameterGroup], stale: Collection[FlatBuffer]) -> None:
        """Raise if parameters were changed while gradients waited; of `stale` ones all ranks know that together."""
        if not self.platform.is_grad_enabled():
            return
        late = [
            group.name
            for group in groups
            if any(buffer.is_pending_out_of_date or (buffer.is_pending and buffer in stale) for buffer in group.buffers)
        ]
        if late:
            rank = current_world(self.platform).rank
            raise FSDPStateError(
                f"rank {rank}: the parameters of {', '.join(late)} were changed while gradients that backward had "
                "accumulated waited for their reduction; the step was taken without them, by this rank or one with "
                "which it shares these parameters. Call set_requires_gradient_sync(True) (and "
                "set_requires_all_reduce(True)) before the last backward of a step, or reset() to drop them"
            )

    def _refresh(self, groups: Sequence[ParameterGroup]) -> None:
        """Gather again what was kept whole since parameters changed, by whomever, on any rank."""
        for group in groups:
            group.finish_gathering()
        held = [group for group in groups if group.state is GroupState.UNSHARDED]
        stale = stale_buffers(self.storage, [buffer for group in held for buffer in group.buffers]) if held else set()
        self._check_pending(groups, [buffer for buffer in stale if buffer.keeps_full])
        for group in held:
            group.refresh([buffer for buffer in group.buffers if buffer in stale])

    def _end_pass(self) -> None:
        self._outermost = None
        for group in self.groups:
            group.conceal()
            if group.keeps_full:
                group.finish_gathering()
            elif group.state is GroupState.GATHERING or not self.platform.is_grad_enabled():
                group.reshard()
        self._expected = self._pass.used
        self._start_pass()
        self._compare_forward()

    def _compare_forward(self) -> None:
        """Whether all ranks have called the same is known before a backward, or when nothing else will follow."""
        self._orders.start_comparing("forward")
        if not self.platform.is_grad_enabled():
            self._finish_reading()
            self._check_order()

    def _finish_reading(self) -> None:
        """Parameters on the host may be written once a backward, or a forward without one, is over."""
        for group in self.groups:
            for buffer in group.buffers:
                buffer.finish_reading()

    def _check_order(self, timeout_seconds: float | None = None) -> None:
        try:
            self._orders.check(timeout_seconds)
        except CallOrderError:
            # What is gathered and what waits for a reduction may be other modules' data.
            self.reset()
            # What is gathered ahead would be different, too.
            self._expected = ()
            raise

    def _expose(self, group: ParameterGroup) -> None:
        is_recorded = self._is_recorded(group)
        if not self.platform.is_grad_enabled() or (self._backward is not None and is_recorded):
            group.expose()
            return
        if not is_recorded:
            self._record(group)
        group.expose(group.record.unsharded if group.record is not None else None)

    def _is_recorded(self, group: ParameterGroup) -> bool:
        """Whether the gradients of what a module now computes will be collected.

        Not by a use of an earlier forward, nor of a later one to which the backward that runs does not come.
        """
        record, run = group.record, self._backward
        if record is None:
            return False
        if run is None:
            return record.forward_pass is self._pass
        return record.forward_pass is None or record.forward_pass in run.to_come

    def _record(self, group: ParameterGroup) -> None:
        if self._backward is not None:
            token, group.record = group.record_use(self.storage.anchor(), None, self._complete)
            if group.record is not None:
                self._backward.tokens[group] = token
            return
        self._pass.token, group.record = group.record_use(self._pass.token, self._pass, self._complete)
        if group.record is not None:
            self._pass.note(group.record)

    def _reshard_after_forward(self, group: ParameterGroup, has_outputs: bool) -> None:
        wanted = self._frees_after_forward(group, has_outputs)
        if wanted is True:
            group.reshard()
            return
        if wanted:
            group.reshard_to(wanted)
        group.kept_after_forward = True

    def _frees_after_forward(self, group: ParameterGroup, has_outputs: bool) -> bool | int:
        """Whether to free full parameters now, or over how many ranks to keep them."""
        if group.keeps_full:
            return False
        if not self.platform.is_grad_enabled():
            return True
        if not has_outputs:
            # Without an output whose gradient announces the backward nothing would gather again in time.
            return group.record is None
        wanted = group.reshard_after_forward
        return group is not self.root if wanted is None else wanted

    def _prefetch_next(self, group: ParameterGroup) -> None:
        if self._outermost is not None:
            self._pass.used.append(group)
        following = self._following(group)
        if group.forward_prefetch is not None:
            for other in group.forward_prefetch:
                other.start_unshard()
            return
        for other in following:
            if other.state is not GroupState.UNSHARDED and other not in self._pass.ahead:
                other.start_unshard()
                self._pass.ahead.append(other)

    def _following(self, group: ParameterGroup) -> Sequence[ParameterGroup]:
        """The groups that the recorded order expects after `group`; what it had expected instead is freed."""
        ahead, cursor = self._pass.ahead, self._pass.cursor
        if group in ahead:
            ahead.remove(group)
        if cursor < len(self._expected) and self._expected[cursor] is group:
            found = cursor
        else:
            found = next((i for i in range(cursor, len(self._expected)) if self._expected[i] is group), -1)
            for other in ahead:
                if other.state is GroupState.GATHERING:
                    other.reshard()
            ahead.clear()
        if found < 0:
            return ()
        self._pass.cursor = found + 1
        return self._expected[found + 1 : found + 1 + group.prefetch_depth]

    def _watch_frozen(self, group: ParameterGroup, inputs: Callable[[], Iterable[Tensor]]) -> None:
        """Free a group without trainable parameters in backward when the gradients of its inputs are known."""
        if group.record is not None or not group.buffers or not self.platform.is_grad_enabled():
            return
        tensors = [tensor for tensor in inputs() if self.platform.requires_grad(tensor)]
        missing = set(range(len(tensors)))
        forward_pass = self._pass

        def known(index: int) -> None:
            missing.discard(index)
            if not missing:
                missing.update(range(len(tensors)))
                self._leave_frozen(group, forward_pass)

        # Calls whose inputs need no gradients count too: backward may come to trainable modules inside of them.
        forward_pass.frozen_calls[group] = forward_pass.frozen_calls.get(group, 0) + 1
        for index, tensor in enumerate(tensors):
            self.storage.on_gradient(tensor, located(partial(known, index)))

    # Backward --------------------------------------------------------------------------------------------

    def _reach(self, group: ParameterGroup, forward_pass: ForwardPass | None) -> None:
        """Before gradients flow into a group's modules."""
        run = self._begin_backward()
        if (group, forward_pass) in run.reached:
            return
        if forward_pass is not None:
            self._pass_over_until(Event(group, ends=True), forward_pass, run)
        self._enter_backward(group, forward_pass, run)

    def _pass_over_until(self, event: Event | None, forward_pass: ForwardPass, run: BackwardRun) -> None:
        """Deal with all that comes before `event` (None: with the rest), and that the loss of this rank does not use.

        Those of others may, so that this rank takes part all the same: every rank comes to every event, in one order.
        """
        to_come = run.events_to_come(forward_pass)
        if event is not None and event not in to_come:
            return
        while to_come:
            other, record = to_come.popitem()
            if other == event:
                return
            if not other.ends:
                self._pass_over(other.group, record)
            elif other.group in forward_pass.reachable:
                self._enter_backward(other.group, forward_pass, run)

    def _pass_over(self, group: ParameterGroup, record: GatherRecord | None) -> None:
        if not self.root.is_last_backward:
            return  # another backward may still use it
        if record is None:
            self._free_after_backward(group)
        else:
            self._complete_with_zeros(record)

    def _enter_backward(self, group: ParameterGroup, forward_pass: ForwardPass | None, run: BackwardRun) -> None:
        run.reached.add((group, forward_pass))
        self._check_order(0)
        group.check_order("begins the backward of")
        group.unshard()
        if not group.exposed:
            group.expose()
        if forward_pass is not None:
            self._prefetch_previous(group, forward_pass, run)

    def _leave_frozen(self, group: ParameterGroup, forward_pass: ForwardPass) -> None:
        """Backward is through one call of a group without trainable parameters."""
        run = self._begin_backward()
        key = group, forward_pass
        run.frozen_calls[key] = run.frozen_calls.get(key, 0) + 1
        # What the loss does not use may have been gathered ahead, to be passed over.
        if run.frozen_calls[key] == forward_pass.frozen_calls[group] and key in run.reached:
            self._free_after_backward(group)

    def _begin_backward(self) -> BackwardRun:
        if self._backward is not None and self._backward.has_failed:
            self.reset()
        if self._backward is None:
            self._check_order(PATIENCE_SECONDS)
            end = located(self._end_backward)
            self._backward = BackwardRun(self.platform.is_for_parameters(), end)
            self.storage.at_end_of_backward(end)
        return self._backward

    def _prefetch_previous(self, group: ParameterGroup, forward_pass: ForwardPass, run: BackwardRun) -> None:
        following: Iterable[ParameterGroup] | None = group.backward_prefetch
        if following is None:
            to_come, reachable = run.events_to_come(forward_pass), forward_pass.reachable
            ends = (event.group for event in reversed(to_come) if event.ends and event.group in reachable)
            following = islice(ends, group.prefetch_depth)
        for other in following:
            other.start_unshard()

    def _complete(self, record: GatherRecord, buffer: FlatBuffer, grads: Gradients) -> None:
        """Autograd has all gradients of a buffer's parameters.

        A rank whose loss does not use the group comes here too, led by the token: it takes part in the same
        collectives as the others, in the same order.
        """
        group, forward_pass = record.group, record.forward_pass
        assert forward_pass is None or isinstance(forward_pass, ForwardPass)
        run = self._begin_backward()
        run.meet(record)
        if buffer not in record.waiting and all(grad is None for grad in grads):
            return  # passed over already
        self._reach(group, forward_pass)
        record.check_unchanged(buffer, grads)
        if forward_pass is not None:
            self._pass_over_until(Event(group, ends=False), forward_pass, run)
        if buffer.gradients is None:
            self._reducer.make_room(group.max_gradient_buffers)
        if buffer in record.waiting:
            record.waiting.remove(buffer)
        if not record.waiting:
            if group.record is record:
                group.record = None
            for each in group.buffers:
                grads = each.outside_of_full(grads)
            self._free_after_backward(group)
        if not self._begin_backward().is_for_parameters:
            return
        # After the full parameters are gone: both never are there at once.
        buffer.collect(record.indices[buffer], grads)
        if not group.gradient_sync:
            buffer.note_pending()
        if group.gradient_sync or group.shards_every_gradient:
            group.check_order("reduces the gradients of")
            self._reducer.start(buffer, group.reduce_options, group.gradient_sync, group.communicating)

    def _free_after_backward(self, group: ParameterGroup) -> None:
        if self._is_computing(group):
            return
        group.conceal()
        if group.reshard_after_backward and not group.keeps_full:
            group.reshard()

    def _is_computing(self, group: ParameterGroup) -> bool:
        """Whether its forward goes on after this backward, which is one within a forward."""
        return group.entered and (self._outermost is not None or bool(group.running))

    def _frees_after_backward(self, group: ParameterGroup) -> bool:
        """After a reduction the optimizer changes the shards: what was gathered before is out of date."""
        return not group.keeps_full and (group.reshard_after_backward or group.gradient_sync)

    def _end_backward(self) -> None:
        run = self._backward
        if run is None:
            return
        if self.root.is_last_backward:
            self._complete_rest(run)
            self._reduce_what_waits(run)
        self._orders.start_comparing("backward")
        if not self.root.defers_reduction:
            self.finish_reductions()
        for group in self.groups:
            if not self._is_computing(group):
                group.conceal()
                if self._frees_after_backward(group):
                    group.reshard()
        self._finish_reading()
        self._backward = None
        if self.root.is_last_backward and self._pass in run.to_come and not any(map(self._is_computing, self.groups)):
            self._start_chain_anew()
        # They may take the optimizer's step.
        self._reducer.run_gradient_hooks()

    def _start_chain_anew(self) -> None:
        """Modules called on their own have had their backward: the next one need not pass over these calls again."""
        cursor = self._pass.cursor
        self._start_pass()
        self._pass.cursor = cursor

    def _reduce_what_waits(self, run: BackwardRun) -> None:
        """Gradients accumulated by earlier backwards, in buffers that this one does not come to: all frozen since."""
        for group in self.groups if run.is_for_parameters else ():
            for buffer in group.buffers if group.gradient_sync else ():
                if self._reducer.leaves_waiting(buffer, group.reduce_options):
                    if buffer.gradients is None:
                        self._reducer.make_room(group.max_gradient_buffers)
                        buffer.collect((), ())
                    group.check_order("reduces the gradients of")
                    self._reducer.start(buffer, group.reduce_options, True, group.communicating)

    def finish_reductions(self) -> None:
        """Wait for all reductions under way; the gradients are then there."""
        self._reducer.drain(self._check_order)
        if self._backward is None:
            self._reducer.run_gradient_hooks()

    def _complete_rest(self, run: BackwardRun) -> None:
        """What the loss does not reach even through the token: frozen groups in front, or all where it bypasses the
        root's output."""
        for forward_pass in run.to_come:
            self._pass_over_until(None, forward_pass, run)

    def _complete_with_zeros(self, record: GatherRecord) -> None:
        self._begin_backward().meet(record)
        # As autograd runs their nodes.
        for buffer in reversed(record.waiting.copy()):
            self._complete(record, buffer, [None] * len(record.indices[buffer]))

    def reset(self) -> None:
        """Back to the resting state after an exception in forward or backward; unreduced gradients are lost."""
        self._reducer.drop()
        self._backward = None
        self._outermost = None
        for group in self.groups:
            group.conceal()
            group.reshard()
            group.record = None
            for buffer in group.buffers:
                buffer.forget_gradients()
        self._start_pass()
