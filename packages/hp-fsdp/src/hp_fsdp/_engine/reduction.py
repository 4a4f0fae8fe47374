"""Reduction of full gradients to the gradients of sharded parameters, overlapped with backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hp_dtensor.comm.process_group import DONE, Work
from hp_fsdp._engine.flat_buffer import FlatBuffer
from hp_fsdp._engine.param_group import ParameterGroup, ReduceOptions
from hp_fsdp._engine.rank_checks import UsedParameters, communicate

Tensor = Any


class Reduction:
    """The reduction of one buffer: a reduce-scatter over the shards, an all-reduce over the replicas, then the store.

    If it is not the last reduction of a step, the reduced shard stays pending in the buffer until the next one.

    Args:
        group: the group of the buffer.
        is_last: it completes the gradients of a step.
    """

    def __init__(self, group: ParameterGroup, buffer: FlatBuffer, options: ReduceOptions, is_last: bool) -> None:
        self.buffer = buffer
        self._group = group
        self._hook = options.hook
        self._all_reduces = is_last and options.all_reduce and buffer.replicate_group is not None
        self._stays_partial = not is_last or (not options.all_reduce and buffer.replicate_group is not None)
        num_replicas = buffer.replicate_group.size if buffer.replicate_group is not None else 1
        divisor = options.divisor(buffer.shard_group.size * num_replicas)
        self._divisor_before, self._divisor_after = _split_divisor(divisor, buffer)
        # Take the record of parameters with gradients, those of a pending shard too, from the buffer.
        gradients = buffer.gradients
        indices = gradients.unreduced_indices | gradients.partial_indices
        gradients.unreduced_indices = frozenset()
        gradients.partial_indices = indices if self._stays_partial else frozenset()
        self._used = UsedParameters(indices, len(buffer.parameters))
        self._shard: Tensor = None
        self._store: Callable[[], None] | None = None
        self._shard, self._work = self._communicate(self._start_reduce_scatter)

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
            buffer.count_allocation()
            work = buffer.communication.reduce_scatter(shard, self._full, buffer.shard_group)
        # The all-reduce is recorded here too. All-reduces follow in the order of the reduce-scatters.
        buffer.actions.record_reduction(None if self._stays_partial else self._used, self._all_reduces)
        return shard, work

    def finish_reduce_scatter(self) -> None:
        """Wait for the reduce-scatter, free the full gradients, and start the all-reduce."""
        buffer, gradients = self.buffer, self.buffer.gradients
        self._wait()
        # From here on the memory of the full gradients can serve the next gather.
        self._full, self._work = None, DONE
        # The shard of earlier reductions is added before the all-reduce, which then covers all of them.
        if gradients.partial_shard is not None:
            buffer.storage.add_(self._shard, gradients.partial_shard)
            gradients.partial_shard = None
        if self._stays_partial:
            gradients.partial_shard = self._shard
            buffer.versions.mark_accumulation()
        elif self._all_reduces:
            assert buffer.replicate_group is not None
            self._work = self._communicate(buffer.communication.all_reduce, self._shard, buffer.replicate_group)

    def _wait(self) -> None:
        self._communicate(self._work.wait)

    def finish(self) -> Callable[[], None]:
        """Wait for the last collective, scale the shard, and start to store it, unless that has been done.

        Returns:
            A function that sets the stored gradients as `grad` of the parameters.
        """
        if self._store is None:
            self._wait()
            self._store = self._start_store()
            # The gradients are views of it from now on, or the host has a copy.
            self._shard = None
        return self._store

    def _start_store(self) -> Callable[[], None]:
        if self._stays_partial:
            return lambda: None
        if self._divisor_after != 1.0:
            self.buffer.storage.scale_(self._shard, 1.0 / self._divisor_after)
        if self._hook is not None:
            self._hook(self._shard)
        # After the hook, which may have written the shard in place.
        return self.buffer.gradients.start_store(self._shard, self._used)

    @property
    def copies_to_host(self) -> bool:
        """True if its gradients are copied to the host, for which the backward leaves time."""
        return self.buffer.offload.gradients

    @property
    def stored(self) -> frozenset[int]:
        """Indices of the parameters whose gradients it sets. Final once ranks have exchanged which are used."""
        return frozenset() if self._stays_partial else self._used.indices

    @property
    def is_communicating(self) -> bool:
        """True while its all-reduce may still run."""
        return self._work is not DONE

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
                (self._to_copy if reduction.is_communicating else due).append(reduction)
        for reduction in due:
            reduction.finish()

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
        stores = [reduction.finish() for reduction in running]
        if stores:
            check()
        for store in stores:
            store()
        for reduction in running:
            self._stored[reduction.buffer] = self._stored.get(reduction.buffer, frozenset()) | reduction.stored

    def run_gradient_hooks(self) -> None:
        """Call the users' gradient hooks of each parameter whose gradient has been set since the last call, once."""
        stored, self._stored = self._stored, {}
        for buffer, indices in stored.items():
            for index in sorted(indices):
                buffer.storage.run_gradient_hooks(buffer.parameters[index].sharded)

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


def _split_divisor(divisor: float, buffer: FlatBuffer) -> tuple[float, float]:
    """Split a divisor into the numbers by which to divide before and after the reduction."""
    if divisor <= 1.0 or buffer.platform.dtype_name(buffer.reduce_dtype) != "float16":
        return 1.0, divisor
    # In float16 the undivided sum over many ranks overflows, and small gradients vanish if divided first. So each half
    # of the divisor (in the exponent) applies on one side. The first is a power of two, which rounds nothing.
    before = 2.0 ** math.ceil(math.log2(divisor) / 2)
    return before, divisor / before
