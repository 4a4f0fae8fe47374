"""Signals held back while ranks run, so that the ranks are stopped before this process acts on them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def held_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, `on_signal(number)` is called instead of the handlers that were there.

    They are restored at the end and then get the first signal that came. In another than the main thread,
    where Python has no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        received.append(number)
        on_signal(number)

    # What is ignored, as SIGHUP under nohup, stays ignored.
    wanted = [number for number in HELD if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in wanted}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: installed outside Python, cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if received:
            signal.raise_signal(received[0])
