"""Restore the default action of SIGINT while `hp-train` imports its modules, so that Ctrl-C prints no traceback.

The package imports this module before any other. Outside the command it changes nothing.
"""

from __future__ import annotations

import os
import signal
import sys


def is_command() -> bool:
    """Return whether this process is `hp-train` or `python -m hp_trainer`."""
    name = os.path.basename(sys.argv[0]) if getattr(sys, "argv", None) else ""
    # While Python is still locating the module of `-m`, sys.argv[0] is "-m".
    return name == "hp-train" or (name == "-m" and "hp_trainer" in sys.orig_argv)


# A signal that is ignored, as in background jobs of a shell script, stays ignored. `main` installs its own handler.
if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Not `contextlib.suppress`: importing contextlib takes long enough for a Ctrl-C to arrive meanwhile.
    try:  # noqa: SIM105
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ValueError:  # not the main thread
        pass
