"""Ranks and process groups on MindSpore's communication (MCCL on CPU, HCCL on Ascend).

MCCL has few collectives, few dtypes in each, and does nothing at all on views. What works for every dtype and
any ranks is a transfer of bytes between two ranks, so on CPU every collective is composed of those and of
sums on the host: in rank order, so results repeat and are the same on all ranks. It is as fast as the native
ones where those exist. Groups then need no start-up of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any

import mindspore.mint.distributed as dist
import numpy as np
from mindspore import Tensor
from mindspore.communication.management import _init_with_store
from mindspore.mint.distributed import distributed as _distributed

from hp_dtensor.comm.world import DONE, GatheredBytes, NoCommunicationGroup, PendingBytes, ProcessGroup, Work, World
from hp_dtensor.exceptions import CapabilityError, PlatformError
from hp_platform_mindspore.comm.silent_shutdown import end_without_messages
from hp_platform_mindspore.tensor.memory import FLOATING, NAMES, decode, encode, host_view, share

if TYPE_CHECKING:
    from hp_platform_mindspore.platform import MindSporePlatform

Array = np.ndarray[Any, Any]
Reduction = Callable[[Sequence[Array]], Array]

MCCL_WORLD = "mccl_world_group"
TIMEOUT_VARIABLE = "MS_CPU_COMM_OP_TIMEOUT"
READY_KEY = "hp_dtensor/ready"

# Up to this size one round of messages beats reduce-scatter and all-gather (measured with 2 and 4 ranks).
SMALL_BYTES = 1 << 16

PAIRWISE: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}


class MindSporeWorld(World):
    """All ranks of a job."""

    platform: MindSporePlatform
    _joined = False

    @classmethod
    def join(
        cls,
        platform: MindSporePlatform,
        rank: int,
        size: int,
        address: str,
        timeout_seconds: float,
        local_rank: int,
    ) -> MindSporeWorld:
        """Meet the other ranks at `address`.

        Raises:
            PlatformError: this process has joined before, or the others did not come in time.
        """
        if size > 1:
            if cls._joined:
                raise PlatformError(
                    "this process has been in a job before; MindSpore joins one only once per process. Start a new one"
                )
            try:
                _join(platform, rank, size, address, timeout_seconds, local_rank)
            except RuntimeError as error:
                raise PlatformError(
                    f"rank {rank} of {size} could not join the job at {address} within {timeout_seconds:g} s: {error}"
                ) from error
            cls._joined = True
        return cls(rank, size, platform)

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        rank = ranks.index(self.rank)
        if len(ranks) == 1:
            return NoCommunicationGroup(ranks, rank, self.platform)
        if self.platform.capabilities.native_collectives:
            from hp_platform_mindspore.comm.native_groups import NativeGroup

            return NativeGroup(ranks, rank, self.platform)
        return HostGroup(ranks, rank, self.platform)


def _join(
    platform: MindSporePlatform, rank: int, size: int, address: str, timeout_seconds: float, local_rank: int
) -> None:
    host, port = address.rsplit(":", 1)
    timeout = timedelta(seconds=timeout_seconds)
    if platform.capabilities.native_collectives:
        dist.init_process_group(
            "hccl", init_method=f"tcp://{address}", timeout=timeout, world_size=size, rank=rank, device_id=local_rank
        )
        return
    os.environ.setdefault(TIMEOUT_VARIABLE, str(max(1, round(timeout_seconds))))
    store = dist.TCPStore(host, int(port), world_size=size, is_master=rank == 0, timeout=timeout)
    _init_with_store(backend="mccl", timeout=timeout, world_size=size, rank=rank, store=store)
    # Their default group is HCCL's whatever the backend; isend and irecv look ranks up with it.
    for function in (_distributed.get_cache_group_rank, _distributed.get_cache_group_size):
        function.__defaults__ = (MCCL_WORLD,)
    _wait_for_all(store, size, timeout_seconds)
    end_without_messages()


def _wait_for_all(store: Any, size: int, timeout_seconds: float) -> None:
    """Rank 0 comes out of the start seconds before its peers can receive, and the first collective connects them."""
    deadline = time.monotonic() + timeout_seconds
    store.add(READY_KEY, 1)
    while store.add(READY_KEY, 0) < size:
        if time.monotonic() > deadline:
            raise RuntimeError("not every rank was ready in time")
        time.sleep(0.005)
    one = share(np.ones(1, np.float32))
    dist.all_reduce(one)
    one.asnumpy()


class HostGroup(ProcessGroup):
    """Collectives composed of transfers of bytes between host buffers."""

    backend = "mccl"

    platform: MindSporePlatform

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work:
        reduction = reduction_of(x, op)
        values = host_view(x)
        flat = np.ascontiguousarray(values).reshape(-1)
        if flat.nbytes <= SMALL_BYTES:
            total = reduction(self._gather_arrays(flat))
        else:
            total = self._all_reduce_in_parts(flat, reduction)
        np.copyto(values, total.reshape(values.shape))
        return DONE

    def _all_reduce_in_parts(self, flat: Array, reduction: Reduction) -> Array:
        """Reduce-scatter, then all-gather."""
        parts = np.array_split(flat, self.size)
        mine = reduction(self._swap(parts, [parts[self.rank].size] * self.size))
        return np.concatenate(self._swap([mine] * self.size, [part.size for part in parts]))

    def _all_gather_into(self, output: Tensor, x: Tensor, async_op: bool) -> Work:
        flat = np.ascontiguousarray(host_view(x)).reshape(-1)
        with _Contiguous(output) as whole:
            parts = np.split(whole, self.size)
            self._transfer([flat] * self.size, parts)
        return DONE

    def _reduce_scatter_into(self, output: Tensor, x: Tensor, op: str, async_op: bool) -> Work:
        reduction = reduction_of(x, op)
        flat = np.ascontiguousarray(host_view(x)).reshape(-1)
        values = host_view(output)
        parts = self._swap(np.split(flat, self.size), [values.size] * self.size)
        np.copyto(values, reduction(parts).reshape(values.shape))
        return DONE

    def _all_to_all_into(
        self,
        output: Tensor,
        x: Tensor,
        output_rows: tuple[int, ...],
        input_rows: tuple[int, ...],
        async_op: bool,
    ) -> Work:
        rows = np.ascontiguousarray(host_view(x))
        sends = np.split(rows, np.cumsum(input_rows)[:-1])
        with _Contiguous(output) as whole:
            received = np.split(whole.reshape(output._shape), np.cumsum(output_rows)[:-1])
            self._transfer(sends, received)
        return DONE

    def _exchange(self, sends: Sequence[Tensor | None], receives: Sequence[Tensor | None]) -> None:
        targets = [None if x is None or j == self.rank else _Contiguous(x) for j, x in enumerate(receives)]
        self._transfer(
            [None if x is None or j == self.rank else np.ascontiguousarray(host_view(x)) for j, x in enumerate(sends)],
            [None if target is None else target.array for target in targets],
        )
        for target in targets:
            if target is not None:
                target.store()

    def _broadcast(self, x: Tensor, source: int, async_op: bool) -> Work:
        with _Contiguous(x) as data:
            mine = self.rank == source
            self._transfer(
                [data if mine else None] * self.size,
                [None if mine or j != source else data for j in range(self.size)],
            )
        return DONE

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        lengths = self._gather_arrays(np.array([len(data)], np.int64))
        mine = np.frombuffer(data, np.int8)
        return [part.tobytes() for part in self._swap([mine] * self.size, [int(n[0]) for n in lengths])]

    def _start_all_gather_bytes(self, data: bytes) -> PendingBytes:
        """In one round: the lengths are known. Nothing overlaps here."""
        return GatheredBytes([part.tobytes() for part in self._gather_arrays(np.frombuffer(data, np.int8))])

    # Host arrays -----------------------------------------------------------------------------------------

    def _gather_arrays(self, flat: Array) -> list[Array]:
        return self._swap([flat] * self.size, [flat.size] * self.size)

    def _swap(self, sends: Sequence[Array], lengths: Sequence[int]) -> list[Array]:
        """Send one flat array to each rank; `lengths[j]` elements come from rank j."""
        received = [
            sends[j] if j == self.rank else np.empty(length, sends[0].dtype) for j, length in enumerate(lengths)
        ]
        self._transfer(sends, [None if j == self.rank else array for j, array in enumerate(received)])
        return received

    def _transfer(self, sends: Sequence[Array | None], receives: Sequence[Array | None]) -> None:
        """Move contiguous arrays between ranks; None and empty ones are skipped on both sides.

        The own entry is copied where there is one to receive.
        """
        works = []
        for step in range(1, self.size):
            j = (self.rank + step) % self.size
            if (data := sends[j]) is not None and data.size:
                works.append(dist.isend(_as_bytes(data), self.ranks[j], group=MCCL_WORLD))
        for step in range(1, self.size):
            j = (self.rank - step) % self.size
            if (target := receives[j]) is not None and target.size:
                works.append(dist.irecv(_as_bytes(target), self.ranks[j], group=MCCL_WORLD))
        mine, into = sends[self.rank], receives[self.rank]
        if mine is not None and into is not None:
            np.copyto(into.reshape(-1), mine.reshape(-1))
        for work in works:
            work.wait()


class _Contiguous:
    """A tensor's memory as a flat contiguous array to receive into; stored back where the tensor has gaps."""

    def __init__(self, x: Tensor) -> None:
        self._values = host_view(x)
        self._direct = self._values.flags.c_contiguous
        self.array = (self._values if self._direct else np.ascontiguousarray(self._values)).reshape(-1)

    def store(self) -> None:
        if not self._direct:
            np.copyto(self._values, self.array.reshape(self._values.shape))

    def __enter__(self) -> Array:
        return self.array

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.store()


def reduction_of(x: Tensor, op: str) -> Reduction:
    """How arrays of the dtype of `x`, one per rank, become one. Sums and products of bool mean any and all.

    Raises:
        CapabilityError: the average of a dtype that is not floating-point.
    """
    check_average(x, op)
    return _reduce_bfloat16(op) if NAMES[x.dtype] == "bfloat16" else _reduce_in_rank_order(op)


def check_average(x: Tensor, op: str) -> None:
    """Refuse averages that are no numbers of the dtype."""
    if op == "avg" and x.dtype not in FLOATING:
        raise CapabilityError(
            f"the reduction 'avg' needs a floating-point tensor, got {x.dtype}; reduce with 'sum' and divide"
        )


def _reduce_in_rank_order(op: str) -> Reduction:
    """Every intermediate result has the dtype of the parts."""

    def reduction(parts: Sequence[Array]) -> Array:
        total = reduce(PAIRWISE[op], parts)
        return (total / len(parts)).astype(total.dtype) if op == "avg" else total

    return reduction


def _reduce_bfloat16(op: str) -> Reduction:
    """The same for bit patterns, every intermediate result rounded to bfloat16."""

    def pair(x: Array, y: Array) -> Array:
        return encode(PAIRWISE[op](decode(x), decode(y)))

    def reduction(parts: Sequence[Array]) -> Array:
        total = reduce(pair, parts)
        return encode(decode(total) / np.float32(len(parts))) if op == "avg" else total

    return reduction


def _as_bytes(array: Array) -> Tensor:
    """Contiguous memory as an int8 tensor, the one dtype that every transfer takes."""
    flat = array.reshape(-1).view(np.int8)
    return Tensor.from_numpy(flat if flat.flags.writeable else flat.copy())
