"""Training with `fully_shard` holds no memory from one step to the next."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DeviceMesh
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks
from hp_fsdp import fully_shard


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=True) for _ in range(count)])

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = self.ops.silu(layer(x))
        return x


def _live_tensors(platform: Platform) -> int:
    gc.collect()
    return sum(issubclass(type(x), platform.Tensor) for x in gc.get_objects())


def _counts(platform: Platform, with_backward: bool) -> list[int]:
    """Return the number of live tensors after each of six steps."""
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("fsdp",), platform=platform)
    with nn.building(platform):
        model = Layers(3)
    for layer in model.layers:
        fully_shard(layer, mesh)
    fully_shard(model, mesh)
    counts = []
    for _ in range(6):
        loss = platform.ops.sum(model(platform.from_numpy(np.ones((2, 8), np.float32))))
        if with_backward:
            platform.backward(loss)
        del loss
        for _, parameter in platform.named_parameters(model):
            platform.set_grad(parameter, None)
        mesh.world.all.barrier()
        counts.append(_live_tensors(platform))
        mesh.world.all.barrier()
    return counts


@pytest.fixture(autouse=True)
def _only_new_objects() -> None:
    """Hide the objects of other tests from the garbage collector, which would look at each of millions many times."""
    gc.collect()
    gc.freeze()


def test_a_step_leaves_no_tensor_behind(hp_platform: Platform) -> None:
    for counts in run_ranks(_counts, 2, hp_platform, hp_platform, True):
        assert counts[2:] == counts[2:3] * 4, counts


def test_a_forward_without_backward_leaves_no_tensor_behind(hp_platform: Platform) -> None:
    for counts in run_ranks(_counts, 2, hp_platform, hp_platform, False):
        assert counts[2:] == counts[2:3] * 4, counts
