"""Every exception that hp_trainer raises for a user's mistake; each is also the builtin one would expect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hp_dtensor.exceptions import HPError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with the input, told so that it can be mended.

    Attributes:
        path: dotted path of the setting (`parallel.tp`) or the name of the thing at fault; may be empty.
        what: what is wrong, as a clause ("unknown key").
        expected: what would be accepted; may be empty.
        got: what came; may be empty.
        hint: what to do; may be empty.
        source: where the value stands (`run.yaml:4`, `--parallel.tp`); may be empty.
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
        """Return the same problem, its path seen from the section that holds `prefix`."""
        return replace(self, path=f"{prefix}.{self.path}" if self.path else prefix)


class ProblemsError(HPError, ValueError):
    """Input with one or more problems; the message lists all of them.

    Attributes:
        problems: every problem found.
    """

    needs_traceback = False

    def __init__(self, problems: Sequence[Problem], title: str) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{title}: {count}", *(str(problem) for problem in self.problems)]))


class ConfigError(ProblemsError):
    """A configuration that cannot be used: unknown keys, wrong types, impossible values."""


class ParallelDimsError(ProblemsError):
    """Parallel degrees that do not fit each other, the world size or the model."""


class PlanError(HPError, ValueError):
    """A plan that cannot be made: of a model that does not tell its sizes, or for a device that nobody knows."""


class DataError(HPError, ValueError):
    """Data that is missing, holds no text, or is not what an earlier part of the run has seen."""


class EvaluationError(HPError, ValueError):
    """An evaluation that cannot be made: a library is not installed, or there is no model."""


class RunFolderError(HPError, ValueError):
    """A run folder that holds another run, or none where one was expected."""


class RunLockedError(HPError, RuntimeError):
    """A run that another job is training, or has taken over."""

    needs_traceback = False


class TrainingError(HPError, RuntimeError):
    """Training cannot go on, such as with a loss that is no finite number."""

    needs_traceback = False


class SilentCorruptionError(HPError, RuntimeError):
    """A computation that gave other bits than the same one elsewhere, or a second time; names the ranks."""

    needs_traceback = False


class HangError(HPError, RuntimeError):
    """Ranks that have waited for others in vain; the message names those that have not answered."""

    needs_traceback = False


class MachineError(HPError, RuntimeError):
    """The machine refused something while a run trained: a disk, a quota, a limit, memory."""

    needs_traceback = False


class ScheduleError(HPError, ValueError):
    """A pipeline schedule that does not exist for these numbers, leaves work out, or would hang."""


class PipelineError(HPError, RuntimeError):
    """Stages, inputs or messages of a pipeline that do not fit, or a rank of it that has ended; names rank and stage.

    Example:
        >>> issubclass(PipelineError, RuntimeError)
        True
    """


class StoppedError(HPError, RuntimeError):
    """A run that was asked to stop by a signal, and did.

    Attributes:
        signal: number of the signal.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class ExportError(HPError, ValueError):
    """A model that cannot be written as a Hugging Face directory; says why, and where it would go."""


class CheckpointError(HPError, ValueError):
    """A checkpoint that is missing, damaged, or of another model; names the file and the tensor."""

    needs_traceback = False


def raise_if_any(problems: Iterable[Problem], error: type[ProblemsError], title: str) -> None:
    """Raise `error` when there are problems.

    Raises:
        ProblemsError: of the given class, listing all problems.
    """
    found = tuple(problems)
    if found:
        raise error(found, title)


def join_choices(values: Sequence[object]) -> str:
    """Join values for a message: `2`, `2 or 4`, `1, 2 or 4`."""
    *rest, last = (str(value) for value in values)
    return f"{', '.join(rest)} or {last}" if rest else last
