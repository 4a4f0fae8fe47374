"""MindSpore's own ways to train sharded models: derivatives, TrainOneStepCell, optimizers and checkpoints."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

import hp_fsdp
from hp_dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.testing import run_ranks
from hp_platform_mindspore.patches.optimizers import ELEMENTWISE, ON_FULL

RNG = np.random.default_rng(5)
WEIGHT, BIAS, BATCH = (RNG.normal(size=shape).astype(np.float32) for shape in ((5, 4), (5,), (3, 4)))
OPTIMIZERS = sorted(
    (kind for kind in ELEMENTWISE | ON_FULL if "experimental" not in kind.__module__), key=lambda k: k.__name__
)


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


def test_the_gradient_of_the_output_may_be_an_argument_too(platform):
    values = np.arange(4, dtype=np.float32)

    def derivative(x, y):
        return ops.GradOperation(get_all=True, sens_param=True)(lambda x, y: x * y)(x, y, sens=y)

    def program():
        x, y = (distribute_tensor(Tensor(a), mesh_of(platform), [Shard(0)]) for a in (values, values + 1))
        return [array(found) for found in derivative(x, y)]

    for found in run_ranks(program, 2, platform):
        np.testing.assert_array_equal(found, [(values + 1) ** 2, values * (values + 1)])


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
    options = {nn.Momentum: {"momentum": 0.9}, nn.AdaFactor: {"relative_step": False}}.get(kind, {})
    parameters = [net.dense.weight, net.dense.bias]
    step = nn.TrainOneStepCell(net, kind(parameters, learning_rate=0.02, **options))
    losses = [float(array(step(x))) for _ in range(3)]
    return losses, array(net.dense.weight), array(net.dense.bias)


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_a_train_step_cell_trains_as_one_device(platform, kind):
    expected = trained(Net(), Tensor(BATCH), kind)
    assert not np.allclose(expected[1], WEIGHT, atol=1e-5)
    makes = (*MODELS.values(), hybrid, lambda platform: fully_sharded(platform, dim=1))
    for make in makes if kind in (nn.Momentum, nn.Adam, nn.AdamWeightDecay, nn.AdaFactor) else (fully_sharded,):
        for found in run_ranks(lambda make=make: trained(*make(platform), kind), 2, platform):
            for each, wanted in zip(found, expected, strict=True):
                np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1])
def test_centralized_gradients_are_those_of_full_gradients(platform, dim):
    """On CPU MindSpore leaves this shape as it is, and has no kernel for 16 columns, as one rank's shard has."""

    def train(net):
        group = {"params": net.trainable_params(), "weight_decay": 0.1, "grad_centralization": True}
        step = nn.TrainOneStepCell(net, nn.Momentum([group], 0.02, 0.9))
        return [float(array(step(Tensor(BATCH[0, 0])))) for _ in range(3)], array(net.scale)

    def program():
        sharded = {"shard_placement_fn": lambda x: Shard(dim)}
        return train(hp_fsdp.fully_shard(Single((5, 31)), mesh_of(platform), **sharded))

    expected = train(Single((5, 31)))
    assert np.abs(expected[1] - 1).max() > 1e-3
    for found in run_ranks(program, 2, platform):
        for each, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(each, wanted, rtol=1e-5)  # a sum in another order


class Single(nn.Cell):
    def __init__(self, shape=(1,)):
        super().__init__()
        self.scale = ms.Parameter(Tensor(np.ones(shape, np.float32)), name="scale")

    def construct(self, x):
        return ops.sum(ops.square(x * self.scale))


@pytest.mark.parametrize("kind", [nn.Adagrad, nn.LazyAdam, nn.AdamOffload, nn.AdaFactor, nn.AdamWeightDecay])
def test_empty_shards_are_no_obstacle(platform, kind):
    """A parameter of one element leaves one rank with an empty shard."""

    def train(net):
        options = {} if kind is nn.AdaFactor else {"learning_rate": 0.02}
        step = nn.TrainOneStepCell(net, kind(net.trainable_params(), **options))
        return [float(array(step(Tensor(BATCH)))) for _ in range(3)], array(net.scale)

    expected = train(Single())
    for found in run_ranks(lambda: train(hp_fsdp.fully_shard(Single(), mesh_of(platform))), 2, platform):
        for each, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(each, wanted, rtol=1e-5)


def gradients(net, x):
    return ms.value_and_grad(net, None, [net.dense.weight, net.dense.bias])(x)[1]


def scaled_down(net, x):
    scaler = amp.DynamicLossScaler(scale_value=16, scale_factor=2, scale_window=1)
    grads = scaler.unscale(gradients(net, x))
    finite = amp.all_finite(grads)
    scaler.adjust(finite)
    return grads, finite, scaler.scale_value, scaler.scale(net(x))


def with_an_infinite_element(net, x):
    grads = [grad * 1 for grad in gradients(net, x)]
    grads[0] = grads[0] / ops.relu(grads[0])  # some elements are negative
    return amp.all_finite(tuple(grads))


def accumulated(net, x):
    sums = ms.ParameterTuple([net.dense.weight, net.dense.bias]).clone("sums", "zeros")
    for _ in range(2):
        for each, grad in zip(sums, gradients(net, x), strict=True):
            ops.assign_add(each, grad)
    ops.assign_sub(sums[0], sums[0] * 0.25)
    return [each.name for each in sums], list(sums)


GRADIENTS = {
    "clip_by_global_norm": lambda net, x: ops.clip_by_global_norm(gradients(net, x), 1.0),
    "clip_by_global_norm above the norm": lambda net, x: ops.clip_by_global_norm(gradients(net, x), 1e4),
    "a loss scaler": scaled_down,
    "all_finite": with_an_infinite_element,
    "assign_add to clones": accumulated,
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_what_is_done_with_gradients_is_that_of_one_device(platform, name, model):
    expected = shown(GRADIENTS[name](Net(), Tensor(BATCH)))
    for found in run_ranks(lambda: shown(GRADIENTS[name](*MODELS[model](platform))), 2, platform):
        same(found, expected)


class Reversed(nn.Cell):
    """Returns its input, and tells autograd otherwise."""

    def construct(self, x):
        return x

    def bprop(self, x, out, dout):
        return (-dout,)


class Several(nn.Cell):
    """Several inputs, not all of them tensors, and an output that is not used."""

    def construct(self, x, factor, y=None):
        return x * factor, y + 1, x

    def bprop(self, x, factor, y, out, dout):
        return dout[0] * 2 + dout[2], None, dout[1] * out[1]


class Own(Net):
    def __init__(self):
        super().__init__()
        self.reversed, self.several = Reversed(), Several()

    def construct(self, x):
        hidden = self.reversed(self.dense(x))
        first, second, _ = self.several(hidden, 2.0, y=ops.tanh(hidden))
        return ops.sum(ops.square(first)) + ops.sum(ops.square(second))


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(5, 5, weight_init="ones", bias_init="zeros")
        self.num_calls = 0

    def construct(self, x, mask, scale=1.0):
        self.num_calls += 1
        return ops.tanh(self.dense(x) * 0.1) * mask * scale


class Recomputed(Net):
    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.CellList([Block(), Block()])
        self.blocks[0].recompute(**options)
        self.blocks[1].recompute(**options)

    def construct(self, x):
        hidden = self.dense(x)
        mask = ops.tanh(hidden)
        for block in self.blocks:
            hidden = block(hidden, mask, scale=2.0)
        return ops.sum(ops.square(hidden))


class RecomputedByHooks(Recomputed):
    def __init__(self):
        super().__init__(use_reentrant=False)


class RecomputedInPlace(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([Block()])

    def construct(self, x):
        hidden = self.dense(x)
        return ops.sum(ops.square(ms.recompute(self.blocks[0], hidden, ops.tanh(hidden))))


def by_backward(platform, net):
    with platform.enable_grad():
        loss = net(Tensor(BATCH))
    platform.backward(loss)
    return [array(g) for g in map(platform.get_grad, net.trainable_params()) if g is not None]


@pytest.mark.parametrize("kind", [Own, Recomputed, RecomputedByHooks, RecomputedInPlace])
@pytest.mark.parametrize("in_units", [False, True])
def test_cells_with_a_backward_of_their_own_have_gradients_of_one_device(platform, kind, in_units):
    """In `value_and_grad` and in a backward; recomputed once where they are a unit of `fully_shard`, and where not."""

    def program():
        net = kind()
        for unit in (*(getattr(net, "blocks", ()) if in_units else ()), net):
            hp_fsdp.fully_shard(unit, mesh_of(platform))
        grads = ms.value_and_grad(net, None, net.trainable_params())(Tensor(BATCH))[1]
        used = [array(x) for x, p in zip(grads, net.trainable_params(), strict=True) if p is not net.unused]
        return used, by_backward(platform, net), [block.num_calls for block in getattr(net, "blocks", ())]

    net = kind()
    expected = ms.value_and_grad(net, None, [p for p in net.trainable_params() if p is not net.unused])(Tensor(BATCH))[
        1
    ]
    expected = shown(expected)
    assert all(np.abs(grad).max() > 1e-3 for grad in expected)
    for *found, num_calls in run_ranks(program, 2, platform):
        assert set(num_calls) <= {4}
        for each in found:
            same(each, expected)


class Penalized(Net):
    """The derivative of a part of the forward is part of the loss."""

    def construct(self, x):
        slope = ms.grad(lambda y: ops.sum(ops.tanh(self.dense(y))))(x)
        return ops.sum(ops.square(self.dense(x))) + ops.sum(ops.square(slope))


@pytest.mark.parametrize("differentiate", [by_backward, lambda platform, net: gradients(net, Tensor(BATCH))])
def test_a_derivative_in_the_forward_of_a_sharded_cell_is_refused(platform, differentiate):
    """The loss missed the gradient of the derivative."""

    def refused():
        net = Penalized()
        hp_fsdp.fully_shard(net, mesh_of(platform))
        with pytest.raises(CapabilityError, match=r"in the forward of a sharded Cell.*as operations"):
            differentiate(platform, net)

    run_ranks(refused, 2, platform)


def test_a_derivative_outside_of_a_forward_may_follow_an_early_gather(platform):
    """Gathered parameters are in their Cells then, as in a forward."""

    def program(gathers):
        ms.set_seed(1)
        net = Net()
        hp_fsdp.fully_shard(net, mesh_of(platform))
        weights = net.trainable_params()
        if gathers:
            net.unshard()
        loss, grads = ms.value_and_grad(net, None, weights)(Tensor(BATCH))
        return float(loss.asnumpy()), [x.full_tensor().asnumpy() for x in grads]

    for (loss, grads), (other, others) in zip(
        run_ranks(program, 2, platform, False), run_ranks(program, 2, platform, True), strict=True
    ):
        assert loss == other
        assert all(np.array_equal(a, b) for a, b in zip(grads, others, strict=True))


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
