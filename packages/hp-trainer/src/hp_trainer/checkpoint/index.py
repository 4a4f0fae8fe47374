"""Index of a checkpoint: every tensor with the files and keys that hold it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hp_trainer._json import strict_json, strict_value
from hp_trainer.checkpoint.dtypes import storage_dtype
from hp_trainer.checkpoint.shard_file import CHECKSUM_BLOCK
from hp_trainer.checkpoint.tensor_box import Box
from hp_trainer.exceptions import CheckpointError

INDEX_FILE = "index.json"
FORMAT = 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A saved box: which shard file, under which key, and its checksums (`shard_file.checksums`)."""

    shard: int
    key: str
    box: Box
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of the checkpoint; its chunks cover it exactly."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint: its tensors, its model, and the trainer's state.

    Attributes:
        step: optimizer steps done.
        save_id: of this save; every shard repeats it.
        shard_bytes: size of each shard file, in rank order.
        tensors: by name.
        model: name and options of the model, as in the configuration.
        state: the trainer's own (JSON values).
    """

    step: int
    save_id: str
    shard_bytes: tuple[int, ...]
    tensors: Mapping[str, SavedTensor]
    model: Mapping[str, Any]
    state: Mapping[str, Any]

    def dump(self) -> str:
        """Return the JSON text, with its own digest; numbers of `model` and `state` that are not finite become text."""
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
        """Read the text of `dump` back; `where` names the file.

        Raises:
            CheckpointError: the text is damaged, of another format version, or does not follow the format.
        """
        try:
            body = json.loads(text)
            digest = body.pop("sha256")
            version = body["format"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} is damaged: it cannot be read as an index") from error
        # Before the version: a damaged number there would be taken for another format.
        if digest != _digest(body):
            raise CheckpointError(f"{where} is damaged: its digest differs")
        if version != FORMAT:
            raise CheckpointError(f"{where} has format {version}; this version of hp-trainer reads {FORMAT}")
        try:
            return parse_body(body)
        except SchemaError as error:
            raise CheckpointError(f"{where} is damaged: {error}") from error


def shard_name(rank: int) -> str:
    """Return the file that `rank` writes."""
    return f"shard-{rank:05}.safetensors"


def model_fingerprint(model: Mapping[str, Any]) -> str:
    """Return a digest of a model's name and options; equal for equal models."""
    return _digest(strict_value(model))


def _digest(body: Any) -> str:
    # As it was written: the first versions of hp-train wrote NaN, which is read still.
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


# Schema: every value is checked before it is used, since the digest only tells that it was written so --------


class SchemaError(ValueError):
    """A value of an index that is not what the format says; the message begins with its path."""


def parse_body(body: Any) -> Index:
    """Return the index that the JSON values of a file describe.

    Raises:
        SchemaError: a value is missing, of another type or out of range.
    """
    shard_bytes = tuple(_whole(size, f"shard_bytes[{i}]") for i, size in enumerate(_get(body, "shard_bytes", list)))
    tensors = _get(body, "tensors", dict)
    return Index(
        step=_whole(_get(body, "step", int), "step"),
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
    shard = _whole(_get(value, "shard", int, path), f"{path}.shard")
    if shard >= num_shards:
        raise SchemaError(f"{path}.shard: expected a number below {num_shards}, got {shard}")
    box = Box(_sizes(value, "offset", path), _sizes(value, "shape", path))
    checksums = _sizes(value, "crc32", path)
    # A value that fits its type may still contradict others; a short list would leave the end of a chunk unchecked.
    blocks = -(-box.numel * itemsize // CHECKSUM_BLOCK)
    if len(box.offset) != len(box.shape) or len(checksums) != blocks:
        raise SchemaError(
            f"{path}: expected as many offsets as sizes, and {blocks} checksums, got {len(box.offset)} offsets, "
            f"{len(box.shape)} sizes and {len(checksums)} checksums"
        )
    return Chunk(shard, _get(value, "key", str, path), box, checksums)


def _get(value: Any, key: str, kind: type[T], path: str = "") -> T:
    where = f"{path}.{key}" if path else key
    if not isinstance(value, dict) or key not in value:
        raise SchemaError(f"{where} is missing")
    found = value[key]
    if not isinstance(found, kind) or isinstance(found, bool):
        raise SchemaError(f"{where}: expected {kind.__name__}, got {type(found).__name__}")
    return found


def _whole(value: Any, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise SchemaError(f"{path}: expected a whole number from 0 to 2**63 - 1, got {str(value)[:40]}")
    return value


def _sizes(value: Any, key: str, path: str) -> tuple[int, ...]:
    return tuple(_whole(size, f"{path}.{key}[{i}]") for i, size in enumerate(_get(value, key, list, path)))
