"""Collectives of a group under its name: for those who record them, and in errors where one fails."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hp_dtensor.exceptions import HPError
from hp_dtensor.platform.recording import inside, is_recording
from hp_fsdp._engine.call_order import CallOrder
from hp_fsdp.exceptions import CommunicationError

Module = Any


class CommunicatingGroup(Protocol):
    """The attributes of a parameter group that errors of its collectives name."""

    modules: list[Module]
    state: Any

    @property
    def place(self) -> str: ...

    @property
    def orders(self) -> list[CallOrder]: ...

    @property
    def ranks(self) -> Iterable[int]: ...


class Communicating:
    """Context manager around collectives of a group.

    They are recorded as those of the group's module, and a failed one raises `CommunicationError`, or `CallOrderError`
    where ranks have called different modules. It is a class, not a generator, because it is entered several times per
    group and step.

    Args:
        action: for errors, such as "gather parameters".
        in_backward: they reduce gradients; else they are forward or backward by when they are started.
    """

    __slots__ = ("_action", "_group", "_inside")

    def __init__(self, group: CommunicatingGroup, action: str, in_backward: bool = False) -> None:
        self._group, self._action = group, action
        self._inside: AbstractContextManager[None] | None = None
        if is_recording():
            self._inside = inside(group.modules, in_backward)

    def __enter__(self) -> None:
        if self._inside is not None:
            self._inside.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._inside is not None:
            self._inside.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError):
            _explain(self._group, self._action, error)


def _explain(group: CommunicatingGroup, action: str, error: RuntimeError) -> None:
    """Raise an error that says more than the backend's, if `error` is one of a failed collective."""
    # torch's OutOfMemoryError is a RuntimeError too: buffers are allocated inside of the block.
    if isinstance(error, HPError) or "OutOfMemory" in type(error).__name__:
        return
    for different_order in (order.new_error() for order in group.orders):
        if different_order is not None:
            raise different_order from error
    before = " ".join(f"{order.last_actions()}." for order in group.orders)
    raise CommunicationError(
        f"{group.place}, state {group.state.value!r}: could not {action} with ranks {sorted(group.ranks)}: {error}. "
        f"{before} Either one of them has ended, or ranks call modules in different orders, or not all of them; in "
        "hp_dtensor.check_mode() (or with HP_CHECK=1) an error names who calls what"
    ) from error
