"""Storages: the places of checkpoint folders."""

from __future__ import annotations

import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from hp_trainer.machine_errors import with_path


class Storage(ABC):
    """Folders of files, one level deep; names hold no separators.

    What makes a checkpoint atomic is asked of `write_file` (durable when it returns) and of `rename_folder`
    (all or nothing, and durable when it returns). Every method raises `OSError` when the place fails.
    """

    @abstractmethod
    def list_folders(self) -> list[str]:
        """List the names of all folders, in any order."""

    @abstractmethod
    def create_folder(self, name: str) -> None:
        """Make a folder that is not there yet."""

    @abstractmethod
    def write_file(self, folder: str, file: str, parts: Iterable[bytes | memoryview]) -> int:
        """Write a new file from its parts, in order; returns its size in bytes."""

    @abstractmethod
    def file_size(self, folder: str, file: str) -> int | None:
        """Return the size of a file in bytes, or None where there is no such file."""

    @abstractmethod
    def map_file(self, folder: str, file: str) -> np.ndarray:
        """Return the bytes of a file, read as they are used: read-only uint8 of shape `[size]`."""

    @abstractmethod
    def rename_folder(self, name: str, to: str) -> None:
        """Give a folder a name that is free."""

    @abstractmethod
    def delete_folder(self, name: str) -> None:
        """Remove a folder; killed half-way, it no longer has its name."""

    @abstractmethod
    def describe(self, folder: str, file: str = "") -> str:
        """Return how messages name a folder or a file."""


class LocalStorage(Storage):
    """A folder of a POSIX file system that all ranks share.

    Args:
        root: made when the first checkpoint is.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def list_folders(self) -> list[str]:
        if not self.root.is_dir():
            return []
        # A link counts, also one that leads nowhere or to itself, which `is_dir` refuses: its name is taken.
        return [entry.name for entry in os.scandir(self.root) if entry.is_symlink() or entry.is_dir()]

    def create_folder(self, name: str) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / name).mkdir()

    def write_file(self, folder: str, file: str, parts: Iterable[bytes | memoryview]) -> int:
        path = self.root / folder / file
        try:
            with path.open("xb") as out:
                for part in parts:
                    out.write(part)
                out.flush()
                # Durable before the index names it: a rename may reach the disk ahead of the data that it publishes.
                os.fsync(out.fileno())
                return out.tell()
        except OSError as error:
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
        # A rename onto an empty folder would succeed, so what is there is refused first.
        if (self.root / to).exists():
            raise FileExistsError(f"{self.root / to} exists")
        # The entries of the folder, then its new name; otherwise a power cut could leave the name without the files.
        _sync_folder(self.root / name)
        os.rename(self.root / name, self.root / to)
        _sync_folder(self.root)

    def delete_folder(self, name: str) -> None:
        doomed = self.root / (name if ".deleted-" in name else f"{name}.deleted-{secrets.token_hex(4)}")
        if doomed.name != name:
            os.rename(self.root / name, doomed)
        if doomed.is_symlink():
            # What a link leads to belongs to someone else.
            doomed.unlink()
        else:
            shutil.rmtree(doomed)

    def describe(self, folder: str, file: str = "") -> str:
        return str(self.root / folder / file) if file else str(self.root / folder)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
