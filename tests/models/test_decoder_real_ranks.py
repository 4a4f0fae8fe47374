"""The decoder on real processes; the layouts are tested one by one on simulated ranks."""

from __future__ import annotations

import pytest
from decoder_training import train_decoder
from test_decoder_layouts import FOLDED, FOUR, assert_same, one_rank

pytestmark = pytest.mark.real_ranks

TWO = {
    "weights sharded": {"dp_shard": 2, "world_size": 2},
    "weights sharded, experts spread": {"dp_shard": 2, "ep": 2, "world_size": 2},
    "tensor parallel, experts spread": {"tp": 2, "ep": 2, "world_size": 2},
}


@pytest.mark.parametrize("name", TWO)
def test_two_processes(rank_pool, name):
    assert_same(rank_pool(2).run(train_decoder, TWO[name]), one_rank())


@pytest.mark.parametrize("degrees", [FOUR, FOLDED], ids=["experts cut", "experts folded"])
def test_four_processes(rank_pool, degrees):
    assert_same(rank_pool(4).run(train_decoder, degrees), one_rank())
