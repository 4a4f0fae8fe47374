"""Handling of SIGINT and SIGTERM: training stops after the current step with a checkpoint, anything else at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from hp_dtensor.launch.local_launch import handled_signals


class Interrupted(KeyboardInterrupt):
    """A stop signal arrived: SIGINT (Ctrl-C) or SIGTERM.

    Attributes:
        signal: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


class StopRequest:
    """A request to stop this process, if there was one, with its signal."""

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
