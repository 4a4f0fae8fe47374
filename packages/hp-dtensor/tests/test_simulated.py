"""Simulated ranks: results of the collectives, order, and what is said when ranks fail or disagree."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from array_platform import ArrayPlatform

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import CapabilityError, CollectiveError, LaunchError
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.simulated import Job


@pytest.fixture
def platform():
    return ArrayPlatform()


def test_each_rank_gets_its_own_world(platform):
    def fn():
        world = current_world(platform)
        return world.rank, world.size, world.all.ranks

    assert run_ranks(fn, 3, platform) == [(rank, 3, (0, 1, 2)) for rank in range(3)]


def test_arguments_are_passed_and_results_come_by_rank(platform):
    results = run_ranks(lambda factor: current_world(platform).rank * factor, 4, platform, 10)
    assert results == [0, 10, 20, 30]


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [6, 30]), ("avg", [2, 10]), ("max", [3, 15]), ("min", [1, 5]), ("product", [6, 750])],
)
def test_all_reduce(platform, op, expected):
    def fn():
        world = current_world(platform)
        x = np.array([world.rank + 1.0, 5.0 * (world.rank + 1)])
        world.all.all_reduce(x, op)
        return x

    for result in run_ranks(fn, 3, platform):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(
    "way", ["all_reduce", "receive", "async receive", "all_gather_bytes", "start_all_gather_bytes"]
)
def test_the_time_of_waiting_for_a_late_rank_is_counted_once(platform, way):
    def fn():
        group, x = current_world(platform).all, np.ones(2)
        started = time.perf_counter()
        if group.rank == 1:
            time.sleep(0.2)
        if way == "all_reduce":
            group.all_reduce(x)
        elif way == "all_gather_bytes":
            group.all_gather_bytes(b"1")
        elif way == "start_all_gather_bytes":
            assert group.start_all_gather_bytes(b"1").wait(60.0) == [b"1", b"1"]
        elif group.rank == 1:
            group.send(x, 0)
        else:
            group.receive(x, 1, async_op=way == "async receive").wait()
        return group.seconds_waited, time.perf_counter() - started

    (waited, elapsed), (_, all_of_late) = run_ranks(fn, 2, platform)
    assert 0.1 < waited <= elapsed
    assert all_of_late > 0.2


def test_gather_and_reduce_scatter_keep_rank_order_within_a_sub_group_without_rank_0(platform):
    def fn():
        world = current_world(platform)
        if world.rank == 0:
            return None
        group = world.group((1, 3, 2))
        gathered = np.empty((6, 1))
        group.all_gather_into(gathered, np.full((2, 1), world.rank))
        scattered = np.empty((1, 2))
        group.reduce_scatter_into(scattered, np.arange(6.0).reshape(3, 2) * world.rank)
        return gathered.ravel().tolist(), scattered.ravel().tolist()

    order = [1, 1, 3, 3, 2, 2]
    assert run_ranks(fn, 4, platform) == [None, (order, [0, 6]), (order, [24, 30]), (order, [12, 18])]


def test_all_to_all_moves_uneven_and_empty_rows(platform):
    rows = [[0, 2, 1], [1, 0, 0], [3, 1, 2]]  # rows[i][j]: from rank i to rank j

    def fn():
        world = current_world(platform)
        me = world.rank
        x = np.array([[10 * me + j] * 2 for j in range(3) for _ in range(rows[me][j])]).reshape(-1, 2)
        received = [rows[i][me] for i in range(3)]
        output = np.full((sum(received), 2), -1)
        world.all.all_to_all_into(output, x, received, rows[me])
        return output[:, 0].tolist()

    assert run_ranks(fn, 3, platform) == [[10, 20, 20, 20], [1, 1, 21], [2, 22, 22]]


def test_all_to_all_in_one_buffer_sends_the_values_of_before(platform):
    """As a real one: each rank's output is its input, and the first rank's is written first."""

    def fn():
        world = current_world(platform)
        x = np.arange(2.0).reshape(2, 1) + 10 * world.rank
        world.all.all_to_all_into(x, x, [1, 1], [1, 1])
        return x.ravel().tolist()

    assert run_ranks(fn, 2, platform) == [[0, 10], [1, 11]]


def test_exchange_skips_none_and_copies_its_own_entry(platform):
    def fn():
        world = current_world(platform)
        following, before = (world.rank + 1) % 3, (world.rank - 1) % 3
        sends, receives = [None] * 3, [None] * 3
        sends[following] = np.array([world.rank])
        sends[world.rank] = np.array([100 + world.rank])
        receives[before], receives[world.rank] = np.array([-1]), np.array([-1])
        world.all.exchange(sends, receives)
        return receives[before][0], receives[world.rank][0]

    assert run_ranks(fn, 3, platform) == [(2, 100), (0, 101), (1, 102)]


def test_broadcast_and_bytes(platform):
    def fn():
        world = current_world(platform)
        x = np.full((2,), world.rank)
        world.all.broadcast(x, source=2)
        world.all.barrier()
        return x.tolist(), world.all.all_gather_bytes(b"x" * world.rank)

    assert run_ranks(fn, 3, platform) == [([2, 2], [b"", b"x", b"xx"])] * 3


def test_bytes_under_way_meet_whatever_happens_to_tensors(platform):
    def fn():
        world = current_world(platform)
        first = world.all.start_all_gather_bytes(b"a%d" % world.rank)
        early = first.wait(0)
        if world.rank == 1:
            # Nobody can go on before this rank has waited long enough.
            late = world.all.start_all_gather_bytes(b"b1")
            assert late.wait(5.0) is None
        x = np.full((2,), world.rank)
        world.all.all_reduce(x)
        if world.rank == 0:
            late = world.all.start_all_gather_bytes(b"b0")
        return early, first.wait(), late.wait(), x.tolist()

    both = [b"a0", b"a1"], [b"b0", b"b1"], [1, 1]
    assert run_ranks(fn, 2, platform) == [(None, *both), ([b"a0", b"a1"], *both)]


def test_bytes_that_never_come_leave_a_rank_stuck(platform):
    def fn():
        if current_world(platform).rank == 0:
            current_world(platform).all.start_all_gather_bytes(b"a").wait()

    with pytest.raises(CollectiveError, match=r"rank 0 waits in all_gather_bytes of group .* for rank 1"):
        run_ranks(fn, 2, platform)


def test_0_d_and_empty_tensors(platform):
    def fn():
        world = current_world(platform)
        scalar, nothing = np.array(world.rank + 1.0), np.empty((0, 3))
        world.all.all_reduce(scalar)
        world.all.all_reduce(nothing)
        gathered = np.empty(2)
        world.all.all_gather_into(gathered, np.array(7.0 + world.rank))
        return scalar.item(), gathered.tolist()

    assert run_ranks(fn, 2, platform) == [(3.0, [7.0, 8.0])] * 2


def test_one_rank_runs_at_a_time_and_the_order_is_always_the_same(platform):
    def trace():
        events, running = [], []

        def fn():
            world = current_world(platform)
            for step in range(3):
                running.append(world.rank)
                time.sleep(0.001)
                assert running == [world.rank]
                running.clear()
                events.append((step, world.rank))
                world.all.barrier()

        run_ranks(fn, 3, platform)
        return events

    first = trace()
    assert first[:3] == [(0, 0), (0, 1), (0, 2)]
    assert sorted(first) == [(step, rank) for step in range(3) for rank in range(3)]
    assert trace() == first


def test_process_wide_state_follows_its_rank(platform):
    def fn():
        world = current_world(platform)
        assert platform.state == "before"
        platform.state = f"rank {world.rank}"
        world.all.barrier()
        assert platform.state == f"rank {world.rank}"
        world.all.barrier()
        assert platform.state == f"rank {world.rank}"

    platform.state = "before"
    run_ranks(fn, 3, platform)
    assert platform.state == "before"


def test_a_mesh_inside_gives_groups_of_its_axes(platform):
    def fn():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=platform)
        x = np.array([float(mesh.world.rank)])
        mesh.group_along("tp").all_reduce(x)
        return mesh.get_coordinate(), x.item()

    assert run_ranks(fn, 4, platform) == [((0, 0), 1.0), ((0, 1), 1.0), ((1, 0), 5.0), ((1, 1), 5.0)]


def test_collectives_are_recorded_per_rank_with_the_bytes_they_send(platform):
    def fn():
        world = current_world(platform)
        with record_collectives() as log:
            world.all.all_reduce(np.zeros(8))
            world.all.broadcast(np.zeros(8), source=1)
        return log.count(), log.count("all_reduce"), log.wire_bytes("all_reduce"), log.wire_bytes("broadcast")

    assert run_ranks(fn, 4, platform) == [(2, 1, 96.0, 192.0 if rank == 1 else 0.0) for rank in range(4)]


def test_a_failing_rank_is_named_and_stops_the_others(platform):
    after = []

    def fn():
        world = current_world(platform)
        world.all.barrier()
        if world.rank == 1:
            raise ValueError("bad weights")
        try:
            world.all.barrier()
        except Exception:
            after.append("the failure was swallowed")
        after.append(world.rank)

    with pytest.raises(LaunchError, match="rank 1 of 3 failed: ValueError: bad weights") as caught:
        run_ranks(fn, 3, platform)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert after == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_ranks_that_unwind_do_not_run_at_the_same_time_and_may_not_communicate(platform):
    unwound = []

    def fn():
        world = current_world(platform)
        try:
            if world.rank == 2:
                raise RuntimeError("broken")
            world.all.barrier()
        finally:
            unwound.append(world.rank)
            if world.rank == 0:
                world.all.all_reduce(np.zeros(3))
                unwound.append("went on")

    with pytest.raises(LaunchError, match="rank 2 of 3 failed: RuntimeError: broken"):
        run_ranks(fn, 3, platform)
    assert unwound == [2, 0, 1]


def test_sys_exit_in_a_rank_is_a_failure(platform):
    with pytest.raises(LaunchError, match="rank 0 of 2 failed: SystemExit: 3"):
        run_ranks(lambda: exit(3), 2, platform)


def test_different_collectives_are_told_apart(platform):
    def fn():
        world = current_world(platform)
        if world.rank == 0:
            world.all.all_reduce(np.zeros(3, np.float32))
        else:
            world.all.broadcast(np.zeros(3, np.float32))

    with pytest.raises(CollectiveError) as caught:
        run_ranks(fn, 2, platform)
    assert str(caught.value) == (
        "the ranks of group (0, 1) came to collectives that do not agree:\n"
        "  rank 0: all_reduce op sum tensor float32[3]\n"
        "  rank 1: broadcast source 0 tensor float32[3]"
    )


def _one_way(rank, sent, expected):
    """The arguments of an exchange from rank 0 to rank 1."""
    return ([None, sent], [None, None]) if rank == 0 else ([None, None], [expected, None])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.all_reduce(np.zeros(3 + g.rank)), r"rank 1: all_reduce op sum tensor float64\[4\]"),
        (lambda g: g.all_reduce(np.zeros(3, [np.int32, np.int64][g.rank])), r"rank 1: .* tensor int64\[3\]"),
        (lambda g: g.all_reduce(np.zeros(3), ["sum", "max"][g.rank]), r"rank 1: all_reduce op max tensor"),
        (lambda g: g.broadcast(np.zeros(3), source=g.rank), r"rank 1: broadcast source 1 tensor"),
        (
            lambda g: g.all_gather_into(np.zeros((2, 4)), np.zeros([(2, 2), (1, 4)][g.rank])),
            r"rank 1: all_gather tensor float64\[1, 4\]",
        ),
        (
            lambda g: g.all_to_all_into(np.zeros((2, 1)), np.zeros((2, 1)), [1, 1], [[2, 0], [1, 1]][g.rank]),
            r"rank 0 sends 2 rows to rank 0, which expects 1",
        ),
        (
            lambda g: g.exchange(*_one_way(g.rank, np.zeros(2), np.zeros(3))),
            r"rank 0 sends float64\[2\] to rank 1, which expects float64\[3\]",
        ),
        (
            lambda g: g.exchange(*_one_way(g.rank, None, np.zeros(2))),
            r"rank 0 sends nothing to rank 1, which expects float64\[2\]",
        ),
    ],
    ids=["shape", "dtype", "op", "source", "gather", "rows", "exchange", "nothing"],
)
def test_disagreements_are_shown_rank_by_rank(platform, call, message):
    with pytest.raises(CollectiveError, match=message):
        run_ranks(lambda: call(current_world(platform).all), 2, platform)


def test_a_rank_that_ends_early_is_named(platform):
    def fn():
        world = current_world(platform)
        if world.rank != 1:
            world.all.all_reduce(np.zeros((2, 3)))

    with pytest.raises(CollectiveError) as caught:
        run_ranks(fn, 3, platform)
    assert str(caught.value) == (
        "no rank can go on:\n"
        "  rank 0 waits in all_reduce op sum tensor float64[2, 3] of group (0, 1, 2) for rank 1\n"
        "  rank 1 has ended\n"
        "  rank 2 waits in all_reduce op sum tensor float64[2, 3] of group (0, 1, 2) for rank 1"
    )


def test_a_ring_of_waits_is_a_deadlock(platform):
    def fn():
        world = current_world(platform)
        pairs = [(0, 1), (1, 2), (0, 2)]
        world.group(pairs[world.rank]).barrier()

    with pytest.raises(CollectiveError, match=r"rank 1 waits in \w+ of group \(1, 2\) for rank 2"):
        run_ranks(fn, 3, platform)


def test_a_rank_that_never_ends_is_shown_with_its_stack(platform, monkeypatch):
    running, release, late = threading.Event(), threading.Event(), Job._late

    def fn():
        if current_world(platform).rank == 1:
            return running.set(), release.wait(300)

    def late_in_time(job, seconds):
        assert running.wait(300), "on a busy machine the time may be up before rank 1 has started"
        return late(job, seconds)

    monkeypatch.setattr(Job, "_late", late_in_time)
    with pytest.raises(LaunchError, match=r"within 0.1 s; rank 1 is running:\n(.*\n)*.*release.wait"):
        run_ranks(fn, 2, platform, timeout_seconds=0.1)
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join()


def test_a_world_needs_a_rank(platform):
    with pytest.raises(LaunchError, match="at least one rank"):
        run_ranks(lambda: None, 0, platform)


class MixingThreads(ArrayPlatform):
    """As MindSpore 2.9."""

    records_by_thread = False


def test_frameworks_that_mix_up_what_threads_record_are_refused():
    assert run_ranks(lambda: 3, 1, MixingThreads()) == [3]
    with pytest.raises(CapabilityError, match=r"array mixes up what threads record.*hp_dtensor\.launch"):
        run_ranks(lambda: 3, 2, MixingThreads())
