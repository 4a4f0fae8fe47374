"""The checkpoints of a run: list them, find the newest sound one, delete old ones.

A checkpoint is sound when it verifies, see `Checkpoint.verify`.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hp_trainer._files import has_ended, writer_name
from hp_trainer.checkpoint.index import COMPLETE, step_name, step_of
from hp_trainer.checkpoint.load import Checkpoint
from hp_trainer.checkpoint.storage import Storage
from hp_trainer.exceptions import CheckpointError, with_path

# A network file system or an object store may fail for a moment.
_READ_ATTEMPTS = 3
_PAUSE_SECONDS = 1.0
INCOMPLETE = ".incomplete-"
SET_ASIDE = ".set-aside-"
_LEFTOVER = re.compile(r"^step-\d+(-\d+)?\.(incomplete|deleted)-(.*)$")


@dataclass(frozen=True)
class Latest:
    """Result of a search: the newest sound checkpoint, and the problems of the newer ones that were skipped."""

    checkpoint: Checkpoint | None
    skipped: tuple[str, ...]


def list_checkpoints(storage: Storage) -> list[str]:
    """Return the folder names of all complete checkpoints, newest first.

    A step that was saved several times is ordered by its saves (`step-00000100-2` is newer than `step-00000100`).
    """
    found = [(match, name) for name in storage.list_folders() if (match := COMPLETE.match(name))]
    # By numbers, not text: as text `-10` would come before `-2`.
    found.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 1)), reverse=True)
    return [name for _, name in found]


def find_latest(
    storage: Storage,
    *,
    content: bool = True,
    check: Callable[[Checkpoint], None] | None = None,
    before: str | None = None,
) -> Latest:
    """Find the newest sound checkpoint.

    Args:
        content: True to compare all checksums, False to check only file sizes and headers.
        check: raises `CheckpointError` for a checkpoint to skip; called before its files are read.
        before: consider only checkpoints older than this one.

    Raises:
        OSError: one cannot be read (`EIO`, `ESTALE`, permissions), which is no damage: it may be sound.
    """
    names = list_checkpoints(storage)
    return _first_sound(storage, names[names.index(before) + 1 :] if before else names, content=content, check=check)


def open_latest(storage: Storage, *, content: bool = True) -> Checkpoint:
    """Open the newest sound checkpoint.

    Raises:
        CheckpointError: there is none; the message lists the problems of those that were skipped.
    """
    latest = find_latest(storage, content=content)
    if latest.checkpoint is None:
        reasons = "".join(f"\n  {reason}" for reason in latest.skipped)
        raise CheckpointError(f"{storage.describe('')} has no sound checkpoint{reasons}")
    return latest.checkpoint


def open_step(storage: Storage, step: int) -> Checkpoint:
    """Open the newest sound checkpoint of `step`, with all checksums compared.

    Raises:
        CheckpointError: the step was not saved (the message lists the steps that were), or every save of it is damaged.
    """
    names = list_checkpoints(storage)
    wanted = [name for name in names if step_of(name) == step]
    if not wanted:
        available = ", ".join(str(found) for found in sorted({step_of(name) for name in names})) or "none"
        raise CheckpointError(f"{storage.describe('')} has no checkpoint of step {step}; available steps: {available}")
    found = _first_sound(storage, wanted, content=True)
    if found.checkpoint is None:
        raise CheckpointError("; ".join(found.skipped))
    return found.checkpoint


def set_aside_newer(storage: Storage, folder: str) -> list[str]:
    """Rename the checkpoints that are newer than `folder` so that searches skip them, and return the new names.

    Done where a run continues from `folder`: `prune` would take them for the newest ones, and delete those of the run.
    They are never deleted. Renaming a folder back restores the checkpoint.
    """
    renamed = []
    names = list_checkpoints(storage)
    for name in names[: names.index(folder)]:
        # A random suffix, because the same step may be set aside more than once.
        renamed.append(f"{name}{SET_ASIDE}{secrets.token_hex(4)}")
        storage.rename_folder(name, renamed[-1])
    return renamed


def list_set_aside(storage: Storage) -> list[str]:
    """Return the names of the checkpoints that `set_aside_newer` renamed."""
    return sorted(name for name in storage.list_folders() if SET_ASIDE in name)


def prune(storage: Storage, keep: int, keep_best: int = 0) -> list[str]:
    """Delete old checkpoints, and return the deleted names.

    The newest `keep` sound checkpoints stay, and of the older ones the `keep_best` with the lowest `evaluation_loss` in
    their state. Checkpoints with wrong file sizes or headers do not count, so the last sound one is never deleted. Only
    the newest save of a step counts.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    retained: set[int] = set()
    deleted = []
    for name in list_checkpoints(storage):
        step = step_of(name)
        # Names come newest first: a step seen before has a newer save.
        if len(retained) >= keep or step in retained:
            deleted.append(name)
        elif _is_readable(storage, name):
            retained.add(step)
    # Among those that would be deleted only: the newest ones stay anyway.
    best = _best(storage, deleted, keep_best)
    deleted = [name for name in deleted if name not in best]
    for name in deleted:
        delete_if_there(storage, name)
    return deleted


def _best(storage: Storage, names: Sequence[str], count: int) -> set[str]:
    """Return the `count` sound checkpoints of `names` with the lowest evaluation loss, and the unreadable ones."""
    rated: list[tuple[float, int, str]] = []
    unread = set()
    for name in names if count else ():
        try:
            loss = _verified(storage, name, content=False).state.get("evaluation_loss")
        except CheckpointError:
            continue
        except OSError:
            unread.add(name)
            continue
        # Losses that are not finite are saved as text; older checkpoints have NaN, which would break the sort.
        if isinstance(loss, float) and math.isfinite(loss):
            # Of equal losses the later step is better.
            rated.append((loss, -step_of(name), name))
    return unread | {name for _, _, name in sorted(rated)[:count]}


def _is_readable(storage: Storage, name: str) -> bool:
    """Return whether a checkpoint can be read and has no wrong file sizes or headers."""
    try:
        _verified(storage, name, content=False)
    except (CheckpointError, OSError):
        return False
    return True


def incomplete_name(step: int) -> str:
    """Return a new name for the folder of a save in progress: it has the writer in it, and ends with an id."""
    return f"{step_name(step)}{INCOMPLETE}{writer_name()}-{secrets.token_hex(4)}"


def delete_leftovers(storage: Storage, *, of_other_machines: bool = False) -> None:
    """Delete the folders of killed saves and deletions. Saves of processes that run here are never touched.

    Args:
        of_other_machines: delete folders of processes that cannot be checked from here. Only the job with the run's
            lock may set this.
    """
    for name in storage.list_folders():
        match = _LEFTOVER.match(name)
        if match is None:
            continue
        # Two processes may delete one folder; of a save that still runs no file may be missing.
        ended = True if match[2] == "deleted" else has_ended(match[3].rpartition("-")[0])
        if of_other_machines if ended is None else ended:
            delete_if_there(storage, name)


def delete_if_there(storage: Storage, name: str) -> None:
    """Delete a folder unless another process has just deleted it."""
    with contextlib.suppress(FileNotFoundError):
        storage.delete_folder(name)


def free_name(storage: Storage, stem: str) -> str:
    """Return `stem`, or the first free name of `stem-2`, `stem-3`, ...: a published checkpoint is never overwritten."""
    # Incomplete and set-aside folders have other names, so they take none.
    taken = set(storage.list_folders())
    name, attempt = stem, 1
    while name in taken:
        attempt += 1
        name = f"{stem}-{attempt}"
    return name


def _first_sound(
    storage: Storage,
    names: Sequence[str],
    *,
    content: bool,
    check: Callable[[Checkpoint], None] | None = None,
) -> Latest:
    """Return the first sound checkpoint of `names`, and the problems of those before it."""
    skipped: list[str] = []
    for name in names:
        try:
            return Latest(_verified(storage, name, content, check), tuple(skipped))
        except CheckpointError as error:
            skipped.append(str(error))
    return Latest(None, tuple(skipped))


def _verified(
    storage: Storage, name: str, content: bool, check: Callable[[Checkpoint], None] | None = None
) -> Checkpoint:
    """Open and verify a checkpoint. After an OSError it may be sound: it must not be skipped or deleted."""
    for attempt in range(1, _READ_ATTEMPTS + 1):
        try:
            checkpoint = Checkpoint(storage, name)
            if check is not None:
                check(checkpoint)
            checkpoint.verify(content=content)
        except FileNotFoundError as error:
            # Another process has just deleted it.
            raise CheckpointError(str(error)) from error
        except OSError as error:
            if attempt == _READ_ATTEMPTS:
                raise with_path(error, storage.describe(name)) from error
            time.sleep(_PAUSE_SECONDS)
        else:
            return checkpoint
    raise AssertionError("unreachable")
