"""The way of gradients from the full gradient buffer to the sharded parameters, overlapped with backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.world import DONE, Work
from hp_fsdp._engine.flat_buffer import FlatBuffer

Tensor = Any
Communicating = Callable[..., AbstractContextManager[None]]  # ParameterGroup.communicating


@dataclass(slots=True)
class ReduceOptions:
    """How a group's gradients are reduced.

    Attributes:
        all_reduce: also over the replicate axis; else the reduced shards wait for a later reduction.
        divide_factor: what the sum over all ranks is divided by; None: the number of ranks for `op` "avg", 1
            for "sum".
        op: "avg" or "sum".
        scaling_factor: what the result is multiplied by.
    """

    all_reduce: bool = True
    divide_factor: float | None = None
    op: str = "avg"
    scaling_factor: float = 1.0

    def factor(self, num_ranks: int) -> float:
        """What the sum over all ranks is divided by in the end."""
        divisor = self.divide_factor
        if divisor is None:
            divisor = float(num_ranks) if self.op == "avg" else 1.0
        return divisor / self.scaling_factor


class Reduction:
    """One flat buffer's reduce-scatter, then its all-reduce, then its gradients.

    When it is not the last of a step, the reduced shard waits in the buffer for the next one.
    """

    def __init__(self, buffer: FlatBuffer, options: ReduceOptions, is_last: bool, communicating: Communicating) -> None:
        self.buffer = buffer
        self._communicating = communicating
        self._all_reduce = is_last and options.all_reduce and buffer.replicate_group is not None
        self._waits_for_more = not is_last or (not options.all_reduce and buffer.replicate_group is not None)
        num_replicas = buffer.replicate_group.size if buffer.replicate_group is not None else 1
        factor = options.factor(buffer.shard_group.size * num_replicas)
        self._before, self._after = _split_factor(factor, buffer)
        self._shard: Tensor = None
        self._store: Callable[[], None] | None = None
        with communicating("reduce gradients", in_backward=True):
            self._shard, self._work = self._scatter()
            # All-reduces follow in the same order.
            buffer.note_reduction(self._all_reduce)

    def _scatter(self) -> tuple[Tensor, Work]:
        buffer = self.buffer
        # Held here until the reduce-scatter is over.
        self._full, buffer.gradients = buffer.gradients, None
        self._collected, buffer.collected = buffer.collected, frozenset()
        if self._before != 1.0:
            buffer.storage.scale_(self._full, 1.0 / self._before)
        if buffer.shard_group.size == 1:
            return self._full, DONE
        shard = buffer.new_buffer(buffer.layout.shard_numel, buffer.reduce_dtype)
        buffer.note_allocation()
        return shard, buffer.communication.reduce_scatter(shard, self._full, buffer.shard_group)

    def advance(self) -> None:
        """Wait for the reduce-scatter, free the full gradients, and begin the all-reduce."""
        buffer = self.buffer
        self._wait()
        self._full, self._work = None, DONE
        if buffer.partial_shard is not None:
            buffer.storage.add_(self._shard, buffer.partial_shard)
            self._collected |= buffer.partial_collected
            buffer.partial_shard, buffer.partial_collected = None, frozenset()
        if self._waits_for_more:
            buffer.partial_shard, buffer.partial_collected = self._shard, self._collected
            buffer.note_pending()
        elif self._all_reduce:
            assert buffer.replicate_group is not None
            with self._communicating("reduce gradients", in_backward=True):
                self._work = buffer.communication.all_reduce(self._shard, buffer.replicate_group)

    def _wait(self) -> None:
        with self._communicating("reduce gradients", in_backward=True):
            self._work.wait()

    @property
    def held_bytes(self) -> int:
        """Bytes of the full gradients, while they are reduced, and of the reduced shard."""
        held = {id(x): x for x in (self._full, self._shard) if x is not None and x is not self.buffer.partial_shard}
        return sum(self.buffer.storage.held_bytes(x) for x in held.values())

    @property
    def is_copied_away(self) -> bool:
        """Whether its gradients go to the host, which takes time beside the backward."""
        return self.buffer.residence.gradients

    @property
    def stored(self) -> frozenset[int]:
        """Indices of the parameters whose gradients it writes."""
        return frozenset() if self._waits_for_more else self._collected

    @property
    def is_communicating(self) -> bool:
        return self._work is not DONE

    def finish(self) -> Callable[[], None]:
        """Wait, scale, and begin to store the gradients, unless that has been done; the function returned does the
        rest."""
        if self._store is None:
            self._wait()
            self._store = self._start_store()
            self._shard = None
        return self._store

    def _start_store(self) -> Callable[[], None]:
        if not self.stored:
            return lambda: None
        if self._after != 1.0:
            self.buffer.storage.scale_(self._shard, 1.0 / self._after)
        return self.buffer.start_store(self._shard, self._collected)


class Reducer:
    """Reductions under way, of which the last few still hold full gradient buffers."""

    def __init__(self) -> None:
        self._running: list[Reduction] = []
        self._stored: dict[FlatBuffer, frozenset[int]] = {}
        self._num_advanced = 0
        self._to_copy: list[Reduction] = []  # advanced ones whose gradients go to the host after an all-reduce

    def make_room(self, max_full: int) -> None:
        """Wait until fewer than `max_full` full gradient buffers are held: one more is about to be.

        Gradients that go to the host begin to once they are reduced; an all-reduce gets the time until the next call.
        """
        due, self._to_copy = self._to_copy, []
        while len(self._running) - self._num_advanced >= max_full:
            reduction = self._running[self._num_advanced]
            reduction.advance()
            self._num_advanced += 1
            if reduction.is_copied_away:
                (self._to_copy if reduction.is_communicating else due).append(reduction)
        for reduction in due:
            reduction.finish()

    def start(self, buffer: FlatBuffer, options: ReduceOptions, is_last: bool, communicating: Communicating) -> None:
        self._running.append(Reduction(buffer, options, is_last, communicating))

    def leaves_waiting(self, buffer: FlatBuffer, options: ReduceOptions) -> bool:
        """Whether a buffer has gradients of which a reduction would be the last one, and none is under way."""
        all_reduces = options.all_reduce or buffer.replicate_group is None
        if buffer.gradients is None and (buffer.partial_shard is None or not all_reduces):
            return False
        return all(reduction.buffer is not buffer for reduction in self._running)

    @property
    def held_bytes(self) -> int:
        return sum(reduction.held_bytes for reduction in self._running)

    def drain(self, check: Callable[[], None]) -> None:
        """Finish all; the gradients are then there, unless `check`, called before, raises."""
        self.make_room(1)
        running = self._running
        self._forget()
        stores = [reduction.finish() for reduction in running]
        if stores:
            check()
        for store in stores:
            store()
        for reduction in running:
            self._stored[reduction.buffer] = self._stored.get(reduction.buffer, frozenset()) | reduction.stored

    def run_gradient_hooks(self) -> None:
        """Of all parameters whose gradients have been written since the last time, each once."""
        stored, self._stored = self._stored, {}
        for buffer, indices in stored.items():
            buffer.run_gradient_hooks(indices)

    def drop(self) -> None:
        """Forget what is under way, after an error."""
        self._forget()
        self._stored.clear()

    def _forget(self) -> None:
        self._running, self._num_advanced, self._to_copy = [], 0, []


def _split_factor(factor: float, buffer: FlatBuffer) -> tuple[float, float]:
    """(divisor before the reduction, divisor after it): float16 sums would overflow undivided."""
    if factor <= 1.0 or buffer.platform.dtype_name(buffer.reduce_dtype) != "float16":
        return 1.0, factor
    before = 2.0 ** math.ceil(math.log2(factor) / 2)
    return before, factor / before
