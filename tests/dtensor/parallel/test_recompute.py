"""Recomputation in backward gives the same gradients, saves nothing, and decides nothing again."""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import weakref

import numpy as np
import pytest

from hp_dtensor import parallelize_value_and_grad
from hp_dtensor.comm.collectives import all_gather, all_to_all_rows
from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.saved_tensors import SavedTensors
from hp_dtensor.comm_debug import CommDebugMode
from hp_dtensor.exceptions import CapabilityError, GradientPathError
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import checkpoint, saved_result, saved_value
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.conversions import distribute_tensor, full_tensor
from hp_dtensor.testing import run_ranks

VALUES = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
WEIGHT = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)


@pytest.fixture(params=["for what is saved", "as a node"])
def way(request, hp_platform, monkeypatch):
    """Recomputation as the platform does it, and as one node, which works on every platform."""
    if request.param == "as a node":
        monkeypatch.setattr(hp_platform, "recomputes_on_unpack", False)


def leaf(platform, array):
    x = platform.from_numpy(array.copy())
    platform.set_requires_grad(x, True)
    return x


class Layer:
    """A linear map times a number that is decided again at each call."""

    def __init__(self, platform, weight):
        self.platform, self.weight = platform, weight
        self.numbers = itertools.count(2)
        self.calls = 0
        self.inside = None

    def __call__(self, x, factor=1.0):
        ops = self.platform.ops
        self.calls += 1
        chosen = float(saved_value(lambda: next(self.numbers)))
        hidden = ops.silu(ops.linear(x, self.weight))
        self.inside = weakref.ref(hidden)
        return ops.mul(ops.mul(hidden, hidden), chosen * factor)


def gradients(platform, x, layer, run):
    loss = platform.ops.sum(run(layer, x, 0.5))
    gc.collect()
    held = layer.inside() is not None
    platform.backward(full_tensor(loss) if hasattr(loss, "spec") else loss)
    return [platform.get_grad(x), platform.get_grad(layer.weight)], held


def plainly(layer, x, factor):
    return layer(x, factor)


def again(platform, run=plainly):
    return lambda layer, x, factor: checkpoint(lambda x, factor: run(layer, x, factor), x, factor, platform=platform)


@pytest.mark.usefixtures("way")
def test_gradients_are_the_same_and_nothing_is_held(hp_platform):
    def measure(run):
        x, layer = leaf(hp_platform, VALUES), Layer(hp_platform, leaf(hp_platform, WEIGHT))
        found, held = gradients(hp_platform, x, layer, run)
        return [hp_platform.to_numpy(g) for g in found], held, layer.calls, next(layer.numbers)

    expected, _, calls, decided = measure(plainly)
    assert (calls, decided) == (1, 3)
    # Once, and one within another; stopped before the inner one, a recomputation of the outer one calls nothing.
    inner = 2 if hp_platform.recomputes_on_unpack else 3
    for run, times in ((again(hp_platform), 2), (again(hp_platform, again(hp_platform)), inner)):
        found, held, calls, decided = measure(run)
        for got, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert not held
        assert (calls, decided) == (times, 3), "computed again, decided once"


@pytest.mark.parametrize(
    ("placed", "weight_placed"), [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(1), Shard(1))]
)
def test_distributed_inputs_and_weights(hp_platform, placed, weight_placed):
    def rank(run):
        mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("x",), platform=hp_platform)
        x, weight = (
            distribute_tensor(hp_platform.from_numpy(array), mesh, [placement])
            for array, placement in ((VALUES, placed), (WEIGHT, weight_placed))
        )
        for tensor in (x, weight):
            hp_platform.set_requires_grad(tensor, True)
        found, _ = gradients(hp_platform, x, Layer(hp_platform, weight), run)
        return [hp_platform.to_numpy(full_tensor(g)) for g in found]

    for expected, got in zip(
        run_ranks(rank, 2, hp_platform, plainly), run_ranks(rank, 2, hp_platform, again(hp_platform)), strict=True
    ):
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1], expected[1])


def test_where_no_gradient_is_wanted_nothing_is_computed_again(hp_platform):
    layer = Layer(hp_platform, leaf(hp_platform, WEIGHT))
    with hp_platform.no_grad():
        again(hp_platform)(layer, leaf(hp_platform, VALUES), 1.0)
    # An input that needs none would hide the weights behind it.
    loss = hp_platform.ops.sum(again(hp_platform)(layer, hp_platform.from_numpy(VALUES), 1.0))
    hp_platform.backward(loss)
    assert layer.calls == 2
    assert np.abs(hp_platform.to_numpy(hp_platform.get_grad(layer.weight))).max() > 0


@pytest.mark.usefixtures("way")
def test_what_a_repetition_makes_is_not_held_longer_than_backward_needs_it(hp_platform):
    ops, made, held = hp_platform.ops, [], []

    def noted(grad):
        gc.collect()
        held.append(made[-1]() is not None)
        return grad

    def part(x):
        x = hp_platform.custom_function(lambda x: ops.mul(x, 2.0), noted, x)
        y = ops.mul(x, 2.0)
        y = ops.mul(y, y)
        made.append(weakref.ref(y))
        return ops.mul(y, y)

    loss = ops.sum(checkpoint(part, leaf(hp_platform, VALUES), platform=hp_platform))
    hp_platform.backward(loss)
    assert (len(made), held) == (2, [False])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_in_any_floating_dtype(hp_platform, dtype):
    ops, kind = hp_platform.ops, hp_platform.dtype(dtype)
    x = hp_platform.detach(ops.cast(hp_platform.from_numpy(VALUES.copy()), kind))
    hp_platform.set_requires_grad(x, True)
    y = checkpoint(lambda x: ops.reshape(x, (3, 5)), x, platform=hp_platform)
    hp_platform.backward(y, ops.cast(hp_platform.from_numpy(np.full((3, 5), 2, np.float32)), kind))
    grad = ops.cast(hp_platform.get_grad(x), hp_platform.dtype("float32"))
    np.testing.assert_array_equal(hp_platform.to_numpy(grad), np.full_like(VALUES, 2))


def test_a_node_lets_go_of_what_it_has_kept_though_the_loss_is_held(hp_platform):
    ops, x = hp_platform.ops, leaf(hp_platform, VALUES)

    def square(x):
        found = SavedTensors(hp_platform, x)
        alive.append(weakref.ref(found))
        return hp_platform.custom_function(
            lambda x: ops.mul(x, x), lambda grad: ops.mul(grad, ops.mul(found.tensors[0], 2.0)), x
        )

    alive = []
    loss = ops.sum(square(x))
    hp_platform.backward(loss, retain_graph=True)
    hp_platform.backward(loss)
    np.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.get_grad(x)), 4 * VALUES)
    gc.collect()
    assert [each() for each in alive] == [None]
    with pytest.raises(RuntimeError):
        hp_platform.backward(loss)


@pytest.mark.usefixtures("way")
def test_hooks_that_are_always_called_are_where_a_repetition_ends_within_their_module(hp_platform):
    """Such hooks undo what one before the forward has done."""

    class Exponential(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(self.ops.exp(x))

    with nn.building(hp_platform):
        module = Exponential()
    entered, left = [], []
    hp_platform.add_forward_pre_hook(module, lambda *_: entered.append(1))
    hp_platform.add_forward_hook(module, lambda *_: left.append(1), always_call=True)
    x = leaf(hp_platform, VALUES)
    hp_platform.backward(hp_platform.ops.sum(checkpoint(module, x, platform=hp_platform)))
    assert len(entered) == len(left) == 2


@pytest.mark.parametrize("name", ["linear", "mul", "div", "maximum", "where", "add", "neg"])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_rank_that_holds_nothing_repeats_as_many_collectives(hp_platform, name, is_last):
    """All rows go to the first of two ranks; an operation there saves something for backward, or nothing."""
    ops = hp_platform.ops
    operation = {
        "linear": lambda x: ops.linear(x, hp_platform.from_numpy(WEIGHT[:3].copy())),
        "mul": lambda x: ops.mul(x, x),
        "div": lambda x: ops.div(1.0, x),
        "maximum": lambda x: ops.maximum(x, ops.neg(x)),
        "where": lambda x: ops.where(ops.gt(x, 1.0), x, ops.neg(x)),
        "add": lambda x: ops.add(x, x),
        "neg": ops.neg,
    }[name]

    def rank():
        group = DeviceMesh("cpu", (2,), mesh_dim_names=("x",), platform=hp_platform).group_along()
        x = leaf(hp_platform, VALUES[:2] * (1 + group.rank))
        sent, received = [2, 0], [[2, 2], [0, 0]][group.rank]

        def part(x):
            y = operation(all_to_all_rows(ops.exp(x), group, sent, received))
            return y if is_last else all_to_all_rows(y, group, received, sent)

        found = []
        for run in (part, lambda x: checkpoint(part, x, platform=hp_platform)):
            hp_platform.set_grad(x, None)
            hp_platform.backward(ops.sum(run(x)))
            found.append(hp_platform.to_numpy(hp_platform.get_grad(x)).copy())
        np.testing.assert_array_equal(*found)

    run_ranks(rank, 2, hp_platform)


@pytest.mark.usefixtures("way")
def test_another_way_the_second_time_is_refused(hp_platform):
    def wander(x):
        for _ in range(next(lengths)):
            saved_value(int)
        return hp_platform.ops.mul(hp_platform.ops.mul(x, x), x)

    for first, second in ((1, 2), (2, 1)):
        lengths = iter([first, second])
        loss = hp_platform.ops.sum(checkpoint(wander, leaf(hp_platform, VALUES), platform=hp_platform))
        with pytest.raises(RuntimeError, match="made other calls when it was recomputed"):
            hp_platform.backward(loss)


@pytest.mark.usefixtures("way")
def test_what_a_part_writes_after_an_operation_has_saved_it_is_refused(hp_platform):
    ops = hp_platform.ops

    def part(x):
        y = ops.exp(x)
        z = ops.mul(y, y)
        with hp_platform.no_grad():
            hp_platform.copy_(y, hp_platform.from_numpy(VALUES.copy()))
        return ops.exp(ops.mul(z, 0.1))

    for run in (part, lambda x: checkpoint(part, x, platform=hp_platform)):
        y = run(leaf(hp_platform, VALUES))
        with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|in place since)"):
            hp_platform.backward(ops.sum(y))


@pytest.mark.usefixtures("way")
def test_an_input_written_meanwhile_is_refused(hp_platform):
    if hp_platform.name == "mindspore":
        pytest.skip("MindSpore counts the writes to a detached tensor apart")
    x = leaf(hp_platform, VALUES)
    between = hp_platform.ops.mul(x, 2.0)
    loss = hp_platform.ops.sum(checkpoint(lambda x: hp_platform.ops.silu(x), between, platform=hp_platform))
    with hp_platform.no_grad():
        hp_platform.copy_(between, hp_platform.from_numpy(VALUES))
    with pytest.raises(RuntimeError, match="modified in place since"):
        hp_platform.backward(loss)


def test_a_module_of_the_platform(hp_platform):
    with nn.building(hp_platform):
        linear = nn.Linear(3, 4)
    hp_platform.copy_(linear.weight, hp_platform.from_numpy(WEIGHT))
    x = leaf(hp_platform, VALUES)
    hp_platform.backward(hp_platform.ops.sum(checkpoint(linear, x, platform=hp_platform)))
    np.testing.assert_allclose(hp_platform.to_numpy(hp_platform.get_grad(x)), np.tile(WEIGHT.sum(0), (5, 1)), rtol=1e-6)


@pytest.mark.usefixtures("way")
def test_a_backward_to_given_inputs(hp_platform):
    """As one node a part refuses it: it would leave gradients in the parameters inside, and give None for them."""
    x, weight = leaf(hp_platform, VALUES), leaf(hp_platform, WEIGHT)
    layer = Layer(hp_platform, weight)

    def loss():
        layer.numbers = itertools.count(2)
        return hp_platform.ops.sum(again(hp_platform)(layer, x, 0.5))

    if hp_platform.recomputes_on_unpack:
        found = [*hp_platform.grad([loss()], [x]), *parallelize_value_and_grad(loss, [weight])()[1]]
    else:
        with pytest.raises(GradientPathError, match=r"reaches a function of .*checkpoint"):
            hp_platform.grad([loss()], [x])
        with pytest.raises(GradientPathError, match="parallelize_value_and_grad"):
            parallelize_value_and_grad(loss, [weight])()
    assert hp_platform.get_grad(weight) is None
    hp_platform.backward(loss())
    grads = [hp_platform.get_grad(x), hp_platform.get_grad(weight)]
    for got, wanted in zip(found if hp_platform.recomputes_on_unpack else grads, grads, strict=True):
        np.testing.assert_array_equal(hp_platform.to_numpy(got), hp_platform.to_numpy(wanted))


@pytest.mark.usefixtures("way")
def test_a_plain_call_on_the_way_to_given_inputs(hp_platform):
    """Nothing is computed again where nothing is recorded, or the input needs no gradient: so nothing is lost."""
    weight, x = leaf(hp_platform, WEIGHT), hp_platform.from_numpy(VALUES)

    def loss():
        layer = Layer(hp_platform, weight)
        with hp_platform.no_grad():
            target = again(hp_platform)(layer, leaf(hp_platform, VALUES), 0.5)
        return hp_platform.ops.sum(hp_platform.ops.mul(again(hp_platform)(layer, x, 0.5), target))

    _, (grad,) = parallelize_value_and_grad(loss, [weight])()
    hp_platform.backward(loss())
    np.testing.assert_array_equal(hp_platform.to_numpy(grad), hp_platform.to_numpy(hp_platform.get_grad(weight)))


@pytest.mark.usefixtures("way")
def test_random_numbers_are_drawn_once_more(hp_platform):
    ops, x = hp_platform.ops, leaf(hp_platform, VALUES)
    ones = hp_platform.from_numpy(np.ones_like(VALUES))

    def draw():
        return hp_platform.operation("dropout")(ones, 0.5)

    def noisy(x):
        drawn.append(hp_platform.to_numpy(noise := draw()).copy())
        return ops.mul(x, noise)

    for run in (noisy, lambda x: checkpoint(noisy, x, platform=hp_platform)):
        drawn = []
        hp_platform.manual_seed(3)
        y = run(x)
        after = hp_platform.to_numpy(draw()).copy()
        hp_platform.backward(ops.sum(y))
        np.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.get_grad(x)), drawn[0])
        hp_platform.set_grad(x, None)
    assert len(drawn) == 2
    np.testing.assert_array_equal(drawn[1], drawn[0])
    # What is drawn after the recomputation goes on from where forward had come to.
    hp_platform.manual_seed(3)
    draw()
    np.testing.assert_array_equal(hp_platform.to_numpy(draw()), after)


class Counted:
    """A product, an attention and a collective, whose calls are counted."""

    def __init__(self, platform, weight, mesh):
        self.platform, self.weight, self.mesh, self.calls = platform, weight, mesh, []

    def __call__(self, x):
        platform, group = self.platform, self.mesh.group_along()
        x = platform.custom_function(
            lambda t: saved_result("products", lambda: self._count("products", platform.ops.mul(t, 2.0))),
            lambda g: platform.ops.mul(g, 2.0),
            x,
        )
        x = all_gather(platform.ops.mul(x, self.weight), group, 0, [5, 5])
        return platform.ops.mul(x, x)

    def _count(self, kind, result):
        self.calls.append(kind)
        return result


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("saved_kinds", [(), ("collectives",), ("collectives", "attention")])
def test_saved_results_are_not_computed_again(hp_platform, saved_kinds):
    def rank(save):
        mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("x",), platform=hp_platform)
        x, weight = leaf(hp_platform, VALUES), leaf(hp_platform, np.float32([[1, 2, 3]]))
        layer = Counted(hp_platform, weight, mesh)
        run = layer if save is None else lambda x: checkpoint(layer, x, platform=hp_platform, save=save)
        with CommDebugMode() as debug:
            hp_platform.backward(hp_platform.ops.sum(run(x)))
        grads = [hp_platform.to_numpy(hp_platform.get_grad(t)).copy() for t in (x, weight)]
        return grads, layer.calls, debug.get_comm_counts().get("all_gather", 0)

    expected, _, gathers = run_ranks(rank, 2, hp_platform, None)[0]
    found, calls, again = run_ranks(rank, 2, hp_platform, saved_kinds)[0]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert calls == ["products"] * 2
    assert again == gathers + ("collectives" not in saved_kinds)


def test_kinds_that_there_are_not_are_refused(hp_platform):
    with pytest.raises(ValueError, match="save takes attention, products, collectives, got norms"):
        checkpoint(lambda x: x, leaf(hp_platform, VALUES), platform=hp_platform, save=("norms",))


def test_decisions_within_a_kept_result_are_part_of_it(hp_platform):
    """Such decisions are not called again, so they may not stand in the order of those that are."""
    numbers = itertools.count(1)

    def part(x):
        factor = saved_value(lambda: saved_value(lambda: next(numbers)) + saved_value(lambda: next(numbers)))
        return hp_platform.ops.mul(x, float(factor * saved_value(lambda: next(numbers))))

    x = leaf(hp_platform, VALUES)
    hp_platform.backward(hp_platform.ops.sum(checkpoint(part, x, platform=hp_platform)))
    np.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.get_grad(x)), np.full_like(VALUES, 9.0))


def test_products_are_kept_by_torch_alone(hp_platform):
    x, layer = leaf(hp_platform, VALUES), Layer(hp_platform, leaf(hp_platform, WEIGHT))
    if hp_platform.name != "torch":
        with pytest.raises(CapabilityError, match="cannot save matrix products"):
            checkpoint(layer, x, platform=hp_platform, save=("products",))
        return
    expected, _ = gradients(hp_platform, x, layer, plainly)
    expected = [hp_platform.to_numpy(g).copy() for g in expected]
    x, layer = leaf(hp_platform, VALUES), Layer(hp_platform, leaf(hp_platform, WEIGHT))
    products = []

    class Count(importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products.append(func.__name__) if "mm" in func.__name__ else None
            return func(*args, **(kwargs or {}))

    def run(layer, x, factor):
        with Count():
            return checkpoint(lambda x: layer(x, factor), x, platform=hp_platform, save=("products",))

    found, _ = gradients(hp_platform, x, layer, run)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(hp_platform.to_numpy(got), wanted)
    assert layer.calls == 2
    assert len(products) == 1


def test_a_kept_product_that_is_written_afterwards_is_refused(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("torch alone keeps products")
    torch = importlib.import_module("torch")
    x, weight = leaf(hp_platform, VALUES), leaf(hp_platform, WEIGHT)

    def layer(t):
        product = torch.nn.functional.linear(t, weight)
        return torch.relu(product.add_(1.0)) if is_written else torch.relu(product + 1.0)

    is_written = False
    torch.sum(checkpoint(layer, x, platform=hp_platform, save=("products",))).backward()
    assert x.grad is not None
    is_written = True
    loss = torch.sum(checkpoint(layer, x, platform=hp_platform, save=("products",)))
    with pytest.raises(RuntimeError, match="has been modified in place since"):
        loss.backward()


@pytest.mark.parametrize("backward_in_region", [False, True])
def test_under_autocast_the_recomputation_is_in_the_dtype_of_forward(hp_platform, backward_in_region):
    torch = pytest.importorskip("torch")
    if hp_platform.name != "torch":
        pytest.skip("MindSpore's automatic mixed precision rewrites cells; there is no region of code")

    def gradients(call, caches):
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
        dtypes = []

        def block(x):
            y = layer(torch.nn.functional.silu(x))
            dtypes.append(y.dtype)
            return torch.exp(y)

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16, cache_enabled=caches))
            # The same weight again, whose cast must not be the one that was made without recording.
            loss = layer(call(block, x)).float().pow(2).sum()
            if not backward_in_region:
                stack.close()
            loss.backward()
        assert set(dtypes) == {torch.bfloat16}
        return x.grad, layer.weight.grad, layer.bias.grad

    # A cast that both calls share would have its gradients summed in bfloat16.
    expected = gradients(lambda block, x: block(x), caches=False)
    found = gradients(lambda block, x: checkpoint(block, x, platform=hp_platform), caches=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_block_from_outside_autocast_is_recomputed_without_it(hp_platform):
    torch = pytest.importorskip("torch")
    if hp_platform.name != "torch":
        pytest.skip("MindSpore's automatic mixed precision rewrites cells; there is no region of code")
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    dtypes = []

    def block(x):
        y = layer(x)
        dtypes.append(y.dtype)
        return torch.exp(y)

    y = checkpoint(block, x, platform=hp_platform)
    with torch.autocast("cpu", torch.bfloat16):
        y.sum().backward()
    assert dtypes == [torch.float32] * 2


def test_a_second_backward_through_what_the_first_has_freed_is_refused(hp_platform):
    """Also a node's own, which keeps what its closure holds no longer than the framework's nodes what they save."""
    ones = hp_platform.from_numpy(np.ones(3, np.float32))
    x = hp_platform.from_numpy(np.ones(3, np.float32))
    hp_platform.set_requires_grad(x, True)
    y = hp_platform.custom_function(lambda x: hp_platform.ops.mul(x, 2.0), lambda g: hp_platform.ops.mul(g, 2.0), x)
    hp_platform.backward(y, ones)
    with pytest.raises(RuntimeError, match=r"(a second backward|backward the graph twice)(.|\n)*retain_graph=True"):
        hp_platform.backward(y, ones)
