"""Folders of `torch.distributed.checkpoint`: written for its `load`, and read without trusting their pickles.

Such a folder is a file of tensors in torch's own format and `.metadata`, a pickle of a few dataclasses. Here only those
dataclasses are made of it, by exact name; anything else in it is refused before it is called. Tensors are read by
torch's own `weights_only` unpickler, which makes nothing but tensors.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PosixPath, PurePosixPath
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from hp_trainer.checkpoint import Box, SavedTensor
from hp_trainer.checkpoint.box import cover_exactly
from hp_trainer.exceptions import CheckpointError, ExportError

ReadBox = Callable[[str, Box], np.ndarray]

_CLASSES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    filesystem._StorageInfo,
)
# Everything that a metadata file may name. `_get_layout` looks a layout up by its name, and paths are what
# `checkpoint_id` may be; neither touches a file.
_ALLOWED = {
    **{(kind.__module__, kind.__qualname__): kind for kind in _CLASSES},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): dcp.metadata._MEM_FORMAT_ENCODING,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{("pathlib", kind.__name__): kind for kind in (PosixPath, PurePosixPath)},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


class DistributedCheckpoints:
    """The format `dcp`; see `hp_trainer.checkpoint.CheckpointFormat`."""

    def write(self, folder: Path, tensors: Mapping[str, SavedTensor], read: ReadBox) -> None:
        """Write a folder that `torch.distributed.checkpoint.load(state, checkpoint_id=folder)` reads.

        One saved piece of a tensor is in memory at a time.

        Raises:
            ExportError: torch could not write it.
        """
        try:
            # No process group: one process writes all of it.
            with _alone():
                dcp.save({}, checkpoint_id=str(folder), planner=_Pieces(tensors, read), no_dist=True)
        except dcp.api.CheckpointException as error:
            raise ExportError(f"{folder} cannot be written: {_reasons(error)}") from error

    def open(self, folder: Path) -> DistributedCheckpoint:
        """Open a folder; `DistributedCheckpoint` says what is raised."""
        return DistributedCheckpoint(folder)


class DistributedCheckpoint:
    """A folder that `torch.distributed.checkpoint.save` has written on any number of ranks.

    Raises:
        CheckpointError: there is no such folder, or its metadata are damaged or name something that is no metadata.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = _Reader(folder)
        self._saved = self._reader.metadata.state_dict_metadata

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of each tensor by name; objects of other kinds, pickles, are left out."""
        return {
            name: (str(saved.properties.dtype).removeprefix("torch."), tuple(saved.size))
            for name, saved in self._saved.items()
            if isinstance(saved, TensorStorageMetadata)
        }

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor in its storage dtype (uint16 for bfloat16).

        Raises:
            CheckpointError: it is damaged.
        """
        saved = self._saved[name]
        try:
            whole = torch.empty(saved.size, dtype=saved.properties.dtype)
            with _alone():
                dcp.load({name: whole}, storage_reader=self._reader, no_dist=True)
        except (Exception, dcp.api.CheckpointException) as error:
            # Whatever a damaged file makes torch raise; its own error is no Exception.
            raise CheckpointError(f"{self._folder}: tensor {name!r} cannot be read: {_reasons(error)}") from error
        return (whole.view(torch.uint16) if whole.dtype == torch.bfloat16 else whole).numpy()


class _Pieces(SavePlanner):
    """Plans the writing of saved tensors, piece by piece as they are saved already."""

    def __init__(self, tensors: Mapping[str, SavedTensor], read: ReadBox) -> None:
        self._tensors, self._read = tensors, read

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Take nothing over: the tensors are not in memory."""

    def create_local_plan(self) -> SavePlan:
        """Return one item for each piece."""
        return SavePlan([item for name, saved in self._tensors.items() for item in _items(name, saved)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of the only process, and the metadata."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read the piece that is to be written next."""
        name, data = write_item.index.fqn, write_item.tensor_data
        assert data is not None
        values = self._read(name, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
        tensor = torch.from_numpy(np.array(values))
        return tensor.view(data.properties.dtype) if self._tensors[name].dtype == "bfloat16" else tensor


class _Reader(dcp.FileSystemReader):
    """torch's reader of a folder, which unpickles metadata alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metadata = _read_metadata(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, read once."""
        return self.metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the dataclasses of metadata, and refuses everything else by name."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no metadata") from None

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to objects outside of itself")


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Silence torch's guess that a process without a group is meant to be alone: it is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _read_metadata(folder: Path) -> Metadata:
    file = folder / ".metadata"
    if not file.is_file():
        raise CheckpointError(f"{folder} is no folder of torch.distributed.checkpoint: it has no file .metadata")
    try:
        with file.open("rb") as data:
            found = _MetadataUnpickler(data).load()
        _check(found)
    except Exception as error:
        # A damaged pickle raises whatever the bytes happen to mean.
        raise CheckpointError(f"{file} is damaged or no metadata: {error}") from error
    if found.storage_meta is None:
        found.storage_meta = StorageMeta()
    return found


def _check(found: Any) -> None:
    """Refuse what is no metadata, pieces that leave memory unwritten, and files outside of the folder."""
    if not isinstance(found, Metadata) or not all(isinstance(name, str) for name in found.state_dict_metadata):
        raise ValueError(f"expected Metadata, got {type(found).__name__}")
    for name, saved in found.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            _check_pieces(name, saved)
    for stored in (found.storage_data or {}).values():
        _check_file(stored)


def _check_pieces(name: str, saved: TensorStorageMetadata) -> None:
    """Refuse a tensor whose pieces leave some of it unwritten: torch would read what was in memory."""
    if not isinstance(saved.properties, TensorProperties) or not isinstance(saved.properties.dtype, torch.dtype):
        raise ValueError(f"tensor {name!r} has no dtype")
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in saved.chunks]
    reason = cover_exactly(boxes, tuple(saved.size))
    if reason is not None:
        raise ValueError(f"tensor {name!r}: {reason}")


def _check_file(stored: Any) -> None:
    """Refuse a file that is not in the folder itself."""
    name = stored.relative_path
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"it names the file {name!r}, which is not in the folder")


def _items(name: str, saved: SavedTensor) -> list[WriteItem]:
    properties, size = TensorProperties(dtype=getattr(torch, saved.dtype)), torch.Size(saved.shape)
    chunks = [ChunkStorageMetadata(torch.Size(chunk.box.offset), torch.Size(chunk.box.shape)) for chunk in saved.chunks]
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets, index),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, size),
        )
        for index, chunk in enumerate(chunks)
    ]


def _reasons(error: BaseException) -> str:
    """Return the errors of the ranks in a `CheckpointException`, or the error itself, on one line."""
    failures = getattr(error, "failures", None)
    found = [failure[0] for failure in failures.values()] if failures else [error]
    return "; ".join(f"{type(one).__name__}: {one}".splitlines()[0] for one in found)
