"""Pytest options and fixtures for tests that need a platform or real ranks.

Loaded by every pytest that finds hp-dtensor installed, so it imports nothing heavy before a test asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hp_dtensor.launch import RankPool
    from hp_dtensor.platform import Platform


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hp", "platforms of hp_dtensor")
    group.addoption(
        "--hp-platform",
        metavar="NAME",
        help="platform to test with (default: HP_PLATFORM, else the only one installed)",
    )
    group.addoption(
        "--hp-ranks",
        choices=("all", "simulated", "real"),
        default="all",
        help="where the conformance suite runs collectives: simulated ranks, real processes, or all (default)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_ranks: starts processes")


@pytest.fixture(scope="session")
def hp_platform(pytestconfig: pytest.Config) -> Platform:
    """The platform under test."""
    from hp_dtensor.selection import get_platform

    return get_platform(pytestconfig.getoption("--hp-platform"))


@pytest.fixture(scope="session")
def rank_pool(hp_platform: Platform) -> Iterator[Callable[[int], RankPool]]:
    """`rank_pool(n).run("module:function", *args)`: real ranks of `hp_platform`, started once per session and size."""
    from hp_dtensor.launch import RankPool

    pools: dict[int, RankPool] = {}

    def pool_of(num_ranks: int) -> RankPool:
        if num_ranks not in pools:
            pools[num_ranks] = RankPool(hp_platform, num_ranks)
        return pools[num_ranks]

    yield pool_of
    for pool in pools.values():
        pool.close()
