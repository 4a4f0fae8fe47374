"""Every sharding rule against the unsharded operation, in some placements; `nox -s proof` tries all of them."""

from __future__ import annotations

import math

import pytest

from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import all_samples
from hp_dtensor.testing.pytest_plugin import Share
from hp_dtensor.testing.rule_proof import provable, prove
from hp_dtensor.testing.rule_samples import SAMPLES, Sample
from hp_dtensor.testing.simulated import run_ranks

# All on two ranks. Three leave an uneven shard of the samples' 5 rows and an empty one of their 4 columns, and two axes
# nest shards. Their combinations are many, so a random part of them is run.
PLACEMENTS_PER_SAMPLE = {(2,): None, (3,): 12, (2, 2): 6}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_rule_gives_the_unsharded_result_and_gradients(hp_platform: Platform, hp_share: Share, sample: Sample) -> None:
    for mesh_shape, limit in PLACEMENTS_PER_SAMPLE.items():
        arguments = (hp_platform, mesh_shape, [sample], limit, hp_share)
        reports = run_ranks(prove, math.prod(mesh_shape), hp_platform, *arguments)
        assert reports[0].right
        assert [problem for report in reports for problem in report.wrong] == []
        assert reports[0].refused == []


RANKS = 4  # of which the last holds nothing of five rows
FEW_PLACEMENTS = 2


@pytest.mark.parametrize("sample", all_samples.OPERATIONS, ids=lambda sample: sample.name)
def test_rule_of_the_frameworks_operation_holds(hp_platform: Platform, sample: Sample) -> None:
    """On a platform that has the operation at all."""
    tried = provable(hp_platform, sample)
    if tried is None:
        return
    reports = run_ranks(prove, RANKS, hp_platform, hp_platform, (RANKS,), [tried], FEW_PLACEMENTS)
    assert [problem for report in reports for problem in report.wrong] == []
    assert reports[0].refused == []
