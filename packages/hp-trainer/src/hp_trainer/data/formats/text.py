"""Finding text: any file or folder, by default the source of Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hp_trainer.data.formats.reader import Reader, Record
from hp_trainer.exceptions import DataError

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}


def standard_library() -> Path:
    """Return the folder of this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def find_text_files(path: Path, suffixes: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the candidate files below `path` (or `path` itself), in an order that depends on their names alone.

    Hidden files and folders, installed packages and caches are left out, and so is what is no regular file (reading
    a pipe would never end); links to folders are not followed.

    Args:
        path: a file or a folder.
        suffixes: endings wanted (`(".py",)`); empty: every file.

    Raises:
        DataError: there is no such file or folder.
    """
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise DataError(f"data path {path} does not exist; give a text file or a folder that holds some")
    for folder, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            wanted = not name.startswith(".") and (not suffixes or name.endswith(suffixes))
            if wanted and Path(folder, name).is_file():
                yield Path(folder, name)


def read_text_bytes(path: Path) -> bytes | None:
    """Return the bytes of a text file; None where it cannot be read, is empty, holds a zero byte or is not UTF-8."""
    try:
        data = path.read_bytes()
        data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return data if data.strip() and b"\0" not in data else None


class TextFiles(Reader):
    """Text files, each of them one document; files that are no text are left out."""

    def records(self, fields: tuple[str, ...] | None = None) -> Iterator[Record]:
        """Yield the texts; see `Reader.records`."""
        for file in self.files:
            data = read_text_bytes(file)
            if data is not None:
                yield Record(data, str(file), len(data))
