"""Every sharding rule in full size: all placements of all arguments, values and gradients, on 1-D and 2-D meshes.

`nox -s proof`; the tests try a few placements of the same calls. Where a call has more than `MOST` combinations of
placements on a mesh (four tensors on two axes have millions), as many are taken, spread evenly over all.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hp_dtensor.platform import Platform
from hp_dtensor.testing import dimension_samples, network_samples, operation_samples, rule_samples, run_ranks
from hp_dtensor.testing.rule_proof import is_there, prove
from hp_dtensor.testing.rule_samples import Sample

MOST = 2000
MESHES = ((2,), (3,), (4,), (2, 2), (2, 3))
FORMS = Path(__file__).parents[2] / "packages" / "hp-platform-torch" / "tests" / "test_torch_rules.py"


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


SAMPLES = [
    *rule_samples.SAMPLES,
    *operation_samples.SAMPLES,
    *dimension_samples.SAMPLES,
    *network_samples.SAMPLES,
    *(_forms_of_torch()),
]


@pytest.fixture(scope="module")
def counted(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """Cases tried; shown at the end with the time they took."""
    cases: list[int] = []
    started = time.monotonic()
    yield cases
    terminal = request.config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None:
        terminal.write_line(
            f"\nproof of operations: {sum(cases)} cases of {len(cases)} calls, {time.monotonic() - started:.0f} s"
        )


@pytest.mark.parametrize("mesh_shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_every_placement_gives_the_result_of_one_device(
    hp_platform: Platform, counted: list[int], sample: Sample, mesh_shape: tuple[int, ...]
) -> None:
    if not is_there(hp_platform, sample):
        pytest.skip(f"{hp_platform.name} has no such operation here")
    reports = run_ranks(
        prove, math.prod(mesh_shape), hp_platform, hp_platform, mesh_shape, [sample], MOST, timeout_seconds=3600
    )
    counted.append(reports[0].tried)
    assert [problem for report in reports for problem in report.wrong] == []
    assert reports[0].refused == []
