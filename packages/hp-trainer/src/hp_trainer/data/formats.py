"""Readers of data files: text, JSON lines, CSV, Parquet, Arrow, and what `datasets.save_to_disk` writes.

A reader yields records with their location (`file:line`), in an order that depends only on file names. `open_reader`
chooses the reader by file endings or by setting. Files are data: nothing in them is executed.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import re
import sysconfig
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from hp_trainer._files import other_kind
from hp_trainer.exceptions import DataError


@dataclass(frozen=True, slots=True)
class Record:
    """A record, or a segment that begins or ends a document; `where` is for messages, the rough `size` for progress."""

    value: bytes | dict[str, Any]
    where: str
    size: int
    begins: bool = True
    ends: bool = True

    def text(self, field: str) -> str:
        """Return the text of `field`, or the text of a text file."""
        if isinstance(self.value, bytes):
            return self.value.decode("utf-8")
        if field not in self.value:
            found = ", ".join(map(str, self.value)) or "none"
            advice = advise_fields([*self.value], "data.field to the one with the text")
            raise DataError(f"{self.where} has no field {field!r}; its fields: {found}{advice}")
        value = self.value[field]
        if not isinstance(value, str):
            raise DataError(f"{self.where}: expected text in field {field!r}, got {value!r:.60}")
        return value


# Usual names of fields, those of ShareGPT and Alpaca among them.
_CONVERSATIONS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "instruction", "question", "query")
_COMPLETIONS = ("completion", "output", "response", "answer")
_TEXTS = ("text", "content", "body", "document")


def advise_fields(names: Sequence[str], otherwise: str) -> str:
    """Return a sentence with the settings for fields of the given names; `otherwise`: where no name is known."""
    conversation, prompt, completion, text = (
        next((name for name in known if name in names), None)
        for known in (_CONVERSATIONS, _PROMPTS, _COMPLETIONS, _TEXTS)
    )
    if conversation is not None:
        return f". Set data.name=chat and data.messages_field={conversation}"
    if prompt is not None and completion is not None:
        rest = "; it leaves out 'input', which Alpaca appends to the instruction" if "input" in names else ""
        return f". Set data.name=chat, data.prompt_field={prompt} and data.completion_field={completion}{rest}"
    return f". Set data.field={text}" if text is not None else f". Set {otherwise}"


class Reader(ABC):
    """Interface of a reader of files of one format."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.total_bytes = sum(file.stat().st_size for file in files)

    @abstractmethod
    def records(self, fields: tuple[str, ...] | None = None) -> Iterator[Record]:
        """Yield the records in order; formats with columns read the needed `fields` only (None: all)."""

    def check(self, fields: tuple[str, ...] | None = None) -> None:
        """Check what is quick to check of every file, and the first record."""
        next(self.records(fields), None)


# Text files longer than this are read in segments: tokenizers need about 30 bytes of memory per byte of text.
SEGMENT_BYTES = 4 << 20
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}


def standard_library() -> Path:
    """Return the folder of this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def find_text_files(path: Path, suffixes: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder, or `path` itself if it is a file, ordered by name.

    Hidden files and folders, installed packages and caches are skipped, and so are files that are not regular, such as
    pipes. Links to folders are not followed.

    Args:
        path: file or folder.
        suffixes: file endings to include, such as `(".py",)`. Empty includes every file.

    Raises:
        DataError: the path does not exist, or is neither a regular file nor a folder.
    """
    if path.is_file():
        yield path
        return
    kind = other_kind(path)
    if kind is not None:
        raise DataError(f"data path {path} is {kind}; expected a text file, or a folder with text files")
    if not path.is_dir():
        raise DataError(f"data path {path} does not exist; expected a text file, or a folder with text files")
    for folder, folders, files in os.walk(path):
        # In place: `os.walk` then visits them in this order, and skips the others.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            selected = not name.startswith(".") and (not suffixes or name.endswith(suffixes))
            if selected and Path(folder, name).is_file():
                yield Path(folder, name)


def read_text_bytes(path: Path) -> bytes | None:
    """Return the bytes of a text file, or None if it is unreadable, blank, not UTF-8, or contains a zero byte."""
    try:
        data = path.read_bytes()
        data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return data if data.strip() and b"\0" not in data else None


class TextFiles(Reader):
    """Text files, each one document, read in segments of lines if longer than `SEGMENT_BYTES`. Others are skipped."""

    def records(self, fields: tuple[str, ...] | None = None) -> Iterator[Record]:
        for file in self.files:
            if file.stat().st_size > SEGMENT_BYTES:
                yield from _segments(file)
                continue
            data = read_text_bytes(file)
            if data is not None:
                yield Record(data, str(file), len(data))


def _segments(file: Path) -> Iterator[Record]:
    begin, rest = 0, b""
    try:
        long = file.open("rb")
    except OSError:
        # Skipped, as `read_text_bytes` skips short unreadable files.
        return
    with long as opened:
        # What follows the last line of a segment starts the next one.
        while data := rest + opened.read(SEGMENT_BYTES):
            # Whether the file ends here decides if the rest is a segment of its own.
            ends = not opened.peek(1)
            end = len(data) if ends else _last_break(data)
            segment, rest = data[:end], data[end:]
            reason = _not_text(segment)
            if reason is not None and begin == 0:
                return
            if reason is not None:
                raise DataError(f"{file} starts as text, but {reason} in the {len(segment)} bytes from byte {begin}")
            yield Record(segment, str(file), len(segment), begins=begin == 0, ends=ends)
            begin += end
            if ends:
                return


def _last_break(data: bytes) -> int:
    """Return the end of a segment: after the last line, else before the last space or character. It is never 0."""
    last_character = len(data) - 1
    # Bytes 10xxxxxx continue a UTF-8 character; step back to the byte that starts it.
    while last_character > 0 and data[last_character] & 0xC0 == 0x80:
        last_character -= 1
    # A segment of continuation bytes only is not UTF-8 and is refused later.
    return data.rfind(b"\n") + 1 or max(0, data.rfind(b" ")) or last_character or len(data)


def _not_text(segment: bytes) -> str | None:
    """Return None when bytes are text, else the reason why they are not."""
    if b"\0" in segment:
        return "there is a zero byte"
    try:
        segment.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"there are bytes that are not UTF-8 ({error.reason})"
    return None


# Limits, because a longer line or list would exhaust memory before an error could be reported.
_LONGEST_LINE = 1 << 30
_LONGEST_LIST = 1 << 32
JSON_ENDINGS = (".jsonl", ".ndjson", ".json", ".jsonl.gz", ".ndjson.gz", ".json.gz")


class JsonLines(Reader):
    """JSON files: an object per line, or one list of objects; plain or compressed by gzip."""

    def records(self, fields: tuple[str, ...] | None = None) -> Iterator[Record]:
        for file in self.files:
            try:
                with _open(file) as opened:
                    yield from _list(file, opened) if _is_list(opened) else _lines(file, opened)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{file} cannot be read: {error}") from error


def _open(file: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def _is_list(file: IO[bytes]) -> bool:
    """Return True when the first character is a bracket. The file position is restored."""
    # A byte order mark, as from Windows, and white space may precede the bracket.
    first = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    file.seek(0)
    return first == b"["


def _lines(file: Path, opened: IO[bytes]) -> Iterator[Record]:
    # `readline` with a limit: iterating the file would read a line of any length.
    for number, line in enumerate(iter(lambda: opened.readline(_LONGEST_LINE + 1), b""), 1):
        where = f"{file}:{number}"
        if len(line) > _LONGEST_LINE:
            raise DataError(f"{where} has more than {_LONGEST_LINE:,} bytes; expected one object per line")
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


# Escapes of surrogates. Valid pairs of them are frequent: `json.dumps` writes every emoji so.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _parse(text: bytes, where: str) -> Any:
    try:
        # Files from Windows may start with a byte order mark.
        value = json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        reason = (
            f"{error.msg.removesuffix(' at')} at character {error.pos}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)
        )
        raise DataError(f"{where} is not valid JSON: {reason}; it starts with {text[:60]!r}") from error
    if _SURROGATE.search(text):
        _refuse_lone_surrogates(value, where)
    return value


def _refuse_lone_surrogates(value: Any, where: str) -> None:
    # In a list, each object has its own location.
    parts = [(f"{where}[{n}]", one) for n, one in enumerate(value)] if isinstance(value, list) else [(where, value)]
    for place, part in parts:
        try:
            json.dumps(part, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{place} has half of a surrogate pair, \\u{ord(error.object[error.start]):x}, which is no character; "
                "remove it, or write \\ufffd"
            ) from error


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object with fields, got {value!r:.60}")
    return value


_ROWS = 1024
_BATCH_BYTES = 64 << 20


class _Columns(Reader):
    """Base of readers of files with rows and named columns, through pyarrow (extra `hp-trainer[data]`)."""

    @abstractmethod
    def _columns(self, file: Path) -> list[str]:
        """Return the names of a file's columns from its footer or header."""

    @abstractmethod
    def _batches(self, file: Path, columns: list[str]) -> Iterator[Any]:
        """Yield the record batches of a file with the given columns."""

    def check(self, fields: tuple[str, ...] | None = None) -> None:
        for file in self.files:
            with _naming(file):
                self._selected(file, fields)
        super().check(fields)

    def records(self, fields: tuple[str, ...] | None = None) -> Iterator[Record]:
        for file in self.files:
            with _naming(file):
                row = 0
                for batch in self._batches(file, self._selected(file, fields)):
                    # The size in memory approximates that in the file, which is not known per row.
                    size = batch.nbytes // max(1, batch.num_rows)
                    for value in batch.to_pylist():
                        yield Record(value, f"{file}, row {row}", size)
                        row += 1

    def _selected(self, file: Path, fields: tuple[str, ...] | None) -> list[str]:
        """Return the columns to read: those of `fields` that the file has, at least one."""
        available = self._columns(file)
        selected = [name for name in available if fields is None or name in fields]
        if not selected:
            needed = " or ".join(map(repr, fields or ()))
            advice = advise_fields(available, "data.field, or with data.name=chat data.messages_field")
            raise DataError(f"{file} has no column {needed}; its columns: {', '.join(available) or 'none'}{advice}")
        return selected


class Parquet(_Columns):
    """Parquet files."""

    def _columns(self, file: Path) -> list[str]:
        from pyarrow import parquet

        return list(parquet.read_schema(file).names)

    def _batches(self, file: Path, columns: list[str]) -> Iterator[Any]:
        from pyarrow import parquet

        with parquet.ParquetFile(file) as opened:
            for group in range(opened.num_row_groups):
                rows = _rows_at_once(file, opened.metadata.row_group(group), columns)
                yield from opened.iter_batches(batch_size=rows, columns=columns, row_groups=[group])


def _rows_at_once(file: Path, group: Any, columns: list[str]) -> int:
    """Return the number of rows of a row group to decompress at once."""
    chunks = [group.column(number) for number in range(group.num_columns)]
    # A nested column has a chunk for each of its leaves.
    size: int = sum(one.total_uncompressed_size for one in chunks if one.path_in_schema.partition(".")[0] in columns)
    row = size // max(1, int(group.num_rows))
    if row > _LONGEST_LINE:
        raise DataError(f"{file} unpacks to {row:,} bytes a row; expected at most {_LONGEST_LINE:,}")
    return max(1, min(_ROWS, _BATCH_BYTES // max(1, row)))


class Csv(_Columns):
    """CSV and TSV files with a header, plain or compressed by gzip. Values are text and may contain line breaks."""

    def _columns(self, file: Path) -> list[str]:
        with self._open(file, None) as reader:
            return list(reader.schema.names)

    def _batches(self, file: Path, columns: list[str]) -> Iterator[Any]:
        with self._open(file, columns) as reader:
            yield from reader

    def _open(self, file: Path, columns: list[str] | None) -> Any:
        import pyarrow
        from pyarrow import csv

        # Every column is text: inferred types would turn "007" into 7, and an empty text into null.
        convert = csv.ConvertOptions(
            include_columns=columns,
            column_types={name: pyarrow.string() for name in columns or ()},
            strings_can_be_null=False,
        )
        delimiter = "\t" if ".tsv" in file.suffixes else ","
        # Parallel reading would hold more than one block in memory.
        return csv.open_csv(
            str(file),
            read_options=csv.ReadOptions(use_threads=False),
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=convert,
        )


class Arrow(_Columns):
    """Arrow IPC files and streams. `datasets` writes streams."""

    def _columns(self, file: Path) -> list[str]:
        import pyarrow

        with pyarrow.memory_map(str(file)) as source:
            return list(_open_ipc(source).schema.names)

    def _batches(self, file: Path, columns: list[str]) -> Iterator[Any]:
        import pyarrow

        with pyarrow.memory_map(str(file)) as source:
            opened = _open_ipc(source)
            streamed = isinstance(opened, pyarrow.ipc.RecordBatchStreamReader)
            for batch in opened if streamed else map(opened.get_batch, range(opened.num_record_batches)):
                # Batches of a file may have millions of rows; `to_pylist` would convert all of them at once.
                for start in range(0, batch.num_rows, _ROWS):
                    yield batch.select(columns).slice(start, _ROWS)


def saved_dataset_files(folder: Path, split: str | None) -> list[Path] | None:
    """Return the Arrow files of a folder by `datasets.save_to_disk`, of a split (None: train); None for others."""
    if (folder / "dataset_dict.json").is_file():
        splits = _described(folder / "dataset_dict.json", "splits", str)
        chosen = split or "train"
        if chosen not in splits:
            raise DataError(f"{folder} has no split {chosen!r}; its splits: {', '.join(splits)}")
        folder = folder / chosen
    if not (folder / "state.json").is_file():
        return None
    # The order of the description, which is that of the rows.
    entries = _described(folder / "state.json", "_data_files", dict)
    files = [folder / str(entry.get("filename")) for entry in entries]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{folder / 'state.json'} names files that do not exist: {', '.join(missing)}")
    return files


def _described(file: Path, key: str, kind: type) -> list[Any]:
    """Return the list of this key in a JSON file, whose entries are of a kind."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))[key]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} is damaged: expected an object with the key {key!r}") from error
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found):
        raise DataError(f"{file} is damaged: {key} is not a list as `datasets` writes it")
    return found


def _open_ipc(source: Any) -> Any:
    """Open an Arrow file, or a stream where there is no file footer."""
    from pyarrow import ArrowInvalid, ipc

    try:
        return ipc.open_file(source)
    except ArrowInvalid:
        # `open_file` has moved the position.
        source.seek(0)
        return ipc.open_stream(source)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Convert exceptions of pyarrow into `DataError` with the name of the file."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{file} needs pyarrow, which cannot be imported here ({error}); install hp-trainer[data]"
        ) from error
    try:
        yield
    # Arrow does not verify that the bytes of a text are UTF-8.
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is damaged or of another format: {error}") from error


Format = Literal["auto", "text", "jsonl", "csv", "parquet", "arrow"]

_ENDINGS = {
    "jsonl": JSON_ENDINGS,
    "csv": (".csv", ".tsv", ".csv.gz", ".tsv.gz"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
}
_READERS: dict[str, type[Reader]] = {
    "text": TextFiles,
    "jsonl": JsonLines,
    "csv": Csv,
    "parquet": Parquet,
    "arrow": Arrow,
}
# Files next to the records in downloaded folders.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json", "readme.md", "license", "license.txt")


def open_reader(
    path: Path, format: Format = "auto", suffixes: tuple[str, ...] = (), split: str | None = None
) -> Reader:
    """Return the reader of a file, a folder, or the files of a pattern such as `data/train-*.parquet`.

    With `format="auto"`, files are read as JSON lines, CSV, Parquet or Arrow when all of them have its endings, as a
    dataset when `datasets.save_to_disk` wrote the folder, and otherwise as text files.

    Args:
        path: file, folder or pattern.
        format: format of the files.
        suffixes: file endings to read in a folder. Empty uses those of the format.
        split: split of a `DatasetDict` that `datasets` saved.

    Raises:
        DataError: the path or the split does not exist, or there are no files of the format.
    """
    saved = saved_dataset_files(path, split) if path.is_dir() and format in ("auto", "arrow") else None
    if saved is not None:
        return Arrow(saved)
    files = _files(path, suffixes)
    kind = _kind_of(files) if format == "auto" else format
    # A named file is read whatever it is called; a folder may hold other files.
    if not path.is_file() and kind in _ENDINGS and not suffixes:
        files = [file for file in files if _is_record_file(file, kind)]
    if kind != "text" and not files:
        raise DataError(f"{path} contains no file that ends in {' or '.join(suffixes or _ENDINGS[kind])}")
    return _READERS[kind](files)


def _files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    if path.exists() or not glob.has_magic(str(path)):
        return list(find_text_files(path, suffixes))
    found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    files = [file for file in found if file.is_file() and (not suffixes or file.name.endswith(suffixes))]
    if not files:
        raise DataError(f"no file matches the data path {path}")
    return files


def _kind_of(files: list[Path]) -> str:
    """Return the format of all files, or "text" if they have several or unknown endings."""
    records = [file for file in files if file.name.lower() not in _DESCRIPTIONS]
    for kind in _ENDINGS:
        if records and all(_is_record_file(file, kind) for file in records):
            return kind
    return "text"


def _is_record_file(file: Path, kind: str) -> bool:
    # `datasets` stores results of its transformations next to a dataset as cache-*.arrow.
    is_other = file.name.lower() in _DESCRIPTIONS or (kind == "arrow" and file.name.startswith("cache-"))
    return file.name.endswith(_ENDINGS[kind]) and not is_other
