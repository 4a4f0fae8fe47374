"""Ranks and process groups over torch.distributed: gloo on CPU, NCCL on CUDA, HCCL on Ascend.

Every group of more than one rank has a backend per device type, so that host-side facts always travel by
gloo, whatever the device of the tensors. What a backend lacks is composed from what it has, by the one
table `CAPABILITIES`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hp_dtensor.exceptions import CapabilityError, CollectiveError, PlatformError
from hp_dtensor.world import DONE, NoCommunicationGroup, ProcessGroup, Work, World

if TYPE_CHECKING:
    from hp_dtensor.platform import Platform

Tensor = torch.Tensor

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
        reduce_scatter: native; else an all-to-all whose parts are reduced here, in rank order. On gloo that
            is faster than the native one at every size measured (2 to 4 ranks, 1 KB to 16 MB), and bfloat16
            accumulates in float32.
        as_bytes: dtypes that are moved as bytes.
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
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


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


def _settle(work: Work, async_op: bool) -> Work:
    if async_op:
        return work
    work.wait()
    return DONE


class TorchGroup(ProcessGroup):
    """A group of two ranks or more; `group` is torch's, whose ranks are always ascending."""

    platform: Platform

    def __init__(self, ranks: tuple[int, ...], rank: int, platform: Platform, group: dist.ProcessGroup | None) -> None:
        super().__init__(ranks, rank, platform)
        self._group = group
        ascending = sorted(ranks)
        self._slots = None if ascending == list(ranks) else [ascending.index(member) for member in ranks]

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        if op == "avg":
            _check_average(x)
        can = CAPABILITIES[x.device.type]
        buffer = x.to(torch.int32) if x.dtype in can.as_int32 else x
        work: Work = dist.all_reduce(buffer, REDUCE_OPS[op], self._group, async_op=True)
        if buffer is not x:
            work = _Then(work, lambda: x.copy_(buffer))
        if op == "avg":
            work = _Then(work, lambda: x.div_(self.size))
        return _settle(work, async_op)

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        into, sent = _movable(output), _movable(x)
        slots = self._slots
        gathered = into if slots is None else torch.empty_like(into)
        work: Work = dist.all_gather_into_tensor(gathered.view(-1), sent.view(-1), self._group, async_op=True)
        if slots is not None:
            rows = gathered.view(self.size, -1)
            work = _Then(work, lambda: into.view(self.size, -1).copy_(rows[slots]))
        return _settle(work, async_op)

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        if op == "avg":
            _check_average(x)
        rows = x.reshape(self.size, -1)
        can = CAPABILITIES[x.device.type]
        if not can.reduce_scatter or x.dtype in can.as_int32:
            received = torch.empty_like(rows)
            counts = (1,) * self.size
            work = self._all_to_all_into(received, rows, counts, counts, True)
            return _settle(_Then(work, lambda: _reduce_rows(received, op, output)), async_op)
        if self._slots is not None:
            rows = rows[_inverse(self._slots)]
        work = dist.reduce_scatter_tensor(output.view(-1), rows.view(-1), REDUCE_OPS[op], self._group, async_op=True)
        if op == "avg":
            work = _Then(work, lambda: output.div_(self.size))
        return _settle(work, async_op)

    def _all_to_all_into(
        self,
        output: Tensor,
        x: Tensor,
        output_rows: tuple[int, ...],
        input_rows: tuple[int, ...],
        async_op: bool,
    ) -> Work:
        into, sent = _movable(output), _movable(x)
        slots = self._slots
        if slots is None:
            work: Work = dist.all_to_all_single(
                into, sent, list(output_rows), list(input_rows), self._group, async_op=True
            )
            return _settle(work, async_op)
        order = _inverse(slots)
        parts = sent.split(list(input_rows))
        received = torch.empty_like(into)
        arriving = [output_rows[j] for j in order]
        leaving = [input_rows[j] for j in order]
        ordered = torch.cat([parts[j] for j in order])
        work = dist.all_to_all_single(received, ordered, arriving, leaving, self._group, async_op=True)

        def put_in_group_order() -> None:
            pieces = received.split(arriving)
            torch.cat([pieces[slot] for slot in slots], out=into)

        return _settle(_Then(work, put_in_group_order), async_op)

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        operations = []
        for j, peer in enumerate(self.ranks):
            if j == self.rank:
                continue
            into, sent = receives[j], sends[j]
            if sent is not None and sent.numel():
                operations.append(dist.P2POp(dist.isend, _movable(sent), peer, self._group))
            if into is not None and into.numel():
                operations.append(dist.P2POp(dist.irecv, _movable(into), peer, self._group))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        return _settle(dist.broadcast(_movable(x), self.ranks[source], self._group, async_op=True), async_op)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = torch.empty(self.size, dtype=torch.int64)
        self._all_gather_into(lengths, torch.tensor([len(data)]), False)
        longest = int(lengths.max())
        if longest == 0:
            return [b""] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = torch.empty(self.size, longest, dtype=torch.uint8)
        self._all_gather_into(gathered, padded, False)
        return [row[:length].numpy().tobytes() for row, length in zip(gathered, lengths.tolist(), strict=True)]


class TorchWorld(World):
    """The ranks of a job joined through torch.distributed."""

    platform: Platform

    def __init__(self, rank: int, size: int, platform: Platform, timeout: timedelta) -> None:
        super().__init__(rank, size, platform)
        self._timeout = timeout
        self._closed = False

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        if self._closed:
            raise CollectiveError(f"rank {self.rank} has left the job; it cannot make the group {ranks}")
        rank = ranks.index(self.rank)
        if len(ranks) == 1:
            return NoCommunicationGroup(ranks, rank, self.platform)
        if sorted(ranks) == list(range(self.size)):
            return TorchGroup(ranks, rank, self.platform, None)
        group = dist.new_group(
            sorted(ranks), timeout=self._timeout, backend=_backends(), use_local_synchronization=True
        )
        return TorchGroup(ranks, rank, self.platform, group)

    def close(self) -> None:
        self._closed = True
        self._groups.clear()


def join(rank: int, size: int, address: str, timeout: timedelta) -> None:
    """Make torch's default process group; torch must not have one yet."""
    store = _store(rank, size, address, timeout)
    try:
        dist.init_process_group(_backends(), store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise PlatformError(
            f"rank {rank} of {size} could not join the job at {address} within {timeout.total_seconds():g} s: {error}"
        ) from error


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


def _backends() -> str:
    """A backend for each kind of device here, such as `cpu:gloo,cuda:nccl`."""
    return ",".join(f"{device}:{BACKENDS[device]}" for device in device_types())


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
    if x.dtype not in CAPABILITIES[x.device.type].as_bytes:
        return x
    return x.unsqueeze(-1).view(torch.uint8) if x.dim() < 2 else x.view(torch.uint8)


def _reduce_rows(rows: Tensor, op: str, output: Tensor) -> None:
    """Reduce dim 0 of `rows` `[ranks, elements]`, in rank order, into `output` of as many elements."""
    if op in ("max", "min"):
        result = rows.amax(0) if op == "max" else rows.amin(0)
    elif rows.dtype == torch.bool:
        result = rows.any(0) if op == "sum" else rows.all(0)
    elif op == "product":
        result = rows.prod(0, dtype=rows.dtype)
    else:
        result = torch.sum(rows, 0, dtype=rows.dtype, out=output.view(-1))
        if op == "avg":
            result.div_(rows.shape[0])
        return
    output.copy_(result.view(output.shape))


def _check_average(x: Tensor) -> None:
    if not x.is_floating_point():
        raise CapabilityError(
            f"the reduction 'avg' needs a floating-point tensor, got {x.dtype}; reduce with 'sum' and divide"
        )


def _inverse(slots: Sequence[int]) -> list[int]:
    order = [0] * len(slots)
    for j, slot in enumerate(slots):
        order[slot] = j
    return order
