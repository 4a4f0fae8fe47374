"""The command that finds the first place where two runs part."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import yaml

from hp_dtensor.debug import Comparison, Recording, compare, draw, located, measure_growth, modules_around, narrowed
from hp_dtensor.debug.comparison import UNITS
from hp_dtensor.exceptions import RecordingError, RegistryError
from hp_dtensor.launch import is_launched
from hp_trainer.cli.commands import Overrides, SettingsCommand
from hp_trainer.cli.completion import yaml_files
from hp_trainer.cli.shared import check_file_to_write, load, print_message
from hp_trainer.config import dump_config
from hp_trainer.exceptions import ConfigError, Problem
from hp_trainer.launch.platforms import installed_platforms
from hp_trainer.models.hugging_face.reference import reference_names, their_modules, their_tensor, with_our_names
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder
from hp_trainer.training.recording import read_recording

# Prefix of a directory whose model is computed by transformers.
_TRANSFORMERS = "hf:"
# Updates of a bias that balances experts have no effect.
_NO_BALANCE = 1e-30
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
        own: the overrides that are for this side only.
        title: the source in messages; default: as given.
    """

    source: Path
    overrides: tuple[tuple[str, str], ...]
    python: str
    own: tuple[tuple[str, str], ...] = ()
    title: str = ""

    @property
    def recorded(self) -> Path | None:
        """The file of digests of this side; None: it is trained."""
        if self.source.suffix == ".gz":
            return self.source
        found = RunFolder(self.source).digests_file
        return found if found.is_file() and not self.overrides else None

    @property
    def directory(self) -> Path | None:
        """The directory of a model of transformers that this side is; None: it is none."""
        text = str(self.source)
        return Path(text.removeprefix(_TRANSFORMERS)) if text.startswith(_TRANSFORMERS) else None

    def of_transformers(self, other: Side, folder: Path) -> tuple[Side, dict[str, str]]:
        """Return this side as a configuration that trains on one rank, and the decoder's names of its tensors."""
        assert self.directory is not None
        config = load(str(other.config), list(other.overrides)).config
        source = config.model.source
        if source is None or Path(source).resolve() != self.directory.resolve():
            problem = Problem(
                path="model.from", what=f"{self} needs the same model on the other side", expected=str(self.directory)
            )
            raise ConfigError([problem], str(other))
        settings = yaml.safe_load(dump_config(config))
        # The layout and the recomputation of the other side are for the decoder only.
        for name in ("parallel", "pipeline"):
            settings.pop(name, None)
        dropped, training = ("recompute", "activation_", "offload_"), settings["training"]
        settings["training"] = {name: value for name, value in training.items() if not name.startswith(dropped)}
        settings |= {"model": {"name": "transformers", "path": str(self.directory.resolve())}}
        settings["platform"] = _platform_of_transformers(config.platform)
        settings["launch"]["local_ranks"] = 1
        file = folder / "transformers.yaml"
        file.write_text(yaml.safe_dump(settings), encoding="utf-8")
        names = reference_names(self.directory, config.model.options)
        if (getattr(config.model.options, "load_balance_coeff", None) or 0.0) > _NO_BALANCE:
            print_message(
                "the decoder updates the bias that balances experts, and transformers does not; stop it with "
                f"--model.load_balance_coeff={_NO_BALANCE} to compare later steps than the first"
            )
        # The other side's configuration has the settings for both sides already.
        return replace(self, source=file, overrides=self.own, title=str(self.source)), names

    @property
    def config(self) -> Path:
        return RunFolder(self.source).config_file if self.source.is_dir() else self.source

    def record(self, folder: Path, steps: int, more: Sequence[tuple[str, str]] = ()) -> Recording:
        """Train the first steps in a run folder of their own, with `more` settings, and return their digests."""
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
        return " ".join([self.title or str(self.source), *(f"--{path}={value}" for path, value in self.overrides)])


@click.command("diff", cls=SettingsCommand)
@click.argument("a", metavar="A", shell_complete=yaml_files)
@click.argument("b", metavar="[B]", required=False, shell_complete=yaml_files)
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, metavar="N", help="Steps to compare.")
@click.option("--to", callback=check_file_to_write, metavar="FILE", help="Draw the differences (needs matplotlib).")
@click.option("--record", callback=check_file_to_write, metavar="FILE", help="Write the digests of A for compare_with.")
def diff_command(a: str, b: str | None, steps: int, to: Path | None, record: Path | None, overrides: Overrides) -> int:
    """Find the first tensor in which two sides differ by more than rounding, and say how.

    A and B are YAML files, run folders, files of digests, or hf:DIRECTORY, the model of transformers that the other
    side imports; B is A by default. Settings are for both sides, and with --a.SETTING or --b.SETTING for one of them:
    --b.parallel.tp=2. --b.python=PATH trains it in another environment. Both sides start from the same weights and
    samples. A is trained twice, the second time with every weight changed by one rounding, which shows how much
    rounding explains. If they differ, both are trained once more up to there, to find the operation. The exit code is 0
    if they are equal or within rounding, 1 if they differ or are not finite, and 2 if they cannot be compared, as when
    a side fails.
    """
    if is_launched():
        raise click.UsageError("diff starts its runs itself; do not start it under torchrun or msrun")
    sides = [_side(a, overrides, "a"), _side(b or a, overrides, "b")]
    if all(side.directory is not None for side in sides):
        raise click.UsageError("one side must be a configuration, a run or a file of digests")
    with tempfile.TemporaryDirectory(prefix="hp-diff-") as folder:
        runs = Runs(sides, Path(folder))
        recordings = runs.recordings(steps)
        found: Comparison = compare(*recordings)
        if record is not None:
            recordings[0].save(record)
        if found.first is not None:
            try:
                found = runs.narrowed(found)
            except RecordingError as error:
                # The comparison is complete without it.
                found = replace(found, operation=(f"not narrowed: {error}",))
    print(found)
    if to is not None:
        draw(found, to)
        print(f"picture: {to}")
    return int(found.first is not None)


def _side(source: str, overrides: Overrides, letter: str) -> Side:
    path = Path(source).expanduser()
    if not Path(source.removeprefix(_TRANSFORMERS)).expanduser().exists():
        raise click.UsageError(f"{source} does not exist; expected a YAML file, a run folder or a file of digests")
    own = [(name.removeprefix(f"{letter}."), value) for name, value in overrides if name.startswith(f"{letter}.")]
    if own and path.suffix == ".gz":
        raise click.UsageError(f"{source} is recorded already and takes no settings, got --{letter}.{own[0][0]}")
    both = [(name, value) for name, value in overrides if not name.startswith(("a.", "b."))]
    python = dict(own).get("python", sys.executable)
    own = [one for one in own if one[0] != "python"]
    return Side(path, (*both, *own), python, tuple(own))


def _platform_of_transformers(preferred: str | None) -> str | None:
    """Return an installed platform that computes models of transformers, `preferred` if it does; None: none is here."""

    def computes(platform: str) -> bool:
        with contextlib.suppress(RegistryError):
            return registries().models.get("transformers", platform) is not None
        return False

    able = list(filter(computes, installed_platforms()))
    return preferred if preferred in able else next(iter(able), None)


class Runs:
    """The runs of a comparison, trained in a folder."""

    def __init__(self, sides: Sequence[Side], folder: Path) -> None:
        self._sides, self._folder, self._numbers = list(sides), folder, itertools.count()
        # Of a side that transformers computes: the decoder's names.
        self._names: list[dict[str, str]] = [{} for _ in sides]
        for number, side in enumerate(sides):
            if side.directory is not None:
                self._sides[number], self._names[number] = side.of_transformers(sides[1 - number], folder)

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
        return self._with_growth(found, trained, steps)

    def narrowed(self, found: Comparison) -> Comparison:
        """Train both sides up to the first difference once more, and return it with its elements and operation."""
        first = found.first
        assert first is not None
        modules = modules_around(first.pass_, first.name, first.after)
        if any(side.source.suffix == ".gz" for side in self._sides):
            return replace(found, operation=("not narrowed: give a run or a YAML file in place of a file of digests",))
        reason = ""
        if not modules and first.step:
            reason = "computed after forward and backward, by no module"
        if modules and first.pass_ == "gradient" and "experts" in modules[0].split("."):
            reason, modules = "rows of experts have an order of their own on each rank", ()
        if first.pass_ == "loss":
            # A number, which the digest gives.
            return replace(found, operation=(f"not narrowed: {reason}",))
        elements = ("weights" if first.pass_ == "update" else first.pass_, first.name)
        again = [self._recorded(number, first.step or 1, 0.0, modules, elements) for number in range(2)]
        found = located(found, *again)
        if not modules:
            return replace(found, operation=(f"not narrowed: {reason}",) if reason else ())
        return narrowed(found, compare(*self._with_growth(again, 0, first.step, modules)))

    def _with_growth(
        self, found: Sequence[Recording], number: int, steps: int, operations: Sequence[str] = ()
    ) -> list[Recording]:
        unit = max(UNITS[name] for each in found for name in each.about["dtypes"])
        perturbed = self._recorded(number, steps, unit, operations)
        return [measure_growth(each, perturbed) if at == number else each for at, each in enumerate(found)]

    def _recorded(
        self,
        number: int,
        steps: int,
        perturbation: float = 0.0,
        operations: Sequence[str] = (),
        elements: tuple[str, str] | None = None,
    ) -> Recording:
        side, names = self._sides[number], self._names[number]
        more = []
        if side.recorded is not None and not perturbation and elements is None:
            return read_recording(str(side.recorded))
        what = f"recording {steps} step{'s' * (steps != 1)} of {side}"
        if perturbation:
            what += f" with weights changed by {perturbation:.0e}"
            more.append(("training.perturb_weights", repr(perturbation)))
        if operations:
            what += f" and the operations of {operations[0]}"
            chosen = their_modules(operations, names) if names else list(operations)
            more.append(("training.record_operations", json.dumps(chosen)))
        if elements is not None:
            what += f" and the elements of {elements[1]}"
            more.append(("training.record_elements", " ".join(their_tensor(elements, names) if names else elements)))
        print_message(what)
        return with_our_names(side.record(self._folder / str(next(self._numbers)), steps, more), names)
