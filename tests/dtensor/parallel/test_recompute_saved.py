"""Recomputation makes what backward needs and no more, on a platform with hooks on saved tensors."""

from __future__ import annotations

import contextlib
import weakref

import numpy as np
import pytest

from hp_dtensor import get_platform
from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.saved_tensors import mark_reached
from hp_dtensor.parallel.recompute import checkpoint, detect_checkpoint, saved_result, saved_value
from hp_dtensor.testing import run_ranks

torch = pytest.importorskip("torch")
PLATFORM = get_platform("torch")


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(5, 3, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def weight():
    torch.manual_seed(1)
    return torch.randn(3, 3, dtype=torch.float64, requires_grad=True)


def again(function, x, *args, save=()):
    return checkpoint(function, x, *args, platform=PLATFORM, save=save)


def gradients(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


def test_a_repetition_ends_where_backward_has_what_it_needs(x, weight):
    steps = []

    def part(x):
        steps.append("first")
        y = torch.exp(x) @ weight
        steps.append("second")
        return y + x

    again(part, x).sum().backward()
    assert steps == ["first", "second", "first"]
    # Nothing is saved, and nothing repeated.
    again(lambda x: steps.append("sum") or x + x, x).sum().backward()
    assert steps[3:] == ["sum"]


def test_context_managers_and_modes_are_left(x, weight):
    log = []

    @contextlib.contextmanager
    def region():
        log.append("in")
        try:
            with torch.no_grad(), torch.enable_grad():
                yield
        finally:
            log.append("out")

    def part(x):
        with region():
            return torch.exp(x) @ weight

    again(part, x).sum().backward()
    assert log == ["in", "out"] * 2
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("answer", ["another way", "none", "another error"])
def test_a_function_that_takes_the_end_for_an_error_of_its_own(x, weight, answer):
    def part(x):
        try:
            return torch.exp(x) @ weight
        except Exception as error:
            if answer == "another error":
                raise ValueError("the function's own") from error
            return torch.sin(x) @ weight if answer == "another way" else x

    found = gradients(again(part, x).sum(), x, weight)
    assert all(map(torch.equal, found, gradients(part(x).sum(), x, weight)))


def test_nothing_is_held_after_backward_without_the_garbage_collector(x, weight):
    between = x * 2
    memory = weakref.ref(between.untyped_storage())
    loss = again(lambda x: torch.exp(x) @ weight, between).sum()
    del between
    assert memory() is not None
    loss.backward()
    assert memory() is None


@pytest.mark.parametrize("save", [(), ("products",), ("attention",)])
def test_a_graph_that_is_never_gone_through_is_freed(x, weight, save):
    memories = []

    def part(x):
        product = x @ weight
        memories.append(weakref.ref(product.untyped_storage()))
        hidden = torch.nn.functional.scaled_dot_product_attention(*[product[None, None]] * 3)
        memories.append(weakref.ref(hidden.untyped_storage()))
        return torch.exp(hidden) @ weight

    # What the first call of a process makes once, the garbage collector frees when it comes.
    again(part, x, save=save).sum()
    memories.clear()
    loss = again(part, x, save=save).sum()
    assert [memory() is not None for memory in memories] == ["products" in save, "attention" in save]
    del loss
    assert [memory() for memory in memories] == [None, None]


def test_a_retained_graph_is_repeated_for_each_backward(x, weight):
    calls = []

    def part(x):
        calls.append(1)
        return torch.exp(torch.exp(x) @ weight)

    expected = gradients(part(x).sum(), x, weight)
    calls.clear()
    loss = again(part, x).sum()
    for retained in (True, False):
        found = torch.autograd.grad(loss, (x, weight), retain_graph=retained)
        assert all(map(torch.equal, found, expected))
    assert len(calls) == 3
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_node_may_ask_twice_for_what_it_has_saved(x):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]

    def part(x):
        return Product.apply(torch.exp(x), torch.sin(x)).square()

    assert torch.equal(*gradients(again(part, x).sum(), x), *gradients(part(x).sum(), x))


def test_second_derivatives(x, weight):
    def penalty(run):
        (grad,) = torch.autograd.grad(run(lambda x: torch.exp(x @ weight).sin(), x).sum(), x, create_graph=True)
        return gradients(grad.square().sum(), x, weight)

    assert all(map(torch.equal, penalty(again), penalty(lambda part, x: part(x))))


def test_a_derivative_within_the_part(x, weight):
    """Recomputation while forward still runs: it draws and decides what forward has so far."""

    def part(x):
        factor = saved_value(lambda: 2.0)
        y = torch.nn.functional.dropout(torch.exp(x * factor), 0.5)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.exp(slope @ weight) * saved_value(lambda: 3.0)

    found = []
    for run in (again, lambda part, x: part(x)):
        torch.manual_seed(0)
        found.append(gradients(run(part, x).sum(), x, weight))
    assert all(map(torch.equal, *found))


def test_parts_within_parts(x, weight):
    def layer(x):
        return torch.exp(torch.sin(x @ weight) * saved_value(lambda: 0.5))

    def inner(x):
        return again(layer, torch.cos(x), save=("products",)) * x

    def outer(x):
        return again(inner, torch.sin(x)) + again(inner, x)

    def plain(x):
        return sum(layer(torch.cos(y)) * y for y in (torch.sin(x), x))

    assert all(map(torch.equal, gradients(again(outer, x).sum(), x, weight), gradients(plain(x).sum(), x, weight)))


def test_of_a_part_within_another_nothing_stays(x, weight):
    memories = []

    def inner(x):
        product = x @ weight
        memories.append(weakref.ref(product.untyped_storage()))
        return torch.exp(product)

    loss = again(lambda x: again(inner, torch.sin(x), save=("products",)), x).sum()
    assert memories[0]() is None
    loss.backward()


@pytest.mark.parametrize("what", ["shape", "dtype", "fewer"])
def test_saving_something_else_is_refused(x, what):
    calls = []

    def part(x):
        calls.append(1)
        if len(calls) != 2:
            return torch.exp(torch.exp(x)).sum()
        return {"shape": lambda: x[:2].exp().exp(), "dtype": lambda: x.float().exp().exp(), "fewer": x.exp}[
            what
        ]().sum()

    loss = again(part, x)
    with pytest.raises(RuntimeError, match=r"made other calls .*It saved (a tensor|fewer)"):
        loss.backward(retain_graph=True)
    # The graph is intact, and the third call takes the path of the first.
    loss.backward()
    assert torch.equal(x.grad, *gradients(torch.exp(torch.exp(x)).sum(), x))


def test_what_is_written_where_backward_needs_it_is_refused(x, weight):
    def part(x):
        y = torch.exp(x)
        z = torch.sin(y)
        y.mul_(2)
        return torch.exp(z) + y

    for run in (again, lambda part, x: part(x)):
        with pytest.raises(RuntimeError, match=r"modified (by an inplace operation|in place since)"):
            run(part, x).sum().backward()
    loss = again(lambda x: torch.exp(x @ weight), x).sum()
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place since"):
        loss.backward()


def test_several_results_and_other_values(x, weight):
    def part(x):
        return torch.exp(x @ weight), "label", [torch.sin(x)]

    first, label, (second,) = again(part, x)
    assert label == "label"
    expected = part(x)
    assert all(
        map(
            torch.equal,
            gradients((first * second).sum(), x, weight),
            gradients((expected[0] * expected[2][0]).sum(), x, weight),
        )
    )


def test_a_split_backward_goes_through_a_part(x, weight):
    expected = gradients(again(lambda x: torch.exp(x @ weight) @ weight, x).sum(), x, weight)
    loss = again(lambda x: torch.exp(x @ weight) @ weight, x).sum()
    (found,), finish = PLATFORM.split_backward([loss], [None], [x])
    assert weight.grad is None
    finish()
    assert torch.equal(found, expected[0])
    assert torch.equal(weight.grad, expected[1])


def test_a_function_compiled_around_a_part(x, weight):
    """Backward calls the part from elsewhere: it must save the same there as in forward."""

    def part(x):
        return torch.tanh(torch.relu(x @ weight) * x.sin())

    compiled = torch.compile(lambda x: again(part, x), backend="aot_eager")
    torch.testing.assert_close(gradients(compiled(x).sum(), x, weight), gradients(part(x).sum(), x, weight))


def test_parts_are_noticed(x):
    with detect_checkpoint() as is_repeated:
        torch.exp(x)
        assert not is_repeated()
        again(torch.exp, x)
        assert is_repeated()


def test_ranks_that_save_less_repeat_as_many_collectives():
    """A rank without rows has nothing to differentiate between two exchanges, and takes part in both once more."""

    def rank():
        mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("x",), platform=PLATFORM)
        group, exchanges = mesh.group_along(), []

        def exchange(x):
            exchanges.append(1)
            total = x.detach().clone()
            group.all_reduce(total, "sum")
            return PLATFORM.linear_map(x, lambda _: total, lambda g: g)

        def part(x):
            y = exchange(x)
            y = torch.exp(y) if group.rank == 0 else y
            return exchange(mark_reached(PLATFORM, y))

        x = torch.ones(3, requires_grad=True)
        again(part, x).sum().backward()
        return len(exchanges), x.grad.numpy()

    (first, grad), (second, other) = run_ranks(rank, 2, PLATFORM)
    assert first == second == 3
    np.testing.assert_allclose(grad, np.exp(np.float32([2.0] * 3)), rtol=1e-6)
    np.testing.assert_array_equal(other, np.ones(3))


def test_a_kept_collective_and_a_mark_in_front_of_it_are_in_step(x):
    made = []

    def part(x):
        y = PLATFORM.custom_function(
            lambda x: saved_result("collectives", lambda: made.append(1) or torch.exp(x)), lambda g: g, x
        )
        return mark_reached(PLATFORM, y) * 2

    again(part, x, save=("collectives",)).sum().backward()
    assert made == [1]
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))
