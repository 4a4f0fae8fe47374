"""Every redistribution in full size: all pairs of placements on 2-D and 3-D meshes, also of uneven and empty shards.

`nox -s proof`. Values, gradients and bytes are compared; with and without a flattened alias of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, StridedShard
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.conformance.test_redistribution import redistributed_in_batches
from hp_dtensor.testing.pytest_plugin import Share
from hp_dtensor.testing.rule_proof import prove_redistribution

LONG = 7200
MORE: tuple[Placement, ...] = (StridedShard(0, 2), Partial("avg"), RaggedShard(0, (3, 1)), RaggedShard(1, (1, 2)))
CASES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...], bool]] = [
    *(((2, 2), shape, (), flat) for shape in ((6, 4), (5, 3), (2, 4), (1, 3), (0, 2)) for flat in (False, True)),
    *(((2, 2), shape, MORE, False) for shape in ((4, 3), (8, 3))),
    *(((2, 3), shape, (), flat) for shape in ((6, 4), (5, 3), (7, 2)) for flat in (False, True)),
    *(((3, 2), shape, (), flat) for shape in ((6, 4), (5, 3)) for flat in (False, True)),
    *(((2, 2, 2), shape, (), flat) for shape in ((8, 4), (5, 3), (3, 2)) for flat in (False, True)),
]


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize(("mesh_shape", "shape", "more", "flattened"), CASES)
def test_every_pair_keeps_values_and_gradients_and_sends_the_planned_bytes(
    hp_platform: Platform,
    hp_share: Share,
    count_cases: Callable[..., None],
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    more: tuple[Placement, ...],
    flattened: bool,
) -> None:
    arguments = (hp_platform, mesh_shape, shape, more, None, flattened, hp_share)
    size = math.prod(mesh_shape)
    reports = run_ranks(prove_redistribution, size, hp_platform, *arguments, timeout_seconds=LONG)
    wrong = [problem for report in reports for problem in report.wrong]
    if not wrong:
        label = f"redistributions on {hp_platform.name}, mesh {'x'.join(map(str, mesh_shape))}"
        count_cases(f"{label}{' with a flattened alias' if flattened else ''}", reports[0].tried)
    assert wrong == []
    sent = np.mean([report.sent for report in reports], axis=0)
    np.testing.assert_allclose(sent, np.mean([report.planned for report in reports], axis=0), atol=1e-6)


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("size", [3, 4, 6])
def test_batches_are_the_same_redistributions(hp_platform: Platform, size: int) -> None:
    run_ranks(redistributed_in_batches, size, hp_platform, hp_platform, None, timeout_seconds=LONG)
