"""Records of one forward pass, and of the backward that runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from hp_fsdp._engine.group import ParameterGroup
from hp_fsdp._engine.parameter_use import ParameterUse

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
