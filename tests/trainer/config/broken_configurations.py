"""Hundreds of configurations, each with one setting that is wrong, or at least strange."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Iterator
from pathlib import Path

from hp_trainer import cli
from hp_trainer.config import list_options
from hp_trainer.plugins import registries

VALUES = (
    *("1e30", "1e-30", "1e300", "1e-300", "inf", "-inf", "nan", "-1", "0", "3", "2.5"),
    *("1000000000000", "9223372036854775808", "''", "abc", "[]", "{}", "null", "true", "/proc/none"),
)
# They compile for half a minute, or are the step and folder that every trial needs.
_NOT_TRIED = {("training.compile", "true"), ("run.folder", "null")}


def broken_configurations() -> Iterator[tuple[str, str]]:
    """Yield (setting, value) for every setting that the built-in configuration takes, and every value."""
    for path in dict.fromkeys(option.path for option in list_options(registries()) if "[]" not in option.path):
        for value in VALUES:
            if (path, value) not in _NOT_TRIED:
                yield path, value


def slips(folder: Path, path: str, value: str) -> str | None:
    """Check a configuration, and train a step with it if nothing was found; return what went wrong after all.

    Args:
        folder: holds `run.yaml`.
    """
    given = [str(folder / "run.yaml"), f"--{path}={value}"]
    code, message = _run("check", *given)
    if code == 2:
        # The setting, or one that cannot be together with it, must be named.
        return (
            None
            if path.rpartition(".")[2] in message or "problem" in message
            else f"the message names no setting: {message}"
        )
    if code != 0:
        return f"check ended with {code}: {message}"
    steps = [] if path == "training.steps" else ["--training.steps=1"]
    place = [] if path == "run.folder" else [f"--run.folder={folder / 'out'}"]
    code, message = _run(*given, *steps, *place)
    shutil.rmtree(folder / "out", ignore_errors=True)
    return None if code == 0 else f"check found nothing, training ended with {code}: {message}"


def _run(*words: str) -> tuple[int, str]:
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(list(words))
    return code, errors.getvalue()
