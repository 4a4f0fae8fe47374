"""Faults of real ranks: killed, stopped, asked to stop from their first moment on, and coming back as fewer or more."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cases import REFUSED, SAME, STOPS, Case, Failure
from engines import HP_TRAIN, Engine, Layout

from hp_dtensor.launch.fork_server import RECORDS, environment_of
from hp_trainer.metrics import read_metrics

sys.path.append(str(Path(__file__).parents[1] / "trainer"))

from running_commands import left_in_shared_memory

STEPS = 150
# 12 samples are divided by 2, 3 and 4 ranks; a pipeline of two stages takes one layer for each.
SETTINGS = (
    f"--training.steps={STEPS}",
    "--training.global_batch_size=12",
    "--training.eval_interval=null",
    "--model.num_hidden_layers=2",
    "--lr_schedule.kind=constant",
    "--checkpoint.interval=10",
    "--launch.timeout_seconds=60",
)
LAYOUTS = {
    "2 shards": ("--launch.local_ranks=2",),
    "2 shards, saved in the background": ("--launch.local_ranks=2", "--checkpoint.background=true"),
    "2 stages": ("--launch.local_ranks=2", "--parallel.pp=2"),
    "2 ranks with copies of each other's experts": (
        "--launch.local_ranks=2",
        "--parallel.ep=2",
        "--parallel.ep_copies=1",
    ),
    "2 ranks whose experts move, saved in the background": (
        "--launch.local_ranks=2",
        "--parallel.ep=2",
        "--parallel.ep_move_interval=3",
        "--checkpoint.background=true",
    ),
    "2 stages with split backwards": (
        "--launch.local_ranks=2",
        "--parallel.pp=2",
        "--pipeline.schedule=zero_bubble_h1",
        "--pipeline.microbatches=2",
    ),
    "2 ranks that share sequences": ("--launch.local_ranks=2", "--parallel.cp=2"),
    "2 stages of 2 ranks that share sequences": ("--launch.local_ranks=4", "--parallel.pp=2", "--parallel.cp=2"),
    "2 stages, averaged, saved in the background": (
        "--launch.local_ranks=2",
        "--parallel.pp=2",
        "--training.ema.decay=0.9",
        "--checkpoint.background=true",
    ),
}
# Layouts in which ranks die and others go on; experts that move are refused there.
RECOVERING = {
    **{name: (*settings, "--fault_tolerance.copies=1") for name, settings in LAYOUTS.items() if "move" not in name},
    "4 ranks, two replicas of 2 shards": (
        "--launch.local_ranks=4",
        "--parallel.dp_replicate=2",
        "--parallel.dp_shard=2",
        "--fault_tolerance.copies=0",
    ),
    "4 shards": ("--launch.local_ranks=4", "--fault_tolerance.copies=1"),
}
DEATHS = 5
RECOVERY = ("--fault_tolerance.interval=3", "--fault_tolerance.max_deaths=1000")
KILLS_OF_A_JOB, STEPS_BETWEEN = 12, 3
_DIED = re.compile(r"rank (\d+) of \d+ has died \(SIGKILL\); (?:another process takes its place|all ranks start again)")
START_SECONDS, END_SECONDS = 180, 240
# The end of a metrics file that has the last event of a step.
_END_BYTES, _STEP = 8192, re.compile(rb'"step": (\d+)')


class Ranks:
    """Runs on real ranks in a folder, all with the curve of the one without faults.

    Args:
        patience: how many times the usual limits a command may take, as on a busy machine.
    """

    def __init__(self, folder: Path, platform: str, patience: float) -> None:
        self.folder, self.platform, self.patience = folder, platform, patience
        self.run = folder / "ranks"
        self.records = Path(tempfile.mkdtemp(dir=folder))
        self.expect(self.finish(self.start("--launch.local_ranks=1")), 0)
        self.curve = self.losses()

    def start(self, *settings: str, engine: Engine = HP_TRAIN, processes: int = 1) -> subprocess.Popen[str]:
        command, variables = engine.command(self.run, processes, (*SETTINGS, *settings))
        # It marks the processes of this command, whose ranks lead groups of their own.
        self.mark = f"HP_CHAOS_COMMAND={time.monotonic_ns()}"
        name, value = self.mark.split("=")
        return subprocess.Popen(
            command,
            env={**os.environ, **variables, name: value, RECORDS: str(self.records)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str], seconds: float = END_SECONDS) -> tuple[int, str]:
        """Return the exit code and the errors of a command; one that does not end is killed with its ranks."""
        try:
            _, errors = process.communicate(timeout=seconds * self.patience)
        except subprocess.TimeoutExpired:
            raise Failure(f"it has not ended within {seconds * self.patience} s") from None
        finally:
            left = self.processes()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        if left:
            raise Failure(f"{len(left)} processes were left")
        return process.returncode, errors

    def processes(self, *wanted: str) -> list[int]:
        """Return the processes of the last command, itself included, whose environments hold what is `wanted`."""
        found = []
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            if {self.mark, *wanted} <= set(environment_of(pid, self.records)):
                found.append(pid)
        return found

    def titles(self) -> dict[int, str]:
        """Return the command lines of the processes of the last command."""
        found = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        return found

    def rank_of(self, pid: int) -> int:
        """Return the rank of a process; -1 if its environment does not name it."""
        names = (each.partition("=") for each in environment_of(pid, self.records))
        return next((int(value) for name, _, value in names if name == "RANK"), -1)

    def num_starts(self) -> int:
        """Return the number of starts that the metrics have."""
        return sum(event["event"] == "start" for event in read_metrics(self.run / "metrics.jsonl"))

    def rank(self, rank: int) -> int | None:
        """Return the process of a rank; None before it has started."""
        return next(iter(self.processes(f"RANK={rank}")), None)

    def wait_for_step(self, step: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + START_SECONDS * self.patience
        while time.monotonic() < deadline and process.poll() is None:
            if self.newest_step() >= step:
                return
            time.sleep(0.02)
        _, errors = self.finish(process, 0.1 if process.poll() is None else END_SECONDS)
        raise Failure(f"step {step} was not reached: {errors[-800:]}")

    def wait_for_rank(self, rank: int, process: subprocess.Popen[str]) -> int:
        deadline = time.monotonic() + START_SECONDS * self.patience
        while time.monotonic() < deadline and process.poll() is None:
            found = self.rank(rank)
            if found is not None:
                return found
            time.sleep(0.002)
        raise Failure(f"rank {rank} has not started")

    def wait_for_write(self, process: subprocess.Popen[str]) -> None:
        """Return while a checkpoint is being written."""
        deadline = time.monotonic() + START_SECONDS * self.patience
        while time.monotonic() < deadline and process.poll() is None:
            if self.half_written():
                return
        raise Failure("no checkpoint was seen being written")

    def half_written(self) -> list[str]:
        """Return the names of folders of incomplete checkpoints."""
        folder = self.run / "checkpoints"
        return [name for name in os.listdir(folder) if "incomplete" in name] if folder.exists() else []

    def losses(self, num_steps: int | None = STEPS) -> list[float]:
        """Return the losses of all steps, of which each has to occur once; None: of as many as there are."""
        steps = [event for event in read_metrics(self.run / "metrics.jsonl") if event["event"] == "step"]
        expected = len(steps) if num_steps is None else num_steps
        if [event["step"] for event in steps] != list(range(1, expected + 1)):
            raise Failure(f"steps {[event['step'] for event in steps]}")
        return [event["loss"] for event in steps]

    def newest_step(self) -> int:
        """Return the step of the last event of the metrics; 0 before the first.

        Only the end of the file is read, since this is called often while ranks need the processor.
        """
        with contextlib.suppress(FileNotFoundError), (self.run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
            steps = [int(found) for found in _STEP.findall(file.read())]
            return steps[-1] if steps else 0
        return 0

    def listening(self) -> set[str]:
        """Return the listening TCP sockets of the processes of the last command."""
        held = set[str]()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                held |= {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
        return {socket for socket in listening_sockets() if f"socket:[{socket}]" in held}

    @contextlib.contextmanager
    def in_folder(self, run: Path) -> Iterator[None]:
        """Have the run in another folder inside the block, whose parent holds nothing else, and remove both."""
        before, self.run = self.run, run
        try:
            yield
        finally:
            self.run = before
            subprocess.run(["rm", "-rf", str(run.parent)], check=True)

    def clear(self) -> None:
        subprocess.run(["rm", "-rf", str(self.run)], check=True)

    def expect(self, ended: tuple[int, str], *codes: int) -> str:
        code, errors = ended
        if code not in codes:
            raise Failure(f"exit code {code}, expected {codes}: {errors[-800:]}")
        return errors

    def expect_curve(self) -> str:
        """Compare with the curve of one rank; layouts sum in other orders."""
        try:
            np.testing.assert_allclose(self.losses(), self.curve, rtol=1e-3)
        except AssertionError as error:
            raise Failure(f"another curve: {error}") from None
        return SAME


def cases(folder: Path, platform: str, layout: str, patience: float) -> Iterator[Case]:
    """Yield each kind of case in turn, for each layout whose name holds `layout` in turn, again and again."""
    ranks = Ranks(folder, platform, patience)
    layouts = [settings for name, settings in LAYOUTS.items() if layout in name]
    kinds = (lose_a_rank, lose_in_a_write, change_the_number, stop)
    while layouts:
        for chosen in layouts:
            for kind in kinds:
                yield lambda random_, kind=kind, chosen=chosen: kind(ranks, chosen, random_)


def deaths(folder: Path, platform: str, layout: str, patience: float) -> Iterator[Case]:
    """Yield a case for each layout in which ranks recover in turn, again and again."""
    ranks = Ranks(folder, platform, patience)
    undisturbed: dict[str, list[float]] = {}
    chosen = {name: settings for name, settings in RECOVERING.items() if layout in name}
    while chosen:
        for name, settings in chosen.items():
            yield lambda random_, name=name, settings=settings: survive(ranks, undisturbed, name, settings, random_)


def survive(
    ranks: Ranks, undisturbed: dict[str, list[float]], name: str, layout: tuple[str, ...], random_: random.Random
) -> str:
    """Kill or stop processes of ranks at random moments of one job: the same bits of each loss as without that."""
    more = ("--fault_tolerance.interval=3", "--fault_tolerance.max_deaths=99", "--fault_tolerance.stopped_seconds=1")
    layout = (*layout, *more, f"--fault_tolerance.spares={random_.randrange(2)}")
    if name not in undisturbed:
        ranks.clear()
        ended = ranks.finish(ranks.start(*layout))
        if ended[0] == 2 and "cannot meet again on platform" in ended[1]:
            return REFUSED
        ranks.expect(ended, 0)
        undisturbed[name] = ranks.losses()
    ranks.clear()
    process = ranks.start(*layout)
    for step in sorted(random_.sample(range(1, 2 * STEPS // 3), DEATHS)):
        ranks.wait_for_step(step, process)
        time.sleep(random_.random() * 0.2)
        number = random_.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        # Sometimes two at once; also newcomers, and processes that wait.
        for pid in random_.sample([pid for pid in ranks.processes() if pid != process.pid], random_.choice([1, 1, 2])):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    ranks.expect(ranks.finish(process), 0)
    if ranks.losses() != undisturbed[name]:
        raise Failure("other losses than without deaths")
    if left := ranks.half_written():
        raise Failure(f"left behind: {left}")
    return SAME


@dataclass
class Survival:
    """Counts of the jobs in which ranks were killed, over all of them.

    Attributes:
        wanted: deaths of ranks after which no further job starts.
        deaths: number of deaths of each rank; those of processes that wait are not counted.
        survived: deaths in jobs that ended with the losses of an undisturbed run and left nothing behind.
        lines: a line per job.
    """

    wanted: int = 100
    deaths: dict[int, int] = field(default_factory=dict)
    survived: int = 0
    lines: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.deaths.values())

    def __str__(self) -> str:
        named = {rank: f"rank {rank}" if rank >= 0 else "unknown ranks" for rank in self.deaths}
        ranks = ", ".join(f"{count} of {named[rank]}" for rank, count in sorted(self.deaths.items()))
        return "\n".join([*self.lines, f"{self.survived} of {self.total} SIGKILLs of ranks survived ({ranks})"])


def kills(
    folder: Path, platform: str, layout: str, patience: float, counts: Survival, engine: Engine
) -> Iterator[Case]:
    """Yield a job of each layout in turn, until as many ranks have died as `counts` wants."""
    ranks = Ranks(folder, platform, patience)
    undisturbed: dict[str, list[float]] = {}
    chosen = [each for each in engine.layouts if layout in each.name]
    while chosen:
        for each in chosen:
            if counts.total >= counts.wanted:
                return
            yield lambda random_, each=each: be_killed(ranks, undisturbed, engine, each, counts, random_)


def train_undisturbed(ranks: Ranks, layout: tuple[str, ...], num_steps: int) -> list[float] | None:
    """Return the losses without deaths; None where the platform refuses to replace ranks."""
    ranks.clear()
    ended = ranks.finish(ranks.start(*layout, f"--training.steps={num_steps}"), END_SECONDS + num_steps)
    if ended[0] == 2 and "cannot meet again on platform" in ended[1]:
        return None
    ranks.expect(ended, 0)
    return ranks.losses(num_steps)


def be_killed(
    ranks: Ranks,
    undisturbed: dict[str, list[float]],
    engine: Engine,
    layout: Layout,
    counts: Survival,
    random_: random.Random,
) -> str:
    """Kill ranks of a job at random moments, then stop it: the same bits of each loss as without that.

    Nothing is left: no process, listening socket, shared memory or incomplete checkpoint.
    """
    plain = (*layout.settings, f"--launch.local_ranks={layout.ranks}", *RECOVERY)
    if layout.name not in undisturbed:
        found = train_undisturbed(ranks, plain, STEPS)
        if found is None:
            return REFUSED
        undisturbed[layout.name] = found
    shared = set(os.listdir("/dev/shm"))
    spares = f"--fault_tolerance.spares={random_.randrange(2)}"
    settings = (*engine.launched(layout), *RECOVERY, spares, "--training.steps=1000000")
    with ranks.in_folder(engine.run_folder(ranks.folder)):
        process = ranks.start(*settings, engine=engine, processes=engine.processes(layout))
        seconds, num_steps, sockets, made = kill_at_random(ranks, process, engine, layout, counts, random_)
        is_stopped = engine.is_stopped or (lambda _: False)
        for pid in [pid for pid, title in ranks.titles().items() if is_stopped(title)] or [process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, engine.stop_signal)
        code, errors = ranks.finish(process)
        losses, left, starts = ranks.losses(None), ranks.half_written(), ranks.num_starts()
    died = [int(rank) for rank in _DIED.findall(errors)] if layout.goes_on else made
    for rank in died:
        counts.deaths[rank] = counts.deaths.get(rank, 0) + 1
    ranks.expect((code, errors), *engine.codes)
    if not layout.goes_on and starts != 1 + len(made):
        raise Failure(f"{starts} starts with {len(made)} deaths: {errors[-800:]}")
    undisturbed[layout.name] = expect_undisturbed(ranks, undisturbed[layout.name], plain, losses)
    if left := [*left, *(sockets & listening_sockets()), *left_in_shared_memory(shared)]:
        raise Failure(f"left behind: {left}")
    counts.survived += len(died)
    jobs = f"{engine.name}, {layout.name}"
    counts.lines.append(f"{jobs}: {len(died)} deaths of ranks in {seconds:.0f} s and {num_steps} steps")
    print(counts.lines[-1], flush=True)
    return SAME


def kill_at_random(
    ranks: Ranks,
    process: subprocess.Popen[str],
    engine: Engine,
    layout: Layout,
    counts: Survival,
    random_: random.Random,
) -> tuple[float, int, set[str], list[int]]:
    """Kill ranks of a job; return the seconds and steps meanwhile, the listening sockets seen, and the ranks killed."""
    ranks.wait_for_step(1, process)
    started, first, sockets, made = time.monotonic(), ranks.newest_step(), set[str](), list[int]()
    for _ in range(min(KILLS_OF_A_JOB, counts.wanted - counts.total)):
        time.sleep(random_.random() * 0.5)
        sockets |= ranks.listening()
        ranks.wait_for_step(ranks.newest_step() + STEPS_BETWEEN, process)
        titles = ranks.titles().items()
        running = [pid for pid, title in titles if pid != process.pid and engine.is_rank(title, layout.goes_on)]
        pid = random_.choice(running)
        with contextlib.suppress(ProcessLookupError):
            rank = ranks.rank_of(pid)
            os.kill(pid, signal.SIGKILL)
            made.append(rank)
    ranks.wait_for_step(ranks.newest_step() + STEPS_BETWEEN, process)
    return time.monotonic() - started, ranks.newest_step() - first, sockets, made


def expect_undisturbed(
    ranks: Ranks, undisturbed: list[float], settings: tuple[str, ...], losses: list[float]
) -> list[float]:
    """Compare losses with those of an undisturbed run, and return it; it is trained again if it is shorter."""
    if len(losses) > len(undisturbed):
        longer = train_undisturbed(ranks, settings, len(losses))
        assert longer is not None
        undisturbed = longer
    if losses != undisturbed[: len(losses)]:
        raise Failure("other losses than without deaths")
    return undisturbed


def listening_sockets() -> set[str]:
    """Return the inodes of the listening TCP sockets of this machine."""
    rows = [line.split() for each in ("tcp", "tcp6") for line in Path(f"/proc/net/{each}").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[3] == "0A"}


def lose_a_rank(ranks: Ranks, layout: tuple[str, ...], random_: random.Random) -> str:
    """Kill or stop a rank: it is named, and the run goes on to the same curve."""
    ranks.clear()
    process = ranks.start(*layout)
    ranks.wait_for_step(random_.randint(1, STEPS // 2), process)
    rank = random_.randrange(2)
    pid = ranks.rank(rank)
    assert pid is not None
    os.kill(pid, random_.choice([signal.SIGKILL, signal.SIGSTOP]))
    errors = ranks.expect(ranks.finish(process), 1)
    if f"rank {rank} " not in errors:
        raise Failure(f"rank {rank} is not named: {errors[-800:]}")
    ranks.expect(ranks.finish(ranks.start(*layout)), 0)
    return ranks.expect_curve()


def lose_in_a_write(ranks: Ranks, layout: tuple[str, ...], random_: random.Random) -> str:
    """Kill a rank while a checkpoint is written: one rank alone goes on to the same curve, and nothing half is left."""
    ranks.clear()
    process = ranks.start(*layout)
    ranks.wait_for_step(1, process)
    rank = random_.randrange(2)
    pid = ranks.rank(rank)
    assert pid is not None
    ranks.wait_for_write(process)
    os.kill(pid, signal.SIGKILL)
    errors = ranks.expect(ranks.finish(process), 1)
    if f"rank {rank} " not in errors:
        raise Failure(f"rank {rank} is not named: {errors[-800:]}")
    ranks.expect(ranks.finish(ranks.start("--launch.local_ranks=1")), 0)
    if left := ranks.half_written():
        raise Failure(f"left behind: {left}")
    return ranks.expect_curve()


def change_the_number(ranks: Ranks, layout: tuple[str, ...], random_: random.Random) -> str:
    """Kill a rank while 4, then 3, then 4 of them train, each time started again: the same curve.

    A layout of stages has two of them on four ranks, and none on three.
    """
    ranks.clear()
    for size, until in ((4, STEPS // 3), (3, 2 * STEPS // 3), (4, STEPS)):
        alone = (f"--parallel.{degree}=1" for degree in ("pp", "ep", "cp"))
        fewer = (*alone, "--parallel.ep_copies=0") if size == 3 else ()
        sizes = (*fewer, f"--launch.local_ranks={size}", "--launch.max_restarts=3", f"--training.steps={until}")
        sizes = (*layout, *sizes)
        process = ranks.start(*sizes)
        ranks.wait_for_step(until - STEPS // 3 + random_.randint(1, 5), process)
        pid = ranks.rank(random_.randrange(size))
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        ranks.expect(ranks.finish(process), 0)
    return ranks.expect_curve()


def stop(ranks: Ranks, layout: tuple[str, ...], random_: random.Random) -> str:
    """Send a stop signal to the command or to a rank, from the first moment on: its exit code, then the same curve."""
    ranks.clear()
    process, number = ranks.start(*layout), random_.choice(STOPS)
    target = process.pid if random_.random() < 0.5 else ranks.wait_for_rank(random_.randrange(2), process)
    delay = random_.choice([0, 0.05, 0.2, 1, random_.uniform(0, 10)])
    time.sleep(delay)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)
    ranks.expect(ranks.finish(process), 0, 128 + number, -number)
    ranks.expect(ranks.finish(ranks.start(*layout)), 0)
    return ranks.expect_curve()
