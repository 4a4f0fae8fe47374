"""Every sharding rule in full size: all placements of all arguments, values and gradients, on 1-D and 2-D meshes.

`nox -s proof`; the tests try a few placements of the same calls.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from torch_samples import TORCH_SAMPLES

from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import all_samples, run_ranks
from hp_dtensor.testing.pytest_plugin import Share
from hp_dtensor.testing.rule_proof import provable, prove
from hp_dtensor.testing.rule_samples import Sample

LONG = 7200
MESHES = ((2,), (3,), (4,), (6,), (2, 2), (2, 3))
FORMS = Path(__file__).parents[3] / "packages" / "hp-platform-torch" / "tests" / "test_torch_rules.py"


def _forms_of_torch() -> list[Sample]:
    """torch's own functions, methods and operators, where torch is installed."""
    if importlib.util.find_spec("torch") is None:
        return []
    spec = importlib.util.spec_from_file_location("torch_forms", FORMS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.SAMPLES)


SAMPLES = [*all_samples.SAMPLES, *TORCH_SAMPLES, *_forms_of_torch()]


PLACEMENTS_PER_SAMPLE = 200


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2)], ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_strided_shards_give_the_result_of_one_device(
    hp_platform: Platform, hp_share: Share, sample: Sample, mesh_shape: tuple[int, ...]
) -> None:
    tried = provable(hp_platform, sample)
    if tried is None:
        pytest.skip(f"{hp_platform.name} has no such operation here")
    arguments = (hp_platform, mesh_shape, [tried], PLACEMENTS_PER_SAMPLE, hp_share, True)
    ranks = math.prod(mesh_shape)
    reports = run_ranks(prove, ranks, hp_platform, *arguments, timeout_seconds=LONG)
    assert [problem for report in reports for problem in report.wrong] == []
    assert reports[0].refused == []


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_every_placement_gives_the_result_of_one_device(
    hp_platform: Platform,
    hp_share: Share,
    count_cases: Callable[..., None],
    sample: Sample,
    mesh_shape: tuple[int, ...],
) -> None:
    tried = provable(hp_platform, sample)
    if tried is None:
        pytest.skip(f"{hp_platform.name} has no such operation here")
    arguments = (hp_platform, mesh_shape, [tried], None, hp_share)
    reports = run_ranks(prove, math.prod(mesh_shape), hp_platform, *arguments, timeout_seconds=LONG)
    label = f"operations on {hp_platform.name}, mesh {'x'.join(map(str, mesh_shape))}"
    count_cases(label, min(report.right for report in reports), reports[0].declared)
    assert [problem for report in reports for problem in report.wrong] == []
    assert reports[0].refused == []
