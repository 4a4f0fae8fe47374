"""A campaign of faults against small runs, on one framework; see README.md. Ends in a table of cases and ends."""

from __future__ import annotations

import argparse
import errno
import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import faults
import numpy as np
from processes import Ended, Process

from hp_dtensor.platform.selection import get_platform
from hp_trainer.metrics import read_metrics

CONFIG = """\
model:
  {hidden_size: 16, num_hidden_layers: 1, intermediate_size: 24, num_attention_heads: 2, num_key_value_heads: 2,
   head_dim: 8, moe_intermediate_size: 12, num_experts: 4}
data: {path: corpus.txt}
training: {steps: 6, global_batch_size: 4, sequence_length: 8, eval_interval: 3}
checkpoint: {interval: 2, keep: 2}
metrics: {trackers: [jsonl]}
generate: {prompts: []}
"""
LEFTOVERS = re.compile(r"\.incomplete-|\.deleted-|lock\.json")
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Case = Callable[[random.Random], str]
SAME, REFUSED = "same curve", "refused by name"


class Failure(Exception):
    """A case that ended as none may."""


class Campaign:
    """Cases against runs in a temporary folder.

    Args:
        folder: an empty folder; the working directory from now on.
        platform: name of the framework.
    """

    def __init__(self, folder: Path, platform: str) -> None:
        self.folder, self.platform = folder, platform
        os.chdir(folder)
        letters = np.random.default_rng(3).choice(list("abcdefgh \n"), 2000)
        Path("corpus.txt").write_text("".join(letters))
        Path("run.yaml").write_text(CONFIG)
        self.run, self.log = folder / "out", folder / "log.txt"
        self.expect(self.train(), 0)
        self.curve = self.losses()
        self.half = self.make_half()
        self.operations = self.count_operations()

    def train(self, prepare: Callable[[], None] = lambda: None, *settings: str) -> Ended:
        return self.start(prepare, *settings).wait()

    def train_with(self, act: faults.Act, *settings: str) -> Ended:
        """Train with `act` called before each operation on the run's files."""
        return self.train(lambda: faults.watch_operations(self.run, act), *settings)

    def start(self, prepare: Callable[[], None] = lambda: None, *settings: str) -> Process:
        return Process(["run", "run.yaml", "--run.folder=out", *settings], self.log, prepare)

    def losses(self) -> list[float]:
        steps = [event for event in read_metrics(self.run / "metrics.jsonl") if event["event"] == "step"]
        if [event["step"] for event in steps] != list(range(1, len(steps) + 1)):
            raise Failure(f"steps {[event['step'] for event in steps]}")
        return [event["loss"] for event in steps]

    def make_half(self) -> Path:
        """Return a copy of the run as it was after its fourth step."""
        self.clear()
        self.expect(self.train(lambda: None, "--training.steps=4", "--lr_schedule.kind=constant"), 0)
        return faults.copy(self.run, self.folder / "half")

    def count_operations(self) -> int:
        self.clear()
        count = self.folder / "count"
        self.expect(self.train_with(faults.count_into(count)), 0)
        return int(count.read_text())

    def clear(self) -> None:
        subprocess.run(["rm", "-rf", str(self.run)], check=True)

    # Ends --------------------------------------------------------------------------------------------------

    def expect(self, ended: Ended, *codes: int) -> None:
        if ended.code not in codes:
            raise Failure(f"exit code {ended.code}, expected {codes}: {ended.errors[-800:]}")
        if "Traceback" in ended.errors:
            raise Failure(f"a traceback: {ended.errors[-800:]}")

    def expect_recovery(self) -> str:
        """Start the run again: it ends with the curve that it always has, and leaves nothing behind."""
        self.expect(self.train(), 0)
        if self.losses() != self.curve:
            raise Failure(f"losses {self.losses()}, expected {self.curve}")
        left = [str(path.relative_to(self.run)) for path in self.run.rglob("*") if LEFTOVERS.search(path.name)]
        if left:
            raise Failure(f"left behind: {left}")
        return SAME

    # Families ----------------------------------------------------------------------------------------------

    def kills(self) -> Iterator[Case]:
        """SIGKILL at every operation on files, in turn, then at random ones, twice in a row."""

        def case(*numbers: int) -> str:
            self.clear()
            for number in numbers:
                self.expect(self.train_with(faults.kill_at(number)), -signal.SIGKILL, 0)
            return self.expect_recovery()

        for number in range(1, self.operations + 1):
            yield lambda random_, number=number: case(number)
        while True:
            yield lambda random_: case(*(random_.randint(1, self.operations) for _ in range(2)))

    def errors(self) -> Iterator[Case]:
        """Operations on files that fail from one on: told in a line without a traceback; later all is well."""

        def case(random_: random.Random) -> str:
            self.clear()
            code = random_.choice([errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT])
            act = faults.fail_at(random_.randint(1, self.operations), code)
            ended = self.train_with(act)
            self.expect(ended, 0, 1, 2)
            if ended.code and os.strerror(code) not in ended.errors:
                raise Failure(f"the reason is not told: {ended.errors[-800:]}")
            return self.expect_recovery()

        while True:
            yield case

    def damages(self) -> Iterator[Case]:
        """Damaged files: the same curve, or a line that names the file."""

        def case(random_: random.Random) -> str:
            faults.copy(self.half, self.run)
            how, path = faults.damage(self.run, random_)
            ended = self.train(lambda: None, "--lr_schedule.kind=constant")
            self.expect(ended, 0, 1, 2)
            if ended.code == 0:
                # Metrics that are gone are gone; every checkpoint, the newest too, has to be sound.
                Process(["checkpoints", "out"], self.log).wait()
                return SAME
            names = {path.name, path.parent.name, "out/checkpoints"}
            if not any(name in ended.errors for name in names):
                raise Failure(f"{how}: the file is not named: {ended.errors[-800:]}")
            return REFUSED

        while True:
            yield case

    def signals(self) -> Iterator[Case]:
        """Signals at random moments: their exit code, and the same curve later."""

        def case(random_: random.Random) -> str:
            self.clear()
            number = random_.choice([*STOPS, signal.SIGKILL])
            process = self.start()
            time.sleep(random_.uniform(0, 2.0))
            os.kill(process.pid, number)
            # In the first moment of a process its own handlers are not there yet.
            codes = (-signal.SIGKILL,) if number == signal.SIGKILL else (128 + number, -number)
            self.expect(process.wait(), 0, *codes)
            return self.expect_recovery()

        while True:
            yield case

    def slow_disks(self) -> Iterator[Case]:
        """Operations on files that take their time."""

        def case(random_: random.Random) -> str:
            self.clear()
            act = faults.slow_down(random_.choice([0.001, 0.01, 0.05]))
            background = random_.choice(["true", "false"])
            self.expect(self.train_with(act, f"--checkpoint.background={background}"), 0)
            return self.expect_recovery()

        while True:
            yield case

    def clocks(self) -> Iterator[Case]:
        """A clock that jumps."""

        def case(random_: random.Random) -> str:
            self.clear()
            seed = random_.randrange(2**32)
            self.expect(self.train(lambda: faults.jump_the_clock(seed)), 0)
            return self.expect_recovery()

        while True:
            yield case

    def ranks(self) -> Iterator[Case]:
        """Real ranks of which one is killed or stopped: named, and started again."""

        def case(random_: random.Random) -> str:
            self.clear()
            number = random_.choice([signal.SIGKILL, signal.SIGSTOP])
            settings = ["--launch.local_ranks=2", "--launch.timeout_seconds=30", "--training.steps=400"]
            command = [sys.executable, "-m", "hp_trainer", "run", "run.yaml", "--run.folder=out", *settings]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
            try:
                self.wait_for_step(5, process)
                rank = random_.randrange(2)
                os.kill(self.rank_of(process.pid, rank), number)
                _, errors = process.communicate(timeout=120)
            finally:
                process.kill()
                process.wait()
            if process.returncode != 1 or f"rank {rank} of 2" not in errors:
                raise Failure(f"exit code {process.returncode}, rank {rank}: {errors[-800:]}")
            steps = f"--training.steps={len(self.losses()) + 2}"
            self.expect(self.train(lambda: None, steps), 0)
            self.losses()
            return SAME

        while True:
            yield case

    def wait_for_step(self, step: int, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if any(event.get("step", 0) >= step for event in read_metrics(self.run / "metrics.jsonl")):
                return
            time.sleep(0.02)
        raise Failure(f"step {step} was not reached")

    def rank_of(self, parent: int, rank: int) -> int:
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
                environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
            except OSError:
                continue
            if f"PPid:\t{parent}\n" in status and f"RANK={rank}" in environment:
                return int(pid)
        raise Failure(f"rank {rank} is not there")


FAMILIES: dict[str, Callable[[Campaign], Iterator[Case]]] = {
    "kill": Campaign.kills,
    "error": Campaign.errors,
    "damage": Campaign.damages,
    "signal": Campaign.signals,
    "slow": Campaign.slow_disks,
    "clock": Campaign.clocks,
    "ranks": Campaign.ranks,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="for all families together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="families, separated by commas")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(FAMILIES)
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"there is no family {', '.join(unknown)}; there are: {', '.join(FAMILIES)}")
    platform = get_platform().name
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder).resolve(), platform)
        chosen = {name: functools.partial(FAMILIES[name], campaign) for name in names}
        ends, failures = run_families(chosen, options.minutes * 60, options.seed)
    print(table(platform, ends))
    for failure in failures:
        print(failure)
    return 1 if failures else 0


def run_families(
    families: Mapping[str, Callable[[], Iterator[Case]]], seconds: float, seed: int
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Run cases of each family for its part of the time, at least two; return how they ended, and failures."""
    ends: dict[str, Counter[str]] = defaultdict(Counter)
    failures = []
    for name, family in families.items():
        deadline = time.monotonic() + seconds / len(families)
        for number, case in enumerate(family()):
            if number >= 2 and time.monotonic() > deadline:
                break
            try:
                ends[name][case(random.Random(f"{seed} {name} {number}"))] += 1
            except Failure as failure:
                ends[name]["FAILED"] += 1
                failures.append(f"{name} {number} of seed {seed}: {failure}")
    return ends, failures


def table(platform: str, ends: dict[str, Counter[str]]) -> str:
    """Return how the cases of each family ended."""
    columns = [SAME, REFUSED, "FAILED"]
    lines = [f"{platform:10}" + "".join(f"{column:>18}" for column in ["cases", *columns])]
    for name, counts in ends.items():
        lines.append(f"{name:10}{counts.total():18}" + "".join(f"{counts[column]:18}" for column in columns))
    total = sum(ends.values(), Counter())
    lines.append(f"{'all':10}{total.total():18}" + "".join(f"{total[column]:18}" for column in columns))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
