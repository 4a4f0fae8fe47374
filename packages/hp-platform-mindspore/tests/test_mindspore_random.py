"""Random operations give one device's numbers under every layout."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.spec.placements import RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.testing import run_ranks

FULL = np.ones((5, 4), np.float32)
LAYOUTS = {
    "replicated": (Replicate(), Replicate()),
    "rows": (Shard(0), Replicate()),
    "columns, of two axes": (Shard(1), Shard(1)),
    "rows and columns": (Shard(0), Shard(1)),
    "strided": (StridedShard(0, split_factor=2), Shard(0)),
    "ragged": (RaggedShard(0, (4, 1)), Replicate()),
}
DRAWS = {
    "dropout of mint": lambda x: mint.nn.functional.dropout(x, 0.4, True),
    "dropout of ops": lambda x: ops.dropout(x, 0.4, True),
    "nn.Dropout": lambda x: nn.Dropout(p=0.4).set_train()(x),
    "rand_like": mint.rand_like,
    "randn_like": mint.randn_like,
    "bernoulli": lambda x: mint.bernoulli(x * 0.5),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "normal_": lambda x: x.normal_(0, 2),
    "random_": lambda x: x.random_(0, 100),
    "exponential_": lambda x: x.exponential_(),
}


def layouts(shape):
    return [(Replicate(),)] if len(shape) == 1 else list(LAYOUTS.values())


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_those_of_one_device(platform, name):
    def program(shape):
        mesh = init_device_mesh("cpu", shape, platform=platform)
        found = []
        for placements in layouts(shape):
            platform.manual_seed(3)
            x = distribute_tensor(Tensor(FULL), mesh, placements, src_data_rank=None)
            found.append([DRAWS[name](x).asnumpy().copy() for _ in range(2)])
        return found

    ((first, second),) = run_ranks(program, 1, platform, (1,))[0]
    assert not np.array_equal(first, second)
    for results in run_ranks(program, 4, platform, (2, 2)):
        for once, again in results:
            np.testing.assert_array_equal(once, first)
            np.testing.assert_array_equal(again, second)


def test_dropout_of_a_plain_tensor_has_these_numbers_too(platform):
    mesh = init_device_mesh("cpu", (1,), platform=platform)
    platform.manual_seed(3)
    plain = platform.operation("dropout")(Tensor(FULL), 0.4).asnumpy()
    platform.manual_seed(3)
    x = distribute_tensor(Tensor(FULL), mesh, [Shard(0)], src_data_rank=None)
    np.testing.assert_array_equal(mint.nn.functional.dropout(x, 0.4).asnumpy(), plain)
    retained = plain != 0
    np.testing.assert_allclose(plain[retained], 1 / 0.6, rtol=1e-6)
    assert 0 < retained.sum() < retained.size
