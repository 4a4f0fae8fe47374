"""Storages of checkpoints: a local or shared file system, and object stores through fsspec.

A storage holds folders of files. A checkpoint becomes visible by renaming its folder, which has to be atomic. Object
stores have no rename, so there a small object, the commit mark, gives a folder its name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from hp_trainer.config import section
from hp_trainer.exceptions import Problem, with_path


class Storage(ABC):
    """Interface of a storage: folders of files, one level deep. Names contain no separators.

    Checkpoints are atomic because `write_file` is durable when it returns, and `rename_folder` is atomic and durable.
    Every method raises `OSError` when the storage fails.
    """

    @abstractmethod
    def list_folders(self) -> list[str]:
        """Return the names of all folders, in any order."""

    @abstractmethod
    def create_folder(self, name: str) -> None:
        """Create a folder.

        Raises:
            FileExistsError: the folder exists.
        """

    @abstractmethod
    def write_file(self, folder: str, file: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a new file from chunks of bytes, and return its size in bytes."""

    @abstractmethod
    def file_size(self, folder: str, file: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""

    @abstractmethod
    def map_file(self, folder: str, file: str) -> np.ndarray:
        """Map a file into memory: a read-only uint8 array of shape `[size]`."""

    @abstractmethod
    def rename_folder(self, name: str, to: str) -> None:
        """Rename a folder, atomically and durably.

        Raises:
            FileExistsError: the new name is taken.
        """

    @abstractmethod
    def delete_folder(self, name: str) -> None:
        """Delete a folder. If the process is killed during the deletion, no folder of this name remains."""

    @abstractmethod
    def describe(self, folder: str, file: str = "") -> str:
        """Return the name of a folder or file for messages."""


class LocalStorage(Storage):
    """A folder of a POSIX file system that all ranks share.

    Args:
        root: the folder, created with the first checkpoint.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def list_folders(self) -> list[str]:
        if not self.root.is_dir():
            return []
        # A dangling or circular link counts too, though `is_dir` is False: its name is taken.
        return [entry.name for entry in os.scandir(self.root) if entry.is_symlink() or entry.is_dir()]

    def create_folder(self, name: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        # Without `exist_ok`, so that two processes cannot own one folder.
        (self.root / name).mkdir()

    def write_file(self, folder: str, file: str, parts: Iterable[bytes | memoryview]) -> int:
        path = self.root / folder / file
        try:
            # Exclusive: a file of a checkpoint is written once.
            with path.open("xb") as out:
                for part in parts:
                    out.write(part)
                out.flush()
                # Without fsync, the rename that publishes the data could reach the disk before the data does.
                os.fsync(out.fileno())
                return out.tell()
        except OSError as error:
            # Errors of `write` and `fsync` carry no path.
            raise with_path(error, path) from error

    def file_size(self, folder: str, file: str) -> int | None:
        path = self.root / folder / file
        return path.stat().st_size if path.is_file() else None

    def map_file(self, folder: str, file: str) -> np.ndarray:
        path = self.root / folder / file
        if not path.stat().st_size:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r")

    def rename_folder(self, name: str, to: str) -> None:
        # `os.rename` would silently replace an empty folder.
        if (self.root / to).exists():
            raise FileExistsError(f"{self.root / to} exists")
        # First the entries of the folder, then its new name: no power failure may leave the name without the files.
        _sync_folder(self.root / name)
        try:
            os.rename(self.root / name, self.root / to)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            # Another process has just taken the name.
            raise FileExistsError(f"{self.root / to} exists") from error
        _sync_folder(self.root)

    def delete_folder(self, name: str) -> None:
        # Renamed first, so that no search finds a folder of which some files are already deleted.
        renamed = self.root / (name if ".deleted-" in name else f"{name}.deleted-{secrets.token_hex(4)}")
        if renamed.name != name:
            os.rename(self.root / name, renamed)
        if renamed.is_symlink():
            # Only the link is ours, not its target.
            renamed.unlink()
        else:
            shutil.rmtree(renamed, onerror=_unless_gone)

    def describe(self, folder: str, file: str = "") -> str:
        return str(self.root / folder / file) if file else str(self.root / folder)


def _unless_gone(function: Any, path: str, error: Any) -> None:
    # Another process may delete the same folder.
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def _sync_folder(path: Path) -> None:
    # A rename is durable only once its folder is on disk: fsync of a file does not cover its name (fsync(2)).
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_MARK = ".commit.json"


@section
class ObjectStorageConfig:
    """An object store, or any other file system that fsspec supports. Credentials come from the store's own library."""

    url: str = Field(description="URL of the checkpoints, one per run: s3://bucket/runs/one")

    def check(self) -> Iterator[Problem]:
        try:
            _filesystem(self.url)
        except (ImportError, ValueError, OSError) as error:
            hint = "pip install fsspec and the library of the store, such as s3fs or gcsfs"
            yield Problem(path="url", what=f"cannot be used: {error}", got=self.url, hint=hint)


class ObjectStorage(Storage):
    """A prefix of an object store, accessed through fsspec.

    Objects are never moved. Renaming a folder writes a commit mark: one small object, named after the new name, that
    contains the prefix of the folder's objects. Writing one object is atomic. Deleting a folder deletes its mark first.
    Files are read through a temporary local copy.

    Args:
        url: URL for fsspec, such as `s3://bucket/path`, `gs://bucket/path` or `memory://path`.
    """

    def __init__(self, url: str) -> None:
        self._fs, root = _filesystem(url)
        self._root, self._url = root.rstrip("/"), url.rstrip("/")

    def list_folders(self) -> list[str]:
        """Return the names of all marks, and the prefixes that no mark refers to."""
        entries = self._list()
        marks = self._marks(entries)
        found = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]
        # A prefix that a mark refers to is visible under the mark's name only.
        return [*marks, *(name for name in found if name not in set(marks.values()))]

    def create_folder(self, name: str) -> None:
        """Create a folder. Stores without folders show it when its first object is written."""
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
        # The mapping stays valid after the temporary file is unlinked.
        with tempfile.NamedTemporaryFile() as copy, self._failures(folder, file):
            self._fs.get_file(self._path(self._prefix(folder), file), copy.name)
            return np.memmap(copy.name, dtype=np.uint8, mode="r")

    def rename_folder(self, name: str, to: str) -> None:
        """Write the mark of the new name, then delete the mark of the old one, if any."""
        marks = self._marks(self._list())
        if to in marks:
            raise FileExistsError(f"{self.describe(to)} exists")
        with self._failures(to):
            # In this order a process killed in between leaves the folder with both names, not with none.
            self._fs.pipe_file(self._mark(to), json.dumps({"prefix": marks.get(name, name)}).encode())
            if name in marks:
                self._fs.rm_file(self._mark(name))

    def delete_folder(self, name: str) -> None:
        """Delete the mark, then the objects unless another mark refers to them."""
        marks = self._marks(self._list())
        prefix = marks.pop(name, None)
        with self._failures(name):
            if prefix is not None:
                self._fs.rm_file(self._mark(name))
            prefix = prefix or name
            # A kill during `rename_folder` can leave two marks of one prefix; the other one still needs the objects.
            if prefix not in marks.values() and self._fs.exists(self._path(prefix)):
                self._fs.rm(self._path(prefix), recursive=True)

    def describe(self, folder: str, file: str = "") -> str:
        return "/".join(part for part in (self._url, folder, file) if part)

    def _list(self) -> list[dict[str, Any]]:
        # Other processes write to the store too, so cached listings are outdated.
        self._fs.invalidate_cache()
        try:
            with self._failures(""):
                return list(self._fs.ls(self._root, detail=True))
        except FileNotFoundError:
            return []

    def _marks(self, entries: list[dict[str, Any]]) -> dict[str, str]:
        """Return the prefix of the objects of each folder that has a mark, from a listing of the root."""
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
        # A damaged mark is resolved to its own name. No index is there, so the checkpoint is reported as incomplete.
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
        """Convert exceptions of the store's library into `OSError`, with the name of the object."""
        try:
            yield
        # Raised as it is, since callers distinguish FileNotFoundError.
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.describe(folder, file)}: {type(error).__name__}: {error}") from error


def _filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, without its cache of listings, and the path in it."""
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=False)
    return filesystem, path
