from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """On MindSpore, keep this process and the ranks that it starts on one core.

    The threads of MindSpore's pool and of its collectives spin when they have nothing to do. On one core they give it
    up at once; elsewhere they take the cores of other workers and ranks, and everything takes two to three times
    as long.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker and config.getoption("numprocesses", None):
        return  # its workers choose; they would be left with the one core of this process
    if (config.getoption("--hp-platform", None) or os.environ.get("HP_PLATFORM")) == "mindspore":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(int(worker) if worker else os.getpid()) % len(cores)]})
