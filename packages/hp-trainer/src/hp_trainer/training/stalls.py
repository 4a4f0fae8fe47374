"""Detection of stalls: an early warning, and at a timeout the rank and the collective that it has not started.

`StallWatch` observes the progress of a rank and writes a `StallReport` when it stalls; `describe_stall` combines the
reports of all ranks. The module being computed is found on the stack of the main thread, so that nothing is recorded
while training makes progress.
"""

from __future__ import annotations

import contextlib
import json
import re
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from pydantic import TypeAdapter

from hp_dtensor.comm.world import World
from hp_dtensor.exceptions import HPError
from hp_dtensor.platform.selection import platform_plugins
from hp_trainer import _coordination
from hp_trainer._files import read_plain_text, write_atomically
from hp_trainer.exceptions import (
    CheckpointError,
    HangError,
    MachineError,
    ProblemsError,
    TrainingError,
    describe_exit,
    describe_machine_error,
)
from hp_trainer.pipeline import Action

_CHECK_SECONDS = 0.5
_GRACE_SECONDS = 2.0  # wait for the reports of other ranks
_LATE_FACTOR = 10.0
_LEAST_SECONDS = 10.0
_HISTORY = 20


class StallWatch:
    """A thread that writes a report of this rank when it makes no progress for much longer than usual.

    A phase (`step`, `checkpoint`, ...) is late after ten times its median time, but at least ten seconds, and always
    after half of `timeout_seconds`. The rank then writes a report, and the lowest rank with a report prints a summary
    of all reports.

    Args:
        module_names: returns the names of the model's modules by `id`; called only for a report.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        timeout_seconds: float,
        module_names: Callable[[], Mapping[int, str]] = dict,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._folder, self._world, self._timeout = folder, world, timeout_seconds
        self._module_names = module_names
        self._report = report or _coordination.report
        # The watch is created by the thread that trains.
        self._main = threading.get_ident()
        self._phase, self._step, self._since = "start", 0, time.monotonic()
        self._durations: dict[str, deque[float]] = {}
        self._reported_after = 0.0  # seconds into the phase at the last report; 0: none
        self._stop = threading.Event()
        # A daemon, so that it does not keep a process alive whose main thread has failed elsewhere.
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)

    def start_phase(self, phase: str, step: int) -> None:
        """Record that a phase starts now, which ends the previous one."""
        # Monotonic: a clock set by NTP must not look like a stall.
        now, previous, since = time.monotonic(), self._phase, self._since
        self._durations.setdefault(previous, deque(maxlen=_HISTORY)).append(now - since)
        self._phase, self._step, self._since = phase, step, now
        if self._reported_after:
            self._reported_after = 0.0
            self._report(f"rank {self._world.rank}: the late {previous} has ended after {now - since:.0f} s")
            self._delete_report()

    def explain(self, error: BaseException) -> str | None:
        """Return which ranks did not take part in a collective that timed out; None: the error is another one."""
        waited = time.monotonic() - self._since
        # A collective starts after its phase does, so an error long before the timeout has another cause.
        if waited < 0.8 * self._timeout or not is_of_collective(error):
            return None
        # The thread stops first: it would overwrite the report with the stack of this error handler.
        self._stop.set()
        self._thread.join()
        # Without a report, as on a full disk, this rank counts as silent; the error of the hang is still the cause.
        with contextlib.suppress(OSError):
            self._write_report(waited, frames_of_error(error))
        # The other ranks reach their timeouts at slightly different times.
        time.sleep(_GRACE_SECONDS)
        return f"{self._describe()}; waited {self._timeout:g} s (launch.timeout_seconds)"

    def __enter__(self) -> Self:
        self._delete_report()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            self._delete_report()

    def _watch(self) -> None:
        while not self._stop.wait(_CHECK_SECONDS):
            waited = time.monotonic() - self._since
            durations = self._durations.get(self._phase)
            # The median ignores outliers such as the first step, which compiles kernels.
            late = max(_LEAST_SECONDS, _LATE_FACTOR * statistics.median(durations)) if durations else self._timeout
            # In any case before the timeout, at which the processes end. Repeated reports come at doubling times.
            if waited > max(min(late, self._timeout / 2), 2 * self._reported_after):
                self._reported_after = waited
                # A full or missing disk makes training itself fail.
                with contextlib.suppress(OSError):
                    self._write_report(waited, frames_of_thread(self._main))
                    if not self._stop.wait(_GRACE_SECONDS) and self._prints_summary():
                        self._report(f"{self._describe()}; {waited:.0f} s, stacks in {self._folder}")

    def _prints_summary(self) -> bool:
        """Return whether this rank prints for all: it is the lowest rank with a report."""
        return bool(self._reported_after) and min(read_reports(self._folder), default=-1) == self._world.rank

    def _describe(self) -> str:
        return describe_stall(read_reports(self._folder), self._world.size)

    def _write_report(self, waited: float, frames: Sequence[FrameType]) -> None:
        report = StallReport(
            rank=self._world.rank,
            phase=self._phase,
            step=self._step,
            seconds=round(waited, 1),
            calls={_name_of(group.ranks): (group.num_calls, group.last_call) for group in self._world.groups()},
            module=module_of_frames(frames, self._module_names()),
            stack=[f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" for frame in frames],
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        # Other ranks may read reports at any time.
        write_atomically(report_file(self._folder, self._world.rank), json.dumps(asdict(report), indent=1))

    def _delete_report(self) -> None:
        with contextlib.suppress(OSError):
            report_file(self._folder, self._world.rank).unlink(missing_ok=True)


@contextlib.contextmanager
def watched_set_up(folder: Path, world: World, timeout_seconds: float) -> Iterator[None]:
    """Watch a rank while its model, optimizer and data are set up inside the block."""
    with contextlib.ExitStack() as stack:
        watch = StallWatch(folder, world, timeout_seconds)
        if world.size > 1:
            stack.enter_context(watch)
        watch.start_phase(SET_UP, 0)
        try:
            yield
        except Exception as error:
            explanation = watch.explain(error) if world.size > 1 else None
            if explanation is None:
                raise
            raise HangError(explanation) from error
        except SystemExit as leaving:
            # An error of this rank, or the others would only report that it is missing.
            raise TrainingError(f"rank {world.rank} has {describe_exit(leaving, 'in its set-up')}") from leaving


def is_of_collective(error: BaseException) -> bool:
    """Return whether an error may come from a collective. Frameworks raise RuntimeError if a rank is missing."""
    if isinstance(error, HPError):
        return not isinstance(error, TrainingError | CheckpointError | MachineError | ProblemsError)
    return isinstance(error, RuntimeError) and describe_machine_error(error) is None


def _name_of(ranks: tuple[int, ...]) -> str:
    """Return the name of a group, the same on all of its ranks: `0-3`, `0,2,4`, or shortened for many ranks."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    text = ",".join(str(rank) for rank in ranks)
    return text if len(text) <= 60 else f"{text[:50]},... ({len(ranks)} ranks)"


_SHOWN_RANKS = 8
# Name of the phase before the first step.
SET_UP = "set-up"


@dataclass(frozen=True, kw_only=True)
class StallReport:
    """A stalled rank: its phase, collectives started by group, module and action of the pipeline, and stack."""

    rank: int
    phase: str
    step: int
    seconds: float
    calls: Mapping[str, tuple[int, str]]
    stack: Sequence[str]
    module: str = ""

    @property
    def place(self) -> str:
        """Return the module, and the innermost line of the stack outside of frameworks and communication."""
        # The line of the model or the user that led into these packages says more.
        machinery = "|".join(["hp_dtensor", "hp_fsdp", r"hp_platform_\w+", "threading", *platform_plugins()])
        outside = [line for line in self.stack if not re.search(f"/({machinery})[/.]", line)]
        line = (outside or list(self.stack) or ["an unknown place"])[-1]
        return f"in {self.module}, at {line}" if self.module else f"at {line}"


_REPORT = TypeAdapter(StallReport)


def report_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's report."""
    return folder / f"rank-{rank:05}.json"


def read_reports(folder: Path) -> dict[int, StallReport]:
    """Return the reports of all ranks, without damaged ones."""
    found: dict[int, StallReport] = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            report = _REPORT.validate_json(read_plain_text(path), strict=True)
        # Another version or a crash may have left any content; a report only adds to a message.
        except (OSError, ValueError):
            continue
        found[report.rank] = report
    return found


def describe_stall(reports: Mapping[int, StallReport], size: int) -> str:
    """Return which ranks the others wait for, those without a report or the furthest behind, and where those wait."""
    silent = [rank for rank in range(size) if rank not in reports]
    if not reports:
        return f"none of {size} ranks has a report"
    latest = max(reports.values(), key=lambda report: (report.step, report.seconds))
    known = {"step": f"step {latest.step}: ", SET_UP: "set-up: "}
    head = known.get(latest.phase, f"{latest.phase} at step {latest.step}: ")
    behind = _behind(reports)
    if silent:
        cause = f"{_ranks(silent)} of {size} has not answered: stopped, killed, or unreachable"
    elif behind:
        rank = min(behind)
        cause = f"{_ranks(sorted(behind))} of {size} has not answered: {behind[rank]}, {reports[rank].place}"
    else:
        cause = f"all {size} ranks wait for each other"
    return head + cause + _where_they_wait([report for rank, report in reports.items() if rank not in behind])


def _behind(reports: Mapping[int, StallReport]) -> dict[int, str]:
    """Return the ranks that lack the most collectives compared with the others of their groups, with the reason."""
    most: dict[str, tuple[int, str]] = {}
    for report in reports.values():
        for group, call in report.calls.items():
            # Pairs compare by the number of calls first.
            most[group] = max(most.get(group, (0, "")), call)
    behind: dict[int, str] = {}
    missing: dict[int, int] = defaultdict(int)
    for rank, report in reports.items():
        # A rank may not even have created a group in which others wait for it.
        for group in (group for group in most if group in report.calls or rank in _members(group)):
            count, _ = report.calls.get(group, (0, ""))
            if count < most[group][0]:
                behind[rank] = f"it has not started {most[group][1]} (call {most[group][0]} among ranks {group})"
                missing[rank] += most[group][0] - count
    # A rank that waits in one group falls behind in its other groups. The rank that caused it is furthest behind.
    furthest = max(missing.values(), default=0)
    return {rank: why for rank, why in behind.items() if missing[rank] == furthest}


def _members(group: str) -> Collection[int]:
    """Return the ranks of a group from its name; none if the name is shortened."""
    if span := re.fullmatch(r"(\d+)-(\d+)", group):
        return range(int(span[1]), int(span[2]) + 1)
    return [int(rank) for rank in group.split(",")] if re.fullmatch(r"\d+(,\d+)*", group) else []


def _where_they_wait(waiting: Sequence[StallReport]) -> str:
    if not waiting:
        return ""
    first = waiting[0]
    last = max(first.calls.values(), default=(0, ""))[1] or "no collective"
    return f"; {_ranks([report.rank for report in waiting])} waits after starting {last}, {first.place}"


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"rank {', '.join(str(rank) for rank in ranks[:_SHOWN_RANKS])}{more}"


# Local variables in which frameworks, the engine of hp_fsdp and pipelines have their module or action.
_LOCALS = ("self", "group", "module", "action")


def frames_of_thread(thread: int) -> list[FrameType]:
    """Return the frames of a thread by `ident`, innermost last; none if it has ended."""
    frame, found = sys._current_frames().get(thread), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def frames_of_error(error: BaseException | None) -> list[FrameType]:
    """Return the frames of an error's traceback and of its causes, innermost last."""
    found = []
    while error is not None:
        found += [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        error = error.__cause__
    return found


def module_of_frames(frames: Sequence[FrameType], names: Mapping[int, str]) -> str:
    """Return the innermost module on a stack, also for a collective of hp_fsdp, and the action of the pipeline."""
    module, action = "", ""
    for frame in reversed(frames):
        # Read once, because each access to f_locals makes a copy.
        values = frame.f_locals
        for value in (values[name] for name in _LOCALS if name in values):
            module = module or _module_of(value, names)
            if not action and isinstance(value, Action):
                action = f"action {value} of the pipeline (stage {value.stage})"
    return ", ".join(filter(None, (module, action)))


def _module_of(value: Any, names: Mapping[int, str]) -> str:
    if id(value) in names:
        return f"module {names[id(value)] or 'the full model'}"
    # Matched by module name and attribute, since this runs on the stack of any code and must not fail.
    # A parameter group of hp_fsdp, or an object that communicates for one.
    group = getattr(value, "_group", value) if type(value).__module__.startswith("hp_fsdp") else None
    modules = getattr(group, "modules", None)
    found = [names[id(each)] for each in modules if id(each) in names] if isinstance(modules, list) else []
    return f"module {found[0] or 'the full model'}" if found else ""
