"""Bytes on the wire equal the formulas, hops overlap with computation, and the choice of a method is explained."""

from __future__ import annotations

import collections
import threading
import weakref

import attention_reference as reference
import pytest
from context_programs import attend_on_ranks

from hp_dtensor import AttentionShape, choose_context_parallel, record_collectives
from hp_dtensor.comm import process_group
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention import SequenceSharding, ring
from hp_dtensor.testing import run_ranks

SIZES = {"batch": 2, "heads": 8, "kv_heads": 2, "keys": 48}
WIDTH = 8


def counted(hp_platform, ranks, degree=1, method="ring", balanced=True, sizes=SIZES, dtype=None, sharding=None, **mask):
    """Return the mean bytes that a rank sends in (forward, backward)."""
    arrays = reference.inputs(**sizes)[:4]

    def program():
        with record_collectives() as log:
            attend_on_ranks(hp_platform, arrays, mask, {}, degree, method, balanced, dtype, sharding)
        sent = [0.0, 0.0]
        for record in log.records:
            sent[record.in_backward] += record.wire_bytes
        return sent

    every = run_ranks(program, ranks, hp_platform)
    return tuple(sum(each) / ranks for each in zip(*every, strict=True))


def formulas(ranks, sizes=SIZES, itemsize=4):
    """Return the bytes of queries and of keys with values, of the full batch."""
    tokens = sizes["batch"] * sizes["keys"]
    return tokens * sizes["heads"] * WIDTH * itemsize, 2 * tokens * sizes["kv_heads"] * WIDTH * itemsize


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ring_sends_each_block_to_all_others_and_its_gradients_to_the_owner(hp_platform, ranks):
    _, kv = formulas(ranks)
    share = (ranks - 1) / ranks * kv
    assert counted(hp_platform, ranks, causal=False) == (share, 2 * share)
    # Later ranks see a rank's head chunk only, earlier ranks both of its chunks.
    assert counted(hp_platform, ranks) == (3 / 4 * share, 3 / 4 * 2 * share)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_of_16_bits_the_sums_of_gradients_alone_travel_in_32(hp_platform, method):
    _, kv = formulas(4, itemsize=2)
    share = 3 / 4 * kv
    sent = counted(hp_platform, 4, method=method, dtype="float16", causal=False)
    assert sent == (share, share + 2 * share)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ulysses_sends_heads_there_and_the_result_back(hp_platform, ranks):
    q, kv = formulas(ranks)
    kv *= max(1, ranks / SIZES["kv_heads"])  # with fewer key-value heads than ranks, each is sent to several
    sent = (ranks - 1) / ranks**2 * (2 * q + kv)
    assert counted(hp_platform, ranks, degree=ranks) == (sent, sent)


def test_both_at_once_send_the_sum_of_their_parts(hp_platform):
    q, kv = formulas(4)
    heads = (2 - 1) / 2 * (2 * q + kv) / 4
    share = 3 / 4 * (2 - 1) / 2 * kv / 2
    assert counted(hp_platform, 4, degree=2) == (heads + share, heads + 2 * share)


def test_all_gather_of_full_attention_sends_what_the_ring_does_and_gathers_again(hp_platform):
    _, kv = formulas(4)
    share = 3 / 4 * kv
    assert counted(hp_platform, 4, method="all_gather", causal=False) == (share, 2 * share)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_gather_under_a_causal_mask_sends_what_comes_before(hp_platform, ranks):
    """A tail chunk sees all chunks before it, of which the head is the rank's own; a span sees those before it."""
    _, kv = formulas(ranks)
    chunk = kv / (2 * ranks)
    for balanced in (True, False):
        seen = [2 * ranks - 2 - rank if balanced else 2 * rank for rank in range(ranks)]
        share = sum(seen) / ranks * chunk
        again = 0 if max(seen) <= 2 else share  # no more than its own two chunks are saved for backward
        found = counted(hp_platform, ranks, method="all_gather", balanced=balanced)
        assert found == pytest.approx((share, share + again), rel=1e-9)


def test_all_gather_under_a_window_sends_borders_alone(hp_platform):
    _, kv = formulas(4)
    border = kv / SIZES["keys"] * (5 - 1) * 3 / 4  # each rank but the first needs four tokens before its own
    assert counted(hp_platform, 4, method="all_gather", balanced=False, window=5) == (border, border)


CASES = [
    (2, 1, "ring", {}),
    (3, 1, "ring", {"window": 5}),
    (4, 4, "ulysses", {}),
    (4, 2, "all_gather", {"window": 9}),
    (4, 1, "all_gather", {}),
    (6, 3, "ring", {"causal": False}),
    (3, 1, "ring", {"documents": (16, 9, 4)}),
    (4, 2, "all_gather", {"documents": (16, 9, 4)}),
]


@pytest.mark.parametrize(("ranks", "degree", "method", "mask"), CASES)
def test_the_cost_model_counts_what_is_sent(hp_platform, ranks, degree, method, mask):
    sizes = {"batch": 2, "heads": 7 if degree == 3 else 8, "kv_heads": 1 if degree == 3 else 2, "keys": 29}
    shape = AttentionShape(
        batch=2, length=29, heads=sizes["heads"], kv_heads=sizes["kv_heads"], head_dim=WIDTH, itemsize=4, **mask
    )
    cost = choose_context_parallel(shape, ranks, method=method, ulysses_degree=degree).best
    sharding, mask = None, dict(mask)
    if documents := mask.pop("documents", None):
        rows = (documents, documents)
        mask["positions"] = reference.positions_of(*rows)
        sharding = SequenceSharding(
            length=29, ranks=ranks, ulysses_degree=degree, documents=rows, even_hops=method == "ring"
        )
    found = counted(hp_platform, ranks, degree, method, mask.get("causal", True), sizes, sharding=sharding, **mask)
    assert found == pytest.approx((cost.forward_bytes, cost.backward_bytes), rel=0.02 if 29 % ranks else 1e-9)


def test_every_hop_is_under_way_while_the_block_before_it_is_computed(hp_platform, monkeypatch):
    timelines = {}

    def note(event):
        timelines.setdefault(threading.current_thread().name, []).append(event)

    exchange = ring._Ring.exchange
    monkeypatch.setattr(ring._Ring, "exchange", lambda *args: note("exchange") or exchange(*args))
    for each in (ring.PartialAttention, ring.AttentionGrads):
        compute = each.add
        monkeypatch.setattr(each, "add", lambda *args, compute=compute: note("compute") or compute(*args))
    arrays = reference.inputs(**SIZES)[:4]
    run_ranks(attend_on_ranks, 4, hp_platform, hp_platform, arrays, {}, {})
    assert len(timelines) == 4
    for timeline in timelines.values():
        # In backward also the gradients of the block just computed.
        forward, backward = timeline[:7], timeline[7:]
        assert forward == ["exchange", "compute"] + ["exchange", "compute"] * 2 + ["compute"]
        assert backward == ["exchange", "compute"] + ["exchange", "compute", "exchange"] * 2 + ["compute", "exchange"]


@pytest.mark.parametrize(("dtype", "share"), [(None, 1), ("bfloat16", 8 / 9)])
def test_the_messages_that_a_rank_holds_are_those_of_the_cost_model(hp_platform, monkeypatch, dtype, share):
    held, most = collections.Counter(), collections.Counter()

    def counted(make):
        def make_and_count(*args):
            message, rank = make(*args), threading.current_thread().name
            num_bytes = message.shape[0] * hp_platform.itemsize(message.dtype)
            held[rank] += num_bytes
            weakref.finalize(message, lambda: held.subtract({rank: num_bytes}))
            most[rank] = max(most[rank], held[rank])
            return message

        return make_and_count

    monkeypatch.setattr(process_group, "pack", counted(process_group.pack))
    monkeypatch.setattr(ring, "empty_message", counted(ring.empty_message))
    arrays = reference.inputs(batch=SIZES["batch"], heads=4, kv_heads=4, keys=32, width=8)[:4]
    mask, itemsize = {"causal": False}, 4 if dtype is None else 2
    run_ranks(attend_on_ranks, 4, hp_platform, hp_platform, arrays, mask, {}, 1, "ring", False, dtype)
    shape = AttentionShape(
        batch=SIZES["batch"], length=32, heads=4, kv_heads=4, head_dim=8, itemsize=itemsize, causal=False
    )
    (cost,) = choose_context_parallel(shape, 4, method="ring", ulysses_degree=1).costs
    # Two hops' keys and values, in and out, with a hop's gradients; later fewer, but then with the gradients of the
    # present block, which are no message.
    assert set(most.values()) == {cost.extra_bytes * share}


def test_short_documents_cost_less_to_gather_than_one_long_one():
    sizes = {"batch": 1, "length": 4096, "heads": 8, "kv_heads": 8, "head_dim": 64}
    long, packed = (AttentionShape(**sizes, documents=each) for each in (None, (512,) * 8))
    costs = [choose_context_parallel(each, 4, method="all_gather", ulysses_degree=1).best for each in (long, packed)]
    assert costs[1].forward_bytes == 0 < costs[0].forward_bytes
    assert costs[1].seconds < 0.2 * costs[0].seconds


def test_ulysses_is_chosen_where_keys_are_many_and_the_ring_where_they_are_few():
    many = AttentionShape(batch=1, length=4096, heads=32, kv_heads=32, head_dim=64)
    few = AttentionShape(batch=1, length=1 << 17, heads=32, kv_heads=1, head_dim=64)
    assert choose_context_parallel(many, 8, method="ring").best.ulysses_degree == 8
    assert choose_context_parallel(few, 8, method="ring").best.ulysses_degree == 1


def test_a_window_chooses_the_border():
    shape = AttentionShape(batch=1, length=1 << 14, heads=8, kv_heads=8, head_dim=64, window=256)
    choice = choose_context_parallel(shape, 4)
    assert choice.best.method == "all_gather"
    assert str(choice).splitlines()[1].startswith("* all_gather")


def test_refuses_a_degree_that_heads_or_ranks_do_not_have():
    shape = AttentionShape(batch=1, length=64, heads=6, kv_heads=6, head_dim=8)
    with pytest.raises(AttentionError, match=r"ulysses_degree=8 of 8 context parallel ranks and 6 heads; expected"):
        choose_context_parallel(shape, 8, ulysses_degree=8)
    with pytest.raises(AttentionError, match="expected a ulysses_degree that divides the ranks"):
        SequenceSharding(length=8, ranks=4, ulysses_degree=3)
    with pytest.raises(AttentionError, match=r"method must be one of \('ring', 'all_gather', 'ulysses'\), got 'rings'"):
        choose_context_parallel(shape, 2, method="rings")
    with pytest.raises(AttentionError, match="exchanges heads among all 2 ranks, got ulysses_degree=1"):
        choose_context_parallel(shape, 2, method="ulysses", ulysses_degree=1)
    for ranks in (0, -2):
        with pytest.raises(AttentionError, match=f"expected at least one rank, got {ranks}"):
            choose_context_parallel(shape, ranks)
    for rank in (-1, 4):
        with pytest.raises(AttentionError, match=f"rank {rank} of 4; expected one from 0 to 3"):
            SequenceSharding(length=8, ranks=4, balanced=False).indices(rank)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_head_and_tail_chunks_balance_a_causal_mask(ranks):
    sharding = SequenceSharding(length=64 * ranks, ranks=ranks)
    work = [int((sharding.indices(rank) + 1).sum()) for rank in range(ranks)]
    assert max(work) / (sum(work) / ranks) < 1.001
