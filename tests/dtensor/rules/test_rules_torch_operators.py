"""A few placements of one sample of some of torch's operators; `proof_torch_operators.py` has all of them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor, explicit_redistribution, implicit_replication
from hp_dtensor.comm_debug import CommDebugMode
from hp_dtensor.exceptions import ImplicitRedistributionError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

torch = pytest.importorskip("torch")

EVERY = 15  # of the operators one in so many
SHARES = 10
ALWAYS = """
    addbmm cross diff fft.fft fft.irfftn gather index_fill index_put linalg.cross linalg.lu_factor linalg.norm
    masked_scatter nn.functional.multi_margin_loss nn.functional.multilabel_margin_loss nn.functional.nll_loss
    searchsorted sgn special.i1e take_along_dim tensor_split
""".split()


@pytest.fixture(autouse=True)
def _torch_only(hp_platform: Platform) -> None:
    if hp_platform.name != "torch":
        pytest.skip("the samples are torch's")


@pytest.fixture
def operators() -> ModuleType:
    """torch's samples. Imported by a test, because each worker would take ten seconds when it collects the tests."""
    return importlib.import_module("torch_operators")


@pytest.mark.parametrize("share", range(SHARES))
def test_results_and_gradients_are_those_of_plain_tensors(
    hp_platform: Platform, operators: ModuleType, share: int
) -> None:
    some = sorted({*sorted(operators.OPERATORS)[::EVERY], *ALWAYS})
    for name in some[share::SHARES]:
        if torch.float32 in operators.OPERATORS[name].supported_dtypes("cpu"):
            samples, placements = (None, 4) if name in ALWAYS else (2, 3)
            cases = operators.cases_of(name, samples=samples)
            found = run_ranks(operators.sweep, 2, hp_platform, hp_platform, (2,), cases, placements)
            assert [problem for each in found for problem in each.wrong] == [], name
            assert name in operators.REFUSED or found[0].accepts_sharded(), (name, found[0].refused[:3])


def test_integers_in_place_and_short_floats(hp_platform: Platform, operators: ModuleType) -> None:
    forms = [("addbmm", torch.int64, False), ("gcd", torch.int64, True), ("masked_scatter", torch.float32, True)]
    forms += [
        ("unravel_index", torch.int64, False),
        ("mean", torch.complex64, False),
        ("matmul", torch.bfloat16, False),
        ("addbmm", torch.float32, True),
    ]
    for name, dtype, in_place in forms:
        cases = operators.cases_of(name, dtype, in_place=in_place, samples=3)
        found = run_ranks(operators.sweep, 2, hp_platform, hp_platform, (2,), cases, 6)
        assert cases
        assert [problem for each in found for problem in each.wrong] == []
        assert found[0].right[True]


def _sharded(platform: Platform, x: Any, dim: int = 0) -> Any:
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    return distribute_tensor(x, mesh, [Shard(dim)], src_data_rank=None)


def test_what_is_computed_whole_is_told(hp_platform: Platform) -> None:
    """A gather is counted, and refused where only explicit redistribution is allowed."""

    def rank() -> None:
        x = torch.arange(12.0).reshape(4, 3)
        with CommDebugMode() as seen:
            result = torch.cov(_sharded(hp_platform, x))
        assert result.placements == (Replicate(),)
        assert torch.equal(result.to_local(), torch.cov(x))
        assert seen.get_comm_counts() == {"all_gather": 1}
        with explicit_redistribution(), pytest.raises(ImplicitRedistributionError, match="cov"):
            torch.cov(_sharded(hp_platform, x))

    run_ranks(rank, 2, hp_platform)


def test_the_norm_of_a_parameter_along_a_dimension(hp_platform: Platform) -> None:
    def rank() -> None:
        x = torch.arange(12.0).reshape(4, 3)
        for dim in (None, 0, 1, -1):
            parameter = torch.nn.Parameter(_sharded(hp_platform, x))
            result = torch.linalg.norm(parameter, dim=dim)
            torch.testing.assert_close(result.full_tensor(), torch.linalg.norm(x, dim=dim))

    run_ranks(rank, 2, hp_platform)


def test_implicit_replication_of_a_cache_joined_along_a_negative_dimension(hp_platform: Platform) -> None:
    def rank() -> None:
        new, cache = torch.ones(4, 1, 3), torch.zeros(4, 2, 3)
        with implicit_replication():
            joined = torch.cat([cache, _sharded(hp_platform, new)], dim=-2)
        assert torch.equal(joined.full_tensor(), torch.cat([cache, new], dim=-2))

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32"])
def test_dtypes_that_numpy_does_not_know(hp_platform: Platform, dtype: str) -> None:
    kind = getattr(torch, dtype)

    def rank() -> None:
        x = torch.arange(8).reshape(4, 2).to(kind)
        sharded = _sharded(hp_platform, x)
        assert sharded.dtype == kind
        full = sharded.full_tensor()
        assert full.dtype == kind
        assert torch.equal(full.float(), x.float())

    run_ranks(rank, 2, hp_platform)
