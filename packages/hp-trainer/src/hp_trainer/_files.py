"""Atomic writes: files that are whole or absent."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from hp_trainer.machine_errors import with_path


def write_new(path: Path, text: str) -> None:
    """Write a file whose name is free; it is whole from its first moment, also on a network file system.

    Raises:
        FileExistsError: the name is taken, perhaps by another process at this moment.
    """
    temporary = path.with_name(f"{path.name}.incomplete-{secrets.token_hex(4)}")
    try:
        _write(temporary, text)
        link_new(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def link_new(source: Path, target: Path) -> None:
    """Give a file a second name that is free, in one step.

    Raises:
        FileExistsError: the name is taken.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        # NFS asks again when an answer was lost, and then finds the name that the first question has made.
        if not _is_same_file(source, target):
            raise
    except OSError:
        # No hard links here (some FUSE and object file systems): an exclusive creation, empty for a moment.
        with target.open("x", encoding="utf-8") as out:
            out.write(source.read_text(encoding="utf-8"))


def _is_same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` in one step; after a crash it holds the old text or the new one."""
    temporary = path.with_name(f"{path.name}.incomplete-{secrets.token_hex(4)}")
    try:
        _write(temporary, text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise with_path(error, path) from error
