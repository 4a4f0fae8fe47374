"""Ranks on several machines that are replaced when they die, even with their machine.

The process of the first machine decides, as `ReplacedRanks` does on one. The process of each other machine connects to
it, starts ranks there as it is asked to, and passes messages on: a `_RemoteProcess` is a rank that is reached this way.
Machines find the first one by a file in a folder that all see; it has the address and a secret. A machine that is lost
leaves its ranks dead. The next process that connects gets its place, whether the launcher has started it again or it
has been waiting as a spare one. The loss of the first machine ends the ranks; the others then wait for it to come back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import itertools
import json
import os
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from hp_dtensor.exceptions import CapabilityError, LaunchError
from hp_dtensor.launch.local_ranks import Failure, LocalRanks, Process, interrupts_blocked
from hp_dtensor.launch.rank_process import Generation, Imported, Joined, Leave, Left, Lost, Meet, Run, Setup, Stay
from hp_dtensor.launch.replacement import ReplacedRanks

_POLL_SECONDS = 0.2
_RETRY_SECONDS = 0.5
_CONNECT_SECONDS = 10.0
_LENGTH = struct.Struct("!I")
_MOST_BYTES, _MOST_GREETING_BYTES = 2**24, 200
_GREETING_SECONDS = 10.0
# A machine whose process is stuck is lost after this time.
_STUCK_SECONDS, _BEAT_SECONDS = 120, 5.0
# A machine that loses its power closes no connection: it is lost after this time without an answer.
_SILENT_SECONDS = 20
_MESSAGES = {kind.__name__: kind for kind in (Imported, Joined, Leave, Left, Lost, Stay)}


class Nodes:
    """The machines of a job, as the process of the first one sees them; a context manager.

    A place is the index of a machine among those with ranks. Place 0 is this machine's.

    Args:
        size: machines with ranks. Further ones that connect are spare.
        file: file in a folder that all machines see, by which they find this process.
        host: name or address of this machine for the others.

    Attributes:
        result: what `serve_node` returns on the other machines when the context ends without an error.
    """

    def __init__(self, size: int, file: Path, host: str) -> None:
        self.size = size
        self.result: Any = None
        self._file, self._token = file, secrets.token_hex(16)
        self._server = socket.create_server(("127.0.0.1" if _is_loopback(host) else "", 0))
        self._host = host
        self._lock = threading.Lock()
        self._nodes: list[_Node] = []
        # The places other than 0 that have ranks, and the machine of each.
        self._used: Collection[int] = range(1, size)
        self._places: dict[int, _Node] = {}
        self._write_file()
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ending = {"do": "end", "result": self.result} if error is None else {"do": "end", "error": str(error)}
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()
        with contextlib.suppress(OSError):
            # Wakes the thread that waits there.
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._lock:
            nodes = list(self._nodes)
        for node in nodes:
            node.send(ending)
            node.close()

    def place(self, number: int) -> _Node | None:
        """Return the machine of a place, which may be lost; None: this machine."""
        return self._places.get(number)

    def lost(self) -> list[int]:
        """Return the places with ranks whose machines are lost, or have not connected yet."""
        return [place for place in self._used if place not in self._places or not self._places[place].is_alive]

    def clear(self) -> None:
        """Make all places free, and let each have ranks again: after `share` a machine may have several places."""
        self._places.clear()
        self._used = range(1, self.size)

    def use(self, places: Collection[int]) -> None:
        """Let only these places have ranks. The machines of all others become spare ones."""
        self._used = sorted(set(places) - {0})
        self._places = {place: node for place, node in self._places.items() if place in self._used}

    def fill(self) -> list[int]:
        """Assign lost places to machines without a place, preferably their own, and return the places still lost."""
        with self._lock:
            free = [node for node in self._nodes if node.is_alive and node not in self._places.values()]
        for place in self.lost():
            node = next((node for node in free if node.number == place), None)
            # A machine whose own place is lost takes it; others are spare.
            others = [node for node in free if node.number not in self.lost()]
            if node := node or next(iter(others), None):
                free.remove(node)
                self._places[place] = node
        return self.lost()

    def share(self) -> None:
        """Assign lost places to machines that have a place already, or to this machine if there are none."""
        alive = [node for node in self._places.values() if node.is_alive]
        for index, place in enumerate(self.lost()):
            if alive:
                self._places[place] = alive[index % len(alive)]
            else:
                self._places.pop(place, None)

    def hosts(self) -> tuple[str, ...]:
        """Return the address of the machine of each place."""
        # The address of this machine is the one at which another one has reached it.
        first = next((node.reached for node in self._places.values()), "127.0.0.1")
        return first, *(self._places[place].host if place in self._places else first for place in range(1, self.size))

    def _write_file(self) -> None:
        values = {"host": self._host, "port": self._server.getsockname()[1], "token": self._token}
        draft = self._file.with_name(f"{self._file.name}.incomplete-{self._token[:8]}")
        # For the owner only, since with the secret processes can be started.
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump(values, out)
            out.flush()
            os.fsync(out.fileno())
        draft.replace(self._file)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._server.accept()
            except OSError:
                if self._server.fileno() < 0:
                    return
                time.sleep(_RETRY_SECONDS)
                continue
            threading.Thread(target=self._welcome, args=(connection, address[0]), name="node", daemon=True).start()

    def _welcome(self, connection: socket.socket, host: str) -> None:
        channel = _Channel(connection)
        # Anyone may connect.
        hello = channel.greeting()
        token = "" if hello is None else str(hello.get("token"))
        if hello is None or not secrets.compare_digest(token.encode(errors="replace"), self._token.encode()):
            channel.close()
            return
        node = _Node(channel, int(hello["node"]), host, connection.getsockname()[0])
        with self._lock:
            self._nodes = [each for each in self._nodes if each.is_alive]
            # Its former process is not known to be lost yet. It tries again.
            is_double = any(each.number == node.number for each in self._nodes)
            if not is_double:
                node.send({"do": "welcome"})
                self._nodes.append(node)
        if is_double:
            channel.close()
        else:
            node.read()


@dataclass(slots=True, eq=False)
class _Node:
    """Another machine of the job.

    Attributes:
        number: the number that its launcher gave it.
        host: its address.
        reached: the address at which it has reached this machine.
    """

    channel: _Channel
    number: int
    host: str
    reached: str
    is_alive: bool = True
    _processes: dict[int, tuple[_RemoteProcess, Connection]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def start(self, rank: int, size: int, *, again: bool) -> _RemoteProcess:
        """Start a rank there; see `LocalRanks._spawn`. On a lost machine it has ended already."""
        reader, writer = Pipe(duplex=False)
        process = _RemoteProcess(rank, cast(Any, None), reader, None, node=self, id=next(self._ids))
        with self._lock:
            if self.is_alive:
                self._processes[process.id] = process, writer
            else:
                self._lose(process, writer)
        self.send({"do": "start", "id": process.id, "rank": rank, "size": size, "again": again})
        return process

    def send(self, values: dict[str, Any]) -> None:
        self.channel.send(values)

    def close(self) -> None:
        self.channel.close()

    def forget(self, process: _RemoteProcess) -> None:
        """Ignore what the machine still sends about a process that was released."""
        with self._lock:
            _, writer = self._processes.pop(process.id, (None, None))
        if writer is not None:
            writer.close()

    def read(self) -> None:
        """Pass on what the machine sends until it is lost."""
        try:
            self.channel.limit_silence(_STUCK_SECONDS)
            while (values := self.channel.receive()) is not None:
                with self._lock:
                    self._pass_on(values)
        finally:
            with self._lock:
                self.is_alive = False
                for process, writer in self._processes.values():
                    self._lose(process, writer)
                self._processes.clear()
            self.channel.close()

    def _pass_on(self, values: dict[str, Any]) -> None:
        """Write a message about a process to its pipe, or store its end."""
        process, writer = self._processes.get(values["id"], (None, None))
        # A sign of life, or the process has been released.
        if process is None or writer is None:
            return
        with contextlib.suppress(BrokenPipeError):
            if "failure" not in values:
                writer.send(values["returned"] if "returned" in values else _decode(values["message"]))
                return
            # Not the time there: clocks differ between machines.
            failure = Failure(**(values["failure"] | {"when": time.monotonic()}))
            if not values["has_ended"]:
                writer.send(failure)
                return
            # Read together with the end of the pipe: a failure without an end is that of a rank that runs.
            process.end = failure
            writer.close()
            del self._processes[values["id"]]

    def _lose(self, process: _RemoteProcess, writer: Connection) -> None:
        process.end = Failure(f"was lost with its machine, {self.host}", "", time.monotonic(), died=True)
        writer.close()


@dataclass(slots=True)
class _RemoteProcess(Process):
    """The process of a rank on another machine, its messages (`connection`), and the failure by which it ended."""

    node: _Node = field(kw_only=True)
    id: int = field(kw_only=True)
    end: Failure | None = None

    def send(self, message: Any) -> None:
        # The other machine makes its own `Setup`.
        if isinstance(message, Run):
            # Pickled by this process. The connection carries JSON only.
            self._ask("run", args=pickle.loads(message.args))
        elif not isinstance(message, Setup):
            self._ask("send", message=_encode(message))

    def signal(self, signum: int) -> None:
        self._ask("signal", number=signum)

    def write_stacks(self) -> None:
        # A signal handler calls this, perhaps while its thread is sending.
        threading.Thread(target=self._ask, args=("stacks",), daemon=True).start()

    def state(self) -> str:
        # The other machine watches it.
        return ""

    def failure_of_end(self) -> Failure:
        return self.end or Failure("ended without a result", "", time.monotonic(), died=True)

    def release(self) -> None:
        self._ask("release")
        # Before the node's lock is taken, with which its thread may be waiting to write there.
        self.connection.close()
        self.node.forget(self)

    def _ask(self, do: str, **values: Any) -> None:
        self.node.send({"do": do, "id": self.id, **values})


@dataclass(slots=True)
class RanksOfNodes(ReplacedRanks):
    """Connected ranks of one job on several machines, seen by the process of the first one."""

    nodes: Nodes = field(kw_only=True)
    # Lost machines that have been counted as deaths.
    _counted: set[_Node] = field(default_factory=set)

    def signal(self, signum: int) -> None:
        """Send a signal to every rank of this machine. A signal for the job reaches the other machines, too."""
        for process in self._processes:
            if not isinstance(process, _RemoteProcess):
                process.signal(signum)

    def _start(self, check: Callable[[], None]) -> None:
        self._check = check
        self.nodes.clear()
        if missing := self._await_nodes(max(self.timeout_seconds, self.replacement.node_seconds)):
            raise LaunchError(
                f"{len(missing)} of {self.nodes.size} machines have not come: start the same command on each, with the "
                "same run folder, which all must see"
            )
        ReplacedRanks._start(self, check)

    def _make_memory(self) -> list[int]:
        raise CapabilityError(
            f"platform {self.platform} cannot replace ranks on several machines: its processes join a job only once"
        )

    def _await_nodes(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while (missing := self.nodes.fill()) and time.monotonic() < deadline:
            self._check()
            time.sleep(_POLL_SECONDS)
        return missing

    def _spawn(self, rank: int, *, again: bool = False) -> Process:
        place = 0 if rank < 0 else rank // self._local_size
        node = self.nodes.place(place)
        if node is None:
            return LocalRanks._spawn(self, rank, again=again)
        return node.start(rank, self._local_size * self.num_nodes, again=again)

    def _start_again(self, rank: int) -> Process:
        if self.nodes.place(rank // self._local_size) is None:
            return ReplacedRanks._start_again(self, rank)
        with interrupts_blocked():
            started = self._spawn(rank, again=True)
        self._set_up(started)
        return started

    def _find_nodes(self) -> bool:
        if not self.nodes.fill():
            return True
        seconds = self.replacement.node_seconds
        self.replacement.report(f"waiting up to {seconds:g} s for a machine in place of a lost one")
        if not self._await_nodes(seconds):
            return True
        self.nodes.share()
        return False

    def _go_on_with(self, remaining: Sequence[int]) -> None:
        ReplacedRanks._go_on_with(self, remaining)
        self.nodes.use({slot // self._local_size for slot in self._slots})

    def _count(self, dead: list[Process]) -> int:
        lost = {each.node for each in dead if isinstance(each, _RemoteProcess) and not each.node.is_alive}
        alone = [each for each in dead if not isinstance(each, _RemoteProcess) or each.node.is_alive]
        # The ends of a lost machine's ranks may be noticed one after the other.
        new = lost - self._counted
        self._counted |= new
        return len(new) + len(alone)

    def _hosts(self) -> tuple[str, ...]:
        return self.nodes.hosts()


@dataclass(slots=True)
class RanksOfNode(ReplacedRanks):
    """The ranks of one machine of several, which the process of the first machine directs."""

    target: str = ""
    _channel: _Channel | None = None
    _by_id: dict[int, Process] = field(default_factory=dict)
    # By number, True if the process had ended when its failure was reported.
    _reported: dict[int, bool] = field(default_factory=dict)

    def serve(self, file: Path, node: int, seconds: float, check: Callable[[], None]) -> Any:
        """Start and end ranks as the first machine asks, until the job ends; return its result.

        Args:
            file, node: of `Nodes`, and the number of this machine.
            seconds: time to wait for the first machine, at the start and after it was lost.
            check: called regularly; it raises to stop serving.
        """
        while True:
            self._channel = _connect(file, node, seconds, check)
            try:
                ending = self._obey(self._channel, check)
            finally:
                self._clear()
                self._channel.close()
            if ending is None:
                self.replacement.report("the first machine of the job is lost; waiting for it")
            elif "error" in ending:
                raise LaunchError(f"the job has ended: {ending['error']}")
            else:
                return ending["result"]

    def _obey(self, channel: _Channel, check: Callable[[], None]) -> dict[str, Any] | None:
        """Serve one connection to the first machine; return its last message, or None if it is lost."""
        beat = 0.0
        while True:
            check()
            if time.monotonic() > beat:
                channel.send({"id": None})
                beat = time.monotonic() + _BEAT_SECONDS
            ready = wait([channel.fileno(), *(p.connection for p in self._processes if not p.has_ended)], _POLL_SECONDS)
            for process, message in self._messages(0.0):
                channel.send({"id": self._id_of(process), **_reply(message)})
            self._report_failures(channel)
            self._kill_stopped()
            if channel.fileno() in ready:
                values = channel.receive()
                if values is None or values["do"] == "end":
                    return values
                self._do(values)

    def _do(self, values: dict[str, Any]) -> None:
        """Carry out a request of the first machine."""
        do, process = values["do"], self._by_id.get(values["id"])
        if do == "start":
            if values["size"] != self.size:
                raise LaunchError(
                    f"the job has {values['size']} ranks, but {self.size} by the settings of this machine: set "
                    "the same number of ranks on all"
                )
            with interrupts_blocked():
                started = self._spawn(values["rank"]) if not values["again"] else None
            if started is None:
                started = self._start_again(values["rank"])
            else:
                self._set_up(started)
            self._processes.append(started)
            self._by_id[values["id"]] = started
        elif process is None:
            return
        elif do == "send":
            process.send(_decode(values["message"]))
        elif do == "run":
            request = Run(self.target, pickle.dumps(tuple(values["args"])))
            process.send(request)
            self._start_spares(request)
        elif do == "signal":
            process.signal(values["number"])
        elif do == "stacks":
            process.write_stacks()
        elif do == "release":
            self._processes = [each for each in self._processes if each is not process]
            del self._by_id[values["id"]]
            self._reported.pop(values["id"], None)
            process.release()

    def _id_of(self, process: Process) -> int:
        return next(number for number, each in self._by_id.items() if each is process)

    def _report_failures(self, channel: _Channel) -> None:
        for number, process in self._by_id.items():
            if process.failure is not None and self._reported.get(number) != process.has_ended:
                self._reported[number] = process.has_ended
                failure = dataclasses.asdict(process.failure)
                channel.send({"id": number, "failure": failure, "has_ended": process.has_ended})

    def _clear(self) -> None:
        ReplacedRanks._clear(self)
        self._by_id, self._reported = {}, {}


class _Channel:
    """A connection of two machines that carries JSON objects."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        limits = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * _SILENT_SECONDS}
        for name, value in limits.items():
            if (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, values: dict[str, Any]) -> None:
        """Send an object. The loss of the other machine is noticed where its messages are read."""
        text = json.dumps(values).encode()
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(_LENGTH.pack(len(text)) + text)

    def limit_silence(self, seconds: int) -> None:
        """Take the other machine for lost if nothing comes from it for a time."""
        # Not `settimeout`, which limits sending, too.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))

    def greeting(self) -> dict[str, Any] | None:
        """Wait a limited time for a short first object of a process that may not belong to the job."""
        self._connection.settimeout(_GREETING_SECONDS)
        try:
            return self.receive(_MOST_GREETING_BYTES)
        finally:
            self._connection.settimeout(None)

    def receive(self, most: int = _MOST_BYTES) -> dict[str, Any] | None:
        """Wait for an object; None: the other machine is lost, or has sent something else or over `most` bytes."""
        try:
            (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
            found = json.loads(self._read(size)) if size <= most else None
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            if not (part := self._connection.recv(size - len(parts))):
                raise ConnectionError("the connection was closed")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Wakes a thread that waits there; what was sent before still arrives.
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _connect(file: Path, node: int, seconds: float, check: Callable[[], None]) -> _Channel:
    """Connect to the first machine, whose file may still be that of an earlier job, or raise a LaunchError."""
    deadline, problem = time.monotonic() + seconds, ""
    while time.monotonic() < deadline:
        check()
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            connection = socket.create_connection((values["host"], values["port"]), _CONNECT_SECONDS)
            channel = _Channel(connection)
            channel.send({"token": values["token"], "node": node})
            # Another process may have the port of an earlier job, or the one before this is not known to be lost yet.
            if channel.greeting() is not None:
                return channel
            channel.close()
            raise ConnectionError(f"{values['host']} does not welcome this machine")
        except (OSError, ValueError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
            time.sleep(_RETRY_SECONDS)
    raise LaunchError(
        f"machine {node}: the first machine of the job did not come within {seconds:g} s ({problem}). Start the same "
        f"command there, and check that {file} is in a folder that both see"
    )


def _encode(message: Any) -> dict[str, Any] | None:
    """Return a message to or from a rank as JSON values."""
    if isinstance(message, Meet):
        # Clocks differ between machines.
        values = dataclasses.asdict(message)
        values["generation"]["lost_at"] -= time.monotonic()
        return {"kind": "Meet", **values}
    return None if message is None else {"kind": type(message).__name__, **dataclasses.asdict(message)}


def _decode(values: dict[str, Any] | None) -> Any:
    if values is None:
        return None
    fields = {name: value for name, value in values.items() if name != "kind"}
    if values["kind"] != "Meet":
        return _MESSAGES[values["kind"]](**fields)
    generation: dict[str, Any] = dict(fields["generation"])
    generation |= {name: tuple(generation[name]) for name in ("newcomers", "hosts", "slots")}
    generation["lost_at"] += time.monotonic()
    return Meet(Generation(**generation), fields["address"])


def _reply(message: Any) -> dict[str, Any]:
    """Return an answer of a rank as JSON values: one of its messages, or what its function returned."""
    return {"message": _encode(message)} if type(message) in _MESSAGES.values() else {"returned": message}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
