from __future__ import annotations

import pytest

from hp_moe import LoadMetrics


def test_even_load():
    assert LoadMetrics.of([5, 5, 5]) == LoadMetrics(15, 0.0, 1.0, 0.0, 0, pytest.approx(1.0), loads=(5, 5, 5))


def test_uneven_load():
    metrics = LoadMetrics.of([0, 2, 6, 0], dropped=3, sent_bytes=40)
    assert (metrics.tokens, metrics.max_violation, metrics.min_ratio, metrics.idle_experts) == (8, 2.0, 0.0, 2)
    assert metrics.coefficient_of_variation == (6.0**0.5) / 2
    assert (metrics.dropped, metrics.sent_bytes, metrics.loads) == (3, 40, (0, 2, 6, 0))


@pytest.mark.parametrize(("loads", "entropy"), [([4, 4, 0, 0], 0.5), ([8, 0, 0, 0], 0.0), ([7], 1.0)])
def test_entropy_over_that_of_an_even_load(loads, entropy):
    assert LoadMetrics.of(loads).entropy == pytest.approx(entropy)


def test_nothing_counted():
    assert LoadMetrics.of([0, 0]) == LoadMetrics(0, 0.0, 0.0, 0.0, 2, loads=(0, 0))
