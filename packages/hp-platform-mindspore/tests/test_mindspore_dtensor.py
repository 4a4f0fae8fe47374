"""A DTensor is a MindSpore tensor: attributes, operators, gradients, parameters; on simulated ranks."""

from __future__ import annotations

import copy
import math
import pickle

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.exceptions import MixedOperandsError, PlacementError, ShardingRuleError
from hp_dtensor.spec.placements import Partial, Replicate, Shard
from hp_dtensor.spec.tensor_spec import TensorSpec
from hp_dtensor.tensor.conversions import distribute_tensor, from_local
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing import run_ranks
from hp_platform_mindspore.tensor.dtensor import MindSporeDTensor

F = mint.nn.functional
FULL = np.arange(15, dtype=np.float32).reshape(5, 3) - 4


def on_ranks(platform, fn, size=2):
    """`fn(mesh)` on simulated ranks of a mesh of one axis; the results by rank."""

    def program():
        return fn(init_device_mesh("cpu", (size,), mesh_dim_names=("dp",), platform=platform))

    return run_ranks(program, size, platform)


@pytest.fixture
def mesh(platform):
    """A mesh of this process alone."""
    return init_device_mesh("cpu", (1,), mesh_dim_names=("dp",), platform=platform)


def sharded(mesh, full=FULL, placement=None):
    return distribute_tensor(Tensor(full), mesh, [placement or Shard(0)], src_data_rank=None)


# What it is ----------------------------------------------------------------------------------------------


def test_shapes_are_global_and_the_data_local(platform):
    def facts(mesh):
        x = sharded(mesh)
        return (x.shape, x.ndim, x.dim(), x.size, x.numel(), len(x), x.nbytes), (x.local_shape, x.to_local().shape)

    for rank, (shape, local) in enumerate(on_ranks(platform, facts)):
        assert shape == ((5, 3), 2, 2, 15, 15, 5, 60)
        assert local == ((3 - rank, 3), (3 - rank, 3))


def test_it_is_made_by_functions_only():
    with pytest.raises(TypeError, match="distribute_tensor"):
        MindSporeDTensor(Tensor([1.0]))


def test_its_text_shows_placements_and_local_data(platform, mesh):
    x = sharded(mesh, FULL[:1])
    assert repr(x) == "DTensor([1, 3], Float32, (dp:S(0)) on mesh (dp=1), local=[[-4., -3., -2.]])"
    assert str(platform.Parameter(x)).startswith("Parameter of DTensor([1, 3]")


def test_wrap_and_unwrap_share_storage_and_leave_their_input_alone(platform, mesh):
    local = platform.from_numpy(np.ones((2, 3), np.float32))
    x = platform.wrap(local, TensorSpec(mesh, [Shard(0)], (2, 3), local.dtype))
    assert type(local) is Tensor
    assert type(platform.unwrap(x)) is Tensor
    assert platform.unwrap(local) is local
    assert isinstance(x, DTensor)
    platform.to_numpy(x)[0, 0] = 7
    assert local.asnumpy()[0, 0] == 7


def test_values_are_global(platform):
    def values(mesh):
        x = sharded(mesh)
        one = sharded(mesh, np.array([2.5], np.float32), Replicate())
        partial = from_local(Tensor(np.array([1.0], np.float32)), mesh, [Partial()], shape=(1,))
        return x.asnumpy().tolist(), np.asarray(x).tolist(), x.tolist(), one.item(), float(partial), bool(one)

    for found in on_ranks(platform, values):
        assert found == (FULL.tolist(), FULL.tolist(), FULL.tolist(), 2.5, 2.0, True)


# Operations called directly ------------------------------------------------------------------------------

PRIMITIVES = {
    "x + y": lambda x: x + x,
    "x + 1": lambda x: x + 1,
    "1 - x": lambda x: 1 - x,
    "add with alpha": lambda x: mint.add(x, x, alpha=2),
    "x * 2": lambda x: 2 * x,
    "1 / x": lambda x: 1 / (x + 10),
    "x ** 2": lambda x: x**2,
    "-x": lambda x: -x,
    "abs": lambda x: abs(x),
    "exp": lambda x: x.exp(),
    "silu": lambda x: F.silu(x),
    "clamp": lambda x: x.clamp(min=0.0),
    "maximum": lambda x: mint.maximum(x, -x),
    "compare": lambda x: x > 0,
    "where": lambda x: mint.where(x > 0, x, -x),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "cast": lambda x: x.astype(ms.float16),
    "sum": lambda x: x.sum(),
    "sum(0)": lambda x: x.sum(0),
    "mint.sum": lambda x: mint.sum(x, dim=0, keepdim=True),
    "sum(axis)": lambda x: x.sum(axis=1),
    "mean": lambda x: x.mean(-1, True),
    "amax": lambda x: mint.amax(x, 1),
    "max": lambda x: mint.max(x),
    "cumsum": lambda x: ops.cumsum(x, 1),
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: ops.log_softmax(x, -1),
    "logsumexp": lambda x: ops.logsumexp(x, 1),
    "matmul": lambda x: x @ x.T,
    "linear": lambda x: F.linear(x, x),
    "reshape": lambda x: x.reshape(-1, 1),
    "reshape tuple": lambda x: mint.reshape(x, (3, 5)),
    "view": lambda x: x.view(15),
    "flatten": lambda x: mint.flatten(x),
    "transpose": lambda x: mint.transpose(x, 0, 1),
    "permute": lambda x: x.permute(1, 0),
    "T": lambda x: x.T,
    "t": lambda x: x.t(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: mint.unsqueeze(x, 0).squeeze(),
    "broadcast_to": lambda x: mint.broadcast_to(x, (2, 5, 3)),
    "expand": lambda x: x.expand((2, 5, 3)),
    "cat": lambda x: mint.cat([x, x], 1),
    "split": lambda x: mint.split(x, [1, 2], 1)[1],
    "split evenly": lambda x: mint.split(x, 2, 1)[1],
    "chunk": lambda x: mint.chunk(x, 2, 1)[0],
    "narrow": lambda x: mint.narrow(x, 1, 1, 2),
    "unbind": lambda x: x.unbind(1)[2],
    "flip": lambda x: mint.flip(x, (1,)),
    "topk": lambda x: ops.topk(x, 2)[0],
    "x[0]": lambda x: x[0],
    "x[:, 1:]": lambda x: x[:, 1:],
    "x[..., None, -1]": lambda x: x[..., None, -1],
    "zeros_like": lambda x: ops.zeros_like(x),
    "stop_gradient": lambda x: ops.stop_gradient(x),
    "iteration": lambda x: list(x)[3],
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitives_are_intercepted(platform, name):
    function = PRIMITIVES[name]
    expected = function(Tensor(FULL))

    def program(mesh):
        results = []
        for placement in (Shard(0), Shard(1), Replicate()):
            result = function(sharded(mesh, FULL, placement))
            assert isinstance(result, MindSporeDTensor)
            assert result.shape == expected.shape
            results.append((str(result.dtype), result.asnumpy()))
        return results

    for dtype, found in (pair for results in on_ranks(platform, program) for pair in results):
        assert dtype == str(expected.dtype)
        atol = 4e-6 if name == "log_softmax" else 1e-6  # MindSpore's own kernel is off by 2e-6
        np.testing.assert_allclose(found, expected.asnumpy(), rtol=1e-6, atol=atol)


def test_cells_of_mindspore_run_on_dtensors(platform):
    layer = nn.Dense(3, 2)
    expected = layer(Tensor(FULL)).asnumpy()

    def program(mesh):
        twin = copy.deepcopy(layer)
        for name in ("weight", "bias"):
            parameter = distribute_tensor(getattr(layer, name).data, mesh, [Shard(0)], src_data_rank=None)
            platform.set_parameter(twin, name, platform.Parameter(parameter))
        return twin(sharded(mesh)).asnumpy()

    for found in on_ranks(platform, program):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_indexing_by_a_plain_tensor_is_refused(mesh):
    with pytest.raises(MixedOperandsError, match="getitem: a plain tensor"):
        sharded(mesh)[Tensor([0, 1])]


def test_mixed_operands_are_refused(platform, mesh):
    with pytest.raises(MixedOperandsError, match="a plain tensor of shape"):
        sharded(mesh) + Tensor(FULL)
    with pytest.raises(MixedOperandsError, match="linear: a plain tensor"):
        platform.ops.linear(Tensor(FULL), sharded(mesh))


def test_an_operation_without_a_rule_is_named(mesh):
    with pytest.raises(ShardingRuleError, match="'Cross' has no sharding rule"):
        mint.cross(sharded(mesh), sharded(mesh), dim=1)


def test_local_operations(platform, mesh):
    x = sharded(mesh)
    with platform.local_op():
        assert type(x + x) is Tensor
        assert type(platform.ops.cat([x, x], 0)) is Tensor
        assert type(platform.ops.sum(x)) is Tensor
    assert isinstance(x + x, DTensor)
    with pytest.raises(ZeroDivisionError), platform.local_op():
        raise ZeroDivisionError
    assert isinstance(x + x, DTensor)


def test_copies_into_dtensors(platform):
    def program(mesh):
        x, y = sharded(mesh), sharded(mesh, FULL * 2, Replicate())
        x.copy_(y)
        with pytest.raises(MixedOperandsError, match="copy_ into a DTensor"):
            x.copy_(Tensor(FULL))
        return x.asnumpy()

    for found in on_ranks(platform, program):
        np.testing.assert_array_equal(found, FULL * 2)


# Gradients and parameters --------------------------------------------------------------------------------


def test_parameters_are_leaves_with_dtensor_gradients(platform):
    def program(mesh):
        w = platform.Parameter(sharded(mesh))
        assert isinstance(w, (ms.Parameter, DTensor))
        assert w.shape == (5, 3)
        x = sharded(mesh, np.ones((2, 3), np.float32), Replicate())
        losses = [platform.ops.sum(platform.ops.square(platform.ops.linear(x, w))) for _ in range(2)]
        for loss in losses:
            loss.full_tensor()
            platform.backward(loss)
        assert w.grad is w.grad
        assert platform.get_grad(w) is w.grad
        assert w.grad.placements == (Shard(0),)
        grad = w.grad.asnumpy()
        w.grad = None
        assert w.grad is None
        return grad

    expected = 2 * 2 * 2 * np.repeat(FULL.sum(1, keepdims=True), 3, 1)
    for grad in on_ranks(platform, program):
        np.testing.assert_allclose(grad, expected, rtol=1e-6)


def test_a_replicated_parameter_gets_the_whole_gradient(platform):
    """An operation that mixes it with shards is local; its gradient is summed over the ranks."""

    def program(mesh):
        w = platform.Parameter(sharded(mesh, np.ones((2, 3), np.float32), Replicate()))
        loss = (F.linear(sharded(mesh), w) ** 2).sum().full_tensor()
        platform.backward(loss)
        return w.grad.placements, platform.to_numpy(w.grad)

    plain = platform.Parameter(Tensor(np.ones((2, 3), np.float32)))
    platform.backward((F.linear(Tensor(FULL), plain) ** 2).sum())
    for placements, grad in on_ranks(platform, program):
        assert placements == (Replicate(),)
        np.testing.assert_allclose(grad, plain._grad.asnumpy(), rtol=1e-6)


def test_gradients_that_do_not_fit_are_refused(mesh):
    x = sharded(mesh)
    with pytest.raises(PlacementError, match=r"must be \[5, 3\], got \[2\]"):
        x.grad = Tensor(np.zeros(2, np.float32))
    with pytest.raises(PlacementError, match="redistribute it first"):
        x.grad = sharded(mesh, FULL, Shard(1))


def test_gradients_of_inputs(platform):
    def program(mesh):
        x = sharded(mesh)
        platform.set_requires_grad(x, True)
        y = x * x
        (dy, dx) = platform.grad([y.sum().full_tensor()], [y, x])
        assert x.grad is None
        assert dx.placements == (Shard(0),)
        return dy.asnumpy(), dx.asnumpy()

    for dy, dx in on_ranks(platform, program):
        np.testing.assert_array_equal(dy, np.ones((5, 3)))
        np.testing.assert_array_equal(dx, 2 * FULL)


PRODUCTS = {
    "inner": (ops.inner, [(4, 2), (5, 2)], np.inner, (1, 1)),
    "kron": (ops.kron, [(2, 3), (2, 2)], np.kron, (0, 0)),
    "addmv": (ops.addmv, [(4,), (4, 2), (2,)], lambda c, x, y: c + x @ y, (None, 1, 0)),
    "addbmm": (ops.addbmm, [(4, 5), (2, 4, 3), (2, 3, 5)], lambda c, x, y: c + (x @ y).sum(0), (None, 0, 0)),
    "addr": (ops.addr, [(2, 5), (2,), (5,)], lambda c, x, y: c + np.outer(x, y), (0, 0, None)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_which_a_rank_has_nothing(platform, name):
    """MindSpore's kernels leave what was in the memory."""
    function, shapes, reference, dims = PRODUCTS[name]
    arrays = [np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]

    def program(mesh):
        leaves = [
            platform.Parameter(sharded(mesh, array, Replicate() if dim is None else Shard(dim)))
            for array, dim in zip(arrays, dims, strict=True)
        ]
        for _ in range(5):
            remains = [Tensor(np.full(size, 7.5, np.float32)) * 1 for size in (3, 4, 5, 16, 20, 40) for _ in range(6)]
            del remains
            np.testing.assert_array_equal(function(*leaves).full_tensor().asnumpy(), reference(*arrays))
        platform.backward(function(*leaves).sum())
        return [leaf.grad.full_tensor().asnumpy() for leaf in leaves]

    (expected,) = run_ranks(lambda: program(init_device_mesh("cpu", (1,), platform=platform)), 1, platform)
    for found in on_ranks(platform, program, 3):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


def test_gradients_of_slices_with_a_step(platform):
    """The kernel for it in MindSpore fails where another dimension than the first is stepped through."""
    full = np.arange(30, dtype=np.float32).reshape(2, 5, 3)
    index = (Ellipsis, None, slice(1, None, 2), slice(None, None, 2))
    expected = np.zeros_like(full)
    expected[index] = 1

    def program(mesh):
        found = []
        for placement in (Shard(0), Shard(1), Replicate()):
            x = platform.Parameter(sharded(mesh, full, placement))
            y = x[index]
            platform.backward(y.sum())
            found.append((y.asnumpy(), x.grad.asnumpy()))
        return found

    for y, grad in (pair for found in on_ranks(platform, program) for pair in found):
        np.testing.assert_array_equal(y, full[index])
        np.testing.assert_array_equal(grad, expected)


def test_a_parameter_of_a_shard_shares_its_storage(platform):
    def program(mesh):
        flat = np.zeros(20, np.float32)
        rows = 3 - mesh.get_local_rank()
        local = platform.from_numpy(flat[2 : 2 + rows * 3].reshape(rows, 3))
        w = platform.Parameter(platform.wrap(local, sharded(mesh).spec), requires_grad=True)
        platform.copy_(w, sharded(mesh))
        return flat[2:].tolist()

    for rank, flat in enumerate(on_ranks(platform, program)):
        values = FULL[:3] if rank == 0 else FULL[3:]
        assert flat == values.reshape(-1).tolist() + [0.0] * (18 - values.size)


def test_copies_are_independent_and_pickling_is_refused(platform, mesh):
    w = platform.Parameter(sharded(mesh))
    twin = copy.deepcopy(w)
    platform.copy_(w, sharded(mesh, FULL * 0))
    assert isinstance(twin, (ms.Parameter, DTensor))
    assert twin.placements == w.placements
    np.testing.assert_array_equal(twin.asnumpy(), FULL)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(w)
    with pytest.raises(RuntimeError, match="only leaf tensors"):
        copy.deepcopy(w * 2)


# What MindSpore has no kernel for on CPU -----------------------------------------------------------------

IMAGE = np.arange(2 * 4 * 5 * 4, dtype=np.float32).reshape(2, 4, 5, 4) / 50 - 1
WEIGHT = np.arange(4 * 4 * 3 * 3, dtype=np.float32).reshape(4, 4, 3, 3) / 50 - 1
BIAS = np.array([1, -2, 3, 5], np.float32)
IDS, ROWS = np.array([1, 1, 0]), IMAGE[[0, 1, 1]] * 3
IDS_OF_ROWS = np.tile(IDS[:, None, None, None], (1, 4, 5, 4))


def _cell(cell, **parameters):
    """A cell of MindSpore with the given parameters, called on a DTensor."""

    def call(platform, x):
        made = cell()
        for name, value in parameters.items():
            placed = distribute_tensor(Tensor(value), x.device_mesh, [Replicate()], src_data_rank=None)
            platform.set_parameter(made, name, platform.Parameter(placed))
        return made(x)

    return call


def _with(function, *arrays):
    """`function(x, *tensors)` with replicated DTensors."""

    def call(platform, x):
        others = [distribute_tensor(Tensor(a), x.device_mesh, [Replicate()], src_data_rank=None) for a in arrays]
        return function(x, *others)

    return call


FORMS = {
    "mint conv2d": (_with(F.conv2d, WEIGHT, BIAS), lambda f, x, w, b: f("conv2d")(x, w, b), (WEIGHT, BIAS)),
    "mint conv2d same": (
        _with(lambda x, w: F.conv2d(x, w, None, 1, "same"), WEIGHT),
        lambda f, x, w: f("conv2d")(x, w, None, 1, 1),
        (WEIGHT,),
    ),
    "ops conv2d": (_with(ops.conv2d, WEIGHT, BIAS), lambda f, x, w, b: f("conv2d")(x, w, b), (WEIGHT, BIAS)),
    "nn.Conv2d": (
        _cell(lambda: nn.Conv2d(4, 4, 3, has_bias=True), weight=WEIGHT, bias=BIAS),  # padded as "same"
        lambda f, x, w, b: f("conv2d")(x, w, b, 1, 1),
        (WEIGHT, BIAS),
    ),
    "mint max_pool2d": (_with(lambda x: F.max_pool2d(x, 2)), lambda f, x: f("max_pool2d")(x, 2), ()),
    "nn.MaxPool2d": (_with(nn.MaxPool2d(2, 2)), lambda f, x: f("max_pool2d")(x, 2), ()),
    "nn.AvgPool2d": (_with(nn.AvgPool2d(2, 2)), lambda f, x: f("avg_pool2d")(x, 2), ()),
    "mint avg_pool2d": (_with(lambda x: F.avg_pool2d(x, 2)), lambda f, x: f("avg_pool2d")(x, 2), ()),
    "adaptive": (_with(lambda x: F.adaptive_avg_pool2d(x, 3)), lambda f, x: f("adaptive_avg_pool2d")(x, 3), ()),
    "mint layer_norm": (_with(lambda x, b: F.layer_norm(x, (4,), b, b), BIAS),
                        lambda f, x, b: f("layer_norm")(x, (4,), b, b), (BIAS,)),
    "nn.LayerNorm": (_cell(lambda: nn.LayerNorm((4,), epsilon=1e-5), gamma=BIAS, beta=BIAS),
                     lambda f, x, b: f("layer_norm")(x, (4,), b, b), (BIAS,)),
    "mint group_norm": (_with(lambda x, b: F.group_norm(x, 2, b, b), BIAS),
                        lambda f, x, b: f("group_norm")(x, 2, b, b), (BIAS,)),
    "mint batch_norm": (_with(lambda x, b: F.batch_norm(x, None, None, b, b, True), BIAS),
                        lambda f, x, b: f("batch_norm")(x, None, None, b, b, True), (BIAS,)),
    "interpolate": (_with(lambda x: F.interpolate(x, (3, 7), mode="bilinear")),
                    lambda f, x: f("interpolate")(x, (3, 7), mode="bilinear"), ()),
    "ops einsum": (_with(lambda x, w: ops.einsum("ncij,oc->noij", x, w), WEIGHT[:, :, 0, 0]),
                   lambda f, x, w: f("einsum")("ncij,oc->noij", x, w), (WEIGHT[:, :, 0, 0],)),
    "mint topk": (_with(lambda x: mint.topk(x, 2, 1, False)[0]), lambda f, x: f("topk")(x, 2, 1, False)[0], ()),
    "mint sort": (_with(lambda x: mint.sort(x, dim=1)[0]), lambda f, x: f("sort")(x, 1)[0], ()),
    "mint cumsum": (_with(lambda x: mint.cumsum(x, 1)), lambda f, x: f("cumsum")(x, 1), ()),
    "mint norm": (_with(lambda x: mint.norm(x, 2, 1)), lambda f, x: f("norm")(x, 2, 1), ()),
    "mint log_softmax": (_with(lambda x: F.log_softmax(x, 1)), lambda f, x: f("log_softmax")(x, 1), ()),
    "mint logsigmoid": (_with(F.logsigmoid), lambda f, x: f("logsigmoid")(x), ()),
    "mint elu": (_with(F.elu), lambda f, x: f("elu")(x), ()),
    "mint median": (_with(lambda x: mint.median(x, 1)[0]), lambda f, x: f("median")(x, 1)[0], ()),
    "mint argsort": (
        _with(lambda x: mint.argsort(x, 1, True)), lambda f, x: f("argsort")(x, 1, descending=True), ()),
    "index_put that adds": (_with(lambda x, i, y: x.index_put((i,), y, accumulate=True), IDS, ROWS),
                            lambda f, x, i, y: f("index_add")(x, 0, i, y), (IDS, ROWS)),
    "scatter_ that adds": (_with(lambda x, i, y: (x * 1).scatter_(0, i, y, reduce="add"), IDS_OF_ROWS, ROWS),
                           lambda f, x, i, y: f("scatter_add")(x, 0, i, y), (IDS_OF_ROWS, ROWS)),
    "scatter_ that adds a number": (_with(lambda x, i: (x * 1).scatter_(0, i, 2.0, reduce="add"), IDS_OF_ROWS),
                                    lambda f, x, i: f("scatter_add")(x, 0, i, i.astype(ms.float32) * 0 + 2),
                                    (IDS_OF_ROWS,)),
    "scatter by keyword": (_with(lambda x, i, y: x.scatter(dim=0, index=i, src=y), IDS_OF_ROWS[:2], ROWS),
                           lambda f, x, i, y: f("scatter")(x, 0, i, y), (IDS_OF_ROWS[:2], ROWS)),
    "index_add by keyword": (_with(lambda x, i, y: x.index_add(dim=0, index=i, source=y, alpha=2), IDS, ROWS),
                             lambda f, x, i, y: f("index_add")(x, 0, i, y * 2), (IDS, ROWS)),
    "squeeze by keyword": (_with(lambda x: x[:1, :, :1].squeeze(axis=2)), lambda f, x: x[:1, :, 0], ()),
    "permute by keyword": (_with(lambda x: x.permute(dims=(1, 2, 0, 3))), lambda f, x: x.permute(1, 2, 0, 3), ()),
    "reshape by keyword": (_with(lambda x: x.reshape(shape=(8, 20))), lambda f, x: x.reshape(8, 20), ()),
    "expand_as by keyword": (_with(lambda x: x[:1].expand_as(other=x)), lambda f, x: x[:1].expand_as(x), ()),
    "mint group_norm alone": (_with(lambda x: F.group_norm(x, 2)), lambda f, x: f("group_norm")(x, 2), ()),
    "ops group_norm with a weight": (_with(lambda x, w: ops.group_norm(x, 2, w), BIAS),
                                     lambda f, x, w: f("group_norm")(x, 2, w), (BIAS,)),
    "mint layer_norm alone": (_with(lambda x: F.layer_norm(x, (5, 4))),
                              lambda f, x: f("layer_norm")(x, (5, 4)), ()),
    "mint layer_norm with a bias": (_with(lambda x, b: F.layer_norm(x, (4,), bias=b), BIAS),
                                    lambda f, x, b: f("layer_norm")(x, (4,), None, b), (BIAS,)),
    "mint pad circular": (_with(lambda x: F.pad(x, (1, 2, 1, 0), mode="circular")),
                          lambda f, x: ops.pad(x, (1, 2, 1, 0), mode="circular"), ()),
    "ops adaptive_avg_pool2d": (_with(lambda x: ops.adaptive_avg_pool2d(x, (None, 2))),
                                lambda f, x: f("adaptive_avg_pool2d")(x, (5, 2)), ()),
    "transpose()": (_with(lambda x: x.transpose()), lambda f, x: x.transpose(3, 2, 1, 0), ()),
    "any": (_with(lambda x: (x > 0.5).any()), lambda f, x: Tensor(True), ()),
    "ops any": (_with(lambda x: ops.any(x > 9)), lambda f, x: Tensor(False), ()),
    "add with other and alpha": (_with(lambda x: x.add(other=2, alpha=3)), lambda f, x: x + 6, ()),
    "mul with other": (_with(lambda x: x.mul(other=x)), lambda f, x: x * x, ()),
    "pow with exponent": (_with(lambda x: x.pow(exponent=2)), lambda f, x: x * x, ()),
    "mint sub of a number": (_with(lambda x: mint.sub(x, 3.0, alpha=2)), lambda f, x: x - 6, ()),
    "x & 3": (_with(lambda x: x.astype(ms.int32) & 1), lambda f, x: x.astype(ms.int32) % 2, ()),
    "mint bitwise_or": (_with(lambda x: mint.bitwise_or(x.astype(ms.int32), x.astype(ms.int32))),
                        lambda f, x: x.astype(ms.int32), ()),
    "nanmean": (_with(lambda x: x.nanmean(axis=1)), lambda f, x: x.mean(1), ()),
    "bucketize": (_with(lambda x: ops.bucketize(x, [-0.5, 0.5])),
                  lambda f, x: (x > -0.5).astype(ms.int32) + (x > 0.5).astype(ms.int32), ()),
    "x // 0.3": (_with(lambda x: x // 0.3), lambda f, x: x // 0.3, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_functions_and_cells_without_a_kernel(platform, name):
    called, reference, arrays = FORMS[name]
    expected = reference(platform.operation, Tensor(IMAGE), *map(Tensor, arrays)).asnumpy()

    def program(mesh):
        found = []
        for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
            result = called(platform, sharded(mesh, IMAGE, placement))
            assert isinstance(result, MindSporeDTensor)
            found.append(result.asnumpy())
        return found

    for found in (value for values in on_ranks(platform, program) for value in values):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
