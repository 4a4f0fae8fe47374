"""The file `.metadata` of a folder of `torch.distributed.checkpoint`: a pickle, read as data.

Its dataclasses are made here, field by field, of what was checked; nothing of the pickle is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hp_platform_torch.trainer.pickle_tree import Made, Name, Pairs, read_pickle_tree
from hp_trainer.checkpoint import Box
from hp_trainer.checkpoint.shard_file import cover_exactly

_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_T = TypeVar("_T")


def parse_metadata(data: bytes) -> Metadata:
    """Return the metadata that the bytes of a `.metadata` describe.

    Raises:
        ValueError: they are damaged or of something else, name a file outside of the folder, or have a tensor whose
            pieces do not cover it exactly (torch would leave memory unwritten).

    Example:
        >>> parse_metadata(b"damaged")
        Traceback (most recent call last):
        ...
        ValueError: byte 0 says DICT, which no metadata need
    """
    return _Parser().metadata(read_pickle_tree(data))


class _Parser:
    """Turns a tree into metadata. What the pickle holds once and refers to often is turned once."""

    def __init__(self) -> None:
        self._turned: dict[tuple[int, Callable[[Any], Any]], Any] = {}
        self._covered: set[tuple[int, torch.Size]] = set()

    def metadata(self, tree: Any) -> Metadata:
        fields = _fields(tree, Metadata)
        saved = {name: self.tensor(name, value) for name, value in _pairs(fields.get("state_dict_metadata"))}
        stored = [(self._index(key), self._place(value)) for key, value in _pairs(fields.get("storage_data"))]
        return Metadata(saved, storage_data=dict(stored), storage_meta=StorageMeta())

    def tensor(self, name: Any, tree: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if type(name) is not str:
            raise ValueError("a tensor has a name that is no text")
        if _is(tree, BytesStorageMetadata):
            return BytesStorageMetadata()
        fields = _fields(tree, TensorStorageMetadata)
        dtype, size = _dtype_of(name, fields.get("properties")), self._size(fields.get("size"))
        chunks = self._once(fields.get("chunks"), self._chunks)
        self._check_cover(name, chunks, size)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)

    def _check_cover(self, name: str, chunks: list[ChunkStorageMetadata], size: torch.Size) -> None:
        # Once for a list of pieces that tensors share, or a short file would take hours.
        if (id(chunks), size) in self._covered:
            return
        reason = cover_exactly([Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks], tuple(size))
        if reason is not None:
            raise ValueError(f"tensor {name!r}: {reason}")
        self._covered.add((id(chunks), size))

    def _chunks(self, tree: Any) -> list[ChunkStorageMetadata]:
        if type(tree) is not list:
            raise ValueError("a tensor has no list of pieces")
        return [self._once(chunk, self._chunk) for chunk in tree]

    def _chunk(self, tree: Any) -> ChunkStorageMetadata:
        fields = _fields(tree, ChunkStorageMetadata)
        return ChunkStorageMetadata(self._size(fields.get("offsets")), self._size(fields.get("sizes")))

    def _size(self, tree: Any) -> torch.Size:
        return self._once(tree, _size)

    def _index(self, tree: Any) -> MetadataIndex:
        fields = _fields(tree, MetadataIndex)
        offset = fields.get("offset")
        return MetadataIndex(_text(fields.get("fqn")), None if offset is None else self._size(offset))

    def _place(self, tree: Any) -> _StorageInfo:
        fields = _fields(tree, _StorageInfo)
        name = fields.get("relative_path")
        if type(name) is not str or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"it names the file {_shown(name)}, which is not in the folder")
        if fields.get("transform_descriptors"):
            raise ValueError("its tensors are transformed, such as compressed; save them as they are")
        return _StorageInfo(name, _count(fields.get("offset")), _count(fields.get("length")))

    def _once(self, tree: Any, turn: Callable[[Any], _T]) -> _T:
        # The tree stays alive as long as this, so that no other object gets the same id. What was good as one thing may
        # stand where another has to.
        key = id(tree), turn
        if key not in self._turned:
            self._turned[key] = turn(tree)
        turned: _T = self._turned[key]
        return turned


def _is(tree: Any, kind: type) -> bool:
    return type(tree) is Made and (tree.kind.module, tree.kind.name) == (kind.__module__, kind.__qualname__)


def _fields(tree: Any, kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass of this kind.

    Raises:
        ValueError: it is something else, or has fields that the dataclass has not.
    """
    if not _is(tree, kind) or tree.arguments:
        raise ValueError(f"expected {kind.__name__}, got {_shown(tree)}")
    known = {field.name for field in dataclasses.fields(kind)}
    fields = {}
    for name, value in _pairs(tree.state):
        if type(name) is not str or name not in known:
            raise ValueError(f"{kind.__name__} has no field {_shown(name)}")
        fields[name] = value
    return fields


def _pairs(tree: Any) -> Pairs:
    if type(tree) is not Pairs:
        raise ValueError(f"expected a dictionary, got {_shown(tree)}")
    return tree


def _size(tree: Any) -> torch.Size:
    if not _is(tree, torch.Size) or len(tree.arguments) != 1 or type(tree.arguments[0]) is not tuple:
        raise ValueError(f"expected a torch.Size, got {_shown(tree)}")
    return torch.Size([_count(value) for value in tree.arguments[0]])


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a size or a place in a file is no whole number from 0 to 2**63")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a text, got {_shown(value)}")
    return value


def _dtype_of(name: str, tree: Any) -> torch.dtype:
    """Return the dtype of a tensor's properties, whose state is (dtype, layout, ...)."""
    state = tree.state if _is(tree, TensorProperties) else None
    dtype = state[0] if type(state) is tuple and len(state) == 5 else None
    if type(dtype) is not Name or dtype.module != "torch" or dtype.name not in _DTYPES:
        raise ValueError(f"tensor {name!r} has no dtype")
    layout = state[1]
    if type(layout) is not Made or layout.kind.name != "_get_layout" or layout.arguments != ("torch.strided",):
        raise ValueError(f"tensor {name!r} is not dense")
    return _DTYPES[dtype.name]


def _shown(tree: Any) -> str:
    """Name what a tree is, for a message; its contents may be endless."""
    if type(tree) is str:
        return repr(tree[:100])
    if type(tree) is Made:
        return f"{tree.kind.module}.{tree.kind.name}"[:100]
    return f"the name {tree.module}.{tree.name}"[:100] if type(tree) is Name else type(tree).__name__
