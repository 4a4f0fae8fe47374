"""One rank's file: the safetensors format, written and read as bytes so that every dtype works without a framework.

The format: eight bytes with the length of the header (little endian), the header as JSON, the data without
gaps (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_trainer.checkpoint.dtypes import safetensors_name, storage_dtype
from hp_trainer.exceptions import CheckpointError

CHECKSUM_BLOCK = 4 * 2**20


@dataclass(frozen=True)
class Entry:
    """One array of a file: `data` has the storage dtype of `dtype` and is contiguous."""

    key: str
    dtype: str
    data: np.ndarray


@dataclass(frozen=True)
class Header:
    """Header of a file: key -> (safetensors dtype, shape, first byte, end byte) within the file."""

    entries: Mapping[str, tuple[str, tuple[int, ...], int, int]]
    metadata: Mapping[str, str]


def file_parts(entries: Sequence[Entry], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file, part by part; arrays are not copied.

    Larger items come first, which aligns every array.
    """
    ordered = sorted(entries, key=lambda entry: (-entry.data.itemsize, entry.key))
    yield from header_parts([(entry.key, entry.dtype, entry.data.shape) for entry in ordered], metadata)
    for entry in ordered:
        yield bytes_of(entry.data)


def header_parts(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the bytes that come before the data of a file.

    Args:
        tensors: (key, dtype, shape) of each array, in the order in which their bytes follow.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for key, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * storage_dtype(dtype).itemsize
        header[key] = {"dtype": safetensors_name(dtype), "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The data that follows is aligned to 8 bytes, so that it can be mapped and viewed.
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text


def read_header(file: np.ndarray, where: str, longest: int) -> Header:
    """Return the header of a mapped file (uint8 of shape `[size]`), checked against its size.

    Args:
        longest: bytes that the header may have.

    Raises:
        CheckpointError: the file, called `where`, is no whole safetensors file.
    """
    if file.size < 8:
        raise CheckpointError(f"{where} is no safetensors file: it has {file.size} bytes")
    length = int.from_bytes(file[:8].tobytes(), "little")
    # Before it is read: a damaged length must not ask for more memory than the file has.
    if length > min(longest, file.size - 8):
        raise CheckpointError(f"{where} is damaged: its header should have {length} bytes")
    try:
        header = json.loads(file[8 : 8 + length].tobytes())
        metadata = dict(header.pop("__metadata__", {}))
        entries = {key: _entry(value, 8 + length) for key, value in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: its header cannot be read") from error
    end = max((entry[3] for entry in entries.values()), default=8 + length)
    if end != file.size:
        raise CheckpointError(f"{where} is damaged: {end} bytes are expected by its header, it has {file.size}")
    return Header(entries, metadata)


def checksums(data: np.ndarray) -> list[int]:
    """Return the CRC-32 of each 4 MiB of the bytes of a contiguous array."""
    view = bytes_of(data)
    return [zlib.crc32(view[i : i + CHECKSUM_BLOCK]) for i in range(0, len(view), CHECKSUM_BLOCK)]


def block_checksum(data: np.ndarray, block: int) -> int:
    """Return the CRC-32 of one block of a mapped array of bytes."""
    return zlib.crc32(data[block * CHECKSUM_BLOCK : (block + 1) * CHECKSUM_BLOCK].data)


def view_array(file: np.ndarray, begin: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array of a mapped file that starts at byte `begin`, without copying."""
    kind = storage_dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    return np.frombuffer(file[begin : begin + size], dtype=kind).reshape(shape)


def _entry(value: dict[str, Any], base: int) -> tuple[str, tuple[int, ...], int, int]:
    begin, end = (int(offset) for offset in value["data_offsets"])
    shape = tuple(int(size) for size in value["shape"])
    if not 0 <= begin <= end:
        raise ValueError(f"data offsets {begin}, {end}")
    return str(value["dtype"]), shape, base + begin, base + end


def bytes_of(data: np.ndarray) -> memoryview:
    """Return the bytes of a contiguous array without a copy."""
    # As uint8 first: a memoryview casts neither empty arrays nor every dtype.
    return data.reshape(-1).view(np.uint8).data
