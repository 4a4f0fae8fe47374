"""Every sharding rule against the unsharded operation."""

from __future__ import annotations

import math

import pytest

from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing.rule_proof import prove
from hp_dtensor.testing.rule_samples import SAMPLES, Sample
from hp_dtensor.testing.simulated import run_ranks

PLACEMENTS_PER_SAMPLE = {(2,): None, (3,): 24, (2, 2): 24}


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_rule_gives_the_unsharded_result_and_gradients(hp_platform: Platform, sample: Sample) -> None:
    for mesh_shape, limit in PLACEMENTS_PER_SAMPLE.items():
        reports = run_ranks(prove, math.prod(mesh_shape), hp_platform, hp_platform, mesh_shape, [sample], limit)
        assert reports[0].right
        assert [problem for report in reports for problem in report.wrong] == []
        assert reports[0].refused == []
