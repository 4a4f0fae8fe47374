"""An object store in a folder: an object is complete or absent, and nothing can be renamed."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

PROTOCOL = "chaos"


class _Upload(io.BytesIO):
    """An object that appears when it is closed, as in S3."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            part = f"{self._path}.upload"
            Path(part).write_bytes(self.getvalue())
            os.replace(part, self._path)
        super().close()


class FolderStore(LocalFileSystem):
    """A store for `chaos://` and the path of a folder."""

    protocol = PROTOCOL

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return LocalFileSystem._strip_protocol(str(path).removeprefix(f"{PROTOCOL}://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _Upload(path) if "w" in mode else super()._open(path, mode, **options)

    def mv(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError("an object store renames nothing")


def register() -> None:
    """Make the store known to fsspec in this process and those forked from it."""
    fsspec.register_implementation(PROTOCOL, FolderStore, clobber=True)
