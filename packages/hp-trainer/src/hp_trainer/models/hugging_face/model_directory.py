"""A directory of a Hugging Face model: its architecture, its problems, and its weights for any rank's shards."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hp_trainer._files import read_plain_text
from hp_trainer.checkpoint import Box
from hp_trainer.checkpoint.shard_file import Header, read_header, storage_dtype, view_array
from hp_trainer.exceptions import CheckpointError, Problem
from hp_trainer.models.hugging_face.architectures import read_architecture
from hp_trainer.models.hugging_face.tensor_map import Array, TensorMap, build_tensor_map

# Files that belong to a model in addition to its weights. All are data, none is executed.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class ModelDirectory:
    """A directory of transformers: its tensors, and where each of the decoder is (unknown architecture: nowhere)."""

    def __init__(self, path: Path, config: Any) -> None:
        self.path = path
        self.architecture, _, self._reader = read_architecture(path)
        self.weights = Weights(path)
        self._layers = config.num_hidden_layers
        self._tied = config.tie_word_embeddings
        self.tensors = {}
        if self.architecture is not None:
            # Both forms of experts occur with one `model_type`, so the names decide.
            fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in self.weights.names)
            self.tensors = build_tensor_map(config, self.architecture.model_type, fused=fused)

    def problems(self) -> Iterator[Problem]:
        """Yield every problem that prevents loading the weights."""
        yield from self._reader.problems
        if self.architecture is not None:
            found = list(weight_problems(self.weights, self.tensors, self._is_ignored))
            yield from found
            if not found and self._tied and self._has_other_head():
                # Some versions of transformers compute with these weights, others with the embedding.
                yield Problem(
                    path="",
                    what=f"{self.path}: lm_head.weight differs from model.embed_tokens.weight",
                    expected="equal weights, as tie_word_embeddings is true",
                    hint="tie_word_embeddings=false",
                )

    def read(self, name: str, box: Box) -> Array:
        """Return a box of one of the decoder's parameters or buffers as float32, reading only the bytes it needs."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} holds no weights for {name!r}")
        return self.tensors[name].read(box, self.weights.read)

    def _has_other_head(self) -> bool:
        """Return whether the directory has a head whose weights are not those of the embedding."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        weights = self.weights
        if head not in weights.names:
            return False
        if weights.shape(head) != weights.shape(embedding) or weights.dtype(head) not in _DTYPES:
            return True
        rows, columns = weights.shape(head)
        # Some rows at a time: a head in float32 can have gigabytes.
        step = max(1, 2**24 // columns)
        chunks = ((slice(start, start + step), slice(None)) for start in range(0, rows, step))
        return not all(np.array_equal(weights.read(head, chunk), weights.read(embedding, chunk)) for chunk in chunks)

    def _is_ignored(self, name: str) -> bool:
        """Return whether a tensor is superfluous: empty, rotary tables, a tied head, or multi-token prediction."""
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self._tied):
            return True
        # transformers saves the weights of no shared experts.
        if 0 in self.weights.shape(name):
            return True
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        assert self.architecture is not None
        return layer is not None and int(layer[1]) >= self._layers and self.architecture.model_type == "deepseek_v3"


WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Most bytes of a header. One with a million tensors takes some hundred megabytes.
_LONGEST_HEADER = 512 * 2**20
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


class Weights:
    """The tensors of memory-mapped files, with the problems of these; only requested slices are read and counted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []
        self.bytes_read = 0
        self._files: dict[str, tuple[Array, Header]] = {}
        self._places: dict[str, str] = {}
        for file in self._file_names():
            self._open(file)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[1]

    def dtype(self, name: str) -> str:
        """Return safetensors' name of the dtype, such as `BF16`."""
        return self._entry(name)[0]

    def read(self, name: str, slices: tuple[slice, ...]) -> Array:
        """Return a slice of a tensor as float32. bfloat16 and float16 are widened exactly, float64 is rounded."""
        kind, shape, begin, _ = self._entry(name)
        view = view_array(self._files[self._places[name]][0], begin, _DTYPES[kind], shape)[slices]
        self.bytes_read += view.nbytes
        return widen(view, _DTYPES[kind])

    def _entry(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        return self._files[self._places[name]][1].entries[name]

    def _add(self, what: str, expected: str = "", hint: str = "") -> None:
        self.problems.append(Problem(path="", what=what, expected=expected, hint=hint))

    def _file_names(self) -> list[str]:
        index = self.folder / INDEX_FILE
        if not index.is_file():
            if (self.folder / WEIGHTS_FILE).is_file():
                return [WEIGHTS_FILE]
            pickled = sorted(file.name for file in self.folder.glob("*.bin")) if self.folder.is_dir() else []
            also = f"; {pickled[0]} is a pickle, which is never read" if pickled else ""
            self._add(f"{self.folder} has no weights{also}", expected=f"{WEIGHTS_FILE}, or {INDEX_FILE} and its shards")
            return []
        try:
            shards = json.loads(read_plain_text(index))["weight_map"]
            names = sorted({str(name) for name in shards.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self._add(f"{index} is damaged: {error!r}", expected='{"weight_map": {tensor: file}}')
            return []
        # An index of unknown origin must not name files outside of its directory.
        outside = [name for name in names if Path(name).name != name]
        if outside:
            self._add(f"{index} names files elsewhere: {', '.join(outside)}", expected="names of files beside it")
        return [name for name in names if name not in outside]

    def _open(self, file: str) -> None:
        path = self.folder / file
        if not path.is_file():
            self._add(f"{path} is missing", expected="every shard that the index names", hint="download it again")
            return
        # An empty file cannot be mapped.
        data = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        try:
            header = read_header(data, str(path), _LONGEST_HEADER)
        except CheckpointError as error:
            self._add(str(error), hint="download it again")
            return
        self._files[file] = data, header
        for name, (kind, shape, begin, end) in header.entries.items():
            size = int(np.prod(shape, dtype=np.int64))
            if kind in _DTYPES and end - begin != size * storage_dtype(_DTYPES[kind]).itemsize:
                self._add(f"{path} is damaged: {name} has {end - begin} bytes for the shape {list(shape)}")
            self._places[name] = file


def widen(values: Array, dtype: str) -> Array:
    """Return values as float32; bfloat16 values are given as their bits, uint16."""
    if dtype == "bfloat16":
        # bfloat16 is the upper half of float32.
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def narrow(values: Array, dtype: str) -> Array:
    """Round float32 values to a dtype, to nearest with ties to even; bfloat16 is returned as its bits, uint16."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Adds just under half of the last kept bit, and one more if that bit is odd: ties round to even.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding could carry a NaN's low bits into its exponent and make it an infinity.
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def weight_problems(weights: Weights, tensors: TensorMap, is_ignored: Any) -> Iterator[Problem]:
    """Yield problems of the files, and of tensors that do not fit; `is_ignored(name)` are known to be superfluous."""
    yield from weights.problems
    expected = {piece.source: piece.shape for tensor in tensors.values() for piece in tensor.pieces}
    found = set(weights.names)
    missing = [name for name in expected if name not in found]
    # A damaged file explains missing tensors already.
    if missing and not weights.problems:
        yield Problem(path="", what=f"{weights.folder}: missing: {_listed(missing)}")
    left = sorted(name for name in found if name not in expected and not is_ignored(name))
    if left:
        yield Problem(path="", what=f"{weights.folder}: not expected: {_listed(left)}")
    for name, shape in expected.items():
        if name in found and weights.shape(name) != shape:
            what = f"{weights.folder}: {name} has another shape than config.json says"
            yield Problem(path="", what=what, expected=str(list(shape)), got=str(list(weights.shape(name))))
        if name in found and weights.dtype(name) not in _DTYPES:
            what = f"{weights.folder}: {name} has a dtype that cannot be trained"
            yield Problem(path="", what=what, expected=", ".join(_DTYPES), got=weights.dtype(name))


def _listed(names: Iterable[str], most: int = 8) -> str:
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return f"{', '.join(every[:most])}{more}"
