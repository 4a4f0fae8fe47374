"""Every sharding rule against the unsharded operation, in some placements; `nox -s proof` tries all of them."""

from __future__ import annotations

import math

import pytest

from hp_dtensor.dispatch.operation import forget_plans, planned_operations
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.testing import all_samples, rule_samples
from hp_dtensor.testing.rule_proof import provable, prove
from hp_dtensor.testing.rule_samples import SAMPLES, Sample
from hp_dtensor.testing.simulated import run_ranks

# All on two ranks. Three leave an uneven shard of the samples' 5 rows and an empty one of their 4 columns, and two axes
# nest shards. Their combinations are many, so a random part of them is run.
PLACEMENTS_PER_SAMPLE = {(2,): None, (3,): 12, (2, 2): 12}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_rule_gives_the_unsharded_result_and_gradients(hp_platform: Platform, sample: Sample) -> None:
    for mesh_shape, limit in PLACEMENTS_PER_SAMPLE.items():
        reports = run_ranks(prove, math.prod(mesh_shape), hp_platform, hp_platform, mesh_shape, [sample], limit)
        assert reports[0].right
        assert [problem for report in reports for problem in report.wrong] == []
        assert reports[0].refused == []


RANKS = 4  # of which the last holds nothing of five rows
FEW_PLACEMENTS = 2


def test_every_rule_has_a_sample_that_holds(hp_platform: Platform) -> None:
    """On a platform that has the operation at all."""
    # Plans cached by earlier tests would count as samples.
    forget_plans()
    tried = [provable(hp_platform, sample) for sample in all_samples.OPERATIONS]
    samples = [sample for sample in tried if sample is not None]
    reports = run_ranks(prove, RANKS, hp_platform, hp_platform, (RANKS,), samples, FEW_PLACEMENTS)
    assert [problem for report in reports for problem in report.wrong] == []
    assert reports[0].refused == []
    # One case of each is enough here: the operations only have to be planned once to be counted below.
    run_ranks(prove, 2, hp_platform, hp_platform, (2,), rule_samples.SAMPLES, 1)
    run = planned_operations()
    run |= {sample.name.split()[0] for sample in (*samples, *rule_samples.SAMPLES)}
    names = [name for name in rule_registry().names() if not getattr(rule_registry().get(name), "replicated", False)]
    there = [name for name in names if hp_platform.operation(name) is not None]
    missing = " ".join(name for name in there if name not in run)
    assert missing == ""
