"""Records of the collectives that a rank starts, with the module that caused them, in forward and backward.

A thread has one `Place` per open log. Functions that a forward registers for backward capture these places
(`located`), so that collectives in backward are recorded for the module that caused them, in whatever thread they run.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Module: TypeAlias = Any
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One collective of this rank.

    Attributes:
        name: the collective, by its name in `hp_dtensor.ProcessGroup`.
        group: global ranks.
        wire_bytes: what this rank sends to others, in bytes.
        module: the innermost module of the log whose forward, or the backward of whose forward, started it. "" outside
            of all modules.
        in_backward: whether it was started during a backward, or to reduce gradients.
    """

    name: str
    group: tuple[int, ...]
    wire_bytes: float
    module: str = ""
    in_backward: bool = False


# By identity, because two logs may hold equal records.
@dataclass(slots=True, eq=False)
class CollectiveLog:
    """The collectives of this rank, in order. `count` and `wire_bytes` take the name of a collective, or None for all.

    Attributes:
        modules: names of modules by `id`.
        is_open: whether the log still records.
    """

    records: list[CollectiveRecord] = field(default_factory=list)
    modules: Mapping[int, str] = field(default_factory=dict)
    is_open: bool = True

    def count(self, name: str | None = None) -> int:
        return sum(1 for record in self.records if name in (None, record.name))

    def wire_bytes(self, name: str | None = None) -> float:
        return sum(record.wire_bytes for record in self.records if name in (None, record.name))

    def name_of(self, modules: Sequence[Module]) -> Path:
        """Return the one-element path of the first of `modules` that the log knows, or an empty path."""
        return next(((self.modules[id(module)],) for module in modules if id(module) in self.modules), ())


class Place(NamedTuple):
    """The modules of one log whose forward a thread is running, outermost first."""

    log: CollectiveLog
    path: Path = ()
    in_backward: bool = False


class _Thread(threading.local):
    def __init__(self) -> None:
        self.places: tuple[Place, ...] = ()


_thread = _Thread()


@contextlib.contextmanager
def recorded(modules: Mapping[int, str]) -> Iterator[CollectiveLog]:
    """Record the collectives of this thread in the block, including those of backwards that it runs."""
    # Places are immutable tuples: a function that captures them for backward must not see later changes.
    log = CollectiveLog(modules=modules)
    _thread.places += (Place(log),)
    try:
        yield log
    finally:
        # Captured places may outlive the block: a backward that runs later must not add to the log.
        log.is_open = False
        _thread.places = tuple(place for place in _thread.places if place.log is not log)


def is_recording() -> bool:
    """Return whether this thread has an open log."""
    return bool(_thread.places)


def add_record(platform: Any, name: str, group: tuple[int, ...], wire_bytes: float) -> None:
    """Add a collective to the open logs of this thread. `platform` says whether a backward runs; None: no."""
    # Called for every collective, so the usual case without a log must cost next to nothing.
    if not _thread.places:
        return
    running = platform is not None and platform.is_in_backward()
    for log, path, in_backward in _thread.places:
        if log.is_open:
            module = path[-1] if path else ""
            log.records.append(CollectiveRecord(name, group, wire_bytes, module, in_backward or running))


def located(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, called in backward, with its collectives recorded for the modules that run forward now."""
    # Autograd may run backward in a thread of its own, which has no places, so those of the forward are captured now.
    then = _thread.places
    if not then:
        return function

    def run(*args: Any) -> Any:
        # A log may have been closed between forward and backward, and another one opened around the backward.
        places = tuple(place for place in then if place.log.is_open)
        # Logs that this thread has open, and that the forward did not know, record the backward as well.
        others = (here for here in _thread.places if all(here.log is not place.log for place in places))
        with _at((*places, *others)):
            return function(*args)

    return run


def inside(modules: Sequence[Module], in_backward: bool = False) -> contextlib.AbstractContextManager[None]:
    """Record the collectives in the block for the first of `modules` that a log knows.

    Args:
        in_backward: the collectives reduce gradients, even if no backward is running any more.
    """
    if not _thread.places:
        return contextlib.nullcontext()
    return _at(tuple(Place(log, log.name_of(modules), in_backward or before) for log, _, before in _thread.places))


def enter(log: CollectiveLog, module: str, arrive: bool) -> None:
    """Record that a module's forward starts, in a thread without a place too if that may run backward (`arrive`)."""
    # Recomputation calls a forward in the thread of backward, which may have no place of its own.
    if arrive and all(place.log is not log for place in _thread.places):
        _thread.places += (Place(log),)
    _step(log, lambda path: (*path, module))


def leave(log: CollectiveLog, module: str) -> None:
    """Record that the forward of a module, if it has started, and of all modules inside it, has ended."""
    # The last occurrence, because a module may be called inside its own forward. Modules behind it may have raised
    # without being left.
    _step(log, lambda path: path[: len(path) - path[::-1].index(module) - 1] if module in path else path)


def _step(log: CollectiveLog, step: Callable[[Path], Path]) -> None:
    """Change this thread's path in a log, and drop the places in logs that are closed."""
    _thread.places = tuple(
        place._replace(path=step(place.path)) if place.log is log else place
        for place in _thread.places
        if place.log.is_open
    )


@contextlib.contextmanager
def _at(places: tuple[Place, ...]) -> Iterator[None]:
    """Replace this thread's places inside the block."""
    before, _thread.places = _thread.places, places
    try:
        yield
    finally:
        _thread.places = before
