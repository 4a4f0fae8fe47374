"""Reduction of full gradients to the gradients of sharded parameters, overlapped with backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hp_dtensor.comm.process_group import DONE, Work
from hp_fsdp._engine.flat_buffer import FlatBuffer, StoredShard
from hp_fsdp._engine.param_group import ParameterGroup, ReduceOptions
from hp_fsdp._engine.rank_checks import UsedParameters, communicate

Tensor = Any


class Reduction:
    """The reduction of one buffer: a reduce-scatter over the shards, an all-reduce over the replicas, then the store.

    If it is not the last reduction of a step, the reduced shard stays pending in the buffer until the next one.

    Args:
        group: the group of the buffer.
        is_last: it completes the gradients of a step.

    Attributes:
        copies_to_host: its gradients are copied to the host, for which the backward leaves time.
        work: the running collective. `DONE` between the reduce-scatter and the all-reduce, and where there is none.
    """

    def __init__(self, group: ParameterGroup, buffer: FlatBuffer, options: ReduceOptions, is_last: bool) -> None:
        self.buffer = buffer
        self.copies_to_host = buffer.offload.gradients
        self._group = group
        self._hook = options.hook
        replicas = buffer.replicate_group
        self._all_reduces = is_last and options.all_reduce and replicas is not None
        self._stays_partial = not is_last or (not options.all_reduce and replicas is not None)
        divisor = options.divisor(buffer.shard_group.size * (replicas.size if replicas is not None else 1))
        self._divisor_before, self._divisor_after = (
            _split_divisor(divisor) if buffer.reduces_in_half and divisor > 1.0 else (1.0, divisor)
        )
        # Take the record of parameters with gradients, those of a pending shard too, from the buffer.
        gradients = buffer.gradients
        indices = gradients.unreduced_indices | gradients.partial_indices
        gradients.unreduced_indices = frozenset()
        gradients.partial_indices = indices if self._stays_partial else frozenset()
        self._used = UsedParameters(indices, len(buffer.parameters))
        self._shard: Tensor = None
        self._stored: StoredShard | None = None
        self._shard, self.work = self._communicate(self._start_reduce_scatter)

    def _communicate(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return communicate(self._group, "reduce gradients", function, *arguments, in_backward=True)

    def _start_reduce_scatter(self) -> tuple[Tensor, Work]:
        """Take the full gradients from the buffer, and start their reduce-scatter; return the shard and the work."""
        buffer, gradients = self.buffer, self.buffer.gradients
        # The collective reads the full gradients on another stream: this reference holds them until it has ended.
        self._full, gradients.unreduced = gradients.unreduced, None
        if self._divisor_before != 1.0:
            buffer.storage.scale_(self._full, 1.0 / self._divisor_before)
        # With one shard nothing is scattered: the full gradients are the shard.
        shard: Tensor = self._full
        work: Work = DONE
        if buffer.shard_group.size > 1:
            shard = buffer.new_buffer(buffer.layout.shard_numel, buffer.reduce_dtype)
            if buffer.on_allocation is not None:
                buffer.on_allocation()
            work = buffer.communication.reduce_scatter(shard, self._full, buffer.shard_group)
        # The all-reduce is recorded here too. All-reduces follow in the order of the reduce-scatters.
        buffer.actions.record_reduction(None if self._stays_partial else self._used, self._all_reduces)
        return shard, work

    def finish_reduce_scatter(self) -> None:
        """Wait for the reduce-scatter, free the full gradients, and start the all-reduce."""
        buffer, gradients = self.buffer, self.buffer.gradients
        self._wait()
        # From here on the memory of the full gradients can serve the next gather.
        self._full = None
        # The shard of earlier reductions is added before the all-reduce, which then covers all of them.
        if gradients.partial_shard is not None:
            buffer.storage.add_(self._shard, gradients.partial_shard)
            gradients.partial_shard = None
        if self._stays_partial:
            gradients.partial_shard = self._shard
            buffer.versions.mark_accumulation()
        elif self._all_reduces:
            assert buffer.replicate_group is not None
            self.work = self._communicate(buffer.communication.all_reduce, self._shard, buffer.replicate_group)

    def _wait(self) -> None:
        work, self.work = self.work, DONE
        if work is not DONE:
            self._communicate(work.wait)

    def start_store(self) -> None:
        """Wait for the last collective, scale the shard, and start to store it, unless that has been done."""
        if self._stored is not None:
            return
        self._wait()
        if self._stays_partial:
            return
        if self._divisor_after != 1.0:
            self.buffer.storage.scale_(self._shard, 1.0 / self._divisor_after)
        if self._hook is not None:
            self._hook(self._shard)
        # After the hook, which may have written the shard in place.
        self._stored = self.buffer.gradients.start_store(self._shard)
        # The gradients are views of it from now on, or the host has a copy.
        self._shard = None

    def set_gradients(self) -> frozenset[int]:
        """Set the gradients once ranks have exchanged which are used; return the indices of their parameters."""
        if self._stored is None:
            return frozenset()
        stored, self._stored = self._stored, None
        self.buffer.gradients.finish_store(stored, self._used)
        return self._used.indices

    @property
    def held_bytes(self) -> int:
        """Bytes of the full gradients while they are reduced, and of the reduced shard."""
        # Both are one tensor if nothing is sharded. A partial shard is counted by the buffer.
        held = {
            id(x): x
            for x in (self._full, self._shard)
            if x is not None and x is not self.buffer.gradients.partial_shard
        }
        return sum(self.buffer.storage.held_bytes(x) for x in held.values())


class Reducer:
    """The running reductions of one backward, oldest first. Only the last few still hold full gradient buffers.

    The full gradients of one group are reduced during the backward of the next groups. `limit_in_flight` bounds how
    many full gradient buffers this holds.
    """

    def __init__(self) -> None:
        self._running: list[Reduction] = []
        self._stored: dict[FlatBuffer, frozenset[int]] = {}
        self._num_scattered = 0  # the first ones, whose reduce-scatter has ended
        self._to_copy: list[Reduction] = []  # scattered ones whose gradients are copied to the host after an all-reduce

    def limit_in_flight(self, max_full: int) -> None:
        """Wait until fewer than `max_full` full gradient buffers are held, before another one is allocated."""
        # A copy to the host can only start when the gradients are reduced. An all-reduce that has just been started has
        # until the next call to end.
        due, self._to_copy = self._to_copy, []
        while len(self._running) - self._num_scattered >= max_full:
            reduction = self._running[self._num_scattered]
            reduction.finish_reduce_scatter()
            self._num_scattered += 1
            if reduction.copies_to_host:
                (due if reduction.work is DONE else self._to_copy).append(reduction)
        for reduction in due:
            reduction.start_store()

    def start(self, group: ParameterGroup, buffer: FlatBuffer, options: ReduceOptions, is_last: bool) -> None:
        """Start to reduce the full gradients of a buffer. `is_last`: this completes the gradients of a step."""
        self._running.append(Reduction(group, buffer, options, is_last))

    def needs_reduction(self, buffer: FlatBuffer, options: ReduceOptions) -> bool:
        """Return True if a buffer has gradients that another reduction would complete, and none is running."""
        gradients = buffer.gradients
        all_reduces = options.all_reduce or buffer.replicate_group is None
        if gradients.unreduced is None and (gradients.partial_shard is None or not all_reduces):
            return False
        return all(reduction.buffer is not buffer for reduction in self._running)

    def finish_all(self, check: Callable[[], None]) -> None:
        """Finish all reductions and set the gradients, unless `check`, which is called before that, raises."""
        # Wait for all reduce-scatters, which starts all all-reduces: these then run at the same time.
        self.limit_in_flight(1)
        running = self._running
        # Cleared now, so that no reduction is finished a second time if waiting for one raises.
        self._clear()
        # First wait for all collectives, then compare ranks, then set gradients: after an error no parameter has a
        # gradient on some ranks only.
        for reduction in running:
            reduction.start_store()
        if running:
            check()
        for reduction in running:
            stored = reduction.set_gradients()
            self._stored[reduction.buffer] = self._stored.get(reduction.buffer, frozenset()) | stored

    def run_gradient_hooks(self) -> None:
        """Call the users' gradient hooks of each parameter whose gradient has been set since the last call, once."""
        stored, self._stored = self._stored, {}
        for buffer, indices in stored.items():
            for index in sorted(indices):
                buffer.storage.run_gradient_hooks(buffer.sharded[index])

    def reset(self) -> None:
        """Discard the running reductions, after an error."""
        self._clear()
        self._stored.clear()

    def _clear(self) -> None:
        self._running, self._num_scattered, self._to_copy = [], 0, []

    @property
    def held_bytes(self) -> int:
        """Bytes of the gradients that are being reduced."""
        return sum(reduction.held_bytes for reduction in self._running)


def _split_divisor(divisor: float) -> tuple[float, float]:
    """Split the divisor of a reduction in float16 into the numbers by which to divide before and after it."""
    # The undivided sum over many ranks overflows in float16, and small gradients vanish if divided first. So each half
    # of the divisor (in the exponent) applies on one side. The first is a power of two, which rounds nothing.
    before = 2.0 ** math.ceil(math.log2(divisor) / 2)
    return before, divisor / before
