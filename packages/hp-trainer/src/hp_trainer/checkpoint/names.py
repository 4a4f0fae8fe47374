"""Names of checkpoint folders."""

from __future__ import annotations

import re

from hp_trainer.exceptions import CheckpointError

COMPLETE = re.compile(r"^step-(\d{8,})(?:-(\d+))?$")


def step_name(step: int) -> str:
    """Return the folder of a step that is saved for the first time."""
    return f"step-{step:08}"


def step_in_name(folder: str) -> int | None:
    """Return the step in the name of a complete checkpoint, or None for a name of another kind."""
    match = COMPLETE.match(folder)
    return None if match is None else int(match[1])


def step_of(folder: str) -> int:
    """Return the step in the name of a complete checkpoint.

    Raises:
        CheckpointError: it is no such name.
    """
    step = step_in_name(folder)
    if step is None:
        raise CheckpointError(f"{folder!r} is no checkpoint; expected a name such as step-00000100")
    return step
