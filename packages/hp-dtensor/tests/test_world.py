"""Worlds and groups: which one is current, what is checked before anything is sent, what is recorded."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from array_platform import ArrayPlatform

from hp_dtensor.comm import world as world_module
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import SilentWorld, current_world, fake_world, use_world
from hp_dtensor.exceptions import CapabilityError, CollectiveError
from hp_dtensor.testing import run_ranks


@pytest.fixture
def platform():
    return ArrayPlatform()


def test_without_a_job_there_is_one_rank(platform):
    world = current_world(platform)
    assert (world.rank, world.size, world.platform) == (0, 1, platform)
    assert world.all.ranks == (0,)


def test_a_platforms_job_is_current_and_a_block_comes_before_it(platform):
    job = platform.connect(2, 4, "127.0.0.1:1")
    assert current_world(platform) is job
    with fake_world(16, rank=5) as planned:
        assert current_world(platform) is planned
        with use_world(job):
            assert current_world() is job
        assert current_world(platform) is planned
    assert current_world(platform) is job
    platform.disconnect()
    assert current_world(platform).size == 1


def test_blocks_of_one_world_can_be_nested():
    outer, inner = SilentWorld(0, 2, None), SilentWorld(0, 3, None)
    with use_world(outer), use_world(inner):
        with use_world(outer):
            assert current_world() is outer
        assert current_world() is inner


def test_the_world_without_a_platform_is_that_of_the_selected_one_which_joins_its_job(monkeypatch, platform):
    monkeypatch.setattr(world_module, "platform_here", lambda: platform)
    assert current_world().size == 1
    platform.join_launched = lambda: platform.connect(2, 4, "127.0.0.1:1")
    assert current_world(platform).size == 1  # named, it is asked and joins nothing
    world = current_world()
    assert (world.rank, world.size) == (2, 4)
    assert current_world() is world is current_world(platform)
    with fake_world(16) as planned:
        assert current_world() is planned


def test_a_block_counts_for_its_own_thread_only():
    seen = []
    with fake_world(8):
        thread = threading.Thread(target=lambda: seen.append(current_world().size))
        thread.start()
        thread.join()
        assert current_world().size == 8
    assert seen == [1]


def test_a_world_is_left_after_an_error():
    with pytest.raises(KeyError), fake_world(8):
        raise KeyError
    assert current_world().size == 1


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_fake_rank_must_be_in_its_world(rank):
    with pytest.raises(CollectiveError, match=f"rank {rank} is outside a world of 4 ranks"), fake_world(4, rank):
        pass


def test_groups_are_made_once_and_for_members_only():
    with fake_world(8, rank=3) as world:
        assert world.group([1, 3]) is world.group((1, 3))
        assert world.group((1, 3)).rank == 1
        assert world.group((3, 1)).rank == 0
        with pytest.raises(CollectiveError, match=r"rank 3 asked for the group \(0, 1\), but is not a member of it"):
            world.group((0, 1))


def test_a_fake_world_says_how_to_get_a_real_one():
    with fake_world(4) as world:
        with pytest.raises(CollectiveError, match=r"hp_dtensor.launch.*run_ranks"):
            world.all.all_reduce(np.zeros(3))
        with pytest.raises(CollectiveError, match="without communication"):
            world.all.barrier()


def test_collectives_of_one_rank_are_copies(platform):
    group = SilentWorld(0, 1, platform).all
    x = np.array([[1.0, 2.0]])
    group.all_reduce(x).wait()
    for collective in (group.all_gather_into, group.reduce_scatter_into):
        output = np.zeros((1, 2))
        collective(output, x).wait()
        np.testing.assert_array_equal(output, x)
    output = np.zeros((1, 2))
    group.all_to_all_into(output, x, [1], [1]).wait()
    np.testing.assert_array_equal(output, x)
    output = np.zeros((1, 2))
    group.exchange([x], [output])
    np.testing.assert_array_equal(output, x)
    group.broadcast(x).wait()
    assert group.all_gather_bytes(b"one") == [b"one"]
    assert group.start_all_gather_bytes(b"one").wait() == [b"one"]
    group.barrier()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda g: g.all_reduce(np.zeros(2), "mean"), "reduction 'mean' is unknown; expected one of sum, avg, max"),
        (
            lambda g: g.reduce_scatter_into(np.zeros(1), np.zeros(2), "mean"),
            "reduction 'mean' is unknown; expected one of",
        ),
        (
            lambda g: g.all_gather_into(np.zeros(5), np.zeros(2)),
            "all_gather_into in group (0, 1): the larger buffer must have 4 elements, got 5",
        ),
        (
            lambda g: g.reduce_scatter_into(np.zeros(2), np.zeros(5)),
            "reduce_scatter_into in group (0, 1): the larger buffer must have 4 elements, got 5",
        ),
        (
            lambda g: g.all_to_all_into(np.zeros((2, 3)), np.zeros((2, 3)), [2, 1], [1, 1]),
            "output has 2 rows, its splits are [2, 1]; expected 2 splits that sum to the rows",
        ),
        (
            lambda g: g.all_to_all_into(np.zeros((2, 3)), np.zeros((2, 3)), [1, 1], [2]),
            "input has 2 rows, its splits are [2]; expected 2 splits",
        ),
        (
            lambda g: g.all_to_all_into(np.zeros((2, 3)), np.zeros((2, 3)), [1, 1], [1, 1], input_index=np.arange(3)),
            "input has 3 rows, its splits are [1, 1]; expected 2 splits",
        ),
        (lambda g: g.exchange([None], [None, None]), "expected 2 entries each, got 1 sends and 2 receives"),
        (lambda g: g.broadcast(np.zeros(1), source=2), "broadcast in group (0, 1): there is no group rank 2"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(platform, use, message):
    def fn():
        with record_collectives() as log, pytest.raises(CollectiveError) as caught:
            use(current_world(platform).all)
        return str(caught.value), log.count()

    for text, count in run_ranks(fn, 2, platform):
        assert message in text
        assert count == 0


def test_an_index_of_rows_is_refused_by_groups_that_take_none(platform):
    def fn():
        group, x = current_world(platform).all, np.zeros((2, 3), np.float32)
        assert not group.indexes_rows(x)
        with pytest.raises(CapabilityError, match=r"it takes no index of the rows .*; gather the rows before"):
            group.all_to_all_into(x.copy(), x, [1, 1], [1, 1], output_index=np.arange(2))

    run_ranks(fn, 2, platform)


def test_bytes_on_the_wire_are_what_this_rank_sends_to_others(platform):
    def fn():
        group = current_world(platform).all
        with record_collectives() as log:
            group.all_reduce(np.zeros(6, np.float32))
            group.all_gather_into(np.zeros((6, 2)), np.zeros((2, 2)))
            group.reduce_scatter_into(np.zeros((2, 2)), np.zeros((6, 2)))
            rows = [[0, 2, 1], [1, 5, 0], [3, 1, 0]]
            received = [row[group.rank] for row in rows]
            mine = rows[group.rank]
            group.all_to_all_into(np.zeros((sum(received), 4)), np.zeros((sum(mine), 4)), received, mine)
            x, following, before = np.zeros(3), (group.rank + 1) % 3, (group.rank - 1) % 3
            group.exchange([x if j in (following, group.rank) else None for j in range(3)],
                           [x.copy() if j in (before, group.rank) else None for j in range(3)])  # fmt: skip
            group.broadcast(np.zeros(3), source=1)
        assert [record.group for record in log.records] == [(0, 1, 2)] * 6
        assert log.wire_bytes() == sum(record.wire_bytes for record in log.records)
        return [log.wire_bytes(record.name) for record in log.records]

    others = [3 * 32, 1 * 32, 4 * 32]
    for rank, found in enumerate(run_ranks(fn, 3, platform)):
        assert found == [2 * 2 / 3 * 24, 2 * 32, 2 * 32, others[rank], 24, 48 if rank == 1 else 0]


def test_recordings_nest_and_count_by_name(platform):
    group = SilentWorld(0, 1, platform).all
    with record_collectives() as outer:
        group.all_reduce(np.zeros(1))
        with record_collectives() as inner:
            group.all_reduce(np.zeros(1))
            group.broadcast(np.zeros(1))
    group.all_reduce(np.zeros(1))
    assert (outer.count(), inner.count()) == (3, 2)
    assert outer.count("all_reduce") == 2
    assert inner.count("broadcast") == 1
