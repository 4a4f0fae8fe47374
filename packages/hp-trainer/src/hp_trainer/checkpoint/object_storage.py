"""Checkpoints in an object store, through fsspec: no folder is ever renamed there, a commit mark makes one complete."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_trainer.checkpoint.storage import Storage
from hp_trainer.config import setting
from hp_trainer.exceptions import Problem

_MARK = ".commit.json"


@dataclass(frozen=True, kw_only=True)
class ObjectStorageConfig:
    """An object store, or whatever else fsspec knows; keys and regions come from where its library looks for them."""

    url: str = setting(help="place of the checkpoints, one for each run: s3://bucket/runs/one")

    def check(self) -> Iterator[Problem]:
        try:
            _filesystem(self.url)
        except (ImportError, ValueError, OSError) as error:
            hint = "pip install 'hp-trainer[object-store]' and the library of the store, such as s3fs or gcsfs"
            yield Problem(path="url", what=f"cannot be used: {error}", got=self.url, hint=hint)


class ObjectStorage(Storage):
    """A prefix of an object store.

    The objects of a folder keep the prefix under which they were written. A folder gets another name by a mark, one
    small object that says where its objects are: it is whole or absent, as every object is. Deletion takes the mark
    first. Files are read through a temporary copy on this machine.

    Args:
        url: as fsspec reads it: `s3://bucket/path`, `gs://...`, `memory://...`.
    """

    def __init__(self, url: str) -> None:
        self._fs, root = _filesystem(url)
        self._root, self._url = root.rstrip("/"), url.rstrip("/")

    def list_folders(self) -> list[str]:
        """List marks by their names, and the prefixes that no mark leads to."""
        entries = self._list()
        marks = self._marks(entries)
        found = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]
        return [*marks, *(name for name in found if name not in set(marks.values()))]

    def create_folder(self, name: str) -> None:
        """Prepare a folder; where there are no folders it appears with its first object."""
        if name in self.list_folders():
            raise FileExistsError(f"{self.describe(name)} exists")
        with self._failures(name):
            self._fs.makedirs(self._path(name), exist_ok=True)

    def write_file(self, folder: str, file: str, parts: Iterable[bytes | memoryview]) -> int:
        size = 0
        with self._failures(folder, file), self._fs.open(self._path(self._prefix(folder), file), "wb") as out:
            for part in parts:
                out.write(part)
                size += len(part)
        return size

    def file_size(self, folder: str, file: str) -> int | None:
        try:
            with self._failures(folder, file):
                return int(self._fs.info(self._path(self._prefix(folder), file))["size"])
        except FileNotFoundError:
            return None

    def map_file(self, folder: str, file: str) -> np.ndarray:
        if not self.file_size(folder, file):
            return np.empty(0, dtype=np.uint8)
        # The mapping keeps the bytes after the copy has lost its name.
        with tempfile.NamedTemporaryFile() as copy, self._failures(folder, file):
            self._fs.get_file(self._path(self._prefix(folder), file), copy.name)
            return np.memmap(copy.name, dtype=np.uint8, mode="r")

    def rename_folder(self, name: str, to: str) -> None:
        """Write the mark of the new name, and take that of the old one, if it had one."""
        marks = self._marks(self._list())
        if to in marks:
            raise FileExistsError(f"{self.describe(to)} exists")
        with self._failures(to):
            # The new mark first: killed between the two, the folder has both names, and none is lost.
            self._fs.pipe_file(self._mark(to), json.dumps({"prefix": marks.get(name, name)}).encode())
            if name in marks:
                self._fs.rm_file(self._mark(name))

    def delete_folder(self, name: str) -> None:
        """Delete the mark and then the objects, unless another mark leads to them."""
        marks = self._marks(self._list())
        prefix = marks.pop(name, None)
        with self._failures(name):
            if prefix is not None:
                self._fs.rm_file(self._mark(name))
            prefix = prefix or name
            if prefix not in marks.values() and self._fs.exists(self._path(prefix)):
                self._fs.rm(self._path(prefix), recursive=True)

    def describe(self, folder: str, file: str = "") -> str:
        return "/".join(part for part in (self._url, folder, file) if part)

    def _list(self) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            with self._failures(""):
                return list(self._fs.ls(self._root, detail=True))
        except FileNotFoundError:
            return []

    def _marks(self, entries: list[dict[str, Any]]) -> dict[str, str]:
        """Return the prefix of the objects of each folder that has a mark, of a listing of everything."""
        marks = {}
        for entry in entries:
            name = entry["name"].rpartition("/")[2]
            if name.endswith(_MARK):
                marks[name.removesuffix(_MARK)] = self._read_mark(name)
        return marks

    def _read_mark(self, file: str) -> str:
        with self._failures("", file):
            text = self._fs.cat_file(self._path(file))
        try:
            prefix = json.loads(text)["prefix"]
        except (ValueError, KeyError, TypeError, RecursionError):
            prefix = None
        # A damaged mark leads to itself, where no index is: the checkpoint is told as incomplete.
        is_name = isinstance(prefix, str) and prefix not in ("", ".", "..") and "/" not in prefix
        return prefix if is_name else file.removesuffix(_MARK)

    def _prefix(self, folder: str) -> str:
        mark = f"{folder}{_MARK}"
        with self._failures(folder):
            return self._read_mark(mark) if self._fs.exists(self._path(mark)) else folder

    def _mark(self, folder: str) -> str:
        return self._path(f"{folder}{_MARK}")

    def _path(self, *parts: str) -> str:
        return "/".join([self._root, *parts])

    @contextlib.contextmanager
    def _failures(self, folder: str, file: str = "") -> Iterator[None]:
        """Turn the errors of a store's library into an `OSError` that names the object."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.describe(folder, file)}: {type(error).__name__}: {error}") from error


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, which remembers no listings, and the path there."""
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=False)
    return filesystem, path
