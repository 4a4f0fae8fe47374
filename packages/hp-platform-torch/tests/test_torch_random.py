"""Random operations on DTensors give the single-device numbers, bit for bit, under every layout."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import (
    DeviceMesh,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
    get_platform,
    implicit_replication,
)
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.spec.placements import Placement
from hp_dtensor.testing import run_ranks

FULL = torch.arange(1.0, 36.0).reshape(7, 5)
DRAWS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout in evaluation": lambda x: F.dropout(x, 0.3, training=False),
    "nn.Dropout": lambda x: torch.nn.Dropout(0.5)(x),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, -3, 100),
    "randint_like of integers": lambda x: torch.randint_like(x, 9, dtype=torch.int64),
    "rrelu": lambda x: F.rrelu(x - 17, training=True),
    "rrelu in evaluation": lambda x: F.rrelu(x - 17),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x / 8, tau=0.7, dim=0).argmax(0),
    "gumbel_softmax hard": lambda x: F.gumbel_softmax(x / 8, hard=True).argmax(1),
    "normal_": lambda x: x.clone().normal_(1.0, 2.0),
    "uniform_": lambda x: x.clone().uniform_(-1.0, 1.0),
    "kaiming": lambda x: torch.nn.init.kaiming_uniform_(x.clone()),
    "xavier": lambda x: torch.nn.init.xavier_normal_(x.clone()),
    "trunc_normal": lambda x: torch.nn.init.trunc_normal_(x.clone(), std=0.02),
    "trunc_normal of a tail": lambda x: torch.nn.init.trunc_normal_(x.clone(), std=0.5, a=1.0, b=1.5),
    "kaiming_normal": lambda x: torch.nn.init.kaiming_normal_(x.clone(), mode="fan_out"),
    "orthogonal": lambda x: torch.nn.init.orthogonal_(x.clone(), gain=2.0),
    "orthogonal of a flat matrix": lambda x: torch.nn.init.orthogonal_(torch.empty_like(x.t().contiguous())),
    "eye": lambda x: torch.nn.init.eye_(x.clone()),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "random_": lambda x: x.clone().random_(100),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "geometric_": lambda x: x.clone().geometric_(0.3),
}
LAYOUTS = [
    *itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2),
    (StridedShard(0, 3), Shard(0)),
    (StridedShard(1, 3), Shard(1)),
    (RaggedShard(0, (6, 1)), Replicate()),
    (Replicate(), RaggedShard(1, (0, 4, 1))),
    (RaggedShard(0, (5, 2)), Shard(1)),
]


def _drawn(name: str, layouts: list[tuple[Placement, ...]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two draws in a row per layout: the second shows that the generators of all ranks stay in step."""
    mesh = DeviceMesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"), platform=get_platform("torch"))
    results = []
    for placements in layouts:
        x = distribute_tensor(FULL, mesh, placements)
        torch.manual_seed(11)
        results.append((DRAWS[name](x).full_tensor(), DRAWS[name](x).full_tensor()))
    return results


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_those_of_one_device(name: str) -> None:
    torch.manual_seed(11)
    expected = DRAWS[name](FULL), DRAWS[name](FULL)
    for results in run_ranks(_drawn, 6, "torch", name, LAYOUTS):
        for placements, got in zip(LAYOUTS, results, strict=True):
            assert torch.equal(got[0], expected[0]), placements
            assert torch.equal(got[1], expected[1]), placements


IN_OTHER_ORDER: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.5),
    "uniform_ through a view": lambda x: x.detach().uniform_().clone(),
    "contiguous": lambda x: torch.rand_like(x.contiguous()),
}


CUBE = torch.arange(1.0, 1 + 12 * 17 * 16).reshape(12, 17, 16)


def _drawn_in_other_order(name: str, full: torch.Tensor, order: tuple[int, ...]) -> list[torch.Tensor]:
    mesh = DeviceMesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"), platform=get_platform("torch"))
    results = []
    for placements in itertools.product([Replicate(), Shard(0), Shard(1), Shard(2)], repeat=2):
        x = distribute_tensor(full, mesh, placements).permute(order)
        torch.manual_seed(11)
        results.append(torch.stack([IN_OTHER_ORDER[name](x).full_tensor() for _ in range(2)]))
    return results


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("name", IN_OTHER_ORDER)
def test_numbers_of_a_permuted_tensor_are_drawn_in_the_order_of_its_memory(name: str, order: tuple[int, ...]) -> None:
    x = CUBE.permute(order)
    torch.manual_seed(11)
    expected = torch.stack([IN_OTHER_ORDER[name](x) for _ in range(2)])
    torch.manual_seed(11)
    assert torch.equal(IN_OTHER_ORDER[name](x.contiguous()), expected[0]) == (name == "contiguous")
    for results in run_ranks(_drawn_in_other_order, 6, "torch", name, CUBE, order):
        for got in results:
            assert torch.equal(got, expected)


THIN_LAYOUTS: list[tuple[tuple[int, ...], tuple[int, ...], list[Placement]]] = [
    ((4,), (4, 5, 3), [Shard(0)]),  # one element on every rank
    ((4,), (5, 4, 3), [Shard(1)]),
    ((4,), (5, 3, 4), [Shard(2)]),
    ((4,), (7, 5, 3), [Shard(0)]),  # one on the last
    ((4,), (3, 5, 6), [Shard(0)]),  # none on the last
    ((4,), (5, 6, 7), [RaggedShard(2, (0, 4, 1, 2))]),
    ((2, 2), (7, 5, 3), [Shard(0), Shard(0)]),
    ((2, 2), (3, 5, 3), [Shard(2), Shard(0)]),
    ((2, 2), (2, 2, 9), [Shard(1), Shard(0)]),
    ((2, 2), (5, 3, 4), [Replicate(), Shard(1)]),
]


def _drawn_thin(
    name: str, order: tuple[int, ...], mesh_shape: tuple[int, ...], shape: tuple[int, ...], placements: list[Placement]
) -> torch.Tensor:
    mesh = DeviceMesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[: len(mesh_shape)], platform=get_platform("torch"))
    x = distribute_tensor(torch.ones(shape), mesh, placements).permute(order)
    torch.manual_seed(11)
    return torch.stack([IN_OTHER_ORDER[name](x).full_tensor() for _ in range(2)])


def _all_drawn_thin(name: str) -> list[torch.Tensor]:
    return [_drawn_thin(name, order, *layout) for layout in THIN_LAYOUTS for order in itertools.permutations(range(3))]


@pytest.mark.parametrize("name", IN_OTHER_ORDER)
def test_numbers_of_a_permuted_tensor_where_ranks_have_one_element_of_a_dimension_or_none(name: str) -> None:
    expected = []
    for _, shape, _ in THIN_LAYOUTS:
        for order in itertools.permutations(range(3)):
            x = torch.ones(shape).permute(order)
            torch.manual_seed(11)
            expected.append(torch.stack([IN_OTHER_ORDER[name](x) for _ in range(2)]))
    for results in run_ranks(_all_drawn_thin, 4, "torch", name):
        for number, (got, wanted) in enumerate(zip(results, expected, strict=True)):
            assert torch.equal(got, wanted), THIN_LAYOUTS[number // 6]


def _channels_last_and_heads() -> list[torch.Tensor]:
    mesh = DeviceMesh("cpu", (4,), platform=get_platform("torch"))
    images = distribute_tensor(torch.ones(4, 6, 3, 3), mesh, [Shard(0)]).to(memory_format=torch.channels_last)
    heads = distribute_tensor(torch.ones(2, 6, 4, 3), mesh, [Shard(2)]).transpose(1, 2)
    torch.manual_seed(11)
    return [F.dropout(x, 0.5).full_tensor() for x in (images, heads)]


def _dropped_with_a_rank_outside() -> tuple[int, ...]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    x = distribute_tensor(torch.ones(3, 5), mesh, [Shard(0)]).t()
    return tuple(F.dropout(x, 0.5).to_local().shape)


def test_ranks_outside_the_mesh_agree_on_nothing() -> None:
    assert run_ranks(_dropped_with_a_rank_outside, 3, "torch") == [(5, 2), (5, 1), (0, 0)]


def test_one_channels_last_sample_and_one_head_per_rank() -> None:
    images = torch.ones(4, 6, 3, 3).to(memory_format=torch.channels_last)
    torch.manual_seed(11)
    expected = [F.dropout(x, 0.5) for x in (images, torch.ones(2, 6, 4, 3).transpose(1, 2))]
    for results in run_ranks(_channels_last_and_heads, 4, "torch"):
        for got, wanted in zip(results, expected, strict=True):
            assert torch.equal(got, wanted)


def test_repeated_dimensions_have_no_order_of_their_own() -> None:
    x = torch.ones(4, 1, 5).expand(4, 3, 5).transpose(0, 2)
    assert get_platform("torch").memory_order(x) == _order_of(torch.empty_like(x))


def _order_of(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(sorted(range(x.dim()), key=lambda dim: -x.stride(dim)))


def _drawn_of_results(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = DeviceMesh("cpu", (4,), platform=get_platform("torch"))
    x = F.gelu(distribute_tensor(torch.ones(shape), mesh, [Shard(0)]).permute(1, 0, 2))
    torch.manual_seed(11)
    return torch.randn_like(x).full_tensor(), torch.rand(3)


@pytest.mark.parametrize("rows", [3, 4, 5, 7])
def test_ranks_stay_in_step_where_kernels_disregard_dimensions_of_one_element(rows: int) -> None:
    """Such as 3 rows on 4 ranks, and 7: parts of one row or none, and of two, get results of different strides."""
    first, *others = run_ranks(_drawn_of_results, 4, "torch", (rows, 5, 3))
    for drawn, after in others:
        assert torch.equal(drawn, first[0])
        assert torch.equal(after, first[1])


def _drawn_after_redistribution(source: list[Placement], target: list[Placement], shape: tuple[int, ...]) -> list[Any]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    x = distribute_tensor(torch.ones(shape), mesh, source).permute(0, 2, 1).redistribute(placements=target)
    torch.manual_seed(11)
    return [torch.rand_like(x).full_tensor(), F.alpha_dropout(x, 0.5).full_tensor()]


@pytest.mark.parametrize(
    ("source", "target", "shape"),
    [
        (Shard(0), Replicate(), (1, 3, 5)),
        (RaggedShard(0, (0, 4)), Replicate(), (4, 3, 5)),
        (Shard(0), RaggedShard(0, (2, 3)), (5, 3, 5)),
        (RaggedShard(0, (0, 2)), Shard(0), (2, 3, 5)),
    ],
)
def test_ranks_draw_alike_after_a_redistribution_in_which_one_keeps_what_it_has(
    source: Placement, target: Placement, shape: tuple[int, ...]
) -> None:
    x = torch.ones(shape[0], shape[2], shape[1])
    torch.manual_seed(11)
    expected = [torch.rand_like(x), F.alpha_dropout(x, 0.5)]
    for results in run_ranks(_drawn_after_redistribution, 2, "torch", [source], [target], shape):
        for got, wanted in zip(results, expected, strict=True):
            assert torch.equal(got, wanted)


def _drawn_on_another_mesh() -> torch.Tensor:
    x = distribute_tensor(torch.ones(5, 3), DeviceMesh("cpu", (3,), platform=get_platform("torch")), [Shard(1)]).t()
    y = x.redistribute(DeviceMesh("cpu", (3,), ranks=(0, 2, 1), platform=get_platform("torch")), [Shard(0)])
    torch.manual_seed(11)
    return torch.rand_like(y).full_tensor()


def test_ranks_draw_alike_on_another_mesh_where_they_keep_what_they_have() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3, 5)
    for got in run_ranks(_drawn_on_another_mesh, 3, "torch"):
        assert torch.equal(got, expected)


def _dirac(groups: int) -> list[torch.Tensor]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    made = []
    for placement in (Replicate(), Shard(0), Shard(1), Shard(2)):
        x = torch.nn.Parameter(distribute_tensor(torch.randn(6, 3, 3, 2), mesh, [placement]))
        assert torch.nn.init.dirac_(x, groups) is x
        assert x.placements == (placement,)
        made.append(x.detach().clone().full_tensor())
        if placement == Shard(2):
            # It writes through a view as a matrix, of which the sharded dimension would be a part of one.
            with pytest.raises(ShardingRuleError, match="copy_ on the result of view, which is a copy"):
                torch.nn.init.orthogonal_(x)
        else:
            torch.nn.init.orthogonal_(x)
    return made


def _sparse(placement: Placement) -> torch.Tensor:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    x = distribute_tensor(torch.empty(7, 5), mesh, [placement])
    torch.manual_seed(11)
    with implicit_replication():  # of the plain indices, which are equal on all ranks
        return torch.nn.init.sparse_(x, 0.4).full_tensor()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)])
def test_sparse_initial_values_under_implicit_replication(placement: Placement) -> None:
    torch.manual_seed(11)
    expected = torch.nn.init.sparse_(torch.empty(7, 5), 0.4)
    assert all(torch.equal(got, expected) for got in run_ranks(_sparse, 2, "torch", placement))


def test_dirac_and_orthogonal_convolutions() -> None:
    expected = torch.nn.init.dirac_(torch.empty(6, 3, 3, 2), 2)
    for made in run_ranks(_dirac, 2, "torch", 2):
        for got in made:
            assert torch.equal(got, expected)


def _gradient(placements: tuple[Placement, ...]) -> torch.Tensor:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=get_platform("torch"))
    x = distribute_tensor(FULL, mesh, placements).requires_grad_()
    torch.manual_seed(5)
    (F.dropout(x, 0.4) ** 2).sum().backward()
    return x.grad.full_tensor()


@pytest.mark.parametrize("placements", [(Replicate(),), (Shard(0),), (Shard(1),), (Partial(),)])
def test_dropout_masks_the_gradient_alike(placements: tuple[Placement, ...]) -> None:
    x = FULL.clone().requires_grad_()
    torch.manual_seed(5)
    (F.dropout(x, 0.4) ** 2).sum().backward()
    for grad in run_ranks(_gradient, 2, "torch", placements):
        torch.testing.assert_close(grad, x.grad, rtol=0, atol=0)


class _Generator(torch.Generator):
    """One that can be referred to weakly, which torch 2.11's own cannot."""


def _generators_left() -> list[bool]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    left = []
    for seed in range(3):
        generator = _Generator().manual_seed(seed)
        drawn = distribute_tensor(FULL, mesh, [Shard(0)]).normal_(generator=generator).full_tensor()
        assert torch.equal(drawn, torch.empty(7, 5).normal_(generator=torch.Generator().manual_seed(seed)))
        freed = weakref.ref(generator)
        del generator
        gc.collect()
        left.append(freed() is not None)
    return left


def test_generators_are_let_go() -> None:
    assert run_ranks(_generators_left, 2, "torch") == [[False] * 3] * 2
