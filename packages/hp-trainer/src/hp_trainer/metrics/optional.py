"""Libraries that only some trackers need."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from hp_trainer.exceptions import Problem


def missing_library(module: str, *, extra: str) -> Iterator[Problem]:
    """Yield the problem of a configuration that names a tracker whose library is not installed."""
    if importlib.util.find_spec(module) is None:
        yield Problem(
            path="name",
            what=f"needs the library {module}, which is not here",
            hint=f"pip install 'hp-trainer[{extra}]'",
        )
