"""The ranks of a job over torch.distributed: how they meet, under torchrun too, and how their groups connect."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hp_dtensor.comm.meeting_point import MeetingPoint
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import NoCommunicationGroup, World
from hp_dtensor.exceptions import CollectiveError, PlatformError
from hp_platform_torch.comm.groups import BACKEND_NAMES, FACTS, StagedGroup, TorchGroup, device_types, shares_devices
from hp_platform_torch.comm.shared_memory import connect_memory

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


class TorchWorld(World):
    """Ranks of a job over torch.distributed; its default group is the group of all ranks.

    Args:
        store: key-value store through which members of a new group connect; None in a job of one rank.
        timeout: the longest time that a collective waits for a peer.

    Attributes:
        memory: what ranks of this host share. None in a job of one rank, and where messages cannot be sent through it.
    """

    platform: Platform

    def __init__(self, rank: int, size: int, platform: Platform, store: dist.Store | None, timeout: timedelta) -> None:
        super().__init__(rank, size, platform)
        self._store = store
        self.memory = connect_memory(rank, size, store)
        self._timeout = timeout
        self._closed = False
        self._num_connections: Counter[str] = Counter()

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        if self._closed:
            raise CollectiveError(f"rank {self.rank} has left the job; it cannot make the group {ranks}")
        rank = ranks.index(self.rank)
        if len(ranks) == 1:
            return NoCommunicationGroup(ranks, rank, self.platform)
        # NCCL refuses two ranks on one device.
        kind = StagedGroup if self.platform.device_types[0] != "cpu" and shares_devices() else TorchGroup
        return kind(ranks, rank, self.platform, functools.partial(self.connect, ranks), self.memory)

    def framework_group(self, group: ProcessGroup, device_type: str) -> Any:
        """Return `group` as a `torch.distributed.ProcessGroup`; in a job without torch.distributed the group itself."""
        if not dist.is_initialized():
            return group
        return torch_group(group, "cpu" if isinstance(group, StagedGroup) else device_type)

    def release(self, group: ProcessGroup) -> None:
        super().release(group)
        # Torch finds a registered group by its name, and would go on using the closed connection of this one.
        for device_type in _BACKENDS if dist.is_initialized() else ():
            found = _registered(group.ranks, device_type)
            if found is not None:
                dist.destroy_process_group(found)

    def connect(self, ranks: tuple[int, ...], device_type: str) -> dist.Backend:
        """Return a backend for tensors of a device type, or for `FACTS`, among `ranks`; all of them must call it."""
        # Torch has connected the group of all ranks already; host data has a connection of its own, which other
        # collectives do not delay.
        if ranks == tuple(range(self.size)) and device_type != FACTS:
            return dist.group.WORLD._get_backend(torch.device(device_type))  # type: ignore[union-attr]
        # The same key on all members without communication, and short for any number of ranks.
        members = hashlib.sha256(repr(ranks).encode()).hexdigest()
        # A released group connects again under another key: the store still has the addresses of its old connection,
        # and a fast rank would read them before a slow one has written its new one. All members count alike.
        key = f"{device_type}/{members}"
        number = self._num_connections[key]
        self._num_connections[key] += 1
        store = dist.PrefixStore(f"{key}/{number}", self._store)
        # HCCL limits names to 127 characters.
        name = f"hp_{members[:32]}_{number}"
        return _BACKENDS[device_type](store, ranks, ranks.index(self.rank), self._timeout, name)

    def abort(self) -> None:
        """Abort the collectives of accelerators, which would wait for a dead peer; those of gloo fail by themselves."""
        for group in self.groups():
            for kind, connection in list(getattr(group, "_connections", {}).items()):
                if BACKEND_NAMES.get(kind, "gloo") != "gloo":
                    # One that cannot abort must not leave the others waiting.
                    with contextlib.suppress(Exception):
                        connection.abort()

    def close(self) -> None:
        self._closed = True
        super().close()
        self._store = self.memory = None


def _gloo(store: dist.Store, ranks: tuple[int, ...], rank: int, timeout: timedelta, name: str) -> dist.Backend:
    return dist.ProcessGroupGloo(store, rank, len(ranks), timeout)


def _nccl(store: dist.Store, ranks: tuple[int, ...], rank: int, timeout: timedelta, name: str) -> dist.Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, len(ranks), options)


def _hccl(store: dist.Store, ranks: tuple[int, ...], rank: int, timeout: timedelta, name: str) -> dist.Backend:
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    # As torch_npu's own helper sets them for `dist.new_group`.
    options = ProcessGroupHCCL.Options()
    options.is_high_priority_stream = False
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    options.group_id = name
    return ProcessGroupHCCL(store, rank, len(ranks), options)


_BACKENDS: dict[str, Callable[[dist.Store, tuple[int, ...], int, timedelta, str], dist.Backend]] = {
    "cpu": _gloo,
    "cuda": _nccl,
    "npu": _hccl,
    FACTS: _gloo,
}


_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def join(rank: int, size: int, address: str, timeout: timedelta, *, is_served: bool = False) -> dist.Store:
    """Create torch's default process group, which must not exist; return the store through which groups connect.

    Args:
        is_served: another process serves the store, as `serve` does.

    Raises:
        PlatformError: the address is wrong or not reached in time, or some ranks did not join.
    """
    _check_interfaces()
    by_agent = is_served or _served_by_agent(rank, size, address)
    point = MeetingPoint(rank, size, address, rank == 0 and not by_agent, timeout.total_seconds())
    # Torch itself would only repeat that an address cannot be retrieved.
    point.reach()
    try:
        with point.waiting_for_ranks():
            store = _store(point, by_agent, timeout)
            dist.init_process_group(_backend_names(), store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise PlatformError(
            f"rank {rank} of {size} could not join the job at {address} within {timeout.total_seconds():g} s: "
            f"{_message_of(error)}. Check that every rank was started, and its log"
        ) from error
    return dist.PrefixStore("groups", store)


def serve(host: str) -> tuple[str, Callable[[], None]]:
    """Serve a store at a free port of the loopback address `host`; return its address and a function that closes it."""
    listener = _listener(host, 0)
    port = listener.getsockname()[1]
    stores = [_store_at(listener, host, port, None, timedelta(seconds=30))]
    # The store ends with its last reference, which closes all connections to it.
    return f"{host}:{port}", stores.clear


def joined_store(connection: int) -> dist.Store:
    """Return the store of a default process group that the program created itself.

    Args:
        connection: how often this process, like every rank, has connected; keys differ between connections.
    """
    return dist.PrefixStore(f"hp/{connection}", distributed_c10d._get_default_store())


def leave() -> None:
    """Destroy torch's process groups, even those of a failed job."""
    if dist.is_initialized():  # otherwise the program has destroyed them already
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _store(point: MeetingPoint, by_agent: bool, timeout: timedelta) -> dist.Store:
    store, remaining = None, timedelta(seconds=point.remaining_seconds())
    if point.is_loopback():
        # Without this, gloo connects members through the network interface of the host name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK_INTERFACE)
        store = _serve_locally(point.host, point.port, point.size, remaining) if point.serves else None
    store = store or dist.TCPStore(point.host, point.port, point.size, is_master=point.serves, timeout=remaining)
    # Groups are created through it later.
    store.set_timeout(timeout)
    # The agent's store outlives the ranks: after a restart, keys of the failed attempt must not be found.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_agent else "0"
    return dist.PrefixStore(f"hp/attempt_{attempt}", store)


def _serve_locally(host: str, port: int, size: int, timeout: timedelta) -> dist.TCPStore:
    """Serve the store on the loopback interface.

    Torch itself listens on every interface, and any host that reaches the port can read and delete all keys.
    """
    return _store_at(_listener(host, port), host, port, size, timeout)


def _store_at(listener: socket.socket, host: str, port: int, size: int | None, timeout: timedelta) -> dist.TCPStore:
    # The store closes the socket. Without a size it waits for no rank.
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=size is not None,
        master_listen_fd=listener.detach(),
    )


def _listener(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # A port of a job that has just ended would otherwise be in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise RuntimeError(str(error)) from error
    return listener


def _check_interfaces() -> None:
    """Check the network interfaces that gloo is to use.

    Raises:
        PlatformError: one does not exist.
    """
    existing = [name for _, name in socket.if_nameindex()]
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    unknown = [name for name in wanted.split(",") if name and name not in existing]
    if unknown:
        raise PlatformError(
            f"GLOO_SOCKET_IFNAME={wanted}: this machine has no network interface {', '.join(unknown)}; it has "
            f"{', '.join(existing) or 'none'}. Unset the variable, or name one of these"
        )


def _message_of(error: Exception) -> str:
    """Return the message of torch's error, without the C++ frames below it."""
    return str(error).partition("\nException raised from")[0].strip()


def _served_by_agent(rank: int, size: int, address: str) -> bool:
    """Return True if torchrun's agent serves the store at MASTER_PORT, and started this rank."""
    expected = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_PORT": address.rpartition(":")[2],
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
    }
    return all(os.environ.get(name) == value for name, value in expected.items())


def _backend_names() -> str:
    """Return the backend per device type in torch's notation: `cpu:gloo,cuda:nccl`."""
    if shares_devices():
        return "cpu:gloo"
    return ",".join(f"{device}:{BACKEND_NAMES[device]}" for device in device_types())


# Our groups as torch's ------------------------------------------------------------------------------------


def torch_group(group: ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Return a group as torch's `ProcessGroup`, registered in torch's tables, over the same backend.

    `dist.new_group` would open a second connection, and every rank of the job would have to call it.
    """
    world_group = dist.group.WORLD
    assert world_group is not None
    if group.ranks == tuple(range(dist.get_world_size())):
        return world_group
    found = _registered(group.ranks, device_type)
    return found if found is not None else _register(group, _torch_name(group.ranks, device_type), device_type)


def _torch_name(ranks: tuple[int, ...], device_type: str) -> str:
    return f"hp_{device_type}_{'_'.join(map(str, ranks))}"


def _registered(ranks: tuple[int, ...], device_type: str) -> dist.ProcessGroup | None:
    # Named by the ranks: all members derive the same name without communication.
    name = _torch_name(ranks, device_type)
    # Looked up in torch's tables, not in one of ours: `destroy_process_group` of the program clears them.
    return next((pg for pg, known in distributed_c10d._world.pg_names.items() if known == name), None)


def _register(group: ProcessGroup, name: str, device_type: str) -> dist.ProcessGroup:
    """Register a group in torch's tables, as `dist.new_group` does."""
    store = dist.PrefixStore(name, distributed_c10d._get_default_store())
    # The steps of torch's `_new_process_group_helper`, but with our connection instead of a new backend.
    made = dist.ProcessGroup(store, group.rank, group.size)
    kind = dist.Backend.backend_type_map[BACKEND_NAMES[device_type]]
    made._set_default_backend(kind)
    connection: Any = dist.ProcessGroupGloo(store, 0, 1) if group.size == 1 else group.connection(device_type)  # type: ignore[attr-defined]
    made._register_backend(torch.device(device_type), kind, connection)
    made._set_group_name(name)
    made._set_group_desc(name)
    tables = distributed_c10d._world
    tables.pg_map[made] = (BACKEND_NAMES[device_type], store)
    tables.pg_names[made] = name
    tables.pg_backend_config[made] = f"{device_type}:{BACKEND_NAMES[device_type]}"
    tables.pg_to_tag[made] = f"ptd:{name}"
    tables.tags_to_pg.setdefault(f"ptd:{name}", []).append(made)
    tables.pg_group_ranks[made] = {rank: index for index, rank in enumerate(group.ranks)}
    distributed_c10d._register_process_group(name, made)
    return made
