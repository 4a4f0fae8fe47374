"""A watch over a rank's progress: it warns early, and at a timeout says which rank has not come to which collective.

Reports of ranks that have come to a halt, and what they say together.

The part of the model that a thread is at work for, found on its stack: nothing is recorded while all goes well.
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

from hp_dtensor.comm.world import World
from hp_dtensor.exceptions import HPError
from hp_trainer._files import read_plain_text
from hp_trainer.exceptions import CheckpointError, HangError, MachineError, ProblemsError, TrainingError
from hp_trainer.failures import describe_exit, describe_machine_error
from hp_trainer.pipeline import Action

_CHECK_SECONDS = 0.5
_GRACE_SECONDS = 2.0  # for the reports of other ranks
_TIMES_THE_USUAL = 10.0
_LEAST_SECONDS = 10.0
_REMEMBERED = 20


class StallWatch:
    """A thread that writes a report of this rank when nothing has gone on for far longer than usual.

    A phase (`step`, `checkpoint`, ...) is late after ten times its usual time, at least ten seconds, and in any case
    after half of `timeout_seconds`. The rank then writes a report, and the lowest rank that has written one tells
    what all reports say together.

    Args:
        folder: place of the reports, shared by the ranks.
        world: the job.
        timeout_seconds: the longest that a collective waits.
        module_names: returns the names of the model's modules by `id`; asked when there is something to report.
        tell: is given the lines for the user.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        timeout_seconds: float,
        module_names: Callable[[], Mapping[int, str]] = dict,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._folder, self._world, self._timeout = folder, world, timeout_seconds
        self._module_names = module_names
        self._tell = tell or _to_stderr
        self._main = threading.get_ident()
        self._phase, self._step, self._since = "start", 0, time.monotonic()
        self._usual: dict[str, deque[float]] = {}
        self._told = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall watch", daemon=True)

    def begin(self, phase: str, step: int) -> None:
        """Note that the phase before has ended and another one begins now."""
        now, before, since = time.monotonic(), self._phase, self._since
        self._usual.setdefault(before, deque(maxlen=_REMEMBERED)).append(now - since)
        self._phase, self._step, self._since = phase, step, now
        if self._told:
            self._told = 0.0
            self._tell(f"rank {self._world.rank}: the {before} before has ended after {now - since:.0f} s")
            self._forget()

    def explain(self, error: BaseException) -> str | None:
        """Return who keeps whom waiting; None when nothing has taken long, or the error is of no collective."""
        waited = time.monotonic() - self._since
        if waited < 0.8 * self._timeout or not _is_of_collective(error):
            return None
        # The thread of this watch would write over it where the training has got to by now.
        self._stop.set()
        self._thread.join()
        self._report(waited, frames_of_error(error))
        time.sleep(_GRACE_SECONDS)
        return f"{self._describe()}; waited {self._timeout:g} s (launch.timeout_seconds)"

    def __enter__(self) -> Self:
        self._forget()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            self._forget()

    def _limit(self) -> float:
        usual = self._usual.get(self._phase)
        late = max(_LEAST_SECONDS, _TIMES_THE_USUAL * statistics.median(usual)) if usual else self._timeout
        return min(late, self._timeout / 2)

    def _watch(self) -> None:
        while not self._stop.wait(_CHECK_SECONDS):
            waited = time.monotonic() - self._since
            if waited > max(self._limit(), 2 * self._told):
                self._told = waited
                # A disk that is full or gone ends the training by itself.
                with contextlib.suppress(OSError):
                    self._report(waited, frames_of_thread(self._main))
                    if not self._stop.wait(_GRACE_SECONDS) and self._speaks():
                        self._tell(f"{self._describe()}; {waited:.0f} s, stacks in {self._folder}")

    def _speaks(self) -> bool:
        """Return whether this rank tells for all: the lowest one that has reported."""
        return bool(self._told) and min(read_reports(self._folder), default=-1) == self._world.rank

    def _describe(self) -> str:
        return describe_stall(read_reports(self._folder), self._world.size)

    def _report(self, waited: float, frames: Sequence[FrameType]) -> None:
        report = StallReport(
            rank=self._world.rank,
            phase=self._phase,
            step=self._step,
            seconds=round(waited, 1),
            calls={_name_of(group.ranks): (group.num_calls, group.last_call) for group in self._world.groups()},
            module=place_in_model(frames, self._module_names()),
            stack=[f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" for frame in frames],
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        path = report_file(self._folder, self._world.rank)
        temporary = path.with_suffix(".incomplete")
        temporary.write_text(json.dumps(report.to_plain(), indent=1), encoding="utf-8")
        # Renamed when whole: other ranks read the reports at any time.
        temporary.replace(path)

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            report_file(self._folder, self._world.rank).unlink(missing_ok=True)


@contextlib.contextmanager
def watched_set_up(folder: Path, world: World, timeout_seconds: float) -> Iterator[None]:
    """Watch over a rank inside the block, in which its model, optimizer and data are made ready.

    Args:
        folder, world, timeout_seconds: as of `StallWatch`.

    Raises:
        HangError: other ranks have not answered in time; names them.
        TrainingError: something left with SystemExit; names the rank and the line.
    """
    with contextlib.ExitStack() as stack:
        watch = StallWatch(folder, world, timeout_seconds)
        if world.size > 1:
            stack.enter_context(watch)
        watch.begin(SET_UP, 0)
        try:
            yield
        except Exception as error:
            told = watch.explain(error) if world.size > 1 else None
            if told is None:
                raise
            raise HangError(told) from error
        except SystemExit as leaving:
            # Else the ranks that wait for this one would be blamed.
            raise TrainingError(f"rank {world.rank} has {describe_exit(leaving, 'in its set-up')}") from leaving


def _is_of_collective(error: BaseException) -> bool:
    """Return whether an error may come of a collective; frameworks raise RuntimeError where a partner is missing."""
    if isinstance(error, HPError):
        return not isinstance(error, TrainingError | CheckpointError | MachineError | ProblemsError)
    return isinstance(error, RuntimeError) and describe_machine_error(error) is None


def _name_of(ranks: tuple[int, ...]) -> str:
    """Return a name of a group, the same on all of its ranks: `0-3`, `0,2,4`, and shortened for very many."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    text = ",".join(str(rank) for rank in ranks)
    return text if len(text) <= 60 else f"{text[:50]},... ({len(ranks)} ranks)"


def _to_stderr(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"hp-train: {line}", file=sys.stderr, flush=True)


# Where a rank waits says less than the line of the model or of the user that led there.
_MACHINERY = re.compile(r"/(hp_dtensor|hp_fsdp|hp_platform_\w+|torch|mindspore|threading)[/.]")
_SHOWN_RANKS = 8
# The phase before the first step.
SET_UP = "set-up"


@dataclass(frozen=True, kw_only=True)
class StallReport:
    """The state of one rank.

    Attributes:
        phase, step, seconds: what it has been doing, at which step, for how long.
        calls: by group of ranks, how many collectives it has started there, and the name of the last.
        module: the part of the model, and the action of a pipeline, that it is at work for; empty outside of both.
        stack: the main thread's, `file:line in function`, innermost last.
    """

    rank: int
    phase: str
    step: int
    seconds: float
    calls: Mapping[str, tuple[int, str]]
    stack: Sequence[str]
    module: str = ""

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def place(self) -> str:
        """Return the module, and the innermost line of the stack that is no machinery of communication."""
        outside = [line for line in self.stack if not _MACHINERY.search(line)]
        line = (outside or list(self.stack) or ["an unknown place"])[-1]
        return f"in {self.module}, at {line}" if self.module else f"at {line}"


def report_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's report."""
    return folder / f"rank-{rank:05}.json"


def read_reports(folder: Path) -> dict[int, StallReport]:
    """Read the reports of all ranks; damaged ones are left out."""
    found: dict[int, StallReport] = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            values = json.loads(read_plain_text(path))
            calls = {name: (int(count), str(call)) for name, (count, call) in values["calls"].items()}
            report = StallReport(**values | {"calls": calls})
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        found[report.rank] = report
    return found


def describe_stall(reports: Mapping[int, StallReport], size: int) -> str:
    """Return which ranks keep the others waiting, and where those wait.

    Ranks without a report are stopped, dead, or cut off. Of the others those are behind that have started fewer
    collectives in a group than its other ranks.
    """
    silent = [rank for rank in range(size) if rank not in reports]
    if not reports:
        return f"no rank of {size} tells where it is"
    latest = max(reports.values(), key=lambda report: (report.step, report.seconds))
    known = {"step": f"step {latest.step}: ", SET_UP: "set-up: "}
    head = known.get(latest.phase, f"{latest.phase} at step {latest.step}: ")
    behind = _behind(reports)
    if silent:
        told = f"{_ranks(silent)} of {size} has not answered: stopped, killed, or not to be reached"
    elif behind:
        rank = min(behind)
        told = f"{_ranks(sorted(behind))} of {size} has not answered: {behind[rank]}, {reports[rank].place}"
    else:
        told = f"all {size} ranks wait for each other"
    return head + told + _where_they_wait([report for rank, report in reports.items() if rank not in behind])


def _behind(reports: Mapping[int, StallReport]) -> dict[int, str]:
    """Return the ranks that have started fewer collectives in a group than others, and how many."""
    most: dict[str, tuple[int, str]] = {}
    for report in reports.values():
        for group, call in report.calls.items():
            most[group] = max(most.get(group, (0, "")), call)
    behind: dict[int, str] = {}
    missing: dict[int, int] = defaultdict(int)
    for rank, report in reports.items():
        # A rank may not even have made a group in which others wait for it.
        for group in (group for group in most if group in report.calls or rank in _members(group)):
            count, _ = report.calls.get(group, (0, ""))
            if count < most[group][0]:
                behind[rank] = f"it has not come to {most[group][1]} (call {most[group][0]} among ranks {group})"
                missing[rank] += most[group][0] - count
    # Who waits in one group is behind in another; the one that has stepped out of line is behind by the most.
    furthest = max(missing.values(), default=0)
    return {rank: why for rank, why in behind.items() if missing[rank] == furthest}


def _members(group: str) -> Collection[int]:
    """Return the ranks of a group by its name; none of a name that is shortened."""
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


# Local variables by which frameworks, the engine of hp_fsdp and pipelines call what they are at work for.
_LOCALS = ("self", "group", "module", "action")


def frames_of_thread(thread: int) -> list[FrameType]:
    """Return the frames of a running thread (its `ident`), the innermost last; none of one that has ended."""
    frame, found = sys._current_frames().get(thread), []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def frames_of_error(error: BaseException | None) -> list[FrameType]:
    """Return the frames that an error has left, with those of what it was raised from, the innermost last."""
    found = []
    while error is not None:
        found += [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        error = error.__cause__
    return found


def place_in_model(frames: Sequence[FrameType], names: Mapping[int, str]) -> str:
    """Return the innermost module that a stack is inside of, and the pipeline's action; empty outside of both.

    Args:
        frames: the innermost last.
        names: names of the model's modules by `id`.

    A collective of `hp_fsdp`, in backward too, counts for the module whose parameters it gathers or whose gradients it
    reduces.
    """
    module, action = "", ""
    for frame in reversed(frames):
        # Taken once: each access makes a copy.
        values = frame.f_locals
        for value in (values[name] for name in _LOCALS if name in values):
            module = module or _module_of(value, names)
            if not action and isinstance(value, Action):
                action = f"action {value} of the pipeline (stage {value.stage})"
    return ", ".join(filter(None, (module, action)))


def _module_of(value: Any, names: Mapping[int, str]) -> str:
    if id(value) in names:
        return f"module {names[id(value)] or 'the whole model'}"
    # A group of hp_fsdp, or what communicates for one.
    group = getattr(value, "_group", value) if type(value).__module__.startswith("hp_fsdp") else None
    modules = getattr(group, "modules", None)
    found = [names[id(each)] for each in modules if id(each) in names] if isinstance(modules, list) else []
    return f"module {found[0] or 'the whole model'}" if found else ""
