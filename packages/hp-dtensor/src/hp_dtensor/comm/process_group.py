"""Process groups: an ordered set of ranks with its collectives. Platforms, simulator and fake world implement them."""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from hp_dtensor.exceptions import CapabilityError, CollectiveError
from hp_dtensor.platform.recording import CollectiveLog, add_record, recorded

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform

Tensor = Any
T = TypeVar("T")
Rows = tuple[int, ...]  # numbers of rows, one for each rank of a group
REDUCE_OPS = ("sum", "avg", "max", "min", "product")


def no_average_of(dtype: Any) -> CapabilityError:
    """Return the error for averaging integers over ranks: the result is not an integer."""
    return CapabilityError(
        f"the reduction 'avg' needs a floating-point tensor, got {dtype}; reduce with 'sum' and divide"
    )


class Work(Protocol):
    """A running collective. Its buffers must not be used before `wait` returns."""

    def wait(self) -> None: ...


class Done:
    """The work of a collective that finished before it returned."""

    def wait(self) -> None:
        return None


DONE = Done()


@dataclass(frozen=True, slots=True)
class _CountedWork:
    """A running collective whose `wait` counts as time in which the group's rank waits."""

    work: Work
    group: ProcessGroup

    def wait(self) -> None:
        self.group._counted(self.work.wait)


@dataclass(slots=True)
class _ReadWork:
    """A running exchange whose `wait` calls a function with each rank and its message.

    It refers to the messages that are sent, which nothing else may do.
    """

    work: Work
    sends: Sequence[Tensor | None]
    receives: Sequence[Tensor | None]
    rank: int
    read: Callable[[int, Tensor], object]

    def wait(self) -> None:
        self.work.wait()
        # Once, even if there is a second wait.
        receives, self.receives, self.sends = self.receives, (), ()
        for j, x in enumerate(receives):
            if x is not None and j != self.rank and _numel(x):
                self.read(j, x)


class PendingBytes(Protocol):
    """A running all-gather of bytes."""

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        """Return the bytes of all ranks in rank order, or None if some rank did not answer in `timeout_seconds`."""


@dataclass(frozen=True, slots=True)
class GatheredBytes:
    """A finished all-gather of bytes."""

    data: list[bytes]

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        return self.data


@dataclass(frozen=True, slots=True)
class _CountedBytes:
    """A running all-gather of bytes whose `wait` counts as time in which the group's rank waits."""

    pending: PendingBytes
    group: ProcessGroup

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        return self.group._counted(self.pending.wait, timeout_seconds)


def record_collectives() -> contextlib.AbstractContextManager[CollectiveLog]:
    """Record the collectives that this rank (thread) starts inside the block.

    This includes the collectives of a backward that runs in the block for a forward in the block, whichever thread the
    framework runs it in.

    Examples:
        >>> def program():
        ...     x = ones(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[Shard(0)])
        ...     with record_collectives() as log:
        ...         x.full_tensor()
        ...     return log.count("all_gather")
        >>> run_ranks(program, 2)
        [1, 1]
    """
    return recorded({})


class ProcessGroup(ABC):
    """An ordered set of ranks with its collectives.

    Tensors are plain tensors of the platform, contiguous, on one device. On a group of one rank, collectives copy.
    Every public method checks its arguments and records the call. Platforms implement the private methods, which are
    called only for groups of several ranks.

    Attributes:
        backend: the communication library: `gloo`, `nccl`, ..., or `none`.
        ranks: the global ranks, in group order.
        rank: the index of this process in `ranks`.
        is_closed: True once the group has been released. Its world then creates another one.
        notes: values that packages attach to the group, under names that start with the package's name.
        num_calls: number of collectives that this rank has started in the group. In a hang, ranks differ in it.
        last_call: name of the last collective; empty before the first.
        seconds_waited: time in which this process was in a collective of the group, or waited for one. On a device that
            runs collectives asynchronously it is only the time of starting them.
        platform: the platform of the tensors (None in a fake world).

    Examples:
        >>> def program():
        ...     group = init_device_mesh("cpu", (2,)).get_group()
        ...     return [each[0] for each in group.all_gather_bytes(bytes([group.rank]))]
        >>> run_ranks(program, 2)[1]
        [0, 1]
    """

    backend: str = "none"
    is_closed = False
    num_calls = 0
    last_call = ""
    seconds_waited = 0.0

    def __init__(self, ranks: Sequence[int], rank: int, platform: Platform | None) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.platform = platform
        self.notes: dict[str, Any] = {}

    def close(self) -> None:
        """Release the resources of the group. It must not be used afterwards."""
        self.is_closed = True

    def all_reduce(self, x: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """Reduce `x` (any shape) over the group, in place."""
        self._check_op(op)
        n = self.size
        # Bytes are those of a ring all-reduce, whatever the backend does, so that layouts can be compared.
        self._record("all_reduce", 2 * (n - 1) / n * _nbytes(self.platform, x))
        return DONE if n == 1 else self._timed(self._all_reduce, x, op, async_op)

    def all_gather_into(self, output: Tensor, x: Tensor, async_op: bool = False) -> Work:
        """Concatenate every rank's `x` along dim 0 into `output` (`size` times the elements of `x`)."""
        self._record_shards("all_gather", output, x)
        return self._copy(output, x) if self.size == 1 else self._timed(self._all_gather_into, output, x, async_op)

    def reduce_scatter_into(self, output: Tensor, x: Tensor, op: str = "sum", async_op: bool = False) -> Work:
        """Reduce `x` over the group and write this rank's chunk of dim 0 to `output`. `x` may be overwritten."""
        self._check_op(op)
        self._record_shards("reduce_scatter", x, output)
        if self.size == 1:
            return self._copy(output, x)
        return self._timed(self._reduce_scatter_into, output, x, op, async_op)

    def all_to_all_into(
        self,
        output: Tensor,
        x: Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        async_op: bool = False,
        input_index: Tensor | None = None,
        output_index: Tensor | None = None,
    ) -> Work:
        """Send `input_rows[j]` rows (dim 0) of `x` to rank j and receive `output_rows[j]` rows from it.

        Indices are for groups in which `indexes_rows` is true. They save a pass over memory on either side.

        Args:
            input_index: int64 `[sum(input_rows)]`, the row of `x` to send for each row sent. None: all rows in order.
            output_index: int64 `[sum(output_rows)]`, the row of `output` that each received row is added to: first
                those from this rank, then those of the other ranks in rank order. None: rows are stored in rank order.

        Raises:
            CollectiveError: the rows do not add up to those of a tensor or an index.
            CapabilityError: the group takes no index.
        """
        self._check_rows("output", output if output_index is None else output_index, output_rows)
        self._check_rows("input", x if input_index is None else input_index, input_rows)
        indices: tuple[Tensor | None, ...] = (input_index, output_index)
        if input_index is None and output_index is None:
            indices = ()
        elif not self.indexes_rows(x):
            raise CapabilityError(
                f"all_to_all in group {self.ranks} over {self.backend}: it takes no index of the rows of a tensor of "
                f"{x.dtype}; gather the rows before, and sum them after it"
            )
        self._record("all_to_all", row_bytes(self.platform, x) * (sum(input_rows) - input_rows[self.rank]))
        if self.size == 1:
            return self._copy(output, x)
        rows = tuple(output_rows), tuple(input_rows)
        return self._timed(self._all_to_all_into, output, x, *rows, async_op, *indices)

    def indexes_rows(self, x: Tensor) -> bool:
        """Return True if `all_to_all_into` takes indices for tensors of the dtype and device of `x`.

        A group of one rank never does. Ranks need not agree, since messages are the same with and without indices.
        """
        return False

    def exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        """Send `sends[j]` to rank j and fill `receives[j]` from rank j, point to point.

        Entries that are None or empty are skipped, on both sides alike. This rank's own entry is copied. No tensor may
        be both sent and received.
        """
        self._record_exchange(sends, receives)
        if self.size > 1:
            self._counted(self._exchange, sends, receives)

    def start_exchange(
        self,
        sends: Sequence[Tensor | Sequence[Tensor] | None],
        receives: Sequence[Tensor | None],
        read: Callable[[int, Tensor], object] | None = None,
    ) -> Work:
        """Start an `exchange`. Its tensors must not be used before `wait` of the result returns.

        Exchanges between two ranks match in the order in which they are started. On torch the transfer runs while this
        rank computes. On backends without background transfers it is finished when this returns.

        Args:
            sends: with `read`, a sequence of one or more tensors of one dtype is one message, of their elements in
                order.
            read: function that `wait` calls with each other rank and its message. `receives` are then memory for
                messages, and a message may be in the memory of its sender, which reuses it once the function returns.
                After an error in `read` the other messages of the exchange are received and not read. The `wait` of a
                later exchange may finish this one.
        """
        if read is not None:
            # `read` gets messages of others only.
            sends = [None if j == self.rank else x for j, x in enumerate(sends)]
        self._record_exchange(sends, receives)
        if self.size == 1:
            return DONE
        if read is None:
            return self._timed(self._start_exchange, sends, receives)
        # Ranks that get the same sequence get one message, which is made once.
        joined = {id(x): self._joined(x) for x in sends if isinstance(x, (list, tuple))}
        messages = [joined.get(id(x), x) for x in sends]

        has_failed = False

        def read_uncounted(rank: int, message: Tensor) -> None:
            nonlocal has_failed
            if has_failed:
                return
            started, has_failed = time.perf_counter(), True
            try:
                read(rank, message)
                has_failed = False
            finally:
                # `wait`, which calls this, counts all of its time.
                self.seconds_waited -= time.perf_counter() - started

        return self._timed(self._start_reading, messages, receives, read_uncounted)

    def reads_in_place(self, x: Tensor, num_bytes: int) -> bool:
        """Return True if messages of up to `num_bytes` are read where their senders have put them, once for all ranks.

        So receives need no memory, and many can be started ahead. All ranks get the same answer for the same number.

        Args:
            x: a tensor on the device of the messages.
        """
        return False

    def _record_exchange(
        self, sends: Sequence[Tensor | Sequence[Tensor] | None], receives: Sequence[Tensor | None]
    ) -> None:
        """Check and record an exchange, and copy this rank's own entry."""
        if len(sends) != self.size or len(receives) != self.size:
            raise CollectiveError(
                f"exchange in a group of {self.size}: expected {self.size} entries each, "
                f"got {len(sends)} sends and {len(receives)} receives"
            )
        others = [x for j, x in enumerate(sends) if j != self.rank and x is not None]
        tensors = [each for x in others for each in (x if isinstance(x, (list, tuple)) else [x])]
        self._record("exchange", sum(_nbytes(self.platform, x) for x in tensors))
        # Copied here, because some backends treat a message from a rank to itself as a deadlock.
        mine, into = sends[self.rank], receives[self.rank]
        if mine is not None and into is not None:
            self._copy(into, mine)

    def broadcast(self, x: Tensor, source: int = 0, async_op: bool = False) -> Work:
        """Overwrite `x` with the `x` of group rank `source`."""
        if not 0 <= source < self.size:
            raise CollectiveError(f"broadcast in group {self.ranks}: there is no group rank {source}")
        # Counted at the source, whatever tree of ranks the backend sends along.
        sent = (self.size - 1) * _nbytes(self.platform, x) if self.rank == source else 0
        self._record("broadcast", sent)
        return DONE if self.size == 1 else self._timed(self._broadcast, x, source, async_op)

    def send(self, x: Tensor, target: int, async_op: bool = False) -> Work:
        """Send `x` to group rank `target`, which calls `receive`. Messages to a rank arrive in the order of sending.

        With `async_op` this returns at once, even if the receiver is late. `x` must not be written before `wait`.
        """
        self._check_peer("send to", target)
        self._record("send", _nbytes(self.platform, x))
        # Both sides know the shape and skip an empty message, which backends handle differently.
        return self._timed(self._send, x, target, async_op) if _numel(x) else DONE

    def receive(self, x: Tensor, source: int, async_op: bool = False) -> Work:
        """Fill `x` with the next message of group rank `source`, which has `x`'s shape and dtype."""
        self._check_peer("receive from", source)
        # Bytes are counted at the sender.
        self._record("receive", 0)
        return self._timed(self._receive, x, source, async_op) if _numel(x) else DONE

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's `data` (of any length) in rank order. For small host data such as JSON."""
        self._record("all_gather_bytes")
        if self.size == 1:
            return [data]
        return self._counted(self._all_gather_bytes, data)

    def start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        """Start an `all_gather_bytes` in which all ranks pass the same number of bytes, at least one.

        On torch and between simulated ranks it does not share a channel with the collectives of tensors, so that both
        can run at once. On MindSpore's CPU it is finished when this returns.
        """
        self._record("all_gather_bytes")
        if self.size == 1:
            return GatheredBytes([data])
        # Some backends gather before they return.
        return _CountedBytes(self._counted(self._start_all_gather_bytes, data), self)

    def barrier(self) -> None:
        """Wait until every rank of the group has called this."""
        # An all-gather cannot return before every rank has contributed.
        self.all_gather_bytes(b"")

    # Platforms implement these. They return the running work, or `DONE`, and may ignore `async_op` then.

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work: ...

    @abstractmethod
    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work: ...

    @abstractmethod
    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work: ...

    @abstractmethod
    def _all_to_all_into(
        self, output: Tensor, x: Tensor, output_rows: Rows, input_rows: Rows, async_op: bool
    ) -> Work: ...

    @abstractmethod
    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None: ...

    def _start_exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:
        # For backends without background transfers; the others override this.
        self._exchange(sends, receives)
        return DONE

    def _start_reading(
        self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None], read: Callable[[int, Tensor], object]
    ) -> Work:
        return _ReadWork(self._start_exchange(sends, receives), sends, receives, self.rank, read)

    def _joined(self, tensors: Sequence[Tensor]) -> Any:
        """Return several tensors as one message."""
        assert self.platform is not None
        return pack(self.platform, tensors)

    @abstractmethod
    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work: ...

    @abstractmethod
    def _all_gather_bytes(self, data: bytes) -> list[bytes]: ...

    def _send(self, x: Tensor, peer: int, async_op: bool) -> Work:
        raise CollectiveError(f"groups of backend {self.backend!r} have no messages between two ranks")

    _receive = _send

    def _start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        return GatheredBytes(self._all_gather_bytes(data))

    def _copy(self, output: Tensor, x: Tensor) -> Work:
        # A rank alone in its group gets the result in the memory that it passed, as it would among others.
        assert self.platform is not None
        shape = tuple(output.shape)
        # A 0-d tensor is gathered as one of one element.
        self.platform.copy_(output, x if tuple(x.shape) == shape else self.platform.ops.reshape(x, shape))
        return DONE

    def _record(self, name: str, wire_bytes: float | None = None) -> None:
        """Count a collective. With `wire_bytes` add it to the open logs too."""
        # Counted before the call, so that after a hang the last call is the one that hangs.
        self.num_calls += 1
        self.last_call = name
        if wire_bytes is not None:
            add_record(self.platform, name, self.ranks, wire_bytes)

    def _record_shards(self, name: str, full: Tensor, shard: Tensor) -> None:
        """Check the sizes of a full buffer and of a rank's shard of it, and record the collective between them."""
        numel, full_numel = math.prod(shard.shape), math.prod(full.shape)
        if full_numel != self.size * numel:
            raise CollectiveError(
                f"{name}_into in group {self.ranks}: the larger buffer must have {self.size * numel} elements, "
                f"got {full_numel}"
            )
        itemsize = self.platform.itemsize(shard.dtype) if self.platform is not None else 1
        # A ring: each rank sends its own shard and passes on those of the others, but for the last one.
        self._record(name, (self.size - 1) * numel * itemsize)

    def _timed(self, start: Callable[..., Work], *arguments: Any) -> Work:
        """Start a collective, and count its time and that of the returned work's `wait`."""
        # Not by `_counted`: every collective of tensors comes here, for some of which a call is a notable part.
        started = time.perf_counter()
        try:
            work = start(*arguments)
        finally:
            self.seconds_waited += time.perf_counter() - started
        return work if work is DONE else _CountedWork(work, self)

    def _counted(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function, and count its time in `seconds_waited`."""
        started = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self.seconds_waited += time.perf_counter() - started

    def _check_op(self, op: str) -> None:
        if op not in REDUCE_OPS:
            raise CollectiveError(f"reduction {op!r} is unknown; expected one of {', '.join(REDUCE_OPS)}")

    def _check_peer(self, what: str, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise CollectiveError(
                f"{what} group rank {peer} of {self.ranks}: expected another rank of the group, below {self.size}"
            )

    def _check_rows(self, which: str, x: Tensor, rows: Sequence[int]) -> None:
        if len(rows) != self.size or sum(rows) != x.shape[0]:
            raise CollectiveError(
                f"all_to_all in group {self.ranks}: {which} has {x.shape[0]} rows, its splits are {list(rows)}; "
                f"expected {self.size} splits that sum to the rows"
            )


def pack(platform: Platform, tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype into one contiguous vector, a message."""
    flat = [platform.ops.reshape(platform.contiguous(x), (-1,)) for x in tensors]
    return flat[0] if len(flat) == 1 else platform.ops.cat(flat, 0)


def _numel(x: Tensor) -> int:
    return math.prod(x.shape)


def _nbytes(platform: Platform | None, x: Tensor) -> int:
    return _numel(x) * (platform.itemsize(x.dtype) if platform is not None else 1)


def row_bytes(platform: Platform | None, x: Tensor) -> int:
    """Return the bytes of one row (dim 0) of a tensor or, without a platform, its number of elements."""
    return int(math.prod(x.shape[1:])) * (platform.itemsize(x.dtype) if platform is not None else 1)
