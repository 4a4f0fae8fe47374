"""Every redistribution against the whole tensor: values, gradients, and the bytes that were promised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.dispatch.dispatch import dispatch
from hp_dtensor.platform.interface import Platform
from hp_dtensor.redistribute import plan_between
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.conversions import from_local
from hp_dtensor.tensor.redistribution import redistribute_to
from hp_dtensor.testing.conformance import redistribution_programs
from hp_dtensor.testing.conformance.ranks import Ranks
from hp_dtensor.testing.redistribution_proof import RedistributionReport, local_values, prove_redistribution
from hp_dtensor.testing.simulated import run_ranks

Tensor = Any
R, P = Replicate(), Partial()

CASES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...], int | None]] = [
    ((2,), (5, 3), (), None),
    ((3,), (2, 4), (), None),
    ((4,), (6,), (RaggedShard(0, (3, 0, 2, 1)), StridedShard(0, 2), Partial("avg")), None),
    ((2, 2), (5, 3), (), None),
    ((2, 2), (), (Partial("avg"),), None),
    ((2, 2), (0, 2), (), 40),
    ((2, 1), (4, 2), (), 60),
    ((2, 2), (4, 4), (StridedShard(0, 2), Partial("avg")), 150),
    ((2, 3), (7,), (StridedShard(0, 2), RaggedShard(0, (3, 4)), RaggedShard(0, (2, 2, 3))), 150),
    ((2, 2), (4, 3), (RaggedShard(0, (3, 1)), RaggedShard(1, (1, 2)), RaggedShard(0, (2, 0))), 150),
    ((2, 2, 2), (5, 3), (), 60),
    ((2, 2, 2), (8, 4), (StridedShard(0, 2),), 60),
]


def _check(reports: Sequence[RedistributionReport]) -> None:
    assert [problem for report in reports for problem in report.wrong] == []
    assert reports[0].tried
    sent = np.mean([report.sent for report in reports], axis=0)
    np.testing.assert_allclose(sent, np.mean([report.promised for report in reports], axis=0), atol=1e-6)


@pytest.mark.parametrize(("mesh_shape", "shape", "more", "limit"), CASES)
def test_redistribution_keeps_values_and_gradients_and_sends_what_it_promised(
    hp_platform: Platform,
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    more: tuple[Placement, ...],
    limit: int | None,
) -> None:
    size = math.prod(mesh_shape)
    _check(run_ranks(prove_redistribution, size, hp_platform, hp_platform, mesh_shape, shape, more, limit))


@pytest.mark.parametrize("shape", [(6, 4), (5, 3)])
def test_a_flattened_mesh_changes_nothing(hp_platform: Platform, shape: tuple[int, ...]) -> None:
    """torch gives wrong data here: nested shards of which the inner ones are uneven (pytorch/pytorch#194457)."""
    _check(run_ranks(prove_redistribution, 4, hp_platform, hp_platform, (2, 2), shape, (), 120, True))


@pytest.mark.parametrize("op", ["max", "min"])
def test_what_becomes_a_partial_maximum_has_its_gradient(hp_platform: Platform, op: str) -> None:
    """Each rank repeats the value, and gets its share of the gradient."""
    most, whole, weight = Partial(op), np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(12, dtype=np.float32)
    pairs: list[tuple[Sequence[Placement], Sequence[Placement]]] = [
        ((R, R), (R, most)),
        ((P, R), (most, R)),
        ((P, P), (most, most)),
        ((Shard(0), R), (most, most)),
        ((most, R), (R, most)),
        ((most, Shard(0)), (Shard(0), most)),
        ((Shard(1), most), (most, R)),
    ]

    def rank() -> None:
        platform, mesh = hp_platform, DeviceMesh("cpu", (2, 2), platform=hp_platform)
        for source, target in pairs:
            rivals = [c for c, p in zip(mesh.get_coordinate() or (), source, strict=True) if p == most]
            others = [R if p == most else p for p in source]
            behind = np.float32(sum(rivals) if op == "max" else -sum(rivals))
            local = platform.from_numpy(local_values(whole, mesh, others) - behind)
            platform.set_requires_grad(local, True)
            y = from_local(local, mesh, source, shape=whole.shape).redistribute(placements=target).full_tensor()
            np.testing.assert_array_equal(platform.to_numpy(y), whole)
            loss = platform.ops.sum(platform.ops.mul(y, platform.from_numpy(weight.reshape(4, 3))))
            wanted = [R if p.is_partial() else p for p in source]
            expected = local_values(weight.reshape(4, 3), mesh, wanted) * (not any(rivals))
            np.testing.assert_array_equal(platform.to_numpy(platform.grad([loss], [local])[0]), expected, str(source))

    run_ranks(rank, 4, hp_platform)


# On ranks of every kind, later, and between meshes --------------------------------------------------------------


def test_every_step_works(ranks: Ranks) -> None:
    ranks.run(redistribution_programs.every_step_works)


def test_an_asynchronous_redistribution_is_the_same_redistribution(ranks: Ranks) -> None:
    ranks.run(redistribution_programs.started_and_waited_for)


def test_a_batch_is_the_same_redistributions(ranks: Ranks) -> None:
    ranks.run(redistribution_programs.moved_in_batches)


def test_a_batch_shares_collectives(ranks: Ranks) -> None:
    ranks.run(redistribution_programs.batches_share_collectives)


@pytest.mark.parametrize("size", [4, 5, 7])
def test_redistribution_between_meshes(hp_platform: Platform, size: int) -> None:
    """Overlapping, and with no rank in common."""
    run_ranks(redistribution_programs.between_meshes, size, hp_platform, hp_platform)


def test_ragged_parts_may_differ_between_lines(hp_platform: Platform) -> None:
    run_ranks(redistribution_programs.ragged_parts_that_differ_between_lines, 4, hp_platform, hp_platform)


def test_redistribution_between_views_of_the_same_ranks(hp_platform: Platform) -> None:
    run_ranks(redistribution_programs.between_views_of_the_same_ranks, 4, hp_platform, hp_platform)


# Reductions other than sums ---------------------------------------------------------------------------------


def _select(platform: Platform, op: str, target: Sequence[Placement]) -> tuple[np.ndarray, ...]:
    """Return the result as a whole and the gradient of this rank's contribution, by `weight` at each element."""
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("a", "b"), platform=platform)
    x = platform.from_numpy(_contributions()[mesh.world.rank])
    platform.set_requires_grad(x, True)
    specs = [TensorSpec(mesh, p, (5, 3), x.dtype) for p in ((Partial(op), Partial(op)), target, (R, R))]
    y = plan_between(specs[1], specs[2]).run(plan_between(specs[0], specs[1]).run(x))
    loss = platform.ops.sum(platform.ops.mul(y, platform.from_numpy(_weight())))
    (grad,) = platform.grad([loss], [x])
    return platform.to_numpy(y), platform.to_numpy(grad)


def _contributions() -> np.ndarray:
    values = np.arange(1, 61, dtype=np.float32).reshape(4, 5, 3) * 7 % 5 + 1
    return np.ascontiguousarray(values, dtype=np.float32)


def _weight() -> np.ndarray:
    return np.arange(15, dtype=np.float32).reshape(5, 3) + 1


@pytest.mark.parametrize("target", [(R, R), (Shard(0), R), (Shard(1), Shard(0)), (R, Shard(1))])
@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_selecting_reductions_and_their_gradients(hp_platform: Platform, op: str, target: Sequence[Placement]) -> None:
    parts = _contributions()
    whole = {"max": np.max, "min": np.min, "product": np.prod}[op](parts, axis=0)
    won = parts == whole
    for rank, (value, grad) in enumerate(run_ranks(_select, 4, hp_platform, hp_platform, op, target)):
        np.testing.assert_array_equal(value, whole)
        share = whole / parts[rank] if op == "product" else won[rank] / won.sum(axis=0)
        np.testing.assert_allclose(grad, _weight() * share, rtol=1e-6)


def _product_with_zeros(platform: Platform) -> np.ndarray:
    mesh = DeviceMesh("cpu", (3,), mesh_dim_names=("a",), platform=platform)
    x = platform.from_numpy(_WITH_ZEROS[mesh.world.rank])
    platform.set_requires_grad(x, True)
    y = from_local(x, mesh, (Partial("product"),), shape=(4,)).full_tensor()
    return platform.to_numpy(platform.grad([platform.ops.sum(y)], [x])[0])


_WITH_ZEROS = np.array([[2, 0, 0, 0], [3, 4, 0, 0], [5, 6, 7, 0]], np.float32)


def test_a_product_with_zeros_has_its_gradient(hp_platform: Platform) -> None:
    """None, one, two and three of them."""
    expected = [[15, 24, 0, 0], [10, 0, 0, 0], [6, 0, 0, 0]]
    np.testing.assert_array_equal(run_ranks(_product_with_zeros, 3, hp_platform, hp_platform), expected)


def _select_elsewhere(platform: Platform, op: str, target: Sequence[Placement]) -> tuple[np.ndarray, ...]:
    """As `_select`, by way of a mesh of the same ranks in another order."""
    mesh = DeviceMesh("cpu", (4,), mesh_dim_names=("a",), platform=platform)
    other = DeviceMesh("cpu", (2, 2), ranks=(3, 1, 0, 2), mesh_dim_names=("b", "c"), platform=platform)
    x = platform.from_numpy(_contributions()[mesh.world.rank])
    platform.set_requires_grad(x, True)
    y = from_local(x, mesh, (Partial(op),), shape=tuple(x.shape)).redistribute(other, target).full_tensor()
    (grad,) = platform.grad([platform.ops.sum(platform.ops.mul(y, platform.from_numpy(_weight())))], [x])
    return platform.to_numpy(y), platform.to_numpy(grad)


@pytest.mark.parametrize("repeated", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_reductions_on_the_way_to_another_mesh_and_their_gradients(
    hp_platform: Platform, op: str, repeated: str
) -> None:
    parts = _contributions()
    reduced = {"max": np.max, "min": np.min, "product": np.prod, "sum": np.sum, "avg": np.mean}[op]
    whole = reduced(parts, axis=0)
    won = parts == whole
    for target in ((R, R), (Shard(0), Partial(repeated)), (Partial(repeated), Partial(repeated))):
        found = run_ranks(_select_elsewhere, 4, hp_platform, hp_platform, op, target)
        for rank, (value, grad) in enumerate(found):
            np.testing.assert_allclose(value, whole, rtol=1e-6)
            share: Any = {"sum": 1.0, "avg": 0.25, "product": whole / parts[rank]}.get(op)
            share = won[rank] / won.sum(axis=0) if share is None else share
            np.testing.assert_allclose(grad, _weight() * share, rtol=1e-6)


def _repeated(platform: Platform, op: str) -> tuple[np.ndarray, ...]:
    mesh = DeviceMesh("cpu", (3,), mesh_dim_names=("a",), platform=platform)
    x = platform.from_numpy(_weight()[mesh.world.rank : mesh.world.rank + 1])
    platform.set_requires_grad(x, True)
    specs = [TensorSpec(mesh, (p,), (3, 3), x.dtype) for p in (Shard(0), Partial(op), R)]
    y = plan_between(specs[1], specs[2]).run(plan_between(specs[0], specs[1]).run(x))
    (grad,) = platform.grad([platform.ops.sum(platform.ops.mul(y, y))], [x])
    return platform.to_numpy(y), platform.to_numpy(grad)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_a_value_becomes_partial_and_whole_again(hp_platform: Platform, op: str) -> None:
    for rank, (value, grad) in enumerate(run_ranks(_repeated, 3, hp_platform, hp_platform, op)):
        np.testing.assert_array_equal(value, _weight()[:3])
        np.testing.assert_allclose(grad, 2 * _weight()[rank : rank + 1], rtol=1e-6)


def _average_of_integers(platform: Platform) -> None:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("a",), platform=platform)
    x = platform.from_numpy(np.arange(4))
    specs = [TensorSpec(mesh, (p,), (4,), x.dtype) for p in (Partial("avg"), R)]
    with pytest.raises(NotImplementedError, match="the reduction 'avg' needs a floating-point tensor, got int64"):
        plan_between(*specs).run(x)


def test_averages_of_integers_are_refused(hp_platform: Platform) -> None:
    run_ranks(_average_of_integers, 2, hp_platform, hp_platform)


# Uses that differ per rank ----------------------------------------------------------------------------------


def _varying_gradient(platform: Platform, source: Sequence[Placement]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """A weight gathered for rows that are sharded: its gradient is summed over the rows' ranks."""
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("a", "b"), platform=platform)
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    spec = TensorSpec(mesh, source, whole.shape, platform.dtype("float32"))
    part = whole[tuple(slice(o, o + n) for o, n in zip(*spec.box(), strict=True))]
    weight = platform.from_numpy(np.ascontiguousarray(part))
    platform.set_requires_grad(weight, True)
    rows = np.arange(8, dtype=np.float32).reshape(2, 4) + mesh.world.rank
    x = from_local(platform.from_numpy(rows), mesh, (Shard(0), Shard(0)))
    gathered = redistribute_to(from_local(weight, mesh, source, shape=whole.shape), spec.with_placements((R, R)))
    y = dispatch(platform, "linear", platform.ops.linear, (x, gathered), {})
    loss = platform.ops.sum(platform.unwrap(y))
    with record_collectives() as log:
        (grad,) = platform.grad([loss], [weight])
    all_rows = np.concatenate([np.arange(8, dtype=np.float32).reshape(2, 4) + r for r in range(4)])
    expected = np.broadcast_to(all_rows.sum(0), whole.shape)
    part = expected[tuple(slice(o, o + n) for o, n in zip(*spec.box(), strict=True))]
    return [record.name for record in log.records], platform.to_numpy(grad), part


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ((Shard(0), R), ["reduce_scatter", "all_gather"]),
        ((Shard(0), Shard(1)), ["reduce_scatter"]),
        ((Shard(1), Shard(1)), ["reduce_scatter"]),
        ((R, R), ["all_reduce"]),
    ],
)
def test_what_was_gathered_for_differing_uses_reduces_straight_to_its_source(
    hp_platform: Platform, source: Sequence[Placement], expected: list[str]
) -> None:
    for names, grad, part in run_ranks(_varying_gradient, 4, hp_platform, hp_platform, source):
        np.testing.assert_array_equal(grad, part)
        assert names == expected
