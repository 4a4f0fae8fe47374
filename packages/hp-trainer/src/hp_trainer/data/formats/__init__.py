"""Formats of data files: text, JSON lines, Parquet, Arrow and saved datasets, as records with their places."""

from hp_trainer.data.formats.detect import Format, open_reader
from hp_trainer.data.formats.reader import Reader, Record
from hp_trainer.data.formats.text import PIECE_BYTES, find_text_files, read_text_bytes, standard_library

__all__ = [
    "PIECE_BYTES",
    "Format",
    "Reader",
    "Record",
    "find_text_files",
    "open_reader",
    "read_text_bytes",
    "standard_library",
]
