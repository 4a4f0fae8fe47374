"""MindSpore's own optimizers on parameters of `fully_shard`: the weights are those of one device."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor
from mindspore.experimental import optim

from hp_dtensor import DTensor, Shard, init_device_mesh
from hp_dtensor.testing import run_ranks
from hp_fsdp import fully_shard
from hp_platform_mindspore.patches.optimizers import ELEMENTWISE

RNG = np.random.default_rng(3)
WEIGHT, BIAS, BATCH = (RNG.normal(size=shape).astype(np.float32) for shape in ((5, 3), (3,), (4, 5)))
OPTIMIZERS = sorted((kind for kind in ELEMENTWISE if "experimental" in kind.__module__), key=lambda kind: kind.__name__)
STEPS = 4


def tensor(array):
    return Tensor(array.copy())


def plain(platform):
    return [platform.Parameter(tensor(array)) for array in (WEIGHT, BIAS)]


# Along a later dimension the parameters are permuted views of a flat buffer.
SHARD_DIMS = [(optim.AdamW, 0), (optim.SGD, 0), *((kind, 1) for kind in OPTIMIZERS)]


@pytest.mark.parametrize(("kind", "dim"), SHARD_DIMS, ids=lambda value: getattr(value, "__name__", value))
def test_parameters_of_fully_shard(platform, kind, dim):
    class Model(platform.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = plain(platform)

        def forward(self, batch):
            return platform.ops.add(platform.ops.matmul(batch, self.weight), self.bias)

    def steps(model, kind):
        parameters = [parameter for _, parameter in platform.named_parameters(model)]
        optimizer, ops = kind(parameters, lr=0.05), platform.ops
        for _ in range(STEPS):
            platform.backward(ops.mean(ops.square(model(tensor(BATCH)))))
            optimizer(tuple(platform.get_grad(parameter) for parameter in parameters))
            for parameter in parameters:
                platform.set_grad(parameter, None)
        return [platform.to_numpy(x.full_tensor() if isinstance(x, DTensor) else x).copy() for x in parameters]

    def program():
        model, mesh = Model(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), platform=platform)
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda x: Shard(min(dim, x.ndim - 1)))
        return steps(model, kind)

    expected = steps(Model(), kind)
    for found in run_ranks(program, 2, platform):
        for array, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(array, wanted, rtol=1e-6, atol=1e-6)
