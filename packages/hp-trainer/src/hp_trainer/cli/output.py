"""Standard streams that may be closed, full, or no longer read."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from typing import TextIO


def open_standard_streams() -> None:
    """Open the standard streams that this process was started without (`>&-`), to nowhere.

    Else the next file that is opened, perhaps a checkpoint, becomes standard output, and whatever a library prints is
    written into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the rest of the process


def write_stacks_on_request() -> None:
    """Write the Python stacks of all threads to standard error at SIGUSR1, even while native code runs."""
    # Standard error of a test or a notebook may be no file.
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)


def mute(stream: TextIO) -> None:
    """Let a stream that cannot be written any more go nowhere; Python would complain about it at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def print_if_read(text: str) -> None:
    """Print a line on standard output, if there is still somebody to read it."""
    try:
        print(text, flush=True)
    except OSError:
        mute(sys.stdout)
