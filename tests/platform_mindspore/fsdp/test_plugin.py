"""`fully_shard` of MindSpore's own cells: weights after several steps are those of one rank."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn

import hp_fsdp as fsdp
from hp_dtensor import init_device_mesh, parallelize_value_and_grad
from hp_dtensor.exceptions import CapabilityError, GradientPathError
from hp_dtensor.testing import run_ranks
from hp_platform_mindspore.optim import AdamW

RANKS = 2
STEPS = 3


class Block(nn.Cell):
    """A Cell with its own parameter, besides those of the cells that it contains."""

    def __init__(self, *cells):
        super().__init__()
        self.inner = nn.SequentialCell(*cells)
        self.scale = ms.Parameter(Tensor(np.full(3, 0.7, np.float32)), name="scale")

    def construct(self, x):
        return self.inner(x) * self.scale


MODELS = {
    "Dense": lambda: nn.SequentialCell(nn.Dense(3, 7), nn.ReLU(), nn.Dense(7, 3)),
    "Linear of mint": lambda: nn.SequentialCell(mint.nn.Linear(3, 7), mint.nn.SiLU(), mint.nn.Linear(7, 3)),
    "cells in cells": lambda: nn.SequentialCell(
        Block(nn.Dense(3, 3)), Block(nn.Dense(3, 5), nn.Tanh(), nn.Dense(5, 3))
    ),
    "norms": lambda: nn.SequentialCell(nn.Dense(3, 5), nn.LayerNorm((5,)), nn.Dense(5, 3)),
    "convolutions": lambda: nn.SequentialCell(
        nn.Conv1d(1, 3, 2, pad_mode="pad", has_bias=True), nn.ReLU(), nn.Flatten(), nn.Dense(6, 3)
    ),
}


def _build(name):
    """Return the model with the same weights on every rank, not called yet, so that no Cell has cached parameters."""
    model = MODELS[name]()
    rng = np.random.default_rng(0)
    for parameter in model.get_parameters():
        parameter.set_data(Tensor(rng.normal(size=parameter.shape, scale=0.5).astype(np.float32)))
    return model


def _inputs(name, step, rank):
    x = np.random.default_rng(10 * step + rank).normal(size=(4, 3)).astype(np.float32)
    return Tensor(x[:, None] if name == "convolutions" else x)


def _train(platform, name, model, ranks):
    optimizer = AdamW([p for _, p in platform.named_parameters(model)], lr=1e-2)
    for step in range(STEPS):
        with platform.enable_grad():
            losses = [platform.ops.mean(platform.ops.mul(y, y)) for y in (model(_inputs(name, step, r)) for r in ranks)]
            loss = sum(losses[1:], losses[0]) / len(losses)
        platform.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def _values(platform, model):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).asnumpy().copy()
        for name, p in platform.named_parameters(model)
    }


def _sharded(platform, name):
    """Return the model, sharded in two groups, and this rank."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",), platform=platform)
    model = _build(name)
    fsdp.fully_shard(model[0], mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    return model, mesh.get_local_rank("dp")


@pytest.mark.parametrize("name", MODELS)
def test_ordinary_cells_train_as_on_one_rank(platform, name):
    def alone():
        model = _build(name)
        before = _values(platform, model)
        _train(platform, name, model, range(RANKS))
        return before, _values(platform, model)

    def rank():
        model, number = _sharded(platform, name)
        _train(platform, name, model, [number])
        return _values(platform, model)

    ((before, expected),) = run_ranks(alone, 1, platform)
    assert all(np.abs(expected[key] - value).max() > 1e-3 for key, value in before.items())
    for found in run_ranks(rank, RANKS, platform):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-5, atol=2e-6, err_msg=key)


class Penalized(nn.Cell):
    """Lists its parameters in its forward, also in the first one."""

    def __init__(self):
        super().__init__()
        self.maps = nn.SequentialCell(nn.Dense(3, 7), nn.Dense(7, 3))

    def construct(self, x):
        penalty = [mint.sum(p * p) for p in self.trainable_params()]
        return self.maps(x) * sum(penalty[1:], penalty[0])


def test_parameters_are_in_their_cells_lists_during_a_forward(platform):
    def gradients(is_sharded):
        model = Penalized()
        rng = np.random.default_rng(0)
        for parameter in model.get_parameters():
            parameter.set_data(Tensor(rng.integers(-2, 3, parameter.shape).astype(np.float32)))
        if is_sharded:
            mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",), platform=platform)
            fsdp.fully_shard(model, mesh)
        with platform.enable_grad():
            y = model(Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)))
        platform.backward(mint.sum(y))
        grads = {name: platform.get_grad(p) for name, p in platform.named_parameters(model)}
        return {name: (g.full_tensor() if is_sharded else g).asnumpy().copy() for name, g in grads.items()}

    expected = gradients(False)
    for found in run_ranks(gradients, RANKS, platform, True):
        for name, grad in expected.items():
            np.testing.assert_array_equal(found[name], grad)


def test_gradients_that_autograd_does_not_find_are_refused(platform):
    def rank():
        model, number = _sharded(platform, "Dense")
        differentiate = parallelize_value_and_grad(lambda x: mint.mean(model(x)), list(model.trainable_params()))
        with platform.enable_grad(), pytest.raises(GradientPathError, match=r"platform\.backward\(loss\)"):
            differentiate(_inputs("Dense", 0, number))
        model.reset()
        _train(platform, "Dense", model, [number])

    run_ranks(rank, RANKS, platform)


def test_recomputation_that_mindspore_cannot_do_here_says_what_can(platform):
    model = _build("cells in cells")
    model[0].recompute()
    with platform.enable_grad(), pytest.raises(CapabilityError, match=r"hp_dtensor\.parallel\.recompute\.checkpoint"):
        model(_inputs("cells in cells", 0, 0))


def _normalized(platform):
    model = nn.SequentialCell(nn.Dense(3, 5, has_bias=False), nn.BatchNorm1d(5), nn.Dense(5, 3)).set_train()
    for seed, index in enumerate((0, 2)):
        weights = np.random.default_rng(seed).normal(size=model[index].weight.shape).astype(np.float32)
        model[index].weight.set_data(Tensor(weights))
    return model


def test_statistics_of_normalizations_stay_with_their_rank(platform):
    """Statistics are parameters in MindSpore, and kernels write them in every forward."""

    def statistics(model, number):
        for step in range(2):
            with platform.enable_grad():
                platform.backward(mint.mean(model(_inputs("Dense", step, number))))
        return [x.asnumpy().copy() for x in (model[1].moving_mean, model[1].moving_variance)]

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",), platform=platform)
        model = fsdp.fully_shard(_normalized(platform), mesh)
        assert not isinstance(model[1].moving_mean, platform.DTensor)
        assert isinstance(model[1].gamma, platform.DTensor)
        number = mesh.get_local_rank("dp")
        return number, statistics(model, number)

    for number, found in run_ranks(rank, RANKS, platform):
        expected = statistics(_normalized(platform), number)
        assert all(np.abs(x).max() > 1e-3 for x in expected)
        for x, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, wanted)


def test_gradients_of_rows_alone_are_refused_by_name(platform):
    """On CPU, MindSpore's gradient of EmbeddingLookup's table contains only the rows that were looked up."""

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",), platform=platform)
        model = fsdp.fully_shard(nn.SequentialCell(nn.EmbeddingLookup(7, 4), nn.Dense(4, 2)), mesh)
        with platform.enable_grad():
            loss = mint.mean(model(Tensor(np.array([[1, 1, 2]], np.int32))))
        with pytest.raises(fsdp.FSDPStateError, match=r"gradient of 0\.embedding_table .* is of shape \[3, 4\], not"):
            platform.backward(loss)

    run_ranks(rank, RANKS, platform)


def test_a_list_of_cells_is_refused_as_a_module(platform):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",), platform=platform)
    cells = nn.CellList([nn.Dense(3, 5), nn.Dense(5, 3)])
    for container in (cells, nn.CellDict({"first": cells[0]})):
        with pytest.raises(fsdp.FullyShardError, match=r"a Cell(List|Dict) is never called itself"):
            fsdp.fully_shard(container, mesh)
    fsdp.fully_shard(list(cells), mesh)
