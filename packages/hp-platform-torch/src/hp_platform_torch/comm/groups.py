"""Dispatch modes of torch that watch this thread, and whose they are.

Works: communications under way, which the caller waits for.

Process groups over the backends of torch.distributed: gloo on CPU, NCCL on CUDA, HCCL on Ascend.

A group connects one backend per device type, and one for host-side facts, on first use: these always travel by gloo,
whatever the device of the tensors. What a backend lacks is composed from what it has, by the one table `CAPABILITIES`.

Ranks that share an accelerator: their collectives go by way of host memory, over gloo.

NCCL refuses two ranks of a job on one device. With `HP_BACKEND=gloo` several may share one, so that a program of
several processes runs, and is tested, where there is one card; it is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hp_dtensor.comm.process_group import DONE, PendingBytes, ProcessGroup, Rows, Work
from hp_dtensor.exceptions import CollectiveError
from hp_platform_torch.comm.backends import BACKEND_NAMES, CAPABILITIES, check_reduction, movable

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


_num_dispatch_modes = torch._C._len_torch_dispatch_stack  # of this thread


def is_watched() -> bool:
    """Return True if a dispatch mode of this thread is somebody's who does not know of shards.

    Such a mode (torch's `FlopCounterMode`, say) takes what it is given for the whole, so it is shown plain tensors and
    torch's own process groups. Our own modes say `knows_shards` and change nothing of what is computed.
    """
    return bool(_num_dispatch_modes()) and any(
        not getattr(mode, "knows_shards", False) for mode in _get_current_dispatch_mode_stack()
    )


Tensor = torch.Tensor

POLL_SECONDS = 0.0001


class Then:
    """A communication with local work after it: `wait` waits for the first and then calls `finish`, once."""

    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self._work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        self._work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Exchange:
    """The sends and receives that one composed collective consists of.

    Gloo matches those of two ranks in the order in which they begin, and one that is let go of under way takes what
    follows with it. So a group keeps them, also those that nobody waits for after an error, and ends them in order.

    Args:
        works: each is waited for once, as gloo's point-to-point works can be.
        unfinished: of the group, in the order in which they began.
        kept: what must live until they are over.
    """

    def __init__(self, works: Sequence[Work], unfinished: list[Exchange], kept: object = None) -> None:
        self._works = list(works)
        self._kept = kept
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
        self._kept = None


class PendingFacts:
    """An all-gather of bytes under way; row `i` of `gathered` `[ranks, bytes]` is that of rank `i`."""

    def __init__(self, work: Any, gathered: Tensor) -> None:
        self._work = work
        self._gathered = gathered

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        """Return the bytes of all ranks in rank order, or None if some rank did not answer in time."""
        if timeout_seconds is not None:
            deadline = time.monotonic() + timeout_seconds
            while not self._work.is_completed():
                if time.monotonic() >= deadline:
                    return None
                time.sleep(POLL_SECONDS)
        self._work.wait()
        return [row.tobytes() for row in self._gathered.numpy()]


def settle(work: Work | None, async_op: bool) -> Work:
    """Return `work` to a caller that waits for it later; else wait now and return `DONE`."""
    if async_op and work is not None:
        return work
    if work is not None:
        work.wait()
    return DONE


FACTS = "facts"
"""The connection for host-side facts, beside one for each kind of device."""

_SUMMED_NATIVELY = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Dtypes whose reduce-scatter is gloo's own under a dispatch mode, which could not tell what a composed one is."""

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # the sum is divided afterwards: no backend averages every dtype
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class TorchGroup(ProcessGroup):
    """A process group of two ranks or more.

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
        self._seen_by_modes: dict[str, dist.ProcessGroup] = {}
        self._exchanges: list[Exchange] = []

    def close(self) -> None:
        """Release the backends, which ends their threads: one that still works while Python shuts down aborts it."""
        super().close()
        self._exchanges.clear()
        self._seen_by_modes.clear()
        self._connections.clear()

    def connection(self, device_type: str) -> Any:
        """Return the backend that carries tensors of a device type, or `FACTS`; make it at the first call."""
        found = self._connections.get(device_type)
        if found is None:
            if self.is_closed:
                raise CollectiveError(f"the group {self.ranks} has been released, or its job left; ask for it again")
            found = self._connections[device_type] = self._connect(device_type)
        return found

    def _channel(self, device_type: str) -> Any:
        """Return what carries tensors: the backend, or under a dispatch mode a process group around it.

        The mode (torch's `CommDebugMode`, say) sees the calls of a process group, which go through torch's dispatcher.
        """
        if not is_watched():
            return self.connection(device_type)
        found = self._seen_by_modes.get(device_type)
        if found is None:
            found = self._seen_by_modes[device_type] = around(
                self.connection(device_type), device_type, self.rank, self.size
            )
        return found

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        check_reduction(x, op)
        buffer = x.to(torch.int32) if x.dtype in CAPABILITIES[x.device.type].as_int32 else x
        # A sum of complex numbers is one of pairs of real ones; backends know only these.
        summed = torch.view_as_real(x) if x.is_complex() else buffer
        options = _options(distributed_c10d.AllreduceOptions, async_op, reduceOp=REDUCE_OPS[op])
        work: Work = self._channel(x.device.type).allreduce([summed], options)
        if buffer is not x:
            work = Then(work, lambda: x.copy_(buffer))
        if op == "avg":
            # Not every backend has an average; divided after the sum it is rounded once, in the same way on all of
            # them.
            work = Then(work, lambda: x.div_(self.size))
        return settle(work, async_op)

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        into, sent = movable(output).view(-1), movable(x).view(-1)
        options = _options(distributed_c10d.AllgatherOptions, async_op)
        return settle(self._channel(x.device.type)._allgather_base(into, sent, options), async_op)

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        check_reduction(x, op)
        can = CAPABILITIES[x.device.type]
        if not can.reduce_scatter and not (is_watched() and x.dtype in _SUMMED_NATIVELY):
            return settle(self._exchange_and_reduce(output.view(-1), x.view(self.size, -1), op), async_op)
        as_int32 = x.dtype in can.as_int32
        into, sent = (output.to(torch.int32), x.to(torch.int32)) if as_int32 else (output, x)
        if x.is_complex():
            into, sent = torch.view_as_real(into), torch.view_as_real(sent)
        options = _options(distributed_c10d.ReduceScatterOptions, async_op, reduceOp=REDUCE_OPS[op])
        work = self._channel(x.device.type)._reduce_scatter_base(into.view(-1), sent.view(-1), options)
        if as_int32:
            work = Then(work, lambda: output.copy_(into))
        if op == "avg":
            work = Then(work, lambda: output.div_(self.size))
        return settle(work, async_op)

    def _exchange_and_reduce(self, output: Tensor, rows: Tensor, op: str) -> Work:
        """Send each rank its row of `rows` `[ranks, elements]`; reduce what arrives, in rank order, into `output`."""
        # One buffer less than ranks: what the first other rank sends lands in the output itself, the own row stays
        # where it is.
        others = [j for j in range(self.size) if j != self.rank]
        arriving = [output, *output.new_empty(self.size - 2, output.numel())]
        connection = self._channel(rows.device.type)
        works = [connection.recv([movable(row)], j, 0) for j, row in zip(others, arriving, strict=True)]
        works += [connection.send([movable(rows[j])], j, 0) for j in others]

        def reduce() -> None:
            # The first two in either order; one of them is in `output`.
            parts = {**dict(zip(others, arriving, strict=True)), self.rank: rows[self.rank]}
            reduce_into(output, [parts[j] for j in range(self.size) if parts[j] is not output], op)
            if op == "avg":
                output.div_(self.size)

        return Then(Exchange(works, self._exchanges), reduce)

    def _all_to_all_into(self, output: Tensor, x: Tensor, output_rows: Rows, input_rows: Rows, async_op: bool) -> Work:
        options = _options(distributed_c10d.AllToAllOptions, async_op)
        work = self._channel(x.device.type).alltoall_base(
            movable(output), movable(x), list(output_rows), list(input_rows), options
        )
        return settle(work, async_op)

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        self._start_exchange(sends, receives).wait()

    def _start_exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:
        tensors = [x for x in (*sends, *receives) if x is not None]
        # Neither sends nor receives: the other ranks leave this one out as well, so nobody waits for it.
        if not tensors:
            return DONE
        nothing = tensors[0].new_empty(0)
        leaving = [self._for_others(j, x, nothing) for j, x in enumerate(sends)]
        arriving = [self._for_others(j, x, nothing) for j, x in enumerate(receives)]
        if nothing.device.type != "cpu":
            options = _options(distributed_c10d.AllToAllOptions, True)
            return settle(self._channel(nothing.device.type).alltoall(arriving, leaving, options), True)
        gloo = self._channel("cpu")  # its all-to-all takes one tensor only
        works = [gloo.send([x], j, 0) for j, x in enumerate(leaving) if x.numel()]
        works += [gloo.recv([x], j, 0) for j, x in enumerate(arriving) if x.numel()]
        # Gloo's works do not hold their tensors.
        return Exchange(works, self._exchanges, (leaving, arriving))

    def _for_others(self, j: int, x: Tensor | None, nothing: Tensor) -> Tensor:
        return movable(nothing if x is None or j == self.rank else x)

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        options = _options(distributed_c10d.BroadcastOptions, async_op, rootRank=source, rootTensor=0)
        return settle(self._channel(x.device.type).broadcast([movable(x)], options), async_op)

    def _send(self, x: Tensor, target: int, async_op: bool) -> Work:
        return settle(self._channel(x.device.type).send([movable(x)], target, 0), async_op)

    def _receive(self, x: Tensor, source: int, async_op: bool) -> Work:
        return settle(self._channel(x.device.type).recv([movable(x)], source, 0), async_op)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        # Facts are exchanged in host memory, also inside of `torch.device("meta")`, where a model is built.
        # Two rounds, for lengths differ between ranks: those first, then the bytes, padded to the longest.
        lengths = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self._gather_facts(lengths, torch.tensor([len(data)], device="cpu")).wait()
        longest = int(lengths.max())
        if longest == 0:
            return [b""] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = torch.empty(self.size, longest, dtype=torch.uint8, device="cpu")
        self._gather_facts(gathered, padded).wait()
        return [row[:length].numpy().tobytes() for row, length in zip(gathered, lengths.tolist(), strict=True)]

    def _start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        gathered = torch.empty(self.size, len(data), dtype=torch.uint8, device="cpu")
        return PendingFacts(
            self._gather_facts(gathered, torch.frombuffer(bytearray(data), dtype=torch.uint8)), gathered
        )

    def _gather_facts(self, output: Tensor, x: Tensor) -> Any:
        """Gather over the connection for facts, whose messages match even where ranks disagree on other collectives."""
        return self.connection(FACTS)._allgather_base(
            output.view(-1), x, _options(distributed_c10d.AllgatherOptions, True)
        )


def around(backend: dist.Backend, device_type: str, rank: int, size: int) -> dist.ProcessGroup:
    """Return a process group around the backend of a kind of device; it communicates by no connection of its own."""
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    kind = dist.Backend.backend_type_map[BACKEND_NAMES[device_type]]
    group._set_default_backend(kind)
    group._register_backend(torch.device(device_type), kind, backend)
    return group


def _options(kind: type[Any], async_op: bool, **fields: Any) -> Any:
    options = kind()
    options.asyncOp = async_op
    for name, value in fields.items():
        setattr(options, name, value)
    return options


_COMBINE = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
_COMBINE_BOOL = {**_COMBINE, "sum": torch.logical_or, "product": torch.logical_and}


def reduce_into(output: Tensor, others: Sequence[Tensor], op: str) -> None:
    """Combine `output` with `others` in turn; of 16-bit numbers, sums and products of several are rounded once."""
    combine = (_COMBINE_BOOL if output.dtype == torch.bool else _COMBINE)[op]
    is_rounded_once = len(others) == 1 or output.dtype not in (torch.bfloat16, torch.float16)
    # In 16 bits each partial sum would be rounded, and the more ranks, the further from a sum over one device.
    total = output if is_rounded_once else output.float()
    for other in others:
        combine(total, other, out=total)
    if not is_rounded_once:
        output.copy_(total)


class StagedGroup(TorchGroup):
    """A process group whose collectives copy tensors to the host, and results back when they return.

    Asynchronous ones are done when they return, too, but for messages between two ranks: a send that waited would wait
    for its receive, and ranks that send to each other first would wait for ever.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.backend = "gloo"

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        host = _to_host(x)
        super()._all_reduce(host, op, False)
        return _back(x, host)

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        into = _like_on_host(output)
        super()._all_gather_into(into, _to_host(x), False)
        return _back(output, into)

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        into = _like_on_host(output)
        super()._reduce_scatter_into(into, _to_host(x), op, False)
        return _back(output, into)

    def _all_to_all_into(self, output: Tensor, x: Tensor, output_rows: Rows, input_rows: Rows, async_op: bool) -> Work:
        into = _like_on_host(output)
        super()._all_to_all_into(into, _to_host(x), output_rows, input_rows, False)
        return _back(output, into)

    def _start_exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:
        leaving = [None if x is None else _to_host(x) for x in sends]
        arriving = [None if x is None else _like_on_host(x) for x in receives]
        super()._start_exchange(leaving, arriving).wait()
        for index, (x, host) in enumerate(zip(receives, arriving, strict=True)):
            # What a rank sends to itself is not exchanged here.
            if x is not None and host is not None and index != self.rank:
                x.copy_(host)
        return DONE

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        host = _to_host(x)
        super()._broadcast(host, source, False)
        return _back(x, host)

    def _send(self, x: Tensor, target: int, async_op: bool) -> Work:
        host = _to_host(x)
        return settle(Exchange([super()._send(host, target, True)], [], host), async_op)

    def _receive(self, x: Tensor, source: int, async_op: bool) -> Work:
        host = _like_on_host(x)
        return settle(Then(super()._receive(host, source, True), lambda: x.copy_(host)), async_op)


def _to_host(x: Tensor) -> Tensor:
    """Return a contiguous copy in host memory, also of a tensor that is there."""
    return x.detach().to("cpu", copy=True).contiguous()


def _like_on_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _back(x: Tensor, host: Tensor) -> Work:
    x.copy_(host)
    return DONE
