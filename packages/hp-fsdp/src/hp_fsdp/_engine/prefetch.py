"""Prefetch: the next groups are gathered while the current one computes, in the order that passes record.

`ForwardPass` records the order of one forward, and `BackwardRun` how far a backward has come through it. `Prefetcher`
starts the gathers ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from typing import Any

from hp_fsdp._engine.param_group import Event, GroupState, ParameterGroup, ParameterUse

Tensor = Any


# Records of a forward and of a backward ------------------------------------------------------------------


class ForwardPass:
    """One forward of the root, or the calls of modules outside of the root until a backward has passed through them.

    Attributes:
        token: an empty tensor that each gather node takes from the previous one and returns. It makes each node depend
            on the previous one, so that autograd runs all of them, in the reverse order, on every rank.
        uses: the uses of parameters with autograd nodes, in the order of the nodes.
        events: in forward order, with the use that starts there. Backward goes through them in reverse: it reaches a
            group at its end event, and has finished with it at its start event.
        reachable: groups that the backward of some rank may reach: all from the first one that requires a gradient.
            Frozen groups after it are among them, because ranks may detach different tensors.
        frozen_calls: number of calls of each group without trainable parameters.
    """

    def __init__(self, token: Tensor) -> None:
        self.token = token
        self.uses: list[ParameterUse] = []
        self.events: dict[Event, ParameterUse | None] = {}
        self.reachable: set[ParameterGroup] = set()
        self.frozen_calls: dict[ParameterGroup, int] = {}
        self._num_conversions: dict[ParameterGroup, int] = {}

    def end(self) -> None:
        """Drop references to tensors."""
        # Their autograd nodes refer to the uses: a cycle through C++ that Python's garbage collector cannot see.
        del self.token
        for use in self.uses:
            # The uses themselves stay: a backward still needs their indices and versions.
            use.unsharded.clear()

    def start_group(self, group: ParameterGroup) -> None:
        """Record that the first forward of a group starts."""
        self.events.setdefault(group.start_event, None)

    def add_use(self, group: ParameterGroup, use: ParameterUse) -> None:
        """Record a use whose autograd nodes are made now. The start event moves here: earlier forwards had no nodes."""
        self.uses.append(use)
        self._move_last(group.start_event, use)

    def end_group(self, group: ParameterGroup, has_outputs: bool) -> None:
        """Record the end of a forward of a group's module. `has_outputs`: it has outputs that require gradients."""
        needs_backward = has_outputs or group.use is not None
        if needs_backward:
            self._num_conversions.setdefault(group, group.num_conversions)
        if needs_backward or self.reachable:
            self.reachable.add(group)
        self._move_last(group.end_event, None)

    def is_converted(self, group: ParameterGroup) -> bool:
        """Return True if the group was converted to another dtype since its forward, so that backward cannot run."""
        # Buffers are converted by the next forward, which frees the memory of which autograd has saved views. Until
        # then frozen parameters still have it, but the gradients of trainable ones no longer fit them.
        use = self.events.get(group.start_event)
        pending = use is not None and any(buffer.has_other_dtypes for buffer in use.indices)
        return pending or self._num_conversions.get(group) not in (None, group.num_conversions)

    def _move_last(self, event: Event, use: ParameterUse | None) -> None:
        # A dict sets an existing key in its old position, so the event is removed first.
        self.events.pop(event, None)
        self.events[event] = use


class BackwardRun:
    """A running backward: the passes that it goes through, and how far it has come.

    Attributes:
        is_for_parameters: False: it is for inputs alone, as `torch.autograd.grad`, and collects no gradient.
        uses: the uses that it has reached.
        frozen_calls: number of calls of groups without trainable parameters that it has finished, by group and pass.
        tokens: tokens of the gather nodes of modules that are being recomputed.
        reached: groups that it has reached, with the pass. The pass is None in a recomputation.
        remaining: for each pass that it goes through, the events that it has not taken. They are taken from the end.
    """

    def __init__(self, is_for_parameters: bool, end: Callable[[], None]) -> None:
        self.is_for_parameters = is_for_parameters
        # A weak reference: autograd holds the callback while the backward runs. If it is dead and has not been called,
        # the backward has raised.
        self._end = weakref.ref(end)
        self.uses: set[ParameterUse] = set()
        self.frozen_calls: dict[tuple[ParameterGroup, ForwardPass], int] = {}
        self.tokens: dict[ParameterGroup, Tensor] = {}
        self.reached: set[tuple[ParameterGroup, ForwardPass | None]] = set()
        self.remaining: dict[ForwardPass, dict[Event, ParameterUse | None]] = {}

    @property
    def has_failed(self) -> bool:
        """True if an exception has ended it, after which the framework has dropped the callback."""
        return self._end() is None

    def start_use(self, use: ParameterUse) -> None:
        """Mark all buffers of a use as pending when this backward first reaches it."""
        if use not in self.uses:
            self.uses.add(use)
            # A second backward through the same forward finds none pending, because the first one has taken them.
            use.pending = use.pending or list(use.indices)

    def remaining_events(self, forward_pass: ForwardPass) -> dict[Event, ParameterUse | None]:
        """Return the events of a pass that have not been taken: all of them when the backward first reaches it."""
        if forward_pass not in self.remaining:
            self.remaining[forward_pass] = forward_pass.events.copy()
        return self.remaining[forward_pass]


# Prefetch ------------------------------------------------------------------------------------------------


class Prefetcher:
    """Starts to gather the next groups while the current one computes.

    In forward the next groups are known from the previous forward: each forward of the root records the order in which
    groups start, repeated ones too, and the next one follows it with a cursor. In backward they are known from the
    events of the pass itself. All ranks call the same modules, so that all ranks prefetch the same groups.

    Attributes:
        order_name: the name of the forwards to come. Each name has its own order. The stages of a pipeline that take
            turns on a rank have different names.
    """

    def __init__(self) -> None:
        self.order_name: Hashable = None
        self._expected: dict[Hashable, Sequence[ParameterGroup]] = {}
        self._recorded: list[ParameterGroup] = []
        self._cursor = 0
        self._ahead: list[ParameterGroup] = []

    def start_pass(self) -> None:
        """Go to the start of the expected order, and start to record a new one."""
        self._recorded, self._cursor, self._ahead = [], 0, []

    def end_pass(self) -> None:
        """Expect the recorded order in the next forward of the root."""
        self._expected[self.order_name] = self._recorded
        self.start_pass()

    def forget_ahead(self) -> None:
        """Forget which groups have started and which were gathered ahead, as after a backward. The cursor stays."""
        self._recorded, self._ahead = [], []

    def expect_nothing(self) -> None:
        """Forget the expected orders, after ranks have called different modules."""
        self._expected.clear()

    def prefetch_forward(self, group: ParameterGroup, in_root_forward: bool) -> None:
        """Start to gather the groups that the forward uses after `group`, whose forward starts now."""
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

    def prefetch_backward(self, group: ParameterGroup, forward_pass: ForwardPass, run: BackwardRun) -> None:
        """Start to gather the groups that the backward uses after `group`, which it reaches now."""
        following: Iterable[ParameterGroup] | None = group.backward_prefetch
        if following is None:
            remaining, reachable = run.remaining_events(forward_pass), forward_pass.reachable
            ends = (event.group for event in reversed(remaining) if event.is_end and event.group in reachable)
            # Backward reaches groups at their end events, last recorded first.
            following = islice(ends, group.settings.prefetch_depth)
        for other in following:
            # As in `_unshard`: a group that backward does not gather must not be prefetched either.
            if other.settings.unshard_in_backward or not other.storage.refuses_released:
                other.start_unshard()

    def _following(self, group: ParameterGroup) -> Sequence[ParameterGroup]:
        """Return the groups expected after `group`. If another one was expected, free the groups gathered ahead."""
        # It is in use now, and no longer to be freed if the order turns out to be another one.
        if group in self._ahead:
            self._ahead.remove(group)
        cursor, expected = self._cursor, self._expected.get(self.order_name, ())
        # The usual case is O(1). Only a forward that deviates from the last one searches.
        if cursor < len(expected) and expected[cursor] is group:
            found = cursor
        else:
            found = next((i for i in range(cursor, len(expected)) if expected[i] is group), -1)
            for other in self._ahead:
                # A group that is unsharded by now is in use.
                if other.state is GroupState.GATHERING:
                    other.reshard()
            self._ahead.clear()
        if found < 0:
            return ()
        self._cursor = found + 1
        return expected[found + 1 : found + 1 + group.settings.prefetch_depth]
