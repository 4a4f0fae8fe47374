"""Folders of `torch.distributed.checkpoint`: written for its `load`, and read without trusting their pickles.

Such a folder has files of tensors in torch's format, and `.metadata`, a pickle of a few dataclasses. The pickle is
parsed as data, and the dataclasses are created here from checked fields; no code of the pickle runs. Tensors are read
by torch's `weights_only` unpickler, which creates tensors only.

Python's unpickler, even restricted to some classes, sets attributes on objects found by name and allocates memory for
any memo index. The parser knows only the opcodes that dataclasses, containers, numbers and strings need. Its time and
memory grow with the length of the file only."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import pickletools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
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
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from hp_trainer.checkpoint import Box, SavedTensor
from hp_trainer.checkpoint.shard_file import cover_exactly
from hp_trainer.exceptions import CheckpointError, ExportError

_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}
_IGNORED = {"PROTO", "FRAME"}


@dataclass(frozen=True, eq=False)
class Name:
    """A global name of a module, not imported."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """An object that unpickling would create by calling `kind` with `arguments`, and then give a state."""

    kind: Name
    arguments: tuple[Any, ...]
    state: Any = None


class Pairs(list[tuple[Any, Any]]):
    """A dictionary as a list of (key, value); nothing is hashed."""


def read_pickle_tree(data: bytes) -> Any:
    """Return the contents of a pickle: constants, integers, strings, tuples, lists, `Pairs`, `Name` and `Made`.

    Raises:
        ValueError: it is damaged, or has contents of other kinds.

    Examples:
        >>> import pickle
        >>> read_pickle_tree(pickle.dumps({"a": (1, True)}))
        [('a', (1, True))]
    """
    reader = _PickleParser()
    try:
        # genops decodes opcodes without executing them. O(bytes).
        for opcode, argument, position in pickletools.genops(data):
            # What follows is ignored, as Python's unpickler does.
            if opcode.name == "STOP":
                return reader.stack[-1]
            reader.read(opcode.name, argument, position)
    # Empty stacks, unknown memo indices and arguments of other types.
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError("it is not a valid pickle") from error
    raise ValueError("it ends too early")


class _PickleParser:
    """State of the parser: the stack of values, the positions of marks in it, and the memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self, opcode: str, argument: Any, position: int) -> None:
        """Process one opcode."""
        if opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in _LITERALS:
            self.stack.append(argument)
        elif opcode in _OPCODES:
            _OPCODES[opcode](self, argument)
        elif opcode not in _IGNORED:
            raise ValueError(f"byte {position} has opcode {opcode}, which metadata do not need")

    def empty_list(self, _: Any) -> None:
        self.stack.append([])

    def empty_pairs(self, _: Any) -> None:
        self.stack.append(Pairs())

    def mark(self, _: Any) -> None:
        self._marks.append(len(self.stack))

    def marked_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._marked()))

    def append(self, _: Any) -> None:
        self._extend([self.stack.pop()])

    def appends(self, _: Any) -> None:
        self._extend(self._marked())

    def set_item(self, _: Any) -> None:
        self._add_pairs(self._last(2))

    def set_items(self, _: Any) -> None:
        self._add_pairs(self._marked())

    def name(self, _: Any) -> None:
        self._push_name(*self._last(2))

    def joined_name(self, argument: str) -> None:
        # GLOBAL (protocol 2) has module and name in one text. STACK_GLOBAL takes them from the stack.
        self._push_name(*argument.split(" ", 1))

    def make(self, _: Any) -> None:
        kind, arguments = self._last(2)
        if type(kind) is not Name or type(arguments) is not tuple:
            raise ValueError("it calls something other than a global name")
        self.stack.append(Made(kind, arguments))

    def build(self, _: Any) -> None:
        made, state = self._last(2)
        # Not on a `Name`: unpickling would set attributes of a class or module then.
        if type(made) is not Made or made.state is not None:
            raise ValueError("it sets the state of something that it did not create, or twice")
        made.state = state
        self.stack.append(made)

    # The memo is a dictionary: an index of 2**32 costs one entry, not an array of that length.
    def memoize(self, index: int | None) -> None:
        # MEMOIZE (protocol 4) numbers entries itself; BINPUT states the index.
        self._memo[len(self._memo) if index is None else index] = self.stack[-1]

    def recall(self, index: int) -> None:
        self.stack.append(self._memo[index])

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("it is not a valid pickle")
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def _marked(self) -> list[Any]:
        start = self._marks.pop()
        found = self.stack[start:]
        del self.stack[start:]
        return found

    def _extend(self, values: list[Any]) -> None:
        # `Pairs` is a subclass of list, so isinstance would accept a dictionary.
        if type(self.stack[-1]) is not list:
            raise ValueError("it appends to something other than a list")
        self.stack[-1].extend(values)

    def _add_pairs(self, flat: list[Any]) -> None:
        if type(self.stack[-1]) is not Pairs or len(flat) % 2:
            raise ValueError("it sets items of something other than a dictionary")
        self.stack[-1].extend(zip(flat[::2], flat[1::2], strict=True))

    def _push_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("it has a global name that is not a string")
        self.stack.append(Name(module, name))


def _tuple_of(count: int) -> Callable[[_PickleParser, Any], None]:
    return lambda reader, _: reader.stack.append(tuple(reader._last(count)))


_OPCODES: dict[str, Callable[[_PickleParser, Any], None]] = {
    "EMPTY_LIST": _PickleParser.empty_list,
    "EMPTY_DICT": _PickleParser.empty_pairs,
    "MARK": _PickleParser.mark,
    "TUPLE": _PickleParser.marked_tuple,
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "APPEND": _PickleParser.append,
    "APPENDS": _PickleParser.appends,
    "SETITEM": _PickleParser.set_item,
    "SETITEMS": _PickleParser.set_items,
    "STACK_GLOBAL": _PickleParser.name,
    "GLOBAL": _PickleParser.joined_name,
    "REDUCE": _PickleParser.make,
    "NEWOBJ": _PickleParser.make,
    "BUILD": _PickleParser.build,
    "MEMOIZE": _PickleParser.memoize,
    "BINPUT": _PickleParser.memoize,
    "LONG_BINPUT": _PickleParser.memoize,
    "BINGET": _PickleParser.recall,
    "LONG_BINGET": _PickleParser.recall,
}


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_T = TypeVar("_T")


def parse_metadata(data: bytes) -> Metadata:
    """Return the metadata that the bytes of a `.metadata` describe.

    Raises:
        ValueError: the bytes are damaged or no metadata, name a file outside of the folder, or have a tensor whose
            chunks do not cover it exactly (torch would leave memory uninitialized).

    Examples:
        >>> parse_metadata(b"damaged")
        Traceback (most recent call last):
        ...
        ValueError: byte 0 has opcode DICT, which metadata do not need
    """
    return _Parser().metadata(read_pickle_tree(data))


class _Parser:
    """Converts a pickle tree to metadata. Objects that the pickle shares are converted once."""

    def __init__(self) -> None:
        self._converted: dict[tuple[int, Callable[[Any], Any]], Any] = {}
        self._covered: set[tuple[int, torch.Size]] = set()

    def metadata(self, tree: Any) -> Metadata:
        fields = _fields(tree, Metadata)
        saved = {name: self.tensor(name, value) for name, value in _pairs(fields.get("state_dict_metadata"))}
        stored = [(self._index(key), self._place(value)) for key, value in _pairs(fields.get("storage_data"))]
        return Metadata(saved, storage_data=dict(stored), storage_meta=StorageMeta())

    def tensor(self, name: Any, tree: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if type(name) is not str:
            raise ValueError("the name of a tensor is not a string")
        if _is(tree, BytesStorageMetadata):
            return BytesStorageMetadata()
        fields = _fields(tree, TensorStorageMetadata)
        dtype, size = _dtype_of(name, fields.get("properties")), self._size(fields.get("size"))
        chunks = self._once(fields.get("chunks"), self._chunks)
        self._check_cover(name, chunks, size)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)

    def _check_cover(self, name: str, chunks: list[ChunkStorageMetadata], size: torch.Size) -> None:
        # Once per list of chunks: a small file whose tensors share a long list would otherwise take hours.
        if (id(chunks), size) in self._covered:
            return
        reason = cover_exactly([Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks], tuple(size))
        if reason is not None:
            raise ValueError(f"tensor {name!r}: {reason}")
        self._covered.add((id(chunks), size))

    def _chunks(self, tree: Any) -> list[ChunkStorageMetadata]:
        if type(tree) is not list:
            raise ValueError("a tensor has no list of chunks")
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
        # A path with folders could read any file of the machine.
        if type(name) is not str or name in ("", ".", "..") or Path(name).name != name:
            raise ValueError(f"it names the file {_shown(name)}, which is not in the folder")
        if fields.get("transform_descriptors"):
            raise ValueError("its tensors are transformed, for example compressed; save them untransformed")
        return _StorageInfo(name, _count(fields.get("offset")), _count(fields.get("length")))

    def _once(self, tree: Any, convert: Callable[[Any], _T]) -> _T:
        # Keyed by id: the tree stays alive as long as this parser, so no other object gets the same id. And by
        # `convert`: an object that was valid as one kind may be used where another is required.
        key = id(tree), convert
        if key not in self._converted:
            self._converted[key] = convert(tree)
        converted: _T = self._converted[key]
        return converted


def _is(tree: Any, kind: type) -> bool:
    return type(tree) is Made and (tree.kind.module, tree.kind.name) == (kind.__module__, kind.__qualname__)


def _fields(tree: Any, kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass of this kind.

    Raises:
        ValueError: it is something else, or has fields that the dataclass lacks.
    """
    # Dataclasses are pickled by state; arguments would be another constructor's.
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
    # `type`, not isinstance, since a pickle may have booleans.
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a size or a file offset is not an integer from 0 to 2**63")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a string, got {_shown(value)}")
    return value


def _dtype_of(name: str, tree: Any) -> torch.dtype:
    """Return the dtype of a tensor's properties, whose state is (dtype, layout, ...)."""
    # Torch pickles these by a state tuple, not by named fields.
    state = tree.state if _is(tree, TensorProperties) else None
    dtype = state[0] if type(state) is tuple and len(state) == 5 else None
    if type(dtype) is not Name or dtype.module != "torch" or dtype.name not in _DTYPES:
        raise ValueError(f"tensor {name!r} has no dtype")
    layout = state[1]
    if type(layout) is not Made or layout.kind.name != "_get_layout" or layout.arguments != ("torch.strided",):
        raise ValueError(f"tensor {name!r} is not dense")
    return _DTYPES[dtype.name]


def _shown(tree: Any) -> str:
    """Describe a tree for a message, briefly: it may be huge or contain itself."""
    if type(tree) is str:
        return repr(tree[:100])
    if type(tree) is Made:
        return f"{tree.kind.module}.{tree.kind.name}"[:100]
    return f"the name {tree.module}.{tree.name}"[:100] if type(tree) is Name else type(tree).__name__


ReadBox = Callable[[str, Box], np.ndarray]


class DistributedCheckpoints:
    """The format `dcp`; see `hp_trainer.checkpoint.CheckpointFormat`."""

    def write(self, folder: Path, tensors: Mapping[str, SavedTensor], read: ReadBox) -> None:
        """Write a folder that `torch.distributed.checkpoint.load(state, checkpoint_id=folder)` reads.

        One saved chunk of a tensor is in memory at a time.

        Raises:
            ExportError: torch could not write it.
        """
        try:
            # Without a process group: one process writes everything.
            with _without_group():
                dcp.save({}, checkpoint_id=str(folder), planner=_ChunkPlanner(tensors, read), no_dist=True)
        except dcp.api.CheckpointException as error:
            raise ExportError(f"{folder} cannot be written: {_reasons(error)}") from error

    def open(self, folder: Path) -> DistributedCheckpoint:
        """Open a folder; for errors see `DistributedCheckpoint`."""
        return DistributedCheckpoint(folder)


class DistributedCheckpoint:
    """A folder that `torch.distributed.checkpoint.save` wrote on any number of ranks.

    Raises:
        CheckpointError: there is no such folder, or its metadata are damaged or contain other objects.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = _Reader(folder)
        self._saved = self._reader.metadata.state_dict_metadata

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return name -> (dtype, shape) of the tensors; other objects, which are pickled, are left out."""
        return {
            name: (str(saved.properties.dtype).removeprefix("torch."), tuple(saved.size))
            for name, saved in self._saved.items()
            if isinstance(saved, TensorStorageMetadata)
        }

    def read(self, name: str) -> np.ndarray:
        """Return a full tensor in its storage dtype (uint16 for bfloat16).

        Raises:
            CheckpointError: it is damaged.
        """
        saved = self._saved[name]
        try:
            # Uninitialized is safe, because `parse_metadata` has checked that chunks cover the tensor.
            full = torch.empty(saved.size, dtype=saved.properties.dtype)
            with _without_group():
                dcp.load({name: full}, storage_reader=self._reader, no_dist=True)
        except (Exception, dcp.api.CheckpointException) as error:
            # A damaged file can make torch raise anything; its own CheckpointException is no subclass of Exception.
            raise CheckpointError(f"{self._folder}: tensor {name!r} cannot be read: {_reasons(error)}") from error
        return (full.view(torch.uint16) if full.dtype == torch.bfloat16 else full).numpy()


class _ChunkPlanner(SavePlanner):
    """Plans writing saved tensors, chunk by chunk as they are saved already."""

    def __init__(self, tensors: Mapping[str, SavedTensor], read: ReadBox) -> None:
        self._tensors, self._read = tensors, read

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the tensors are not in memory."""

    def create_local_plan(self) -> SavePlan:
        """Return one item per chunk."""
        return SavePlan([item for name, saved in self._tensors.items() for item in _items(name, saved)])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of the only process, and the metadata."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read the chunk to be written next."""
        name, data = write_item.index.fqn, write_item.tensor_data
        assert data is not None
        values = self._read(name, Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))
        # A copy: torch warns about arrays that are read-only, as that of the state is.
        tensor = torch.from_numpy(np.array(values))
        return tensor.view(data.properties.dtype) if self._tensors[name].dtype == "bfloat16" else tensor


class _Reader(dcp.FileSystemReader):
    """Torch's reader of a folder, with checked metadata."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # Before torch reads it: its own reader would unpickle the file.
        self.metadata = _read_metadata(folder)
        _check_files(folder, self.metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, read once."""
        return self.metadata


@contextlib.contextmanager
def _without_group() -> Iterator[None]:
    """Silence torch's warning that it assumes a single process because there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _read_metadata(folder: Path) -> Metadata:
    file = folder / ".metadata"
    if not file.is_file():
        raise CheckpointError(f"{folder} is no folder of torch.distributed.checkpoint: it has no file .metadata")
    try:
        return parse_metadata(file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged or no metadata: {error}") from error


def _check_files(folder: Path, metadata: Metadata) -> None:
    """Raise if files are too short for their chunks, before memory is allocated for the tensors.

    Raises:
        CheckpointError: naming the tensor and the file.
    """
    lengths: dict[str, int] = {}
    for name, saved in metadata.state_dict_metadata.items():
        for chunk in saved.chunks if isinstance(saved, TensorStorageMetadata) else ():
            stored = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            needed = math.prod(chunk.sizes) * saved.properties.dtype.itemsize
            # A small file may claim huge tensors: checked before they are allocated.
            if stored is None or stored.length < needed:
                raise CheckpointError(f"{folder}: tensor {name!r} cannot be read: no file has all of its bytes")
            file = folder / stored.relative_path
            if stored.relative_path not in lengths:
                lengths[stored.relative_path] = file.stat().st_size if file.is_file() else -1
            length = lengths[stored.relative_path]
            if length < stored.offset + stored.length:
                found = "is missing" if length < 0 else f"has {length} bytes, expected {stored.offset + stored.length}"
                raise CheckpointError(f"{folder}: tensor {name!r} cannot be read: {file.name} {found}")


def _items(name: str, saved: SavedTensor) -> list[WriteItem]:
    properties, size = TensorProperties(dtype=getattr(torch, saved.dtype)), torch.Size(saved.shape)
    chunks = [ChunkStorageMetadata(torch.Size(chunk.box.offset), torch.Size(chunk.box.shape)) for chunk in saved.chunks]
    return [
        WriteItem(
            MetadataIndex(name, chunk.offsets, index),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, size),
        )
        for index, chunk in enumerate(chunks)
    ]


def _reasons(error: BaseException) -> str:
    """Return the ranks' errors of a `CheckpointException`, or the error itself, on one line."""
    failures = getattr(error, "failures", None)
    found = [failure[0] for failure in failures.values()] if failures else [error]
    return "; ".join(f"{type(one).__name__}: {one}".splitlines()[0] for one in found)
