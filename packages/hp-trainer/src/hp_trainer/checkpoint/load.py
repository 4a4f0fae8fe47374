"""Reading a checkpoint: any box of any tensor, whatever layout wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hp_trainer.checkpoint.dtypes import safetensors_name, storage_dtype
from hp_trainer.checkpoint.index import (
    INDEX_FILE,
    Chunk,
    Index,
    SavedTensor,
    model_fingerprint,
    shard_name,
)
from hp_trainer.checkpoint.names import step_in_name
from hp_trainer.checkpoint.shard_file import (
    CHECKSUM_BLOCK,
    Header,
    block_checksum,
    read_header,
    view_array,
)
from hp_trainer.checkpoint.storage import Storage
from hp_trainer.checkpoint.tensor_box import Box, cover_exactly
from hp_trainer.exceptions import CheckpointError

# Of some millions of boxes; a file that is larger is none, and would fill the memory before it is refused.
_LARGEST_INDEX = 2**30


class Checkpoint:
    """A complete checkpoint; files are mapped when first read, and each block is verified once.

    Args:
        storage: where it lives.
        folder: its name there.

    Raises:
        CheckpointError: there is no index, it is damaged, or it is of another step than its folder's name.
    """

    def __init__(self, storage: Storage, folder: str) -> None:
        self.storage = storage
        self.folder = folder
        where = storage.describe(folder, INDEX_FILE)
        size = storage.file_size(folder, INDEX_FILE)
        if size is None:
            raise CheckpointError(f"{where} is missing: this is no complete checkpoint")
        if size > _LARGEST_INDEX:
            raise CheckpointError(f"{where} is damaged: an index has at most {_LARGEST_INDEX} bytes, it has {size}")
        self.index = Index.parse(storage.map_file(folder, INDEX_FILE).tobytes(), where)
        if step_in_name(folder) not in (None, self.index.step):
            raise CheckpointError(
                f"{where} is of step {self.index.step}, its folder is named after step {step_in_name(folder)}; give "
                "the folder its own name back"
            )
        self._shards: dict[int, tuple[np.ndarray, Header]] = {}
        self._verified: set[tuple[int, str, int]] = set()

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.index.step

    @property
    def state(self) -> Mapping[str, Any]:
        """The trainer's own values."""
        return self.index.state

    def read(self, name: str, box: Box | None = None) -> np.ndarray:
        """Return the elements of a box (default: all) of a tensor, in its storage dtype (uint16 for bfloat16).

        Raises:
            CheckpointError: no such tensor, a box outside it, or damage; names the file and the tensor.
        """
        tensor = self._tensor(name)
        box = box if box is not None else Box.whole(tensor.shape)
        if not box.is_inside(tensor.shape):
            raise CheckpointError(f"{box} is outside tensor {name!r} of shape {tensor.shape}")
        result = np.empty(box.shape, dtype=storage_dtype(tensor.dtype))
        for chunk in tensor.chunks:
            part = chunk.box.intersect(box)
            if part is not None:
                inside = part.slices_in(chunk.box)
                result[part.slices_in(box)] = self._chunk(name, tensor, chunk, inside)[inside]
        return result

    def check_model(self, model: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """Refuse a checkpoint of another model.

        Args:
            model: name and options of the model that is wanted.
            defaults: of its options. A checkpoint that was written before an option came has its default.

        Raises:
            CheckpointError: naming every option that differs.
        """
        refuse_other_model(self.index.model, model, defaults or {}, self._describe())

    def check_averaged(self) -> None:
        """Refuse a checkpoint without moving averages of weights.

        Raises:
            CheckpointError: there is none.
        """
        if not any(name.startswith("ema.") for name in self.index.tensors):
            raise CheckpointError(
                f"{self._describe()} holds no moving average of the weights: its run was trained without "
                "training.ema.decay; leave --weights=ema out"
            )

    def check_tensors(self, expected: Mapping[str, Sequence[int]]) -> None:
        """Refuse a checkpoint whose tensors are not those expected (name -> global shape).

        Raises:
            CheckpointError: listing every tensor that is missing, not expected, or of another shape.
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
            raise CheckpointError(f"{self._describe()} does not fit: {'; '.join(problems)}")

    def problems(self, *, content: bool = True) -> Iterator[str]:
        """Yield every damage found; each names the file, and the tensor where one is hit.

        Args:
            content: read everything and compare checksums; False: look at sizes and headers only.
        """
        for name, tensor in self.index.tensors.items():
            reason = cover_exactly([chunk.box for chunk in tensor.chunks], tensor.shape)
            if reason is not None:
                yield f"{self.storage.describe(self.folder, INDEX_FILE)}: tensor {name!r}: {reason}"
        broken = set()
        for rank in range(len(self.index.shard_bytes)):
            try:
                self._shard(rank)
            except CheckpointError as error:
                broken.add(rank)
                hit = [name for name, tensor in self.index.tensors.items() if _uses(tensor, rank)]
                yield f"{error}{_tensors_hit(hit)}"
        for name, tensor in self.index.tensors.items():
            for chunk in tensor.chunks:
                if chunk.shard not in broken:
                    yield from self._chunk_problems(name, tensor, chunk, content=content)

    def verify(self, *, content: bool = True) -> None:
        """Refuse a damaged checkpoint.

        Raises:
            CheckpointError: listing all damage.
        """
        found = list(self.problems(content=content))
        if found:
            raise CheckpointError(f"{self._describe()} is damaged: {'; '.join(found)}")

    def _describe(self) -> str:
        return self.storage.describe(self.folder)

    def _tensor(self, name: str) -> SavedTensor:
        tensor = self.index.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self._describe()} holds no tensor {name!r}")
        return tensor

    def _chunk_problems(self, name: str, tensor: SavedTensor, chunk: Chunk, *, content: bool) -> Iterator[str]:
        try:
            if content:
                self._chunk(name, tensor, chunk, Box.whole(chunk.box.shape).slices_in(Box.whole(chunk.box.shape)))
            else:
                self._place(name, tensor, chunk)
        except CheckpointError as error:
            yield str(error)

    def _chunk(self, name: str, tensor: SavedTensor, chunk: Chunk, inside: tuple[slice, ...]) -> np.ndarray:
        """Return a chunk as an array without a copy, the blocks below the slices `inside` verified."""
        file, _ = self._shard(chunk.shard)
        begin, end = self._place(name, tensor, chunk)
        row = (end - begin) // chunk.box.shape[0] if chunk.box.shape else end - begin
        first, last = (inside[0].start * row, inside[0].stop * row) if inside else (0, row)
        for block in range(first // CHECKSUM_BLOCK, -(-last // CHECKSUM_BLOCK)):
            self._verify_block(name, chunk, file[begin:end], block)
        return view_array(file, begin, tensor.dtype, chunk.box.shape)

    def _verify_block(self, name: str, chunk: Chunk, data: np.ndarray, block: int) -> None:
        key = (chunk.shard, chunk.key, block)
        # Boxes that are read from one chunk share its blocks.
        if key in self._verified:
            return
        if block_checksum(data, block) != chunk.checksums[block]:
            where = self.storage.describe(self.folder, shard_name(chunk.shard))
            raise CheckpointError(f"{where}: tensor {name!r} (key {chunk.key!r}) is damaged: its checksum differs")
        self._verified.add(key)

    def _place(self, name: str, tensor: SavedTensor, chunk: Chunk) -> tuple[int, int]:
        """Return the first and end byte of a chunk in its file, where header and index must agree about it."""
        _, header = self._shard(chunk.shard)
        entry = header.entries.get(chunk.key)
        expected = (safetensors_name(tensor.dtype), chunk.box.shape)
        if entry is None or entry[:2] != expected:
            where = self.storage.describe(self.folder, shard_name(chunk.shard))
            got = "nothing" if entry is None else f"{entry[0]}{list(entry[1])}"
            raise CheckpointError(
                f"{where}: tensor {name!r} (key {chunk.key!r}): expected {expected[0]}{list(expected[1])}, got {got}"
            )
        size = chunk.box.numel * storage_dtype(tensor.dtype).itemsize
        if entry[3] - entry[2] != size:
            # What lies beyond the place would be read all the same, and its checksums never compared.
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
            raise CheckpointError(f"{where} is damaged: it has {size} bytes and should have {expected}")
        data = self.storage.map_file(self.folder, file)
        header = read_header(data, where, self._longest_header(rank))
        owner = (header.metadata.get("hp_save"), header.metadata.get("hp_rank"))
        if owner != (self.index.save_id, str(rank)):
            raise CheckpointError(
                f"{where} belongs elsewhere: it is from save {owner[0]}, rank {owner[1]}; expected save "
                f"{self.index.save_id}, rank {rank}"
            )
        return data, header

    def _longest_header(self, rank: int) -> int:
        """Return a bound on the bytes of a shard's header: reading a forged one of many megabytes takes minutes."""
        chunks = (chunk for tensor in self.index.tensors.values() for chunk in tensor.chunks if chunk.shard == rank)
        # A key takes at most six bytes for a character, an entry's dtype, sizes and offsets at most 20 for a number.
        return 65536 + sum(6 * len(chunk.key) + 200 + 20 * len(chunk.box.shape) for chunk in chunks)


def refuse_other_model(
    saved: Mapping[str, Any], model: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> None:
    """Refuse a checkpoint, called `where`, whose model is another; see `Checkpoint.check_model`."""
    saved = _filled(saved, defaults)
    if model_fingerprint(model) == model_fingerprint(saved):
        return
    names = sorted({*saved, *model})
    differ = [name for name in names if saved.get(name) != model.get(name)]
    told = ", ".join(f"{name} is {saved.get(name)!r} there and {model.get(name)!r} here" for name in differ)
    raise CheckpointError(f"{where} is a checkpoint of another model: {told}")


def _filled(saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved options, and the default of each that is missing."""
    filled = {**defaults, **saved}
    for name, value in saved.items():
        if isinstance(value, Mapping) and isinstance(defaults.get(name), Mapping):
            filled[name] = _filled(value, defaults[name])
    return filled


def _uses(tensor: SavedTensor, rank: int) -> bool:
    return any(chunk.shard == rank for chunk in tensor.chunks)


def _tensors_hit(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" (holds {', '.join(repr(name) for name in names[:3])}{more})"
