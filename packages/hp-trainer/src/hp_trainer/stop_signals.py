"""Signals: a run that trains ends after the step under way, with a checkpoint; anything else ends at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from hp_dtensor.launch.local_launch import handled_signals


class Interrupted(KeyboardInterrupt):
    """A stop signal came, Ctrl-C or another.

    Attributes:
        signal: which one.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


class StopRequest:
    """A request to stop that this process has received, or not yet."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def is_made(self) -> bool:
        return self.signal is not None

    def make(self, number: int) -> None:
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn the stop signals into a request inside the block; a second one is for the handlers there before.

    Outside the main thread signals cannot be handled, and no request is ever made.
    """
    request = StopRequest()
    with contextlib.ExitStack() as stack:

        def receive(number: int, frame: FrameType | None) -> None:
            request.make(number)
            # Who asks twice does not want to wait.
            stack.close()

        stack.enter_context(handled_signals(receive))
        yield request


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block every stop signal raises `Interrupted`, as Ctrl-C raises its base class elsewhere."""

    def receive(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    with handled_signals(receive):
        yield
