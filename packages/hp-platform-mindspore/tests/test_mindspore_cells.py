"""MindSpore's own cells with DTensor parameters: sharding, loading, assigning, saving, mixed precision."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from hp_dtensor import Replicate, Shard, ShardingPlan, distribute_tensor, init_device_mesh, shard_module
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_dtensor.testing import run_ranks

RNG = np.random.default_rng(0)
BATCH, WEIGHT, BIAS = (RNG.normal(size=shape).astype(np.float32) for shape in ((5, 4), (6, 4), (6,)))


class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(4, 6)
        self.dense.weight.set_data(Tensor(WEIGHT.copy()))
        self.dense.bias.set_data(Tensor(BIAS.copy()))

    def construct(self, x):
        return self.dense(x)


def mesh_of(platform):
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)


def sharded(platform, weight=("tp", "None")):
    return shard_module(Layer(), mesh_of(platform), ShardingPlan({"dense.weight": weight, "dense.bias": ("tp",)}))


def values(x):
    return x.full_tensor().asnumpy()


def test_an_ordinary_cell_is_sharded(platform):
    def program():
        layer = sharded(platform)
        result = layer(distribute_tensor(Tensor(BATCH), mesh_of(platform), [Replicate()]))
        platform.backward(platform.ops.sum(result))
        return values(result), values(platform.get_grad(layer.dense.weight))

    for result, grad in run_ranks(program, 2, platform):
        np.testing.assert_allclose(result, BATCH @ WEIGHT.T + BIAS, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(grad, np.broadcast_to(BATCH.sum(0), WEIGHT.shape), rtol=1e-5, atol=1e-6)


WAYS = {
    "a state_dict of DTensors": lambda platform, cell: cell.load_state_dict(sharded(platform).state_dict()),
    "one placed otherwise": lambda platform, cell: cell.load_state_dict(sharded(platform, ("None", "tp")).state_dict()),
    "one of full tensors": lambda platform, cell: cell.load_state_dict(Layer().state_dict()),
    "load_param_into_net": lambda platform, cell: ms.load_param_into_net(cell, Layer().parameters_dict()),
    "assigned in full": lambda platform, cell: setattr(cell.dense, "weight", Tensor(WEIGHT.copy())),
    "assigned DTensor": lambda platform, cell: setattr(
        cell.dense, "weight", distribute_tensor(Tensor(WEIGHT.copy()), mesh_of(platform), [Shard(1)])
    ),
    "ops.assign": lambda platform, cell: ops.assign(cell.dense.weight, sharded(platform).dense.weight),
}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_loaded_in_their_placement(platform, way):
    def program():
        cell = sharded(platform)
        parameter = cell.dense.weight
        parameter.set_data(0.0)
        assert not values(parameter).any()
        WAYS[way](platform, cell)
        assert cell.dense.weight is parameter
        assert parameter.placements == (Shard(0),)
        return platform.local_shape(parameter), values(parameter)

    for shape, found in run_ranks(program, 2, platform):
        assert shape == (3, 4)
        np.testing.assert_array_equal(found, WEIGHT)


def test_values_of_another_shape_are_refused(platform):
    def program():
        parameter = sharded(platform).dense.weight
        with pytest.raises(ValueError, match=r"global shape, got \[3, 4\]"):
            parameter.set_data(Tensor(WEIGHT[:3].copy()))
        return values(parameter)

    for found in run_ranks(program, 2, platform):
        np.testing.assert_array_equal(found, WEIGHT)


def test_mixed_precision(platform, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MindSpore writes the cells that it changes

    def program():
        layer = ms.amp.auto_mixed_precision(sharded(platform), "O1", ms.float16)
        return values(layer(distribute_tensor(Tensor(BATCH), mesh_of(platform), [Replicate()])))

    expected = ms.amp.auto_mixed_precision(Layer(), "O1", ms.float16)(Tensor(BATCH)).asnumpy()
    assert np.abs(expected - (BATCH @ WEIGHT.T + BIAS)).max() > 1e-5  # it was rounded
    for found in run_ranks(program, 2, platform):
        np.testing.assert_array_equal(found, expected)


class Words(nn.Cell):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.act = nn.GELU()
        self.head = nn.Dense(4, 7, has_bias=False)
        self.embed.embedding_table.set_data(Tensor(np.arange(28, dtype=np.float32).reshape(7, 4) / 28))
        self.head.weight.set_data(Tensor(np.arange(28, dtype=np.float32).reshape(7, 4) / -28))
        if tied:
            self.head.weight = self.embed.embedding_table

    def construct(self, ids):
        return self.head(self.act(self.embed(ids)))


EMBEDDINGS = {
    "by vocabulary": (RowwiseParallel(use_local_output=False), ColwiseParallel(use_local_output=False), False),
    "by vocabulary, tied": (RowwiseParallel(use_local_output=False), ColwiseParallel(use_local_output=False), True),
    "by width": (ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False), False),
}


@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_an_embedding_of_mindspore_takes_the_styles(platform, kind):
    """Its table has a name of its own; the classes are sharded unevenly."""
    embed, head, tied = EMBEDDINGS[kind]
    ids = Tensor(np.array([[0, 6, 3], [3, 4, 1]], np.int32))

    def train(model):
        with platform.enable_grad():
            loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
            y = model(ids)
            target = ids.reshape(-1)
            if isinstance(y, platform.DTensor):
                target = distribute_tensor(target, y.device_mesh)
            loss = loss(y.reshape(-1, 7), target)
        platform.backward(loss)
        grads = {name: platform.get_grad(p) for name, p in platform.named_parameters(model)}
        return {name: (values(g) if isinstance(g, platform.DTensor) else g.asnumpy()) for name, g in grads.items()}

    def program():
        model = parallelize_module(Words(tied), mesh_of(platform), {"embed": embed, "head": head})
        assert platform.local_shape(model.embed.embedding_table) != (7, 4)
        assert (model.head.weight is model.embed.embedding_table) == tied
        return train(model)

    expected = train(Words(tied))
    for found in run_ranks(program, 2, platform):
        assert found.keys() == expected.keys()
        for name, grad in expected.items():
            np.testing.assert_allclose(found[name], grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("size", "stride"), [(3, 2), (2, 1), (3, 1)])
def test_pooling_that_keeps_the_size(platform, size, stride):
    """The largest of what there is: of negative values too, beside which padding must not count."""
    images = -1 - np.random.default_rng(1).random((3, 2, 5, 5)).astype(np.float32)
    pool = nn.MaxPool2d(size, stride, pad_mode="same")
    expected = pool(Tensor(images)).asnumpy()

    def program():
        return [values(pool(distribute_tensor(Tensor(images), mesh_of(platform), [Shard(dim)]))) for dim in range(4)]

    for found in run_ranks(program, 2, platform):
        for result in found:
            np.testing.assert_array_equal(result, expected)


NOT_COMPOSED = {
    "conv_transpose2d": (lambda: mint.nn.functional.conv_transpose2d, (1, 2, 3, 3), (2, 2, 2, 2)),
    "im2col": (lambda: lambda x: mint.nn.functional.unfold(x, 2), (1, 2, 4, 4)),
    "cummax": (lambda: lambda x: mint.cummax(x, 1), (2, 3)),
    "quantile": (lambda: lambda x: ops.quantile(x, 0.5, 1), (2, 3)),
    "index_copy_": (lambda: lambda x: x.index_copy_(0, x[:, 0].astype(ms.int64), x), (1, 2)),
}


@pytest.mark.parametrize("name", NOT_COMPOSED)
def test_what_is_not_composed_on_the_cpu_says_where_it_works(platform, name):
    def program():
        function, *shapes = NOT_COMPOSED[name]
        given = [
            distribute_tensor(Tensor(np.ones(shape, np.float32)), mesh_of(platform), [Replicate()]) for shape in shapes
        ]
        with pytest.raises(CapabilityError, match=f"(?s){name}.*MindSpore's CPU.*Ascend.*torch platform"):
            function()(*given)
        return platform.operation(name) is None

    assert run_ranks(program, 2, platform) == [True, True]


@pytest.mark.parametrize("values_of_ids", [(2.0, -1.0), (1.0, 0.0)])
def test_one_hot_of_ids_outside_of_the_classes(platform, values_of_ids):
    on, off = map(Tensor, values_of_ids)
    ids = Tensor(np.array([0, 2, -1, 1, 3], np.int64))

    def program():
        return values(ops.one_hot(distribute_tensor(ids, mesh_of(platform), [Shard(0)]), 2, on, off))

    for found in run_ranks(program, 2, platform):
        np.testing.assert_array_equal(found, ops.one_hot(ids, 2, on, off).asnumpy())
