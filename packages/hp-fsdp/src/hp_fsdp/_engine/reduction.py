"""Reductions of full gradients to the gradients of sharded parameters, overlapped with backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hp_dtensor.comm.process_group import DONE, Work
from hp_fsdp._engine.flat_buffer import FlatBuffer
from hp_fsdp._engine.param_group import ParameterGroup
from hp_fsdp._engine.rank_checks import Communicating, UsedParameters
from hp_fsdp._engine.settings import ReduceOptions

Tensor = Any


class Reduction:
    """The reduction of one flat buffer: its reduce-scatter, then its all-reduce, then its gradients are stored.

    When it is not the last of a step, the reduced shard waits in the buffer for the next one.

    Args:
        group: whose buffer.
        is_last: it completes the gradients of a step.
    """

    def __init__(self, group: ParameterGroup, buffer: FlatBuffer, is_last: bool) -> None:
        self.buffer = buffer
        self._group = group
        options = group.settings.reduce
        self._hook = options.hook
        self._all_reduce = is_last and options.all_reduce and buffer.replicate_group is not None
        self._waits_for_more = not is_last or (not options.all_reduce and buffer.replicate_group is not None)
        num_replicas = buffer.replicate_group.size if buffer.replicate_group is not None else 1
        factor = options.factor(buffer.shard_group.size * num_replicas)
        self._before, self._after = _split_factor(factor, buffer)
        self._used = self._take_used()
        self._shard: Tensor = None
        self._store: Callable[[], None] | None = None
        with self._communicating():
            self._shard, self._work = self._scatter()
            # All-reduces follow in the same order.
            buffer.actions.record_reduction(None if self._waits_for_more else self._used, self._all_reduce)

    def _communicating(self) -> Communicating:
        return Communicating(self._group, "reduce gradients", in_backward=True)

    def _take_used(self) -> UsedParameters:
        """Take from the buffer which parameters have gradients, in this reduction and in those that it completes."""
        gradients = self.buffer.gradients
        indices = gradients.unreduced_indices | gradients.partial_indices
        gradients.unreduced_indices = frozenset()
        gradients.partial_indices = indices if self._waits_for_more else frozenset()
        return UsedParameters(indices, len(self.buffer.parameters))

    def _scatter(self) -> tuple[Tensor, Work]:
        """Take the full gradients from the buffer, and begin their reduce-scatter: (this rank's shard, the work)."""
        buffer, gradients = self.buffer, self.buffer.gradients
        # The collective reads them on another stream: they are held here until the reduce-scatter is over.
        self._full, gradients.unreduced = gradients.unreduced, None
        # In float16 the sum over many ranks overflows before it is divided, and divided first small gradients vanish:
        # half of the factor (in powers of two, exact) before, the rest after.
        if self._before != 1.0:
            buffer.storage.scale_(self._full, 1.0 / self._before)
        if buffer.shard_group.size == 1:
            return self._full, DONE
        shard = buffer.new_buffer(buffer.layout.shard_numel, buffer.reduce_dtype)
        buffer.count_allocation()
        return shard, buffer.communication.reduce_scatter(shard, self._full, buffer.shard_group)

    def advance(self) -> None:
        """Wait for the reduce-scatter, free the full gradients, and begin the all-reduce."""
        buffer, gradients = self.buffer, self.buffer.gradients
        self._wait()
        # The memory may serve the next gather from here on.
        self._full, self._work = None, DONE
        if gradients.partial_shard is not None:
            buffer.storage.add_(self._shard, gradients.partial_shard)
            gradients.partial_shard = None
        if self._waits_for_more:
            gradients.partial_shard = self._shard
            buffer.versions.mark_awaiting_reduction()
        elif self._all_reduce:
            assert buffer.replicate_group is not None
            with self._communicating():
                self._work = buffer.communication.all_reduce(self._shard, buffer.replicate_group)

    def _wait(self) -> None:
        with self._communicating():
            self._work.wait()

    @property
    def held_bytes(self) -> int:
        """Bytes of the full gradients, while they are reduced, and of the reduced shard."""
        held = {
            id(x): x
            for x in (self._full, self._shard)
            if x is not None and x is not self.buffer.gradients.partial_shard
        }
        return sum(self.buffer.storage.held_bytes(x) for x in held.values())

    @property
    def is_copied_away(self) -> bool:
        """True if its gradients go to the host, which takes time beside the backward."""
        return self.buffer.offload.gradients

    @property
    def stored(self) -> frozenset[int]:
        """Indices of the parameters whose gradients it sets or adds to; known for good when ranks have compared."""
        return frozenset() if self._waits_for_more else self._used.indices

    @property
    def is_communicating(self) -> bool:
        """True while its all-reduce may still run."""
        return self._work is not DONE

    def finish(self) -> Callable[[], None]:
        """Wait, scale, and begin to store the gradients, unless that has been done.

        Returns:
            The function that makes them the parameters' gradients.
        """
        if self._store is None:
            self._wait()
            self._store = self._start_store()
            self._shard = None
        return self._store

    def _start_store(self) -> Callable[[], None]:
        if self._waits_for_more:
            return lambda: None
        if self._after != 1.0:
            self.buffer.storage.scale_(self._shard, 1.0 / self._after)
        if self._hook is not None:
            self._hook(self._shard)
        return self.buffer.gradients.start_store(self._shard, self._used)


class Reducer:
    """The reductions under way in one backward, the oldest first; the last few still hold full gradient buffers.

    Full gradients of one buffer are reduced while the backward of the next group runs: `make_room` waits for as many
    as must be over before another full gradient buffer may be allocated.
    """

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

    def start(self, group: ParameterGroup, buffer: FlatBuffer, is_last: bool) -> None:
        """Begin the reduction of a buffer's full gradients; `is_last`: it completes the gradients of a step."""
        self._running.append(Reduction(group, buffer, is_last))

    def leaves_waiting(self, buffer: FlatBuffer, options: ReduceOptions) -> bool:
        """Return True if a buffer has gradients that its next reduction would complete, and none is under way."""
        gradients = buffer.gradients
        all_reduces = options.all_reduce or buffer.replicate_group is None
        if gradients.unreduced is None and (gradients.partial_shard is None or not all_reduces):
            return False
        return all(reduction.buffer is not buffer for reduction in self._running)

    @property
    def held_bytes(self) -> int:
        """Bytes of gradients under reduction."""
        return sum(reduction.held_bytes for reduction in self._running)

    def drain(self, check: Callable[[], None]) -> None:
        """Finish all reductions; the gradients are there then, unless `check`, called before that, raises."""
        # All of them but for all-reduces, which then run side by side.
        self.make_room(1)
        running = self._running
        self._forget()
        # First everything arrives, then ranks compare, then gradients are set: after an error no parameter has a
        # gradient that the others lack.
        stores = [reduction.finish() for reduction in running]
        if stores:
            check()
        for store in stores:
            store()
        for reduction in running:
            self._stored[reduction.buffer] = self._stored.get(reduction.buffer, frozenset()) | reduction.stored

    def run_gradient_hooks(self) -> None:
        """Call the gradient hooks of each parameter whose gradient has been written since the last time, once."""
        stored, self._stored = self._stored, {}
        for buffer, indices in stored.items():
            buffer.gradients.run_gradient_hooks(indices)

    def drop(self) -> None:
        """Forget what is under way, after an error."""
        self._forget()
        self._stored.clear()

    def _forget(self) -> None:
        self._running, self._num_advanced, self._to_copy = [], 0, []


def _split_factor(factor: float, buffer: FlatBuffer) -> tuple[float, float]:
    """Split a divisor into one before the reduction and one after it: undivided sums of float16 would overflow."""
    if factor <= 1.0 or buffer.platform.dtype_name(buffer.reduce_dtype) != "float16":
        return 1.0, factor
    before = 2.0 ** math.ceil(math.log2(factor) / 2)
    return before, factor / before
