"""MindSpore's own ways to train sharded models: derivatives, TrainOneStepCell, optimizers and checkpoints."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import hp_fsdp
from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.testing import run_ranks
from hp_platform_mindspore.patches.optimizers import ELEMENTWISE

RNG = np.random.default_rng(5)
WEIGHT, BIAS, BATCH = (RNG.normal(size=shape).astype(np.float32) for shape in ((5, 4), (5,), (3, 4)))
OPTIMIZERS = sorted((kind for kind in ELEMENTWISE if "experimental" not in kind.__module__), key=lambda k: k.__name__)


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 5)
        self.dense.weight.set_data(Tensor(WEIGHT.copy()))
        self.dense.bias.set_data(Tensor(BIAS.copy()))
        self.unused = ms.Parameter(Tensor(np.ones(2, np.float32)), name="unused")

    def construct(self, x):
        return ops.sum(ops.square(self.dense(x)))


def mesh_of(platform):
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), platform=platform)


def fully_sharded(platform, dim=0):
    net = Net()
    placed = {"shard_placement_fn": lambda x: Shard(min(dim, x.ndim - 1))}
    hp_fsdp.fully_shard(net, mesh=mesh_of(platform), **placed)
    return net, Tensor(BATCH)


def of_dtensors(platform):
    net, mesh = Net(), mesh_of(platform)
    for cell, name in ((net.dense, "weight"), (net.dense, "bias"), (net, "unused")):
        sharded = distribute_tensor(cell._params[name].data, mesh, [Shard(0)])
        platform.set_parameter(cell, name, platform.Parameter(sharded))
    return net, distribute_tensor(Tensor(BATCH), mesh, [Replicate()])


def hybrid(platform):
    net = Net()
    hp_fsdp.hsdp(net, optimizer_level="level3")
    return net, Tensor(BATCH)


MODELS = {"fully_shard": fully_sharded, "DTensor parameters": of_dtensors}


def array(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).asnumpy().copy()


def shown(value):
    if isinstance(value, (tuple, list)):
        return [shown(item) for item in value]
    return array(value) if isinstance(value, Tensor) else value


def same(found, expected):
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for each, wanted in zip(found, expected, strict=True):
            same(each, wanted)
    elif isinstance(expected, str):
        assert found == expected
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)  # sums of three in another order


def of_loss_and_aux(net):
    def forward(x):
        loss = net(x)
        return loss, loss * 2

    return forward


DERIVATIVES = {
    "value_and_grad of weights": lambda net, x: ms.value_and_grad(net, None, net.trainable_params())(x),
    "value_and_grad of one weight": lambda net, x: ms.value_and_grad(net, None, net.trainable_params()[0])(x),
    "value_and_grad of an input": lambda net, x: ms.value_and_grad(net)(x),
    "value_and_grad of both": lambda net, x: ms.value_and_grad(net, 0, net.trainable_params())(x),
    "value_and_grad with aux": lambda net, x: ms.value_and_grad(
        of_loss_and_aux(net), None, net.trainable_params(), has_aux=True
    )(x),
    "grad of an input": lambda net, x: ms.grad(net)(x),
    "grad with aux": lambda net, x: ms.grad(of_loss_and_aux(net), None, net.trainable_params(), has_aux=True)(x),
    "grad with ids": lambda net, x: ms.grad(net, None, net.trainable_params()[:1], return_ids=True)(x),
    "GradOperation": lambda net, x: ops.GradOperation()(net)(x),
    "GradOperation of all": lambda net, x: ops.GradOperation(get_all=True)(net)(x),
    "GradOperation by list": lambda net, x: ops.GradOperation(get_by_list=True)(
        net, ms.ParameterTuple(net.trainable_params())
    )(x),
    "GradOperation of everything": lambda net, x: ops.GradOperation(get_all=True, get_by_list=True)(
        net, net.trainable_params()
    )(x),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_are_those_of_one_device(platform, name, model):
    """In the structure that MindSpore returns, zeros for the weight that is not used, and no `.grad` is written."""

    def program():
        net, x = MODELS[model](platform)
        found = shown(DERIVATIVES[name](net, x))
        assert all(platform.get_grad(parameter) is None for parameter in net.trainable_params())
        return found

    expected = shown(DERIVATIVES[name](Net(), Tensor(BATCH)))
    for found in run_ranks(program, 2, platform):
        same(found, expected)


def test_the_gradient_of_the_output_may_be_given(platform):
    def derivative(net, x):
        sens = Tensor(np.float32(3))
        if isinstance(x, DTensor):
            sens = distribute_tensor(sens, x.device_mesh, [Replicate()])
        return ops.GradOperation(get_by_list=True, sens_param=True)(net, net.trainable_params())(x, sens)

    expected = shown(derivative(Net(), Tensor(BATCH)))
    for make in MODELS.values():
        for found in run_ranks(lambda make=make: shown(derivative(*make(platform))), 2, platform):
            same(found, expected)


def test_gradients_that_were_there_stay(platform):
    def program():
        net, x = fully_sharded(platform)
        platform.backward(net(x))
        before = array(platform.get_grad(net.dense.weight))
        ms.value_and_grad(net, None, [net.dense.weight])(x)
        return before, array(platform.get_grad(net.dense.weight))

    for before, after in run_ranks(program, 2, platform):
        np.testing.assert_array_equal(before, after)


def test_vjp_is_refused(platform):
    def program():
        net, x = of_dtensors(platform)
        with pytest.raises(CapabilityError, match=r"mindspore\.vjp of DTensors.*mindspore\.value_and_grad"):
            ms.vjp(net, x)[1](ops.ones((), ms.float32))
        return True

    assert run_ranks(program, 2, platform) == [True, True]


def trained(net, x, kind):
    options = {"momentum": 0.9} if kind is nn.Momentum else {}
    step = nn.TrainOneStepCell(net, kind([net.dense.weight, net.dense.bias], learning_rate=0.02, **options))
    losses = [float(array(step(x))) for _ in range(3)]
    return losses, array(net.dense.weight), array(net.dense.bias)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_a_train_step_cell_trains_as_one_device(platform, kind):
    expected = trained(Net(), Tensor(BATCH), kind)
    assert not np.allclose(expected[1], WEIGHT, atol=1e-5)
    makes = (*MODELS.values(), hybrid, lambda platform: fully_sharded(platform, dim=1))
    for make in makes if kind in (nn.Momentum, nn.Adam, nn.AdamWeightDecay) else (fully_sharded,):
        for found in run_ranks(lambda make=make: trained(*make(platform), kind), 2, platform):
            for each, wanted in zip(found, expected, strict=True):
                np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-5)


def test_mindspores_derivatives_of_plain_cells_work_at_once(platform):
    """The platform has the grad flag on: the first `value_and_grad` found nothing to differentiate."""
    platform.enable_grad().__enter__()
    loss, grads = ms.value_and_grad(Net(), None, Net().trainable_params())(Tensor(BATCH))
    assert (float(loss.asnumpy()) > 0, len(grads)) == (True, 3)


SAVED = {
    "the cell": lambda net: net,
    "a list of parameters": lambda net: net.trainable_params(),
    "a list of names and data": lambda net: [{"name": x.name, "data": x} for x in net.trainable_params()],
    "a dictionary": lambda net: {x.name: x for x in net.trainable_params()},
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("what", SAVED)
def test_a_checkpoint_has_whole_tensors_and_loads_in_any_layout(platform, tmp_path, what, model):
    def program():
        mesh = mesh_of(platform)
        path = str(tmp_path / f"{mesh.get_rank()}.ckpt")
        net, _ = MODELS[model](platform)
        names = [x.name for x in net.trainable_params()]
        ms.save_checkpoint(SAVED[what](net), path)
        loaded = ms.load_checkpoint(path)
        other, _ = MODELS[model](platform)
        other.dense.weight.set_data(0.0)
        missing = ms.load_param_into_net(other, loaded)
        return names, sorted(loaded), loaded[net.dense.weight.name].asnumpy().copy(), array(other.dense.weight), missing

    for names, found, saved, weight, missing in run_ranks(program, 2, platform):
        assert (found, missing) == (sorted(names), ([], []))
        np.testing.assert_array_equal(saved, WEIGHT)
        np.testing.assert_array_equal(weight, WEIGHT)
