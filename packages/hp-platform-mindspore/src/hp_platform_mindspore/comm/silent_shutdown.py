"""Silence at exit, when MindSpore's network threads print to the terminal whatever the log level."""

from __future__ import annotations

import atexit
import functools
import os
import sys

_STDERR = 2


@functools.cache
def end_without_messages() -> None:
    """Close standard error once this process's own exit handlers and its traceback, if any, are through.

    MindSpore's handler was registered first, when it was imported, so it runs after this one.
    """
    atexit.register(_silence)


def _silence() -> None:
    sys.stderr.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDERR)
    os.close(nowhere)
