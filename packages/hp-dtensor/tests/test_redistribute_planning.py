"""Planning redistributions: bytes against counting them element by element, and plans for any number of ranks."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from exhaustive_search import exhaustive_volumes

from hp_dtensor import (
    DeviceMesh,
    Links,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    fake_world,
    plan_redistribute,
)
from hp_dtensor.exceptions import MeshError, PlacementError
from hp_dtensor.redistribute import segments
from hp_dtensor.redistribute.exchange import least_volume
from hp_dtensor.redistribute.segments import elements_in_place
from hp_dtensor.spec.tensor_spec import split_ranges
from hp_dtensor.testing.rule_proof import placement_options

R, P = Replicate(), Partial()


def mesh_of(shape, rank=0, **options):
    with fake_world(math.prod(shape), rank):
        return DeviceMesh("cpu", shape, mesh_dim_names=("a", "b", "c", "d")[: len(shape)], **options)


def held(mesh_shape, shape, placements):
    """{coordinate: the indices of the elements it holds}, partial results counted as held."""
    result = {}
    for where in itertools.product(*map(range, mesh_shape)):
        indices = []
        for dim, size in enumerate(shape):
            ranges = ((0, size),)
            for axis, placement in enumerate(placements):
                if placement.is_shard(dim):
                    ranges = split_ranges(ranges, placement, mesh_shape[axis])[where[axis]]
            indices.append([i for start, stop in ranges for i in range(start, stop)])
        result[where] = set(itertools.product(*indices))
    return result


def counted_volume(mesh_shape, shape, source, target):
    """The fewest elements: per element, sums to one rank, then copies to every other rank or partial group."""
    unreduced = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s.is_partial() and t.is_partial()]
    choices = itertools.chain.from_iterable(itertools.combinations(unreduced, n) for n in range(len(unreduced) + 1))
    before, after = held(mesh_shape, shape, source), held(mesh_shape, shape, target)
    return min(
        _counted_with(mesh_shape, shape, source, target, before, after, [a for a in unreduced if a not in reduced])
        for reduced in choices
    )


def _counted_with(mesh_shape, shape, source, target, before, after, unreduced):
    summed = [a for a, s in enumerate(source) if s.is_partial() and a not in unreduced]
    parts = math.prod(mesh_shape[a] for a in summed)
    embedded = [a for a, t in enumerate(target) if t.is_partial() and a not in unreduced]
    total = 0
    for line in itertools.product(*(range(mesh_shape[a]) for a in unreduced)):
        ranks = [c for c in before if all(c[a] == i for a, i in zip(unreduced, line, strict=True))]
        for element in itertools.product(*map(range, shape)):
            holders = {c for c in ranks if element in before[c]}
            groups = {}
            for c in ranks:
                if element in after[c]:
                    groups.setdefault(tuple(i for a, i in enumerate(c) if a not in embedded), set()).add(c)
            served = sum(1 for group in groups.values() if group & holders)
            total += len(groups) - served if parts == 1 else parts - 1 + len(groups) - min(served, 1)
    return total


@pytest.mark.parametrize(
    ("mesh_shape", "shape"), [((2, 2), (4, 4)), ((2, 2), (3, 5)), ((2, 4), (8, 1)), ((2, 3), (5, 2)), ((4,), (3,))]
)
def test_least_volume_is_that_counted_element_by_element(mesh_shape, shape):
    states = list(itertools.product(placement_options(len(shape), StridedShard(0, 2)), repeat=len(mesh_shape)))
    for source, target in itertools.product(states, states):
        expected = counted_volume(mesh_shape, shape, source, target)
        assert least_volume(shape, mesh_shape, source, target).total == expected, (source, target)


@pytest.mark.parametrize(
    ("mesh_shape", "shape"), [((2, 2), (8, 8)), ((2, 4), (8, 8)), ((2, 2), (5, 3)), ((2, 3), (4,)), ((2, 2, 2), (2, 4))]
)
def test_plans_need_the_least_and_never_more_than_an_exhaustive_search(mesh_shape, shape):
    mesh = mesh_of(mesh_shape)
    searched = exhaustive_volumes(mesh_shape, shape, placement_options(len(shape)))
    pairs = list(searched)
    for source, target in pairs[:: max(1, len(pairs) // 600)]:
        planned = plan_redistribute(mesh, source, target, shape, itemsize=1).wire_bytes * mesh.size()
        assert planned == pytest.approx(least_volume(shape, mesh_shape, source, target).total), (source, target)
        assert planned <= searched[source, target] + 1e-6, (source, target)


def test_elements_in_place_are_those_that_a_rank_holds_and_needs():
    options = [R, P, Shard(0), Shard(1), StridedShard(0, 2), StridedShard(1, 3)]
    for mesh_shape, shape in [((2, 4), (16, 24)), ((4, 2), (16, 24)), ((2, 3), (36, 12)), ((2, 2, 2), (24, 8))]:
        states = list(itertools.product(options, repeat=len(mesh_shape)))
        for source, target in list(itertools.product(states, states))[:: 1 + len(states) ** 2 // 700]:
            first, second = held(mesh_shape, shape, source), held(mesh_shape, shape, target)
            alike = {e for c in first for e in first[c] & second[c]}
            assert elements_in_place(shape, mesh_shape, source, target) == len(alike), (mesh_shape, source, target)


def test_elements_in_place_are_estimated_for_very_many_shards(monkeypatch):
    """Exact where source and target shard different dimensions evenly, and never all elements."""
    monkeypatch.setattr(segments, "MAX_COUNTED_SHARDS", 7)
    assert elements_in_place((16, 24), (2, 4), (Shard(0), Shard(0)), (Shard(1), Shard(1))) == 16 * 24 // 8
    assert elements_in_place((2,), (8, 1), (Shard(0), R), (StridedShard(0, 2), R)) < 2


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ((Shard(0), R), (R, R), ["all_gather over a"]),
        ((Shard(0), Shard(1)), (R, R), ["all_gather over a+b"]),
        ((P, P), (R, R), ["all_reduce over a+b"]),
        ((P, P), (Shard(0), Shard(0)), ["reduce_scatter over a+b"]),
        ((P, R), (Shard(1), Shard(0)), ["slice", "reduce_scatter over a"]),
        ((Shard(0), R), (R, Shard(0)), ["exchange over a+b"]),
        ((Shard(0), R), (Shard(1), R), ["all_to_all over a"]),
        ((Shard(0), R), (R, Shard(1)), ["slice", "all_gather over a"]),
        ((R, R), (Shard(0), P), ["slice"]),
        ((R, Shard(0)), (R, Shard(0)), []),
    ],
)
def test_regular_moves_are_the_frameworks_own_collectives(source, target, expected):
    plan = plan_redistribute(mesh_of((2, 4)), source, target, (16, 16))
    lines = [line.strip().split(":")[0] for line in str(plan).splitlines()[1:]]
    assert lines == (expected or ["nothing to do"])


def test_a_plan_explains_itself():
    plan = plan_redistribute(mesh_of((2, 2)), (P, Shard(1)), (Shard(0), R), (8, 4), itemsize=4)
    assert str(plan) == (
        "(a:P(sum), b:S(1)) -> (a:S(0), b:R): 64 bytes per rank, 20 us\n"
        "  reduce_scatter over a: a:P(sum)->S(0), 32 bytes\n"
        "  all_gather over b: b:S(1)->R, 32 bytes"
    )
    assert plan.wire_bytes == 64


def test_a_shard_moves_straight_to_another_axis():
    """(S0, R) -> (R, S0) on (2, 2): half of the ranks lack half of the tensor; gathering would send all of it."""
    plan = plan_redistribute(mesh_of((2, 2)), (Shard(0), R), (R, Shard(0)), (8, 8), itemsize=1)
    assert plan.wire_bytes == 16


def test_slow_axes_are_crossed_first_and_with_little():
    sizes = {"latency": 1e-9, "bandwidth": {"a": 1e9, "default": 100e9}}
    args = mesh_of((2, 8)), (Shard(0), Shard(1)), (R, R), (1 << 14, 1 << 14), 4
    plan = plan_redistribute(*args, Links(**sizes))
    assert [step.axes for step in plan.steps] == [(0,), (1,)]
    flat = plan_redistribute(*args, Links())
    assert [step.axes for step in flat.steps] == [(0, 1)]
    assert plan.wire_bytes == flat.wire_bytes


def test_links_are_checked():
    with pytest.raises(ValueError, match=r"Links.bandwidth must be positive, got 0"):
        Links(bandwidth=0)
    with pytest.raises(ValueError, match=r"Links.latency must be positive, got \{'a': -1\}|got \(\('a', -1\),\)"):
        Links(latency={"a": -1})


def test_every_rank_makes_the_same_plan():
    shape, rng = (7, 5), [(P, Shard(0)), (Shard(0), Shard(0)), (Shard(0), R), (R, Shard(1)), (Shard(1), P)]
    for source, target in itertools.product(rng, rng):
        plans = {str(plan_redistribute(mesh_of((2, 3), rank), source, target, shape)) for rank in range(6)}
        assert len(plans) == 1


def test_a_thousand_tensors_on_a_million_ranks_take_less_than_a_second():
    """Processor time, of which a plan on 8 ranks needs no less."""
    placements = [(R, R, R, R), (R, Shard(0), R, Shard(0)), (R, Shard(0), R, Shard(1)), (R, P, P, Shard(1))]
    placements += [(R, R, R, Shard(0)), (R, Shard(1), R, Shard(0)), (Shard(0), Shard(0), R, Shard(0))]

    def seconds(rank):
        begin = time.process_time()
        mesh = mesh_of((16, 64, 32, 32), rank)
        for i in range(1000):
            source, target = placements[i % 7], placements[(i // 7) % 3]
            plan_redistribute(mesh, source, target, (65536 * (1 + i % 11), 4096 + 2048 * (i % 13)), 2)
        return time.process_time() - begin

    for rank in (0, 777_777):
        # Others on the same core may slow down an attempt, or several.
        assert any(seconds(rank) < 1.0 for _ in range(20))


def test_what_cannot_be_is_refused():
    mesh = mesh_of((2, 2))
    with pytest.raises(PlacementError, match=r"cannot make Partial\(product\) of \(a:R, b:R\); only sum, avg, max"):
        plan_redistribute(mesh, (R, R), (Partial("product"), R), (4,))
    with pytest.raises(PlacementError, match=r"P\(max\).*to \(a:R, b:R\): partial max and sum in one tensor"):
        plan_redistribute(mesh, (P, Partial("max")), (R, R), (4,))
    with pytest.raises(PlacementError, match="expected 2 placements"):
        plan_redistribute(mesh, (R,), (R, R), (4,))
    with pytest.raises(PlacementError, match=r"plan_redistribute: placements must be a tuple .*, got Shard\(0\)"):
        plan_redistribute(mesh, Shard(0), (R, R), (4,))
    with pytest.raises(MeshError, match="plan_redistribute: device_mesh must be a DeviceMesh, got 'dp'"):
        plan_redistribute("dp", (R,), (R,), (4,))


def test_ranks_outside_the_mesh_may_plan():
    with fake_world(8, 7):
        mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        assert plan_redistribute(mesh, (Shard(0), R), (R, R), (4,), 4).wire_bytes == 8


def test_ragged_parts_are_known_on_their_own_axis_only():
    """Whatever else happens, an axis enters and leaves its ragged form alone."""
    ragged = RaggedShard(0, (1, 3))
    plan = plan_redistribute(mesh_of((2, 2)), (Shard(1), ragged), (R, Shard(0)), (4, 4))
    assert [step.axes for step in plan.steps if ragged in step.source] == [(1,)]
    full = plan_redistribute(mesh_of((2, 2)), (Shard(0), ragged), (R, R), (8, 4), itemsize=1)
    assert full.wire_bytes == 24
