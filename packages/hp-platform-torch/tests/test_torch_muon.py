"""`torch.optim.Muon` on DTensors: one device's steps, but for the rounding of its products in bfloat16."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable

import pytest
import torch
from torch.optim import _muon

from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor, get_platform
from hp_dtensor.testing import run_ranks

Tensor = torch.Tensor
LAYOUTS = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))
LEARNING_RATE = 0.02


def _stepped(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Weights after three steps; the last matrix is uneven, and empty on one rank of four."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(place(torch.randn(shape))) for shape in ((12, 8), (8, 12), (7, 5))]
    optimizer = torch.optim.Muon(weights, lr=LEARNING_RATE, weight_decay=0.1)
    for _ in range(3):
        for weight in weights:
            weight.grad = place(torch.randn(tuple(weight.shape)))
        optimizer.step()
    return [weight.detach() for weight in weights]


def _on_ranks() -> list[list[Tensor]]:
    mesh = DeviceMesh("cpu", (2, 2), platform=get_platform("torch"))
    return [
        [x.full_tensor() for x in _stepped(lambda x, placed=placed: distribute_tensor(x, mesh, placed))]
        for placed in LAYOUTS
    ]


def _largest_difference() -> float:
    expected = _stepped(lambda x: x)
    found = run_ranks(_on_ranks, 4, "torch")
    return max(
        (x - y).abs().max().item()
        for layouts in found
        for layout in layouts
        for x, y in zip(layout, expected, strict=True)
    )


def test_steps_are_those_of_one_device_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own iteration, in float64 on both sides: what else than rounding differs would show in the weights."""
    source = inspect.getsource(_muon._zeropower_via_newtonschulz)
    in_double = source.replace("grad.bfloat16()", "grad.double()").replace("torch.bfloat16", "torch.float64")
    assert "bfloat16" in source
    assert "bfloat16" not in in_double
    space = {**vars(_muon)}
    exec("from __future__ import annotations\n" + in_double, space)
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", space["_zeropower_via_newtonschulz"])
    assert _largest_difference() <= 2.0**-22  # one unit in the last place of weights below 4


def test_steps_differ_by_the_rounding_of_bfloat16() -> None:
    """An update's elements are below one: of them bfloat16 keeps eight bits, through fifteen products."""
    assert _largest_difference() < 3 * LEARNING_RATE * 15 * 2.0**-8
