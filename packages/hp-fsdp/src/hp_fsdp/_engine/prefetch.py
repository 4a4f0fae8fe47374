"""Gathering ahead: the groups that follow, in the order that the last forward of the root recorded."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice

from hp_fsdp._engine.group import GroupState, ParameterGroup
from hp_fsdp._engine.pass_records import BackwardRun, ForwardPass


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
