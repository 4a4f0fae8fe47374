"""Collectives of real MCCL ranks: dtypes, reductions, uneven and empty parts, views, groups without rank 0."""

from __future__ import annotations

import mindspore_rank_functions as on_rank
import numpy as np
import pytest

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.launch import RankPool, launch
from hp_dtensor.platform.interface import DTYPE_NAMES

FLOATING = ("float64", "float32", "float16", "bfloat16")
SUBSETS = [(1, 2), (0, 2), (2, 0, 1), (2, 1)]


def test_every_rank_knows_its_place(three_ranks):
    assert three_ranks.run(on_rank.world_facts) == [(rank, 3, True, (0, 1, 2)) for rank in range(3)]


@pytest.mark.parametrize("op", ["sum", "max", "min", "product"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_reductions_of_every_dtype(three_ranks, dtype, op):
    got = three_ranks.run(on_rank.reduce_and_scatter, dtype, op, (0, 1, 2))
    assert got == on_rank.expected_reduction(dtype, op, 3)


@pytest.mark.parametrize("dtype", FLOATING)
def test_average(two_ranks, dtype):
    got = two_ranks.run(on_rank.reduce_and_scatter, dtype, "avg", (0, 1))
    assert got == on_rank.expected_reduction(dtype, "avg", 2)


def test_average_of_integers_is_refused(two_ranks):
    assert all("reduce with 'sum' and divide" in message for message in two_ranks.run(on_rank.average_of_integers))


@pytest.mark.parametrize("ranks", SUBSETS)
def test_reductions_in_subgroups(three_ranks, ranks):
    got = three_ranks.run(on_rank.reduce_and_scatter, "float32", "sum", ranks)
    expected = on_rank.expected_reduction("float32", "sum", len(ranks))
    assert [got[rank] for rank in ranks] == expected
    assert all(got[rank] is None for rank in range(3) if rank not in ranks)


@pytest.mark.parametrize("count", [1, 100_003])
def test_sums_are_in_rank_order_on_every_rank(three_ranks, count):
    # (1e8 + 1) - 1e8 is 0 in float32; any other order gives 1.
    assert three_ranks.run(on_rank.order_of_a_sum, count) == [[0.0]] * 3


def test_float64_is_reduced_in_float64(two_ranks):
    assert two_ranks.run(on_rank.exact_float64) == [[2.0 + 2.0**-40]] * 2


@pytest.mark.parametrize("count", [8192, 8193, 100_001])
def test_large_reductions(three_ranks, count):
    assert three_ranks.run(on_rank.large, count) == [True] * 3


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_moves_of_every_dtype(two_ranks, dtype):
    assert two_ranks.run(on_rank.move_everything, dtype, (0, 1)) == on_rank.expected_moves(dtype, 2)


@pytest.mark.parametrize("ranks", [(0, 1, 2), *SUBSETS])
def test_moves_in_subgroups(three_ranks, ranks):
    got = three_ranks.run(on_rank.move_everything, "float32", ranks)
    assert [got[rank] for rank in ranks] == on_rank.expected_moves("float32", len(ranks))


def test_views_are_read_and_written(two_ranks):
    row, zeros = [3.0] * 3, [0.0] * 3
    for full, column in two_ranks.run(on_rank.collectives_on_views):
        assert full == [zeros, row, row, zeros]
        assert column == [[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def test_empty_tensors_and_scalars(three_ranks):
    assert three_ranks.run(on_rank.empties) == [((0, 3), 6.0)] * 3


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 1)])
def test_bytes_of_any_length(three_ranks, ranks):
    got = three_ranks.run(on_rank.gather_bytes, ranks)
    assert all(got[rank] == [bytes(range(3 * other)) for other in ranks] for rank in ranks)


@pytest.mark.parametrize("ranks", [(0, 1, 2), (2, 1)])
def test_bytes_of_one_length_are_there_at_once(three_ranks, ranks):
    got = three_ranks.run(on_rank.start_gathering_bytes, ranks)
    assert all(got[rank] == [bytes([other]) * 3 for other in ranks] for rank in ranks)


def test_groups_that_share_ranks(three_ranks):
    got = three_ranks.run(on_rank.overlapping_groups, 3)
    for rank in range(3):
        ranks = [group for group in ((0, 1, 2), (0, 1), (1, 2)) if rank in group]
        expected = [sum(10.0**r for r in group) * (step + 1) for step in range(3) for group in ranks]
        assert got[rank] == expected


def test_a_process_joins_one_job_only(two_ranks):
    assert all("only once per process" in message for message in two_ranks.run(on_rank.join_again))


def test_tensor_parallel_training_equals_one_rank(platform, two_ranks):
    expected, first, second = _train_alone(platform, 4)
    for losses, *weights in two_ranks.run(on_rank.train_tensor_parallel, 4):
        # float32; the contraction is summed in two parts.
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        np.testing.assert_allclose(weights[0], first, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(weights[1], second, rtol=1e-5, atol=1e-6)


def _train_alone(platform, steps):
    ops = platform.ops
    first, second, x = (platform.from_numpy(array.astype(np.float32)) for array in on_rank.layers())
    first, second = platform.Parameter(first), platform.Parameter(second)
    losses = []
    for _ in range(steps):
        loss = ops.mean(ops.square(ops.linear(ops.silu(ops.linear(x, first)), second)))
        platform.backward(loss)
        for parameter in (first, second):
            platform.copy_(parameter, ops.sub(parameter.data, ops.mul(platform.get_grad(parameter), 0.5)))
            platform.set_grad(parameter, None)
        losses.append(float(platform.to_numpy(loss)))
    return losses, platform.to_numpy(first), platform.to_numpy(second)


@pytest.mark.real_ranks
def test_a_rank_that_dies_is_reported_at_once():
    with RankPool("mindspore", 2) as pool, pytest.raises(LaunchError, match="rank 1"):
        pool.run(on_rank.die_in_a_collective, timeout_seconds=60)


@pytest.mark.real_ranks
def test_a_rank_that_does_not_come_is_given_up_on(monkeypatch, tmp_path):
    monkeypatch.setenv("MS_CPU_COMM_OP_TIMEOUT", "3")
    with RankPool("mindspore", 2) as pool:
        pool.run(on_rank.wait_for_a_peer_that_hangs, tmp_path / "given_up", timeout_seconds=300)
    assert (tmp_path / "given_up").exists()


@pytest.mark.real_ranks
def test_ranks_print_nothing_but_what_mindspores_network_threads_say_at_exit(capfd):
    assert launch("mindspore_rank_functions:world_facts", num_ranks=2, platform="mindspore")[1][:2] == (1, 2)
    captured = capfd.readouterr()
    # At exit two of MindSpore's threads print a line each, whatever GLOG_v says.
    others = [line for line in captured.err.splitlines() if "Event base dispatch success!" not in line]
    assert (captured.out, others) == ("", [])
