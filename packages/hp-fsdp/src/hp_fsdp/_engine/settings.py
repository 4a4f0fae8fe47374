"""Settings of a parameter group, as `fully_shard` and the methods of `FSDPModule` set them, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_fsdp.exceptions import FullyShardError


@dataclass(slots=True)
class ReduceOptions:
    """How the gradients of a group are reduced.

    Attributes:
        all_reduce: reduce over the replicate axis too. False: the shards reduced over the shard axis stay pending until
            a later reduction.
        divide_factor: divisor of the sum over all ranks. None: the number of ranks for `op` "avg", 1 for "sum".
        op: "avg" or "sum".
        scaling_factor: the result is multiplied by this.
        hook: called with each reduced flat shard, in the dtype of the reduction. It may write the shard in place.
    """

    all_reduce: bool = True
    divide_factor: float | None = None
    op: str = "avg"
    scaling_factor: float = 1.0
    hook: Callable[[Any], None] | None = None

    def divisor(self, num_ranks: int) -> float:
        """Return the number by which the sum over all ranks is divided, with the scaling factor included."""
        divisor = self.divide_factor
        if divisor is None:
            divisor = float(num_ranks) if self.op == "avg" else 1.0
        return divisor / self.scaling_factor


@dataclass(slots=True)
class GroupSettings:
    """When a group's full parameters are freed, how its gradients are reduced, and how many buffers overlap may hold.

    Attributes:
        zero_stage: 3 shards the parameters and frees the full ones between uses. Below 3 the full parameters stay.
        reshard_after_forward: free the full parameters after forward. None: yes, except for the root's own group. A
            number above 1: shard them over that many ranks.
        unshard_in_backward: gather before backward. False: no operation of the module reads its parameters in backward
            (an embedding). Ignored where the platform does not refuse to read released memory.
        reshard_after_backward: free the full parameters once their gradients are complete.
        gradient_sync: reduce gradients after backward. False: accumulate them unsharded.
        reduce: how gradients are reduced.
        is_last_backward: of a root: gradients that autograd did not deliver count as zero at the end of backward.
        defers_reduction: of a root: `RootContext.finish_reductions` waits for the reductions, not the end of backward.
        prefetch_depth: number of groups to gather ahead in the recorded order.
        max_gradient_buffers: number of full gradient buffers that may be held at once.
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
    def retains_full(self) -> bool:
        """True if the full parameters stay in memory between uses (ZeRO stages 0 to 2)."""
        return self.zero_stage < 3

    @property
    def frees_after_backward(self) -> bool:
        """True if the full parameters are freed at the end of a backward."""
        # A backward that reduces is followed by an optimizer step, which changes the shards: the full parameters would
        # be out of date.
        return not self.retains_full and (self.reshard_after_backward or self.gradient_sync)

    @property
    def shards_every_gradient(self) -> bool:
        """True if each backward reduce-scatters its gradients, even one whose gradients accumulate (ZeRO-2)."""
        return self.zero_stage == 2


def check_settings(
    mesh: DeviceMesh,
    zero_stage: int,
    reshard_after_forward: bool | int | None,
    threshold: float,
    bucket_size: float | None,
) -> bool | int | None:
    """Check the settings of `fully_shard` that depend on its mesh and on each other.

    Returns:
        `reshard_after_forward`, normalized by `normalize_reshard_size`.

    Raises:
        FullyShardError: listing every setting with an invalid value, and every pair that contradict each other.
    """
    problems = mesh_problems(mesh)
    if problems:
        raise FullyShardError("; ".join(problems))
    if isinstance(zero_stage, bool) or zero_stage not in (0, 1, 2, 3):
        problems.append(f"zero_stage: expected 0, 1, 2 or 3, got {zero_stage!r}")
    elif zero_stage < 3 and reshard_after_forward:
        problems.append(
            f"reshard_after_forward={reshard_after_forward!r} frees full parameters, which zero_stage={zero_stage} "
            "retains; use zero_stage=3, or leave reshard_after_forward out"
        )
    problems += reshard_problems(reshard_after_forward, mesh.shape[-1])
    for name, size in (("threshold", threshold), ("bucket_size", 0 if bucket_size is None else bucket_size)):
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not size >= 0:
            problems.append(f"{name}: expected a size in KB of at least 0, got {size!r}")
    if problems:
        raise FullyShardError("; ".join(problems))
    return normalize_reshard_size(reshard_after_forward, mesh.shape[-1])


def mesh_problems(mesh: Any) -> list[str]:
    """Return the reasons why parameters cannot be sharded over `mesh`. The list is empty if they can."""
    if not isinstance(mesh, DeviceMesh):
        kind = type(mesh)
        got = f"one of {kind.__module__}" if kind.__name__ == "DeviceMesh" else kind.__name__
        return [f"mesh: expected a DeviceMesh, got {got}"]
    if mesh.ndim not in (1, 2):
        return [
            f"mesh: expected 1 axis (shard) or 2 (replicate, shard), got {mesh.describe()}; "
            'select the data-parallel axes, such as mesh["dp_replicate", "dp_shard"]'
        ]
    if mesh.get_coordinate() is None:
        return [f"mesh: rank {mesh.world.rank} is outside mesh {mesh.describe()}"]
    return []


def reshard_problems(reshard_after_forward: Any, num_shards: int) -> list[str]:
    """Return why parameters sharded over `num_shards` ranks cannot be resharded like this after forward."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return []
    if not isinstance(reshard_after_forward, int):
        return [f"reshard_after_forward: expected a bool, a number of ranks or None, got {reshard_after_forward!r}"]
    if reshard_after_forward < 1 or num_shards % reshard_after_forward:
        divisors = ", ".join(str(k) for k in range(1, num_shards + 1) if num_shards % k == 0)
        return [
            f"reshard_after_forward={reshard_after_forward} does not divide the {num_shards} ranks of the shard axis; "
            f"expected one of {divisors}, or a bool"
        ]
    return []


def normalize_reshard_size(reshard_after_forward: bool | int | None, num_shards: int) -> bool | int | None:
    """Replace 1 rank by False (each rank retains everything) and all ranks by True (the usual shards)."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    return {1: False, num_shards: True}.get(reshard_after_forward, reshard_after_forward)
