"""Messages between processes of one host through shared memory.

Gloo sends through sockets: the kernel copies every byte in and out, and a thread of gloo takes processor time from the
computation. Here the sender copies a message into its *outbox*, memory that the other processes of the host have
mapped, and sends only its place over gloo. The receiver copies it out when it waits for the message. Rows of a tensor
and sequences of tensors are written straight into the outbox (`GatheredRows`, `JoinedTensors`), and a receiver that
only computes with a message reads it in place.

- Gloo does not report how many bytes it has received. So the receiver writes a random mark to the end of its tensor
  before: where the mark is still there, a note with the place has arrived and not the message.
- A place in an outbox is reused once every receiver of its message has copied it out, which each one reports by a byte
  in the outbox. A sender never waits for that: a message that does not fit now is sent over gloo.
- Messages take turns through the outbox. What a receiver has just read is still in its cache, and writing there takes
  up to eight times as long (2 MiB: 0.9 ms instead of 0.1 on an EPYC), because each line is first taken from that cache.
- An outbox has no name: it is a file in memory, which peers open through `/proc`. It ends with the last process that
  has mapped it, killed ones included.
- A rank uses its outbox for a peer only after that peer has reported, by another byte, that it has mapped it.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import json
import math
import mmap
import os
import platform as machine
import secrets
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hp_dtensor.exceptions import CollectiveError

if TYPE_CHECKING:
    import torch.distributed as dist

Tensor = torch.Tensor

OUTBOX_BYTES = 2**26
"""Bytes of a rank's messages that receivers have not copied out. Pages that no message has used take no memory."""

ROTATION_BYTES = 2**25
"""Messages are within this much of the outbox if they fit there: more than a cache, and half of the outbox."""

SMALLEST_BYTES = 2**19
"""Smaller messages are sent over gloo, which is as fast up to about this size."""

_NUM_SLOTS = 1024
_ALIGNMENT = 64
_FILE_NAME = "hp_outbox"
_NONCE_BYTES = 16
_NOTE = struct.Struct(f"<{_NONCE_BYTES}sqqq")  # the outbox's nonce, the size of the message, slot and offset


class Place(NamedTuple):
    """The position of a message in an outbox; `slot` is the byte that its receiver clears when it has copied it."""

    slot: int
    offset: int


class GatheredRows:
    """A message of the rows `index` of a contiguous tensor, gathered when it is sent."""

    def __init__(self, x: Tensor, index: Tensor) -> None:
        self._x, self._index = x, index
        self.shape = (len(index), *x.shape[1:])
        self.nbytes = math.prod(self.shape) * x.element_size()

    def gathered(self, out: Tensor | None = None) -> Tensor:
        """Return the rows, as a new tensor or in `out`."""
        return torch.index_select(self._x, 0, self._index, out=out)

    @property
    def dtype(self) -> torch.dtype:
        return self._x.dtype


class JoinedTensors:
    """A message of the elements of several tensors of one dtype, copied when it is sent."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self.dtype = tensors[0].dtype
        self.shape = (sum(x.numel() for x in tensors),)
        self.nbytes = self.shape[0] * tensors[0].element_size()

    def gathered(self, out: Tensor | None = None) -> Tensor:
        """Return the elements, as a new vector or in `out`."""
        out = self._tensors[0].new_empty(self.shape) if out is None else out
        for x, part in zip(self._tensors, out.split([x.numel() for x in self._tensors]), strict=True):
            # Detached: a message is no part of autograd's graph.
            part.view(x.shape).copy_(x.detach())
        return out


Message = Tensor | GatheredRows | JoinedTensors


class SharedMemory:
    """The outbox of this rank, and those of the other ranks of its host.

    Args:
        store: the key-value store of the job, in which ranks publish their outboxes.
    """

    def __init__(self, rank: int, size: int, store: dist.Store) -> None:
        self._rank, self._store, self._host = rank, store, _host()
        self._outbox = _Outbox(size)
        self._on_host: dict[int, bool] = {}
        self._peers: dict[int, _Mapping] = {}
        store.set(_key(rank), json.dumps([self._host, *self._outbox.identity]))

    def reaches(self, peer: int) -> bool:
        """Return True if a global rank is on this host, the same on both ranks."""
        if peer not in self._on_host:
            host, *identity = json.loads(self._store.get(_key(peer)))
            self._on_host[peer] = host == self._host
            if host == self._host:
                # Where the system refuses, nothing is reported, and the peer sends its messages over gloo.
                with contextlib.suppress(OSError, ValueError):
                    self._peers[peer] = _Mapping.of_process(*identity)
                    self._peers[peer].bytes[_NONCE_BYTES + self._rank] = 1
        return self._on_host[peer]

    def put(self, x: Message, peers: list[int]) -> list[Place] | None:
        """Write a message, which is contiguous if it is a tensor, into the outbox for all of `peers`.

        Returns:
            The place for each of them. None: it does not fit now, or one of them has not mapped the outbox.
        """
        if not all(self._outbox.is_mapped_by(peer) for peer in peers):
            return None
        places = self._outbox.reserve(x.nbytes, len(peers))
        if places is not None and isinstance(x, Tensor):
            ctypes.memmove(self._outbox.mapping.address + places[0].offset, x.data_ptr(), x.nbytes)
        elif places is not None:
            x.gathered(out=self._outbox.mapping.view(places[0].offset, x.shape, x.dtype))
        return places

    def note(self, x: Message, place: Place) -> bytes:
        """Return the note that is sent instead of a tensor which has a place in the outbox."""
        return _NOTE.pack(self._outbox.nonce, x.nbytes, *place)

    def mark(self, x: Tensor) -> bytes:
        """Write a random mark to the end of a contiguous tensor that is to receive a message, and return it."""
        mark = secrets.token_bytes(_NONCE_BYTES)
        ctypes.memmove(x.data_ptr() + x.nbytes - len(mark), mark, len(mark))
        return mark

    def finish(self, x: Tensor, mark: bytes, peer: int, read: Callable[[Tensor], object] | None = None) -> None:
        """Finish a receive from `peer` into a marked tensor: if it received a note, copy the message from its place.

        Args:
            read: function that is called with the message, which it must not keep. `x` is then only memory for a
                message over gloo: one in the outbox is read there.

        Raises:
            CollectiveError: the message has fewer bytes than the tensor.
        """
        if ctypes.string_at(x.data_ptr() + x.nbytes - len(mark), len(mark)) != mark:
            if read is not None:
                read(x)
            return
        nonce, num_bytes, *place = _NOTE.unpack(ctypes.string_at(x.data_ptr(), _NOTE.size))
        outbox = self._peers.get(peer)
        is_note = outbox is not None and outbox.bytes[:_NONCE_BYTES] == nonce
        if not is_note or num_bytes != x.nbytes:
            raise CollectiveError(
                f"rank {peer} sent {num_bytes if is_note else 'fewer'} bytes, expected {x.nbytes}: the ranks are in "
                "different collectives, or in one with different sizes"
            )
        self.take(x, Place(*place), peer, read)

    def take(self, x: Tensor, place: Place, peer: int, read: Callable[[Tensor], object] | None = None) -> None:
        """Copy a message from the outbox of `peer` into a contiguous tensor, or `read` it there; release its place."""
        outbox = self._peers[peer]
        try:
            if read is None:
                ctypes.memmove(x.data_ptr(), outbox.address + place.offset, x.nbytes)
            else:
                read(outbox.view(place.offset, tuple(x.shape), x.dtype))
        finally:
            outbox.bytes[place.slot] = 0


class _Mapping:
    """A file in memory, mapped into this process."""

    def __init__(self, descriptor: int, num_bytes: int) -> None:
        self.bytes = mmap.mmap(descriptor, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor in this memory."""
        return torch.frombuffer(self.bytes, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)

    @classmethod
    def of_process(cls, process: int, descriptor: int, num_bytes: int, nonce: str) -> _Mapping:
        """Map the file that another process has open.

        Raises:
            OSError: it cannot be opened.
            ValueError: it is another file.
        """
        path = f"/proc/{process}/fd/{descriptor}"
        # The number of the process may belong to another one by now, whose files are not even opened.
        if not os.readlink(path).startswith(f"/memfd:{_FILE_NAME} "):
            raise ValueError("another process has this number")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            found = cls(opened, num_bytes)
        finally:
            os.close(opened)
        if found.bytes[:_NONCE_BYTES] != bytes.fromhex(nonce):
            raise ValueError("another process has this number")
        return found


class _Block(NamedTuple):
    start: int
    end: int
    slots: list[int]


class _Outbox:
    """Memory for this rank's messages: a nonce, a byte per rank that has mapped it, a byte per slot, the messages."""

    def __init__(self, num_ranks: int) -> None:
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        first_slot = _NONCE_BYTES + num_ranks
        self._first = _aligned(first_slot + _NUM_SLOTS)
        self._end = self._first + OUTBOX_BYTES
        self._next = self._first  # where the search for a place starts
        descriptor = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC)
        self._file = os.fdopen(descriptor, "rb")  # closes it with this object
        os.ftruncate(descriptor, self._end)
        self.mapping = _Mapping(descriptor, self._end)
        self.mapping.bytes[:_NONCE_BYTES] = self.nonce
        self.identity = [os.getpid(), descriptor, self._end, self.nonce.hex()]
        self._free_slots = [*range(first_slot, first_slot + _NUM_SLOTS)]
        self._blocks: list[_Block] = []  # in the order of their starts
        self._lock = threading.Lock()

    def is_mapped_by(self, peer: int) -> bool:
        return self.mapping.bytes[_NONCE_BYTES + peer] == 1

    def reserve(self, num_bytes: int, num_receivers: int) -> list[Place] | None:
        """Return a free place for a message, one `Place` per receiver. None: it does not fit."""
        flags = self.mapping.bytes
        with self._lock:
            self._drop_received()
            start = self._find_gap(num_bytes)
            if start is None or num_receivers > len(self._free_slots):
                return None
            slots = [self._free_slots.pop() for _ in range(num_receivers)]
            # Inside the lock: to another thread, a block whose bytes are clear has been received.
            for slot in slots:
                flags[slot] = 1
            block = _Block(start, _aligned(start + num_bytes), slots)
            bisect.insort(self._blocks, block)
            self._next = block.end
        return [Place(slot, start) for slot in slots]

    def _find_gap(self, num_bytes: int) -> int | None:
        """Return the start of the first gap that fits after the last message, or else of the first one of all."""
        turn = min(self._first + ROTATION_BYTES, self._end)
        for start, end in ((self._next, turn), (self._first, turn), (self._first, self._end)):
            for block in self._blocks:
                if block.start - start >= num_bytes:
                    break
                start = max(start, block.end)
            if start + num_bytes <= end:
                return start
        return None

    def _drop_received(self) -> None:
        flags, pending = self.mapping.bytes, []
        for block in self._blocks:
            if any(flags[slot] for slot in block.slots):
                pending.append(block)
            else:
                self._free_slots += block.slots
        self._blocks = pending


def connect_memory(rank: int, size: int, store: dist.Store | None) -> SharedMemory | None:
    """Return the shared memory of a job's rank. None where messages cannot be sent through it."""
    if store is None or size == 1:
        return None
    # The store of torch's fake process group raises RuntimeError.
    with contextlib.suppress(RuntimeError):
        # Other processors than x86-64 may show a receiver's byte to the sender before it has read the message.
        # Python lacks `memfd_create` where it was built for an old glibc, as those of uv and conda-forge are.
        if sys.platform == "linux" and machine.machine() == "x86_64" and hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):
                return SharedMemory(rank, size, store)
        # Its peers wait for this key.
        store.set(_key(rank), json.dumps([None]))
    return None


def _host() -> str:
    """Return a name for this host and user: processes with the same one can open each other's files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def _key(rank: int) -> str:
    return f"outbox/{rank}"


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
