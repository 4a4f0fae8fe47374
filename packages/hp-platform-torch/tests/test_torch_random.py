"""Random operations on DTensors give the single-device numbers, bit for bit, under every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor, get_platform
from hp_dtensor.placements import Placement
from hp_dtensor.testing import run_ranks

WHOLE = torch.arange(1.0, 36.0).reshape(7, 5)
DRAWS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in evaluation": lambda x: F.dropout(x, 0.3, training=False),
    "nn.Dropout": lambda x: torch.nn.Dropout(0.5)(x),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "normal_": lambda x: x.clone().normal_(1.0, 2.0),
    "uniform_": lambda x: x.clone().uniform_(-1.0, 1.0),
    "kaiming": lambda x: torch.nn.init.kaiming_uniform_(x.clone()),
    "xavier": lambda x: torch.nn.init.xavier_normal_(x.clone()),
    "trunc_normal": lambda x: torch.nn.init.trunc_normal_(x.clone(), std=0.02),
}
LAYOUTS = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))


def _drawn(name: str, layouts: list[tuple[Placement, ...]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two draws in a row per layout: the second shows that the generators of all ranks stay in step."""
    mesh = DeviceMesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"), platform=get_platform("torch"))
    results = []
    for placements in layouts:
        x = distribute_tensor(WHOLE, mesh, placements)
        torch.manual_seed(11)
        results.append((DRAWS[name](x).full_tensor(), DRAWS[name](x).full_tensor()))
    return results


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_those_of_one_device(name: str) -> None:
    torch.manual_seed(11)
    expected = DRAWS[name](WHOLE), DRAWS[name](WHOLE)
    for results in run_ranks(_drawn, 6, "torch", name, LAYOUTS):
        for placements, got in zip(LAYOUTS, results, strict=True):
            assert torch.equal(got[0], expected[0]), placements
            assert torch.equal(got[1], expected[1]), placements


def _gradient(placements: tuple[Placement, ...]) -> torch.Tensor:
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=get_platform("torch"))
    x = distribute_tensor(WHOLE, mesh, placements).requires_grad_()
    torch.manual_seed(5)
    (F.dropout(x, 0.4) ** 2).sum().backward()
    return x.grad.full_tensor()


@pytest.mark.parametrize("placements", [(Replicate(),), (Shard(0),), (Shard(1),), (Partial(),)])
def test_dropout_masks_the_gradient_alike(placements: tuple[Placement, ...]) -> None:
    x = WHOLE.clone().requires_grad_()
    torch.manual_seed(5)
    (F.dropout(x, 0.4) ** 2).sum().backward()
    for grad in run_ranks(_gradient, 2, "torch", placements):
        torch.testing.assert_close(grad, x.grad, rtol=0, atol=0)
