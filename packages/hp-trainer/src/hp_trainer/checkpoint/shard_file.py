"""The safetensors file of one rank, read and written as bytes so that no framework is needed.

A file is eight bytes with the length of the header (little endian), the header as JSON, and the data without gaps
(https://github.com/huggingface/safetensors, section "Format"). Dtypes are names. NumPy has no bfloat16, so arrays hold
the bits of a value in a storage dtype: uint16 for bfloat16, otherwise the NumPy dtype of the same name.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_trainer.exceptions import CheckpointError

# name -> (safetensors name, storage dtype)
_DTYPES = {
    "float64": ("F64", "<f8"),
    "float32": ("F32", "<f4"),
    "float16": ("F16", "<f2"),
    "bfloat16": ("BF16", "<u2"),
    "int64": ("I64", "<i8"),
    "int32": ("I32", "<i4"),
    "int16": ("I16", "<i2"),
    "int8": ("I8", "|i1"),
    "uint8": ("U8", "|u1"),
    "bool": ("BOOL", "|b1"),
}
_BFLOAT16_EXPONENT = np.uint16(0x7F80)  # all ones: NaN or an infinity


def safetensors_name(dtype: str) -> str:
    """Return the safetensors name of a dtype: `float32` -> `F32`."""
    return _lookup(dtype)[0]


def storage_dtype(dtype: str) -> np.dtype:
    """Return the NumPy dtype of the bits of a dtype: uint16 for bfloat16, otherwise the one of the same name."""
    return np.dtype(_lookup(dtype)[1])


def is_finite(values: np.ndarray, dtype: str) -> bool:
    """Return True when an array in its storage dtype has neither NaN nor infinities."""
    if dtype == "bfloat16":
        # NaN and infinities have all bits of the exponent set.
        return not bool(np.any((values & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT))
    return values.dtype.kind not in "fc" or bool(np.isfinite(values).all())


def _lookup(dtype: str) -> tuple[str, str]:
    if dtype not in _DTYPES:
        raise CheckpointError(f"dtype {dtype!r} cannot be saved; expected one of {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor: the elements with `offset[i] <= index[i] < offset[i] + shape[i]`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """Return the box that contains all elements of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of two boxes, or None where it is empty."""
        begin = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = zip(self._end, other._end, begin, strict=True)
        shape = tuple(min(a, b) - start for a, b, start in ends)
        return Box(begin, shape) if all(size > 0 for size in shape) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices of this box in an array that contains the elements of the box `outer`."""
        begins = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.shape, strict=True))

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Return True when all of the box is inside a tensor of this shape."""
        return (
            len(self.offset) == len(self.shape) == len(shape)
            and all(begin >= 0 and size >= 0 for begin, size in zip(self.offset, self.shape, strict=True))
            and all(end <= size for end, size in zip(self._end, shape, strict=True))
        )

    @property
    def _end(self) -> tuple[int, ...]:
        return tuple(begin + size for begin, size in zip(self.offset, self.shape, strict=True))


def cover_exactly(boxes: Sequence[Box], shape: Sequence[int]) -> str | None:
    """Return None when the boxes cover a tensor of this shape exactly once, else a message that says why not."""
    outside = [box for box in boxes if not box.is_inside(shape)]
    if outside:
        return f"{outside[0]} is outside the shape {tuple(shape)}"
    # Sorted by the first dimension, so the inner loop ends at the first box that starts after this one.
    ordered = sorted((box for box in boxes if box.numel), key=lambda box: box.offset)
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            if shape and other.offset[0] >= box.offset[0] + box.shape[0]:
                break
            if box.intersect(other) is not None:
                return f"{box} and {other} overlap"
    # Boxes inside the shape that do not overlap cover it exactly if their sizes add up to its size.
    missing = math.prod(shape) - sum(box.numel for box in ordered)
    return f"{missing} of {math.prod(shape)} elements are in no box" if missing else None


CHECKSUM_BLOCK = 4 * 2**20


@dataclass(frozen=True)
class Entry:
    """An array to write. `data` is contiguous and has the storage dtype of `dtype`."""

    key: str
    dtype: str
    data: np.ndarray


@dataclass(frozen=True)
class Header:
    """Parsed header of a file. `entries` maps a key to (safetensors dtype, shape, start byte, end byte) in the file."""

    entries: Mapping[str, tuple[str, tuple[int, ...], int, int]]
    metadata: Mapping[str, str]


def file_parts(entries: Sequence[Entry], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file in chunks, without copying arrays; the largest item size is first, which aligns all."""
    ordered = sorted(entries, key=lambda entry: (-entry.data.itemsize, entry.key))
    yield from header_parts([(entry.key, entry.dtype, entry.data.shape) for entry in ordered], metadata)
    for entry in ordered:
        yield bytes_of(entry.data)


def header_parts(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the bytes that precede the data of `tensors`: (key, dtype, shape) in the order of their data."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for key, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * storage_dtype(dtype).itemsize
        header[key] = {"dtype": safetensors_name(dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # Pad so that the data is aligned to 8 bytes: views of a mapped file need it.
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text


def read_header(file: np.ndarray, where: str, longest: int) -> Header:
    """Parse the header, at most `longest` bytes, of a mapped file (uint8), and check it against the file's size."""
    if file.size < 8:
        raise CheckpointError(f"{where} is not a safetensors file: it has only {file.size} bytes")
    length = int.from_bytes(file[:8].tobytes(), "little")
    # Checked before the read: a damaged length could request more memory than there is.
    if length > min(longest, file.size - 8):
        raise CheckpointError(f"{where} is damaged: it states a header of {length} bytes")
    try:
        header = json.loads(file[8 : 8 + length].tobytes())
        metadata = dict(header.pop("__metadata__", {}))
        entries = {key: _header_entry(value, 8 + length) for key, value in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: its header cannot be read") from error
    # Bytes behind the last array would be data without an entry; fewer bytes, a truncated file.
    end = max((entry[3] for entry in entries.values()), default=8 + length)
    if end != file.size:
        raise CheckpointError(f"{where} is damaged: expected {end} bytes by its header, got {file.size}")
    return Header(entries, metadata)


def checksums(data: np.ndarray) -> list[int]:
    """Return the CRC-32 of every 4 MiB block of a contiguous array."""
    view = bytes_of(data)
    return [zlib.crc32(view[i : i + CHECKSUM_BLOCK]) for i in range(0, len(view), CHECKSUM_BLOCK)]


def block_checksum(data: np.ndarray, block: int) -> int:
    """Return the CRC-32 of block number `block` of an array of bytes."""
    return zlib.crc32(data[block * CHECKSUM_BLOCK : (block + 1) * CHECKSUM_BLOCK].data)


def view_array(file: np.ndarray, begin: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the array that starts at byte `begin` of a mapped file, without copying."""
    kind = storage_dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    # Without a copy: pages of a mapped file are read when they are used.
    return np.frombuffer(file[begin : begin + size], dtype=kind).reshape(shape)


def _header_entry(value: dict[str, Any], base: int) -> tuple[str, tuple[int, ...], int, int]:
    begin, end = (int(offset) for offset in value["data_offsets"])
    shape = tuple(int(size) for size in value["shape"])
    if not 0 <= begin <= end:
        raise ValueError(f"data offsets {begin}, {end}")
    return str(value["dtype"]), shape, base + begin, base + end


def bytes_of(data: np.ndarray) -> memoryview:
    """Return the bytes of a contiguous array, without copying."""
    # Viewed as uint8 first: `memoryview.cast` supports neither empty arrays nor every dtype.
    return data.reshape(-1).view(np.uint8).data
