"""Process groups: collectives composed on the host for CPU, and HCCL's own on Ascend.

MindSpore's CPU communication (MCCL) has few collectives, few dtypes in each, and silently does nothing on views. A
transfer of bytes between two ranks works for every dtype and any ranks. So on CPU every collective is composed of those
and of sums on the host, in rank order: results are the same on all ranks and in every run. This is as fast as the
native collectives where these exist, and creating a group costs nothing.

To add a collective: its abstract form is in `hp_dtensor.comm.process_group.ProcessGroup`; implement it in both groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import mindspore.mint.distributed as dist
import numpy as np
from mindspore import Tensor, mint

from hp_dtensor.comm.process_group import DONE, GatheredBytes, PendingBytes, ProcessGroup, Rows, Work, no_average_of
from hp_dtensor.exceptions import CollectiveError
from hp_platform_mindspore.platform_base import MindSporeBase
from hp_platform_mindspore.tensor.memory import FLOATING, NAMES, decode, encode, host_view

Array = np.ndarray[Any, Any]
Reduction = Callable[[Sequence[Array]], Array]

PAIRWISE: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}


def reduction_of(x: Tensor, op: str) -> Reduction:
    """Return the function that reduces one array per rank, of the dtype of `x`, to one array.

    For bool, sum and product mean any and all.

    Raises:
        CapabilityError: the average of a dtype that is not floating-point.
    """
    check_average(x, op)
    return _reduce_bfloat16(op) if NAMES[x.dtype] == "bfloat16" else _reduce_in_rank_order(op)


def check_average(x: Tensor, op: str) -> None:
    """Refuse averages of integers, which need not be integers."""
    if op == "avg" and x.dtype not in FLOATING:
        raise no_average_of(x.dtype)


def _reduce_in_rank_order(op: str) -> Reduction:
    """Reduce pairwise in rank order; every intermediate result has the dtype of the arrays."""

    def reduction(parts: Sequence[Array]) -> Array:
        # A left fold in rank order: floating-point sums depend on the order, which is the same on all ranks.
        total = reduce(PAIRWISE[op], parts)
        return (total / len(parts)).astype(total.dtype) if op == "avg" else total

    return reduction


def _reduce_bfloat16(op: str) -> Reduction:
    """Reduce bit patterns pairwise in rank order, rounding every intermediate result to bfloat16."""

    def pair(x: Array, y: Array) -> Array:
        # NumPy has no bfloat16 arithmetic: computed in float32, and rounded at each step.
        return encode(PAIRWISE[op](decode(x), decode(y)))

    def reduction(parts: Sequence[Array]) -> Array:
        total = reduce(pair, parts)
        return encode(decode(total) / np.float32(len(parts))) if op == "avg" else total

    return reduction


MCCL_WORLD = "mccl_world_group"

# Up to this size one round of messages beats reduce-scatter and all-gather (measured with 2 and 4 ranks).
SMALL_BYTES = 1 << 16


class HostGroup(ProcessGroup):
    """Collectives composed of transfers of bytes between host buffers."""

    backend = "mccl"

    platform: MindSporeBase

    def __init__(self, ranks: Sequence[int], rank: int, platform: MindSporeBase) -> None:
        super().__init__(ranks, rank, platform)
        self._receiving: list[Receiving] = []

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        reduction = reduction_of(x, op)
        values = host_view(x)
        flat = np.ascontiguousarray(values).reshape(-1)
        # Every rank sums all arrays itself, in rank order: one round, and bitwise equal results everywhere.
        if flat.nbytes <= SMALL_BYTES:
            total = reduction(self._gather_arrays(flat))
        else:
            total = self._all_reduce_in_chunks(flat, reduction)
        # Written through the view, which may be non-contiguous.
        np.copyto(values, total.reshape(values.shape))
        return DONE

    def _all_reduce_in_chunks(self, flat: Array, reduction: Reduction) -> Array:
        """All-reduce a flat array by a reduce-scatter and an all-gather."""
        # Each rank reduces one chunk; chunks may be uneven. A rank receives 2 (n - 1) / n of the data, instead of n - 1
        # times the data if each reduced everything.
        chunks = np.array_split(flat, self.size)
        mine = reduction(self._swap(chunks, [chunks[self.rank].size] * self.size))
        return np.concatenate(self._swap([mine] * self.size, [chunk.size for chunk in chunks]))

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        flat = np.ascontiguousarray(host_view(x)).reshape(-1)
        with _Contiguous(output) as full:
            # Every rank sends its data to all others directly: one round, and the bytes of an all-gather.
            parts = np.split(full, self.size)
            self._transfer([flat] * self.size, parts)
        return DONE

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        reduction = reduction_of(x, op)
        flat = np.ascontiguousarray(host_view(x)).reshape(-1)
        values = host_view(output)
        # Each rank receives its part from all, and reduces them in rank order.
        parts = self._swap(np.split(flat, self.size), [values.size] * self.size)
        np.copyto(values, reduction(parts).reshape(values.shape))
        return DONE

    def _all_to_all_into(self, output: Tensor, x: Tensor, output_rows: Rows, input_rows: Rows, async_op: bool) -> Work:
        rows = np.ascontiguousarray(host_view(x))
        sends = np.split(rows, np.cumsum(input_rows)[:-1])
        with _Contiguous(output) as full:
            received = np.split(full.reshape(output._shape), np.cumsum(output_rows)[:-1])
            self._transfer(sends, received)
        return DONE

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        self._start_exchange(sends, receives).wait()

    def _start_exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> Work:
        targets = [None if x is None or j == self.rank else _Contiguous(x) for j, x in enumerate(receives)]
        works = self._start_transfer(
            [None if x is None or j == self.rank else np.ascontiguousarray(host_view(x)) for j, x in enumerate(sends)],
            [None if target is None else target.array for target in targets],
        )
        return _Transfer(works, [target for target in targets if target is not None])

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        with _Contiguous(x) as data:
            # The source sends to all; the others receive from it alone.
            mine = self.rank == source
            self._transfer(
                [data if mine else None] * self.size,
                [None if mine or j != source else data for j in range(self.size)],
            )
        return DONE

    def _send(self, x: Tensor, target: int, async_op: bool) -> Work:
        values = np.ascontiguousarray(host_view(x))
        work = _started(dist.isend, values, self.ranks[target])
        return work if async_op else _waited_for(work)

    def _receive(self, x: Tensor, source: int, async_op: bool) -> Work:
        work = Receiving(x, self.ranks[source], self._receiving)
        return work if async_op else _waited_for(work)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        # Two rounds: receivers must know the lengths.
        lengths = self._gather_arrays(np.array([len(data)], np.int64))
        mine = np.frombuffer(data, np.int8)
        return [part.tobytes() for part in self._swap([mine] * self.size, [int(n[0]) for n in lengths])]

    def _start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        """Gather bytes of equal length in one round; it is complete on return."""
        return GatheredBytes([part.tobytes() for part in self._gather_arrays(np.frombuffer(data, np.int8))])

    # Host arrays -----------------------------------------------------------------------------------------

    def _gather_arrays(self, flat: Array) -> list[Array]:
        return self._swap([flat] * self.size, [flat.size] * self.size)

    def _swap(self, sends: Sequence[Array], lengths: Sequence[int]) -> list[Array]:
        """Send one flat array to each rank, and receive `lengths[j]` elements from rank j."""
        received = [
            sends[j] if j == self.rank else np.empty(length, sends[0].dtype) for j, length in enumerate(lengths)
        ]
        self._transfer(sends, [None if j == self.rank else array for j, array in enumerate(received)])
        return received

    def _transfer(self, sends: Sequence[Array | None], receives: Sequence[Array | None]) -> None:
        """Exchange contiguous arrays between ranks; None and empty arrays are skipped on both sides.

        The own entry is copied if there is one to receive.
        """
        works = self._start_transfer(sends, receives)
        mine, into = sends[self.rank], receives[self.rank]
        if mine is not None and into is not None:
            np.copyto(into.reshape(-1), mine.reshape(-1))
        for work in works:
            work.wait()

    def _start_transfer(
        self, sends: Sequence[Array | None], receives: Sequence[Array | None]
    ) -> list[_RunningTransfer]:
        works = []
        # In each step every rank has another partner. In rank order all would send to rank 0 first, and wait for it.
        for step in range(1, self.size):
            j = (self.rank + step) % self.size
            if (data := sends[j]) is not None and data.size:
                works.append(_started(dist.isend, data, self.ranks[j]))
        for step in range(1, self.size):
            j = (self.rank - step) % self.size
            if (target := receives[j]) is not None and target.size:
                works.append(_started(dist.irecv, target, self.ranks[j]))
        return works


_failures: list[str] = []
"""Why transfers of this process have failed. All groups, and all jobs of a process, share MCCL's one channel."""


@contextlib.contextmanager
def _unless_failed() -> Iterator[None]:
    """Record an error of a transfer in the block, after which further transfers are refused.

    MCCL would take a late message of the failed transfer for one of the next.

    Raises:
        CollectiveError: a transfer has failed before.
    """
    if _failures:
        raise CollectiveError(
            f"a transfer of this rank has failed before ({_failures[0]}), and later messages could be taken for those "
            "of the failed call. Restart the job"
        )
    try:
        yield
    except BaseException as error:
        # MindSpore appends its stack in C++.
        _failures.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        raise


def _started(transfer: Callable[..., Any], array: Array, peer: int) -> _RunningTransfer:
    """Start `dist.isend` or `dist.irecv` of contiguous memory with a global rank."""
    given = _as_bytes(array)
    with _unless_failed():
        return _RunningTransfer(transfer(given, peer, group=MCCL_WORLD), given)


class _RunningTransfer:
    """A running transfer, which keeps the memory that it reads or writes alive until it is done."""

    def __init__(self, handle: Any, given: Tensor) -> None:
        self._handle: Any = handle
        self._given: Tensor | None = given

    def wait(self) -> None:
        if self._given is not None:
            with _unless_failed():
                self._handle.wait()
            self._given = None


class _Transfer:
    """A running exchange, with the non-contiguous tensors that get what arrives."""

    def __init__(self, works: Sequence[Work], targets: Sequence[_Contiguous]) -> None:
        self._works, self._targets = works, targets

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()
        targets, self._targets = self._targets, ()
        for target in targets:
            target.store()


class Receiving:
    """A message to receive. MCCL's receive blocks, so it starts in `wait`, after receives posted before it.

    Args:
        target: the tensor to fill.
        source: global rank of the sender.
        unfinished: the group's receives, in the order in which they were posted.
    """

    def __init__(self, target: Tensor, source: int, unfinished: list[Receiving]) -> None:
        self._target, self._source = target, source
        self._unfinished = unfinished
        unfinished.append(self)

    def wait(self) -> None:
        while self in self._unfinished:
            # Messages of one sender arrive in the order of sending, so receives are completed in the order of posting,
            # whichever is waited for first.
            earliest = next(each for each in self._unfinished if each._source == self._source)
            self._unfinished.remove(earliest)
            try:
                earliest._receive()
            except BaseException:
                # A wait that has failed must fail again.
                self._unfinished.insert(0, earliest)
                raise

    def _receive(self) -> None:
        with _Contiguous(self._target) as data:
            _started(dist.irecv, data, self._source).wait()


def _waited_for(work: Work) -> Work:
    work.wait()
    return DONE


class _Contiguous:
    """A flat contiguous array to receive into, copied back if the tensor itself is not contiguous."""

    def __init__(self, x: Tensor) -> None:
        self._values = host_view(x)
        self._direct = self._values.flags.c_contiguous
        # A byte view of a non-contiguous array is a copy, so `store` copies what has arrived back.
        self.array = (self._values if self._direct else np.ascontiguousarray(self._values)).reshape(-1)

    def store(self) -> None:
        if not self._direct:
            np.copyto(self._values, self.array.reshape(self._values.shape))

    def __enter__(self) -> Array:
        return self.array

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.store()


def _as_bytes(array: Array) -> Tensor:
    """View contiguous memory as an int8 tensor, the dtype that every transfer supports."""
    flat = array.reshape(-1).view(np.int8)
    # `from_numpy` shares memory only with writable arrays.
    return Tensor.from_numpy(flat if flat.flags.writeable else flat.copy())


# HCCL's names; an average is a sum, divided afterwards.
REDUCE_OPS = {"sum": "sum", "avg": "sum", "max": "max", "min": "min", "product": "prod"}


class Pending:
    """A running native collective, and what to do with its result."""

    def __init__(self, handle: Any, finish: Callable[[], None] | None = None) -> None:
        self._handle = handle
        self._finish = finish

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait()
        if self._finish is not None:
            self._finish()


class _PendingGatheredBytes:
    """A running all-gather of bytes from `sent` into `gathered`.

    `wait` with a timeout returns None at once, because asking whether the collective has ended would block.
    """

    def __init__(self, work: Work, gathered: Tensor, sent: Tensor) -> None:
        self._work = work
        self._gathered = gathered
        self._sent = sent

    def wait(self, timeout_seconds: float | None = None) -> list[bytes] | None:
        if timeout_seconds is not None:
            return None
        self._work.wait()
        return [row.tobytes() for row in self._gathered.asnumpy().reshape(-1, self._sent.size)]


class NativeGroup(ProcessGroup):
    """A group with HCCL's collectives, including asynchronous ones."""

    backend = "hccl"

    platform: MindSporeBase

    def __init__(self, ranks: Sequence[int], rank: int, platform: MindSporeBase) -> None:
        super().__init__(ranks, rank, platform)
        # Only members may create a group.
        self._name = dist.new_group(list(ranks))

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        # HCCL has no average: a sum is divided once it is complete. Before the call, since it may refuse.
        finish = self._average(x, op)
        handle = dist.all_reduce(x, REDUCE_OPS[op], group=self._name, async_op=async_op)
        return self._started(handle, async_op, finish)

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        flat = output.reshape((self.size * x.shape[0], *x.shape[1:])) if x.ndim else output
        # HCCL joins along dimension 0.
        handle = dist.all_gather_into_tensor(flat, x, group=self._name, async_op=async_op)
        return self._started(handle, async_op)

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        finish = self._average(output, op)
        handle = dist.reduce_scatter_tensor(output, x, REDUCE_OPS[op], group=self._name, async_op=async_op)
        return self._started(handle, async_op, finish)

    def _all_to_all_into(self, output: Tensor, x: Tensor, output_rows: Rows, input_rows: Rows, async_op: bool) -> Work:
        handle = dist.all_to_all_single(
            output, x, list(output_rows), list(input_rows), group=self._name, async_op=async_op
        )
        return self._started(handle, async_op)

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        transfers = [
            dist.P2POp(kind, x, self.ranks[j], group=self._name)
            for kind, tensors in (("isend", sends), ("irecv", receives))
            for j, x in enumerate(tensors)
            # Both sides know the shapes, and skip empty tensors.
            if j != self.rank and x is not None and x.size
        ]
        if transfers:
            for handle in dist.batch_isend_irecv(transfers):
                handle.wait()

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        handle = dist.broadcast(x, self.ranks[source], group=self._name, async_op=async_op)
        return self._started(handle, async_op)

    def _send(self, x: Tensor, target: int, async_op: bool) -> Work:
        return self._started(dist.isend(x, self.ranks[target], group=self._name), async_op)

    def _receive(self, x: Tensor, source: int, async_op: bool) -> Work:
        return self._started(dist.irecv(x, self.ranks[source], group=self._name), async_op)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = self._gathered(np.array([len(data)], np.int64))
        # At least one byte: a tensor without elements has no memory to send.
        # Padded to one length, because HCCL gathers equal shapes only.
        longest = max(1, int(lengths.max()))
        padded = np.zeros(longest, np.int8)
        padded[: len(data)] = np.frombuffer(data, np.int8)
        everything = self._gathered(padded).reshape(self.size, longest)
        return [row[: int(n)].tobytes() for row, n in zip(everything, lengths, strict=True)]

    def _start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        mine = Tensor(np.frombuffer(data, np.int8))
        output = mint.empty((self.size * len(data),), dtype=mine.dtype)
        return _PendingGatheredBytes(self._all_gather_into(output, mine, True), output, mine)

    def _gathered(self, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        mine = Tensor(values)
        output = mint.empty((self.size * values.size,), dtype=mine.dtype)
        dist.all_gather_into_tensor(output, mine, group=self._name)
        return output.asnumpy()

    def _average(self, x: Tensor, op: str) -> Callable[[], None] | None:
        """Return a function that divides the sum in `x` by the number of ranks; None for other reductions."""
        if op != "avg":
            return None
        check_average(x, op)
        return lambda: self.platform.copy_(x, x / self.size)

    def _started(self, handle: Any, async_op: bool, finish: Callable[[], None] | None = None) -> Work:
        work = Pending(handle, finish)
        if async_op:
            return work
        work.wait()
        return DONE
