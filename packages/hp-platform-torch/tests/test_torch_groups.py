"""Collectives of real gloo ranks: every dtype, reduction, uneven and empty parts, groups without rank 0."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch_rank_functions as on_rank

from hp_dtensor.exceptions import LaunchError, PlatformError
from hp_dtensor.launch import RankPool
from hp_dtensor.platform.interface import DTYPE_NAMES
from hp_platform_torch.comm.world import TorchWorld
from hp_platform_torch.platform import TorchPlatform

FLOATING = ("float64", "float32", "float16", "bfloat16")
SUBSETS = [(0, 1, 2), (1, 2), (0, 2), (2, 0, 1), (2, 1)]


def test_every_rank_knows_its_place(three_ranks):
    assert three_ranks.run(on_rank.world_facts) == [(rank, 3, True, (0, 1, 2)) for rank in range(3)]


@pytest.mark.parametrize("op", ["sum", "max", "min", "product"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_reductions_of_every_dtype(three_ranks, dtype, op):
    got = three_ranks.run(on_rank.reduce_and_move, dtype, op, (0, 1, 2))
    assert got == on_rank.expected_reduction(dtype, op, 3)


@pytest.mark.parametrize("count", [3, 10**6])
def test_reductions_that_nobody_waits_for_leave_the_following_ones_alone(three_ranks, count):
    got = three_ranks.run(on_rank.reduce_after_letting_go, count)
    assert got == [([2.0 * (5 + 6 + 7)], [3.0], [0, 1, 2])] * 3


@pytest.mark.parametrize("dtype", FLOATING)
def test_average(two_ranks, dtype):
    got = two_ranks.run(on_rank.reduce_and_move, dtype, "avg", (0, 1))
    assert got == on_rank.expected_reduction(dtype, "avg", 2)


def test_average_of_integers_is_refused(two_ranks):
    assert all("reduce with 'sum' and divide" in message for message in two_ranks.run(on_rank.average_of_integers))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_travel_and_are_summed(two_ranks, dtype):
    full = torch.complex(torch.arange(12.0), torch.arange(12.0) - 5).to(getattr(torch, dtype)).reshape(6, 2)
    conjugates = full.conj().resolve_conj()
    expected = [conjugates, conjugates.imag, conjugates, conjugates, conjugates, full]
    for got, refused in two_ranks.run(on_rank.complex_numbers, dtype):
        assert got == [x.tolist() for x in expected]
        assert all("they can be reduced with 'sum'" in message for message in refused)


@pytest.mark.parametrize("ranks", SUBSETS)
def test_reductions_in_subgroups(three_ranks, ranks):
    got = three_ranks.run(on_rank.reduce_and_move, "float32", "sum", ranks)
    expected = on_rank.expected_reduction("float32", "sum", len(ranks))
    assert [got[rank] for rank in ranks] == expected
    assert [rank for rank in range(3) if got[rank] is None] == sorted(set(range(3)) - set(ranks))


@pytest.mark.parametrize("ranks", SUBSETS)
@pytest.mark.parametrize("dtype", ["float32", "int16", "bool"])
def test_gather_is_in_group_order(three_ranks, dtype, ranks):
    got = three_ranks.run(on_rank.gather, dtype, ranks)
    assert [got[rank] for rank in ranks] == [on_rank.expected_gather(dtype, ranks)] * len(ranks)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_gather_of_every_dtype(two_ranks, dtype):
    assert two_ranks.run(on_rank.gather, dtype, (0, 1)) == [on_rank.expected_gather(dtype, (0, 1))] * 2


@pytest.mark.parametrize("ranks", SUBSETS)
@pytest.mark.parametrize("dtype", ["float32", "int16", "bfloat16"])
def test_uneven_all_to_all(three_ranks, dtype, ranks):
    results = three_ranks.run(on_rank.uneven_all_to_all, dtype, ranks)
    for rank in ranks:
        received, expected = results[rank]
        assert received == expected


@pytest.mark.parametrize("dtype", ["float32", "int16", "uint8"])
def test_exchange_skips_what_is_empty(three_ranks, dtype):
    assert three_ranks.run(on_rank.exchange_ring, dtype) == [[3, 3, 3], [1], [2, 2]]


def test_a_rank_without_messages_connects_with_the_others(three_ranks):
    assert three_ranks.run(on_rank.exchange_without_one_rank, timeout_seconds=60) == [None, [1.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("ranks", SUBSETS)
@pytest.mark.parametrize("dtype", ["float32", "int16", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"])
def test_broadcast_from_any_member(three_ranks, dtype, ranks):
    for source in range(len(ranks)):
        got = three_ranks.run(on_rank.broadcast, dtype, ranks, source)
        expected = on_rank._values(getattr(torch, dtype), 4, ranks[source]).tolist()
        assert [got[rank] for rank in ranks] == [expected] * len(ranks)


@pytest.mark.parametrize("dtype", ["float32", "int16", "float8_e4m3fn"])
def test_broadcast_of_what_is_not_contiguous(three_ranks, dtype):
    assert three_ranks.run(on_rank.broadcast_strided, dtype) == [[True] * 3] * 3


@pytest.mark.parametrize(("dtype", "op"), [("float32", "avg"), ("int16", "sum"), ("complex64", "sum")])
def test_all_reduce_of_what_is_not_contiguous(three_ranks, dtype, op):
    assert three_ranks.run(on_rank.all_reduce_strided, dtype, op) == [[True] * 3] * 3


def test_synchronous_collectives_of_a_backend_that_returns_no_work(two_ranks):
    expected = [([[float(rank), 1.0]] * 2, [0.5]) for rank in range(2)]
    assert two_ranks.run(on_rank.synchronous_without_work) == expected


@pytest.mark.parametrize("ranks", SUBSETS)
@pytest.mark.parametrize("lengths", [(3, 0, 5), (0, 0, 0)])
@pytest.mark.parametrize("default_device", ["cpu", "meta"])
def test_bytes_of_any_length(three_ranks, lengths, ranks, default_device):
    got = three_ranks.run(on_rank.bytes_of_everyone, lengths, ranks, default_device)
    expected = [bytes([rank]) * lengths[rank] for rank in ranks]
    assert [got[rank] for rank in ranks] == [expected] * len(ranks)


@pytest.mark.parametrize("ranks", SUBSETS)
def test_bytes_under_way_do_not_wait_for_tensors_nor_meet_them(three_ranks, ranks):
    got = three_ranks.run(on_rank.bytes_under_way, ranks)
    expected = [bytes([rank]) * 3 for rank in ranks], None, [b"x"] * len(ranks), [float(rank) for rank in ranks]
    assert [got[rank] for rank in ranks] == [expected] * len(ranks)


def test_asynchronous_collectives_finish_in_wait(two_ranks):
    gathered = [1.0] * 4 + [2.0] * 4
    assert two_ranks.run(on_rank.asynchronous) == [(gathered, [3.0, 3.0], [1.5] * 4)] * 2


@pytest.mark.parametrize("by_torch", [True, False])
def test_messages_under_way_do_not_meet_collectives(two_ranks, by_torch):
    got = two_ranks.run(on_rank.message_beside_collectives, by_torch)
    assert got == [([1.0, 1.0, 2.0, 2.0], [3.0], [2.0 - rank] * 2, [9.0, 9.0]) for rank in range(2)]


def test_empty_tensors(two_ranks):
    assert two_ranks.run(on_rank.empty_tensors) == [True, True]


def test_reductions_give_the_same_bits_every_time(three_ranks):
    assert three_ranks.run(on_rank.repeated_reduction) == [1, 1, 1]


@pytest.mark.parametrize("count", [4, 2**18])
def test_a_reduction_may_end_in_a_row_of_its_input(three_ranks, count):
    found = three_ranks.run(on_rank.reduce_scatter_in_place, count)
    total = np.sum([before for before, _ in found], axis=0)
    for rank, (before, after) in enumerate(found):
        expected = np.array(before)
        expected[rank] = total[rank]
        np.testing.assert_array_equal(after, expected)


def test_the_group_of_all_is_the_default_one(two_ranks):
    assert two_ranks.run(on_rank.group_of_all_is_the_default_one) == [True, True]


def test_gradients_through_real_ranks(three_ranks):
    rows = [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    # every rank's use, weighted 1, 2 and 3, adds up at the owner
    assert three_ranks.run(on_rank.differentiable_gather) == [(rows, [[6.0, 6.0]] * (rank + 1)) for rank in range(3)]


def test_a_dead_peer_fails_the_next_collective(three_ranks):
    with pytest.raises(LaunchError, match="rank 1"):
        three_ranks.run(on_rank.die_or_wait, 1, timeout_seconds=60)
    assert three_ranks.run(on_rank.world_facts)[0][:2] == (0, 3), "the pool starts new ranks"


@pytest.mark.real_ranks
@pytest.mark.usefixtures("forked_ranks")
def test_a_peer_that_hangs_is_waited_for_as_long_as_asked(fork_server, tmp_path):
    # Ranks must start within the same time, on a busy machine too, so they are forked.
    assert fork_server.is_ready()
    with RankPool("torch", 2, timeout_seconds=8) as pool:
        waited, _ = pool.run(on_rank.wait_for_a_peer_that_hangs, tmp_path / "given_up", timeout_seconds=300)
    assert 7 < waited < 60


def test_an_error_on_a_rank_is_told(two_ranks):
    with pytest.raises(LaunchError, match="on purpose"):
        two_ranks.run(on_rank.fail)


def test_one_rank_needs_no_network():
    platform = TorchPlatform()
    world = platform.connect(0, 1, "127.0.0.1:1")
    x = torch.ones(3)
    world.all.all_reduce(x)
    assert (world.size, x.tolist(), world.all.all_gather_bytes(b"here")) == (1, [1.0] * 3, [b"here"])
    with pytest.raises(PlatformError, match="already rank 0 of a job of 1"):
        platform.connect(0, 1, "127.0.0.1:1")
    platform.disconnect()
    platform.disconnect()
    assert platform.world is None


@pytest.mark.parametrize("address", ["nowhere", ":29500", "host:", "host:port"])
def test_an_address_without_host_or_port_is_refused(address):
    with pytest.raises(PlatformError, match="must be host:port"):
        TorchPlatform().connect(1, 2, address)


def test_gradients_that_are_known_to_be_zero_are_sent_as_zeros(two_ranks):
    assert two_ranks.run(on_rank.zero_gradients) == [[[[0.0] * 3] * 4] * 3] * 2


def test_a_dispatch_mode_on_one_rank_does_not_change_what_ranks_send(two_ranks):
    found = two_ranks.run(on_rank.collectives_with_a_mode_on_one_rank, timeout_seconds=60.0)
    # Each rank's own two numbers, and its half of [0, 1, 2, 3] * (1 + 2).
    assert found == [([1.0, 1.0, 2.0, 2.0], [0.0, 3.0]), ([1.0, 1.0, 2.0, 2.0], [6.0, 9.0])]


def test_torchs_own_debug_mode_sees_our_collectives(two_ranks):
    x, w = torch.arange(12.0).reshape(4, 3), torch.ones(3, 2, requires_grad=True)
    torch.tanh(x @ w).sum().backward()
    expected = {"c10d._allgather_base_": 1, "c10d._reduce_scatter_base_": 1, "c10d.allreduce_": 1}
    for counts, grad in two_ranks.run(on_rank.communications_seen_by_torch, 1):
        assert counts == expected
        torch.testing.assert_close(torch.tensor(grad), w.grad)


def test_nobody_at_the_meeting_point():
    with pytest.raises(PlatformError, match=r"rank 1 of 2 could not reach the meeting point 127\.0\.0\.1:9"):
        TorchPlatform().connect(1, 2, "127.0.0.1:9", timeout_seconds=1)


def test_a_network_interface_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope7")
    with pytest.raises(PlatformError, match=r"GLOO_SOCKET_IFNAME=nope7: .* no network interface nope7; it has .*lo"):
        TorchPlatform().connect(1, 2, "127.0.0.1:9", timeout_seconds=1)


@pytest.mark.parametrize("port", ["0", "99999"])
def test_a_port_that_does_not_exist_is_refused(port):
    with pytest.raises(PlatformError, match=f"must be host:port, .* got '127.0.0.1:{port}'"):
        TorchPlatform().connect(1, 2, f"127.0.0.1:{port}", timeout_seconds=1)


def test_a_message_of_torch_has_no_frames_of_cpp():
    with pytest.raises(PlatformError) as caught:
        TorchPlatform().connect(1, 2, "127.0.0.1:9", timeout_seconds=1)
    assert "frame #" not in str(caught.value)


@pytest.mark.parametrize(
    ("local_rank", "count", "visible", "slurm", "index"),
    [
        (3, 4, "", {}, 3),
        (0, 1, "", {}, 0),
        (0, 1, "2", {}, 0),
        (3, 1, "5", {"SLURM_LOCALID": "3", "SLURM_GPUS_PER_TASK": "1"}, 0),
        (3, 1, "5", {"SLURM_LOCALID": "3", "SLURM_TRES_PER_TASK": "cpu:8,gres/gpu:1"}, 0),
        (1, 2, "4,5", {}, 1),
    ],
)
def test_a_rank_uses_its_own_device_whichever_of_them_it_sees(monkeypatch, local_rank, count, visible, slurm, index):
    platform, used = device_platform(monkeypatch, count, visible, slurm)
    platform._use_device(local_rank)
    assert (used, platform.device) == ([torch.device("cuda", index)], torch.device("cuda", index))


@pytest.mark.parametrize(
    ("count", "visible", "slurm", "seen"),
    [
        (1, "", {}, "all"),
        (2, "0,1", {}, "CUDA_VISIBLE_DEVICES=0,1"),
        # Set by the user for all ranks, not by a launcher.
        (1, "0", {}, "CUDA_VISIBLE_DEVICES=0"),
        (1, "0", {"SLURM_LOCALID": "2"}, "CUDA_VISIBLE_DEVICES=0"),
        # Of torchrun in one task.
        (1, "0", {"SLURM_LOCALID": "0", "SLURM_GPUS_PER_TASK": "1"}, "CUDA_VISIBLE_DEVICES=0"),
    ],
)
def test_a_rank_without_a_device_is_refused(monkeypatch, count, visible, slurm, seen):
    platform, _ = device_platform(monkeypatch, count, visible, slurm)
    with pytest.raises(
        PlatformError, match=re.escape(f"local rank 2 has no device: its process sees {count} ({seen}). Start at most")
    ):
        platform._use_device(2)


def device_platform(monkeypatch, count, visible, slurm):
    """Return a platform whose process sees `count` GPUs, and the list of those that it makes current."""
    for name in ("SLURM_LOCALID", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    platform, used = TorchPlatform(), []
    platform.device_types = ("cuda", "cpu")
    monkeypatch.delenv("HP_BACKEND", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    return platform, used


def test_a_backend_that_cannot_abort_leaves_no_other_waiting():
    aborted = []

    def fail():
        raise NotImplementedError("no abort")

    first, second = (SimpleNamespace(abort=abort) for abort in (fail, lambda: aborted.append("second")))
    gloo = SimpleNamespace()
    groups = [SimpleNamespace(_connections={"cuda": first, "cpu": gloo}), SimpleNamespace(_connections={"npu": second})]
    TorchWorld.abort(SimpleNamespace(groups=lambda: groups))
    assert aborted == ["second"]
