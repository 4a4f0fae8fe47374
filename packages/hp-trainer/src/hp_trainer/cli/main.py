"""Entry point of `hp-train`: run a command, report any error in one line, return the exit code."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hp_dtensor.exceptions import HPError, LaunchError
from hp_trainer.cli.arguments import UsageError, help_text, usage_of
from hp_trainer.cli.output import mute, open_standard_streams, write_stacks_on_request
from hp_trainer.exceptions import ProblemsError, StoppedError
from hp_trainer.failures import describe_exit, describe_machine_error

if TYPE_CHECKING:
    from hp_dtensor.launch import RankEnvironment


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `hp-train` and return its exit code.

    0: done. 1: it failed. 2: invalid input. 128 + n: stopped by signal n (130 for Ctrl-C, 143 for SIGTERM, 141 if the
    output is no longer read). Training stops after the current step, with a checkpoint.
    """
    # First, before any file is opened that could get the descriptor of a standard stream.
    open_standard_streams()
    write_stacks_on_request()
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
    # Imported late, so that `--help` and errors of usage do not wait for the imports of training.
    from hp_trainer.stop_signals import Interrupted, interruptible

    try:
        with interruptible():
            return _dispatch(given)
    except BrokenPipeError:
        # The reader of the output has closed the pipe (`hp-train --help | head`).
        mute(sys.stdout)
        return 128 + signal.SIGPIPE
    except Interrupted as interrupted:
        return _fail(f"stopped by {interrupted.signal.name}", 128 + interrupted.signal)
    except StoppedError as stopped:
        return _fail(str(stopped), 128 + stopped.signal)
    except UsageError as error:
        return _fail(f"{error}\n{usage_of(given)}", 2)
    except ProblemsError as error:
        return _fail(str(error), 2)
    except HPError as error:
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
        if message is None and not isinstance(error, OSError):
            raise
        return _fail(message or str(error), 1, every_rank=True)


def _dispatch(given: list[str]) -> int:
    if not given:
        raise UsageError("give a CONFIG or a command")
    if "--help" in given or "-h" in given:
        print(help_text())
        return 0
    if given == ["--version"]:
        from importlib.metadata import version

        print(version("hp-trainer"))
        return 0
    from hp_trainer.cli import commands, runs

    if given[0] in commands.COMMANDS:
        return commands.COMMANDS[given[0]](given[1:])
    _refuse_unknown_command(given[0], list(commands.COMMANDS))
    return runs.train_command(given)


def _refuse_unknown_command(word: str, known: list[str]) -> None:
    """Raise for a first word that is neither a command nor a file, and has neither folder nor suffix."""
    # `run.yaml` or `configs/run` is meant as a file, even if it does not exist.
    if word.startswith("-") or Path(word).name != word or Path(word).suffix or Path(word).exists():
        return
    near = difflib.get_close_matches(word, [*known, "train"], n=1)
    # Newcomers try `hp-train train`, but training has no command word of its own.
    meant = "hp-train CONFIG" if near == ["train"] else f"hp-train {near[0]}" if near else None
    hint = f"did you mean `{meant}`?" if meant else f"commands are: {', '.join(sorted(known))}"
    raise UsageError(f"there is no command or file {word!r}; {hint}")


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
    """Write the message to the file from which torchrun takes a rank's error, and prints it below its own traceback.

    The format is that of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    # The first error is the cause; a file may already have it.
    if file and not Path(file).exists():
        extra = {"py_callstack": f"hp-train: {message}", "timestamp": str(int(time.time()))}
        text = json.dumps({"message": {"message": f"hp-train: {message}", "extraInfo": extra}})
        with contextlib.suppress(OSError):
            Path(file).write_text(text, encoding="utf-8")
