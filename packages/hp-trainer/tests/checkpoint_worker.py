"""One rank of a save, started as a process and killed on the way by its own storage.

Usage: checkpoint_worker.py ROOT MEETING RANK SIZE STEP [RANK_TO_KILL PHASE]
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from hp_trainer.checkpoint import Box, LocalStorage, TensorPart, save_checkpoint

ROWS, COLUMNS = 10, 3


def weight_of(step: int) -> np.ndarray:
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + 1000 * step


class FileGroup:
    """Ranks that meet in a folder."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._folder, self._round = folder, 0

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        self._round += 1
        mine = self._folder / f"{self._round}-{self.rank}"
        temporary = mine.with_suffix(".incomplete")
        temporary.write_bytes(data)
        temporary.rename(mine)
        paths = [self._folder / f"{self._round}-{rank}" for rank in range(self.size)]
        while not all(path.exists() for path in paths):
            time.sleep(0.002)
        return [path.read_bytes() for path in paths]


class KillingStorage(LocalStorage):
    """Kills this process with SIGKILL when it comes to `phase`."""

    def __init__(self, root: Path, phase: str) -> None:
        super().__init__(root)
        self._phase = phase

    def _at(self, phase: str) -> None:
        if phase == self._phase:
            os.kill(os.getpid(), signal.SIGKILL)

    def create_folder(self, name: str) -> None:
        self._at("before the folder")
        super().create_folder(name)
        self._at("after the folder")

    def write_file(self, folder: str, file: str, parts: Iterable[bytes | memoryview]) -> int:
        what = "index" if file == "index.json" else "shard"
        self._at(f"before the {what}")
        size = super().write_file(folder, file, self._half(what, parts))
        self._at(f"after the {what}")
        return size

    def _half(self, what: str, parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for part in parts:
            yield part[: len(part) // 2]
            self._at(f"within the {what}")
            yield part[len(part) // 2 :]

    def rename_folder(self, name: str, to: str) -> None:
        self._at("before the rename")
        super().rename_folder(name, to)
        self._at("after the rename")

    def delete_folder(self, name: str) -> None:
        self._at("before a deletion")
        if self._phase == "within a deletion":
            doomed = self.root / f"{name}.deleted-half"
            (self.root / name).rename(doomed)
            next(doomed.iterdir()).unlink()
            self._at(self._phase)
        super().delete_folder(name)


def main(root: str, meeting: str, rank: str, size: str, step: str, kill: str = "-1", phase: str = "") -> None:
    storage = KillingStorage(Path(root), phase if rank == kill else "")
    weight = weight_of(int(step))
    begin, end = (ROWS * r // int(size) for r in (int(rank), int(rank) + 1))
    box = Box((begin, 0), (end - begin, COLUMNS))
    part = TensorPart("weight", "float32", weight.shape, [(box, weight[begin:end])])
    group = FileGroup(Path(meeting), int(rank), int(size))
    save_checkpoint(storage, [part], step=int(step), model={"name": "m"}, state={}, group=group, keep=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
