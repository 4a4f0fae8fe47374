"""Verification of large files by blocks: in parallel, with progress, and of a random part where that is asked for."""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hp_trainer.data.progress import PreparingProgress
from hp_trainer.exceptions import DataError

BLOCK_BYTES = 32 << 20
_READ_BYTES = 1 << 20
_MOST_THREADS = 8  # a disk or a network file system is busy with so many


@dataclass(frozen=True)
class Block:
    """A stretch of a file, and the digest that it should have."""

    path: Path
    start: int
    bytes: int
    sha256: str

    def is_sound(self) -> bool:
        """Return whether the block has its digest; hashing leaves other threads the interpreter."""
        digest, left = hashlib.sha256(), self.bytes
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.start)
            while left and (data := file.read(min(left, _READ_BYTES))):
                digest.update(data)
                left -= len(data)
        return digest.hexdigest() == self.sha256


class BlockDigests:
    """Digests of the blocks of a file that is being written."""

    def __init__(self) -> None:
        self._done: list[str] = []
        self._block, self._filled = hashlib.sha256(), 0

    def update(self, data: bytes) -> None:
        """Take up bytes that follow those before."""
        view = memoryview(data)
        while view:
            part = view[: BLOCK_BYTES - self._filled]
            self._block.update(part)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._done.append(self._block.hexdigest())
                self._block, self._filled = hashlib.sha256(), 0

    def finish(self) -> tuple[str, ...]:
        """Return the digests in order; the last block may be shorter."""
        return (*self._done, self._block.hexdigest()) if self._filled else tuple(self._done)


def blocks_of(path: Path, size: int, digests: Sequence[str]) -> list[Block]:
    """Return the blocks of a file of `size` bytes."""
    starts = range(0, size, BLOCK_BYTES)
    return [
        Block(path, start, min(BLOCK_BYTES, size - start), sha256)
        for start, sha256 in zip(starts, digests, strict=True)
    ]


def verify_blocks(title: str, blocks: Sequence[Block], part: float = 1.0) -> None:
    """Compare blocks with their digests.

    Args:
        title: what the progress is told of.
        part: of the blocks, from 0 to 1; others are drawn each time. Below 1 at least one block is read.

    Raises:
        DataError: a block has changed; names its file and place.
    """
    chosen = list(blocks) if part >= 1 else random.sample(blocks, math.ceil(part * len(blocks)))
    num_threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)), len(chosen)))
    with (
        PreparingProgress(title, sum(block.bytes for block in chosen), action="verifying") as progress,
        ThreadPoolExecutor(num_threads, "verify") as pool,
    ):
        for block, sound in zip(chosen, pool.map(Block.is_sound, chosen), strict=True):
            if not sound:
                pool.shutdown(cancel_futures=True)
                raise DataError(
                    f"{block.path} is damaged between bytes {block.start} and {block.start + block.bytes}: its tokens "
                    "are not those that the run was trained on; bring the file back, or begin a new run"
                )
            progress.advance(block.bytes)
