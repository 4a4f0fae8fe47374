"""Every rule has a sample, and a few placements of each sample are tried; `nox -s proof` tries all of them."""

from __future__ import annotations

from hp_dtensor.dispatch.plan_cache import forget_plans, planned_operations
from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.testing import all_samples, rule_samples
from hp_dtensor.testing.rule_proof import provable, prove
from hp_dtensor.testing.simulated import run_ranks

RANKS = 4  # of which the last holds nothing of five rows
PLACEMENTS_PER_SAMPLE = 4


def test_every_rule_has_a_sample_that_holds(hp_platform: Platform) -> None:
    """On a platform that has the operation at all."""
    forget_plans()
    tried = [provable(hp_platform, sample) for sample in all_samples.OPERATIONS]
    samples = [sample for sample in tried if sample is not None]
    reports = run_ranks(prove, RANKS, hp_platform, hp_platform, (RANKS,), samples, PLACEMENTS_PER_SAMPLE)
    assert [problem for report in reports for problem in report.wrong] == []
    assert reports[0].refused == []
    run_ranks(prove, 2, hp_platform, hp_platform, (2,), rule_samples.SAMPLES, 1)
    run = planned_operations()
    run |= {sample.name.split()[0] for sample in (*samples, *rule_samples.SAMPLES)}
    names = [name for name in rule_registry().names() if not getattr(rule_registry().get(name), "whole", False)]
    there = [name for name in names if hp_platform.operation(name) is not None]
    print(f"{len(names)} rules, {len(there)} on {hp_platform.name}, {len(run & set(names))} of them with samples")
    missing = " ".join(name for name in there if name not in run)
    assert missing == ""
