"""`hp-train profile`: a short run that profiles its last steps."""

from __future__ import annotations

import re

from hp_trainer.cli.arguments import Parser, UsageError, parse
from hp_trainer.cli.runs import train_command


def profile_command(given: list[str]) -> int:
    """Train a few steps and profile the last ones, into `profile/` of a new run: `hp-train profile CONFIG`."""
    return train_command(profile_arguments(given))


def profile_arguments(given: list[str]) -> list[str]:
    """Return the arguments of a new run for `hp-train profile CONFIG [--steps=FIRST-LAST]`; other settings win.

    The first steps of a run load kernels and compile; they are left out unless asked for.
    """
    parser = Parser(prog="hp-train profile", add_help=False)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--steps", default="4-5", metavar="FIRST-LAST")
    options, overrides = parse(parser, given)
    found = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", options.steps)
    if found is None:
        raise UsageError(f"--steps takes a step or FIRST-LAST, such as 4-5, got {options.steps!r}")
    first, last = found[1], found[2] or found[1]
    settings = [("profile.first", first), ("profile.last", last), ("training.steps", last), ("generate.prompts", "[]")]
    return [options.config, *(f"--{path}={value}" for path, value in [*settings, *overrides])]
