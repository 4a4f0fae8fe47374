"""A watch over a rank's progress: it warns early, and at a timeout says which rank has not come to which collective."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from hp_dtensor.comm.world import World
from hp_dtensor.exceptions import HPError
from hp_trainer.early_exits import describe_exit
from hp_trainer.exceptions import CheckpointError, HangError, MachineError, ProblemsError, TrainingError
from hp_trainer.machine_errors import describe_machine_error
from hp_trainer.training.stall_places import frames_of_error, frames_of_thread, place_in_model
from hp_trainer.training.stall_reports import SET_UP, StallReport, describe_stall, read_reports, report_file

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
