"""Process groups over sockets, for frameworks without collectives on a device, or before they are mapped.

`SocketProcesses` is mixed into a platform's class and implements `connect`. Ranks meet at the address of rank 0, and
then connect in pairs. Data passes through host memory as NumPy arrays, so every dtype works and nothing of the
framework is used. A thread per peer reads what arrives, so two ranks may send to each other at once. Reductions are in
rank order: the results are equal on all ranks and in every run. A framework's own collectives are faster.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import json
import math
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hp_dtensor.comm.meeting_point import MeetingPoint
from hp_dtensor.comm.process_group import DONE, PendingBytes, ProcessGroup, Rows, Work, no_average_of
from hp_dtensor.comm.world import NoCommunicationGroup, World
from hp_dtensor.exceptions import CollectiveError, PlatformError
from hp_dtensor.platform.interface import Platform, ProcessInterface

Tensor = Any
Array = np.ndarray[Any, Any]
Channel = tuple[int, bytes]  # a peer's rank, and the digest of a group and a kind of message

HEADER = struct.Struct("!8sQ")
"""Before each message: the digest of its channel, and its length in bytes."""
SMALL_BYTES = 1 << 16
"""Up to this size, all ranks exchange everything in one round and reduce it themselves."""
_GREETING_SECONDS = 5.0
_LONGEST_LINE = 1 << 26  # the addresses of a million ranks


class SocketProcesses(ProcessInterface):
    """The part of a platform that joins jobs, by sockets alone. Mixed in before `Platform`."""

    def connect(self, rank: int, size: int, address: str, timeout_seconds: float = 300.0, local_rank: int = 0) -> World:
        """Join a job; see `ProcessInterface.connect`."""
        if TYPE_CHECKING:
            assert isinstance(self, Platform)
        self._world = SocketWorld(rank, size, self, address, timeout_seconds)
        return self._world


class SocketWorld(World):
    """The ranks of a job, connected in pairs.

    Attributes:
        failures: by the ranks of a group, the error after which it cannot be used. A group of the same ranks that is
            created later has the same channels, so it fails too.
    """

    def __init__(self, rank: int, size: int, platform: Platform, address: str, timeout_seconds: float) -> None:
        super().__init__(rank, size, platform)
        self._timeout = timeout_seconds
        self._arrived: dict[tuple[Channel, int], bytes] = {}
        self._num_arrived: Counter[Channel] = Counter()
        self._num_expected: Counter[Channel] = Counter()
        self._changed = threading.Condition()
        self._lost: set[int] = set()
        self.failures: dict[tuple[int, ...], str] = {}
        self._peers = _connect_all(MeetingPoint(rank, size, address, rank == 0, timeout_seconds)) if size > 1 else {}
        self._sending = {peer: threading.Lock() for peer in self._peers}
        for peer in self._peers:
            threading.Thread(target=self._read, args=(peer,), daemon=True, name=f"messages of rank {peer}").start()

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        rank = ranks.index(self.rank)
        if len(ranks) == 1:
            return NoCommunicationGroup(ranks, rank, self.platform)
        assert self.platform is not None
        return SocketGroup(ranks, rank, self.platform, self)

    def send(self, channel: Channel, data: Any) -> None:
        """Send an object with a buffer to a peer."""
        view = memoryview(data).cast("B")
        try:
            # One message at a time: other threads of this rank may send to the same peer.
            with self._sending[channel[0]]:
                self._peers[channel[0]].sendall(HEADER.pack(channel[1], len(view)))
                self._peers[channel[0]].sendall(view)
        except OSError as error:
            raise CollectiveError(f"rank {self.rank} cannot send to rank {channel[0]}: {error}") from error

    def expect(self, channel: Channel) -> int:
        """Return the number, for `take`, of the next message of a channel. Numbers are given in order of calls."""
        with self._changed:
            self._num_expected[channel] += 1
            return self._num_expected[channel]

    def take(self, channel: Channel, number: int, timeout_seconds: float | None = None) -> bytes | None:
        """Return a message, or None after a timeout. A peer that is lost, or silent for long, is a CollectiveError."""
        seconds = self._timeout if timeout_seconds is None else timeout_seconds
        key, peer = (channel, number), channel[0]
        with self._changed:
            self._changed.wait_for(lambda: key in self._arrived or peer in self._lost, seconds)
            found = self._arrived.pop(key, None)
        if found is None and (peer in self._lost or timeout_seconds is None):
            why = "has ended" if peer in self._lost else f"has sent nothing for {seconds:g} s"
            raise CollectiveError(f"rank {self.rank} waits for a message of rank {peer}, which {why}")
        return found

    def close(self) -> None:
        super().close()
        for peer in self._peers.values():
            # `close` alone leaves the connection open while the thread that reads it waits for data.
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _read(self, peer: int) -> None:
        source = self._peers[peer]
        try:
            while True:
                digest, length = HEADER.unpack(_read_exactly(source, HEADER.size))
                data = _read_exactly(source, length)
                with self._changed:
                    channel = (peer, digest)
                    self._num_arrived[channel] += 1
                    self._arrived[channel, self._num_arrived[channel]] = data
                    self._changed.notify_all()
        except OSError:
            with self._changed:
                self._lost.add(peer)
                self._changed.notify_all()


def _connect_all(point: MeetingPoint) -> dict[int, socket.socket]:
    """Return a connection to each other rank, or raise a PlatformError if they did not join in time."""
    ip = point.reach()
    # On all interfaces, which lead to this machine by other addresses too, unless the job is local.
    host = ip if ipaddress.ip_address(ip.partition("%")[0]).is_loopback else ""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        listening = socket.create_server(
            (host, point.port if point.serves else 0), family=family, backlog=2 * point.size
        )
        with listening as server, point.waiting_for_ranks():
            return _connect_pairs(point, (ip, point.port), server, time.monotonic() + point.remaining_seconds())
    except OSError as error:
        raise PlatformError(
            f"rank {point.rank} of {point.size} could not join the job at {point.address} within "
            f"{point.timeout_seconds:g} s: {error}. Check that every rank was started, and its log"
        ) from error


def _connect_pairs(point: MeetingPoint, meeting: Any, server: socket.socket, deadline: float) -> dict[int, Any]:
    """Return a connection to each other rank. `meeting` is (IP address, port) of rank 0."""
    rank, size, where = point.rank, point.size, _meet(point.rank, point.size, meeting, server, deadline)
    if rank == 0:
        return where
    peers = {0: where[0]}
    # Lower ranks accept, higher ranks connect.
    for peer in range(1, rank):
        peers[peer] = _connect(where[peer], deadline)
        peers[peer].sendall(struct.pack("!I", rank))
    expected = set(range(rank + 1, size))
    arrivals = _arrivals(server, deadline, lambda accepted: struct.unpack("!I", _read_exactly(accepted, 4)))
    while expected:
        accepted, _, (peer,) = next(arrivals)
        if peer in expected:
            expected.remove(peer)
            peers[peer] = _ready(accepted)
    return peers


def _meet(rank: int, size: int, meeting: Any, server: socket.socket, deadline: float) -> dict[int, Any]:
    """Exchange addresses through rank 0.

    Rank 0 returns its connection to each other rank. The others return their connection to rank 0, and the addresses of
    the rest.
    """
    if rank > 0:
        to_first = _connect(meeting, deadline)
        _send_line(to_first, [rank, size, server.getsockname()[1]])
        to_first.settimeout(max(0.01, deadline - time.monotonic()))
        table = _read_line(to_first)
        return {0: _ready(to_first), **{int(peer): tuple(where) for peer, where in table.items()}}
    connections: dict[int, Any] = {}
    table = {}
    arrivals = _arrivals(server, deadline, lambda accepted: tuple(map(int, _read_line(accepted))))
    while len(connections) < size - 1:
        accepted, seen_as, (peer, its_size, port) = next(arrivals)
        if its_size != size or peer in connections:
            raise OSError(f"rank {peer} of {its_size} ranks came to a job of {size}, or came twice")
        connections[peer], table[peer] = accepted, (seen_as, port)
    for accepted in connections.values():
        _send_line(accepted, table)
    return {peer: _ready(accepted) for peer, accepted in connections.items()}


def _arrivals(
    server: socket.socket, deadline: float, greeting: Callable[[socket.socket], Any]
) -> Iterator[tuple[socket.socket, str, Any]]:
    """Yield each connection, where it came from, and its greeting. Those without one, such as probes, are closed."""
    while (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        accepted, (seen_as, *_) = server.accept()
        accepted.settimeout(min(left, _GREETING_SECONDS))
        try:
            greeted = greeting(accepted)
        except (OSError, ValueError, TypeError):
            accepted.close()
        else:
            yield accepted, seen_as, greeted
    raise TimeoutError("timed out")


def _connect(where: Any, deadline: float) -> socket.socket:
    """Return a connection to (IP address, port), trying again until `deadline` on the monotonic clock."""
    while True:
        try:
            return _ready(socket.create_connection(where, timeout=max(0.01, deadline - time.monotonic())))
        except OSError:
            # Rank 0 may not listen yet.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _ready(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    # Small messages must not wait for more data.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _send_line(connection: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    connection.sendall(struct.pack("!I", len(data)) + data)


def _read_line(connection: socket.socket) -> Any:
    (length,) = struct.unpack("!I", _read_exactly(connection, 4))
    if length > _LONGEST_LINE:
        raise ConnectionError("the other side is no rank of this job")
    return json.loads(_read_exactly(connection, length))


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    data, start = bytearray(length), 0
    view = memoryview(data)
    while start < length:
        count = connection.recv_into(view[start:])
        if not count:
            raise ConnectionError("the connection was closed")
        start += count
    return bytes(data)


class SocketGroup(ProcessGroup):
    """Collectives composed of messages between pairs of ranks."""

    backend = "sockets"
    platform: Platform

    def __init__(self, ranks: Sequence[int], rank: int, platform: Platform, world: SocketWorld) -> None:
        super().__init__(ranks, rank, platform)
        self._messages = world
        # Kinds of messages do not share channels: a pending exchange must not get what a collective has sent.
        kinds = ("collective", "exchange", "message", "bytes")
        self._digests = {
            kind: hashlib.blake2b(f"{kind} {self.ranks}".encode(), digest_size=8).digest() for kind in kinds
        }

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        flat = host_values(self.platform, x)
        if flat.nbytes <= SMALL_BYTES:
            total = self._reduced(x, self._gather(flat), op)
        else:
            # Each rank reduces one chunk, so it receives 2 (n - 1) / n of the data instead of n - 1 times the data.
            chunks = np.array_split(flat, self.size)
            mine = self._reduced(x, self._swap(chunks), op)
            total = np.concatenate(self._gather(mine))
        put_values(self.platform, x, total)
        return DONE

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        put_values(self.platform, output, np.concatenate(self._gather(host_values(self.platform, x))))
        return DONE

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        parts = self._swap(np.split(host_values(self.platform, x), self.size))
        put_values(self.platform, output, self._reduced(x, parts, op))
        return DONE

    def _all_to_all_into(self, output: Tensor, x: Tensor, output_rows: Rows, input_rows: Rows, async_op: bool) -> Work:
        width = math.prod(x.shape[1:])
        parts = np.split(host_values(self.platform, x), np.cumsum(input_rows)[:-1] * width)
        put_values(self.platform, output, np.concatenate(self._swap(parts)))
        return DONE

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        self._start_exchange(sends, receives).wait()

    def _start_exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:
        for peer, x in self._others(sends):
            self._send_values("exchange", peer, x)
        return _Works([_Receiving(self, "exchange", peer, x) for peer, x in self._others(receives)])

    def _others(self, tensors: Sequence[Tensor | None]) -> list[tuple[int, Tensor]]:
        """Return (rank, tensor) for each other rank with elements, from the next rank on, so that partners differ."""
        order = ((self.rank + step) % self.size for step in range(1, self.size))
        return [(peer, x) for peer in order if (x := tensors[peer]) is not None and math.prod(x.shape)]

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        if self.rank == source:
            for peer in range(self.size):
                if peer != source:
                    self._send_values("collective", peer, x)
        else:
            _Receiving(self, "collective", source, x).wait()
        return DONE

    def _send(self, x: Tensor, peer: int, async_op: bool) -> Work:
        self._send_values("message", peer, x)
        return DONE

    def _receive(self, x: Tensor, peer: int, async_op: bool) -> Work:
        receiving = _Receiving(self, "message", peer, x)
        if not async_op:
            receiving.wait()
        return receiving

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        gathered = self._start_all_gather_bytes(data).wait()
        assert gathered is not None
        return gathered

    def _start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        for step in range(1, self.size):
            self.send_bytes("bytes", (self.rank + step) % self.size, data)
        return _PendingBytes(self, data)

    def send_bytes(self, kind: str, peer: int, data: Any) -> None:
        """See `SocketWorld.send`."""
        with self._failing():
            self._messages.send(self._channel(kind, peer), data)

    def expect(self, kind: str, peer: int) -> int:
        """See `SocketWorld.expect`."""
        self._check_usable()
        return self._messages.expect(self._channel(kind, peer))

    def take(self, kind: str, peer: int, number: int, timeout_seconds: float | None = None) -> bytes | None:
        """See `SocketWorld.take`."""
        with self._failing():
            return self._messages.take(self._channel(kind, peer), number, timeout_seconds)

    def _channel(self, kind: str, peer: int) -> Channel:
        return self.ranks[peer], self._digests[kind]

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Mark the group failed if the block raises: ranks no longer agree which message belongs to which call."""
        self._check_usable()
        try:
            yield
        except BaseException as error:
            self._messages.failures[self.ranks] = f"{type(error).__name__}: {error}"
            raise

    def _check_usable(self) -> None:
        why = self._messages.failures.get(self.ranks)
        if why is not None:
            raise CollectiveError(
                f"{self.last_call} on rank {self._messages.rank}: the group of ranks {list(self.ranks)} has failed "
                f"before ({why}), and later messages could be taken for those of the failed call. Restart the job"
            )

    def _send_values(self, kind: str, peer: int, x: Tensor) -> None:
        self.send_bytes(kind, peer, _bytes_of(host_values(self.platform, x)))

    def _gather(self, flat: Array) -> list[Array]:
        return self._swap([flat] * self.size)

    def _swap(self, parts: Sequence[Array]) -> list[Array]:
        """Send one flat array to each rank, and return those received, of one dtype."""
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            self.send_bytes("collective", peer, _bytes_of(parts[peer]))
        numbers = {peer: self.expect("collective", peer) for peer in range(self.size) if peer != self.rank}
        received = list(parts)
        for peer, number in numbers.items():
            data = self.take("collective", peer, number)
            assert data is not None
            received[peer] = np.frombuffer(data, parts[0].dtype)
        return received

    def _reduced(self, like: Tensor, parts: Sequence[Array], op: str) -> Array:
        platform = self.platform
        if op == "avg" and not platform.is_floating(like.dtype):
            raise no_average_of(like.dtype)
        device = platform.device_of(like)
        tensors = [platform.from_bits(np.array(part), like.dtype, device) for part in parts]
        return host_values(platform, reduce_tensors(platform, tensors, op))


class _Receiving:
    """A message to receive into a tensor. Waits may be in any order."""

    def __init__(self, group: SocketGroup, kind: str, peer: int, target: Tensor) -> None:
        self._group, self._kind, self._peer = group, kind, peer
        self._target: Tensor | None = target
        self._number = group.expect(kind, peer)

    def wait(self) -> None:
        target = self._target
        if target is not None:
            data = self._group.take(self._kind, self._peer, self._number)
            assert data is not None
            dtype = host_values(self._group.platform, target).dtype
            put_values(self._group.platform, target, np.frombuffer(data, dtype))
            # Last: a wait that has failed must fail again.
            self._target = None


class _Works:
    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()


class _PendingBytes:
    """A running all-gather of bytes."""

    def __init__(self, group: SocketGroup, data: bytes) -> None:
        self._group = group
        self._found: dict[int, bytes] = {group.rank: data}
        others = [peer for peer in range(group.size) if peer != group.rank]
        self._numbers = {peer: group.expect("bytes", peer) for peer in others}

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        for peer, number in self._numbers.items():
            if peer not in self._found:
                data = self._group.take("bytes", peer, number, timeout_seconds)
                if data is None:
                    return None
                self._found[peer] = data
        return [self._found[peer] for peer in range(self._group.size)]


def _bytes_of(flat: Array) -> Any:
    return np.ascontiguousarray(flat).view(np.uint8)


def host_values(platform: Platform, x: Tensor) -> Array:
    """Return the values of a tensor as a flat array; bfloat16 as its bits."""
    return np.asarray(platform.to_numpy(x)).reshape(-1)


def put_values(platform: Platform, output: Tensor, flat: Array) -> None:
    """Write flat values into `output`, in place: the caller's buffer may be a view of another tensor."""
    writable = flat if flat.flags.writeable else flat.copy()
    values = platform.from_bits(writable.reshape(tuple(output.shape)), output.dtype, platform.device_of(output))
    platform.copy_(output, values)


def reduce_tensors(platform: Platform, tensors: Sequence[Tensor], op: str) -> Tensor:
    """Reduce tensors in rank order, with the platform's own arithmetic, so that every rank gets the same bits."""
    ops = platform.ops
    pairwise = {"max": ops.maximum, "min": ops.minimum, "product": ops.mul}.get(op, ops.add)
    with platform.no_grad():
        total = functools.reduce(pairwise, tensors)
        return ops.div(total, len(tensors)) if op == "avg" else total
