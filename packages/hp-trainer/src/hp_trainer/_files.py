"""Atomic writes, which leave files whole or absent, and reading of small files that must be plain ones.

JSON that every reader takes: RFC 8259 has no NaN and no infinity, which Python's `json` writes as bare words.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hp_trainer.failures import with_path

# No settings, note or template is so large; a larger file is none, and would fill the memory.
_MOST_BYTES = 256 << 20

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def other_kind(path: Path) -> str | None:
    """Return what is at a path in place of a plain file or folder, without opening it; None: nothing else is there.

    A pipe would have its reader wait for ever, and to open a device may do something.
    """
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):
        return None


def read_plain_text(path: Path, most_bytes: int = _MOST_BYTES) -> str:
    """Return the text of a UTF-8 file; what is no plain file is not opened.

    Raises:
        OSError: it cannot be read, is no plain file, or has more than `most_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    _refuse_other_kinds(path, other_kind(path))
    with open(path, encoding="utf-8", opener=_open_without_waiting) as file:
        # Another may have taken its place since, and a file that others write to grows.
        found = os.fstat(file.fileno())
        _refuse_other_kinds(path, _KINDS.get(stat.S_IFMT(found.st_mode)))
        text = file.read(most_bytes + 1) if found.st_size <= most_bytes else ""
    size = max(found.st_size, len(text))
    if size > most_bytes:
        raise OSError(errno.EINVAL, f"it has {size:,} bytes, more than the {most_bytes:,} that are read", str(path))
    return text


def _refuse_other_kinds(path: Path, kind: str | None) -> None:
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a plain file", str(path))


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file; of a pipe, do not wait for somebody who writes."""
    return os.open(path, flags | os.O_NONBLOCK)


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


def strict_value(value: Any) -> Any:
    """Return a JSON value with text in place of numbers that are not finite: `nan`, `inf` or `-inf`.

    `float` reads the text back.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: strict_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_value(each) for each in value]
    return value


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return the text of a JSON value, see `strict_value`."""
    return json.dumps(strict_value(value), indent=indent, allow_nan=False)
