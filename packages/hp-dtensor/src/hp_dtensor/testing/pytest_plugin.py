"""Pytest options and fixtures for tests that need a platform or real ranks, and shares of long tests.

Loaded by every pytest run that finds hp-dtensor installed, so it imports nothing heavy before a test asks for it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from hp_dtensor.launch import RankPool
    from hp_dtensor.launch.fork_server import ForkServer
    from hp_dtensor.platform.interface import Platform


_FIRST_PORT = 10_000  # below are the ports of system services


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
    group.addoption(
        "--hp-share",
        metavar="N/M",
        default="1/1",
        help="of the cases of each proof only share N of M equal ones, to split it over machines (default: all)",
    )
    group.addoption(
        "--hp-one-core",
        action="store_true",
        help="keep this process, or each worker of pytest-xdist, and the ranks that it starts on one core: for "
        "platforms whose threads spin when they have nothing to do, as MindSpore's on CPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "real_ranks: starts processes")
    config.addinivalue_line("markers", "dtypes(names): skipped if the platform under test lacks one of these dtypes")
    # pytest-xdist's own process is left alone: its workers would inherit its one core.
    if config.getoption("--hp-one-core") and not config.getoption("numprocesses", None):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        cores = sorted(os.sched_getaffinity(0))
        # Without workers by process id, so that several runs on one machine spread over its cores.
        number = int(worker.removeprefix("gw")) if worker else os.getpid()
        os.sched_setaffinity(0, {cores[number % len(cores)]})


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked with dtypes if the platform lacks one of them."""
    names = [name for mark in item.iter_markers("dtypes") for name in mark.args]
    if names:
        platform = _platform_of(item.config)
        for name in names:
            if not platform.has_dtype(name):
                pytest.skip(f"platform {platform.name} has no {name}")


def dtype_params(*cases: Any) -> list[Any]:
    """Return parameters, each a dtype's name or a tuple that starts with one, skipped if the platform lacks it."""
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*value, marks=pytest.mark.dtypes(value[0])) for value in values]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a worker of pytest-xdist, run tests that start processes first, then those with the shared `rank_pool`.

    They take longest, so running them last would leave other workers idle. Workers get consecutive tests, so few
    workers start a rank pool.
    """
    # Not PYTEST_XDIST_WORKER: a pytest that a test starts inherits the variable.
    if hasattr(config, "workerinput"):

        def turn(item: pytest.Item) -> int:
            if "rank_pool" in getattr(item, "fixturenames", ()):
                return 1
            return 2 if item.get_closest_marker("real_ranks") is None else 0

        items.sort(key=turn)


@pytest.fixture(scope="session")
def hp_share(pytestconfig: pytest.Config) -> Share:
    """The share of a proof's cases to run (`--hp-share`)."""

    try:
        return Share.parse(pytestconfig.getoption("--hp-share"))
    except ValueError as error:
        raise pytest.UsageError(f"--hp-share: {error}") from None


@pytest.fixture(scope="session")
def hp_platform(pytestconfig: pytest.Config) -> Platform:
    """The platform under test."""
    return _platform_of(pytestconfig)


def _platform_of(config: pytest.Config) -> Platform:
    from hp_dtensor.platform.selection import get_platform

    return get_platform(config.getoption("--hp-platform"))


@pytest.fixture(scope="session")
def imported_modules() -> Sequence[str]:
    """Modules that `fork_server` imports beside the framework; overridden by tests that start such processes often."""
    return ()


@pytest.fixture(scope="session")
def fork_server(hp_platform: Platform, imported_modules: Sequence[str]) -> Iterator[ForkServer]:
    """Starts Python processes that have imported the framework already."""
    from hp_dtensor.launch.fork_server import ForkServer

    server = ForkServer(hp_platform.name, imported_modules)
    yield server
    server.close()


@pytest.fixture
def forked_ranks(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch` and `RankPool` fork their ranks in this test, for tests of other things than the start."""
    from hp_dtensor.launch import local_ranks

    monkeypatch.setattr(local_ranks, "start_process", fork_server.popen)


@pytest.fixture(scope="session")
def rank_pool(hp_platform: Platform, fork_server: ForkServer) -> Iterator[Callable[[int], RankPool]]:
    """`rank_pool(n).run("module:function", *args)`: real ranks of `hp_platform`, started once per session and size."""
    from hp_dtensor.launch.fork_server import ForkedRankPool

    pools: dict[int, RankPool] = {}

    def pool_of(num_ranks: int) -> RankPool:
        if num_ranks not in pools:
            pools[num_ranks] = ForkedRankPool(hp_platform, num_ranks, fork_server)
        return pools[num_ranks]

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """`free_port()`: a free port that the system does not assign, and that stays free until a slow process binds it."""
    first_assigned = 32768  # Linux's default
    with contextlib.suppress(OSError, ValueError, IndexError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        first_assigned = max(first, _FIRST_PORT + 1000)
    # Not `random`, which tests seed: two runs on one machine would try the same ports.
    numbers = random.SystemRandom()

    def find() -> int:
        while True:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", numbers.randrange(_FIRST_PORT, first_assigned)))
                port: int = probe.getsockname()[1]
                return port

    return find


Case = TypeVar("Case")


@dataclass(frozen=True)
class Share:
    """Share `number` (from 1) of `count` disjoint, nearly equal shares that together are all cases."""

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError(f"expected a share N/M with 1 <= N <= M, such as 2/4; got {self}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Share:
        """Return the share that text such as `2/4` names; another form raises a ValueError."""
        try:
            number, count = map(int, text.split("/"))
        except ValueError:
            raise ValueError(f"expected a share N/M, such as 2/4; got {text!r}") from None
        return cls(number, count)


ALL = Share()


def chosen(cases: Sequence[Case], limit: int | None = None, share: Share = ALL) -> list[Case]:
    """Return a reproducible random sample of at most `limit` cases, or a share of it, in their order."""
    drawn = list(range(len(cases)))
    if share.count > 1 or (limit is not None and limit < len(cases)):
        random.Random(len(cases)).shuffle(drawn)
    # Strided after shuffling: shares differ in size by at most one, and machines need only agree on N and M.
    return [cases[i] for i in sorted(drawn[:limit][share.number - 1 :: share.count])]
