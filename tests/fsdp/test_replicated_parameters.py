"""Replicated parameters in a group with sharded ones."""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import full_value, mesh_of

from hp_dtensor.comm.world import current_world
from hp_dtensor.optim import clip_grad_norm_
from hp_dtensor.parallel import nn
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import fully_shard


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=["sharded", "replicas of shards"])
@pytest.mark.parametrize("how", ["listed", "threshold"])
def test_replicated_parameters_have_the_mean_gradient_and_count_once_in_the_norm(hp_platform, sizes, how):
    """hyper-parallel#685, #735: gradients off by the number of ranks, a norm of 48.47 in place of 28.98."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.large, self.small = self.parameter((7, 3)), self.parameter((3,))

        def forward(self, x):
            return self.ops.add(self.ops.matmul(self.large, x), self.ops.sum(self.ops.mul(self.small, x)))

    def rank():
        me = current_world(hp_platform).rank
        with nn.building(hp_platform):
            model = Two()
        options = {"replicate_params": [model.small]} if how == "listed" else {"threshold": 0.05}
        fully_shard(model, mesh_of(hp_platform, *sizes), **options)
        x = hp_platform.from_numpy(numpy.full((3,), 2.0 * me + 1, numpy.float32))
        hp_platform.backward(hp_platform.ops.sum(model(x)))
        # The mean of 1, 3, 5 and 7 is 4; `small` is used in each of seven rows.
        assert full_value(hp_platform, hp_platform.get_grad(model.large)).tolist() == [[4.0] * 3] * 7
        assert full_value(hp_platform, hp_platform.get_grad(model.small)).tolist() == [28.0] * 3
        norm = clip_grad_norm_([model.large, model.small], 1e9, platform=hp_platform)
        assert float(hp_platform.to_numpy(norm)) == pytest.approx((21 * 16 + 3 * 784) ** 0.5, rel=1e-6)

    run_ranks(rank, 4, hp_platform)
