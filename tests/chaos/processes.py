"""`hp-train` in processes that are forked from one that has imported everything, so that a case takes a second."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# All that a command would import itself, again each time in a forked process.
from hp_trainer.cli import main, train  # noqa: F401


@dataclass(frozen=True)
class Ended:
    """The end of a process: its exit code (negative: by which signal) and what it wrote."""

    code: int
    errors: str
    seconds: float


class Process:
    """A forked process that runs a command of `hp-train`, after `prepare` has been called in it."""

    def __init__(self, arguments: list[str], log: Path, prepare: Callable[[], None] = lambda: None) -> None:
        self._log, self._began = log, time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal that comes before the command has started is no KeyboardInterrupt of ours.
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.pid = os.fork()
        if self.pid == 0:
            self._run(arguments, prepare)
        signal.signal(signal.SIGINT, before)

    def _run(self, arguments: list[str], prepare: Callable[[], None]) -> None:
        code = 99
        try:
            out = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            prepare()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = main(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def wait(self, seconds: float = 120.0) -> Ended:
        """Wait for the end; a process that does not end in time is killed, and has code -1000."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                return Ended(code, self._log.read_text(errors="replace"), time.monotonic() - self._began)
            time.sleep(0.005)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return Ended(-1000, self._log.read_text(errors="replace"), time.monotonic() - self._began)
