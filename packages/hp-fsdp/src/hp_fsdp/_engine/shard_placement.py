"""The mesh and the dimension to cut of each parameter, where `shard_placement_fn` chooses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.placements import Shard
from hp_fsdp._argument_checks import mesh_problems, reshard_problems
from hp_fsdp._engine.extensions import extension_problems
from hp_fsdp._engine.original_parameters import OriginalParameter, problems_of
from hp_fsdp.exceptions import FullyShardError
from hp_fsdp.policies import ShardPlacementResult

ShardPlacementFunction = Callable[[Any], Shard | ShardPlacementResult | None]


def place(
    originals: Sequence[OriginalParameter],
    mesh: DeviceMesh,
    choose: ShardPlacementFunction | None,
    reshard_after_forward: bool | int | None,
    where: str,
) -> None:
    """Give every parameter its mesh and the dimension to cut.

    Args:
        where: how errors call the group.

    Raises:
        FullyShardError: listing every parameter that cannot be sharded so.
    """
    if choose is not None and not callable(choose):
        raise FullyShardError(
            f"shard_placement_fn: expected a function of a parameter, got {choose!r}; lambda parameter: {choose!r}"
        )
    problems = []
    for original in originals:
        original.mesh = mesh
        chosen = choose(original.tensor) if choose is not None else None
        wrong = _choose(original, mesh, chosen, reshard_after_forward)
        problems += [f"{original.name}: shard_placement_fn: {problem}" for problem in wrong]
        if not wrong:
            problems += problems_of(original, original.mesh) or extension_problems(original)
    if problems:
        raise FullyShardError(f"{where}, rank {mesh.world.rank}: {'; '.join(problems)}")


def _choose(
    original: OriginalParameter, mesh: DeviceMesh, chosen: Any, reshard_after_forward: bool | int | None
) -> list[str]:
    result = chosen if isinstance(chosen, ShardPlacementResult) else ShardPlacementResult(chosen)
    if result.placement is not None and type(result.placement) is not Shard:
        return [f"expected Shard(dim), a ShardPlacementResult or None, got {chosen!r}"]
    if result.mesh is not None:
        wrong = mesh_problems(result.mesh)
        if not wrong and result.mesh.world is not mesh.world:
            wrong = ["mesh: it belongs to another world than that of the group"]
        wrong = wrong or reshard_problems(reshard_after_forward, result.mesh.shape[-1])
        if wrong:
            return wrong
        original.mesh = result.mesh
    if result.placement is not None:
        num_dims = len(original.tensor.shape)
        if not -num_dims <= result.placement.dim < num_dims:
            return [f"{result.placement!r} cuts a dimension that a parameter {list(original.tensor.shape)} lacks"]
        original.chosen_dim = result.placement.dim % num_dims
    return []
