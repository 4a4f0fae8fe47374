"""Redistribution of many DTensors at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hp_dtensor.exceptions import MixedOperandsError, PlacementError
from hp_dtensor.redistribute import plan_between
from hp_dtensor.redistribute.batch import BUCKET_BYTES, run_data_together
from hp_dtensor.spec import rank_checks
from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.redistribute_dtensor import placements_on, remembering

Tensor = Any


def batch_redistribute(
    tensors: Iterable[Any],
    placements: Sequence[Placement] | Sequence[Sequence[Placement] | None] | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Any]:
    """Redistribute many DTensors on their own meshes, with one collective where each would take its own.

    What tensors of one dtype on one device send in the same kind of collective over the same ranks goes together. The
    results, their gradients too, are those of `redistribute`, bit for bit where no sums are formed in another order;
    backward goes tensor by tensor. For many small tensors, of which each collective costs its latency: parameters of a
    model to be shown or saved, partial gradients.

    Args:
        placements: of all, by default replicated on every axis; or a list with those of each tensor (None: replicated).
        bucket_bytes: what is sent together at most, per rank. So much is copied to lie together, and held twice
            while it is under way; a tensor above it goes alone.

    Raises:
        TypeError: a single DTensor.
        MixedOperandsError: others than DTensors, by position.
        PlacementError: placements that do not fit, by position. Nothing has been communicated then.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     tensors = [ones(4, device_mesh=mesh, placements=[Shard(0)]) for _ in range(10)]
        ...     with record_collectives() as log:
        ...         whole = batch_redistribute(tensors, [Replicate()])
        ...     return log.count(), {x.placements for x in whole}
        >>> run_ranks(program, 2)[0]
        (1, {(Replicate(),)})
    """
    if isinstance(tensors, DTensor):
        raise TypeError(f"batch_redistribute takes many DTensors, got one, {tensors.spec!r}; use its redistribute()")
    tensors = list(tensors)
    others = {position: type(x).__name__ for position, x in enumerate(tensors) if not isinstance(x, DTensor)}
    if others:
        raise MixedOperandsError(
            f"batch_redistribute takes DTensors, got others at positions {others}; use distribute_tensor for them"
        )
    targets = _targets_of(tensors, placements)
    moving = [(x, target) for x, target in zip(tensors, targets, strict=True) if x.spec is not target]
    for x, target in moving:
        rank_checks.check_moved(x.spec, target)
    moved = iter(_moved_together([x for x, _ in moving], [target for _, target in moving], bucket_bytes))
    return [x if x.spec is target else next(moved) for x, target in zip(tensors, targets, strict=True)]


def _targets_of(tensors: Sequence[Any], placements: Any) -> list[TensorSpec]:
    each = [placements] * len(tensors) if _is_of_all(placements) else placements
    if len(each) != len(tensors):
        raise PlacementError(
            f"batch_redistribute of {len(tensors)} tensors: expected the placements of all, or a list with those of "
            f"each, got {len(each)} lists"
        )
    targets, problems = [], []
    for position, (x, wanted) in enumerate(zip(tensors, each, strict=True)):
        source: TensorSpec = x.spec
        try:
            placed = placements_on("batch_redistribute", source.mesh, wanted)
            targets.append(TensorSpec(source.mesh, placed, source.shape, source.dtype))
        except PlacementError as error:
            problems.append(f"tensor {position} ({source!r}): {error}")
    if problems:
        raise PlacementError("; ".join(problems))
    return targets


def _is_of_all(placements: Any) -> bool:
    return placements is None or isinstance(placements, Placement) or any(isinstance(p, Placement) for p in placements)


def _moved_together(tensors: Sequence[Any], targets: Sequence[TensorSpec], bucket_bytes: int) -> list[Any]:
    sources: list[TensorSpec] = [x.spec for x in tensors]
    locals_ = [source.mesh.platform.unwrap(x) for x, source in zip(tensors, sources, strict=True)]
    plans = [
        plan_between(source, target, source.mesh.platform.itemsize(source.dtype))
        for source, target in zip(sources, targets, strict=True)
    ]
    # A selection (max, min, product) needs its operands in backward, so it records itself; the others are sums and
    # copies, whose backward needs no values.
    together = [
        i
        for i, (plan, local) in enumerate(zip(plans, locals_, strict=True))
        if plan.steps and not plan.selects and not plan.is_elsewhere and not plan.source.mesh.platform.is_meta(local)
    ]
    data: dict[int, Tensor] = {}
    # In the order of the tensors, alike on all ranks, so that collectives meet.
    for platform in dict.fromkeys(plans[i].source.mesh.platform for i in together):
        mine = [i for i in together if plans[i].source.mesh.platform is platform]
        with platform.no_grad():
            given = [platform.detach(locals_[i]) for i in mine]
            data.update(zip(mine, run_data_together([plans[i] for i in mine], given, bucket_bytes), strict=True))
    results = []
    for i, (plan, local, target) in enumerate(zip(plans, locals_, targets, strict=True)):
        moved = plan.record(local, data[i]) if i in data else plan.run(local)
        results.append(remembering(local, plan, moved, target))
    return results
