"""Export of a run's model as a Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hp_trainer._exchange import Group, coordinator
from hp_trainer.checkpoint import Box, Checkpoint
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import ExportError
from hp_trainer.models.decoder import DecoderConfig
from hp_trainer.models.hugging_face import COMPANIONS
from hp_trainer.models.hugging_face.architectures import read_architecture
from hp_trainer.models.hugging_face.export import (
    ADAPTER_FILE,
    LARGEST_FILE,
    export_adapters,
    export_weights,
    find_architecture,
    merging,
    same_meaning,
)
from hp_trainer.models.hugging_face.model_directory import widen
from hp_trainer.models.hugging_face.tensor_map import Array, build_tensor_map
from hp_trainer.run.folder import RunFolder

DTYPES = ("float32", "bfloat16", "float16")


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
) -> list[str]:
    """Write the model of a checkpoint as a directory that transformers reads; every rank of `group` takes part.

    Args:
        dtype: of the weights; None: that of the model that the run began with, else float32.
        largest: bytes of a file of weights.
        adapters: write the adapters alone, in PEFT's files; else they are merged into the weights.
        averaged: write the moving average of each weight that has one.

    Returns:
        The names of the files of weights.

    Raises:
        ExportError: the model is no decoder, no architecture of transformers, or the directory cannot be written.
        CheckpointError: there are no averages.
    """
    options = config.model.options
    if not isinstance(options, DecoderConfig):
        raise ExportError(f"model.name = {config.model.name}: only the decoder is known to transformers")
    if adapters and options.lora.rank is None:
        raise ExportError("the model has no adapters (model.lora.rank is null); leave --lora out")
    if averaged:
        checkpoint.check_averaged()
    model_type, described = _describe(run, config)
    chosen = dtype or _dtype_of(described)
    described |= {"dtype": chosen, "torch_dtype": chosen}
    tensors = build_tensor_map(options, model_type)

    saved = checkpoint.index.tensors

    def stored(name: str, box: Box) -> Array:
        chosen = f"ema.{name}" if averaged and f"ema.{name}" in saved else f"model.{name}"
        return widen(checkpoint.read(chosen, box), saved[chosen].dtype)

    shapes = {name.removeprefix("model."): saved[name].shape for name in saved if name.startswith("model.")}
    if adapters:
        coordinator(
            group,
            "writing adapters",
            lambda: export_adapters(folder, tensors, stored, shapes, options.lora, config.model.source),
            ExportError,
        )
        return [ADAPTER_FILE]
    read = stored if options.lora.rank is None else merging(stored, shapes, options.lora.scale)
    names = export_weights(folder, tensors, read, described, group, dtype=chosen, largest=largest)
    if group.rank == 0:
        _copy_companions(run, config, folder)
    return names


def _describe(run: RunFolder, config: TrainerConfig) -> tuple[str, dict[str, Any]]:
    """Return the architecture and the content of `config.json`: that which the run began with, where it still holds."""
    options = config.model.options
    begun = run.model_files / "config.json"
    values: dict[str, Any] = {"max_position_embeddings": _longest(config), "use_cache": True}
    if begun.is_file():
        architecture, read, _ = read_architecture(run.model_files)
        values = json.loads(begun.read_text(encoding="utf-8"))
        if architecture is not None:
            scaling = type(options.rope_scaling)(**read.pop("rope_scaling"))
            if same_meaning(options, {**read, "rope_scaling": scaling}):
                return architecture.model_type, values
    found = find_architecture(options)
    return found.model_type, values | found.write(options)


def _longest(config: TrainerConfig) -> int:
    scaling = config.model.options.rope_scaling
    scaled = (scaling.original_max_position_embeddings or 0) * scaling.factor
    return max(config.training.sequence_length, int(scaled))


def _dtype_of(described: dict[str, Any]) -> str:
    found = described.get("dtype") or described.get("torch_dtype")
    return found if found in DTYPES else "float32"


def _copy_companions(run: RunFolder, config: TrainerConfig, folder: Path) -> None:
    """Copy the tokenizer and what else goes with the model."""
    for name in COMPANIONS:
        if name != "config.json" and (run.model_files / name).is_file():
            shutil.copyfile(run.model_files / name, folder / name)
    tokenizer = getattr(config.data.options, "tokenizer", None)
    if isinstance(tokenizer, str):
        file = Path(tokenizer) / "tokenizer.json" if Path(tokenizer).is_dir() else Path(tokenizer)
        if file.is_file():
            shutil.copyfile(file, folder / "tokenizer.json")
