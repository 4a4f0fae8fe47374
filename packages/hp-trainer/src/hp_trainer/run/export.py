"""Export of a run's model to Hugging Face, and conversion of its checkpoints from and to other formats."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hp_trainer._coordination import Group, coordinator
from hp_trainer._files import copy_file, replacing, strict_json
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
from hp_trainer.exceptions import CheckpointError, ExportError
from hp_trainer.models.hugging_face import COMPANIONS
from hp_trainer.models.hugging_face.architectures import read_architecture
from hp_trainer.models.hugging_face.export import (
    ADAPTER_FILE,
    LARGEST_FILE,
    ReadBox,
    export_adapters,
    export_weights,
    find_architecture,
    make_directory,
    merging,
    same_meaning,
)
from hp_trainer.models.hugging_face.model_directory import widen
from hp_trainer.models.hugging_face.tensor_map import Array, build_tensor_map
from hp_trainer.run.folder import RunFolder, model_defaults

DTYPES = ("float32", "bfloat16", "float16")
# Keys of an original `config.json` that must not remain beside newly written ones.
_REPLACED = ("layer_types", "sliding_window", "original_max_position_embeddings", "partial_rotary_factor")
# Buffers that only training reads: loads of the experts in the last step, and the calls that drew router noise.
_TRAINING_STATE = (".last_shares", ".jitter_calls")


def export_run(
    run: RunFolder,
    config: TrainerConfig,
    checkpoint: Checkpoint,
    folder: Path,
    group: Group,
    *,
    dtype: str | None = None,
    largest: int = LARGEST_FILE,
    adapters: bool = False,
    averaged: bool = False,
    lossy: bool = False,
) -> list[str]:
    """Write the model of a checkpoint as a directory for transformers. Every rank of `group` calls this.

    Args:
        dtype: dtype of the weights; None: that of `model.from`, else float32.
        largest: most bytes per file of weights.
        adapters: write only the adapters, as PEFT files; otherwise they are merged into the weights.
        averaged: write the moving average of each weight that has one.
        lossy: write a model that computes something else, because the architecture cannot express a part of it.

    Returns:
        The names of the files of weights.
    """
    options = config.model.options
    if not hasattr(options, "read_directory"):
        raise ExportError(f"model.name = {config.model.name}: only the decoder can be exported to transformers")
    if adapters and options.lora.rank is None:
        raise ExportError("the model has no adapters (model.lora.rank is null); leave out --lora")
    if averaged:
        checkpoint.check_averaged()
    model_type, described = _describe(run, config)
    found = described.get("dtype") or described.get("torch_dtype")
    chosen = dtype or (found if found in DTYPES else "float32")
    # transformers 4.56 renamed `torch_dtype` to `dtype`. Both are written, so that older versions read it too.
    described |= {"dtype": chosen, "torch_dtype": chosen}
    # Chosen before anything is read: a model without a counterpart fails at once.
    # DeepSeek-V3 always stores a bias by which experts are balanced; that of a model without one is zero.
    mapped = dataclasses.replace(options, load_balance_coeff=options.load_balance_coeff or 1e-3)
    tensors = build_tensor_map(mapped, model_type)

    stored, saved = _reader(checkpoint, averaged), checkpoint.index.tensors
    # Global shapes from the index: no tensor is read for them.
    shapes = {name.removeprefix("model."): saved[name].shape for name in saved if name.startswith("model.")}
    if adapters:
        # Adapters are small: rank 0 writes them alone.
        coordinator(
            group,
            "writing adapters",
            lambda: export_adapters(folder, tensors, stored, shapes, options.lora, config.model.source),
            ExportError,
        )
        return [ADAPTER_FILE]
    lost = _losses(options, [name for name in shapes if name not in tensors], stored, shapes)
    if lost and not lossy:
        raise ExportError(
            f"{model_type} of transformers cannot express a part of this model: {'; '.join(lost)}. "
            "Add --lossy to export without it: the exported model then computes other logits"
        )
    # Adapters are merged while a tensor is read, so that no second copy of the model is in memory.
    read = stored if options.lora.rank is None else merging(stored, shapes, options.lora.scale)
    names = export_weights(folder, tensors, read, described, group, dtype=chosen, largest=largest)
    if group.rank == 0:
        # After the weights: an export that failed leaves no directory that looks complete to a tokenizer.
        _copy_companions(run, config, folder)
    return names


def _reader(checkpoint: Checkpoint, averaged: bool) -> ReadBox:
    """Return a function that reads a box of a weight, or of its moving average."""
    saved = checkpoint.index.tensors

    def read(name: str, box: Box) -> Array:
        if name.endswith(".moe.expert_bias") and f"model.{name}" not in saved:
            return np.zeros(box.shape, np.float32)
        # Frozen weights have no average; they are written as they are.
        chosen = f"ema.{name}" if averaged and f"ema.{name}" in saved else f"model.{name}"
        return widen(checkpoint.read(chosen, box), saved[chosen].dtype)

    return read


def _describe(run: RunFolder, config: TrainerConfig) -> tuple[str, dict[str, Any]]:
    """Return the architecture and `config.json`: that of `model.from`, if the options still mean the same."""
    options = config.model.options
    original = run.model_files / "config.json"
    # With scaled RoPE the usable length is a multiple of the original one.
    scaled = int((options.rope_scaling.original_max_position_embeddings or 0) * options.rope_scaling.factor)
    longest = max(config.training.sequence_length, scaled)
    values: dict[str, Any] = {"max_position_embeddings": longest, "use_cache": True}
    if original.is_file():
        architecture, read, _ = read_architecture(run.model_files)
        values = json.loads(original.read_text(encoding="utf-8"))
        if architecture is not None:
            scaling = type(options.rope_scaling)(**read.pop("rope_scaling"))
            # Then the original file also preserves keys that this package does not know.
            if same_meaning(options, {**read, "rope_scaling": scaling}):
                return architecture.model_type, values
    found = find_architecture(options)
    # What is written now states these in full; the original ones would override it.
    return found.model_type, {key: value for key, value in values.items() if key not in _REPLACED} | found.write(
        options
    )


def _losses(options: Any, unmapped: list[str], read: ReadBox, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Describe what the exported model would lack outside of training; the architecture has no `unmapped` tensor."""
    # Adapters are merged, and only training reads the state of a loss. A bias that never moved changes nothing.
    remaining = [name for name in unmapped if ".lora_" not in name and not name.endswith(_TRAINING_STATE)]
    lost = [name for name in remaining if np.any(read(name, Box.full(shapes[name])))]
    biases = [name for name in lost if name.endswith(".expert_bias")]
    found = [name for name in lost if name not in biases]
    if biases:
        found.append(
            f"the expert_bias of {len(biases)} layers, which load_balance_coeff = {options.load_balance_coeff} changed "
            "and which chooses experts (train with model.load_balance_coeff=null and an auxiliary loss instead)"
        )
    if options.num_experts is not None and options.capacity_factor is not None:
        found.append(f"capacity_factor = {options.capacity_factor} (tokens beyond an expert's capacity are dropped)")
    if options.num_experts is not None and options.routing != "top_k":
        found.append(f"routing = {options.routing} (there each token has its best experts, in training too)")
    return found


def _copy_companions(run: RunFolder, config: TrainerConfig, folder: Path) -> None:
    """Copy the tokenizer and the other companion files of the model."""
    for name in COMPANIONS:
        # `config.json` was written with the weights.
        if name != "config.json" and (run.model_files / name).is_file():
            copy_file(run.model_files / name, folder / name)
    tokenizer = getattr(config.data.options, "tokenizer", None)
    if isinstance(tokenizer, str):
        file = Path(tokenizer) / "tokenizer.json" if Path(tokenizer).is_dir() else Path(tokenizer)
        if file.is_file():
            copy_file(file, folder / "tokenizer.json")


# The values of a checkpoint that are not tensors (step, model, state of the trainer) are stored as a uint8 tensor of
# JSON under this name, so that no format needs a pickle for them.
STATE = "hp.state"


def export_checkpoint(checkpoint: Checkpoint, folder: Path, format_: CheckpointFormat) -> int:
    """Write a checkpoint, including optimizer and trainer state, in another format; return the number of tensors."""
    index = checkpoint.index
    # Strict: NaN is not JSON, and other readers reject it.
    values = strict_json({"step": index.step, "model": index.model, "state": index.state}).encode()
    state = np.frombuffer(values, np.uint8)
    chunk = Chunk(0, STATE, (0,), state.shape, ())
    tensors = {**index.tensors, STATE: SavedTensor("uint8", state.shape, (chunk,))}

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
    """Convert a foreign checkpoint, in memory, to one of a run whose weights it must fit (`like`); return its name."""
    values, tensors = _state(found, where), found.tensors()
    # Settings first: of another model every tensor would be reported.
    refuse_other_model(values["model"], to_plain(config.model), model_defaults(config), str(where))
    if like is not None:
        _check_tensors(tensors, like, where)
    parts = (
        TensorPart(name, dtype, shape, [(Box.full(shape), found.read(name))])
        for name, (dtype, shape) in tensors.items()
        if name != STATE
    )
    return save_checkpoint(
        storage,
        parts,
        step=values["step"],
        model=values["model"],
        # Copies of another run's files must not be restored in this one.
        state={name: value for name, value in values["state"].items() if name != "run_files"},
        may_write=may_write,
    )


def convert_weights(found: ForeignCheckpoint, where: Path, folder: Path, prefix: str) -> int:
    """Write the tensors that start with `prefix`, one by one, to a new `model.safetensors`; return their number."""
    tensors = {name: kind for name, kind in found.tensors().items() if name.startswith(prefix) and name != STATE}
    if not tensors:
        some = ", ".join(list(found.tensors())[:4]) or "none"
        raise CheckpointError(f"{where}: no tensor has a name that starts with {prefix!r}; there are {some}, ...")
    make_directory(folder)
    # Wide dtypes first keeps every tensor aligned to its item size, as safetensors writes them.
    names = sorted(tensors, key=lambda name: (-storage_dtype(tensors[name][0]).itemsize, name))
    # Complete or absent: an interrupted conversion leaves no file that looks valid.
    with replacing(folder / "model.safetensors") as out:
        out.writelines(header_parts([(name.removeprefix(prefix), *tensors[name]) for name in names], {"format": "pt"}))
        for name in names:
            out.write(bytes_of(np.ascontiguousarray(found.read(name))))
    return len(tensors)


def _state(found: ForeignCheckpoint, where: Path) -> dict[str, Any]:
    """Return the values that are not tensors: step, model and state of the trainer."""
    if STATE not in found.tensors():
        raise CheckpointError(
            f"{where} has no {STATE}, the step and settings that hp-train export --format=dcp writes: it is not a full "
            "checkpoint of a run. For its weights only, use hp-train import --to=DIR and model.from"
        )
    try:
        values = json.loads(found.read(STATE).tobytes())
        # No asserts: the file is not ours, and `python -O` would accept anything.
        if not (isinstance(values["step"], int) and values["step"] >= 0):
            raise ValueError(f"step: expected an int of at least 0, got {values['step']!r}")
        if not (isinstance(values["model"], dict) and isinstance(values["state"], dict)):
            raise ValueError("model and state: expected objects")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: {STATE} cannot be read") from error
    return dict(values)


def _check_tensors(tensors: Mapping[str, tuple[str, tuple[int, ...]]], like: Checkpoint, where: Path) -> None:
    # Only weights must be there: averages and optimizer state depend on settings that may differ. What both have must
    # agree, since it is loaded.
    expected = {name: (saved.dtype, saved.shape) for name, saved in like.index.tensors.items()}
    model = {name for name in expected if name.startswith("model.")}
    problems = [f"{name} is missing" for name in sorted(model - tensors.keys())]
    found = {name for name in tensors if name.startswith("model.")}
    problems += [f"{name} is not expected" for name in sorted(found - model)]
    problems += [
        f"{name} is {tensors[name][0]}{list(tensors[name][1])}, expected {dtype}{list(shape)}"
        for name, (dtype, shape) in expected.items()
        if name in tensors and tensors[name] != (dtype, shape)
    ]
    if problems:
        raise CheckpointError(f"{where} is not a checkpoint of this run: {'; '.join(problems)}")
