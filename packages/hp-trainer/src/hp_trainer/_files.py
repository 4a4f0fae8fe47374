"""Atomic file writes, names that show their writer, safe reads of small regular files, and JSON by RFC 8259."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import math
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hp_trainer.exceptions import with_path

if TYPE_CHECKING:
    from pydantic import ValidationError

# Upper bound of the files read here (settings, notes, templates), so that a wrong path cannot fill the memory.
_MOST_BYTES = 256 << 20

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def other_kind(path: Path) -> str | None:
    """Return the kind of a path that is neither a regular file nor a folder, without opening it, else None."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except (OSError, ValueError):
        return None


def read_plain_text(path: Path, most_bytes: int = _MOST_BYTES) -> str:
    """Return the text of a regular UTF-8 file of at most `most_bytes`; others raise OSError or UnicodeDecodeError."""
    _refuse_other_kinds(path, other_kind(path))
    with open(path, encoding="utf-8", opener=_open_without_waiting) as file:
        # Checked again on the open file: the path may have been replaced meanwhile, and the file may have grown.
        found = os.fstat(file.fileno())
        _refuse_other_kinds(path, _KINDS.get(stat.S_IFMT(found.st_mode)))
        text = file.read(most_bytes + 1) if found.st_size <= most_bytes else ""
    size = max(found.st_size, len(text))
    if size > most_bytes:
        raise OSError(errno.EINVAL, f"it has {size:,} bytes, more than the limit of {most_bytes:,}", str(path))
    return text


def _refuse_other_kinds(path: Path, kind: str | None) -> None:
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def _open_without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking: opening a pipe for reading would otherwise wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def write_new(path: Path, text: str) -> None:
    """Create a file that never appears incomplete, or raise a FileExistsError if another process has done so."""
    with _new_file(path) as (temporary, out):
        out.write(text.encode())
        _close_on_disk(out)
        link_new(temporary, path)


def link_new(source: Path, target: Path) -> None:
    """Link `source` under the new name `target` atomically; without hard links, copy its text."""
    try:
        os.link(source, target)
    except FileExistsError:
        # An NFS client repeats a request whose reply was lost, and then finds the link that the first one created.
        if not _is_same_file(source, target):
            raise
    except OSError:
        # No hard links (some FUSE and object stores): at least only one process creates the file.
        text = source.read_text(encoding="utf-8")
        with target.open("x", encoding="utf-8") as out:
            out.write(text)


def _is_same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def write_atomically(path: Path, text: str) -> None:
    """Replace the text of `path` atomically. After a crash it has either the old text or the new one."""
    with replacing(path) as out:
        out.write(text.encode())


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` atomically when the block ends. After an error nothing is left of it.

    Raises:
        OSError: naming `path`: errors of a write to an open file name none by themselves.
    """
    with _new_file(path) as (temporary, out):
        yield out
        _close_on_disk(out)
        temporary.replace(path)


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a new file beside `path` with its temporary name, which is deleted at the end if it still exists."""
    temporary = path.with_name(f"{path.name}.incomplete-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as out:
            yield temporary, out
    except OSError as error:
        raise with_path(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def _close_on_disk(out: BinaryIO) -> None:
    out.flush()
    # Before the rename or link that publishes the file: its name must not reach the disk first.
    os.fsync(out.fileno())
    out.close()


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, replacing `target` atomically."""
    with source.open("rb") as data, replacing(target) as out:
        shutil.copyfileobj(data, out)


def writer_name() -> str:
    """Return a name of this process for a temporary file: machine, process id and process start; see `has_ended`."""
    return f"{_machine()}-{os.getpid()}-{_process_start(os.getpid()) or 0}"


def has_ended(writer: str) -> bool | None:
    """Return whether the process with a `writer_name` has ended; None: it is on another machine, or it is no name."""
    machine, *numbers = writer.split("-")
    if machine != _machine() or len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        return None
    # The start distinguishes the writer from a later process with the same id; 0: it is unknown.
    return None if numbers[1] == "0" else _process_start(int(numbers[0])) != int(numbers[1])


@functools.cache
def _machine() -> str:
    """Return a hash of the scope in which a process id is unique: host, boot, and PID namespace (one per container)."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    text = f"{socket.gethostname()} {_read_system('/proc/sys/kernel/random/boot_id')} {namespace}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _process_start(pid: int) -> int | None:
    """Return the start of a process in clock ticks after boot (field 22 of proc(5)'s stat); None: it has ended."""
    text = _read_system(f"/proc/{pid}/stat")
    # The name is in brackets and may itself have spaces and brackets. A zombie has ended.
    state, *rest = text.rpartition(")")[2].split() or [""]
    return int(rest[18]) if len(rest) > 18 and state != "Z" else None


def _read_system(path: str) -> str:
    """Return the text of a file of the system; empty if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def strict_value(value: Any) -> Any:
    """Return a JSON value in which numbers that RFC 8259 lacks are the strings `nan`, `inf` and `-inf`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: strict_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_value(each) for each in value]
    return value


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return a value as RFC 8259 JSON text; see `strict_value`."""
    return json.dumps(strict_value(value), indent=indent, allow_nan=False)


def mismatch(error: ValidationError) -> str:
    """Return the first problem of a JSON text: its place, what was expected, and the value there."""
    first = error.errors(include_url=False)[0]
    problem = first["msg"].replace("Input should be", "expected").replace("Field required", "missing")
    # The value is everything around a missing field, and of a text that is not JSON the text.
    if first["type"] not in ("missing", "json_invalid"):
        problem += f", got {first['input']!r:.80}"
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), problem)))
