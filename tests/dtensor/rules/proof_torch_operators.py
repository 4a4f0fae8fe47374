"""torch's own samples of all its operators: placements of every operand, values and gradients, several dtypes.

`nox -s proof`; `test_rules_torch_operators.py` tries a few of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.pytest_plugin import Share

torch = pytest.importorskip("torch")
operators = pytest.importorskip("torch_operators")

LONG = 7200
MESHES = ((2,), (3,), (2, 2))
PLACEMENTS_PER_SAMPLE = 60
DTYPES = ("float32", "int64", "complex64", "bfloat16")
FORMS = [(dtype, False) for dtype in DTYPES] + [("float32", True)]


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize(("dtype", "in_place"), FORMS, ids=lambda value: str(value))
@pytest.mark.parametrize("name", sorted(operators.OPERATORS))
def test_every_placement_gives_the_result_of_plain_tensors(
    hp_platform: Platform,
    hp_share: Share,
    count_cases: Callable[..., None],
    name: str,
    dtype: str,
    in_place: bool,
    mesh_shape: tuple[int, ...],
) -> None:
    """Nothing is wrong, nothing crashes, and something is taken of every operator that is not refused by name."""
    if hp_platform.name != "torch":
        pytest.skip("the samples are torch's")
    kind = getattr(torch, dtype)
    if kind not in operators.OPERATORS[name].supported_dtypes("cpu"):
        pytest.skip(f"it takes no {dtype}")
    cases = operators.cases_of(name, kind, in_place=in_place)
    if not cases:
        pytest.skip("no sample that means the same at every call")
    arguments = (hp_platform, mesh_shape, cases, PLACEMENTS_PER_SAMPLE, hp_share)
    found = run_ranks(operators.sweep, math.prod(mesh_shape), hp_platform, *arguments, timeout_seconds=LONG)
    label = f"torch's operators in {dtype}{', in place' if in_place else ''}"
    count_cases(label, min(sum(each.right.values()) for each in found), 0)
    assert [problem for each in found for problem in each.wrong] == []
    assert name in operators.REFUSED or found[0].accepts_sharded(), found[0].refused[:3]
