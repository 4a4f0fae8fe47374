"""The collectives of a group. Subclasses of `Communication` replace them by quantized or compressed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup, Work
from hp_dtensor.platform.interface import Platform

Tensor = Any


class Communication:
    """Gathers and reduces flat buffers by the process group's own collectives. Subclass it for others.

    All tensors are plain, 1-D and contiguous, and a group has at least two ranks. A method may return before its
    collective has ended: until `wait` of the returned work, the caller does not change the inputs, and the work
    holds the method's temporaries. Every rank of a group calls the same methods in the same order.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         model = nn.Linear(4, 6)
        ...     fully_shard(model, init_device_mesh("cpu", (2,)), communication=Communication(platform))
        ...     return tuple(model.weight.shape)
        >>> run_ranks(program, 2)[0]
        (6, 4)
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def all_gather(self, output: Tensor, shard: Tensor, group: ProcessGroup) -> Work:
        """Fill `output` with every rank's `shard` in rank order.

        Args:
            output: `group.size * shard.shape[0]` elements in the dtype of the computation. Written in place.
            shard: the sharded parameters in their own dtype. Only read.
        """
        if shard.dtype == output.dtype:
            return group.all_gather_into(output, shard, async_op=True)
        # Before the gather, so that a narrower dtype of the computation is also what is sent.
        with self.platform.no_grad():
            shard = self.platform.ops.cast(shard, output.dtype)
        return Holding(group.all_gather_into(output, shard, async_op=True), shard)

    def reduce_scatter(self, output: Tensor, gradients: Tensor, group: ProcessGroup) -> Work:
        """Write this rank's shard of the sum of all ranks' `gradients` into `output`.

        Args:
            output: elements of one shard, in the dtype of the reduction. Written in place.
            gradients: `group.size` times as many, of the same dtype. May be overwritten.
        """
        return group.reduce_scatter_into(output, gradients, "sum", async_op=True)

    def all_reduce(self, shard: Tensor, group: ProcessGroup) -> Work:
        """Replace `shard` by the sum over all ranks, in place. Used for the replicate axis of a 2-D mesh."""
        return group.all_reduce(shard, "sum", async_op=True)


class Holding:
    """A started collective that holds its temporaries until it has ended."""

    def __init__(self, work: Work, *held: Any) -> None:
        self._work = work
        self._held = held

    def wait(self) -> None:
        self._work.wait()
        # Only now: until here the collective may read this memory on another stream.
        self._held = ()


class Then:
    """A started collective, and a function to call after it, such as one that decodes the received values."""

    def __init__(self, work: Work, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        # A second wait must not decode again.
        finish, self._finish = self._finish, None
        if finish is not None:
            self._work.wait()
            finish()
