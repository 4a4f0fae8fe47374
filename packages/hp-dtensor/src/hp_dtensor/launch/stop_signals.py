"""Signals that ask a process to stop: handled for the length of a block, with what was there before put back."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Inside the block the stop signals go to `handler`; those that are ignored, as SIGHUP under nohup, stay so.

    In another than the main thread, where Python has no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    wanted = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in wanted}
    try:
        yield
    finally:
        for number, old in before.items():
            # None: installed outside Python, cannot be put back.
            signal.signal(number, signal.SIG_DFL if old is None else old)


@contextlib.contextmanager
def held_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, `on_signal(number)` is called instead of the handlers that were there.

    They are restored at the end and then get the first signal that came.
    """
    received: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        on_signal(number)

    try:
        with handled_signals(handle):
            yield
    finally:
        if received:
            signal.raise_signal(received[0])
