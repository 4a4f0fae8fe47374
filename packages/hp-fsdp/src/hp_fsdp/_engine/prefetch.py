"""Prefetch: the next groups are gathered while the current one computes, in the order that passes record.

`ForwardPass` records the order of one forward, and `BackwardRun` how far a backward has come through it. `Prefetcher`
starts the gathers ahead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from hp_fsdp._engine.param_group import Event, GroupState, ParameterGroup, ParameterUse
from hp_fsdp.exceptions import FSDPStateError

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

    def add_use(self, group: ParameterGroup, use: ParameterUse) -> None:
        """Record a use whose autograd nodes are made now. The start event moves here: earlier forwards had no nodes."""
        self.uses.append(use)
        # A dict sets an existing key in its old position, so the event is removed first.
        self.events.pop(group.start_event, None)
        self.events[group.start_event] = use

    def end_group(self, group: ParameterGroup, has_outputs: bool) -> None:
        """Record the end of a forward of a group's module. `has_outputs`: it has outputs that require gradients."""
        needs_backward = has_outputs or group.use is not None
        if needs_backward:
            self._num_conversions.setdefault(group, group.num_conversions)
        if needs_backward or self.reachable:
            self.reachable.add(group)
        self.events.pop(group.end_event, None)
        self.events[group.end_event] = None

    def check_conversions(self, is_synced: bool) -> None:
        """Raise `FSDPStateError` if a group was converted to another dtype since its forward.

        Args:
            is_synced: all conversions have been applied to the buffers.
        """
        # Buffers are converted by the next forward, which frees the memory of which autograd has saved views.
        converted = [group for group, number in self._num_conversions.items() if number != group.num_conversions]
        # Until then frozen parameters still have it, but the gradients of trainable ones no longer fit them.
        for event, use in self.events.items() if not is_synced else ():
            if use is not None and any(buffer.has_other_dtypes for buffer in use.indices):
                converted.append(event.group)
        if converted:
            raise FSDPStateError(
                f"{converted[0].where}: parameters have been converted to another dtype between a forward and its "
                "backward; convert modules between steps"
            )


class BackwardRun:
    """A running backward: the passes that it goes through, and how far it has come.

    Attributes:
        is_for_parameters: False: it is for inputs alone, as `torch.autograd.grad`, and collects no gradient.
        end: the callback at its end. It is dead if the backward has raised: autograd drops it then.
        uses: the uses that it has reached.
        frozen_calls: number of calls of groups without trainable parameters that it has finished, by group and pass.
        tokens: tokens of the gather nodes of modules that are being recomputed.
        reached: groups that it has reached, with the pass. The pass is None in a recomputation.
        remaining: for each pass that it goes through, the events that it has not taken. They are taken from the end.
    """

    def __init__(self, is_for_parameters: bool, end: Callable[[], None]) -> None:
        self.is_for_parameters = is_for_parameters
        # A weak reference: autograd holds the callback while the backward runs.
        self.end = weakref.ref(end)
        self.uses: set[ParameterUse] = set()
        self.frozen_calls: dict[tuple[ParameterGroup, ForwardPass], int] = {}
        self.tokens: dict[ParameterGroup, Tensor] = {}
        self.reached: set[tuple[ParameterGroup, ForwardPass | None]] = set()
        self.remaining: dict[ForwardPass, dict[Event, ParameterUse | None]] = {}

    def start_use(self, use: ParameterUse) -> None:
        """Mark all buffers of a use as pending when this backward first reaches it."""
        if use not in self.uses:
            self.uses.add(use)
            # A second backward through the same forward finds none pending, because the first one has taken them.
            use.pending = use.pending or list(use.indices)


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
        following = group.backward_prefetch
        if following is None:
            following = []
            # Backward reaches groups at their end events, last recorded first.
            for other, is_end in reversed(run.remaining[forward_pass]):
                if len(following) == group.settings.prefetch_depth:
                    break
                if is_end and other in forward_pass.reachable:
                    following.append(other)
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
