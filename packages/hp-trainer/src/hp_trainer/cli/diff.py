"""The command that finds the first place where two runs part."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from hp_dtensor.debug import Comparison, Recording, compare, draw, measure_growth
from hp_dtensor.debug.comparison import UNITS
from hp_dtensor.exceptions import RecordingError
from hp_dtensor.launch import is_launched
from hp_trainer.cli.commands import Overrides, SettingsCommand
from hp_trainer.cli.completion import yaml_files
from hp_trainer.cli.shared import check_file_to_write, print_message
from hp_trainer.run import RunFolder

# A recording needs no evaluations, checkpoints and samples.
_QUIET = [
    ("training.eval_interval", "null"),
    ("checkpoint.interval", "null"),
    ("generate.prompts", "[]"),
    ("metrics.trackers", "[jsonl]"),
    # A step that is not finite is recorded and discarded, so that it can be compared.
    ("training.guard.on_nonfinite", "skip"),
]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a configuration with overrides, or recorded digests.

    Attributes:
        source: a YAML file, a run folder, or a file of digests.
        overrides: settings of this side, those for both sides first.
        python: the interpreter of the environment to train in.
    """

    source: Path
    overrides: tuple[tuple[str, str], ...]
    python: str

    @property
    def recorded(self) -> Path | None:
        """The file of digests of this side; None: it is trained."""
        if self.source.suffix == ".gz":
            return self.source
        found = RunFolder(self.source).digests_file
        return found if found.is_file() and not self.overrides else None

    @property
    def config(self) -> Path:
        return RunFolder(self.source).config_file if self.source.is_dir() else self.source

    def record(self, folder: Path, steps: int, more: Sequence[tuple[str, str]] = ()) -> Recording:
        """Train the first steps in a run folder of their own, and return their digests.

        Raises:
            RecordingError: the run failed; the message ends with its last lines.
        """
        settings = [
            *_QUIET,
            *self.overrides,
            ("run.folder", str(folder)),
            ("training.record_steps", str(steps)),
            ("training.record_only", "true"),
            *more,
        ]
        words = [f"--{path}={value}" for path, value in settings]
        # -P keeps the working directory off the import path.
        command = [self.python, "-P", "-m", "hp_trainer", "train", str(self.config), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise RecordingError(f"{self.python} is no interpreter: {error}") from error
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()[-12:]
            raise RecordingError("\n".join([f"{self} ended with exit code {done.returncode}:", *lines]))
        return Recording.load(RunFolder(folder).digests_file)

    def __str__(self) -> str:
        return " ".join([str(self.source), *(f"--{path}={value}" for path, value in self.overrides)])


@click.command("diff", cls=SettingsCommand)
@click.argument("a", metavar="A", shell_complete=yaml_files)
@click.argument("b", metavar="[B]", required=False, shell_complete=yaml_files)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="Steps to compare.")
@click.option("--to", callback=check_file_to_write, metavar="FILE", help="Draw the differences (needs matplotlib).")
@click.option("--record", callback=check_file_to_write, metavar="FILE", help="Write the digests of A, with growth.")
def diff_command(a: str, b: str | None, steps: int, to: Path | None, record: Path | None, overrides: Overrides) -> int:
    """Find the first tensor in which two sides differ by more than rounding, and say how.

    A and B are YAML files, run folders, or files of digests; B is A by default. Settings are for both sides, and with
    --a.SETTING or --b.SETTING for one of them: --b.parallel.tp=2. --b.python=PATH trains it in another environment.
    Both sides start from the same weights and samples. A is trained twice, the second time with every weight changed by
    one rounding, which shows how much rounding explains. The exit code is 0 if they are equal or within rounding, 1 if
    they differ or are not finite, and 2 if they cannot be compared, as when a side fails.
    """
    if is_launched():
        raise click.UsageError("diff starts its runs itself; do not start it under torchrun or msrun")
    sides = [_side(a, overrides, "a"), _side(b or a, overrides, "b")]
    with tempfile.TemporaryDirectory(prefix="hp-diff-") as folder:
        recordings = Runs(sides, Path(folder)).recordings(steps)
        found: Comparison = compare(*recordings)
        if record is not None:
            recordings[0].save(record)
    print(found)
    if to is not None:
        draw(found, to)
        print(f"picture: {to}")
    return int(found.first is not None)


def _side(source: str, overrides: Overrides, letter: str) -> Side:
    path = Path(source).expanduser()
    if not path.exists():
        raise click.UsageError(f"{source} does not exist; expected a YAML file, a run folder or a file of digests")
    own = [(name.removeprefix(f"{letter}."), value) for name, value in overrides if name.startswith(f"{letter}.")]
    if own and path.suffix == ".gz":
        raise click.UsageError(f"{source} is recorded already and takes no settings, got --{letter}.{own[0][0]}")
    both = [(name, value) for name, value in overrides if not name.startswith(("a.", "b."))]
    python = dict(own).get("python", sys.executable)
    own = [one for one in own if one[0] != "python"]
    return Side(path, (*both, *own), python)


class Runs:
    """The runs of a comparison.

    Args:
        sides: A and B.
        folder: where they are trained.
    """

    def __init__(self, sides: Sequence[Side], folder: Path) -> None:
        self._sides, self._folder, self._numbers = list(sides), folder, itertools.count()

    def recordings(self, steps: int) -> list[Recording]:
        """Record both sides, and how rounding grows in A, or in B if A is recorded already."""
        sides = self._sides
        found = [self._recorded(number, steps) for number in range(len(sides))]
        if any(event.growth is not None for each in found for events in each.steps.values() for event in events):
            return found
        # A trained side shows the growth as well as the other one.
        trained = next((number for number, side in enumerate(sides) if side.recorded is None), 0)
        if sides[trained].recorded is not None and not sides[trained].source.is_dir():
            trained = 1 if sides[1].source.is_dir() else 0
        if sides[trained].source.suffix == ".gz":
            # Neither side can be trained; `compare` says so.
            return found
        unit = max(UNITS[name] for each in found for name in each.about["dtypes"])
        perturbed = self._recorded(trained, steps, unit)
        return [measure_growth(each, perturbed) if at == trained else each for at, each in enumerate(found)]

    def _recorded(self, number: int, steps: int, perturbation: float = 0.0) -> Recording:
        side, more = self._sides[number], []
        if side.recorded is not None and not perturbation:
            return Recording.load(side.recorded)
        what = f"recording {steps} step{'s' * (steps != 1)} of {side}"
        if perturbation:
            what += f" with weights changed by {perturbation:.0e}"
            more.append(("training.perturb_weights", repr(perturbation)))
        print_message(what)
        return side.record(self._folder / str(next(self._numbers)), steps, more)
