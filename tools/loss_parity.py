"""The first losses of one YAML file on PyTorch and on MindSpore, in several layouts, side by side.

    python tools/loss_parity.py --torch PYTHON --mindspore PYTHON [--to losses.svg]

Each PYTHON is the interpreter of an environment with hp-trainer and that platform. Every run starts from the same
weights and reads the same samples, which no layout and no framework changes. Exit code 1 if a run disagrees with
one rank on torch, 2 if one could not be made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CONFIG = Path(__file__).parent.parent / "examples" / "moe_small.yaml"
STEPS = 20

# Relative differences of the loss. Sums in float32 in another order differ by some 1e-7; over 20 steps the losses
# were seen to differ by at most 5e-7 over all runs, and by 3e-7 when the initial weights were disturbed by 1e-6.
TOLERANCE = 1e-5
# A token whose second and third best experts score alike but for rounding may choose another one: about one choice
# in a million, and there are 160,000. Then a little of the gradient is different, and the losses part slowly. Such a
# choice shows in the experts' loads, which are equal otherwise. Its own step still keeps the tolerance above (3e-6
# were seen); the steps after it, this one (4e-4 were seen by step 20).
TOLERANCE_AFTER_OTHER_CHOICE = 1e-3


@dataclass(frozen=True)
class Layout:
    """One run to compare: where, on how many ranks, with which overrides; None: as in the file."""

    platform: str
    title: str
    overrides: tuple[str, ...] | None


def on_ranks(count: int, *degrees: str) -> tuple[str, ...]:
    """Overrides for `count` ranks whose degrees are 1 but for those given; dp_shard takes the rest."""
    plain = ("--parallel.dp_replicate=1", "--parallel.dp_shard=-1", "--parallel.tp=1", "--parallel.ep=1")
    return (f"--launch.local_ranks={count}", *plain, "--parallel.etp=1", *degrees)


LAYOUTS = (
    Layout("torch", "1 rank", on_ranks(1)),
    Layout("torch", "4, as in file", None),
    Layout("torch", "2, FSDP", on_ranks(2)),
    Layout("mindspore", "1 rank", on_ranks(1)),
    Layout("mindspore", "2, FSDP", on_ranks(2)),
)


class RunError(Exception):
    """A run that could not be made, and why."""


def main() -> int:
    options = parse_arguments()
    pythons = {"torch": options.torch, "mindspore": options.mindspore}
    try:
        for platform, python in pythons.items():
            check_platform(python, platform)
        runs = [train(layout, pythons[layout.platform], options) for layout in LAYOUTS]
    except RunError as error:
        print(f"loss_parity: {error}", file=sys.stderr)
        return 2
    print(table(runs))
    if options.to:
        draw(runs, options.to)
    comparisons = [Comparison.of(runs[0], run) for run in runs[1:]]
    for layout, comparison in zip(LAYOUTS[1:], comparisons, strict=True):
        print(f"{name_of(layout):<24} {comparison}")
    print(f"largest difference from {name_of(LAYOUTS[0])}, as a fraction of the loss; tolerance {TOLERANCE:.0e},")
    print(f"and {TOLERANCE_AFTER_OTHER_CHOICE:.0e} after a step in which a token chose another expert")
    return int(not all(comparison.agrees for comparison in comparisons))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, metavar="PYTHON", help="interpreter that has the torch platform")
    parser.add_argument("--mindspore", required=True, metavar="PYTHON", help="one that has the MindSpore platform")
    parser.add_argument("--config", default=str(CONFIG), help="YAML file (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps to compare (default: %(default)s)")
    parser.add_argument("--to", type=Path, metavar="FILE", help="also draw losses and differences (needs matplotlib)")
    return parser.parse_args()


def check_platform(python: str, platform: str) -> None:
    """Refuse an interpreter that cannot train on the platform."""
    program = "from hp_trainer.launch.platforms import installed_platforms; print(*installed_platforms())"
    command = [python, "-c", program]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    except OSError as error:
        raise RunError(f"--{platform}={python} is no interpreter: {error}") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip().splitlines()[-1:]
        raise RunError(f"--{platform}={python} has no hp-trainer: {''.join(reason)}") from error
    if platform not in found:
        others = ", ".join(found) or "none"
        raise RunError(
            f"--{platform}={python} does not have the platform {platform} (it has: {others}); give the interpreter of "
            f"an environment with hp-platform-{platform}"
        )


@dataclass(frozen=True)
class Step:
    """One optimizer step of a run: its loss, and how unevenly its tokens went to the experts."""

    loss: float
    load_variation: float


def train(layout: Layout, python: str, options: argparse.Namespace) -> list[Step]:
    """The steps of one run, whose folder is removed afterwards; they are shown as they are done."""
    started = time.monotonic()
    print(f"{name_of(layout)} ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="hp-loss-parity-") as folder:
        run = Path(folder, "run")
        command = [
            *(python, "-m", "hp_trainer", options.config, f"--run.folder={run}", f"--platform={layout.platform}"),
            *("--checkpoint.interval=null", "--training.eval_interval=null", "--generate.prompts=[]"),
            *(f"--training.steps={options.steps}", "--metrics.trackers=[jsonl, {name: progress, interval_seconds: 2}]"),
            *(layout.overrides or ()),
        ]
        with running(command) as process:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("step "):
                    print(f"    {line.rstrip()}", flush=True)
        if process.returncode:
            raise RunError(f"{name_of(layout)}: hp-train ended with exit code {process.returncode}:\n{''.join(said)}")
        steps = list(read_steps(run / "metrics.jsonl"))
    if len(steps) != options.steps:
        raise RunError(f"{name_of(layout)}: {len(steps)} steps were written down, expected {options.steps}")
    print(f"    {time.monotonic() - started:.0f} s", flush=True)
    return steps


@contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block; hp-train ends its ranks by itself."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    except BaseException:
        process.terminate()
        raise
    finally:
        process.communicate()


def read_steps(metrics: Path) -> Iterator[Step]:
    for line in metrics.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            yield Step(float(event["loss"]), event["metrics"].get("load_variation", 0.0))


@dataclass(frozen=True)
class Comparison:
    """One run against the first.

    Attributes:
        other_choice: the first step in which a token chose another expert; None: there is none.
        difference: the largest up to that step, as a fraction of the loss.
        later: the largest after it.
    """

    other_choice: int | None
    difference: float
    later: float

    @classmethod
    def of(cls, expected: Sequence[Step], got: Sequence[Step]) -> Comparison:
        differences = [abs(a.loss - b.loss) / abs(a.loss) for a, b in zip(expected, got, strict=True)]
        parted = (i for i, (a, b) in enumerate(zip(expected, got, strict=True), 1) if not _alike(a, b))
        other = next(parted, None)
        end = len(differences) if other is None else other
        return cls(other, max(differences[:end]), max(differences[end:], default=0.0))

    @property
    def agrees(self) -> bool:
        return self.difference <= TOLERANCE and self.later <= TOLERANCE_AFTER_OTHER_CHOICE

    def __str__(self) -> str:
        verdict = f"{'agrees' if self.agrees else 'DISAGREES'}: {self.difference:.1e}"
        if self.other_choice is None:
            return verdict
        return f"{verdict} up to step {self.other_choice}, where a token chose another expert, then {self.later:.1e}"


def _alike(a: Step, b: Step) -> bool:
    # Equal counts may be added up in another order by another NumPy.
    return abs(a.load_variation - b.load_variation) <= 1e-12


def table(runs: Sequence[Sequence[Step]]) -> str:
    """One line per step, one column per run."""
    width = max(len(name_of(layout)) for layout in LAYOUTS) + 2
    head = "step" + "".join(f"{name_of(layout):>{width}}" for layout in LAYOUTS)
    rows = [
        f"{number:>4}" + "".join(f"{step.loss:>{width}.6f}" for step in row)
        for number, row in enumerate(zip(*runs, strict=True), start=1)
    ]
    return "\n".join(["", head, *rows, ""])


def draw(runs: Sequence[Sequence[Step]], picture: Path) -> None:
    """Draw the losses of all runs, and below them their differences from the first as fractions of the loss."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    losses, differences = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    steps = range(1, len(runs[0]) + 1)
    for index, (layout, run) in enumerate(zip(LAYOUTS, runs, strict=True)):
        # Lines that cover each other stay visible: each is thinner than the one below.
        losses.plot(
            steps, [step.loss for step in run], color=f"C{index}", linewidth=9 - 1.8 * index, label=name_of(layout)
        )
        if index:
            parts = [abs(a.loss - b.loss) / abs(a.loss) for a, b in zip(runs[0], run, strict=True)]
            differences.plot(steps, parts, ".", color=f"C{index}")  # a difference of 0 is not drawn
    losses.set(ylabel="loss (nats per token)", title="One YAML file, two frameworks, one loss curve")
    losses.legend()
    differences.set(xlabel="step", ylabel=f"difference from\n{name_of(LAYOUTS[0])}", yscale="log", ylim=(1e-9, 1e-3))
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    with rc_context({"svg.hashsalt": "hp"}):
        figure.savefig(picture, metadata={"Date": None})


def name_of(layout: Layout) -> str:
    return f"{layout.platform} {layout.title}"


if __name__ == "__main__":
    sys.exit(main())
