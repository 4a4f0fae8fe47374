"""Read a checkpoint: any box of any tensor under any layout, from shard files that are verified once before use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hp_trainer.checkpoint.index import INDEX_FILE, Index, SavedTensor, model_fingerprint, step_in_name
from hp_trainer.checkpoint.shard_file import Box, storage_dtype
from hp_trainer.checkpoint.storage import Storage
from hp_trainer.checkpoint.verification import VerifiedShards
from hp_trainer.exceptions import CheckpointError, UnfitCheckpointError
from hp_trainer.registries import is_python_name

# Enough for millions of boxes. A larger file is not an index, and parsing it would exhaust the memory first.
_LARGEST_INDEX = 2**30


class Checkpoint:
    """A complete checkpoint, opened for reading.

    Args:
        storage: storage that contains the checkpoint.
        folder: name of the checkpoint's folder.

    Raises:
        CheckpointError: the index is missing or damaged, or its step differs from the one in the folder's name.
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self.storage = storage
        self.folder = folder
        where = storage.describe(folder, INDEX_FILE)
        size = storage.file_size(folder, INDEX_FILE)
        if size is None:
            raise CheckpointError(f"{where} is missing: this is not a complete checkpoint")
        if size > _LARGEST_INDEX:
            raise CheckpointError(f"{where} is damaged: it has {size} bytes, an index has at most {_LARGEST_INDEX}")
        self.index = Index.parse(storage.map_file(folder, INDEX_FILE).tobytes(), where)
        # A folder set aside has another name, and no step in it.
        if step_in_name(folder) not in (None, self.index.step):
            raise CheckpointError(
                f"{where} is of step {self.index.step}, but its folder is named after step {step_in_name(folder)}; "
                "rename the folder to its original name"
            )
        self._shards = VerifiedShards(storage, folder, self.index)

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return self.index.step

    @property
    def state(self) -> Mapping[str, Any]:
        """State of the trainer, as JSON values."""
        return self.index.state

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """Return the elements of a box of a tensor (by default, all) in its storage dtype (uint16 for bfloat16).

        Raises:
            CheckpointError: the tensor does not exist, the box is outside it, or a file is damaged.
        """
        tensor = self.index.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self._describe()} has no tensor {name!r}")
        box = box if box is not None else Box.full(tensor.shape)
        if not box.is_inside(tensor.shape):
            raise CheckpointError(f"{box} is outside tensor {name!r} of shape {tensor.shape}")
        # Uninitialized: chunks cover a tensor exactly once, so every element is written below.
        result = np.empty(box.shape, dtype=storage_dtype(tensor.dtype))
        for chunk in tensor.chunks:
            overlap = chunk.box.intersect(box)
            if overlap is not None:
                inside = overlap.slices_in(chunk.box)
                result[overlap.slices_in(box)] = self._shards.chunk(name, chunk, inside)[inside]
        return result

    def check_model(self, model: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """Check that the checkpoint is of the given model.

        Args:
            model: name and options of the expected model.
            defaults: default values of its options. They are used for options that the checkpoint does not contain
                because they were added later.

        Raises:
            CheckpointError: options differ; the message lists them all.
        """
        refuse_other_model(self.index.model, model, defaults or {}, self._describe())

    def check_averaged(self) -> None:
        """Check that the checkpoint contains moving averages of the weights.

        Raises:
            CheckpointError: it contains none.
        """
        if not any(name.startswith("ema.") for name in self.index.tensors):
            raise CheckpointError(
                f"{self._describe()} has no moving averages of the weights: its run was trained without "
                "training.ema.decay; omit --weights=ema"
            )

    def check_tensors(self, expected: Mapping[str, Sequence[int]]) -> None:
        """Check names and global shapes of the saved tensors against `expected`.

        Raises:
            CheckpointError: tensors are missing, unexpected, or of another shape; the message lists them all.
        """
        saved = self.index.tensors
        problems = [f"tensor {name!r} is missing" for name in expected if name not in saved]
        problems += [f"tensor {name!r} is not expected" for name in saved if name not in expected]
        problems += [
            f"tensor {name!r} has shape {saved[name].shape}, expected {tuple(shape)}"
            for name, shape in expected.items()
            if name in saved and saved[name].shape != tuple(shape)
        ]
        if problems:
            raise UnfitCheckpointError(f"{self._describe()} does not fit: {'; '.join(problems)}")

    def problems(self, *, content: bool = True) -> Iterator[str]:
        """Yield a message for each damage, naming the file and the affected tensors; see `VerifiedShards.problems`."""
        return self._shards.problems(content=content)

    def verify(self, *, content: bool = True) -> None:
        """Check the checkpoint for damage.

        Raises:
            CheckpointError: the checkpoint is damaged; the message lists all damage.
        """
        found = list(self.problems(content=content))
        if found:
            raise CheckpointError(f"{self._describe()} is damaged: {'; '.join(found)}")

    def _describe(self) -> str:
        return self.storage.describe(self.folder)


def refuse_other_model(
    saved: Mapping[str, Any], model: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> None:
    """Raise `CheckpointError` where two models differ, see `Checkpoint.check_model`. `where` names the checkpoint."""
    saved = _with_defaults(saved, defaults)
    if is_python_name(str(saved.get("name"))):
        # The file may have moved, and its function may have been renamed. Loading compares the tensors.
        saved["name"] = model.get("name")
    # Compared as JSON: the saved options have lists where the given ones may have tuples.
    if model_fingerprint(model) == model_fingerprint(saved):
        return
    names = sorted({*saved, *model})
    differ = [name for name in names if saved.get(name) != model.get(name)]
    options = ", ".join(f"{name} is {saved.get(name)!r} there and {model.get(name)!r} here" for name in differ)
    raise UnfitCheckpointError(f"{where} is a checkpoint of another model: {options}")


def _with_defaults(saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved options, with defaults for those that are missing, at every level."""
    filled = {**defaults, **saved}
    for name, value in saved.items():
        if isinstance(value, Mapping) and isinstance(defaults.get(name), Mapping):
            filled[name] = _with_defaults(value, defaults[name])
    return filled


class ForeignCheckpoint(Protocol):
    """A checkpoint of another format, opened for reading."""

    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Return the dtype and the global shape of each tensor, by name."""

    def read(self, name: str) -> np.ndarray:
        """Return a full tensor in its storage dtype (uint16 for bfloat16).

        Raises:
            CheckpointError: the checkpoint is damaged.
        """


class CheckpointFormat(Protocol):
    """A checkpoint format of another tool, registered through the hook `hp_checkpoint_formats`."""

    def write(self, folder: Path, tensors: Mapping[str, SavedTensor], read: Callable[[str, Box], np.ndarray]) -> None:
        """Write a checkpoint into a folder that is new or empty.

        Args:
            tensors: the tensors to write, with the boxes in which they are saved.
            read: function that returns the elements of a box of a tensor in its storage dtype.

        Raises:
            ExportError: the checkpoint cannot be written.
        """

    def open(self, folder: Path) -> ForeignCheckpoint:
        """Open the checkpoint in a folder.

        Raises:
            CheckpointError: the folder is not of this format, or damaged.
        """
