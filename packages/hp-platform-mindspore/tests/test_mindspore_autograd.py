"""Autograd nodes, backward, the two process-wide flags, and ranks that take turns within one process."""

from __future__ import annotations

import copy
import random
import threading

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn

from hp_dtensor import (
    DeviceMesh,
    Partial,
    Shard,
    distribute_tensor,
    from_local,
    get_platform,
    parallelize_value_and_grad,
)
from hp_dtensor.comm.world import SilentWorld, current_world
from hp_dtensor.exceptions import CapabilityError, GradientPathError
from hp_dtensor.parallel import nn as hp_nn
from hp_dtensor.testing import run_ranks


def leaf(platform, *shape, seed=0):
    x = platform.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))
    platform.set_requires_grad(x, True)
    return x


def total(platform, x):
    return platform.ops.sum(x)


# Nodes ---------------------------------------------------------------------------------------------------


def test_the_dual_is_the_gradient(platform):
    x = leaf(platform, 3, 2)
    y = platform.linear_map(x, lambda t: mint.sum(t, dim=0), lambda g: mint.broadcast_to(g, (3, 2)))
    platform.backward(y, Tensor(np.array([1, 10], np.float32)))
    np.testing.assert_array_equal(platform.get_grad(x).asnumpy(), [[1, 10]] * 3)


def test_maps_run_without_recording(platform):
    seen = []

    def double(t):
        seen.append((platform.is_grad_enabled(), platform.requires_grad(t * 2)))
        return t * 2

    platform.backward(total(platform, platform.linear_map(leaf(platform, 2), double, double)))
    assert seen == [(False, False)] * 2


def test_the_backward_of_a_backward_is_the_forward(platform):
    from mindspore._c_expression import run_backward

    x = leaf(platform, 3)
    calls = []

    def forward(t):
        calls.append("forward")
        return t * 3

    def backward(g):
        calls.append("backward")
        return g * 3

    y = total(platform, platform.ops.square(platform.linear_map(platform.ops.mul(x, x), forward, backward)))
    one = platform.ops.ones_like(y)
    (first,) = run_backward((y,), (one,), True, True, (x,), allow_unreachable=True, accumulate_grad=False)
    assert calls == ["forward", "backward"]
    platform.backward(total(platform, first))
    assert sorted(calls[2:]) == ["backward", "forward"]
    np.testing.assert_allclose(platform.get_grad(x).asnumpy(), 108 * x.asnumpy() ** 2, rtol=1e-5)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_map_that_returns_its_input(platform, requires_grad):
    x = leaf(platform, 2)
    platform.set_requires_grad(x, requires_grad)
    y = platform.linear_map(x, lambda t: t, lambda g: g * 5)
    assert platform.requires_grad(y) == requires_grad
    np.testing.assert_array_equal(y.asnumpy(), x.asnumpy())
    if requires_grad:
        platform.backward(total(platform, y))
        np.testing.assert_array_equal(platform.get_grad(x).asnumpy(), [5, 5])


def test_a_node_of_several_inputs_and_outputs(platform):
    x, y = leaf(platform, 2), leaf(platform, 2, seed=1)
    got = []

    def forward(a, b):
        return a * b, a + b, mint.sum(a)

    def backward(product, summed, unused):
        got.append(unused)
        return [product * y, product * x + summed]

    product, summed, _ = platform.custom_function(forward, backward, x, y)
    platform.backward(total(platform, platform.ops.add(product, summed)))
    assert got == [None]
    np.testing.assert_allclose(platform.get_grad(x).asnumpy(), y.asnumpy())
    np.testing.assert_allclose(platform.get_grad(y).asnumpy(), x.asnumpy() + 1)


def test_a_node_may_give_no_gradient(platform):
    x, y = leaf(platform, 2), leaf(platform, 2)
    result = platform.custom_function(lambda a, b: a * 1, lambda g: [g * 2, None], x, y)
    platform.backward(total(platform, result))
    np.testing.assert_array_equal(platform.get_grad(x).asnumpy(), [2, 2])
    assert platform.get_grad(y) is None


@pytest.mark.parametrize("make", ["leaf", "parameter", "identity"])
def test_leaves_that_are_added_have_gradients_of_their_own(platform, make):
    """The gradient of a sum is the same tensor for both terms, and MindSpore cannot copy it on CPU."""
    x, y, z = (leaf(platform, 2, seed=seed) for seed in range(3))
    if make == "parameter":
        x, y, z = (platform.Parameter(t) for t in (x, y, z))
    terms = (x, y, z)
    if make == "identity":
        terms = tuple(platform.linear_map(t, lambda t: t, lambda g: g) for t in terms)
    platform.backward(total(platform, platform.ops.mul(platform.ops.add(platform.ops.add(*terms[:2]), terms[2]), 3.0)))
    for t in (x, y, z):
        np.testing.assert_array_equal(platform.get_grad(t).asnumpy(), [3, 3])
    assert len({platform.get_grad(t).data_ptr() for t in (x, y, z)}) == 3


@pytest.mark.parametrize("made", ["leaf", "parameter", "thawed"])
def test_gradients_in_any_layout_accumulate(platform, made):
    """MindSpore adds gradients as if they were contiguous, which that of a transposed weight is not."""
    weights = np.arange(15, dtype=np.float32).reshape(5, 3)
    layouts = {
        "contiguous": lambda x: platform.ops.mul(x, Tensor(weights)),
        "transposed": lambda x: platform.ops.mul(platform.ops.transpose(x, 0, 1), Tensor(weights.T.copy())),
    }
    for first in layouts.values():
        for second in layouts.values():
            x = leaf(platform, 5, 3)
            if made == "parameter":
                x = platform.Parameter(x)
            elif made == "thawed":
                x = platform.Parameter(x, requires_grad=False)
                platform.set_requires_grad(x, True)
            for layout in (first, second, first):
                platform.backward(total(platform, layout(x)))
            np.testing.assert_array_equal(platform.get_grad(x).asnumpy(), 3 * weights)
            assert platform.get_grad(x).is_contiguous()


def _cell(platform):
    """Nobody but the Cell itself, at its first call, looks at its parameters."""
    return nn.SequentialCell(mint.nn.Linear(3, 5, bias=False))


def _cell_for_an_optimizer(platform):
    cell = _cell(platform)
    cell(Tensor(np.ones((1, 3), np.float32)))
    copied = copy.deepcopy(cell)
    copied.trainable_params()
    return copied


def _copied_module(platform):
    with hp_nn.building(platform):
        module = copy.deepcopy(hp_nn.Linear(3, 5))
    dict(platform.named_parameters(module))
    return module


@pytest.mark.parametrize("make", [_cell, _cell_for_an_optimizer, _copied_module])
def test_parameters_that_cells_or_copies_make_accumulate_too(platform, make):
    model = make(platform)
    inputs = [np.random.default_rng(seed).integers(-3, 4, (2, 3)).astype(np.float32) for seed in range(3)]
    seed = np.random.default_rng(3).integers(-3, 4, (2, 5)).astype(np.float32)
    for x in inputs:
        with platform.enable_grad():
            y = model(Tensor(x))
        platform.backward(y, Tensor(seed))
    weight = next(p for _, p in platform.named_parameters(model) if p.ndim == 2)
    np.testing.assert_array_equal(platform.get_grad(weight).asnumpy(), seed.T @ sum(inputs))


# Backward ------------------------------------------------------------------------------------------------


def test_gradients_accumulate_until_they_are_forgotten(platform):
    x = platform.Parameter(leaf(platform, 2))
    for expected in (2, 4):
        platform.backward(total(platform, platform.ops.mul(x, 2.0)))
        np.testing.assert_array_equal(platform.get_grad(x).asnumpy(), [expected] * 2)
    platform.set_grad(x, None)
    assert platform.get_grad(x) is None
    platform.set_grad(x, Tensor(np.ones(2, np.float32)))
    platform.backward(total(platform, x))
    np.testing.assert_array_equal(platform.get_grad(x).asnumpy(), [2, 2])


def test_a_graph_is_kept_on_request(platform):
    x = leaf(platform, 2)
    y = total(platform, platform.ops.square(x))
    platform.backward(y, retain_graph=True)
    platform.backward(y)
    np.testing.assert_allclose(platform.get_grad(x).asnumpy(), 4 * x.asnumpy())


def test_gradients_of_chosen_inputs_leave_no_trace(platform):
    x, y, unused = leaf(platform, 2), leaf(platform, 2, seed=1), leaf(platform, 2)
    between = platform.ops.mul(x, y)
    found = platform.grad([total(platform, platform.ops.square(between)), platform.ops.mul(y, 3.0)],
                          [between, y, unused], [None, Tensor(np.array([1, 2], np.float32))])  # fmt: skip
    np.testing.assert_allclose(found[0].asnumpy(), 2 * between.asnumpy(), rtol=1e-6)
    np.testing.assert_allclose(found[1].asnumpy(), 2 * between.asnumpy() * x.asnumpy() + [3, 6], rtol=1e-6)
    assert found[2] is None
    assert platform.get_grad(x) is None
    assert platform.get_grad(y) is None


def test_what_cannot_be_differentiated_is_said(platform):
    with pytest.raises(RuntimeError, match="does not depend on anything that requires a gradient"):
        platform.backward(platform.ops.ones((), ms.float32))
    with pytest.raises(ValueError, match=r"shape \[2\] needs its gradient"):
        platform.backward(platform.ops.mul(leaf(platform, 2), 2.0))


def off_the_main_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), name="worker")
    thread.start()
    thread.join()
    return found[0]


def test_another_thread_records_once_it_is_told_to(platform):
    x = leaf(platform, 3)

    def unrecorded():
        loss = total(platform, x * x)
        for call in (lambda: platform.backward(loss), lambda: platform.grad([loss], [x])):
            with pytest.raises(RuntimeError, match=r"thread 'worker'.*enable_grad") as error:
                call()
        return str(error.value)

    def recorded():
        with platform.enable_grad():
            platform.backward(total(platform, x * x))
        return platform.get_grad(x).asnumpy()

    assert "grad: the loss" in off_the_main_thread(unrecorded)
    np.testing.assert_allclose(off_the_main_thread(recorded), 2 * x.asnumpy(), rtol=1e-6)


def test_contiguous_and_detach_in_the_graph(platform):
    x = leaf(platform, 2, 3)
    turned = platform.contiguous(platform.ops.transpose(x, 0, 1))
    assert not platform.requires_grad(platform.detach(turned))
    assert platform.is_leaf(platform.detach(turned))
    assert not platform.is_leaf(turned)
    weights = Tensor(np.arange(6, dtype=np.float32).reshape(3, 2))
    platform.backward(total(platform, platform.ops.mul(turned, weights)))
    np.testing.assert_array_equal(platform.get_grad(x).asnumpy(), np.arange(6).reshape(3, 2).T)


# Flags ---------------------------------------------------------------------------------------------------


def test_contexts_nest_and_come_back_after_errors(platform):
    x = leaf(platform, 2)
    with platform.no_grad():
        assert not platform.is_grad_enabled()
        assert not platform.requires_grad(platform.ops.mul(x, 2.0))
        with platform.enable_grad():
            assert platform.requires_grad(platform.ops.mul(x, 2.0))
        assert not platform.is_grad_enabled()
    with pytest.raises(KeyError), platform.no_grad():
        raise KeyError
    assert platform.is_grad_enabled()


def test_a_forward_records_after_mindspore_has_turned_recording_off(platform):
    with hp_nn.building(platform):
        layer = hp_nn.Linear(2, 2)
    x = Tensor(np.ones((1, 2), np.float32))
    ms.value_and_grad(lambda t: (t * t).sum(), grad_position=0)(x)
    y = layer(x)
    platform.backward(total(platform, y))
    np.testing.assert_array_equal(platform.get_grad(layer.weight).asnumpy(), np.ones((2, 2)))


class Mean(nn.Cell):
    def construct(self, x):
        return mint.mean(x)

    def bprop(self, x, out, dout):
        return (mint.ones(x.shape) * dout / x.size,)


def test_a_bprop_that_would_see_shards_is_refused(platform):
    mesh = DeviceMesh("cpu", (2,), world=SilentWorld(0, 2, platform))
    weight = platform.Parameter(from_local(Tensor(np.ones((2, 2), np.float32)), mesh, [Shard(0)], shape=(3, 2)))
    with pytest.raises(CapabilityError, match=r"Mean has a bprop of its own, which would see this rank's shards"):
        ms.value_and_grad(lambda: Mean()(weight), None, [weight])()
    weight = ms.Parameter(Tensor(np.ones((3, 2), np.float32)))
    _, (grad,) = ms.value_and_grad(lambda: Mean()(weight), None, [weight])()
    np.testing.assert_allclose(grad.asnumpy(), np.full((3, 2), 1 / 6), rtol=1e-6)


def test_an_error_in_a_backward_leaves_autograd_usable(platform):
    def fail(g):
        raise ZeroDivisionError("in backward")

    with pytest.raises(ZeroDivisionError, match="in backward"):
        platform.backward(total(platform, platform.linear_map(leaf(platform, 2), lambda t: t * 1, fail)))
    x = leaf(platform, 2)
    platform.backward(total(platform, platform.ops.mul(x, 2.0)))
    np.testing.assert_array_equal(platform.get_grad(x).asnumpy(), [2, 2])
    assert platform.is_grad_enabled()


# Ranks that take turns -----------------------------------------------------------------------------------


def _train(platform, rank, switch, steps=3):
    """Steps with switches inside forward, backward, tensor hooks, a nested backward and no_grad."""
    rng = np.random.default_rng(rank)
    weights = [platform.Parameter(leaf(platform, 4, 4, seed=10 * rank + i)) for i in range(3)]
    found = []

    def through(t):
        switch()
        return t * 1

    def checkpointed(t):
        saved = []

        def forward(u):
            saved.append(u.asnumpy().copy())
            return mint.tanh(u)

        def backward(g):
            switch()
            again = platform.from_numpy(saved[0])
            platform.set_requires_grad(again, True)
            with platform.enable_grad():
                y = platform.linear_map(mint.tanh(again), through, through)
            platform.backward(y, g)
            return [platform.get_grad(again)]

        return platform.custom_function(forward, backward, t)

    def hook(g):
        switch()
        return g * 1.5

    for _ in range(steps):
        h = platform.from_numpy(rng.normal(size=(3, 4)).astype(np.float32))
        for weight in weights:
            h = mint.matmul(h, platform.linear_map(weight, through, through))
            h = checkpointed(platform.linear_map(h, through, through))
            h.register_hook(hook)
            with platform.no_grad():
                switch()
                assert not platform.requires_grad(h * 2)
        platform.backward(total(platform, platform.ops.square(h)))
        found += [platform.get_grad(weight).asnumpy().copy() for weight in weights]
        for weight in weights:
            platform.set_grad(weight, None)
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_threads_that_take_turns_anywhere_do_not_disturb_each_other(platform, seed):
    size, order = 4, random.Random(seed)
    turns, alive, results = [threading.Semaphore(0) for _ in range(size)], set(range(size)), {}
    started = platform.rank_state()
    switches = []

    def run(rank):
        def switch():
            state = platform.rank_state()
            switches.append(rank)
            turns[order.choice(sorted(alive))].release()
            turns[rank].acquire()
            platform.set_rank_state(state)

        turns[rank].acquire()
        platform.set_rank_state(started)
        try:
            results[rank] = _train(platform, rank, switch)
        finally:
            alive.discard(rank)
            if alive:
                turns[order.choice(sorted(alive))].release()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    turns[0].release()
    for thread in threads:
        thread.join(120)
    platform.set_rank_state(started)
    assert len(switches) > 200
    for rank in range(size):
        for got, expected in zip(results[rank], _train(platform, rank, lambda: None), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_simulated_ranks_communicate_in_forward_and_backward(platform):
    def program():
        group = current_world(platform).all

        def summed(t):
            t = platform.ops.clone(t)
            group.all_reduce(t)
            return t

        x = leaf(platform, 2, seed=group.rank)
        y = platform.linear_map(platform.ops.square(x), summed, summed)
        platform.backward(total(platform, platform.ops.mul(y, float(group.rank + 1))))
        return x.asnumpy(), y.asnumpy(), platform.get_grad(x).asnumpy()

    results = run_ranks(program, 3, platform)
    squares = sum(x**2 for x, _, _ in results)
    for x, y, grad in results:
        np.testing.assert_allclose(y, squares, rtol=1e-6)
        np.testing.assert_allclose(grad, 2 * x * (1 + 2 + 3), rtol=1e-6)


def _shown(op):
    platform = get_platform("mindspore")
    mesh = DeviceMesh("cpu", (2,), platform=platform)
    x = from_local(Tensor(np.ones(2, np.float32)), mesh, (Partial(op),), shape=(2,))
    platform.set_requires_grad(x, True)
    with pytest.raises(GradientPathError, match=r"its own contribution.*Redistribute the value"):
        platform.grad([x.full_tensor().sum()], [x])
    platform.backward(x.full_tensor().sum())
    with pytest.raises(GradientPathError, match=r"its own contribution.*Redistribute the value"):
        _ = x.grad


@pytest.mark.parametrize("op", ["avg", "max"])
def test_gradients_of_contributions_to_anything_but_sums_are_refused(op):
    run_ranks(_shown, 2, "mindspore", op)


def _of_methods(platform, weight):
    return (weight * weight).sum()


def _of_an_index(platform, weight):
    return weight[1:3].sum()


def _of_the_platform(platform, weight):
    return platform.ops.sum(platform.ops.mul(weight, weight))


@pytest.mark.parametrize("loss", [_of_methods, _of_an_index, _of_the_platform])
def test_operations_after_a_value_and_grad_of_plain_tensors_are_recorded(platform, loss):
    """MindSpore's own leaves its grad flag off: what came before the next node was missing in the gradient."""
    values = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    rows = np.repeat([[0], [1], [1], [0], [0]], 4, axis=1)

    def run():
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",), platform=platform)
        weight = platform.Parameter(distribute_tensor(Tensor(values), mesh, [Shard(0)]))
        ms.value_and_grad(lambda x: (x * x).sum())(Tensor(values))
        _, (grad,) = parallelize_value_and_grad(lambda: loss(platform, weight), [weight])()
        return grad.full_tensor().asnumpy()

    for grad in run_ranks(run, 2, platform):
        np.testing.assert_allclose(grad, rows if loss is _of_an_index else 2 * values, rtol=1e-6)
