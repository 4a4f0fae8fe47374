"""A million ranks on paper: the cost of meshes and of planning does not depend on their number."""

from __future__ import annotations

import itertools
import sys

import pytest

from hp_dtensor import DeviceMesh, Replicate, Shard, TensorSpec, fake_world, plan_redistribute
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.redistribute import plan_across, planner

NAMES = ("pp", "dp", "cp", "tp")
SMALL, LARGE = (1, 2, 2, 2), (16, 64, 32, 32)
R, S0, S1 = Replicate(), Shard(0), Shard(1)
MOVES = [
    ((R, S0, R, S0), (R, R, R, S0)),
    ((S0, S0, R, S1), (S0, R, R, S1)),
    ((R, S0, S0, S0), (R, R, R, S1)),
    ((R, S0, R, S1), (R, S1, R, S0)),
    ((S0, R, S0, R), (R, S0, R, S0)),
]


def all_meshes(shape):
    """A mesh with every sub-mesh and flattened axis, coordinates asked for."""
    mesh = DeviceMesh("cpu", shape, mesh_dim_names=NAMES)
    made = [mesh]
    for length in range(1, 5):
        for names in itertools.combinations(NAMES, length):
            made.append(mesh[names])
            if length > 1:
                made.append(mesh.flatten("_".join(names), names))
    return [(part.shape, part.get_coordinate()) for part in made]


def calls(function, *args):
    """Return the number of calls, of Python and of C functions, that a function makes."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
    return count


def test_meshes_cost_the_same_for_eight_and_for_a_million_ranks():
    with fake_world(8, rank=5):
        all_meshes(SMALL)
        small = calls(all_meshes, SMALL)
    with fake_world(1_048_576, rank=777_777):
        large = calls(all_meshes, LARGE)
    assert large <= small * 1.1


def plan_a_model(shape):
    """Plan a thousand redistributions without caches; return the number of their steps."""
    for cached in vars(planner).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()
    mesh = DeviceMesh("cpu", shape, mesh_dim_names=NAMES)
    steps = 0
    for i, (source, target) in zip(range(1000), itertools.cycle(MOVES), strict=False):
        size = (4096 * (1 + i % 50) + (i % 5 == 0), 4096 * (1 + i % 7))
        specs = TensorSpec(mesh, source, size, None), TensorSpec(mesh, target, size, None)
        steps += len(plan_redistribute(mesh, specs[0].placements, specs[1].placements, size, 2).steps)
    return steps


def test_planning_a_model_costs_the_same_for_eight_and_for_a_million_ranks(monkeypatch):
    monkeypatch.setattr(ProcessGroup, "__init__", lambda *args: pytest.fail("planning made a process group"))
    with fake_world(8, rank=5):
        assert plan_a_model(SMALL) >= 1000
        small = calls(plan_a_model, SMALL)
    for rank in (0, 777_777, 1_048_575):
        with fake_world(1_048_576, rank):
            # More steps are worth planning where an axis has more than one rank; anything per rank would be far more.
            assert calls(plan_a_model, LARGE) <= small * 2


def send_to_the_other_half(ranks):
    """Plan the messages of this rank, and the bytes of all, from the first half of the ranks to the second."""
    half = ranks // 2
    first, second = (DeviceMesh("cpu", (half,), ranks=range(start, start + half)) for start in (0, half))
    for source, target in ((R, S0), (S0, S0), (S0, R)):
        specs = (TensorSpec(mesh, (p,), (4 * half, 2), None) for mesh, p in ((first, source), (second, target)))
        plan = plan_across(*specs)
        received = 4 * half * 2 * (half if target is R else 1)
        assert plan.wire_bytes == received * 4 / ranks
        assert any(plan._sends) or plan._receives


@pytest.mark.parametrize("of_receiver", [False, True])
def test_planning_between_meshes_takes_time_linear_in_their_ranks(of_receiver):
    counts = []
    for ranks in (64, 512):
        with fake_world(ranks, rank=ranks // 2 if of_receiver else 0):
            counts.append(calls(send_to_the_other_half, ranks))
    assert counts[1] <= 8 * 1.2 * counts[0]
