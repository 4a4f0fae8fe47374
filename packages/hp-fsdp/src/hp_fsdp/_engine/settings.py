"""Settings of a parameter group, as `fully_shard` and the methods of `FSDPModule` make them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class ReduceOptions:
    """Settings of the reduction of a group's gradients.

    Attributes:
        all_reduce: also over the replicate axis; else the reduced shards wait for a later reduction.
        divide_factor: what the sum over all ranks is divided by; None: the number of ranks for `op` "avg", 1
            for "sum".
        op: "avg" or "sum".
        scaling_factor: what the result is multiplied by.
        hook: called with each reduced flat shard, in the dtype of reduction, which it may write in place.
    """

    all_reduce: bool = True
    divide_factor: float | None = None
    op: str = "avg"
    scaling_factor: float = 1.0
    hook: Callable[[Any], None] | None = None

    def factor(self, num_ranks: int) -> float:
        """The number by which the sum over all ranks is divided in the end."""
        divisor = self.divide_factor
        if divisor is None:
            divisor = float(num_ranks) if self.op == "avg" else 1.0
        return divisor / self.scaling_factor


@dataclass(slots=True)
class GroupSettings:
    """When a group's full parameters are freed, how its gradients are reduced, and how much is held for overlap.

    Attributes:
        zero_stage: 3 shards parameters, and frees them between uses; below that full parameters are kept.
        reshard_after_forward: None: unless it is the root's; a number above 1: to so many ranks.
        unshard_in_backward: gather for backward; False: no operation needs the parameters there (an embedding), which
            holds only where the platform refuses to read released memory.
        reshard_after_backward: free the full parameters once the gradients are complete.
        gradient_sync: reduce gradients after backward; else accumulate them unsharded.
        reduce: how gradients are reduced.
        is_last_backward: of a root: gradients that autograd did not deliver count as zero at the end of backward.
        defers_reduction: of a root: `RootSchedule.finish_reductions` waits for reductions, not the end of backward.
        prefetch_depth: groups to gather ahead in recorded order.
        max_gradient_buffers: full gradient buffers that may be held at once.
    """

    zero_stage: int = 3
    reshard_after_forward: bool | int | None = None
    unshard_in_backward: bool = True
    reshard_after_backward: bool = True
    gradient_sync: bool = True
    reduce: ReduceOptions = field(default_factory=ReduceOptions)
    is_last_backward: bool = True
    defers_reduction: bool = False
    prefetch_depth: int = 1
    max_gradient_buffers: int = 1

    @property
    def keeps_full(self) -> bool:
        """True if full parameters stay when nobody computes with them."""
        return self.zero_stage < 3

    @property
    def frees_after_backward(self) -> bool:
        """True if full parameters are gone after backward: after a reduction the optimizer changes the shards."""
        return not self.keeps_full and (self.reshard_after_backward or self.gradient_sync)

    @property
    def shards_every_gradient(self) -> bool:
        """True if each backward reduce-scatters its gradients, also one that does not complete them (ZeRO-2)."""
        return self.zero_stage == 2
