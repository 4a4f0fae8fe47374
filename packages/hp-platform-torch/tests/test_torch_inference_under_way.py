"""A redistribution under way that begins in torch's inference mode, or is first looked at there."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.testing import run_ranks


def _begun_and_seen(begins_in_inference: bool) -> tuple[float, float | None]:
    mesh = DeviceMesh("cpu", (2,), platform=get_platform("torch"))
    leaf = torch.nn.Parameter(torch.arange(12.0).reshape(4, 3))
    x = distribute_tensor(leaf, mesh, [Shard(1)])
    with torch.inference_mode(begins_in_inference):
        y = x.redistribute(placements=[Replicate()], async_op=True)
    with contextlib.nullcontext() if begins_in_inference else torch.inference_mode():
        seen = y.to_local().sum().item()
    if begins_in_inference:
        return seen, None
    (y * y).sum().backward()
    return seen, x.grad.full_tensor().sum().item()


@pytest.mark.parametrize(("begins_in_inference", "gradient"), [(True, None), (False, 132.0)])
def test_a_redistribution_under_way_belongs_to_the_mode_in_which_it_began(begins_in_inference, gradient):
    for found in run_ranks(_begun_and_seen, 2, "torch", begins_in_inference):
        assert found == (66.0, gradient)
