"""Choice of the reader of a path: by its ending, by what a folder holds, or as it is told."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Literal

from hp_trainer.data.formats import columns, json_lines
from hp_trainer.data.formats.reader import Reader
from hp_trainer.data.formats.text import TextFiles, find_text_files
from hp_trainer.exceptions import DataError

Format = Literal["auto", "text", "jsonl", "parquet", "arrow"]

_ENDINGS = {
    "jsonl": json_lines.ENDINGS,
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
}
_READERS: dict[str, type[Reader]] = {
    "text": TextFiles,
    "jsonl": json_lines.JsonLines,
    "parquet": columns.Parquet,
    "arrow": columns.Arrow,
}
# What lies beside records in downloaded folders.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "state.json", "readme.md", "license", "license.txt")


def open_reader(
    path: Path, format: Format = "auto", suffixes: tuple[str, ...] = (), split: str | None = None
) -> Reader:
    """Return the reader of a file, a folder, or the files that a pattern (`data/train-*.parquet`) names.

    A folder is read as JSON lines, Parquet or Arrow where `format` says so or all its files are of that kind, as a
    dataset where `datasets.save_to_disk` wrote it, and else as text files.

    Args:
        suffixes: endings wanted in a folder; empty: those of the format.
        split: of a dictionary of datasets that `datasets` saved.

    Raises:
        DataError: there is no such path, no file of the format, or no such split.
    """
    saved = columns.saved_dataset_files(path, split) if path.is_dir() and format in ("auto", "arrow") else None
    if saved is not None:
        return columns.Arrow(saved)
    files = _files(path, suffixes)
    kind = _kind_of(files) if format == "auto" else format
    if not path.is_file() and kind in _ENDINGS and not suffixes:
        files = [file for file in files if _is_record_file(file, kind)]
    if kind != "text" and not files:
        raise DataError(f"{path} holds no file that ends in {' or '.join(suffixes or _ENDINGS[kind])}")
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
    """Return the format that all files share: a folder with other files among them is one of text."""
    records = [file for file in files if file.name.lower() not in _DESCRIPTIONS]
    for kind in _ENDINGS:
        if records and all(_is_record_file(file, kind) for file in records):
            return kind
    return "text"


def _is_record_file(file: Path, kind: str) -> bool:
    # `datasets` leaves the results of its own transformations beside a dataset as cache-*.arrow.
    is_other = file.name.lower() in _DESCRIPTIONS or (kind == "arrow" and file.name.startswith("cache-"))
    return file.name.endswith(_ENDINGS[kind]) and not is_other
