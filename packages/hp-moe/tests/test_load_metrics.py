from __future__ import annotations

from hp_moe import LoadMetrics


def test_even_load():
    assert LoadMetrics.of([5, 5, 5]) == LoadMetrics(15, 0.0, 1.0, 0.0, 0)


def test_uneven_load():
    metrics = LoadMetrics.of([0, 2, 6, 0])
    assert (metrics.tokens, metrics.max_violation, metrics.min_ratio, metrics.idle_experts) == (8, 2.0, 0.0, 2)
    assert metrics.coefficient_of_variation == (6.0**0.5) / 2


def test_nothing_counted():
    assert LoadMetrics.of([0, 0]) == LoadMetrics(0, 0.0, 0.0, 0.0, 2)
