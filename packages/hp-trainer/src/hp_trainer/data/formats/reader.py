"""Interface of a reader: the records of a source's files, one after the other, each with its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hp_trainer.exceptions import DataError


@dataclass(frozen=True, slots=True)
class Record:
    """One document as it stands in its file, or a piece of a long text.

    Attributes:
        value: bytes of UTF-8 text, or the fields of a record by name.
        where: its file, and its line or row.
        size: bytes that it takes of its file, for the progress; about.
        begins, ends: whether the document begins, and ends, with this piece.
    """

    value: bytes | dict[str, Any]
    where: str
    size: int
    begins: bool = True
    ends: bool = True

    def text(self, field: str) -> str:
        """Return the text of `field`, or the whole of a text file.

        Raises:
            DataError: there is no such field, or it holds something else; names the place.
        """
        if isinstance(self.value, bytes):
            return self.value.decode("utf-8")
        if field not in self.value:
            found = ", ".join(map(str, self.value)) or "none"
            raise DataError(f"{self.where} has no field {field!r}; its fields: {found}. Say which holds the text")
        value = self.value[field]
        if not isinstance(value, str):
            raise DataError(f"{self.where}: field {field!r} should be text, got {value!r:.60}")
        return value


class Reader(ABC):
    """Files of one format.

    Args:
        files: in the order in which they are read.

    Attributes:
        total_bytes: of all files.
    """

    def __init__(self, files: list[Path]) -> None:
        self.files = files
        self.total_bytes = sum(file.stat().st_size for file in files)

    @abstractmethod
    def records(self, fields: tuple[str, ...] | None = None) -> Iterator[Record]:
        """Yield the records in their order.

        Args:
            fields: those that are needed, where the format can leave out others; None: all.

        Raises:
            DataError: a file is damaged; names the file and the line.
        """

    def check(self, fields: tuple[str, ...] | None = None) -> None:
        """Look at every file as far as that is quick, and at the first record.

        Raises:
            DataError: as `records` would.
        """
        next(self.records(fields), None)
