"""The index of a checkpoint: where the elements of each tensor are stored, and the trainer's state.

The file is JSON and contains its own SHA-256 digest. Reading it also validates every value against the format, because
a digest only proves that the file is as it was written. Folder names of checkpoints are defined here too.
`save.py` builds and writes the index; the checksums of boxes are computed in `shard_file.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hp_trainer._files import strict_json, strict_value
from hp_trainer.checkpoint.shard_file import CHECKSUM_BLOCK, Box, storage_dtype
from hp_trainer.exceptions import CheckpointError

INDEX_FILE = "index.json"
FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A saved box of a tensor: its shard file, its key there, and the CRC-32 of each of its blocks."""

    shard: int
    key: str
    box: Box
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint. Its chunks cover it exactly once."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """Content of the index file.

    Attributes:
        step: number of completed optimizer steps.
        save_id: random identifier of this save, repeated in every shard file.
        shard_bytes: size of each shard file in bytes, in rank order.
        tensors: saved tensors by name.
        model: name and options of the model, as in the configuration.
        state: state of the trainer, as JSON values.
    """

    step: int
    save_id: str
    shard_bytes: tuple[int, ...]
    tensors: Mapping[str, SavedTensor]
    model: Mapping[str, Any]
    state: Mapping[str, Any]

    def dump(self) -> str:
        """Return the index as JSON text with its digest. Infinite and NaN values of `model` and `state` become text."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "save_id": self.save_id,
            "model": strict_value(self.model),
            "model_fingerprint": model_fingerprint(self.model),
            "state": strict_value(self.state),
            "shard_bytes": list(self.shard_bytes),
            "tensors": {name: _plain_tensor(tensor) for name, tensor in sorted(self.tensors.items())},
        }
        return strict_json(body | {"sha256": _digest(body)}, indent=1) + "\n"

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> Index:
        """Parse the text that `dump` returns. `where` names the file in errors.

        Raises:
            CheckpointError: the text is damaged, has another format version, or does not follow the format.
        """
        try:
            body = json.loads(text)
            digest = body.pop("sha256")
            version = body["format"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} is damaged: it is not a valid index") from error
        # Checked before the version: a damaged version number would be reported as an unknown format.
        if digest != _digest(body):
            raise CheckpointError(f"{where} is damaged: its digest differs")
        if version != FORMAT:
            raise CheckpointError(
                f"{where} has format {version}; this version of hp-trainer reads format {FORMAT}: upgrade hp-trainer"
            )
        try:
            return parse_body(body)
        except SchemaError as error:
            raise CheckpointError(f"{where} is damaged: {error}") from error


def shard_name(rank: int) -> str:
    """Return the name of the shard file of `rank`."""
    return f"shard-{rank:05}.safetensors"


def model_fingerprint(model: Mapping[str, Any]) -> str:
    """Return the SHA-256 digest of a model's name and options."""
    return _digest(strict_value(model))


def _digest(body: Any) -> str:
    # json.dumps, not strict_json: indexes of the first versions of hp-train contain NaN and must still be readable.
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _plain_tensor(tensor: SavedTensor) -> dict[str, Any]:
    chunks = [
        {
            "shard": chunk.shard,
            "key": chunk.key,
            "offset": list(chunk.box.offset),
            "shape": list(chunk.box.shape),
            "crc32": list(chunk.checksums),
        }
        for chunk in tensor.chunks
    ]
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "chunks": chunks}


class SchemaError(ValueError):
    """A value of an index violates the format. The message starts with the path of the value."""


def parse_body(body: Any) -> Index:
    """Validate the JSON values of an index file and return them as an `Index`.

    Raises:
        SchemaError: a value is missing, has the wrong type, or is out of range.
    """
    # Sizes come first: the shard of every chunk must be one of them.
    shard_bytes = tuple(_natural(size, f"shard_bytes[{i}]") for i, size in enumerate(_get(body, "shard_bytes", list)))
    tensors = _get(body, "tensors", dict)
    return Index(
        step=_natural(_get(body, "step", int), "step"),
        save_id=_get(body, "save_id", str),
        shard_bytes=shard_bytes,
        tensors={name: _tensor(value, f"tensors.{name}", len(shard_bytes)) for name, value in tensors.items()},
        model=_get(body, "model", dict),
        state=_get(body, "state", dict),
    )


def _tensor(value: Any, path: str, num_shards: int) -> SavedTensor:
    dtype, shape = _get(value, "dtype", str, path), _sizes(value, "shape", path)
    try:
        itemsize = storage_dtype(dtype).itemsize
    except CheckpointError as error:
        raise SchemaError(f"{path}.dtype: {error}") from error
    chunks = _get(value, "chunks", list, path)
    parsed = [_chunk(chunk, f"{path}.chunks[{i}]", num_shards, itemsize) for i, chunk in enumerate(chunks)]
    return SavedTensor(dtype, shape, tuple(parsed))


def _chunk(value: Any, path: str, num_shards: int, itemsize: int) -> Chunk:
    shard = _natural(_get(value, "shard", int, path), f"{path}.shard")
    if shard >= num_shards:
        raise SchemaError(f"{path}.shard: expected a number below {num_shards}, got {shard}")
    box = Box(_sizes(value, "offset", path), _sizes(value, "shape", path))
    checksums = _sizes(value, "crc32", path)
    # A list of checksums that is too short would leave the end of the chunk unverified.
    blocks = -(-box.numel * itemsize // CHECKSUM_BLOCK)
    if len(box.offset) != len(box.shape) or len(checksums) != blocks:
        raise SchemaError(
            f"{path}: expected as many offsets as sizes and {blocks} checksums, got {len(box.offset)} offsets, "
            f"{len(box.shape)} sizes and {len(checksums)} checksums"
        )
    return Chunk(shard, _get(value, "key", str, path), box, checksums)


def _get(value: Any, key: str, kind: type[T], path: str = "") -> T:
    where = f"{path}.{key}" if path else key
    if not isinstance(value, dict) or key not in value:
        raise SchemaError(f"{where} is missing")
    found = value[key]
    # bool is a subclass of int, and no value of an index is a bool.
    if not isinstance(found, kind) or isinstance(found, bool):
        raise SchemaError(f"{where}: expected {kind.__name__}, got {type(found).__name__}")
    return found


def _natural(value: Any, path: str) -> int:
    # Up to 63 bits: larger numbers would overflow NumPy's sizes and offsets.
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise SchemaError(f"{path}: expected an integer from 0 to 2**63 - 1, got {str(value)[:40]}")
    return value


def _sizes(value: Any, key: str, path: str) -> tuple[int, ...]:
    return tuple(_natural(size, f"{path}.{key}[{i}]") for i, size in enumerate(_get(value, key, list, path)))


COMPLETE = re.compile(r"^step-(\d{8,})(?:-(\d+))?$")


def step_name(step: int) -> str:
    """Return the folder name of the first save of a step."""
    return f"step-{step:08}"


def step_in_name(folder: str) -> int | None:
    """Return the step in the folder name of a complete checkpoint, or None for other names."""
    match = COMPLETE.match(folder)
    return None if match is None else int(match[1])


def step_of(folder: str) -> int:
    """Return the step in the folder name of a complete checkpoint.

    Raises:
        CheckpointError: the name is not that of a complete checkpoint.
    """
    step = step_in_name(folder)
    if step is None:
        raise CheckpointError(f"{folder!r} is not a checkpoint; expected a name such as step-00000100")
    return step
