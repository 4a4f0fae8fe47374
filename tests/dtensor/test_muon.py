"""Muon on sharded matrices: the single-device numbers bit for bit, and each matrix worked on once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    from_local,
    record_collectives,
)
from hp_dtensor.exceptions import PlacementError
from hp_dtensor.muon import Muon, MuonOptions, assign_owners, at_owners
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

SHAPES = [(5, 3), (4, 6), (7, 7), (2, 9), (1, 4)]
LAYOUTS: dict[str, tuple[tuple[int, ...], list[tuple[Placement, ...]]]] = {
    "rows": ((3,), [(Shard(0),)] * 5),
    "columns": ((2,), [(Shard(1),)] * 5),
    "mixed": ((2,), [(Shard(0),), (Shard(1),), (Replicate(),), (RaggedShard(0, (2, 0)),), (Shard(0),)]),
    "two axes": (
        (2, 2),
        [
            (Replicate(), Shard(0)),
            (Shard(0), Shard(1)),
            (StridedShard(0, 2), Shard(0)),
            (Shard(1), Shard(1)),
            (Replicate(), Replicate()),
        ],
    ),
}
OPTIONS = MuonOptions(compute_dtype="float32", weight_decay=0.2)
STEPS = 5


def _arrays(step: int) -> list[np.ndarray]:
    rng = np.random.default_rng(step)
    return [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]


def _train(platform: Platform, parameters: Sequence[Any], place: Any, options: MuonOptions = OPTIONS) -> list[Any]:
    named = {f"w{i}": platform.Parameter(x) for i, x in enumerate(parameters)}
    optimizer = Muon(named.items(), options, platform=platform)
    for step in range(1, STEPS + 1):
        for parameter, grad in zip(named.values(), place(_arrays(step)), strict=True):
            platform.set_grad(parameter, grad)
        optimizer.step(0.1)
        optimizer.zero_grad()
    assert optimizer.num_steps == STEPS
    assert all(platform.get_grad(x) is None for x in named.values())
    return list(named.values())


def _plain(platform: Platform, options: MuonOptions = OPTIONS) -> list[np.ndarray]:
    def place(arrays: list[np.ndarray]) -> list[Any]:
        return [platform.from_numpy(x.copy()) for x in arrays]

    return [platform.to_numpy(x) for x in _train(platform, place(_arrays(0)), place, options)]


def _sharded(platform: Platform, layout: str) -> list[np.ndarray]:
    shape, placements = LAYOUTS[layout]
    mesh = DeviceMesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)], platform=platform)

    def place(arrays: list[np.ndarray]) -> list[Any]:
        return [
            distribute_tensor(platform.from_numpy(x.copy()), mesh, p, src_data_rank=None)
            for x, p in zip(arrays, placements, strict=True)
        ]

    return [platform.to_numpy(x.full_tensor()) for x in _train(platform, place(_arrays(0)), place)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_steps_are_those_of_one_device(hp_platform: Platform, layout: str) -> None:
    expected = _plain(hp_platform)
    for weights in run_ranks(_sharded, int(np.prod(LAYOUTS[layout][0])), hp_platform, hp_platform, layout):
        for got, want in zip(weights, expected, strict=True):
            np.testing.assert_array_equal(got, want)


STACKS = {
    "between matrices": (Shard(0), Shard(0)),
    "uneven between matrices": (RaggedShard(0, (3, 0)), Replicate()),
    "within matrices": (Shard(1), Shard(0)),
    "both": (Shard(0), Shard(2)),
}


def _stack(platform: Platform, placements: tuple[Placement, ...] | None) -> tuple[np.ndarray, int]:
    """A stack of three matrices after a few steps, and the all-to-alls of them."""
    rng = np.random.default_rng(3)
    values = [rng.standard_normal((3, 4, 6)).astype(np.float32) for _ in range(4)]
    if placements is None:
        place = platform.from_numpy
    else:
        mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"), platform=platform)

        def place(x: np.ndarray) -> Any:
            return distribute_tensor(platform.from_numpy(x.copy()), mesh, placements, src_data_rank=None)

    weight = platform.Parameter(place(values[0].copy()))
    optimizer = Muon([("experts", weight)], OPTIONS, platform=platform)
    with record_collectives() as log:
        for grad in values[1:]:
            platform.set_grad(weight, place(grad))
            optimizer.step(0.1)
    full = platform.detach(weight) if placements is None else weight.full_tensor()
    return platform.to_numpy(platform.detach(full)), log.count("all_to_all")


@pytest.mark.parametrize("layout", STACKS)
def test_the_matrices_of_a_stack_are_updated_one_by_one(hp_platform: Platform, layout: str) -> None:
    full, _ = _stack(hp_platform, None)
    for found, exchanges in run_ranks(_stack, 4, hp_platform, hp_platform, STACKS[layout]):
        # A product of a stack may add in another order than one of a part of it.
        np.testing.assert_allclose(found, full, rtol=1e-5, atol=1e-6)
        assert exchanges == (0 if "between" in layout else 6)


def test_a_matrix_of_a_stack_is_updated_as_by_itself(hp_platform: Platform) -> None:
    rng = np.random.default_rng(4)
    start, grad = (rng.standard_normal((3, 4, 6)).astype(np.float32) for _ in range(2))
    named = {"all": start, **{str(i): start[i] for i in range(3)}}
    weights = {name: hp_platform.Parameter(hp_platform.from_numpy(x.copy())) for name, x in named.items()}
    optimizer = Muon(weights.items(), OPTIONS, platform=hp_platform)
    for name, x in weights.items():
        hp_platform.set_grad(x, hp_platform.from_numpy((grad if name == "all" else grad[int(name)]).copy()))
    optimizer.step(0.1)
    found = {name: hp_platform.to_numpy(hp_platform.detach(x)) for name, x in weights.items()}
    for i in range(3):
        np.testing.assert_allclose(found["all"][i], found[str(i)], rtol=1e-5, atol=1e-6)


def _by_hand() -> list[np.ndarray]:
    """The formulas in float64."""
    weights = [x.astype(np.float64) for x in _arrays(0)]
    momenta = [np.zeros_like(x) for x in weights]
    a, b, c = OPTIONS.coefficients
    for step in range(1, STEPS + 1):
        for i, grad in enumerate(_arrays(step)):
            momenta[i] = 0.95 * momenta[i] + 0.05 * grad
            x = 0.05 * grad + 0.95 * momenta[i]
            tall = x.shape[0] > x.shape[1]
            x = (x.T if tall else x) / np.linalg.norm(x)
            for _ in range(5):
                gram = x @ x.T
                x = a * x + (b * gram + c * gram @ gram) @ x
            x = x.T if tall else x
            rows, columns = x.shape
            weights[i] = weights[i] * (1 - 0.1 * 0.2) - 0.1 * max(1, rows / columns) ** 0.5 * x
    return weights


def test_the_update_follows_the_formulas(hp_platform: Platform) -> None:
    for got, want in zip(_plain(hp_platform), _by_hand(), strict=True):
        # Five float32 iterations, each of which may double an error, on numbers of order one.
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def _counted(platform: Platform) -> tuple[dict[str, int], float, int]:
    mesh = DeviceMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=platform)
    fulls = [platform.from_numpy(x) for x in _arrays(0)]
    placed = [distribute_tensor(x, mesh, (Shard(0), Replicate()), src_data_rank=None) for x in fulls]
    calls = 0

    def compute(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return platform.ops.mul(x, 2.0)

    with record_collectives() as log:
        made = at_owners([platform.unwrap(x) for x in placed], [x.spec for x in placed], compute)
    for x, y in zip(placed, made, strict=True):
        np.testing.assert_array_equal(platform.to_numpy(y), 2 * platform.to_numpy(platform.unwrap(x)))
    return {name: log.count(name) for name in ("all_to_all", "all_gather")}, log.wire_bytes(), calls


def test_every_matrix_visits_one_owner_in_two_collectives(hp_platform: Platform) -> None:
    counted = run_ranks(_counted, 4, hp_platform, hp_platform)
    assert [counts for counts, _, _ in counted] == [{"all_to_all": 2, "all_gather": 0}] * 4
    assert sum(calls for _, _, calls in counted) == len(SHAPES)
    everything = 4 * sum(rows * columns for rows, columns in SHAPES)
    assert sum(sent for _, sent, _ in counted) < everything + 2 * everything, "there once, back to two replicas"


def test_owners_share_the_work() -> None:
    owners = assign_owners([8, 7, 6, 5, 4, 3], 3)
    assert [sum(c for c, o in zip([8, 7, 6, 5, 4, 3], owners, strict=True) if o == rank) for rank in range(3)] == [
        11,
        11,
        11,
    ]


def test_vectors_and_partial_matrices_are_refused(hp_platform: Platform) -> None:
    mesh = DeviceMesh("cpu", (1,), mesh_dim_names=("dp",), platform=hp_platform)
    vector = hp_platform.from_numpy(np.ones(3, np.float32))
    partial = from_local(hp_platform.from_numpy(np.ones((2, 2), np.float32)), mesh, (Partial(),))
    with pytest.raises(PlacementError) as refusal:
        Muon([("bias", vector), ("weight", partial)])
    assert str(refusal.value) == (
        "Muon takes matrices and stacks of them, sharded or replicated; bias has shape [3]; weight is partial: "
        "(dp:P(sum))"
    )


def test_it_agrees_with_torchs_own(hp_platform: Platform) -> None:
    torch = pytest.importorskip("torch")
    if hp_platform.name != "torch":
        pytest.skip("compares with torch")
    parameters = [torch.nn.Parameter(torch.from_numpy(x)) for x in _arrays(0)]
    optimizer = torch.optim.Muon(parameters, lr=0.1, weight_decay=0.2)
    for step in range(1, STEPS + 1):
        for parameter, grad in zip(parameters, _arrays(step), strict=True):
            parameter.grad = torch.from_numpy(grad)
        optimizer.step()
    ours = _plain(hp_platform, MuonOptions(weight_decay=0.2))
    for got, want in zip(ours, parameters, strict=True):
        # Both iterate in bfloat16 (8 bits), rounding at different places: five updates of at most 0.1 x 1.3 x 1.2.
        np.testing.assert_allclose(got, want.detach().numpy(), atol=0.05)
