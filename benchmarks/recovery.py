"""Recovery from the death of a rank: what copies cost per step, and the time from a death to the next finished step.

    python benchmarks/recovery.py [--platform=torch --ranks=4 --interval=10 --width=256 --rounds=5 --wait=30]

Runs of `hp-train` on the CPU. In one run, a copy is made in every other interval: times are medians over
intervals with and without one, and the time that training waits for copies is also measured alone. A death is
survived with a spare process, by starting a process, and by starting all ranks again from a checkpoint of that step. On
MindSpore each rank takes a spare process, or a process is started for each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PLUGIN = """\
import os, signal, time
from pathlib import Path

from hp_trainer.plugins import hookimpl
from hp_trainer.training.recovery import StateCopies

RANK = os.environ.get("RANK")


is_due, take = StateCopies.is_due, StateCopies.take


def timed_take(self, *arguments):
    started = time.perf_counter()
    take(self, *arguments)
    if RANK == "0":
        with Path("copies").open("a") as out:
            out.write(f"{time.perf_counter() - started}\\n")


StateCopies.take = timed_take
if interval := int(os.environ.get("ALTERNATE", "0")):
    StateCopies.is_due = lambda self, step: step % (2 * interval) == 0 and is_due(self, step)


@hookimpl
def hp_before_step(record):
    # In the step after the one in which a copy was started.
    if f"{RANK}:{record.step}" == os.environ.get("DIES") and not Path("died").exists():
        # A spare process, started with this one, is ready after its imports.
        time.sleep(float(os.environ.get("WAITS", "0")))
        Path("died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


@hookimpl
def hp_after_step(record):
    if RANK == "0":
        with Path("steps").open("a") as out:
            out.write(f"{record.step} {time.time()} {time.process_time()}\\n")
"""

CONFIG = """\
model: {{hidden_size: {width}, num_hidden_layers: 4, num_experts: null, intermediate_size: {wide}}}
data: {{path: corpus.txt}}
training: {{steps: 1, global_batch_size: {batch}, sequence_length: 128}}
launch: {{local_ranks: {ranks}, max_restarts: 1}}
metrics: {{trackers: []}}
generate: {{prompts: []}}
"""


class Runs:
    """Runs of `hp-train` in a temporary folder."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options, self.number = folder, options, 0
        (folder / "corpus.txt").write_text("\n".join(f"{i} squared is {i * i}" for i in range(20_000)))
        values = vars(options) | {"wide": 3 * options.width, "batch": 2 * options.ranks}
        (folder / "run.yaml").write_text(CONFIG.format(**values))
        metadata = folder / "plugins" / "times-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: times\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[hp_trainer]\ntimes = times\n")
        (folder / "plugins" / "times.py").write_text(PLUGIN)

    def train(self, *settings: str, **variables: str) -> list[tuple[int, float, float]]:
        """Return step, time and processor time of rank 0 of each finished step."""
        self.number += 1
        for name in ("steps", "died", "copies"):
            (self.folder / name).unlink(missing_ok=True)
        path = os.pathsep.join([str(self.folder / "plugins"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "hp_trainer", "run", "run.yaml", f"--run.folder=out{self.number}", *settings]
        environment = os.environ | {"PYTHONPATH": path, "HP_PLATFORM": self.options.platform} | variables
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        lines = (self.folder / "steps").read_text().splitlines()
        return [(int(step), float(when), float(used)) for step, when, used in map(str.split, lines)]

    def seconds_per_step(self, *settings: str) -> tuple[list[float], list[float]]:
        """Return the time and processor time of a step in intervals with a copy, and in those without one."""
        interval = self.options.interval
        # The first two intervals allocate.
        steps = 2 * interval * (self.options.rounds + 1)
        times = self.train(*settings, f"--training.steps={steps}", ALTERNATE=str(interval))
        # Row `i` of `ends` is the end of an interval; the copy is made after its first step has ended.
        ends = [times[at - 1][1:] for at in range(2 * interval, steps + 1, interval)]
        spans = [[(b - a) / interval for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(ends)]
        with_, without = (
            [statistics.median(column) for column in zip(*spans[first::2], strict=True)] for first in (0, 1)
        )
        return with_, without

    def seconds_to_recover(self, *settings: str) -> float:
        """Return the time from a death to the end of the step in which it happened.

        The rank that dies waits before, long enough for a spare process to be ready.
        """
        step = self.options.interval + 2
        dies = f"{self.options.ranks - 1}:{step}"
        times = self.train(*settings, f"--training.steps={step + 1}", DIES=dies, WAITS=str(self.options.wait))
        died = float((self.folder / "died").read_text())
        return min(when for number, when, _ in times if number == step and when > died) - died

    def state_bytes(self) -> int:
        """Return the bytes of the last checkpoint: all shards of weights and optimizer states."""
        last = max((self.folder / f"out{self.number}" / "checkpoints").iterdir())
        return sum(json.loads((last / "index.json").read_text())["shard_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 4), ("interval", 10), ("width", 256), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--platform", choices=("torch", "mindspore"), default="torch")
    parser.add_argument("--wait", type=float, default=30.0, help="seconds in which a spare process gets ready")
    options = parser.parse_args()
    copies = ("--fault_tolerance.copies=1", f"--fault_tolerance.interval={options.interval}")
    file = (f"--checkpoint.interval={options.interval}", "--checkpoint.keep=1")
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), options)
        with_, without = runs.seconds_per_step(*copies)
        sent = runs.state_bytes() / options.ranks
        print(f"{options.ranks} ranks, {sent / 1e6:.1f} MB of state each, copied every {options.interval} steps")
        for name, one, other in zip(("time of a step", "processor time"), with_, without, strict=True):
            more = 100 * (one / other - 1)
            print(f"{name:16} without copies {other * 1e3:8.1f} ms, with copies {one * 1e3:8.1f} ms   {more:+.1f} %")
        waits = [float(line) for line in (runs.folder / "copies").read_text().split()[1:]]
        wait = statistics.median(waits) / options.interval
        print(f"of a step, wait for copies   {wait * 1e3:6.1f} ms   {100 * wait / without[0]:.1f} %")
        spares = 1 if options.platform == "torch" else options.ranks
        ways = {
            f"{spares} spare": (*copies, f"--fault_tolerance.spares={spares}"),
            f"{spares} started": copies,
            "all ranks, from a file": file,
        }
        found = {name: runs.seconds_to_recover(*settings) for name, settings in ways.items()}
        for name, seconds in found.items():
            share = seconds / found["all ranks, from a file"]
            print(f"death            {name:24} {seconds:6.1f} s   {100 * share:.0f} %")


if __name__ == "__main__":
    main()
