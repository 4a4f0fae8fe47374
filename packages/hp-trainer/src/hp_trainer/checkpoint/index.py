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
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from hp_trainer._files import mismatch, strict_json, strict_value
from hp_trainer.checkpoint.shard_file import CHECKSUM_BLOCK, Box, storage_dtype
from hp_trainer.exceptions import CheckpointError

INDEX_FILE = "index.json"
FORMAT = 1

# Up to 63 bits: larger numbers would overflow NumPy's sizes and offsets.
_Natural = Annotated[int, Field(ge=0, lt=2**63)]
_Sizes = tuple[_Natural, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A saved box of a tensor: its shard file, its key there, and the CRC-32 of each of its blocks."""

    shard: _Natural
    key: str
    offset: _Sizes
    shape: _Sizes
    crc32: _Sizes

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint. Its chunks cover it exactly once."""

    dtype: str
    shape: _Sizes
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

    step: _Natural
    save_id: str
    shard_bytes: _Sizes
    tensors: dict[str, SavedTensor]
    model: dict[str, Any]
    state: dict[str, Any]

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
            "tensors": _TENSORS.dump_python(dict(sorted(self.tensors.items()))),
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
            index = _INDEX.validate_json(text, strict=True)
        except ValidationError as error:
            raise CheckpointError(f"{where} is damaged: {mismatch(error)}") from error
        index._check_chunks(where)
        return index

    def _check_chunks(self, where: str) -> None:
        for name, tensor in self.tensors.items():
            try:
                itemsize = storage_dtype(tensor.dtype).itemsize
            except CheckpointError as error:
                raise CheckpointError(f"{where} is damaged: tensors.{name}.dtype: {error}") from error
            for i, chunk in enumerate(tensor.chunks):
                path, shards = f"{where} is damaged: tensors.{name}.chunks[{i}]", len(self.shard_bytes)
                if chunk.shard >= shards:
                    raise CheckpointError(f"{path}.shard: expected a number below {shards}, got {chunk.shard}")
                # A list of checksums that is too short would leave the end of the chunk unverified.
                blocks = -(-chunk.box.numel * itemsize // CHECKSUM_BLOCK)
                if len(chunk.offset) != len(chunk.shape) or len(chunk.crc32) != blocks:
                    raise CheckpointError(
                        f"{path}: expected as many offsets as sizes and {blocks} checksums, got {len(chunk.offset)} "
                        f"offsets, {len(chunk.shape)} sizes and {len(chunk.crc32)} checksums"
                    )


_INDEX, _TENSORS = TypeAdapter(Index), TypeAdapter(dict[str, SavedTensor])


def shard_name(rank: int) -> str:
    """Return the name of the shard file of `rank`."""
    return f"shard-{rank:05}.safetensors"


def model_fingerprint(model: Mapping[str, Any]) -> str:
    """Return the SHA-256 digest of a model's name and options."""
    return _digest(strict_value(model))


def _digest(body: Any) -> str:
    # json.dumps, not strict_json: indexes of the first versions of hp-train contain NaN and must still be readable.
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


COMPLETE = re.compile(r"^step-(\d{8,})(?:-(\d+))?$")


def step_name(step: int) -> str:
    """Return the folder name of the first save of a step."""
    return f"step-{step:08}"


def step_in_name(folder: str) -> int | None:
    """Return the step in the folder name of a complete checkpoint, or None for other names."""
    match = COMPLETE.match(folder)
    return None if match is None else int(match[1])


def step_of(folder: str) -> int:
    """Return the step in the folder name of a complete checkpoint."""
    step = step_in_name(folder)
    if step is None:
        raise CheckpointError(f"{folder!r} is not a checkpoint; expected a name such as step-00000100")
    return step
