"""Catalog of a run's checkpoints: their names, the latest sound one, retention."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from hp_trainer.checkpoint.load import Checkpoint
from hp_trainer.checkpoint.names import COMPLETE, step_of
from hp_trainer.checkpoint.storage import Storage
from hp_trainer.exceptions import CheckpointError

INCOMPLETE = ".incomplete-"
SET_ASIDE = ".set-aside-"
_LEFTOVER = re.compile(r"^step-\d+(-\d+)?\.(incomplete|deleted)-")


@dataclass(frozen=True)
class Latest:
    """The newest sound checkpoint, and why newer ones were passed over."""

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...]


def list_checkpoints(storage: Storage) -> list[str]:
    """List the names of all complete checkpoints, newest first (by step, then by how often it was saved)."""
    found = [(match, name) for name in storage.list_folders() if (match := COMPLETE.match(name))]
    return [name for _, name in sorted(((_order(match), name) for match, name in found), reverse=True)]


def find_latest(storage: Storage, *, content: bool = True) -> Latest:
    """Look for the newest checkpoint that verifies.

    Args:
        content: compare all checksums; False: sizes and headers only.
    """
    return _first_sound(storage, list_checkpoints(storage), content=content)


def open_latest(storage: Storage, *, content: bool = True) -> Checkpoint:
    """Return the newest checkpoint that verifies.

    Raises:
        CheckpointError: there is none; says what was passed over.
    """
    latest = find_latest(storage, content=content)
    if latest.checkpoint is None:
        reasons = "".join(f"\n  {reason}" for reason in latest.skipped)
        raise CheckpointError(f"{storage.describe('')} holds no sound checkpoint{reasons}")
    return latest.checkpoint


def open_step(storage: Storage, step: int) -> Checkpoint:
    """Return the newest save of a step; all of it is verified.

    Raises:
        CheckpointError: there is none, and which steps there are; or each save of it is damaged.
    """
    names = list_checkpoints(storage)
    wanted = [name for name in names if step_of(name) == step]
    if not wanted:
        there = ", ".join(str(found) for found in sorted({step_of(name) for name in names})) or "none"
        raise CheckpointError(f"{storage.describe('')} holds no checkpoint of step {step}; there are: {there}")
    found = _first_sound(storage, wanted, content=True)
    if found.checkpoint is None:
        raise CheckpointError("; ".join(found.skipped))
    return found.checkpoint


def set_aside_later(storage: Storage, step: int) -> list[str]:
    """Rename the checkpoints after a step, so that no search finds them again; returns their new names.

    Nothing deletes them; given its name back, a checkpoint is one again.
    """
    renamed = []
    for name in list_checkpoints(storage):
        if step_of(name) > step:
            renamed.append(f"{name}{SET_ASIDE}{secrets.token_hex(4)}")
            storage.rename_folder(name, renamed[-1])
    return renamed


def list_set_aside(storage: Storage) -> list[str]:
    """List the names of the checkpoints that `set_aside_later` has renamed."""
    return sorted(name for name in storage.list_folders() if SET_ASIDE in name)


def prune(storage: Storage, keep: int, keep_best: int = 0) -> list[str]:
    """Delete what is older than the newest `keep` sound checkpoints; returns the names deleted.

    So many more as `keep_best` stay: those of the lowest `evaluation_loss` in their state. A checkpoint whose sizes or
    headers are wrong does not count, so the last sound one always stays. A step saved again replaces its earlier save.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    kept: dict[int, str] = {}
    doomed = []
    for name in list_checkpoints(storage):
        step = step_of(name)
        # Newest first: a step that is kept already has been saved again since.
        if len(kept) >= keep or step in kept:
            doomed.append(name)
        elif _first_sound(storage, [name], content=False).checkpoint is not None:
            kept[step] = name
    best = _best(storage, doomed, keep_best)
    doomed = [name for name in doomed if name not in best]
    for name in doomed:
        storage.delete_folder(name)
    return doomed


def _best(storage: Storage, names: Sequence[str], number: int) -> set[str]:
    """Return the sound checkpoints with the lowest evaluation loss among `names`, as many as `number`."""
    rated: list[tuple[float, int, str]] = []
    for name in names if number else ():
        checkpoint = _first_sound(storage, [name], content=False).checkpoint
        loss = None if checkpoint is None else checkpoint.state.get("evaluation_loss")
        # One that is not finite is text, in older checkpoints NaN, which no order holds.
        if isinstance(loss, float) and math.isfinite(loss):
            rated.append((loss, -step_of(name), name))
    return {name for _, _, name in sorted(rated)[:number]}


def delete_leftovers(storage: Storage) -> None:
    """Remove what killed saves and deletions left behind; only the run's one writer may."""
    for name in storage.list_folders():
        if _LEFTOVER.match(name):
            storage.delete_folder(name)


def free_name(storage: Storage, stem: str) -> str:
    """Return `stem`, or `stem-2`, `stem-3`, ... where that is taken: a published checkpoint is never written over."""
    taken = set(storage.list_folders())
    name, attempt = stem, 1
    while name in taken:
        attempt += 1
        name = f"{stem}-{attempt}"
    return name


def _order(match: re.Match[str]) -> tuple[int, int]:
    return int(match[1]), int(match[2] or 1)


def _first_sound(storage: Storage, names: Sequence[str], *, content: bool) -> Latest:
    """Return the first checkpoint of these names that verifies, and why those before it do not."""
    skipped = []
    for name in names:
        try:
            checkpoint = Checkpoint(storage, name)
            checkpoint.verify(content=content)
        except (CheckpointError, OSError) as error:
            skipped.append(str(error))
        else:
            return Latest(checkpoint, tuple(skipped))
    return Latest(None, tuple(skipped))
