"""Writing of a Hugging Face directory: tensor by tensor, each file by one of the ranks that work together."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hp_trainer._exchange import Group, all_ranks, coordinator
from hp_trainer.checkpoint import Box
from hp_trainer.checkpoint.shard_file import bytes_of, header_parts, storage_dtype
from hp_trainer.exceptions import ExportError
from hp_trainer.models.hugging_face.pieces import Array, Piece
from hp_trainer.models.hugging_face.tensor_map import TensorMap
from hp_trainer.models.hugging_face.weights import INDEX_FILE, WEIGHTS_FILE, narrow

ReadBox = Callable[[str, Box], Array]
# transformers cuts its own files here.
LARGEST_FILE = 5 * 10**9


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the directory, and the boxes of the decoder's tensors that it is made of."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[tuple[str, Piece], ...]

    def read(self, read: ReadBox) -> Array:
        """Return the whole tensor as float32; the only one of the model that is in memory."""
        result = np.empty(self.shape, np.float32)
        for name, piece in self.parts:
            piece.place(read(name, piece.box), result)
        return result


@dataclass(frozen=True)
class OutputFile:
    """One file of weights."""

    name: str
    tensors: tuple[OutputTensor, ...]


def output_tensors(tensors: TensorMap) -> list[OutputTensor]:
    """Return the tensors of a directory, in the order of the decoder's."""
    parts: dict[str, list[tuple[str, Piece]]] = {}
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            parts.setdefault(piece.source, []).append((name, piece))
    return [OutputTensor(source, found[0][1].shape, tuple(found)) for source, found in parts.items()]


def output_files(tensors: Sequence[OutputTensor], dtype: str, largest: int = LARGEST_FILE) -> list[OutputFile]:
    """Share tensors out to files of at most `largest` bytes each, or of one tensor that is larger."""
    shares: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _num_bytes(tensor, dtype)
        if shares[-1] and filled + size > largest:
            shares.append([])
            filled = 0
        shares[-1].append(tensor)
        filled += size
    count = len(shares)
    names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)] if count > 1 else [WEIGHTS_FILE]
    return [OutputFile(name, tuple(share)) for name, share in zip(names, shares, strict=True)]


def export_weights(
    folder: Path,
    tensors: TensorMap,
    read: ReadBox,
    config: dict[str, Any],
    group: Group,
    *,
    dtype: str,
    largest: int = LARGEST_FILE,
) -> list[str]:
    """Write weights and `config.json` into a new directory; each rank of `group` writes every so many-th file.

    Args:
        folder: new, or empty; all ranks share it. `config.json` comes last, so a directory that has one is whole.
        tensors: where the decoder's tensors lie.
        read: (name of a parameter or buffer, box) -> float32 values.
        config: the content of `config.json`.
        dtype: float32, bfloat16 or float16.
        largest: bytes of a file; one larger tensor has a file of its own.

    Returns:
        The names of the files of weights.

    Raises:
        ExportError: on every rank, where one could not write.
    """
    files = output_files(output_tensors(tensors), dtype, largest)
    coordinator(group, "making the directory", lambda: make_directory(folder), ExportError)
    mine = files[group.rank :: group.size]
    all_ranks(group, "writing weights", lambda: _write_all(folder, mine, read, dtype), ExportError)
    coordinator(group, "writing the index", lambda: _finish(folder, files, config, dtype), ExportError)
    return [file.name for file in files]


def make_directory(folder: Path) -> None:
    """Make a directory to export to.

    Raises:
        ExportError: it is there, and not empty, or it cannot be made.
    """
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ExportError(f"{folder} is not empty; choose another --to, or delete it")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{folder} cannot be made: {error.strerror}; choose another --to") from error


def _write_all(folder: Path, files: Sequence[OutputFile], read: ReadBox, dtype: str) -> None:
    for file in files:
        _write(folder, file, read, dtype)


def _write(folder: Path, file: OutputFile, read: ReadBox, dtype: str) -> None:
    """Write one file under another name first, so that one which has its name is whole."""
    unfinished = folder / f"{file.name}.incomplete"
    with unfinished.open("wb") as out:
        for part in _parts(file, read, dtype):
            out.write(part)
        out.flush()
        os.fsync(out.fileno())
    unfinished.rename(folder / file.name)


def _parts(file: OutputFile, read: ReadBox, dtype: str) -> Iterator[bytes | memoryview]:
    # transformers asks for the metadata of a file that it reads.
    yield from header_parts([(tensor.name, dtype, tensor.shape) for tensor in file.tensors], {"format": "pt"})
    for tensor in file.tensors:
        yield bytes_of(np.ascontiguousarray(narrow(tensor.read(read), dtype)))


def _finish(folder: Path, files: Sequence[OutputFile], config: dict[str, Any], dtype: str) -> None:
    if len(files) > 1:
        total = sum(_num_bytes(tensor, dtype) for file in files for tensor in file.tensors)
        places = {tensor.name: file.name for file in files for tensor in file.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _num_bytes(tensor: OutputTensor, dtype: str) -> int:
    return math.prod(tensor.shape) * storage_dtype(dtype).itemsize
