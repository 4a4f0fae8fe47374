"""Standard streams that may be closed, full, or no longer read."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from typing import TextIO


def open_standard_streams() -> None:
    """Open standard streams that were closed when this process started (`>&-`), to the null device.

    Otherwise the next file that is opened, perhaps a checkpoint, would get the descriptor of standard output, and
    whatever a library prints would be written into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor is the closed one.
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the rest of the process


def write_stacks_on_request() -> None:
    """Write the Python stacks of all threads to standard error on SIGUSR1, even while native code runs."""
    # In tests and notebooks standard error may have no file descriptor.
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def mute(stream: TextIO) -> None:
    """Redirect a stream that can no longer be written to the null device; Python would fail to flush it at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def print_if_read(text: str) -> None:
    """Print to standard output, ignoring that it may be closed."""
    try:
        print(text, flush=True)
    except OSError:
        mute(sys.stdout)
