"""Checkpoints of others: what a platform provides to write and to read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from hp_trainer.checkpoint.index import SavedTensor
from hp_trainer.checkpoint.tensor_box import Box


class ForeignCheckpoint(Protocol):
    """An opened checkpoint of another format."""

    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of each tensor by name."""

    def read(self, name: str) -> np.ndarray:
        """Return a whole tensor in its storage dtype (uint16 for bfloat16).

        Raises:
            CheckpointError: it is damaged.
        """


class CheckpointFormat(Protocol):
    """A format, registered through the hook `hp_checkpoint_formats`."""

    def write(self, folder: Path, tensors: Mapping[str, SavedTensor], read: Callable[[str, Box], np.ndarray]) -> None:
        """Write a folder, which is new or empty.

        Args:
            tensors: what there is, and the pieces in which it is saved.
            read: returns the elements of a box of a tensor in its storage dtype.

        Raises:
            ExportError: it cannot be written.
        """

    def open(self, folder: Path) -> ForeignCheckpoint:
        """Open a folder.

        Raises:
            CheckpointError: it is none of this format, or damaged.
        """
