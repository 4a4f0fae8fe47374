"""The first losses of one YAML file on PyTorch and on MindSpore, in several layouts, side by side.

    python tests/loss_parity.py --torch PYTHON --mindspore PYTHON

Each PYTHON is the interpreter of an environment with hp-trainer and that platform. Every run starts from the same
weights and reads the same samples, which no layout and no framework changes. Exit code 1 if any loss is further
from those of one rank on torch than the tolerance, 2 if a run could not be made.
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

# Sums in float32 in another order differ by some 1e-7 of their size, once per product and reduction on the way.
# AdamW divides every gradient by its own size, so what rounding makes of a gradient that is nearly zero becomes a
# whole step of that weight; the difference in loss then grows with the steps. Measured over the 20 steps: see
# `describe`, which prints the largest difference of each run.
TOLERANCE = 1e-4  # of the loss


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
        losses = [train(layout, pythons[layout.platform], options) for layout in LAYOUTS]
    except RunError as error:
        print(f"loss_parity: {error}", file=sys.stderr)
        return 2
    print(table(losses))
    differences = [largest_difference(losses[0], each) for each in losses]
    for layout, (difference, step) in zip(LAYOUTS[1:], differences[1:], strict=True):
        verdict = "agrees" if difference <= options.tolerance else "DISAGREES"
        print(f"{name_of(layout):<24} {verdict}: at most {difference:.1e} of the loss, in step {step}")
    print(f"tolerance {options.tolerance:.0e} of the loss")
    return int(any(difference > options.tolerance for difference, _ in differences))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, metavar="PYTHON", help="interpreter that has the torch platform")
    parser.add_argument("--mindspore", required=True, metavar="PYTHON", help="one that has the MindSpore platform")
    parser.add_argument("--config", default=str(CONFIG), help="YAML file (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps to compare (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of the loss (default: %(default)s)")
    return parser.parse_args()


def check_platform(python: str, platform: str) -> None:
    """Refuse an interpreter that cannot train on the platform."""
    command = [python, "-c", "from hp_trainer.preflight import installed_platforms; print(*installed_platforms())"]
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


def train(layout: Layout, python: str, options: argparse.Namespace) -> list[float]:
    """The losses of one run, whose folder is removed afterwards; its steps are shown as they are done."""
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
        losses = list(read_losses(run / "metrics.jsonl"))
    if len(losses) != options.steps:
        raise RunError(f"{name_of(layout)}: {len(losses)} losses were written down, expected {options.steps}")
    print(f"    {time.monotonic() - started:.0f} s", flush=True)
    return losses


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


def read_losses(metrics: Path) -> Iterator[float]:
    for line in metrics.read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "step":
            yield float(event["loss"])


def largest_difference(expected: Sequence[float], got: Sequence[float]) -> tuple[float, int]:
    """(largest difference as a fraction of the loss, the step that has it)."""
    pairs = enumerate(zip(expected, got, strict=True), start=1)
    return max((abs(a - b) / abs(a), step) for step, (a, b) in pairs)


def table(losses: Sequence[Sequence[float]]) -> str:
    """One line per step, one column per run."""
    width = max(len(name_of(layout)) for layout in LAYOUTS) + 2
    head = "step" + "".join(f"{name_of(layout):>{width}}" for layout in LAYOUTS)
    rows = [f"{step:>4}" + "".join(f"{loss:>{width}.6f}" for loss in row) for step, row in _rows(losses)]
    return "\n".join(["", head, *rows, ""])


def _rows(losses: Sequence[Sequence[float]]) -> Iterator[tuple[int, tuple[float, ...]]]:
    yield from enumerate(zip(*losses, strict=True), start=1)


def name_of(layout: Layout) -> str:
    return f"{layout.platform} {layout.title}"


if __name__ == "__main__":
    sys.exit(main())
