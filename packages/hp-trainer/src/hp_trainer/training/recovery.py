"""Copies of the training state in memory, from which all ranks continue together after one has died.

Every few steps each rank copies its shards to host memory (a snapshot), and a thread sends them to a partner: the next
rank, or with several machines the rank with the same local index on the next one. The next snapshot is taken once a
step's all-reduce has reported that all partners have the last one. So one of a rank's two snapshots is complete on all
ranks at any time. After a death, the remaining ranks and the processes that replace dead ones meet as a new generation.
They choose the newest snapshot that each rank has, or can get from its partner or from a replica, whose state is the
same. A checkpoint is read only if it is newer.

Ranks may be renumbered then, so a process is known by its slot: the rank of the first generation whose work it does.
Where all ranks are restarted after a death, each writes its snapshots to memory that outlives it, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

import hp_dtensor.launch
from hp_dtensor.comm.world import World, current_world
from hp_dtensor.exceptions import CollectiveError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import local_of
from hp_trainer._coordination import report
from hp_trainer._files import strict_json
from hp_trainer.config import TrainerConfig
from hp_trainer.exceptions import TrainingError
from hp_trainer.optimizers import set_state
from hp_trainer.parallel.dims import dims_of
from hp_trainer.training.pipelined_model import num_microbatches
from hp_trainer.training.setup import RankSetup
from hp_trainer.training.state import box_of, named_state

_ALIGNMENT = 64
_LENGTHS = struct.Struct("!QQ")
_TOKEN_BYTES = 16
_STORED = b"+"
_RETRY_SECONDS = 1.0
# A machine that has died does not refuse connections. `close` waits for an attempt, and a recovery for `close`.
_CONNECT_SECONDS = 5.0
# Time in which the end of a generation is noticed outside of collectives.
_POLL_SECONDS = 0.2
# A copy that is incomplete after this many steps, or intervals, is reported.
_LATE_STEPS, _LATE_INTERVALS = 100, 10

# What a sent snapshot is to the receiver: one that it holds for the sender, or its own, which it restores.
Kind = Literal["held", "own"]


@dataclass(frozen=True)
class Snapshot:
    """The state of one rank by snapshot number: a JSON header, and the local shards as aligned uint8 `[bytes]`."""

    number: int
    header: bytes
    data: np.ndarray

    @property
    def step(self) -> int:
        """The step after which it was taken."""
        return int(json.loads(self.header)["values"]["step"])

    @classmethod
    def take(
        cls, setup: RankSetup, number: int, values: Mapping[str, Any], memory: Callable[[int], np.ndarray]
    ) -> Snapshot:
        """Copy the state of this rank to host memory, that `memory(bytes)` returns as uint8."""
        platform, tensors, offset = setup.platform, [], 0
        locals_ = (local_of(platform, tensor) for _, tensor in _state(setup))
        data = memory(sum(_aligned(math.prod(x.shape) * platform.itemsize(x.dtype)) for x in locals_))
        # One tensor after the other: on a device, copies of all of them would take the host's memory twice.
        for name, tensor in _state(setup):
            array = platform.to_numpy(local_of(platform, tensor))
            data[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
            tensors.append([*_kind_of(setup, name, tensor), array.dtype.name, list(array.shape), offset])
            offset += _aligned(array.nbytes)
        return cls(number, strict_json({"values": dict(values), "tensors": tensors}).encode(), data)

    def restore(self, setup: RankSetup) -> dict[str, Any]:
        """Copy the state back to the tensors of this rank, and return the JSON values."""
        found = json.loads(self.header)
        saved = {name: rest for name, *rest in found["tensors"]}
        platform, count = setup.platform, 0
        with platform.no_grad():
            for name, tensor in _state(setup):
                _, *kind = _kind_of(setup, name, tensor)
                *expected, dtype, shape, offset = saved.get(name, [None, None, "uint8", [0], 0])
                if kind != expected:
                    raise TrainingError(f"{name}: the copy in memory is of {expected}, this rank has {kind}")
                size = int(np.prod(shape)) * np.dtype(dtype).itemsize
                array = self.data[offset : offset + size].view(dtype).reshape(shape)
                local = local_of(platform, tensor)
                platform.copy_(local, platform.from_bits(array, tensor.dtype, platform.device_of(local)))
                if name.startswith("optimizer."):
                    parameter, _, slot = name.removeprefix("optimizer.").rpartition(".")
                    set_state(setup.optimizer, parameter, slot, tensor)
                count += 1
        if count != len(saved):
            raise TrainingError(f"the copy in memory has {len(saved)} tensors, this rank {count}")
        values: dict[str, Any] = found["values"]
        return values


class _LastingSnapshot:
    """A snapshot in a file in memory that outlives this process. Number 0: there is none, or it is incomplete."""

    _PREFIX = struct.Struct("!QQQ")

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR)
        self._map: mmap.mmap | None = None
        self.number = 0

    def read(self) -> Snapshot | None:
        """Return the snapshot that an earlier process of this rank has completed, without copying it; None: none."""
        prefix = os.pread(self._file, self._PREFIX.size, 0)
        if not prefix:
            return None
        self.number, size, length = self._PREFIX.unpack(prefix)
        if not self.number:
            return None
        data = self._mapped(size)
        return Snapshot(self.number, os.pread(self._file, length, _ALIGNMENT + size), data)

    def memory(self, size: int) -> np.ndarray:
        """Drop the snapshot, and return `size` bytes of the file for the data of another one."""
        self.number = 0
        os.pwrite(self._file, self._PREFIX.pack(0, 0, 0), 0)
        if self._map is None or len(self._map) != _ALIGNMENT + size:
            os.ftruncate(self._file, _ALIGNMENT + size)
        return self._mapped(size)

    def complete(self, snapshot: Snapshot) -> None:
        """Record that the memory holds the data of a snapshot."""
        os.pwrite(self._file, snapshot.header, _ALIGNMENT + snapshot.data.nbytes)
        # Last: a process that is killed before leaves an incomplete one.
        os.pwrite(self._file, self._PREFIX.pack(snapshot.number, snapshot.data.nbytes, len(snapshot.header)), 0)
        self.number = snapshot.number

    def _mapped(self, size: int) -> np.ndarray:
        if self._map is None or len(self._map) != _ALIGNMENT + size:
            self._map = mmap.mmap(self._file, _ALIGNMENT + size)
        return np.frombuffer(self._map, np.uint8)[_ALIGNMENT:]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _state(setup: RankSetup) -> Any:
    return named_state(setup.platform, setup.model, setup.optimizer, setup.average)


def _kind_of(setup: RankSetup, name: str, tensor: Any) -> list[Any]:
    """Return name, dtype and box of a tensor's local shard, by which `restore` recognizes it, as JSON values."""
    box = box_of(tensor)
    return [name, setup.platform.dtype_name(tensor.dtype), [list(box.offset), list(box.shape)]]


def replicas_of(config: TrainerConfig, platform: Platform) -> list[int]:
    """Return the ranks with the same state as this one, by `parallel.dp_replicate`."""
    world = current_world(platform)
    dims = dims_of(config, world.size)
    ranks = dims.build_mesh(platform.device_types[0], platform=platform)["dp_replicate"].ranks()
    return [rank for rank in ranks if rank != world.rank]


def with_fewer_replicas(config: TrainerConfig, world_size: int, first_size: int) -> TrainerConfig:
    """Return the configuration with the replicas that remain: the same global batch, and no larger micro-batches."""
    if world_size == first_size:
        return config
    dims, training = dims_of(config, first_size), config.training
    replicas = dims.dp_replicate * world_size // first_size
    # Inferred degrees would be others on fewer ranks.
    parallel = replace(config.parallel, dp_replicate=replicas, dp_shard=dims.dp_shard, ep=dims.ep)
    most = max(1, training.global_batch_size // dims.dp_size // num_microbatches(config, dims))
    share = training.global_batch_size // (replicas * dims.dp_shard)
    size = next(size for size in range(most, 0, -1) if share % size == 0)
    return replace(
        config,
        parallel=parallel,
        training=replace(training, micro_batch_size=size, micro_batch_tokens=None),
        pipeline=replace(config.pipeline, microbatches=None),
    )


def partner_of(rank: int, machines: Sequence[int]) -> int:
    """Return the rank that holds a rank's snapshots, at the distance with most partners on other machines."""
    of_rank = np.asarray(machines)
    distances = range(1, max(2, len(of_rank)))
    best = max(distances, key=lambda distance: np.count_nonzero(np.roll(of_rank, -distance) != of_rank))
    return (rank + best) % len(of_rank)


class StateCopies:
    """The snapshots of this process: its own, and those that it holds for other ranks. They outlive generations.

    Args:
        partner: send each snapshot to another rank; False: the replicas have the same state.
        interval: steps between two snapshots.
        memory: files that outlive this process, for its two last snapshots; see `hp_dtensor.launch.lasting_memory`.
            With them nothing is sent.

    Attributes:
        step: the step in progress, for messages.
        lost_step: the step in progress when a rank died.
    """

    def __init__(self, *, partner: bool, interval: int, memory: Sequence[str] = ()) -> None:
        self._partner, self._interval = partner and not memory, interval
        self._lasting = [_LastingSnapshot(path) for path in memory]
        found = [each.read() for each in self._lasting]
        # By their numbers.
        self._own: dict[int, Snapshot] = {each.number: each for each in found if each is not None}
        self._held: dict[int, dict[int, Snapshot]] = defaultdict(dict)
        self._number, self._step = max(self._own, default=0), 0
        self._lock = threading.Lock()
        self._exchange: _Exchange | None = None
        self._has_partners = threading.Event()
        self._is_agreed = False
        self.step = self.lost_step = 0

    def meet(self, world: World, replicas: Sequence[int]) -> Sources | None:
        """Exchange addresses in a new generation, and choose the state to continue from; None: all ranks have none."""
        generation = hp_dtensor.launch.current_generation()
        assert generation is not None
        slots, machines = generation.slots, generation.machines
        self._exchange = exchange = _Exchange(self, generation.hosts[machines[world.rank]], slots[world.rank])
        with self._lock:
            held = {slot: sorted(of_slot) for slot, of_slot in self._held.items()}
        fact: dict[str, Any] = {"own": sorted(self._own), "held": held, "replicas": list(replicas)}
        fact |= {"own_steps": [self._own[number].step for number in sorted(self._own)]}
        fact |= {"number": self._number, "step": self.step, **exchange.address}
        gathered = world.all.all_gather_bytes(json.dumps(fact).encode())
        with self._lock:
            # Of slots that have left the job for good.
            self._held = defaultdict(dict, {slot: held for slot, held in self._held.items() if slot in slots})
        facts = [json.loads(each) for each in gathered]
        exchange.connect(world.rank, partner_of(world.rank, machines), facts)
        sources = choose_sources(facts, slots)
        self._number = max(fact["number"] for fact in facts)
        self.lost_step = max(fact["step"] for fact in facts)
        self._is_agreed = False
        self._has_partners.clear()
        if sources is None:
            self.clear()
        elif not self._partner or sources.number in facts[exchange.next_rank]["held"].get(str(exchange.slot), ()):
            self._has_partners.set()
        return sources

    def restore(self, setup: RankSetup, sources: Sources, timeout_seconds: float) -> dict[str, Any]:
        """Restore and send the snapshots that ranks lack; return the values of the trainer. A collective call."""
        rank, number, exchange = setup.mesh.world.rank, sources.number, self._exchange
        assert exchange is not None
        for newcomer, (holder, slot) in sources.holders.items():
            if holder == rank:
                exchange.send(newcomer, self._own[number] if slot is None else self._held[slot][number], "own")
        if rank in sources.holders:
            self._own = {number: exchange.receive(number, sources.holders[rank][0], timeout_seconds)}
        # Later snapshots are not complete on all ranks, and their steps are repeated.
        self._own = {number: self._own[number]}
        with self._lock:
            self._held = defaultdict(
                dict, {slot: {number: of[number]} for slot, of in self._held.items() if number in of}
            )
        if not self.is_complete:
            self._send(self._own[number])
        values = self._own[number].restore(setup)
        self._step = int(values["step"])
        return values

    @property
    def is_complete(self) -> bool:
        """True if this rank's last snapshot would survive its death: the partner has it, or none is needed."""
        return self._has_partners.is_set()

    def agree(self, *, everywhere: bool) -> None:
        """Record whether `is_complete` was True `everywhere`; report a snapshot that is late by far."""
        self._is_agreed = everywhere
        num_steps, exchange = self.step - self._step, self._exchange
        if everywhere or exchange is None or num_steps != max(_LATE_STEPS, _LATE_INTERVALS * self._interval):
            return
        which = "" if self.is_complete else f": that of this rank is not in the memory of rank {exchange.next_rank}"
        if which or exchange.rank == 0:
            what = (
                f"the copies of step {self._step} are not complete after {num_steps} steps, which a death would repeat"
            )
            report(f"rank {exchange.rank}: {what}{which}")

    def is_due(self, step: int) -> bool:
        """Return whether to take a snapshot after a step. The same on all ranks."""
        if not self._own:
            return True
        # After a rollback, the next one is due at once.
        return self._is_agreed and not self._step <= step < self._step + self._interval

    def take(self, setup: RankSetup, step: int, values: Mapping[str, Any]) -> None:
        """Copy the state after a step, and start sending it. The snapshot before the last one is dropped."""
        last = max(self._own, default=None)
        dropped = [self._own.pop(number) for number in list(self._own) if number != last]
        self._is_agreed = False
        self._has_partners.clear()
        self._number, self._step = self._number + 1, step
        values = {**values, "step": step}
        lasting = next((each for each in self._lasting if each.number != last), None)
        if lasting is not None:
            snapshot = Snapshot.take(setup, self._number, values, lasting.memory)
            lasting.complete(snapshot)
        else:
            fits = [each.data for each in dropped]

            def memory(size: int) -> np.ndarray:
                return fits[0] if fits and fits[0].nbytes == size else np.empty(size, np.uint8)

            snapshot = Snapshot.take(setup, self._number, values, memory)
        self._own[self._number] = snapshot
        self._send(snapshot)

    def clear(self) -> None:
        """Drop all snapshots, and take the next one as soon as possible."""
        self._own.clear()
        with self._lock:
            self._held.clear()
        self._has_partners.clear()

    def leave(self) -> None:
        """Close the connections of this generation, and keep the snapshots."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()

    def _send(self, snapshot: Snapshot) -> None:
        exchange = self._exchange
        if self._partner:
            assert exchange is not None
            exchange.send(exchange.next_rank, snapshot, "held", self._has_partners.set)
        else:
            self._has_partners.set()

    def memory_for(self, slot: int, number: int, size: int) -> np.ndarray:
        """Return `size` bytes for snapshot `number` of another slot, reusing those of the one before its last."""
        with self._lock:
            held = self._held[slot]
            # The last one before `number` remains until that is complete. `number` itself may be sent a second time.
            dropped = [held.pop(each) for each in sorted(each for each in held if each < number)[:-1]]
        fits = [each.data for each in dropped if each.data.nbytes == size]
        return fits[0] if fits else np.empty(size, np.uint8)

    def hold(self, slot: int, snapshot: Snapshot) -> None:
        """Hold a received snapshot of another slot."""
        with self._lock:
            self._held[slot][snapshot.number] = snapshot


@dataclass(frozen=True)
class Sources:
    """The snapshot to continue from, of a step; a rank without it has the sender and the slot there (None: its own)."""

    number: int
    holders: Mapping[int, tuple[int, int | None]]
    step: int


def choose_sources(facts: Sequence[Mapping[str, Any]], slots: Sequence[int]) -> Sources | None:
    """Choose the newest snapshot that each rank, or another one for it, has; None: there is none."""
    steps = {number: step for fact in facts for number, step in zip(fact["own"], fact["own_steps"], strict=True)}
    for number in sorted(steps, reverse=True):
        holders: dict[int, tuple[int, int | None] | None] = {
            rank: _holder(facts, rank, slots[rank], number)
            for rank, fact in enumerate(facts)
            if number not in fact["own"]
        }
        if None not in holders.values():
            found = {rank: holder for rank, holder in holders.items() if holder is not None}
            return Sources(number, found, steps[number])
    return None


def _holder(facts: Sequence[Mapping[str, Any]], rank: int, slot: int, number: int) -> tuple[int, int | None] | None:
    """Return the entry of `Sources.holders` for a rank; None: no rank has this snapshot."""
    for other, fact in enumerate(facts):
        if number in fact["held"].get(str(slot), ()):
            return other, slot
    return next(((other, None) for other in facts[rank]["replicas"] if number in facts[other]["own"]), None)


class _Exchange:
    """Sends snapshots to other ranks of one generation and receives theirs, in threads beside the computation."""

    def __init__(self, copies: StateCopies, host: str, slot: int) -> None:
        self._copies, self.slot = copies, slot
        self._server = socket.create_server((host, 0))
        # Other users of this machine may connect, too.
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self.address = {"host": host, "port": self._server.getsockname()[1], "token": self._token.hex()}
        self.rank = self.next_rank = 0
        self._peers: list[tuple[str, int, bytes]] = []
        self._sockets: dict[int, socket.socket] = {}
        self._accepted: list[socket.socket] = []
        self._arrived: dict[int, Snapshot] = {}
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._outbox: queue.SimpleQueue[tuple[int, Snapshot, Kind, Callable[[], None]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._accept, name="copies: server", daemon=True)]
        self._threads += [threading.Thread(target=self._deliver, name="copies: sender", daemon=True)]
        for thread in self._threads:
            thread.start()

    def connect(self, rank: int, partner: int, facts: Sequence[Mapping[str, Any]]) -> None:
        """Set this rank, its partner and the addresses of all; connections are made on first use."""
        self.rank, self.next_rank = rank, partner
        self._peers = [(fact["host"], fact["port"], bytes.fromhex(fact["token"])) for fact in facts]

    def send(self, rank: int, snapshot: Snapshot, kind: Kind, done: Callable[[], None] = lambda: None) -> None:
        """Start sending a snapshot; `done` is called in the sender's thread when the other rank has it."""
        self._outbox.put((rank, snapshot, kind, done))

    def receive(self, number: int, holder: int, timeout_seconds: float) -> Snapshot:
        """Wait for this rank's own snapshot `number`, which rank `holder` sends."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while number not in self._arrived:
                if hp_dtensor.launch.generation_has_ended():
                    raise CollectiveError(f"a rank has died while rank {holder} sent this rank its state")
                if time.monotonic() > deadline:
                    raise CollectiveError(f"rank {holder} has not sent this rank its state in {timeout_seconds:g} s")
                self._changed.wait(_POLL_SECONDS)
            return self._arrived.pop(number)

    def close(self) -> None:
        """Close all connections and end the threads."""
        self._closed.set()
        self._outbox.put(None)
        with self._changed:
            sockets = [self._server, *self._sockets.values(), *self._accepted]
        for each in sockets:
            # Wakes the threads that wait there; `close` alone does not.
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join()

    def _deliver(self) -> None:
        """Send the messages of the outbox in order, each until it succeeds. The loop of the sender's thread."""
        while (message := self._outbox.get()) is not None:
            rank, snapshot, kind, done = message
            while not self._closed.is_set():
                try:
                    self._send(rank, snapshot, kind)
                    done()
                    break
                except Exception:
                    # The other rank has died, which the next collective finds, or a machine is short of memory or of
                    # files for a while.
                    with self._changed:
                        failed = self._sockets.pop(rank, None)
                    if failed is not None:
                        failed.close()
                    self._closed.wait(_RETRY_SECONDS)

    def _send(self, rank: int, snapshot: Snapshot, kind: Kind) -> None:
        """Send lengths, prefix, header and data, and wait until the other rank has stored them; see `_read`."""
        connection = self._sockets.get(rank) or self._connect(rank)
        values = {"kind": kind, "slot": self.slot, "number": snapshot.number, "bytes": snapshot.data.nbytes}
        prefix = json.dumps(values).encode()
        connection.sendall(_LENGTHS.pack(len(prefix), len(snapshot.header)) + prefix + snapshot.header)
        connection.sendall(snapshot.data.data)
        if connection.recv(1) != _STORED:
            raise ConnectionError("the connection was closed")

    def _connect(self, rank: int) -> socket.socket:
        host, port, token = self._peers[rank]
        connection = socket.create_connection((host, port), _CONNECT_SECONDS)
        connection.settimeout(None)
        with self._changed:
            self._sockets[rank] = connection
            if self._closed.is_set():
                connection.close()
        connection.sendall(token)
        return connection

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:
                # Closed, or too many files are open.
                self._closed.wait(_RETRY_SECONDS)
                continue
            with self._changed:
                self._accepted.append(connection)
                if self._closed.is_set():
                    connection.close()
            thread = threading.Thread(target=self._read, args=(connection,), name="copies: receiver", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                report(f"rank {self.rank} cannot receive copies now: {error}")
                connection.close()
                continue
            self._threads.append(thread)

    def _read(self, connection: socket.socket) -> None:
        """Store the snapshots that arrive on a connection, if it starts with this rank's token."""
        try:
            if not secrets.compare_digest(_read(connection, np.empty(_TOKEN_BYTES, np.uint8)).tobytes(), self._token):
                connection.close()
                return
            while True:
                lengths = _read(connection, np.empty(_LENGTHS.size, np.uint8)).tobytes()
                prefix, header = (_read(connection, np.empty(n, np.uint8)).tobytes() for n in _LENGTHS.unpack(lengths))
                values = json.loads(prefix)
                slot, number, size = values["slot"], values["number"], values["bytes"]
                held = values["kind"] == "held"
                data = self._copies.memory_for(slot, number, size) if held else np.empty(size, np.uint8)
                snapshot = Snapshot(number, header, _read(connection, data))
                if held:
                    self._copies.hold(slot, snapshot)
                else:
                    with self._changed:
                        self._arrived[number] = snapshot
                        self._changed.notify_all()
                connection.sendall(_STORED)
        except OSError:
            # The other rank has died or left; a snapshot of which only a part has come is dropped.
            connection.close()
        except Exception as error:
            # Closed, so that the other rank sends it again.
            connection.close()
            report(f"rank {self.rank} could not take a copy of another rank's state: {type(error).__name__}: {error}")


def _read(connection: socket.socket, buffer: np.ndarray) -> np.ndarray:
    """Fill a buffer from a connection, and return it."""
    view = buffer.data
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the connection was closed")
        view = view[count:]
    return buffer
