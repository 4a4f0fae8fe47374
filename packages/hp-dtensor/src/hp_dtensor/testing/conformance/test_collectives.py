"""Every collective, on every dtype that the platform claims, on simulated and on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing.conformance import collective_programs as programs
from hp_dtensor.testing.conformance.ranks import Ranks


def test_ranks_are_numbered(ranks: Ranks) -> None:
    everyone = tuple(range(ranks.size))
    assert ranks.run(programs.where_am_i) == [(rank, ranks.size, everyone) for rank in everyone]


@pytest.mark.parametrize("check", [programs.check_all_reduce, programs.check_reduce_scatter])
def test_reductions(ranks: Ranks, hp_platform: Platform, check: Callable[..., Any], reduced_dtype: str) -> None:
    averages = ("avg",) if hp_platform.is_floating(hp_platform.dtype(reduced_dtype)) else ()
    for op in ("sum", "max", "min", "product", *averages):
        ranks.run(check, reduced_dtype, op)


@pytest.mark.parametrize(
    "check",
    [
        programs.check_all_gather,
        programs.check_all_to_all,
        programs.check_exchange,
        programs.check_broadcast,
        programs.check_messages,
    ],
)
def test_moves(ranks: Ranks, check: Callable[..., Any], moved_dtype: str) -> None:
    ranks.run(check, moved_dtype)


def test_bytes_of_any_length_and_barriers(ranks: Ranks) -> None:
    ranks.run(programs.check_bytes)


def test_collectives_of_several_groups_under_way_together(ranks: Ranks) -> None:
    ranks.run(programs.check_many_at_once)
