"""Finding text: any file or folder, by default the source of Python's own standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from hp_trainer._files import other_kind
from hp_trainer.data.formats.reader import Reader, Record
from hp_trainer.exceptions import DataError

# A tokenizer takes about 30 bytes of memory for each byte of a text.
PIECE_BYTES = 4 << 20
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
        DataError: there is no such file or folder, or something else, such as a pipe.
    """
    if path.is_file():
        yield path
        return
    kind = other_kind(path)
    if kind is not None:
        raise DataError(f"data path {path} is {kind}; give a text file or a folder that holds some")
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
    """Text files, each of them one document; files that are no text are left out.

    Files of more than `PIECE_BYTES` come in pieces, which end with a line, so that memory holds a few at a time.
    """

    def records(self, fields: tuple[str, ...] | None = None) -> Iterator[Record]:
        """Yield the texts; see `Reader.records`. Of a long file, the first piece tells whether it is text."""
        for file in self.files:
            if file.stat().st_size > PIECE_BYTES:
                yield from _pieces(file)
                continue
            data = read_text_bytes(file)
            if data is not None:
                yield Record(data, str(file), len(data))


def _pieces(file: Path) -> Iterator[Record]:
    begin, rest = 0, b""
    try:
        long = file.open("rb")
    except OSError:
        # Left out, as a short one that may not be read.
        return
    with long as opened:
        while data := rest + opened.read(PIECE_BYTES):
            ends = not opened.peek(1)
            end = len(data) if ends else _last_break(data)
            piece, rest = data[:end], data[end:]
            reason = _reason_against(piece)
            if reason is not None and begin == 0:
                return
            if reason is not None:
                raise DataError(f"{file} begins as text, but {reason} in the {len(piece)} bytes from byte {begin} on")
            yield Record(piece, str(file), len(piece), begins=begin == 0, ends=ends)
            begin += end
            if ends:
                return


def _last_break(data: bytes) -> int:
    """Return where a piece may end: after the last line, else before the last space or character; never at 0."""
    last_character = len(data) - 1
    while last_character > 0 and data[last_character] & 0xC0 == 0x80:
        last_character -= 1
    # Bytes that only go on with a character are no text: a whole piece of them is refused.
    return data.rfind(b"\n") + 1 or max(0, data.rfind(b" ")) or last_character or len(data)


def _reason_against(piece: bytes) -> str | None:
    """Return why bytes are no text; None: they are."""
    if b"\0" in piece:
        return "there is a zero byte"
    try:
        piece.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"there is something else than UTF-8 ({error.reason})"
    return None
