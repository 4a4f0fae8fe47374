"""Process groups over the backends of torch.distributed: gloo on CPU, NCCL on CUDA, HCCL on Ascend.

A group calls the backends directly. It connects one per device type, and one for host data, on first use and among its
members only; host data is always sent by gloo. A collective that a backend lacks is composed from others, as the table
`CAPABILITIES` says. In `StagedGroup`, ranks share an accelerator: NCCL refuses two ranks on one device, so with
`HP_BACKEND=gloo` their collectives copy through host memory, slowly. That tests a job of several processes on one card.

To add a device type: a line in `BACKEND_NAMES` and `CAPABILITIES`, and a function in `_BACKENDS` of `world.py`.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hp_dtensor.comm.process_group import DONE, PendingBytes, ProcessGroup, Rows, Work, no_average_of
from hp_dtensor.exceptions import CapabilityError, CollectiveError, PlatformError
from hp_platform_torch.comm.shared_memory import (
    ROTATION_BYTES,
    SMALLEST_BYTES,
    GatheredRows,
    JoinedTensors,
    Message,
    SharedMemory,
)

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


Tensor = torch.Tensor
M = TypeVar("M", Tensor, Message)
Read = Callable[[Tensor], object]

POLL_SECONDS = 0.0001

num_dispatch_modes = torch._C._len_torch_dispatch_stack  # of this thread


def is_watched() -> bool:
    """Return True if a dispatch mode of this thread does not know DTensors.

    Such a mode (torch's `FlopCounterMode`, say) must get plain tensors and torch's own process groups, because it would
    use a DTensor's global shape. Our own modes have `knows_shards` and do not change what is computed.
    """
    return bool(num_dispatch_modes()) and any(
        not getattr(mode, "knows_shards", False) for mode in _get_current_dispatch_mode_stack()
    )


class Then:
    """A communication followed by local work: `wait` waits for the communication, then calls `finish`, once.

    Args:
        work: None: a synchronous collective of NCCL, after which the current stream orders what follows.
        finish: the local work.
    """

    def __init__(self, work: Work | None, finish: Callable[[], object]) -> None:
        self._work = work
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Exchange:
    """The sends and receives of one composed collective.

    Gloo matches the messages between two ranks in the order in which they start, and dropping an unfinished one breaks
    all later ones. So the group keeps references to them, even if no caller waits for them after an error, and finishes
    them in order.

    Args:
        works: the messages; each is waited for once, since gloo allows no second wait.
        unfinished: the group's list of unfinished exchanges, in the order of their start.
        buffers: tensors that must stay alive until the messages are finished.
    """

    def __init__(self, works: Sequence[Work], unfinished: list[Exchange], buffers: object = None) -> None:
        self._works = list(works)
        self._buffers = buffers
        self._unfinished = unfinished
        unfinished.append(self)

    def wait(self) -> None:
        # Earlier exchanges first, in the order in which gloo matches messages.
        while self in self._unfinished:
            self._unfinished[0]._end()
            del self._unfinished[0]

    def _end(self) -> None:
        while self._works:
            # Removed before: after an error it is not waited for again, nor is its message read again.
            self._works.pop(0).wait()
        self._buffers = None


class Arrival:
    """A large message between ranks of one host: gloo receives either the message or a note of its place in memory.

    The sender chooses. One receive, started at once, takes both: a sender without room in memory would otherwise wait
    until this rank waits.

    Args:
        read: function that is called with the message instead of copying it into `x`; see `SharedMemory.finish`.
    """

    def __init__(
        self, gloo: Any, x: Tensor, source: int, memory: SharedMemory, peer: int, read: Read | None = None
    ) -> None:
        self._x, self._memory, self._peer, self._read = x, memory, peer, read
        self._mark = memory.mark(x)
        self._work: Work = gloo.recv([x], source, _LARGE_TAG)

    def wait(self) -> None:
        self._work.wait()
        self._memory.finish(self._x, self._mark, self._peer, self._read)


class PendingFacts:
    """A running all-gather of bytes; row `i` of `gathered` `[ranks, bytes]` is rank `i`'s."""

    def __init__(self, work: Any, gathered: Tensor) -> None:
        self._work = work
        self._gathered = gathered

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        """Return the bytes of all ranks in rank order, or None on a timeout."""
        if timeout_seconds is not None:
            deadline = time.monotonic() + timeout_seconds
            while not self._work.is_completed():
                if time.monotonic() >= deadline:
                    return None
                # Polled, so that a timeout leaves the collective running and the caller may wait again.
                time.sleep(POLL_SECONDS)
        self._work.wait()
        return [row.tobytes() for row in self._gathered.numpy()]


def settle(work: Work | None, async_op: bool) -> Work:
    """Return `work` if `async_op`, for the caller to wait for; otherwise wait now and return `DONE`."""
    if async_op and work is not None:
        return work
    if work is not None:
        work.wait()
    return DONE


FACTS = "facts"
"""Name of the connection for host data, in addition to one per device type."""

_COLLECTIVE_TAG = 2**31 - 1
"""Tag of gloo's messages of a collective, so that they never meet a program's own messages between the same ranks."""

_LARGE_TAG = _COLLECTIVE_TAG - 1
"""Tag of messages that may be in shared memory: a place, which is short, must not pass for a small message."""

_SUMMED_NATIVELY = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})
"""Dtypes of reduce-scatters on gloo that dispatch modes see; gloo's own, of this rank alone, has kernels for them."""

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # the sum is divided afterwards: no backend averages every dtype
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class TorchGroup(ProcessGroup):
    """A process group of two or more ranks that calls torch's backends directly.

    It cannot use `dist.new_group(use_local_synchronization=True)`: that names a group by the number of groups that this
    rank already has (torch 2.13), so members with different numbers of groups deadlock. It also sorts the ranks.

    Args:
        connect: function that creates the backend of a device type; called once per device type in use.
        memory: what ranks of one host share. None: all messages are sent over gloo.
    """

    platform: Platform

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        platform: Platform,
        connect: Callable[[str], dist.Backend],
        memory: SharedMemory | None = None,
    ) -> None:
        super().__init__(ranks, rank, platform)
        self.backend = BACKEND_NAMES[platform.device_types[0]]
        self._connect = connect
        self._memory = memory
        self._connections: dict[str, Any] = {}
        self._seen_by_modes: dict[str, dist.ProcessGroup] = {}
        self._exchanges: list[Exchange] = []

    def close(self) -> None:
        """Release the backends, which ends their threads: one that runs while Python shuts down can abort it."""
        super().close()
        self._memory = None
        self._exchanges.clear()
        self._seen_by_modes.clear()
        self._connections.clear()

    def connection(self, device_type: str) -> Any:
        """Return the backend for tensors of a device type, or for `FACTS`; it connects on the first call."""
        found = self._connections.get(device_type)
        if found is None:
            if self.is_closed:
                raise CollectiveError(f"the group {self.ranks} has been released, or its job left; ask for it again")
            found = self._connections[device_type] = self._connect(device_type)
        return found

    def _channel(self, device_type: str) -> Any:
        """Return the backend of a device type, or under a dispatch mode a torch process group around it.

        Calls of a process group pass torch's dispatcher, where the mode (torch's `CommDebugMode`, say) sees them.
        """
        if not (num_dispatch_modes() and is_watched()):
            return self.connection(device_type)
        found = self._seen_by_modes.get(device_type)
        if found is None:
            found = self._seen_by_modes[device_type] = _process_group_around(
                self.connection(device_type), device_type, self.rank, self.size
            )
        return found

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        check_reduction(x, op)
        buffer = x.to(torch.int32) if x.dtype in CAPABILITIES[x.device.type].as_int32 else x
        if not buffer.is_contiguous():
            # Gloo reduces consecutive memory, whatever the strides are.
            buffer = buffer.detach().contiguous()
        # Backends sum real numbers only; a complex sum is the sum of (real, imaginary) pairs.
        summed = torch.view_as_real(buffer) if x.is_complex() else buffer
        options = _options(distributed_c10d.AllreduceOptions, async_op, reduceOp=REDUCE_OPS[op])
        work: Work | None = self._channel(x.device.type).allreduce([summed], options)
        if buffer is not x:
            work = Then(work, lambda: x.detach().copy_(buffer))
        if op == "avg":
            # Not every backend has an average. Dividing after the sum rounds once, in the same way on all backends.
            work = Then(work, lambda: x.div_(self.size))
        return settle(work, async_op)

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        # As bytes where the backend lacks the dtype: an all-gather only copies, so any view of the memory will do.
        into, sent = movable(output).view(-1), movable(x).view(-1)
        if not CAPABILITIES[x.device.type].native_shards:
            if is_watched():
                _alone()._allgather_base(torch.empty_like(sent), sent).wait()
            return settle(self._send_to_all(into.view(self.size, -1), sent), async_op)
        options = _options(distributed_c10d.AllgatherOptions, async_op)
        return settle(self._channel(x.device.type)._allgather_base(into, sent, options), async_op)

    def _send_to_all(self, rows: Tensor, x: Tensor) -> Work:
        """Send `x` to every other rank and receive theirs, each into its row of `rows` `[ranks, elements]`."""
        others = [j for j in range(self.size) if j != self.rank]
        exchange = self._start_messages([(j, x) for j in others], [(j, rows[j]) for j in others])
        # During the messages. Detached: the copy is part of the collective, which autograd does not see.
        rows[self.rank].detach().copy_(x.detach())
        return exchange

    def _start_messages(
        self,
        leaving: Sequence[tuple[int, Message]],
        arriving: Sequence[tuple[int, Tensor]],
        read: Callable[[int, Tensor], object] | None = None,
    ) -> Exchange:
        """Send and receive tensors in host memory, each to or from a rank of the group.

        Modes see no messages: torch's `CommDebugMode` does not count them.

        Args:
            read: function of a rank and its message, called in the order of `arriving`, whose tensors are then memory
                for messages that cannot be read in place. None: messages are stored in these tensors.
        """
        gloo, memory = self.connection("cpu"), self._memory
        works: list[Work] = []
        for j, x in arriving:
            read_j = None if read is None else functools.partial(read, j)
            if memory is not None and self._may_have_place(x, j):
                works.append(Arrival(gloo, x, j, memory, self.ranks[j], read_j))
            else:
                work = gloo.recv([x], j, _COLLECTIVE_TAG)
                works.append(work if read_j is None else Then(work, functools.partial(read_j, x)))
        sent: list[Message] = []
        for x, targets in _by_tensor(leaving):
            large = [j for j in targets if self._may_have_place(x, j)]
            # One copy for all of them, in an all-gather.
            placed = memory.put(x, [self.ranks[j] for j in large]) if memory is not None and large else None
            places = {} if placed is None else dict(zip(large, placed, strict=True))
            message = x if isinstance(x, Tensor) or len(places) == len(targets) else movable(x.gathered())
            for j in targets:
                sent.append(_as_tensor(memory.note(x, places[j])) if memory is not None and j in places else message)
                works.append(gloo.send([sent[-1]], j, _LARGE_TAG if j in large else _COLLECTIVE_TAG))
        # Gloo's works hold no references to their tensors.
        return Exchange(works, self._exchanges, (arriving, sent))

    def _may_have_place(self, x: Message, j: int) -> bool:
        """Return True if a message to or from a rank of the group may be sent through shared memory."""
        # Gloo refuses a tensor that is not contiguous.
        is_contiguous = not isinstance(x, Tensor) or x.is_contiguous()
        memory, is_large = self._memory, x.nbytes >= SMALLEST_BYTES and is_contiguous
        return memory is not None and is_large and memory.reaches(self.ranks[j])

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        check_reduction(x, op)
        can = CAPABILITIES[x.device.type]
        if not can.native_shards:
            if is_watched() and x.dtype in _SUMMED_NATIVELY:
                _alone()._reduce_scatter_base(torch.empty_like(x).view(-1), x.view(-1)).wait()
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
        """Send each rank its row of `rows` `[ranks, elements]`; reduce received ones in rank order into `output`."""
        # Needs `size - 2` buffers: the first other rank's row is received into the output, and the own row is not
        # copied.
        others = [j for j in range(self.size) if j != self.rank]
        # In place, as `output` is the own row of `rows`, a received row would replace one that is still to be reduced.
        in_place = rows.data_ptr() <= output.data_ptr() < rows.data_ptr() + rows.nbytes
        reduced = torch.empty_like(output) if in_place else output
        arriving = [reduced, *output.new_empty(self.size - 2, output.numel())]
        exchange = self._start_messages(
            [(j, movable(rows[j])) for j in others],
            [(j, movable(row)) for j, row in zip(others, arriving, strict=True)],
        )

        def reduce() -> None:
            # `reduced` has one row already; its position among the first two does not matter, since the operation
            # commutes.
            parts = {**dict(zip(others, arriving, strict=True)), self.rank: rows[self.rank]}
            reduce_into(reduced, [parts[j] for j in range(self.size) if parts[j] is not reduced], op)
            if op == "avg":
                reduced.div_(self.size)
            if in_place:
                output.copy_(reduced)

        return Then(exchange, reduce)

    def indexes_rows(self, x: Tensor) -> bool:
        # Sums of 16-bit numbers are rounded once, which adding one message after the other does not.
        return self.size > 1 and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)

    def _all_to_all_into(
        self,
        output: Tensor,
        x: Tensor,
        output_rows: Rows,
        input_rows: Rows,
        async_op: bool,
        input_index: Tensor | None = None,
        output_index: Tensor | None = None,
    ) -> Work:
        if not CAPABILITIES[x.device.type].native_shards:
            if is_watched():
                nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
                _alone().alltoall_base(nothing, nothing, [], []).wait()
            # Detached: messages and copies are a collective, which autograd does not see.
            leaving = _split_rows(x.detach(), input_rows, input_index)
            if output_index is None:
                return settle(self._exchange_rows(output.detach(), output_rows, leaving), async_op)
            return settle(self._exchange_and_add(output.detach(), output_rows, leaving, output_index), async_op)
        options = _options(distributed_c10d.AllToAllOptions, async_op)
        work = self._channel(x.device.type).alltoall_base(
            movable(output), movable(x), list(output_rows), list(input_rows), options
        )
        return settle(work, async_op)

    def _exchange_rows(self, output: Tensor, output_rows: Rows, leaving: Sequence[Message]) -> Work:
        """Send each rank its rows, and receive the rows of `output` from it."""
        arriving = movable(output).split(list(output_rows))
        exchange = self._start_messages(self._to_others(leaving), self._to_others(arriving))
        # During the messages. No rows viewed as bytes have lost their width.
        own = leaving[self.rank]
        if not isinstance(own, Tensor):
            own.gathered(out=arriving[self.rank])
        elif own.numel():
            arriving[self.rank].copy_(own)
        return exchange

    def _exchange_and_add(
        self, output: Tensor, output_rows: Rows, leaving: Sequence[Message], output_index: Tensor
    ) -> Work:
        """Send each rank its rows, and add the rows received from it to rows of `output`."""
        indices = output_index.split(list(output_rows))
        space = output.new_empty((sum(output_rows), *output.shape[1:])).split(list(output_rows))

        def add(j: int, rows: Tensor) -> None:
            output.index_add_(0, indices[j], rows)

        exchange = self._start_messages(self._to_others(leaving), self._to_others(space), add)
        # During the messages.
        own = leaving[self.rank]
        add(self.rank, own if isinstance(own, Tensor) else own.gathered())
        return exchange

    def _to_others(self, messages: Sequence[M | None]) -> list[tuple[int, M]]:
        """Return the messages that are not empty with their ranks, without that of this rank."""
        return [(j, each) for j, each in enumerate(messages) if each is not None and j != self.rank and each.nbytes]

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        self._start_exchange(sends, receives).wait()

    def _start_exchange(self, sends: Sequence[Message | None], receives: Sequence[Tensor | None]) -> Work:
        if not any(isinstance(x, Tensor) and x.device.type != "cpu" for x in (*sends, *receives)):
            return self._start_on_host(sends, receives, None)
        tensors = [x for x in (*sends, *receives) if isinstance(x, Tensor)]
        # The all-to-all wants a tensor per rank: an empty one stands for no message.
        nothing = tensors[0].new_empty(0)
        leaving, arriving = (
            [nothing if x is None or j == self.rank else movable(x) for j, x in enumerate(each)]
            for each in (sends, receives)
        )
        options = _options(distributed_c10d.AllToAllOptions, True)
        return settle(self._channel(nothing.device.type).alltoall(arriving, leaving, options), True)

    def _start_on_host(
        self,
        sends: Sequence[Message | None],
        receives: Sequence[Tensor | None],
        read: Callable[[int, Tensor], object] | None,
    ) -> Work:
        # With empty tensors it connects, as it may be the first call on the others, whose connection waits for it.
        if all(x is None for x in (*sends, *receives)):
            return DONE
        leaving, arriving = (
            self._to_others([movable(x) if isinstance(x, Tensor) else x for x in each]) for each in (sends, receives)
        )

        def read_as_sent(j: int, message: Tensor) -> None:
            like = receives[j]
            assert read is not None
            assert like is not None
            # Not as bytes.
            read(j, message.view(-1).view(like.dtype).view(like.shape))

        # Gloo's own all-to-all takes one tensor only.
        return self._start_messages(leaving, arriving, None if read is None else read_as_sent)

    def _start_reading(
        self, sends: Sequence[Message | None], receives: Sequence[Tensor | None], read: Callable[[int, Tensor], object]
    ) -> Work:
        if any(isinstance(x, Tensor) and x.device.type != "cpu" for x in (*sends, *receives)):
            return super()._start_reading(sends, receives, read)
        return self._start_on_host(sends, receives, read)

    def reads_in_place(self, x: Tensor, num_bytes: int) -> bool:
        others, memory = [rank for j, rank in enumerate(self.ranks) if j != self.rank], self._memory
        fits = x.device.type == "cpu" and SMALLEST_BYTES <= num_bytes <= ROTATION_BYTES
        return memory is not None and fits and all(memory.reaches(rank) for rank in others)

    def _joined(self, tensors: Sequence[Tensor]) -> Message:
        is_on_host = self._memory is not None and tensors[0].device.type == "cpu"
        return JoinedTensors(tensors) if is_on_host else super()._joined(tensors)

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        if x.numel() == 0:
            return DONE
        # Backends send consecutive memory, whatever the strides are.
        buffer = x.detach().contiguous()
        options = _options(distributed_c10d.BroadcastOptions, async_op, rootRank=source, rootTensor=0)
        work: Work | None = self._channel(x.device.type).broadcast([movable(buffer)], options)
        if not x.is_contiguous():
            work = Then(work, lambda: x.detach().copy_(buffer))
        return settle(work, async_op)

    def _send(self, x: Tensor, target: int, async_op: bool) -> Work:
        return settle(self._channel(x.device.type).send([movable(x)], target, 0), async_op)

    def _receive(self, x: Tensor, source: int, async_op: bool) -> Work:
        return settle(self._channel(x.device.type).recv([movable(x)], source, 0), async_op)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        # On the CPU explicitly: this is also called inside `torch.device("meta")`, where models are built.
        # Lengths differ between ranks, so they are gathered first, then the bytes, padded to the longest.
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
        """Gather over the connection for host data, which works even if ranks are in different tensor collectives."""
        return self.connection(FACTS)._allgather_base(
            output.view(-1), x, _options(distributed_c10d.AllgatherOptions, True)
        )


def _by_tensor(messages: Sequence[tuple[int, Message]]) -> list[tuple[Message, list[int]]]:
    """Return the tensors of messages with the ranks that each one is sent to."""
    found: dict[int, tuple[Message, list[int]]] = {}
    for j, x in messages:
        found.setdefault(id(x), (x, []))[1].append(j)
    return list(found.values())


def _split_rows(x: Tensor, rows: Rows, index: Tensor | None) -> Sequence[Message]:
    """Split the rows of `x`, or those that an index selects, into one message for each rank."""
    if index is None:
        return movable(x).split(list(rows))
    return [GatheredRows(x, each) for each in index.split(list(rows))]


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _process_group_around(backend: dist.Backend, device_type: str, rank: int, size: int) -> dist.ProcessGroup:
    """Return a torch process group around a backend; it opens no connection of its own."""
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    kind = dist.Backend.backend_type_map[BACKEND_NAMES[device_type]]
    group._set_default_backend(kind)
    group._register_backend(torch.device(device_type), kind, backend)
    return group


@functools.cache
def _alone() -> dist.ProcessGroup:
    """Return a group of this rank alone, by whose collectives dispatch modes see those that are sent as messages.

    A mode may exist on one rank only, so what the ranks send to each other must not depend on modes.
    """
    return _process_group_around(dist.ProcessGroupGloo(dist.HashStore(), 0, 1), "cpu", 0, 1)


@functools.cache
def _options(kind: type[Any], async_op: bool, **fields: Any) -> Any:
    """Return the options of a collective; backends read them only."""
    options = kind()
    options.asyncOp = async_op
    for name, value in fields.items():
        setattr(options, name, value)
    return options


_COMBINE = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
_COMBINE_BOOL = {**_COMBINE, "sum": torch.logical_or, "product": torch.logical_and}


def reduce_into(output: Tensor, others: Sequence[Tensor], op: str) -> None:
    """Reduce `others` into `output` in order; 16-bit sums and products of several operands are rounded once."""
    combine = (_COMBINE_BOOL if output.dtype == torch.bool else _COMBINE)[op]
    is_rounded_once = len(others) == 1 or output.dtype not in (torch.bfloat16, torch.float16)
    # In 16 bits each partial sum would be rounded, and the error would grow with the number of ranks.
    total = output if is_rounded_once else output.float()
    for other in others:
        combine(total, other, out=total)
    if not is_rounded_once:
        output.copy_(total)


class StagedGroup(TorchGroup):
    """A process group whose collectives run on copies in host memory and copy the results back.

    Asynchronous ones have finished when they return. Messages between two ranks have not: ranks that first send to each
    other would deadlock if a send waited for its receive.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.backend = "gloo"

    def indexes_rows(self, x: Tensor) -> bool:
        return False

    def reads_in_place(self, x: Tensor, num_bytes: int) -> bool:
        return False

    # Not those of `TorchGroup`: exchanges copy their messages, which must be tensors, through host memory.
    _start_reading = ProcessGroup._start_reading
    _joined = ProcessGroup._joined

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

    def _all_to_all_into(
        self, output: Tensor, x: Tensor, output_rows: Rows, input_rows: Rows, async_op: bool, *indices: Tensor | None
    ) -> Work:
        into = _like_on_host(output)
        super()._all_to_all_into(into, _to_host(x), output_rows, input_rows, False)
        return _back(output, into)

    def _start_exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:
        leaving = [None if x is None else _to_host(x) for x in sends]
        arriving = [None if x is None else _like_on_host(x) for x in receives]
        super()._start_exchange(leaving, arriving).wait()
        for index, (x, host) in enumerate(zip(receives, arriving, strict=True)):
            # A rank's message to itself is not exchanged here.
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
    """Return a contiguous copy in host memory, even of a tensor on the CPU."""
    return x.detach().to("cpu", copy=True).contiguous()


def _like_on_host(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu")


def _back(x: Tensor, host: Tensor) -> Work:
    x.copy_(host)
    return DONE


BACKEND_NAMES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""Device type -> the backend of torch.distributed that communicates its tensors."""


_FLOAT8 = frozenset(x for x in vars(torch).values() if isinstance(x, torch.dtype) and str(x).startswith("torch.float8"))
# Not every backend knows these. A copy needs their bytes only.
_AS_BYTES = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64}) | _FLOAT8


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Operations that one backend of torch.distributed has, and dtypes that it lacks.

    Attributes:
        native_shards: use the native all-gather, reduce-scatter and all-to-all. Otherwise each rank sends shards to the
            others as messages, large ones within a host through shared memory; a reduce-scatter reduces them in rank
            order. On gloo, gathers and reductions are faster so at every size measured (reduce-scatter: 2 to 4 ranks,
            1 KB to 16 MB; all-gather: 2 ranks, 256 KB to 16 MB, and below that the same processor time) and need less
            memory: gloo's all-gather fills a buffer of its own and copies it. An all-to-all of 2 ranks takes 0.9 of the
            native time at 1 MB a message and 0.54 at 4 MB, and up to 0.25 ms more below 1 MB. A reduction accumulates
            bfloat16 in float32.
        as_bytes: dtypes that are sent as bytes. Complex ones always are; they are summed as pairs of real numbers.
        as_int32: dtypes that are reduced as int32.
    """

    native_shards: bool
    as_bytes: frozenset[torch.dtype] = _AS_BYTES
    as_int32: frozenset[torch.dtype] = frozenset({torch.int16})


CAPABILITIES = {
    "cpu": Capabilities(native_shards=False),
    "cuda": Capabilities(native_shards=True),
    "npu": Capabilities(
        native_shards=True,
        as_bytes=_AS_BYTES | {torch.bool},
        as_int32=frozenset({torch.int16, torch.bool, torch.uint8}),
    ),
}


def shares_devices() -> bool:
    """Return True if ranks may share an accelerator because their collectives use gloo (`HP_BACKEND=gloo`).

    Raises:
        PlatformError: `HP_BACKEND` names another backend.
    """
    wanted = os.environ.get("HP_BACKEND")
    if wanted not in (None, "", "gloo"):
        raise PlatformError(
            f"HP_BACKEND is {wanted!r}; expected gloo, by which ranks share an accelerator, or nothing for the "
            "device's own backend"
        )
    return wanted == "gloo"


def movable(x: Tensor) -> Tensor:
    """Return `x`, or a view of it as bytes with the same number of rows where the backend cannot send its dtype."""
    if x.dtype not in CAPABILITIES[x.device.type].as_bytes and not x.is_complex():
        return x
    # Flattened first: empty tensors may have any strides, and torch reinterprets the dtype of contiguous ones only.
    rows = x.shape[0] if x.dim() else 1
    return x.view(-1).view(torch.uint8).view(rows, x.numel() * x.element_size() // max(rows, 1))


def check_reduction(x: Tensor, op: str) -> None:
    """Raise CapabilityError if the dtype of `x` has no reduction `op`, for example an average of integers."""
    if x.is_complex() and op != "sum":
        raise CapabilityError(f"the reduction {op!r} of complex numbers, got {x.dtype}; they can be reduced with 'sum'")
    if op == "avg" and not x.is_floating_point():
        raise no_average_of(x.dtype)


def device_types() -> tuple[str, ...]:
    """Return the device types that torch can use on this machine, fastest first; the last is `cpu`."""
    found = ["cpu"]
    if torch.cuda.is_available():
        found.insert(0, "cuda")
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        found.insert(0, "npu")
    return tuple(found)
