"""`init_empty_weights` on MindSpore: every way in which MindSpore makes parameters gives ones without data."""

from __future__ import annotations

import threading

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint
from mindspore.common.initializer import initializer

from hp_dtensor import (
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    init_empty_weights,
    init_parameters,
    materialize,
    zeros,
)
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.tensor.init import Normal, meta_tensors
from hp_dtensor.testing import run_ranks


class Net(ms.nn.Cell):
    def __init__(self):
        super().__init__()
        self.first = ms.nn.Dense(4, 6)
        self.norm = ms.nn.LayerNorm((6,))
        self.second = mint.nn.Linear(6, 3)
        self.scale = ms.Parameter(initializer("ones", (3,), ms.float32))
        self.shift = ms.Parameter(np.zeros(3, np.float32))
        self.table = ms.Parameter(ms.Tensor(np.zeros((2, 3), np.float16)), requires_grad=False)

    def construct(self, x):
        return self.second(mint.tanh(self.first(x))) * self.scale + self.shift


def test_all_parameters_are_without_data(platform):
    with init_empty_weights(platform):
        net = Net()
    made = dict(net.parameters_and_names())
    assert meta_tensors(net, platform) == [*made]
    assert {name: (p.shape, p.dtype, p.requires_grad) for name, p in made.items()} == {
        name: (p.shape, p.dtype, p.requires_grad) for name, p in Net().parameters_and_names()
    }
    materialize(net, platform=platform)
    init_parameters(net, lambda name, shape: Normal(0.5), seed=3, platform=platform)
    filled = Net()
    init_parameters(filled, lambda name, shape: Normal(0.5), seed=3, platform=platform)
    x = ms.Tensor(np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(net(x).asnumpy(), filled(x).asnumpy())


def test_other_threads_make_parameters_with_data(platform):
    made = []
    with init_empty_weights(platform):
        thread = threading.Thread(target=lambda: made.append(Net()))
        thread.start()
        thread.join()
    assert meta_tensors(made[0], platform) == []


def test_a_dtensor_without_data_can_be_shown(platform):
    def rank():
        with init_empty_weights(platform):
            weight = mint.nn.Linear(4, 6).weight
        return repr(distribute_tensor(weight, init_device_mesh("cpu", (2,), platform=platform), [Shard(0)]))

    assert (
        run_ranks(rank, 2, platform)[0] == "DTensor([6, 4], Float32, (axis0:S(0)) on mesh (axis0=2), local=<no data>)"
    )


@pytest.mark.parametrize("dtype", [ms.float8_e4m3fn, ms.uint16, ms.complex64], ids=str)
def test_dtypes_without_dtensors_are_refused_by_name(platform, dtype):
    mesh = init_device_mesh("cpu", (1,), platform=platform)
    for make in (
        lambda: distribute_tensor(ms.Tensor(np.ones((4, 4)), dtype), mesh, [Replicate()]),
        lambda: zeros(4, 4, dtype=dtype, device_mesh=mesh),
    ):
        with pytest.raises(CapabilityError, match=f"no DTensors of {dtype}: .* expected one of float64, float32"):
            make()


def test_a_layout_tells_placements_by_axis_and_by_dimension(platform):
    def rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=platform)
        x = distribute_tensor(ms.Tensor(np.ones((4, 4, 3), np.float32)), mesh, (("dp", "tp"), "None", "None"))
        same = x.redistribute(mesh, x.layout)
        return x.layout.alias_tensor_map, x.layout.tensor_map, x.layout.placements, same.layout == x.layout

    assert run_ranks(rank, 4, platform)[0] == (
        (("dp", "tp"), "None", "None"),
        ((1, 0), -1, -1),
        (Shard(0), Shard(0)),
        True,
    )
