"""Every redistribution against the global tensor: values, gradients, and the bytes that the plan stated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.dispatch.operation import dispatch
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.redistribute import plan_across, plan_between
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.conversions import distribute_tensor, from_local
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.redistribution import batch_redistribute, redistribute_to
from hp_dtensor.testing.conformance.ranks import Ranks
from hp_dtensor.testing.pytest_plugin import chosen
from hp_dtensor.testing.rule_proof import RedistributionReport, local_values, prove_redistribution
from hp_dtensor.testing.simulated import run_ranks

Tensor = Any
R, P = Replicate(), Partial()

# Mesh, global shape, further placements, limit. Odd sizes leave uneven shards, sizes below the number of ranks empty
# ones. Also a scalar, an empty tensor, and an axis of one rank. Three axes have too many pairs to try all.
CASES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...], int | None]] = [
    ((2,), (5, 3), (), None),
    ((3,), (2, 4), (), None),
    ((4,), (6,), (RaggedShard(0, (3, 0, 2, 1)), StridedShard(0, 2), Partial("avg")), None),
    ((2, 2), (5, 3), (), None),
    ((2, 2), (), (Partial("avg"),), None),
    ((2, 2), (0, 2), (), 40),
    ((2, 1), (4, 2), (), 60),
    ((2, 2), (4, 4), (StridedShard(0, 2), Partial("avg")), 60),
    ((2, 3), (7,), (StridedShard(0, 2), RaggedShard(0, (3, 4)), RaggedShard(0, (2, 2, 3))), 60),
    ((2, 2), (4, 3), (RaggedShard(0, (3, 1)), RaggedShard(1, (1, 2)), RaggedShard(0, (2, 0))), 60),
    ((2, 2, 2), (5, 3), (), 40),
    ((2, 2, 2), (8, 4), (StridedShard(0, 2),), 40),
]


def _check(reports: Sequence[RedistributionReport]) -> None:
    assert [problem for report in reports for problem in report.wrong] == []
    assert reports[0].tried
    # The plan states the mean over ranks. With uneven shards, single ranks send more or less.
    sent = np.mean([report.sent for report in reports], axis=0)
    np.testing.assert_allclose(sent, np.mean([report.planned for report in reports], axis=0), atol=1e-6)


@pytest.mark.parametrize(("mesh_shape", "shape", "more", "limit"), CASES)
def test_redistribution_keeps_values_and_gradients_and_sends_the_planned_bytes(
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
    _check(run_ranks(prove_redistribution, 4, hp_platform, hp_platform, (2, 2), shape, (), 60, True))


@pytest.mark.parametrize("op", ["max", "min"])
def test_what_becomes_a_partial_maximum_has_its_gradient(hp_platform: Platform, op: str) -> None:
    """Every rank contributes the same value, and gets an equal share of the gradient."""
    most, full, weight = Partial(op), np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(12, dtype=np.float32)
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
            # Only the ranks with coordinate 0 on these axes hold the extreme, so they alone get its gradient.
            rivals = [c for c, p in zip(mesh.get_coordinate() or (), source, strict=True) if p == most]
            others = [R if p == most else p for p in source]
            behind = np.float32(sum(rivals) if op == "max" else -sum(rivals))
            local = platform.from_numpy(local_values(full, mesh, others) - behind)
            platform.set_requires_grad(local, True)
            y = from_local(local, mesh, source, shape=full.shape).redistribute(placements=target).full_tensor()
            np.testing.assert_array_equal(platform.to_numpy(y), full)
            loss = platform.ops.sum(platform.ops.mul(y, platform.from_numpy(weight.reshape(4, 3))))
            wanted = [R if p.is_partial() else p for p in source]
            expected = local_values(weight.reshape(4, 3), mesh, wanted) * (not any(rivals))
            np.testing.assert_array_equal(platform.to_numpy(platform.grad([loss], [local])[0]), expected, str(source))

    run_ranks(rank, 4, hp_platform)


def test_every_step_works(ranks: Ranks) -> None:
    ranks.run(every_step_works)


def test_an_asynchronous_redistribution_is_the_same_redistribution(ranks: Ranks) -> None:
    ranks.run(started_and_waited_for)


def test_a_batch_is_the_same_redistributions(ranks: Ranks) -> None:
    ranks.run(redistributed_in_batches)


def test_a_batch_shares_collectives(ranks: Ranks) -> None:
    ranks.run(batches_share_collectives)


@pytest.mark.parametrize("size", [4, 5, 7])
def test_redistribution_between_meshes(hp_platform: Platform, size: int) -> None:
    """The meshes overlap, or have no rank in common."""
    run_ranks(between_meshes, size, hp_platform, hp_platform)


def test_ragged_shards_may_differ_between_lines(hp_platform: Platform) -> None:
    run_ranks(ragged_shards_that_differ_between_lines, 4, hp_platform, hp_platform)


def test_redistribution_between_views_of_the_same_ranks(hp_platform: Platform) -> None:
    run_ranks(between_views_of_the_same_ranks, 4, hp_platform, hp_platform)


def _select(platform: Platform, op: str, target: Sequence[Placement]) -> tuple[np.ndarray, ...]:
    """Return the full result, and the gradient of this rank's contribution with `_weight` on each element."""
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("a", "b"), platform=platform)
    x = platform.from_numpy(_contributions()[mesh.world.rank])
    platform.set_requires_grad(x, True)
    specs = [TensorSpec(mesh, p, (5, 3), x.dtype) for p in ((Partial(op), Partial(op)), target, (R, R))]
    y = plan_between(specs[1], specs[2]).run(plan_between(specs[0], specs[1]).run(x))
    loss = platform.ops.sum(platform.ops.mul(y, platform.from_numpy(_weight())))
    (grad,) = platform.grad([loss], [x])
    return platform.to_numpy(y), platform.to_numpy(grad)


def _contributions() -> np.ndarray:
    # 1 to 5: positive, so that products have quotients as gradients, and few enough values that ranks tie. 5 ** 4 is
    # exact in float32.
    values = np.arange(1, 61, dtype=np.float32).reshape(4, 5, 3) * 7 % 5 + 1
    return np.ascontiguousarray(values, dtype=np.float32)


def _weight() -> np.ndarray:
    return np.arange(15, dtype=np.float32).reshape(5, 3) + 1


@pytest.mark.parametrize("target", [(R, R), (Shard(0), R), (Shard(1), Shard(0)), (R, Shard(1))])
@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_selecting_reductions_and_their_gradients(hp_platform: Platform, op: str, target: Sequence[Placement]) -> None:
    parts = _contributions()
    full = {"max": np.max, "min": np.min, "product": np.prod}[op](parts, axis=0)
    won = parts == full
    for rank, (value, grad) in enumerate(run_ranks(_select, 4, hp_platform, hp_platform, op, target)):
        np.testing.assert_array_equal(value, full)
        share = full / parts[rank] if op == "product" else won[rank] / won.sum(axis=0)
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
    # The gradient is the product of the other ranks' values. The full product divided by one's own would be 0 / 0.
    expected = [[15, 24, 0, 0], [10, 0, 0, 0], [6, 0, 0, 0]]
    np.testing.assert_array_equal(run_ranks(_product_with_zeros, 3, hp_platform, hp_platform), expected)


def _select_elsewhere(platform: Platform, op: str, target: Sequence[Placement]) -> tuple[np.ndarray, ...]:
    """Like `_select`, but through a mesh of the same ranks in another order."""
    mesh = DeviceMesh("cpu", (4,), mesh_dim_names=("a",), platform=platform)
    # Ranks in another order: no rank can derive what it holds on one mesh from its position on the other.
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
    full = reduced(parts, axis=0)
    won = parts == full
    for target in ((R, R), (Shard(0), Partial(repeated)), (Partial(repeated), Partial(repeated))):
        found = run_ranks(_select_elsewhere, 4, hp_platform, hp_platform, op, target)
        for rank, (value, grad) in enumerate(found):
            np.testing.assert_allclose(value, full, rtol=1e-6)
            share: Any = {"sum": 1.0, "avg": 0.25, "product": full / parts[rank]}.get(op)
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
def test_a_value_becomes_partial_and_replicated_again(hp_platform: Platform, op: str) -> None:
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


def _varying_gradient(platform: Platform, source: Sequence[Placement]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """A weight gathered for rows that are sharded: its gradient is summed over the rows' ranks."""
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("a", "b"), platform=platform)
    full = np.arange(24, dtype=np.float32).reshape(6, 4)
    spec = TensorSpec(mesh, source, full.shape, platform.dtype("float32"))
    part = full[tuple(slice(o, o + n) for o, n in zip(*spec.box(), strict=True))]
    weight = platform.from_numpy(np.ascontiguousarray(part))
    platform.set_requires_grad(weight, True)
    rows = np.arange(8, dtype=np.float32).reshape(2, 4) + mesh.world.rank
    # Each rank has other rows, so its gradient of the gathered weight differs from those of the others.
    x = from_local(platform.from_numpy(rows), mesh, (Shard(0), Shard(0)))
    gathered = redistribute_to(from_local(weight, mesh, source, shape=full.shape), spec.with_placements((R, R)))
    y = dispatch(platform, "linear", platform.ops.linear, (x, gathered), {})
    loss = platform.ops.sum(platform.unwrap(y))
    with record_collectives() as log:
        (grad,) = platform.grad([loss], [weight])
    all_rows = np.concatenate([np.arange(8, dtype=np.float32).reshape(2, 4) + r for r in range(4)])
    expected = np.broadcast_to(all_rows.sum(0), full.shape)
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


FULL = np.arange(35, dtype=np.float32).reshape(7, 5)


def every_step_works(name: str | Platform) -> None:
    """Redistribute a sample of pairs that includes each kind of step."""
    platform = get_platform(name)
    size = current_world(platform).size
    mesh_shape = (2, size // 2) if size > 2 and size % 2 == 0 else (size,)
    report = prove_redistribution(platform, mesh_shape, (2 * size, 3), (StridedShard(0, 2),), 40)
    # Five placements on one axis make 25 pairs.
    assert report.tried >= 25
    assert report.wrong == []
    assert prove_redistribution(platform, mesh_shape, (5, 3), (), 40).wrong == []


def started_and_waited_for(name: str | Platform) -> None:
    """An asynchronous redistribution has the values and gradients of a synchronous one."""
    platform = get_platform(name)
    size = current_world(platform).size
    mesh = DeviceMesh("cpu", (size,), mesh_dim_names=("a",), platform=platform)
    for source, target in itertools.product((R, P, Shard(0), Shard(1)), (R, Shard(0), Shard(1))):
        local = platform.from_numpy(local_values(FULL, mesh, (source,)))
        platform.set_requires_grad(local, True)
        x = from_local(local, mesh, (source,), shape=FULL.shape)
        y = x.redistribute(placements=(target,), async_op=True)
        assert isinstance(y, DTensor)
        assert (y.placements, tuple(y.shape), y.dtype) == ((target,), FULL.shape, x.dtype)
        np.testing.assert_array_equal(platform.to_numpy(y.to_local()), local_values(FULL, mesh, (target,)))
        full = y.full_tensor()
        loss = platform.ops.sum(platform.ops.mul(full, platform.from_numpy(FULL + 1)))
        (grad,) = platform.grad([loss], [local])
        expected = local_values(FULL + 1, mesh, (R if source.is_partial() else source,))
        np.testing.assert_array_equal(platform.to_numpy(grad), expected)


def redistributed_in_batches(name: str | Platform, limit: int | None = 36) -> None:
    """A batch has the values and gradients of its redistributions run one by one, in any combination.

    Args:
        limit: maximum number of pairs of placements; None: all.
    """
    platform = get_platform(name)
    size = current_world(platform).size
    mesh_shape = (2, size // 2) if size > 2 and size % 2 == 0 else (size,)
    axes = ("a", "b")[: len(mesh_shape)]
    mesh = DeviceMesh("cpu", mesh_shape, mesh_dim_names=axes, platform=platform)
    options = [R, P, Partial("max"), Shard(0), Shard(1), StridedShard(0, 2)]
    every = itertools.product(options, repeat=mesh.ndim)
    # At most one kind of reduction each, since a sum of maxima is not the maximum of sums.
    one_sum = [some for some in every if len({p for p in some if p.is_partial()}) < 2]
    pairs = list(itertools.product(one_sum, repeat=2))
    arrays = [np.arange(math.prod(shape), dtype=dtype).reshape(shape) for shape, dtype in _KINDS]
    for number, some in enumerate(_batches_of(chosen(pairs, limit), 12)):
        # One collective for all, several, and one for each tensor: a tensor above the limit is sent alone.
        _check_batch(platform, mesh, list(itertools.product(some, arrays)), bucket_bytes=(2**20, 64, 0)[number % 3])


def _batches_of(pairs: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [pairs[first : first + size] for first in range(0, len(pairs), size)]


# Even, uneven, of a dtype that cannot share a buffer with the others, and empty. The last can share one with the first.
_KINDS = [((8, 4), "float32"), ((5, 3), "float32"), ((2, 2), "int64"), ((0, 3), "float32"), ((8, 6), "float32")]


def _check_batch(platform: Platform, mesh: DeviceMesh, cases: Sequence[Any], bucket_bytes: int) -> None:
    def given() -> list[Any]:
        tensors = []
        for (source, _), array in cases:
            local = platform.from_numpy(local_values(array, mesh, source))
            if array.dtype == np.float32:
                platform.set_requires_grad(local, True)
            tensors.append((local, from_local(local, mesh, source, shape=array.shape)))
        return tensors

    targets = [target for (_, target), _ in cases]
    alone, together = given(), given()
    expected = [x.redistribute(placements=target) for (_, x), target in zip(alone, targets, strict=True)]
    moved = batch_redistribute([x for _, x in together], targets, bucket_bytes=bucket_bytes)
    for case, y, other in zip(cases, moved, expected, strict=True):
        assert y.spec is other.spec
        values = [platform.to_numpy(x.to_local()) for x in (y, other)]
        np.testing.assert_array_equal(*values, err_msg=f"{case[0]} {bucket_bytes}")
    grads = [_gradients_of(platform, *pairs) for pairs in ((together, moved), (alone, expected))]
    for case, grad, other in zip([case for case in cases if case[1].dtype == np.float32], *grads, strict=True):
        np.testing.assert_array_equal(grad, other, err_msg=f"{case[0]} {bucket_bytes}")


def _gradients_of(platform: Platform, given: Sequence[Any], moved: Sequence[Any]) -> list[np.ndarray]:
    """Return the gradients of a weighted sum of all floating-point results."""
    locals_, losses = [], []
    for (local, _), y in zip(given, moved, strict=True):
        if platform.is_floating(local.dtype):
            full = y.full_tensor()
            weight = np.arange(1, math.prod(full.shape) + 1, dtype=np.float32).reshape(full.shape)
            losses.append(platform.ops.sum(platform.ops.mul(full, platform.from_numpy(weight))))
            locals_.append(local)
    return [platform.to_numpy(grad) for grad in platform.grad(losses, locals_)]


def batches_share_collectives(name: str | Platform) -> None:
    """Equal redistributions share one collective per bucket, and send the same bytes."""
    platform = get_platform(name)
    size = current_world(platform).size
    mesh = DeviceMesh("cpu", (size,), mesh_dim_names=("a",), platform=platform)
    full = platform.from_numpy(np.ones((2 * size, size), np.float32))
    sharded = [distribute_tensor(full, mesh, (Shard(0),)) for _ in range(6)]
    partial = [from_local(full, mesh, (P,), shape=tuple(full.shape)) for _ in range(3)]
    across = [distribute_tensor(full, mesh, (Shard(1),)) for _ in range(3)]
    with record_collectives() as alone:
        for x in (*sharded, *partial):
            x.full_tensor()
        for x in across:
            x.redistribute(placements=(Shard(0),))
    with record_collectives() as log:
        batch_redistribute([*sharded, *partial, *across], [(R,)] * 9 + [(Shard(0),)] * 3)
    assert [record.name for record in log.records] == ["all_gather", "all_reduce", "all_to_all"]
    assert log.wire_bytes() == alone.wire_bytes()
    one = (size - 1) * 2 * size * 4  # bytes that the all-gather of one of them sends
    with record_collectives() as log:
        batch_redistribute(sharded, bucket_bytes=2 * one)
    assert [record.name for record in log.records] == ["all_gather"] * 3
    assert batch_redistribute([]) == []
    unmoved = batch_redistribute(iter(sharded), (Shard(0),))
    assert all(x is y for x, y in zip(sharded, unmoved, strict=True))


_FROM: list[Sequence[Placement]] = [(R, R), (Shard(0), R), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (P, Shard(1))]
_FROM += [(P, P), (RaggedShard(0, (2, 5)), R), (StridedShard(0, 2), Shard(0))]
_TO: list[Sequence[Placement]] = [(R,), (Shard(0),), (Shard(1),), (P,), (RaggedShard(0, (1, 0, 6)),)]


def between_meshes(platform: Platform) -> None:
    """From a (2, 2) mesh of the first ranks to one of the last three, and back, with gradients."""
    world = current_world(platform)
    # Of 4, 5 and 7 ranks, three, two and none are in both meshes. All ranks run the plan, also those outside.
    first = DeviceMesh("cpu", (2, 2), ranks=range(4), world=world, mesh_dim_names=("a", "b"))
    second = DeviceMesh("cpu", (3,), ranks=range(world.size - 3, world.size), world=world, mesh_dim_names=("c",))
    for source, target in itertools.product(_FROM, _TO):
        local = platform.from_numpy(local_values(FULL, first, source))
        platform.set_requires_grad(local, True)
        x = from_local(local, first, source, shape=FULL.shape)
        with record_collectives() as log:
            y = x.redistribute(second, target)
        assert y.spec is TensorSpec(second, target, FULL.shape, x.dtype)
        if not any(p.is_partial() for p in target):
            np.testing.assert_array_equal(platform.to_numpy(y.to_local()), local_values(FULL, second, target))
        back = y.redistribute(first, (R, R))
        # A rank outside the mesh holds nothing, but runs the same program, with an empty tensor.
        expected = FULL if first.get_coordinate() is not None else np.zeros((0, 0), np.float32)
        np.testing.assert_array_equal(platform.to_numpy(back.to_local()), expected)
        weight = platform.from_numpy(expected + 1)
        (grad,) = platform.grad([platform.ops.sum(platform.ops.mul(back.to_local(), weight))], [local])
        placed = [R if p.is_partial() else p for p in source]
        np.testing.assert_array_equal(platform.to_numpy(grad), local_values(FULL + 1, first, placed))
        plan = plan_across(x.spec, y.spec, 4)
        # A collective of all ranks: the bytes of one rank alone say nothing about the plan's mean.
        sent = [float(part) for part in world.all.all_gather_bytes(str(log.wire_bytes()).encode())]
        assert abs(sum(sent) - plan.wire_bytes * len(plan.ranks)) < 1e-6, f"{plan}\n{sent}"


def between_views_of_the_same_ranks(platform: Platform) -> None:
    """A flattened mesh is another mesh: only what a rank lacks there is sent."""
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("a", "b"), platform=platform)
    flat = mesh.flatten("all")
    x = distribute_tensor(platform.from_numpy(FULL[:4].copy()), mesh, (Shard(0), Shard(0)))
    with record_collectives() as log:
        y = x.redistribute(flat, (Shard(0),))
    assert log.wire_bytes() == 0
    np.testing.assert_array_equal(platform.to_numpy(y.to_local()), platform.to_numpy(x.to_local()))


def ragged_shards_that_differ_between_lines(platform: Platform) -> None:
    """Ranks of other axes do not know this line's parts; no plan may need them."""
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("a", "b"), platform=platform)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for outer, parts in ((Shard(0), ((1, 3), (3, 0))), (Shard(1), ((7, 0), (2, 5))), (R, ((6, 1), (0, 7)))):
        ragged = RaggedShard(0, parts[coordinate[0]])
        others: list[Sequence[Placement]] = [(R, R), (R, Shard(0)), (Shard(0), Shard(0)), (Shard(1), Shard(0))]
        others += [(outer, R), (outer, Shard(0)), (outer, Shard(1)), (P, R), (R, P), (StridedShard(0, 2), Shard(1))]
        for other in others:
            for source, target in (((outer, ragged), other), (other, (outer, ragged))):
                _check_pair(platform, mesh, source, target)


def _check_pair(platform: Platform, mesh: DeviceMesh, source: Sequence[Placement], target: Sequence[Placement]) -> None:
    local = platform.from_numpy(local_values(FULL, mesh, source))
    platform.set_requires_grad(local, True)
    y = from_local(local, mesh, source, shape=FULL.shape).redistribute(placements=target)
    if not any(p.is_partial() for p in target):
        np.testing.assert_array_equal(platform.to_numpy(y.to_local()), local_values(FULL, mesh, target))
    full = y.full_tensor()
    np.testing.assert_array_equal(platform.to_numpy(full), FULL)
    (grad,) = platform.grad([platform.ops.sum(platform.ops.mul(full, platform.from_numpy(FULL + 1)))], [local])
    placed = [R if p.is_partial() else p for p in source]
    np.testing.assert_array_equal(platform.to_numpy(grad), local_values(FULL + 1, mesh, placed))
