"""The exceptions of hp_trainer, each also of the builtin kind one would expect, and failures described in one line."""

from __future__ import annotations

import errno
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hp_dtensor.exceptions import HPError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem of the input, with what is needed to fix it.

    Attributes:
        path: dotted path of the setting (`parallel.tp`), or the name of a file or object; may be empty.
        what: the problem, as a clause ("unknown key").
        expected: what would be accepted; may be empty.
        got: the given value; may be empty.
        hint: what to do; may be empty.
        source: where the value is given (`run.yaml:4`, `--parallel.tp`); may be empty.
    """

    path: str
    what: str
    expected: str = ""
    got: str = ""
    hint: str = ""
    source: str = ""

    def __str__(self) -> str:
        lines = [": ".join(part for part in (self.source, self.path, self.what) if part)]
        details = (("expected", self.expected), ("got", self.got), ("try", self.hint))
        lines += [f"    {label}: {text}" for label, text in details if text]
        return "\n".join(lines)

    def within(self, prefix: str) -> Problem:
        """Return the same problem with `prefix` in front of its path."""
        return replace(self, path=f"{prefix}.{self.path}" if self.path else prefix)


class _Explained(HPError):
    """An error whose message is enough."""

    needs_traceback = False


class ProblemsError(_Explained, ValueError):
    """The input has problems; the message lists all of them."""

    def __init__(self, problems: Sequence[Problem], title: str) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{title}: {count}", *(str(problem) for problem in self.problems)]))


class ConfigError(ProblemsError):
    """The configuration has unknown keys, wrong types or impossible values."""


class ParallelDimsError(ProblemsError):
    """Degrees of parallelism that fit neither each other, nor the world size, nor the model."""


class PlanError(HPError, ValueError):
    """A plan cannot be made: the model does not report its sizes, or the device is unknown."""


class DataError(_Explained, ValueError):
    """Data is missing, has no text, or differs from what the run has been trained on."""


class EvaluationError(HPError, ValueError):
    """An evaluation cannot run: a library is not installed, or there is no model, or none that can generate text."""


class RunFolderError(HPError, ValueError):
    """A run folder has another run, or no run where one was expected."""


class RunLockedError(_Explained, RuntimeError):
    """Another job is training the run, or has taken it over."""


class TrainingError(_Explained, RuntimeError):
    """Training cannot continue, for example because the loss is not finite."""


class SilentCorruptionError(_Explained, RuntimeError):
    """A repeated or replicated computation gave different bits; the message names the ranks."""


class HangError(_Explained, RuntimeError):
    """A collective timed out; the message names the ranks that did not take part."""


class MachineError(_Explained, RuntimeError):
    """The machine failed or refused something during training: a disk, a quota, a limit, memory."""


class ScheduleError(HPError, ValueError):
    """A pipeline schedule does not exist for these numbers, is incomplete, or would deadlock."""


class PipelineError(HPError, RuntimeError):
    """Stages, inputs or messages of a pipeline do not match, or one of its ranks has ended; names rank and stage."""


class StoppedError(HPError, RuntimeError):
    """The run was stopped by a signal."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class ExportError(HPError, ValueError):
    """A model cannot be written as a Hugging Face directory; the message has the reason and the directory."""


class CheckpointError(_Explained, ValueError):
    """A checkpoint is missing, damaged, or of another model; the message names the file and the tensor."""


class UnfitCheckpointError(CheckpointError):
    """A sound checkpoint does not fit the run: it has another model, other tensors, or was trained on other data."""


def raise_if_any(problems: Iterable[Problem], error: type[ProblemsError], title: str) -> None:
    """Raise `error` if there are problems."""
    found = tuple(problems)
    if found:
        raise error(found, title)


def join_choices(values: Sequence[object]) -> str:
    """Join values for a message: `2`, `2 or 4`, `1, 2 or 4`."""
    *rest, last = (str(value) for value in values)
    return f"{', '.join(rest)} or {last}" if rest else last


# errno -> (what it means, what to do)
_ERRORS = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("your disk quota is used up", "free some space"),
    errno.EFBIG: ("the file would be larger than this process may write", "raise the limit (ulimit -f)"),
    errno.EROFS: ("the file system is read-only", "choose another folder, or mount it writable"),
    errno.EACCES: ("permission denied", "choose another folder, or change its permissions"),
    errno.EPERM: ("permission denied", "choose another folder, or change its permissions"),
    errno.EIO: ("the disk or the network file system failed", "look at the machine's log"),
    errno.ESTALE: ("the network file system has lost the file", "mount it again"),
    errno.EISDIR: ("there is a folder where a file is needed", "move it away"),
    errno.ENOTDIR: ("there is a file where a folder is needed", "move it away"),
    errno.ELOOP: ("a symbolic link points to itself", "remove it"),
    errno.EMFILE: ("this process has too many files open", "raise the limit (ulimit -n)"),
    errno.ENFILE: ("the machine has too many files open", "close other programs"),
    errno.EAGAIN: ("no more processes or threads can be started", "raise the limit (ulimit -u)"),
    errno.ENOMEM: ("the memory is used up", "raise the limit (ulimit -v), or use less"),
}
# Frameworks have no common class for it: they raise RuntimeError with such a text.
_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc", re.I)
LESS_MEMORY = "Use more memory or ranks, a smaller training.micro_batch_size, or training.recompute=full"


def describe_machine_error(error: BaseException) -> str | None:
    """Return what is wrong with the machine and what to do; None if the error has another cause."""
    if isinstance(error, HPError):
        return None
    if isinstance(error, OSError) and error.errno in _ERRORS:
        what, advice = _ERRORS[error.errno]
        # Of a rename that fails, the second name is the file that could not be written.
        where = f"{error.filename2 or error.filename}: " if error.filename is not None else ""
        return f"{where}{what} ({error.strerror}); {advice}"
    if is_out_of_memory(error):
        first, *_ = str(error).splitlines() or ["an allocation failed"]
        return f"the memory is used up: {first}; {LESS_MEMORY[0].lower()}{LESS_MEMORY[1:]}"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports that the memory of the machine or of a device is used up."""
    if isinstance(error, MemoryError):
        return True
    # A shared library that cannot be mapped for lack of memory raises ImportError.
    return isinstance(error, RuntimeError | ImportError) and _MEMORY.search(str(error)) is not None


def with_path(error: OSError, path: object) -> OSError:
    """Return a system error that names `path`. An error of a write to an open file names none by itself."""
    if error.filename is not None or error.errno is None:
        return error
    return OSError(error.errno, error.strerror, str(path))


def describe_exit(leaving: SystemExit, when: str) -> str:
    """Return a clause about a `sys.exit` in a plugin, hook or user file, which is not the end of a run."""
    # The builtin `exit()` and a replaced `sys.exit` (wandb's) have frames of their own, which do not help the user.
    replaced = getattr(sys.exit, "__code__", None)
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(leaving.__traceback__)
        if frame.f_code is not replaced and "_sitebuiltins" not in frame.f_code.co_filename
    ]
    where = f", called at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
    return f"left with SystemExit({leaving.code!r}) {when}{where}; raise an error instead of calling sys.exit()"
