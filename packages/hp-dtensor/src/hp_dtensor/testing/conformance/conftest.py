"""Fixtures: simulated and real ranks, the dtypes of the platform's collectives, and its framework's own functions."""

from __future__ import annotations

from typing import Any

import pytest

from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.testing.conformance.ranks import Ranks
from hp_dtensor.testing.conformance.test_own_functions import own_calls

# With 3 and 5 ranks, most lengths leave uneven or empty shards. Real ranks cost a process each, so two sizes must do.
SIMULATED_SIZES = (2, 3, 5)
REAL_SIZES = (2, 4)


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest, hp_platform: Platform) -> Ranks:
    kind, size = request.param
    return Ranks(size, hp_platform, request.getfixturevalue("rank_pool")(size) if kind == "real" else None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # Parametrized here and not in the fixture, because the values depend on command-line options and on the platform.
    if "ranks" in metafunc.fixturenames:
        metafunc.parametrize("ranks", _rank_parameters(metafunc.config), indirect=True)
    if "own_call" in metafunc.fixturenames:
        calls = own_calls(get_platform(metafunc.config.getoption("--hp-platform")))
        metafunc.parametrize("own_call", calls, ids=[call.name for call in calls])
    # Their modules do without pytest, so that `hp-train doctor` can run these checks where it is not installed.
    for name in ("reduction_check", "move_check", "dual_check"):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, getattr(metafunc.module, f"{name.upper()}S"))
    for reducing, name in ((False, "moved_dtype"), (True, "reduced_dtype")):
        if name in metafunc.fixturenames:
            platform = get_platform(metafunc.config.getoption("--hp-platform"))
            metafunc.parametrize(name, platform.collective_dtypes(reducing))


def _rank_parameters(config: pytest.Config) -> list[Any]:
    wanted = config.getoption("--hp-ranks")
    kinds = {"simulated": SIMULATED_SIZES, "real": REAL_SIZES}
    return [
        pytest.param((kind, size), id=f"{size} {kind}", marks=pytest.mark.real_ranks if kind == "real" else ())
        for kind, sizes in kinds.items()
        if wanted in ("all", kind)
        for size in sizes
    ]
