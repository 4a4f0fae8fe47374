"""Recovery from the death of a rank: what copies cost per step, and the time from a death to the next finished step.

    python benchmarks/recovery.py [--platform=torch --ranks=4 --interval=10 --width=256 --rounds=5 --wait=30]
    python benchmarks/recovery.py --kills=10 [--pause=60 --ranks=2 --spares=1]

Runs of `hp-train` on the CPU. In one run, a copy is made in every other interval: times are medians over
intervals with and without one, and the time that training waits for copies is also measured alone. A death is
survived with a spare process, by starting a process, and by starting all ranks again from a checkpoint of that step:
by `hp-train`, which forks them from a process that has imported the framework, and on PyTorch by torchrun, where each
imports it. On MindSpore each rank takes a spare process, or a process is started for each.

With `--kills`, a random rank of two replicas is killed every `--pause` seconds instead. Goodput is the time that the
steps of this run take in an undisturbed one, with copies, divided by the time of this run. The undisturbed time of a
step is measured in two runs, before and after. On a machine that does other work it varies by more than deaths cost:
compare with the second figure, by the steps of the same run that no death interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PLUGIN = """\
import os, signal, time
from pathlib import Path

from hp_trainer.plugins import hookimpl
from hp_trainer.training.recovery import StateCopies

is_due, take = StateCopies.is_due, StateCopies.take


def rank():
    # Another one when a spare process takes the place of a rank.
    return os.environ.get("RANK")


def timed_take(self, *arguments):
    started = time.perf_counter()
    take(self, *arguments)
    if rank() == "0":
        with Path("copies").open("a") as out:
            out.write(f"{time.perf_counter() - started}\\n")


StateCopies.take = timed_take
if interval := int(os.environ.get("ALTERNATE", "0")):
    StateCopies.is_due = lambda self, step: step % (2 * interval) == 0 and is_due(self, step)


@hookimpl
def hp_before_run(record):
    Path(f"process{rank()}").write_text(str(os.getpid()))


@hookimpl
def hp_before_step(record):
    # In the step after the one in which a copy was started.
    if f"{rank()}:{record.step}" == os.environ.get("DIES") and not Path("died").exists():
        # A spare process, started with this one, is ready after its imports.
        time.sleep(float(os.environ.get("WAITS", "0")))
        Path("died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


@hookimpl
def hp_after_step(record):
    if rank() == "0":
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
        self.process: subprocess.Popen[str] | None = None
        (folder / "corpus.txt").write_text("\n".join(f"{i} squared is {i * i}" for i in range(20_000)))
        values = vars(options) | {"wide": 3 * options.width, "batch": 2 * options.ranks}
        (folder / "run.yaml").write_text(CONFIG.format(**values))
        metadata = folder / "plugins" / "times-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: times\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[hp_trainer]\ntimes = times\n")
        (folder / "plugins" / "times.py").write_text(PLUGIN)

    def start(self, *settings: str, launcher: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
        """Start a run that writes the times of its steps; `launcher` is a program that starts its ranks."""
        self.number += 1
        for name in ("steps", "died", "copies"):
            (self.folder / name).unlink(missing_ok=True)
        path = os.pathsep.join([str(self.folder / "plugins"), os.environ.get("PYTHONPATH", "")])
        arguments = ("-m", "hp_trainer", "run", "run.yaml", f"--run.folder=out{self.number}", *settings)
        environment = os.environ | {"PYTHONPATH": path, "HP_PLATFORM": self.options.platform} | variables
        log = (self.folder / "log").open("w")
        command = [sys.executable, *launcher, *arguments]
        self.process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log, text=True)
        return self.process

    def close(self) -> None:
        """Stop the run that this program leaves by an error or a signal."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def train(self, *settings: str, launcher: tuple[str, ...] = (), **variables: str) -> list[tuple[int, float, float]]:
        """Return step, time and processor time of rank 0 of each finished step."""
        if self.start(*settings, launcher=launcher, **variables).wait():
            raise SystemExit((self.folder / "log").read_text())
        return self.times()

    def times(self) -> list[tuple[int, float, float]]:
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

    def seconds_to_recover(self, settings: tuple[str, ...], launcher: tuple[str, ...] = ()) -> tuple[float, float]:
        """Return the time from a death to the next finished step, and to the end of the step in which it happened.

        The rank that dies waits before, long enough for a spare process to be ready.
        """
        step = self.options.interval + 2
        dies = f"{self.options.ranks - 1}:{step}"
        settings = (*settings, f"--training.steps={step + 1}")
        times = self.train(*settings, launcher=launcher, DIES=dies, WAITS=str(self.options.wait))
        died = float((self.folder / "died").read_text())
        later = [(number, when - died) for number, when, _ in times if when > died]
        return min(when for _, when in later), min(when for number, when in later if number == step)

    def steps_in(self, num_kills: int, pause: float, *settings: str) -> list[tuple[int, float, float]]:
        """Return `train`'s times between the first step and `pause` seconds after the last of some kills."""
        # The processes of an earlier run have ended.
        for file in self.folder.glob("process*"):
            file.unlink()
        process = self.start(*settings, "--training.steps=1000000")
        while process.poll() is None and not (self.folder / "steps").exists():
            time.sleep(1.0)
        for _ in range(num_kills):
            time.sleep(pause)
            file = random.choice(sorted(self.folder.glob("process*")))
            try:
                os.kill(int(file.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                raise SystemExit(f"{file.name} has ended by itself: {(self.folder / 'log').read_text()}") from None
        time.sleep(pause)
        times = self.times()
        process.send_signal(signal.SIGTERM)
        log = (self.folder / "log") if process.wait() != 128 + signal.SIGTERM else None
        deaths = len(re.findall(r"rank . of . has died \(SIGKILL\); another", (self.folder / "log").read_text()))
        if log is not None or deaths != num_kills:
            raise SystemExit(f"{deaths} deaths: {(self.folder / 'log').read_text()}")
        return times

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
    parser.add_argument("--kills", type=int, default=0, help="measure goodput, with this many kills")
    parser.add_argument("--pause", type=float, default=60.0, help="seconds between two kills")
    parser.add_argument("--spares", type=int, default=1, help="spare processes while goodput is measured")
    options = parser.parse_args()
    copies = ("--fault_tolerance.copies=1", f"--fault_tolerance.interval={options.interval}")
    file = (f"--checkpoint.interval={options.interval}", "--checkpoint.keep=1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Runs(Path(folder), options)) as runs:
        if options.kills:
            print_goodput(runs, options, *copies)
            return
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
        torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={options.ranks}", "--max-restarts=1")
        ways: dict[str, tuple[tuple[str, ...], ...]] = {
            f"{spares} spare": ((*copies, f"--fault_tolerance.spares={spares}"),),
            f"{spares} started": (copies,),
            "all ranks, from a file": (file,),
        }
        if options.platform == "torch":
            ways["the same, by torchrun"] = file, torchrun
        found = {name: runs.seconds_to_recover(*way) for name, way in ways.items()}
        for index, what in enumerate(("next finished step", "step in which it happened")):
            for name, seconds in found.items():
                share = seconds[index] / found["all ranks, from a file"][index]
                print(f"death to the {what:26} {name:24} {seconds[index]:6.2f} s   {100 * share:.0f} %")


def print_goodput(runs: Runs, options: argparse.Namespace, *settings: str) -> None:
    more = (*settings, "--parallel.dp_replicate=2", f"--fault_tolerance.spares={options.spares}")
    more = (*more, f"--fault_tolerance.max_deaths={options.kills}", "--checkpoint.interval=1000")
    before = runs.steps_in(0, options.pause, *more)
    times = runs.steps_in(options.kills, options.pause, *more)
    after = runs.steps_in(0, options.pause, *more)
    undisturbed = [(run[-1][1] - run[0][1]) / (run[-1][0] - run[0][0]) for run in (before, after)]
    seconds, steps = times[-1][1] - times[0][1], times[-1][0] - times[0][0]
    pauses = sorted(later[1] - earlier[1] for earlier, later in itertools.pairwise(times))
    # The steps in which a rank died end last.
    others, stops = pauses[: -options.kills], pauses[-options.kills :]
    repeated = len(pauses) - steps
    print(
        f"{options.ranks} ranks in 2 replicas with copies every {options.interval} steps, {options.spares} spare, on "
        f"{os.cpu_count()} cores at a load of {os.getloadavg()[1]:.0f}: {options.kills} kills in {seconds:.0f} s, "
        f"{steps} steps"
    )
    print(
        f"time of a step: undisturbed {undisturbed[0] * 1e3:.1f} and {undisturbed[1] * 1e3:.1f} ms, here between "
        f"deaths {statistics.mean(others) * 1e3:.1f} ms"
    )
    print(
        f"a death stops training for {statistics.mean(stops):.2f} s (at most {max(stops):.2f} s), and "
        f"{repeated / options.kills:.1f} steps are repeated"
    )
    for name, each in (("undisturbed runs", statistics.mean(undisturbed)), ("steps", statistics.mean(others))):
        print(f"goodput, by the time of {name:16} {100 * steps * each / seconds:6.1f} %")


if __name__ == "__main__":
    main()
