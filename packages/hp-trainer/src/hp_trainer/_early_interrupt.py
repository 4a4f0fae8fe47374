"""The first moments of `hp-train`: while its modules are imported, Ctrl-C ends it at once and without a traceback.

Imported before all else; in a program that only uses this package it changes nothing.
"""

from __future__ import annotations

import os
import signal
import sys


def is_command() -> bool:
    """Return whether this process is `hp-train` or `python -m hp_trainer`."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    # Until the module that `-m` names has been found, that is the program's name.
    return name == "hp-train" or (name == "-m" and "hp_trainer" in sys.orig_argv)


# What is ignored, as in the background of a shell script, stays so; `main` takes the signal over.
if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Not `contextlib.suppress`: the import would take long enough for a Ctrl-C to come in it.
    try:  # noqa: SIM105
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ValueError:  # in another than the main thread
        pass
