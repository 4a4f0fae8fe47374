"""Export of a decoder as a Hugging Face directory: its architecture, its weights, and adapters in PEFT's format.

The architecture is found by writing a `config.json` for each known one and reading it back. Weights are written tensor
by tensor, each file by one of the ranks that work together.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hp_trainer._coordination import Group, all_ranks, coordinator
from hp_trainer._files import replacing, write_atomically
from hp_trainer.checkpoint import Box
from hp_trainer.checkpoint.shard_file import Entry, bytes_of, file_parts, header_parts, storage_dtype
from hp_trainer.config import to_plain
from hp_trainer.exceptions import ExportError
from hp_trainer.models.hugging_face.architectures import ARCHITECTURES, TRAINING_ONLY, Architecture, ConfigReader
from hp_trainer.models.hugging_face.model_directory import INDEX_FILE, WEIGHTS_FILE, narrow
from hp_trainer.models.hugging_face.tensor_map import Array, Piece, TensorMap

_OF_EXPERTS = (
    "num_dense_layers",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "num_shared_experts",
    "norm_topk_prob",
    "score_func",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "router_bias",
    "expert_bias",
    "swiglu_limit",
)
_OF_LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_interleaved",
)
_OF_GROUPED = ("num_key_value_heads", "head_dim")


def find_architecture(config: Any) -> Architecture:
    """Return the architecture that computes the same as a decoder with these options."""
    wanted = meaning(to_plain(config), config.num_hidden_layers)
    # Every architecture is tried: an option may be fixed in one and have a key in another.
    differing = {each: _difference(each, config, wanted) for each in ARCHITECTURES.values()}
    best = min(differing, key=lambda each: len(differing[each]))
    if differing[best]:
        differences = ", ".join(f"{name} is {got!r} there" for name, got in sorted(differing[best].items()))
        raise ExportError(
            f"no known architecture of transformers ({', '.join(ARCHITECTURES)}) has all options of this "
            f"model; {best.model_type} is nearest: {differences}"
        )
    return best


def meaning(options: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the options that determine what a model of some layers computes, equal for equal models."""
    effective = {name: value for name, value in options.items() if name not in (*TRAINING_ONLY, "name", "from")}
    if effective["num_experts"] is None:
        unused: tuple[str, ...] = _OF_EXPERTS
    else:
        unused = ("intermediate_size",) if effective["num_dense_layers"] == 0 else ()
    unused += _OF_GROUPED if effective["attention"] == "latent" else _OF_LATENT
    # Different patterns and windows can state the same layers, so compare the layers themselves.
    pattern = effective.pop("layer_pattern")
    kinds = [pattern[layer % len(pattern)] for layer in range(layers)]
    if effective["sliding_window"] is None or "sliding" not in kinds:
        effective["sliding_window"], kinds = None, []
    # None stands for this scale.
    if effective["attention"] == "grouped" and effective["attention_scale"] is None:
        effective["attention_scale"] = effective["head_dim"] ** -0.5
    scaling = effective["rope_scaling"]
    if scaling["kind"] == "default":
        effective["rope_scaling"] = {"kind": "default"}
    return {name: value for name, value in effective.items() if name not in unused} | {"layers": kinds}


def _difference(architecture: Architecture, config: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return the options that change when written as a `config.json` of this architecture and read back."""
    reader = ConfigReader(architecture.write(config), architecture.model_type)
    options = architecture.read(reader)
    if reader.problems:
        return {problem.what: problem.got for problem in reader.problems}
    scaling = type(config.rope_scaling)(**options.pop("rope_scaling"))
    read = type(config)(**options, rope_scaling=scaling)
    return dict(_changed(wanted, meaning(to_plain(read), config.num_hidden_layers)))


def _changed(wanted: dict[str, Any], got: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in {**wanted, **got}:
        one, other = wanted.get(name), got.get(name)
        if isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=1e-9):
            # Some factors are stored as their inverse or its root, so they are restored up to rounding.
            continue
        if one != other:
            yield name, other


def same_meaning(config: Any, options: dict[str, Any]) -> bool:
    """Return whether options read from a directory make a decoder compute the same as `config`."""
    read = dataclasses.replace(config, **options)
    layers = config.num_hidden_layers
    return meaning(to_plain(read), read.num_hidden_layers) == meaning(to_plain(config), layers)


ReadBox = Callable[[str, Box], Array]
# The size at which transformers starts a new file.
LARGEST_FILE = 5 * 10**9


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of the directory, and the boxes of the decoder's tensors that form it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, Piece], ...]

    def read(self, read: ReadBox) -> Array:
        """Return the full tensor as float32. Tensors are read one at a time, so only one is in memory."""
        # Uninitialized: the pieces cover the tensor.
        result = np.empty(self.shape, np.float32)
        for name, piece in self.pieces:
            piece.place(read(name, piece.box), result)
        return result


# A file of weights: its name and tensors.
OutputFile = tuple[str, list[OutputTensor]]


def output_tensors(tensors: TensorMap) -> list[OutputTensor]:
    """Return the tensors of a directory, in the order of the decoder's."""
    pieces: dict[str, list[tuple[str, Piece]]] = {}
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            pieces.setdefault(piece.source, []).append((name, piece))
    return [OutputTensor(source, found[0][1].shape, tuple(found)) for source, found in pieces.items()]


def output_files(tensors: Sequence[OutputTensor], dtype: str, largest: int = LARGEST_FILE) -> list[OutputFile]:
    """Distribute tensors over files of at most `largest` bytes each, or of one tensor that is larger."""
    shares: list[list[OutputTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _num_bytes(tensor, dtype)
        if shares[-1] and filled + size > largest:
            shares.append([])
            filled = 0
        shares[-1].append(tensor)
        filled += size
    # Names state the number of files, so they are given last.
    count = len(shares)
    names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)] if count > 1 else [WEIGHTS_FILE]
    return list(zip(names, shares, strict=True))


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
    """Write weights from `read` and, last, `config.json` to a new directory, by all ranks; return the files."""
    files = output_files(output_tensors(tensors), dtype, largest)
    coordinator(group, "making the directory", lambda: make_directory(folder), ExportError)
    # Files are of about equal size, so dealing them out balances the ranks.
    mine = files[group.rank :: group.size]

    def write() -> None:
        for name, tensors in mine:
            _write(folder / name, tensors, read, dtype)

    all_ranks(group, "writing weights", write, ExportError)
    coordinator(group, "writing the index", lambda: _finish(folder, files, config, dtype), ExportError)
    return [name for name, _ in files]


def make_directory(folder: Path) -> None:
    """Create a directory to export to."""
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ExportError(f"{folder} is not empty; choose another --to, or delete it")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"{folder} cannot be made: {error.strerror}; choose another --to") from error


def _write(file: Path, tensors: Sequence[OutputTensor], read: ReadBox, dtype: str) -> None:
    """Write one file under a temporary name and rename it, so that a file with the final name is complete."""
    with replacing(file) as out:
        # transformers requires the metadata entry "format".
        out.writelines(header_parts([(tensor.name, dtype, tensor.shape) for tensor in tensors], {"format": "pt"}))
        for tensor in tensors:
            out.write(bytes_of(np.ascontiguousarray(narrow(tensor.read(read), dtype))))


def _finish(folder: Path, files: Sequence[OutputFile], config: dict[str, Any], dtype: str) -> None:
    if len(files) > 1:
        total = sum(_num_bytes(tensor, dtype) for _, tensors in files for tensor in tensors)
        file_of = {tensor.name: name for name, tensors in files for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        write_atomically(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    # Last, because a directory with `config.json` counts as complete.
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _num_bytes(tensor: OutputTensor, dtype: str) -> int:
    return math.prod(tensor.shape) * storage_dtype(dtype).itemsize


ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."


def merging(read: ReadBox, shapes: dict[str, tuple[int, ...]], scale: float) -> ReadBox:
    """Return a reader that adds `scale * lora_B @ lora_A` to the weights that have an adapter among `shapes`."""

    def merged(name: str, box: Box) -> Array:
        values = read(name, box)
        layer = name.removesuffix(".weight")
        a, b = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
        if a not in shapes:
            return values
        rank = shapes[a][0]
        # Each element of the box needs one row of B and one column of A, so only these are read.
        rows = read(b, Box((box.offset[0], 0), (box.shape[0], rank)))
        columns = read(a, Box((0, box.offset[1]), (rank, box.shape[1])))
        # In float64, so that the sum is rounded only once.
        added: Array = values + scale * (rows.astype(np.float64) @ columns.astype(np.float64))
        return added.astype(np.float32)

    return merged


def export_adapters(
    folder: Path, tensors: TensorMap, read: ReadBox, shapes: dict[str, tuple[int, ...]], lora: Any, base: str | None
) -> None:
    """Write the adapters of the model in `base` (if known) as files that PEFT reads."""
    make_directory(folder)
    entries = []
    for name, shape in shapes.items():
        layer, found, which = name.partition(".lora_")
        if found:
            # Adapters exist for projections only, which the directory stores unchanged, in one piece.
            theirs = tensors[f"{layer}.weight"].pieces[0].source.removesuffix(".weight")
            values = np.ascontiguousarray(read(name, Box.full(shape)))
            entries.append(Entry(f"{_PREFIX}{theirs}.lora_{which}", "float32", values))
    with replacing(folder / ADAPTER_FILE) as out:
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
    write_atomically(folder / "adapter_config.json", json.dumps(config, indent=2) + "\n")
