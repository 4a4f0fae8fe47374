"""Index of a checkpoint: every tensor with the files and keys that hold it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hp_trainer.checkpoint.box import Box
from hp_trainer.exceptions import CheckpointError

INDEX_FILE = "index.json"
FORMAT = 1


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
        """Return the JSON text, with its own digest."""
        body = {
            "format": FORMAT,
            "step": self.step,
            "save_id": self.save_id,
            "model": dict(self.model),
            "model_fingerprint": model_fingerprint(self.model),
            "state": dict(self.state),
            "shard_bytes": list(self.shard_bytes),
            "tensors": {name: _plain_tensor(tensor) for name, tensor in sorted(self.tensors.items())},
        }
        return json.dumps(body | {"sha256": _digest(body)}, indent=1) + "\n"

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> Index:
        """Read the text of `dump` back; `where` names the file.

        Raises:
            CheckpointError: the text is damaged, or of another format version.
        """
        try:
            body = json.loads(text)
            digest = body.pop("sha256")
            version = body["format"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where} is damaged: it cannot be read as an index") from error
        if digest != _digest(body):
            raise CheckpointError(f"{where} is damaged: its digest differs")
        if version != FORMAT:
            raise CheckpointError(f"{where} has format {version}; this version of hp-trainer reads {FORMAT}")
        return cls(
            step=body["step"],
            save_id=body["save_id"],
            shard_bytes=tuple(body["shard_bytes"]),
            tensors={name: _tensor(value) for name, value in body["tensors"].items()},
            model=body["model"],
            state=body["state"],
        )


def shard_name(rank: int) -> str:
    """Return the file that `rank` writes."""
    return f"shard-{rank:05}.safetensors"


def model_fingerprint(model: Mapping[str, Any]) -> str:
    """Return a digest of a model's name and options; equal for equal models."""
    return _digest(dict(model))


def _digest(body: Any) -> str:
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


def _tensor(value: dict[str, Any]) -> SavedTensor:
    chunks = tuple(
        Chunk(
            shard=chunk["shard"],
            key=chunk["key"],
            box=Box(tuple(chunk["offset"]), tuple(chunk["shape"])),
            checksums=tuple(chunk["crc32"]),
        )
        for chunk in value["chunks"]
    )
    return SavedTensor(value["dtype"], tuple(value["shape"]), chunks)
