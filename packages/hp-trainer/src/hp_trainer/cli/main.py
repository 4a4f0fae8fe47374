"""Entry of `hp-train`: from words to an exit code, with one line about whatever went wrong."""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hp_dtensor.exceptions import HPError, LaunchError
from hp_trainer.cli.arguments import UsageError
from hp_trainer.cli.help import USAGE, help_text
from hp_trainer.exceptions import ProblemsError, StoppedError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code.

    0: all done. 1: it failed while running. 2: bad input. 128 + n: stopped by signal n (130 for Ctrl-C, 143 for
    SIGTERM), training after the step under way and with a checkpoint of it.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    from hp_trainer.stop_request import Interrupted, interruptible

    try:
        with interruptible():
            return _dispatch(given)
    except BrokenPipeError:
        # The reader of our output has gone (`hp-train --help | head`); Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Interrupted as interrupted:
        return _fail(f"stopped by {interrupted.signal.name}", 128 + interrupted.signal)
    except StoppedError as stopped:
        return _fail(str(stopped), 128 + stopped.signal)
    except (ProblemsError, UsageError) as error:
        return _fail(str(error), 2)
    except HPError as error:
        return _fail(str(error), 2 if isinstance(error, ValueError) else 1, every_rank=True)
    except OSError as error:
        # The system's own words say what and where; a traceback would hide them.
        advice = "; free some space, then run the same command again" if error.errno == errno.ENOSPC else ""
        return _fail(f"{error}{advice}", 1, every_rank=True)


def _dispatch(given: list[str]) -> int:
    if not given:
        raise UsageError(f"give a CONFIG or a command; `hp-train --help` tells more\n{USAGE}")
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
    _refuse_misspelt_command(given[0], list(commands.COMMANDS))
    return runs.train_command(given)


def _refuse_misspelt_command(word: str, known: list[str]) -> None:
    """Refuse a first word that is neither a file nor an option, but nearly a command."""
    near = difflib.get_close_matches(word, known, n=1)
    if near and not Path(word).suffix and not Path(word).exists():
        raise UsageError(f"there is no command or file {word!r}; did you mean `hp-train {near[0]}`?\n{USAGE}")


def _fail(message: str, code: int, *, every_rank: bool = False) -> int:
    """Tell what went wrong; of a launcher's ranks, one tells what they all find in what they were given."""
    from hp_dtensor.launch import rank_environment

    try:
        found = rank_environment()
    except LaunchError:
        # That is what the message is about.
        found = None
    if found is None or found.rank == 0:
        print(f"hp-train: {message}", file=sys.stderr)
    elif every_rank:
        print(f"hp-train: rank {found.rank}: {message}", file=sys.stderr)
    if code < 128:
        _tell_torchrun(message)
    return code


def _tell_torchrun(message: str) -> None:
    """Write the message where torchrun looks for a rank's error, which it prints last, below its own traceback.

    The format is that of `torch.distributed.elastic.multiprocessing.errors.ErrorHandler`.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and not Path(file).exists():
        extra = {"py_callstack": f"hp-train: {message}", "timestamp": str(int(time.time()))}
        text = json.dumps({"message": {"message": f"hp-train: {message}", "extraInfo": extra}})
        with contextlib.suppress(OSError):
            Path(file).write_text(text, encoding="utf-8")
