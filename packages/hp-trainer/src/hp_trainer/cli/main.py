"""Entry point of `hp-train`: run a command, report any error in one line, return the exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from hp_dtensor.exceptions import HPError, LaunchError
from hp_trainer._coordination import Interrupted, interruptible
from hp_trainer.cli.commands import hp_train
from hp_trainer.cli.completion import complete_if_asked
from hp_trainer.exceptions import ProblemsError, StoppedError, describe_exit, describe_machine_error

if TYPE_CHECKING:
    from hp_dtensor.launch import RankEnvironment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hp-train` and return its exit code.

    0: done. 1: it failed. 2: invalid input. 128 + n: stopped by signal n (130 for Ctrl-C, 143 for SIGTERM, 141 if the
    output is no longer read). Training stops after the current step, with a checkpoint.
    """
    # First, before any file is opened that could get the descriptor of a standard stream.
    open_standard_streams()
    # Writes the stacks of all threads on SIGUSR1, even while native code runs. In tests and notebooks standard error
    # may have no file descriptor.
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = _run(list(sys.argv[1:] if arguments is None else arguments))
    try:
        # Here, where an error becomes an exit code; at exit Python would only print it.
        sys.stdout.flush()
    except BrokenPipeError:
        mute(sys.stdout)
        return code or 128 + signal.SIGPIPE
    except OSError as error:
        mute(sys.stdout)
        return code or _fail(f"the output cannot be written: {describe_machine_error(error) or error}", 1)
    return code


def _run(given: list[str]) -> int:
    """Run the command, print any error in one line, and return the exit code."""
    # The option `--traceback` sets `traceback`.
    wanted: dict[str, bool] = {}
    try:
        with interruptible():
            asked = complete_if_asked(hp_train)
            return _invoke(given, wanted) if asked is None else asked
    except BrokenPipeError:
        # The reader of the output has closed the pipe (`hp-train settings | head`).
        mute(sys.stdout)
        return 128 + signal.SIGPIPE
    except Interrupted as interrupted:
        return _fail(f"stopped by {interrupted.signal.name}", 128 + interrupted.signal)
    except StoppedError as stopped:
        return _fail(str(stopped), 128 + stopped.signal)
    except click.UsageError as error:
        context = error.ctx
        lines = [error.format_message()]
        if context is not None:
            lines += [context.get_usage(), f"Try '{context.command_path} --help'."]
        return _fail("\n".join(lines), 2)
    except ProblemsError as error:
        return _fail(str(error), 2)
    except HPError as error:
        if wanted.get("traceback"):
            traceback.print_exc()
        return _fail(str(error), 2 if isinstance(error, ValueError) else 1, every_rank=True)
    except SystemExit as leaving:
        place = _place()
        # msrun starts a scheduler process in addition to the ranks, and `from_environment` ends it this way.
        if place is not None and place.is_scheduler:
            raise
        return _fail(f"something {describe_exit(leaving, 'before its work was done')}", 1, every_rank=True)
    except (OSError, MemoryError, ImportError) as error:
        # The user can act on these without a traceback. Other errors are bugs of ours, and keep theirs.
        message = describe_machine_error(error)
        if wanted.get("traceback") or (message is None and not isinstance(error, OSError)):
            raise
        return _fail(message or str(error), 1, every_rank=True)


def _invoke(given: list[str], wanted: dict[str, bool]) -> int:
    """Run the command that a command line names, without Click's own reports of errors and interrupts."""
    try:
        with hp_train.make_context("hp-train", given, obj=wanted) as context:
            code: int = hp_train.invoke(context)
            return code
    except click.exceptions.Exit as done:
        # After `--help` and `--version`.
        return done.exit_code


def _fail(message: str, code: int, *, every_rank: bool = False) -> int:
    """Print an error and return `code`. Under a launcher only rank 0 prints, unless `every_rank` is set."""
    found = _place()
    who = "" if found is None or found.rank == 0 else f"rank {found.rank}: "
    if every_rank or not who:
        try:
            print(f"hp-train: {who}{message}", file=sys.stderr, flush=True)
        except OSError:
            # The terminal is closed. The exit code still reports the failure.
            mute(sys.stderr)
    # A run that was stopped by a signal has not failed.
    if code < 128:
        _report_to_torchrun(message)
    return code


def _place() -> RankEnvironment | None:
    """Return this process's rank under a launcher; None without one, or if the launcher's variables are invalid."""
    from hp_dtensor.launch import rank_environment

    try:
        return rank_environment()
    except LaunchError:
        # The message being printed is about this error.
        return None


def _report_to_torchrun(message: str) -> None:
    """Write the message, as torch's ErrorHandler does, to the file from which torchrun takes a rank's error."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # The first error is the cause; a file may already have it.
    if file and not Path(file).exists():
        extra = {"py_callstack": f"hp-train: {message}", "timestamp": str(int(time.time()))}
        text = json.dumps({"message": {"message": f"hp-train: {message}", "extraInfo": extra}})
        with contextlib.suppress(OSError):
            Path(file).write_text(text, encoding="utf-8")


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
