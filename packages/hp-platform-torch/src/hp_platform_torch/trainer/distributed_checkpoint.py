"""Folders of `torch.distributed.checkpoint`: written for its `load`, and read without trusting their pickles.

Such a folder is files of tensors in torch's own format and `.metadata`, a pickle of a few dataclasses, which is read as
data (`checkpoint_metadata.py`). Tensors are read by torch's own `weights_only` unpickler, which makes nothing but
tensors.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from hp_platform_torch.trainer.checkpoint_metadata import parse_metadata
from hp_trainer.checkpoint import Box, SavedTensor
from hp_trainer.exceptions import CheckpointError, ExportError

ReadBox = Callable[[str, Box], np.ndarray]


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
    """torch's reader of a folder, with metadata that were checked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.metadata = _read_metadata(folder)
        _check_files(folder, self.metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, read once."""
        return self.metadata


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
        return parse_metadata(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged or no metadata: {error}") from error


def _check_files(folder: Path, metadata: Metadata) -> None:
    """Refuse pieces that the files are too short for, before memory is reserved for the tensors.

    Raises:
        CheckpointError: naming the tensor and the file.
    """
    lengths: dict[str, int] = {}
    for name, saved in metadata.state_dict_metadata.items():
        for chunk in saved.chunks if isinstance(saved, TensorStorageMetadata) else ():
            stored = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            needed = math.prod(chunk.sizes) * saved.properties.dtype.itemsize
            if stored is None or stored.length < needed:
                raise CheckpointError(f"{folder}: tensor {name!r} cannot be read: no file holds all of its bytes")
            file = folder / stored.relative_path
            if stored.relative_path not in lengths:
                lengths[stored.relative_path] = file.stat().st_size if file.is_file() else -1
            length = lengths[stored.relative_path]
            if length < stored.offset + stored.length:
                found = "is missing" if length < 0 else f"has {length} bytes, expected {stored.offset + stored.length}"
                raise CheckpointError(f"{folder}: tensor {name!r} cannot be read: {file.name} {found}")


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
