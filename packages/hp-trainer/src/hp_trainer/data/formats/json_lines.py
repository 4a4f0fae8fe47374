"""JSON lines: one object per line, plain or compressed by gzip; or one list of objects in a file."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from hp_trainer.data.formats.reader import Reader, Record
from hp_trainer.exceptions import DataError

# No record is so long; one that is would fill the memory before anything could be said of it.
_LONGEST_LINE = 1 << 30
_LONGEST_LIST = 1 << 32
ENDINGS = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")


class JsonLines(Reader):
    """Records of JSON files."""

    def records(self, fields: tuple[str, ...] | None = None) -> Iterator[Record]:
        """Yield the objects; see `Reader.records`."""
        for file in self.files:
            try:
                with _open(file) as opened:
                    yield from _list(file, opened) if _is_list(opened) else _lines(file, opened)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{file} cannot be read: {error}") from error


def _open(file: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def _is_list(file: IO[bytes]) -> bool:
    """Return whether the first character is a bracket; the file is at its beginning again."""
    first = file.read(64).lstrip()[:1]
    file.seek(0)
    return first == b"["


def _lines(file: Path, opened: IO[bytes]) -> Iterator[Record]:
    for number, line in enumerate(iter(lambda: opened.readline(_LONGEST_LINE + 1), b""), 1):
        where = f"{file}:{number}"
        if len(line) > _LONGEST_LINE:
            raise DataError(f"{where} has more than {_LONGEST_LINE:,} bytes; expected an object in each line")
        if line.strip():
            yield Record(_object(_parse(line, where), where), where, len(line))


def _list(file: Path, opened: IO[bytes]) -> Iterator[Record]:
    text = opened.read(_LONGEST_LIST + 1)
    if len(text) > _LONGEST_LIST:
        raise DataError(f"{file} is a list of more than {_LONGEST_LIST:,} bytes; write its objects as JSON lines")
    items = _parse(text, str(file))
    for number, item in enumerate(items):
        where = f"{file}[{number}]"
        yield Record(_object(item, where), where, len(text) // len(items))


def _parse(text: bytes, where: str) -> Any:
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg.removesuffix(' at')} at character {error.pos}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise DataError(f"{where} is broken JSON: {reason}; it begins {text[:60]!r}") from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where} should be an object with fields, got {value!r:.60}")
    return value
