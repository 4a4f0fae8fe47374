"""Adapters in PEFT's files, and merged into the weights that they adapt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hp_trainer.checkpoint import Box
from hp_trainer.checkpoint.shard_file import Entry, file_parts
from hp_trainer.models.hugging_face.export import ReadBox, make_directory
from hp_trainer.models.hugging_face.pieces import Array
from hp_trainer.models.hugging_face.tensor_map import TensorMap

ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def merging(read: ReadBox, shapes: dict[str, tuple[int, ...]], scale: float) -> ReadBox:
    """Return a reader that adds `scale * lora_B @ lora_A` to the weights that have an adapter.

    Args:
        read: (name of a parameter, box) -> float32 values.
        shapes: shape of every parameter by name, those of adapters among them.
    """

    def merged(name: str, box: Box) -> Array:
        values = read(name, box)
        layer = name.removesuffix(".weight")
        a, b = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
        if a not in shapes:
            return values
        rank = shapes[a][0]
        rows = read(b, Box((box.offset[0], 0), (box.shape[0], rank)))
        columns = read(a, Box((0, box.offset[1]), (rank, box.shape[1])))
        # In float64, so that the sum is rounded once.
        added: Array = values + scale * (rows.astype(np.float64) @ columns.astype(np.float64))
        return added.astype(np.float32)

    return merged


def export_adapters(
    folder: Path, tensors: TensorMap, read: ReadBox, shapes: dict[str, tuple[int, ...]], lora: Any, base: str | None
) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`, which PEFT reads.

    Args:
        tensors: where the decoder's own tensors lie.
        read: (name of a parameter, box) -> float32 values.
        shapes: shape of every parameter by name.
        lora: the options of the adapters.
        base: directory of the model that they adapt, where it is known.

    Raises:
        ExportError: the directory is not empty.
    """
    make_directory(folder)
    entries = []
    for name, shape in shapes.items():
        layer, found, which = name.partition(".lora_")
        if found:
            theirs = tensors[f"{layer}.weight"].pieces[0].source.removesuffix(".weight")
            values = np.ascontiguousarray(read(name, Box.full(shape)))
            entries.append(Entry(f"{_PREFIX}{theirs}.lora_{which}", "float32", values))
    with (folder / ADAPTER_FILE).open("wb") as out:
        for part in file_parts(entries, {"format": "pt"}):
            out.write(part)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
