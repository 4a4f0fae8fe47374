"""Steps that succeed on all ranks or fail on all ranks, and stop signals.

At the first SIGINT or SIGTERM, training stops after the current step with a checkpoint (`stop_requests`). Other
commands stop at once (`interruptible`)."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

from hp_dtensor.exceptions import HPError
from hp_dtensor.launch.local_launch import handled_signals
from hp_trainer.exceptions import describe_exit, describe_machine_error


class Group(Protocol):
    """A group of ranks: the part of the interface of `hp_dtensor.ProcessGroup` that is used here."""

    rank: int

    @property
    def size(self) -> int: ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]: ...


class Alone:
    """The group of a single rank."""

    rank = 0
    size = 1

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


def all_gather_object(group: Group, value: Any) -> list[Any]:
    """Return the JSON value of every rank, in rank order. A collective call."""
    return [json.loads(data) for data in group.all_gather_bytes(json.dumps(value).encode())]


def all_ranks(group: Group, what: str, do: Callable[[], Any], error: type[HPError]) -> list[Any]:
    """Run `do` on every rank, return all results (JSON values); if one fails, raise `error` about `what` on all."""
    failure: Exception | SystemExit | None = None
    try:
        answer = {"result": do()}
    except SystemExit as leaving:
        # Code of a plugin may call sys.exit. Without an answer the other ranks would wait until their timeout.
        failure = leaving
        answer = {"error": describe_exit(leaving, f"while {what}")}
    except Exception as caught:
        failure = caught
        answer = {"error": describe_machine_error(caught) or f"{type(caught).__name__}: {caught}"}
    answers = all_gather_object(group, answer)
    errors = [f"rank {rank}: {one['error']}" for rank, one in enumerate(answers) if "error" in one]
    if errors:
        raise error(f"{what} failed; {'; '.join(errors)}") from failure
    return [one["result"] for one in answers]


def coordinator(group: Group, what: str, do: Callable[[], Any], error: type[HPError]) -> Any:
    """Run `do` on rank 0 and return its result (a JSON value) on every rank; if it fails, raise `error` on all."""
    return all_ranks(group, what, do if group.rank == 0 else lambda: None, error)[0]


def report(line: str) -> None:
    """Print a line for the user to stderr. A stderr that is closed or full does not end a run."""
    # None if the process was started without one; `print` would write to stdout.
    if sys.stderr is None:
        return
    # ValueError: it has been closed in this process.
    with contextlib.suppress(OSError, ValueError):
        print(f"hp-train: {line}", file=sys.stderr, flush=True)


class Interrupted(KeyboardInterrupt):
    """A stop signal arrived: SIGINT (Ctrl-C) or SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


class StopRequest:
    """The first stop signal that this process has received; None: there was none yet."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def is_made(self) -> bool:
        return self.signal is not None

    def make(self, number: int) -> None:
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Record the first stop signal inside the block as a request; a second one reaches the previous handlers.

    Outside the main thread Python cannot handle signals, and no request is ever recorded.
    """
    request = StopRequest()
    with contextlib.ExitStack() as stack:

        def receive(number: int, frame: FrameType | None) -> None:
            request.make(number)
            # Restore the previous handlers, so that a second signal stops the process at once.
            stack.close()

        stack.enter_context(handled_signals(receive))
        yield request


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` for every stop signal inside the block."""

    def receive(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    with handled_signals(receive):
        yield
