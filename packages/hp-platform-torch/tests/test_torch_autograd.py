"""The two autograd nodes: first and second derivatives, aliases, unused outputs, and that nothing stays alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from hp_dtensor import get_platform


def _double(t):
    return 2 * t


@pytest.fixture
def x():
    return torch.randn(3, 2, dtype=torch.float64, requires_grad=True)


def test_the_dual_is_the_gradient(platform, x):
    y = platform.linear_map(x, lambda t: t.sum(0), lambda g: g.expand(3, 2))
    y.backward(torch.tensor([1.0, 10.0], dtype=torch.float64))
    assert x.grad.tolist() == [[1.0, 10.0]] * 3


def test_derivatives_of_a_linear_map(platform, x):
    def f(t):
        return platform.linear_map(t**3, lambda u: u.sum(0), lambda g: g.expand(3, 2).clone()) ** 2

    assert torch.autograd.gradcheck(f, (x,))
    assert torch.autograd.gradgradcheck(f, (x,))


def test_the_backward_of_a_backward_is_the_forward(platform, x):
    calls = []

    def forward(t):
        calls.append("forward")
        return 3 * t

    def backward(g):
        calls.append("backward")
        return 3 * g

    y = (platform.linear_map(x * x, forward, backward) ** 2).sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    assert calls == ["forward", "backward"]
    first.sum().backward()
    assert calls[2:] == ["forward", "backward"]
    torch.testing.assert_close(x.grad, 108 * x.detach() ** 2)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_map_that_returns_its_input(platform, x, recorded):
    source = x * 1 if recorded else x.detach()
    y = platform.linear_map(source, lambda t: t, _double)
    assert torch.equal(y, source)
    assert y.requires_grad == recorded
    if recorded:
        y.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_a_view_kept_on_its_source_is_freed_with_it(platform, x):
    source = x * 1
    source.saved = platform.linear_map(source, lambda t: t, _double)
    freed = weakref.ref(source)
    del source
    gc.collect()
    assert freed() is None


def test_nothing_is_recorded_inside(platform, x):
    seen = []

    def forward(t):
        seen.append((torch.is_grad_enabled(), (t * 2).requires_grad))
        return t.clone()

    platform.linear_map(x, forward, _double).sum().backward()
    platform.linear_map(x.detach(), forward, _double)
    assert seen == [(False, False), (False, False)]


def test_custom_function_with_several_outputs(platform, x):
    def forward(a, b):
        return a * b, (a > 0).long()

    def backward(g, none):
        assert none is None
        return g * y.detach(), g * x.detach()

    y = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    product, positive = platform.custom_function(forward, backward, x, y)
    assert not positive.requires_grad
    product.sum().backward()
    assert torch.equal(x.grad, y)
    assert torch.equal(y.grad, x)


def test_an_unused_output_has_no_gradient(platform, x):
    grads = []

    def backward(*received):
        grads.append(received)
        return received[1]

    _, second = platform.custom_function(lambda t: (t.clone(), t.clone()), backward, x)
    second.sum().backward()
    assert grads[0][0] is None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_custom_function_may_give_no_gradient(platform, x):
    other = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    platform.custom_function(lambda a, b: a + b, lambda g: (g, None), x, other).sum().backward()
    assert other.grad is None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_backward_of_a_custom_function_runs_no_other_node(platform, x):
    """A node without a gradient would run on another thread than those of an accelerator, in no fixed order."""
    y = platform.custom_function(_double, _double, x * 1)
    assert [node.name() for node, _ in y.grad_fn.next_functions if node] == ["MulBackward0"]


def test_custom_function_that_returns_its_input(platform, x):
    y = platform.custom_function(lambda t: t, _double, x * 1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_too_few_gradients_are_refused(platform, x):
    y = platform.custom_function(lambda a, b: a + b, lambda g: g, x, x.detach().requires_grad_())
    with pytest.raises(ValueError, match="returned 1 gradients, expected 2"):
        y.sum().backward()


@pytest.mark.parametrize("others", [False, True], ids=["alone", "among other terms"])
def test_a_custom_function_has_no_second_derivative(platform, x, others):
    middle = x * 1
    y = platform.custom_function(lambda t: t * t, lambda g: 2 * middle.detach() * g, middle).sum()
    (first,) = torch.autograd.grad(y + (x**2).sum() if others else y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(first.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


def test_the_gradient_of_a_gradient_in_the_given_one_is_refused(platform, x):
    given = torch.ones_like(x).requires_grad_()
    y = platform.custom_function(lambda t: 2 * t, lambda g: 2 * g, x)
    (first,) = torch.autograd.grad(y, x, given, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(first.sum(), given)


def test_a_custom_function_keeps_no_input(platform, x):
    middle = x * 1
    freed = weakref.ref(middle)
    y = platform.custom_function(lambda t: t * 2, _double, middle)
    del middle
    gc.collect()
    assert freed() is None
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_where_no_gradient_comes_it_is_zero(platform, x):
    """As from the norm of order 0, of which torch says that there is none."""
    y = platform.custom_function(lambda t: t * 2, _double, x)
    (grad,) = torch.autograd.grad(y.norm(0), x)
    assert torch.equal(grad, torch.zeros_like(x))


def test_gradients_without_touching_leaves(platform, x):
    unused = torch.ones(2, requires_grad=True)
    assert [g if g is None else g.tolist() for g in platform.grad([(x * 2).sum()], [x, unused])] == [
        [[2.0, 2.0]] * 3,
        None,
    ]
    assert x.grad is None


def _observed(backward) -> list[bool]:
    """Records of a backward by hooks on two results, one made of the other, and on the leaves."""
    platform, seen = get_platform("torch"), []
    x, weight = (torch.ones(3, requires_grad=True) for _ in range(2))
    hidden = x * weight
    y = hidden * weight
    for tensor in (x, hidden, y):
        tensor.register_hook(lambda grad: seen.append(platform.is_for_parameters()))
    backward(y, hidden, x, weight)
    return seen


BACKWARDS = {
    "plain": (lambda y, hidden, x, weight: y.sum().backward(), True),
    "plain of several": (lambda y, hidden, x, weight: torch.autograd.backward([y.sum(), hidden.sum()]), True),
    "to a leaf": (lambda y, hidden, x, weight: torch.autograd.grad(y.sum(), x), False),
    "to all leaves": (lambda y, hidden, x, weight: torch.autograd.grad(y.sum(), [x, weight]), False),
    "to a result": (lambda y, hidden, x, weight: torch.autograd.grad(y.sum(), hidden), False),
    "to the last result": (lambda y, hidden, x, weight: torch.autograd.grad(y.sum(), y), False),
    "to its own root": (lambda y, hidden, x, weight: torch.autograd.grad(y, y, torch.ones(3)), False),
    "to a result and a leaf": (lambda y, hidden, x, weight: torch.autograd.grad(y.sum(), [hidden, x]), False),
    "accumulating in a leaf": (lambda y, hidden, x, weight: y.sum().backward(inputs=[x]), False),
    "accumulating in a result": (lambda y, hidden, x, weight: y.sum().backward(inputs=[hidden]), False),
}


@pytest.mark.parametrize(("backward", "expected"), BACKWARDS.values(), ids=BACKWARDS)
def test_hooks_know_whether_their_backward_has_inputs(backward, expected) -> None:
    seen = _observed(backward)
    assert seen
    assert set(seen) == {expected}


@pytest.mark.parametrize("outer", ["plain", "to a leaf"])
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_inside_of_another_one_is_judged_alone(outer, name) -> None:
    backward, expected = BACKWARDS[name]
    found, after = [], []

    def inside(grad):
        with torch.enable_grad():
            found.extend(_observed(backward))
        after.append(get_platform("torch").is_for_parameters())

    def nested(y, hidden, x, weight):
        hidden.register_hook(inside)
        BACKWARDS[outer][0](y, hidden, x, weight)

    _observed(nested)
    # The leaf of a plain backward has nothing behind it that would show that no node is left out.
    assert set(found[:2]) == {expected}
    assert after == [outer == "plain"]


def test_a_deferred_weight_gradient_is_added_before_the_next_is_computed(platform):
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
    x, events = torch.ones(1, 2, requires_grad=True), []

    def unpacked(saved):
        events.append(f"reads {saved[0]}")
        return saved[1]

    y = x
    for index, layer in enumerate(layers):
        layer.weight.register_post_accumulate_grad_hook(lambda _, index=index: events.append(f"adds {index}"))
        with torch.autograd.graph.saved_tensors_hooks(lambda saved, index=index: (index, saved), unpacked):
            y = layer(y)
    _, finish = platform.split_backward([y], [torch.ones(1, 2)], [x])
    events.clear()
    finish()
    # Each product reads both of its saved tensors.
    assert events == ["reads 1", "reads 1", "adds 1", "reads 0", "reads 0", "adds 0"]


@pytest.mark.parametrize(
    "weights",
    [lambda w: (w, w), lambda w: (2 * w,) * 2, lambda w: (2 * w, w), lambda w: (w.sin(), w.cos())],
    ids=["the same", "one result", "a result and its weight", "two results"],
)
def test_a_split_backward_runs_nodes_that_layers_share_once(platform, x, weights):
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)

    def output():
        first, second = weights(w)
        return torch.nn.functional.linear(torch.nn.functional.linear(x, first), second)

    (expected,) = torch.autograd.grad(output().sum(), w)
    y, calls = output(), []
    w.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    _, finish = platform.split_backward([y], [torch.ones_like(y)], [x])
    finish()
    torch.testing.assert_close(w.grad, expected, rtol=1e-12, atol=0)
    assert len(calls) == 1


@pytest.mark.parametrize("weight", [lambda w: w.sin(), lambda w: w], ids=["a result of its weight", "its weight"])
def test_a_split_backward_of_a_layer_whose_weight_is_an_output_too(platform, x, weight):
    """As of a stage that also passes on a bias that it computes from a table."""
    w = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64, requires_grad=True)

    def outputs():
        used = weight(w)
        return [torch.nn.functional.linear(x, used), used]

    grads = [torch.full_like(y, 2.0 + i) for i, y in enumerate(outputs())]
    (expected,) = torch.autograd.grad(outputs(), w, grads)
    calls = []
    w.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    _, finish = platform.split_backward(outputs(), grads, [x])
    finish()
    torch.testing.assert_close(w.grad, expected, rtol=1e-12, atol=0)
    assert len(calls) == 1
