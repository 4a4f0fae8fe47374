"""Parquet and Arrow files, and what `datasets.save_to_disk` writes; through pyarrow, an extra of hp-trainer."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hp_trainer.data.formats.reader import Reader, Record
from hp_trainer.exceptions import DataError

_ROWS = 1024


class _Columns(Reader):
    """Files of rows and named columns."""

    @abstractmethod
    def _columns(self, file: Path) -> list[str]:
        """Return the names of a file's columns, as its footer or header tells them."""

    @abstractmethod
    def _batches(self, file: Path, columns: list[str]) -> Iterator[Any]:
        """Yield a file's record batches with these columns."""

    def check(self, fields: tuple[str, ...] | None = None) -> None:
        """Read the schema of every file, and the first row; see `Reader.check`."""
        for file in self.files:
            with _naming(file):
                self._wanted(file, fields)
        super().check(fields)

    def records(self, fields: tuple[str, ...] | None = None) -> Iterator[Record]:
        """Yield the rows; see `Reader.records`."""
        for file in self.files:
            with _naming(file):
                yield from self._rows(file, self._wanted(file, fields))

    def _rows(self, file: Path, columns: list[str]) -> Iterator[Record]:
        row = 0
        for batch in self._batches(file, columns):
            size = batch.nbytes // max(1, batch.num_rows)
            for value in batch.to_pylist():
                yield Record(value, f"{file}, row {row}", size)
                row += 1

    def _wanted(self, file: Path, fields: tuple[str, ...] | None) -> list[str]:
        """Return the columns to read: the needed ones that are there, at least one of them."""
        there = self._columns(file)
        wanted = [name for name in there if fields is None or name in fields]
        if not wanted:
            needed = " or ".join(map(repr, fields or ()))
            raise DataError(f"{file} has no column {needed}; its columns: {', '.join(there) or 'none'}")
        return wanted


class Parquet(_Columns):
    """Rows of Parquet files."""

    def _columns(self, file: Path) -> list[str]:
        from pyarrow import parquet

        return list(parquet.read_schema(file).names)

    def _batches(self, file: Path, columns: list[str]) -> Iterator[Any]:
        from pyarrow import parquet

        with parquet.ParquetFile(file) as opened:
            yield from opened.iter_batches(batch_size=_ROWS, columns=columns)


class Arrow(_Columns):
    """Rows of Arrow IPC files and streams; `datasets` writes streams."""

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
                for start in range(0, batch.num_rows, _ROWS):
                    yield batch.select(columns).slice(start, _ROWS)


def saved_dataset_files(folder: Path, split: str | None) -> list[Path] | None:
    """Return the Arrow files of a folder that `datasets.save_to_disk` wrote, in order; None where it did not.

    Args:
        split: of a dictionary of datasets; None: `train`.

    Raises:
        DataError: there is no such split, or the folder's description is damaged.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _described(folder / "dataset_dict.json", "splits")
        chosen = split or "train"
        if chosen not in splits:
            raise DataError(f"{folder} has no split {chosen!r}; its splits: {', '.join(splits)}")
        folder = folder / chosen
    if not (folder / "state.json").is_file():
        return None
    files = [folder / entry["filename"] for entry in _described(folder / "state.json", "_data_files")]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise DataError(f"{folder / 'state.json'} names files that are not there: {', '.join(missing)}")
    return files


def _described(file: Path, key: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))[key]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} is damaged: it should be an object with {key!r}") from error


def _open_ipc(source: Any) -> Any:
    """Return a reader of a file, whose footer tells where batches are, or of a stream."""
    from pyarrow import ArrowInvalid, ipc

    try:
        return ipc.open_file(source)
    except ArrowInvalid:
        source.seek(0)
        return ipc.open_stream(source)


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn pyarrow's errors into one that names the file."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(
            f"{file} is read by pyarrow, which cannot be imported here ({error}); install hp-trainer[data]"
        ) from error
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is damaged or of another format: {error}") from error
