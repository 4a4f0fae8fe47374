"""Samples of every sharding rule, those of torch's own operations among them."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
from torch_samples import TORCH_SAMPLES

from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.testing import all_samples, run_ranks
from hp_dtensor.testing.rule_proof import prove
from hp_dtensor.testing.rule_samples import Sample

RANKS = 4  # of which the last holds nothing of five rows


@pytest.mark.parametrize("sample", TORCH_SAMPLES, ids=lambda sample: sample.name)
def test_rules_of_torchs_own_operations_hold(hp_platform: Platform, sample: Sample) -> None:
    if hp_platform.name != "torch":
        pytest.skip("operations of torch")
    reports = run_ranks(prove, RANKS, hp_platform, hp_platform, (RANKS,), [sample], 2)
    assert [problem for report in reports for problem in report.wrong] == []
    assert reports[0].refused == []


def test_every_rule_has_a_sample(hp_platform: Platform) -> None:
    names = [name for name in rule_registry().names() if not getattr(rule_registry().get(name), "replicated", False)]
    sampled = sampled_operations()
    missing = [name for name in names if name not in sampled and hp_platform.operation(name) is not None]
    assert " ".join(missing) == ""


def sampled_operations() -> set[str]:
    """Return the names of the operations that any sample runs, as its name says or as it finds them in `ops`."""
    names: set[str] = set()

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            names.add(name)
            return MagicMock()

    for sample in (*all_samples.SAMPLES, *TORCH_SAMPLES):
        names.add(sample.name.split()[0])
        sample.call(Recorder(), *(MagicMock() for _ in sample.shapes))
    return names
