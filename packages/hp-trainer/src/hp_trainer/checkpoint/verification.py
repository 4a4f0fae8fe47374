"""Verification of a checkpoint: sizes, headers and checksums of its shard files, before any tensor is used."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hp_trainer.checkpoint.index import INDEX_FILE, Chunk, Index, shard_name
from hp_trainer.checkpoint.shard_file import (
    CHECKSUM_BLOCK,
    Header,
    block_checksum,
    cover_exactly,
    read_header,
    safetensors_name,
    storage_dtype,
    view_array,
)
from hp_trainer.checkpoint.storage import Storage
from hp_trainer.exceptions import CheckpointError


class VerifiedShards:
    """The shard files of a checkpoint, memory-mapped."""

    def __init__(self, storage: Storage, folder: str, index: Index) -> None:
        self.storage, self.folder, self.index = storage, folder, index
        self._shards: dict[int, tuple[np.ndarray, Header]] = {}
        # (shard, key, block) of each block whose checksum was compared.
        self._verified: set[tuple[int, str, int]] = set()

    def problems(self, *, content: bool = True) -> Iterator[str]:
        """Yield a message per damage, naming file and tensors; without `content` only sizes and headers are checked."""
        for name, tensor in self.index.tensors.items():
            # From the index alone, so that gaps are reported for missing files too.
            reason = cover_exactly([chunk.box for chunk in tensor.chunks], tensor.shape)
            if reason is not None:
                yield f"{self.storage.describe(self.folder, INDEX_FILE)}: tensor {name!r}: {reason}"
        broken = set()
        for rank in range(len(self.index.shard_bytes)):
            try:
                self._shard(rank)
            except CheckpointError as error:
                broken.add(rank)
                tensors = self.index.tensors.items()
                affected = [
                    repr(name) for name, tensor in tensors if any(chunk.shard == rank for chunk in tensor.chunks)
                ]
                more = f" and {len(affected) - 3} more" if len(affected) > 3 else ""
                yield f"{error} (contains {', '.join(affected[:3])}{more})" if affected else str(error)
        for name, tensor in self.index.tensors.items():
            for chunk in tensor.chunks:
                # A missing or truncated file is reported once, not again for every chunk.
                if chunk.shard in broken:
                    continue
                try:
                    if content:
                        self.chunk(name, chunk, tuple(slice(0, size) for size in chunk.box.shape))
                    else:
                        self._byte_range(name, chunk)
                except CheckpointError as error:
                    yield str(error)

    def chunk(self, name: str, chunk: Chunk, inside: tuple[slice, ...]) -> np.ndarray:
        """Return a chunk of a tensor without copying. Verifies the blocks that contain the slices `inside`."""
        file, _ = self._shard(chunk.shard)
        begin, end = self._byte_range(name, chunk)
        # Only the first dimension narrows the range: rows are contiguous in the file.
        row = (end - begin) // max(1, chunk.box.shape[0]) if chunk.box.shape else end - begin
        first, last = (inside[0].start * row, inside[0].stop * row) if inside else (0, row)
        for block in range(first // CHECKSUM_BLOCK, -(-last // CHECKSUM_BLOCK)):
            self._verify_block(name, chunk, file[begin:end], block)
        return view_array(file, begin, self.index.tensors[name].dtype, chunk.box.shape)

    def _verify_block(self, name: str, chunk: Chunk, data: np.ndarray, block: int) -> None:
        key = (chunk.shard, chunk.key, block)
        # Reads of several boxes from one chunk may share blocks.
        if key in self._verified:
            return
        if block_checksum(data, block) != chunk.crc32[block]:
            where = self.storage.describe(self.folder, shard_name(chunk.shard))
            raise CheckpointError(f"{where}: tensor {name!r} (key {chunk.key!r}) is damaged: its checksum differs")
        self._verified.add(key)

    def _byte_range(self, name: str, chunk: Chunk) -> tuple[int, int]:
        """Return the start and end byte of a chunk in its file, after comparing the file's header with the index."""
        _, header = self._shard(chunk.shard)
        dtype = self.index.tensors[name].dtype
        entry = header.entries.get(chunk.key)
        expected = (safetensors_name(dtype), chunk.box.shape)
        if entry is None or entry[:2] != expected:
            where = self.storage.describe(self.folder, shard_name(chunk.shard))
            got = "no such key" if entry is None else f"{entry[0]}{list(entry[1])}"
            raise CheckpointError(
                f"{where}: tensor {name!r} (key {chunk.key!r}): expected {expected[0]}{list(expected[1])}, got {got}"
            )
        size = chunk.box.numel * storage_dtype(dtype).itemsize
        if entry[3] - entry[2] != size:
            # Otherwise bytes outside this range would be read too, and never compared with a checksum.
            where = self.storage.describe(self.folder, shard_name(chunk.shard))
            raise CheckpointError(
                f"{where}: tensor {name!r} (key {chunk.key!r}): expected {size} bytes, got {entry[3] - entry[2]}"
            )
        return entry[2], entry[3]

    def _shard(self, rank: int) -> tuple[np.ndarray, Header]:
        if rank not in self._shards:
            self._shards[rank] = self._open_shard(rank)
        return self._shards[rank]

    def _open_shard(self, rank: int) -> tuple[np.ndarray, Header]:
        file, where = shard_name(rank), self.storage.describe(self.folder, shard_name(rank))
        size, expected = self.storage.file_size(self.folder, file), self.index.shard_bytes[rank]
        if size is None:
            raise CheckpointError(f"{where} is missing")
        if size != expected:
            raise CheckpointError(f"{where} is damaged: expected {expected} bytes, got {size}")
        data = self.storage.map_file(self.folder, file)
        # The header is bounded before it is read, because parsing a forged one of many MiB takes minutes. An entry has
        # at most six bytes per character of its key (escapes), and 20 per number.
        chunks = (chunk for tensor in self.index.tensors.values() for chunk in tensor.chunks if chunk.shard == rank)
        longest = 65536 + sum(6 * len(chunk.key) + 200 + 20 * len(chunk.box.shape) for chunk in chunks)
        header = read_header(data, where, longest)
        # A shard of another save may have the same size, shapes and keys.
        owner = (header.metadata.get("hp_save"), header.metadata.get("hp_rank"))
        if owner != (self.index.save_id, str(rank)):
            raise CheckpointError(
                f"{where} belongs to another checkpoint: expected save {self.index.save_id}, rank {rank}, got save "
                f"{owner[0]}, rank {owner[1]}"
            )
        return data, header
