"""Ranks and process groups over torch.distributed: gloo on CPU, NCCL on CUDA, HCCL on Ascend.

A group connects one backend per device type, and one for host-side facts, on first use: these always travel by gloo,
whatever the device of the tensors. What a backend lacks is composed from what it has, by the one table
`CAPABILITIES`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hp_dtensor.comm.world import DONE, NoCommunicationGroup, PendingBytes, ProcessGroup, Work, World
from hp_dtensor.exceptions import CapabilityError, CollectiveError, PlatformError

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform

Tensor = torch.Tensor

POLL_SECONDS = 0.0001

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # the sum is divided afterwards: no backend averages every dtype
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend does by itself; the rest is composed.

    Attributes:
        reduce_scatter: native; else parts are sent to their ranks and reduced there, in rank order. On gloo that
            is faster than the native one at every size measured (2 to 4 ranks, 1 KB to 16 MB), takes less memory
            (none between two ranks), and bfloat16 accumulates in float32.
        as_bytes: dtypes that are moved as bytes; complex ones always are, and are summed as two real numbers each.
        as_int32: dtypes that are reduced as int32.
    """

    reduce_scatter: bool
    as_bytes: frozenset[torch.dtype] = frozenset({torch.int16})
    as_int32: frozenset[torch.dtype] = frozenset({torch.int16})


CAPABILITIES = {
    "cpu": Capabilities(reduce_scatter=False),
    "cuda": Capabilities(reduce_scatter=True),
    "npu": Capabilities(
        reduce_scatter=True,
        as_bytes=frozenset({torch.int16, torch.bool}),
        as_int32=frozenset({torch.int16, torch.bool, torch.uint8}),
    ),
}


class _Then:
    """The work of a composed collective: `finish` runs once the communication is over."""

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        self._work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class _Exchange:
    """Sends and receives of one collective.

    Gloo matches those of two ranks in the order in which they begin, and one that is let go of under way takes what
    follows with it. So a group keeps them, also those that nobody waits for after an error, and ends them in order.

    Args:
        works: each is waited for once, as gloo's point-to-point works can be.
        unfinished: of the group, in the order in which they began.
    """

    def __init__(self, works: Sequence[Work], unfinished: list[_Exchange]) -> None:
        self._works = list(works)
        self._unfinished = unfinished
        unfinished.append(self)

    def wait(self) -> None:
        while self in self._unfinished:
            self._unfinished[0]._end()
            del self._unfinished[0]

    def _end(self) -> None:
        while self._works:
            self._works[0].wait()
            del self._works[0]


class _PendingFacts:
    """Bytes that each rank's row of `gathered` holds once `work` is over."""

    def __init__(self, work: Any, gathered: Tensor) -> None:
        self._work = work
        self._gathered = gathered

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        if timeout_seconds is not None:
            deadline = time.monotonic() + timeout_seconds
            while not self._work.is_completed():
                if time.monotonic() >= deadline:
                    return None
                time.sleep(POLL_SECONDS)
        self._work.wait()
        return [row.tobytes() for row in self._gathered.numpy()]


def _settle(work: Work | None, async_op: bool) -> Work:
    if async_op and work is not None:
        return work
    if work is not None:
        work.wait()
    return DONE


class TorchGroup(ProcessGroup):
    """A group of two ranks or more.

    It calls torch's backends themselves. `dist.new_group(use_local_synchronization=True)` is no help: it
    names a group after the number of groups that *this* rank has (torch 2.13), so that members which are in
    different numbers of other groups wait for each other for ever; and it sorts the ranks.

    Args:
        connect: makes the backend for a device type; called once for each that is used.
    """

    platform: Platform

    def __init__(
        self, ranks: tuple[int, ...], rank: int, platform: Platform, connect: Callable[[str], dist.Backend]
    ) -> None:
        super().__init__(ranks, rank, platform)
        self.backend = BACKEND_NAMES[platform.device_types[0]]
        self._connect = connect
        self._connections: dict[str, Any] = {}
        self._exchanges: list[_Exchange] = []

    def close(self) -> None:
        """End the backends' threads now: one that still works while Python shuts down aborts the process."""
        super().close()
        self._exchanges.clear()
        self._connections.clear()

    def connection(self, device_type: str) -> Any:
        """The backend that carries tensors of a device type, or `FACTS`."""
        found = self._connections.get(device_type)
        if found is None:
            if self.is_closed:
                raise CollectiveError(f"the group {self.ranks} has been released, or its job left; ask for it again")
            found = self._connections[device_type] = self._connect(device_type)
        return found

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        _check_reduction(x, op)
        buffer = x.to(torch.int32) if x.dtype in CAPABILITIES[x.device.type].as_int32 else x
        summed = torch.view_as_real(x) if x.is_complex() else buffer
        options = _options(distributed_c10d.AllreduceOptions, async_op, reduceOp=REDUCE_OPS[op])
        work: Work = self.connection(x.device.type).allreduce([summed], options)
        if buffer is not x:
            work = _Then(work, lambda: x.copy_(buffer))
        if op == "avg":
            work = _Then(work, lambda: x.div_(self.size))
        return _settle(work, async_op)

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        into, sent = _movable(output).view(-1), _movable(x).view(-1)
        options = _options(distributed_c10d.AllgatherOptions, async_op)
        return _settle(self.connection(x.device.type)._allgather_base(into, sent, options), async_op)

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        _check_reduction(x, op)
        can = CAPABILITIES[x.device.type]
        if not can.reduce_scatter:
            return _settle(self._exchange_and_reduce(output.view(-1), x.view(self.size, -1), op), async_op)
        as_int32 = x.dtype in can.as_int32
        into, sent = (output.to(torch.int32), x.to(torch.int32)) if as_int32 else (output, x)
        if x.is_complex():
            into, sent = torch.view_as_real(into), torch.view_as_real(sent)
        options = _options(distributed_c10d.ReduceScatterOptions, async_op, reduceOp=REDUCE_OPS[op])
        work = self.connection(x.device.type)._reduce_scatter_base(into.view(-1), sent.view(-1), options)
        if as_int32:
            work = _Then(work, lambda: output.copy_(into))
        if op == "avg":
            work = _Then(work, lambda: output.div_(self.size))
        return _settle(work, async_op)

    def _exchange_and_reduce(self, output: Tensor, rows: Tensor, op: str) -> Work:
        """Send each rank its row of `rows` `[ranks, elements]`; reduce what arrives, in rank order, into `output`."""
        others = [j for j in range(self.size) if j != self.rank]
        arriving = [output, *output.new_empty(self.size - 2, output.numel())]
        connection = self.connection(rows.device.type)
        works = [connection.recv([_movable(row)], j, 0) for j, row in zip(others, arriving, strict=True)]
        works += [connection.send([_movable(rows[j])], j, 0) for j in others]

        def reduce() -> None:
            # The first two in either order; one of them is in `output`.
            parts = {**dict(zip(others, arriving, strict=True)), self.rank: rows[self.rank]}
            _reduce_into(output, [parts[j] for j in range(self.size) if parts[j] is not output], op)
            if op == "avg":
                output.div_(self.size)

        return _Then(_Exchange(works, self._exchanges), reduce)

    def _all_to_all_into(
        self,
        output: Tensor,
        x: Tensor,
        output_rows: tuple[int, ...],
        input_rows: tuple[int, ...],
        async_op: bool,
    ) -> Work:
        options = _options(distributed_c10d.AllToAllOptions, async_op)
        work = self.connection(x.device.type).alltoall_base(
            _movable(output), _movable(x), list(output_rows), list(input_rows), options
        )
        return _settle(work, async_op)

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        tensors = [x for x in (*sends, *receives) if x is not None]
        if not tensors:
            return
        nothing = tensors[0].new_empty(0)
        leaving = [self._for_others(j, x, nothing) for j, x in enumerate(sends)]
        arriving = [self._for_others(j, x, nothing) for j, x in enumerate(receives)]
        if nothing.device.type != "cpu":
            options = _options(distributed_c10d.AllToAllOptions, False)
            _settle(self.connection(nothing.device.type).alltoall(arriving, leaving, options), False)
            return
        gloo = self.connection("cpu")  # its all-to-all takes one tensor only
        works = [gloo.send([x], j, 0) for j, x in enumerate(leaving) if x.numel()]
        works += [gloo.recv([x], j, 0) for j, x in enumerate(arriving) if x.numel()]
        for work in works:
            work.wait()

    def _for_others(self, j: int, x: Tensor | None, nothing: Tensor) -> Tensor:
        return _movable(nothing if x is None or j == self.rank else x)

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        options = _options(distributed_c10d.BroadcastOptions, async_op, rootRank=source, rootTensor=0)
        return _settle(self.connection(x.device.type).broadcast([_movable(x)], options), async_op)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = torch.empty(self.size, dtype=torch.int64)
        self._gather_facts(lengths, torch.tensor([len(data)])).wait()
        longest = int(lengths.max())
        if longest == 0:
            return [b""] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = torch.empty(self.size, longest, dtype=torch.uint8)
        self._gather_facts(gathered, padded).wait()
        return [row[:length].numpy().tobytes() for row, length in zip(gathered, lengths.tolist(), strict=True)]

    def _start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        gathered = torch.empty(self.size, len(data), dtype=torch.uint8)
        return _PendingFacts(
            self._gather_facts(gathered, torch.frombuffer(bytearray(data), dtype=torch.uint8)), gathered
        )

    def _gather_facts(self, output: Tensor, x: Tensor) -> Any:
        """By a connection of their own: they meet each other even where ranks disagree on the tensors' collectives."""
        return self.connection(FACTS)._allgather_base(
            output.view(-1), x, _options(distributed_c10d.AllgatherOptions, True)
        )


class TorchWorld(World):
    """The ranks of a job joined through torch.distributed, whose default group is the group of all.

    Args:
        store: where new groups meet; None for a job of one rank.
    """

    platform: Platform

    def __init__(self, rank: int, size: int, platform: Platform, store: dist.Store | None, timeout: timedelta) -> None:
        super().__init__(rank, size, platform)
        self._store = store
        self._timeout = timeout
        self._closed = False

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        if self._closed:
            raise CollectiveError(f"rank {self.rank} has left the job; it cannot make the group {ranks}")
        rank = ranks.index(self.rank)
        if len(ranks) == 1:
            return NoCommunicationGroup(ranks, rank, self.platform)
        return TorchGroup(ranks, rank, self.platform, functools.partial(self._connect, ranks))

    def _connect(self, ranks: tuple[int, ...], device_type: str) -> dist.Backend:
        if ranks == tuple(range(self.size)) and device_type != FACTS:
            return dist.group.WORLD._get_backend(torch.device(device_type))  # type: ignore[union-attr]
        members = hashlib.sha256(repr(ranks).encode()).hexdigest()
        store = dist.PrefixStore(f"{device_type}/{members}", self._store)
        return _BACKENDS[device_type](store, ranks.index(self.rank), len(ranks), self._timeout)

    def close(self) -> None:
        self._closed = True
        super().close()
        self._store = None


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _hccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options._timeout = timeout
    return ProcessGroupHCCL(store, rank, size, options)


BACKEND_NAMES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
# What carries host-side facts, beside one device type each.
FACTS = "facts"
_BACKENDS = {"cpu": _gloo, "cuda": _nccl, "npu": _hccl, FACTS: _gloo}


def _options(kind: type[Any], async_op: bool, **fields: Any) -> Any:
    options = kind()
    options.asyncOp = async_op
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def join(rank: int, size: int, address: str, timeout: timedelta) -> dist.Store:
    """Make torch's default process group, which must not exist yet; the store where its groups meet.

    Raises:
        PlatformError: the address is wrong or not reached in time, or not all ranks came.
    """
    store = _store(rank, size, address, timeout)
    try:
        dist.init_process_group(_backend_names(), store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise PlatformError(
            f"rank {rank} of {size} could not join the job at {address} within {timeout.total_seconds():g} s: {error}"
        ) from error
    return dist.PrefixStore("groups", store)


def joined_store(connection: int) -> dist.Store:
    """The store of the default process group that the program has made itself.

    Args:
        connection: how often this process, like every rank, has connected; keys are not met twice.
    """
    return dist.PrefixStore(f"hp/{connection}", distributed_c10d._get_default_store())


def leave() -> None:
    """Destroy torch's process groups, also those of a job that has failed."""
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


def _store(rank: int, size: int, address: str, timeout: timedelta) -> dist.Store:
    host, port = _host_and_port(address)
    by_agent = _served_by_agent(rank, size, port)
    try:
        store = dist.TCPStore(host, port, size, is_master=rank == 0 and not by_agent, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        role = "serve" if rank == 0 and not by_agent else "reach"
        raise PlatformError(
            f"rank {rank} of {size} could not {role} the meeting point {address}: {error}. "
            "Check that the address is right, the port free on rank 0, and every rank started."
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_agent else "0"
    return dist.PrefixStore(f"hp/attempt_{attempt}", store)


def _served_by_agent(rank: int, size: int, port: int) -> bool:
    """Whether torchrun's agent serves the store at MASTER_PORT already, for every restart of this very rank."""
    expected = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
    }
    return all(os.environ.get(name) == value for name, value in expected.items())


def _host_and_port(address: str) -> tuple[str, int]:
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise PlatformError(f"the meeting point must be host:port, such as 127.0.0.1:29500; got {address!r}")
    return host.strip("[]"), int(port)


def _backend_names() -> str:
    """A backend for each kind of device here, such as `cpu:gloo,cuda:nccl`."""
    return ",".join(f"{device}:{BACKEND_NAMES[device]}" for device in device_types())


def device_types() -> tuple[str, ...]:
    """The kinds of device that torch can use here, best first."""
    found = ["cpu"]
    if torch.cuda.is_available():
        found.insert(0, "cuda")
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        found.insert(0, "npu")
    return tuple(found)


def _movable(x: Tensor) -> Tensor:
    """`x`, as bytes where its dtype cannot travel: the same storage with the same number of rows."""
    if x.dtype not in CAPABILITIES[x.device.type].as_bytes and not x.is_complex():
        return x
    # By way of one dimension, since empty tensors may have any strides, with which torch reinterprets nothing.
    rows = x.shape[0] if x.dim() else 1
    return x.view(-1).view(torch.uint8).view(rows, x.numel() * x.element_size() // max(rows, 1))


_COMBINE = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
_COMBINE_BOOL = {**_COMBINE, "sum": torch.logical_or, "product": torch.logical_and}


def _reduce_into(output: Tensor, others: Sequence[Tensor], op: str) -> None:
    """Combine `output` with `others` in turn; sums and products of several are rounded once."""
    combine = (_COMBINE_BOOL if output.dtype == torch.bool else _COMBINE)[op]
    is_rounded_once = len(others) == 1 or output.dtype not in (torch.bfloat16, torch.float16)
    total = output if is_rounded_once else output.float()
    for other in others:
        combine(total, other, out=total)
    if not is_rounded_once:
        output.copy_(total)


def _check_reduction(x: Tensor, op: str) -> None:
    if x.is_complex() and op != "sum":
        raise CapabilityError(f"the reduction {op!r} of complex numbers, got {x.dtype}; they can be reduced with 'sum'")
    if op == "avg" and not x.is_floating_point():
        raise CapabilityError(
            f"the reduction 'avg' needs a floating-point tensor, got {x.dtype}; reduce with 'sum' and divide"
        )
