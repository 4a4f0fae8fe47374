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

import engines
import faults
import numpy as np
import object_store
import ranks
from cases import REFUSED, SAME, STOPS, Case, Failure
from processes import Ended, Process

from hp_dtensor.platform.selection import get_platform
from hp_trainer.metrics import read_metrics
from hp_trainer.run import RunFolder, checkpoint_storage

CONFIG = """\
model:
  {hidden_size: 16, num_hidden_layers: 1, intermediate_size: 24, num_attention_heads: 2, num_key_value_heads: 2,
   head_dim: 8, moe_intermediate_size: 12, num_experts: 4}
data: {path: corpus.txt}
training: {steps: 6, global_batch_size: 4, sequence_length: 8, eval_interval: 3}
checkpoint: {interval: 2, keep: 2}
metrics: {trackers: [jsonl]}
generate: {prompts: []}
lr_schedule: {kind: constant}
"""
# Kind of event, step, loss.
Curve = list[tuple[str, int, float]]
LEFTOVERS = re.compile(r"\.incomplete-|\.deleted-|lock\.json")
OBJECTS = "objects"


class Campaign:
    """Cases against runs in a temporary folder.

    Args:
        folder: an empty folder; the working directory from now on.
        platform: name of the framework.
        layout, patience: of real ranks, see `ranks.cases`.
        engine: what starts the ranks of `kills`.
    """

    def __init__(
        self,
        folder: Path,
        platform: str,
        layout: str = "",
        patience: float = 1.0,
        engine: engines.Engine = engines.HP_TRAIN,
    ) -> None:
        self.folder, self.platform, self.ranks, self.engine = folder, platform, (layout, patience), engine
        self.survival = ranks.Survival()
        os.chdir(folder)
        letters = np.random.default_rng(3).choice(list("abcdefgh \n"), 2000)
        Path("corpus.txt").write_text("".join(letters))
        Path("run.yaml").write_text(CONFIG)
        self.run, self.log = folder / "out", folder / "log.txt"
        object_store.register()
        store = f"{{name: object_store, url: '{object_store.PROTOCOL}://{self.run}/{OBJECTS}'}}"
        self.variants = {
            "plain": (),
            "background": ("--checkpoint.background=true",),
            "object store": (f"--checkpoint.storage={store}",),
            "weight average": ("--training.ema.decay=0.5", "--checkpoint.background=true", "--checkpoint.keep_best=1"),
            "adapters": ("--model.lora.rank=2", "--optimizer.name=muon"),
        }
        # The variant of the present case.
        self.variant = "plain"
        self.operations: dict[str, int] = {}
        self.curves: dict[str, Curve] = {}
        self.halves: dict[str, Path] = {}

    def measure_variants(self) -> None:
        """Train each variant undisturbed, in full and by half; cases of real ranks alone do without."""
        for name in self.variants:
            self.measure(name)
        self.halves = {name: self.make_half(name) for name in self.variants}

    def train(self, prepare: Callable[[], None] = lambda: None, *settings: str) -> Ended:
        return self.start(prepare, *settings).wait()

    def train_with(self, act: faults.Act, *settings: str) -> Ended:
        """Train with `act` called before each operation on the run's files."""
        return self.train(lambda: faults.watch_operations(self.run, act), *settings)

    def start(self, prepare: Callable[[], None] = lambda: None, *settings: str) -> Process:
        variant = self.variants[self.variant]
        return Process(["run", "run.yaml", "--run.folder=out", *variant, *settings], self.log, prepare)

    def choose(self, random_: random.Random) -> int:
        """Begin a case with no run, of a variant drawn; return its number of operations."""
        self.variant = random_.choice(list(self.variants))
        self.clear()
        return self.operations[self.variant]

    def losses(self) -> Curve:
        """Return the losses of the run's metrics, of steps and of evaluations, in their order."""
        return [
            (event["event"], event["step"], event["loss"])
            for event in read_metrics(self.run / "metrics.jsonl")
            if event["event"] in ("step", "evaluation")
        ]

    def make_half(self, variant: str) -> Path:
        """Return a copy of the run as it was after its fourth step."""
        self.variant = variant
        self.clear()
        self.expect(self.train(lambda: None, "--training.steps=4"), 0)
        return faults.copy(self.run, self.folder / f"half {variant}")

    def measure(self, variant: str) -> None:
        """Note the operations on files and the losses of a run without faults."""
        self.variant = variant
        self.clear()
        count = self.folder / "count"
        self.expect(self.train_with(faults.count_into(count)), 0)
        self.operations[variant], self.curves[variant] = int(count.read_text()), self.losses()

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
        self.expect_curve()
        left = [name for name in self.names_left() if LEFTOVERS.search(name)]
        if left:
            raise Failure(f"left behind: {left}")
        return SAME

    def expect_curve(self) -> None:
        if self.losses() != self.curves[self.variant]:
            raise Failure(f"losses {self.losses()}, expected {self.curves[self.variant]}")

    def expect_newest_valid(self) -> None:
        """Read the newest checkpoint, which has to be that of the last step."""
        listed = Process(["checkpoints", "out"], self.log).wait()
        newest = next((line.split() for line in listed.errors.splitlines() if line.strip().startswith("6 ")), [])
        if "valid" not in newest:
            raise Failure(f"no valid checkpoint of the last step: {listed.errors[-800:]}")

    def names_left(self) -> list[str]:
        """Return the names of files and folders of the run; of an object store those that are found under."""
        run = RunFolder(self.run)
        names = [str(path.relative_to(self.run)) for path in self.run.rglob("*")]
        stored = checkpoint_storage(run, run.load_config().config).list_folders()
        return [*(name for name in names if not name.startswith(OBJECTS)), *stored]

    # Families ----------------------------------------------------------------------------------------------

    def kills(self) -> Iterator[Case]:
        """SIGKILL at every operation on files, in turn, then at random ones, twice in a row."""

        def case(variant: str, *numbers: int) -> str:
            self.variant = variant
            self.clear()
            for number in numbers:
                self.expect(self.train_with(faults.kill_at(number)), -signal.SIGKILL, 0)
            return self.expect_recovery()

        def twice(random_: random.Random) -> str:
            variant = random_.choice(list(self.variants))
            return case(variant, *(random_.randint(1, self.operations[variant]) for _ in range(2)))

        for variant, operations in self.operations.items():
            for number in range(1, operations + 1):
                yield lambda random_, variant=variant, number=number: case(variant, number)
        while True:
            yield twice

    def errors(self) -> Iterator[Case]:
        """Operations on files that fail from one on: reported in a line without a traceback; later all is well."""

        def case(random_: random.Random) -> str:
            operations = self.choose(random_)
            code = random_.choice([errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT])
            act = faults.fail_at(random_.randint(1, operations), code)
            ended = self.train_with(act)
            self.expect(ended, 0, 1, 2)
            if ended.code and os.strerror(code) not in ended.errors:
                raise Failure(f"the reason is not reported: {ended.errors[-800:]}")
            return self.expect_recovery()

        while True:
            yield case

    def damages(self) -> Iterator[Case]:
        """Damaged files: the same curve, or a line that names the file."""

        def case(random_: random.Random) -> str:
            self.choose(random_)
            faults.copy(self.halves[self.variant], self.run)
            done = faults.damage(self.run, random_)
            ended = self.train()
            self.expect(ended, 0, 1, 2)
            if ended.code == 0:
                self.expect_newest_valid()
                # Lost metrics stay lost.
                if not any(path.name == "metrics.jsonl" for _, path in done):
                    self.expect_curve()
                return SAME
            names = {name for _, path in done for name in (path.name, path.parent.name)} | {"out/checkpoints"}
            if not any(name in ended.errors for name in names):
                raise Failure(f"{faults.describe(done)}: the file is not named: {ended.errors[-800:]}")
            return REFUSED

        while True:
            yield case

    def signals(self) -> Iterator[Case]:
        """Signals at an operation on files, or at a random moment: their exit code, and the same curve later."""

        def case(random_: random.Random) -> str:
            operations = self.choose(random_)
            number = random_.choice([*STOPS, signal.SIGKILL])
            if random_.random() < 0.5:
                ended = self.train_with(faults.signal_at(random_.randint(1, operations), number))
            else:
                process = self.start()
                time.sleep(random_.choice([0, 0.05, 0.2, random_.uniform(0, 2.0)]))
                os.kill(process.pid, number)
                ended = process.wait()
            # In the first moment of a process its own handlers are not there yet.
            codes = (-signal.SIGKILL,) if number == signal.SIGKILL else (128 + number, -number)
            self.expect(ended, 0, *codes)
            return self.expect_recovery()

        while True:
            yield case

    def slow_disks(self) -> Iterator[Case]:
        """Operations on files that take their time."""

        def case(random_: random.Random) -> str:
            self.choose(random_)
            self.expect(self.train_with(faults.slow_down(random_.choice([0.001, 0.01, 0.05]))), 0)
            return self.expect_recovery()

        while True:
            yield case

    def clocks(self) -> Iterator[Case]:
        """A clock that jumps."""

        def case(random_: random.Random) -> str:
            self.choose(random_)
            seed = random_.randrange(2**32)
            self.expect(self.train(lambda: faults.jump_the_clock(seed)), 0)
            return self.expect_recovery()

        while True:
            yield case


FAMILIES: dict[str, Callable[[Campaign], Iterator[Case]]] = {
    "kill": Campaign.kills,
    "error": Campaign.errors,
    "damage": Campaign.damages,
    "signal": Campaign.signals,
    "slow": Campaign.slow_disks,
    "clock": Campaign.clocks,
    "ranks": lambda campaign: ranks.cases(campaign.folder, campaign.platform, *campaign.ranks),
    "deaths": lambda campaign: ranks.deaths(campaign.folder, campaign.platform, *campaign.ranks),
    "kills": lambda campaign: ranks.kills(
        campaign.folder, campaign.platform, *campaign.ranks, campaign.survival, campaign.engine
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=3.0, help="for all families together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="families, separated by commas")
    parser.add_argument("--layout", default="", help="of ranks: only layouts whose name holds this")
    parser.add_argument("--patience", type=float, default=1.0, help="of ranks: times the usual limits in seconds")
    parser.add_argument("--kills", type=int, default=100, help="of kills: deaths of ranks in all jobs, if time is left")
    parser.add_argument("--engine", default="hp-train", choices=engines.ENGINES, help="of kills: what starts the ranks")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(FAMILIES)
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"there is no family {', '.join(unknown)}; there are: {', '.join(FAMILIES)}")
    layouts = [*ranks.LAYOUTS, *ranks.RECOVERING, *engines.layout_names(options.engine)]
    if not any(options.layout in name for name in layouts):
        parser.error(f"there is no layout {options.layout!r}; there are: {'; '.join(layouts)}")
    platform = get_platform().name
    if options.engine != "hp-train" and platform != "torch":
        parser.error(f"ranks of {platform} are killed on hp-train alone")
    with tempfile.TemporaryDirectory() as folder, engines.started(options.engine) as engine:
        campaign = Campaign(Path(folder).resolve(), platform, options.layout, options.patience, engine)
        campaign.survival.wanted = options.kills
        if set(names) - {"ranks", "deaths", "kills"}:
            campaign.measure_variants()
        chosen = {name: functools.partial(FAMILIES[name], campaign) for name in names}
        ends, failures = run_families(chosen, options.minutes * 60, options.seed)
    print(table(platform, ends))
    if "kills" in names:
        print(campaign.survival)
    return 1 if failures else 0


def run_families(
    families: Mapping[str, Callable[[], Iterator[Case]]], seconds: float, seed: int
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Run cases of each family for its part of the time, at least two; return how they ended, and failures.

    A line is printed for each failure, and for each family when it has ended.
    """
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
                print(failures[-1], flush=True)
        print(f"{name}: {ends[name].total()} cases, {ends[name]['FAILED']} failed", flush=True)
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
