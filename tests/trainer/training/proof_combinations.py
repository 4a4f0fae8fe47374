"""All combinations of parallel axes up to eight simulated ranks train as one rank does, bit by bit the same each time.

Those of up to four ranks do on processes too. 20 steps of each, and the first five once more. They take hours: parts of
them, each drawn from all, are chosen by `--hp-share N/M`.
"""

from __future__ import annotations

import pytest
from combinations import all_combinations, check, covering, pairs_of

from hp_dtensor.testing.pytest_plugin import Share, chosen

ALL = all_combinations()
SAMPLE = list(covering(ALL, pairs_of))
CASES = {
    "test_the_pairwise_sample": SAMPLE,
    "test_all_others": [each for each in ALL if each not in set(SAMPLE)],
    "test_processes": [each for each in ALL if each.num_ranks <= 4],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    share = Share.parse(metafunc.config.getoption("--hp-share"))
    metafunc.parametrize("combination", chosen(CASES[metafunc.function.__name__], share=share), ids=str)


def test_the_pairwise_sample(lab, combination):
    check(lab, combination, steps=20, repeated=5)


def test_all_others(lab, combination):
    check(lab, combination, steps=20, repeated=5)


def test_processes(lab, rank_pool, combination):
    check(lab, combination, steps=20, repeated=5, pool=rank_pool)
