"""The list of a run's checkpoints, each verified."""

from __future__ import annotations

from hp_trainer.checkpoint import Checkpoint, Storage, list_checkpoints, list_set_aside
from hp_trainer.checkpoint.index import step_in_name
from hp_trainer.exceptions import CheckpointError

_COLUMNS = ("step", "loss", "size", "state", "folder")


def describe_checkpoints(storage: Storage) -> tuple[str, bool]:
    """Return the checkpoints of a storage as a table, newest first, and whether all of them are sound.

    All content is read and compared with its checksums. Those set aside by `resume --from-step` come last.
    """
    rows, all_sound = [_COLUMNS], True
    for name in [*list_checkpoints(storage), *list_set_aside(storage)]:
        try:
            row = _describe(storage, name)
        except (CheckpointError, OSError) as error:
            row, all_sound = (str(step_in_name(name.partition(".")[0])), "-", "-", f"damaged: {error}", name), False
        rows.append(row)
    if len(rows) == 1:
        return f"{storage.describe('')} has no checkpoint", True
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "  ".join([*(text.rjust(width) for text, width in zip(row, widths, strict=False)), *row[3:]]) for row in rows
    ]
    return "\n".join(lines), all_sound


def _describe(storage: Storage, name: str) -> tuple[str, str, str, str, str]:
    checkpoint = Checkpoint(storage, name)
    loss = checkpoint.state.get("loss")
    # One that is no finite number is text.
    told = f"{loss:.4f}" if isinstance(loss, float) else str(loss or "-")
    size = sum(checkpoint.index.shard_bytes) / 2**20
    checkpoint.verify()
    return str(checkpoint.step), told, f"{size:,.1f} MiB", "sound", name
