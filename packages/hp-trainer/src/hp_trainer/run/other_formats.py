"""Checkpoints of a run in the formats of others, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hp_trainer._json import strict_json
from hp_trainer.checkpoint import (
    Box,
    Checkpoint,
    CheckpointFormat,
    Chunk,
    ForeignCheckpoint,
    SavedTensor,
    Storage,
    TensorPart,
    refuse_other_model,
    save_checkpoint,
)
from hp_trainer.checkpoint.shard_file import bytes_of, header_parts, storage_dtype
from hp_trainer.config import TrainerConfig, to_plain
from hp_trainer.exceptions import CheckpointError
from hp_trainer.models.hugging_face.export import make_directory
from hp_trainer.run.storage import model_defaults

# What of a checkpoint is no tensor (step, model, the trainer's values), as the bytes of JSON: no format needs a pickle
# for it.
STATE = "hp.state"


def export_checkpoint(checkpoint: Checkpoint, folder: Path, format_: CheckpointFormat) -> int:
    """Write a whole checkpoint, with optimizer and trainer's state, as another format; return the number of tensors.

    Raises:
        ExportError: the folder is not empty, or cannot be written.
        CheckpointError: the checkpoint is damaged.
    """
    index = checkpoint.index
    told = strict_json({"step": index.step, "model": index.model, "state": index.state}).encode()
    state = np.frombuffer(told, np.uint8)
    whole = Box.full(state.shape)
    tensors = {**index.tensors, STATE: SavedTensor("uint8", state.shape, (Chunk(0, STATE, whole, ()),))}

    def read(name: str, box: Box) -> np.ndarray:
        return state if name == STATE else checkpoint.read(name, box)

    make_directory(folder)
    format_.write(folder, tensors, read)
    return len(index.tensors)


def import_checkpoint(
    found: ForeignCheckpoint,
    where: Path,
    config: TrainerConfig,
    storage: Storage,
    like: Checkpoint | None,
    may_write: Callable[[], None],
) -> str:
    """Write a checkpoint of a run from one of another format, all of which is in memory meanwhile; return its name.

    Args:
        where: its folder, for messages.
        config: the run's.
        storage: of the run's checkpoints.
        like: a checkpoint of the run, whose weights it must have by name, dtype and shape; None: there is none yet.
        may_write: see `save_checkpoint`.

    Raises:
        CheckpointError: something is missing or of another kind; nothing has been written.
    """
    told, tensors = _state(found, where), found.tensors()
    refuse_other_model(told["model"], to_plain(config.model), model_defaults(config), str(where))
    if like is not None:
        _check_tensors(tensors, like, where)
    return save_checkpoint(
        storage,
        _parts(found, tensors),
        step=told["step"],
        model=told["model"],
        state=told["state"],
        may_write=may_write,
    )


def convert_weights(found: ForeignCheckpoint, where: Path, folder: Path, prefix: str) -> int:
    """Write the tensors whose names begin with `prefix`, without it, into `model.safetensors` of a new directory.

    One tensor is in memory at a time. With the model's `config.json` beside it, `model.from` begins with it.

    Returns:
        The number of tensors.

    Raises:
        CheckpointError: no name begins so, or a tensor is damaged.
        ExportError: the directory is not empty.
    """
    tensors = {name: kind for name, kind in found.tensors().items() if name.startswith(prefix) and name != STATE}
    if not tensors:
        some = ", ".join(list(found.tensors())[:4]) or "none"
        raise CheckpointError(f"{where}: no tensor has a name that begins with {prefix!r}; there are {some}, ...")
    make_directory(folder)
    unfinished = folder / "model.safetensors.incomplete"
    names = sorted(tensors, key=lambda name: (-storage_dtype(tensors[name][0]).itemsize, name))
    with unfinished.open("wb") as out:
        kinds = [(name.removeprefix(prefix), *tensors[name]) for name in names]
        out.writelines(header_parts(kinds, {"format": "pt"}))
        for name in names:
            out.write(bytes_of(np.ascontiguousarray(found.read(name))))
    unfinished.rename(folder / "model.safetensors")
    return len(tensors)


def _state(found: ForeignCheckpoint, where: Path) -> dict[str, Any]:
    """Return step, model and trainer's values.

    Raises:
        CheckpointError: they are not there, or damaged.
    """
    if STATE not in found.tensors():
        raise CheckpointError(
            f"{where} holds no {STATE}, the step and settings that hp-train export --format=dcp writes: it is no whole "
            "checkpoint of a run. For its weights alone, use hp-train import --to=DIR and model.from"
        )
    try:
        told = json.loads(found.read(STATE).tobytes())
        assert isinstance(told["step"], int)
        assert told["step"] >= 0
        assert isinstance(told["model"], dict)
        assert isinstance(told["state"], dict)
    except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: {STATE} cannot be read") from error
    return dict(told)


def _check_tensors(tensors: Mapping[str, tuple[str, tuple[int, ...]]], like: Checkpoint, where: Path) -> None:
    expected = {name: (saved.dtype, saved.shape) for name, saved in like.index.tensors.items()}
    model = {name for name in expected if name.startswith("model.")}
    problems = [f"{name} is missing" for name in sorted(model - tensors.keys())]
    problems += [f"{name} is not expected" for name in sorted(_models(tensors) - model)]
    problems += [
        f"{name} is {tensors[name][0]}{list(tensors[name][1])}, expected {dtype}{list(shape)}"
        for name, (dtype, shape) in expected.items()
        if name in tensors and tensors[name] != (dtype, shape)
    ]
    if problems:
        raise CheckpointError(f"{where} is no checkpoint of this run: {'; '.join(problems)}")


def _models(tensors: Mapping[str, Any]) -> set[str]:
    return {name for name in tensors if name.startswith("model.")}


def _parts(found: ForeignCheckpoint, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterator[TensorPart]:
    for name, (dtype, shape) in tensors.items():
        if name != STATE:
            yield TensorPart(name, dtype, shape, [(Box.full(shape), found.read(name))])
