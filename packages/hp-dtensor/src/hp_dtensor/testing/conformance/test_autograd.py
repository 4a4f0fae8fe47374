"""Gradients: accumulation, flags, and custom autograd nodes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing.conformance.ranks import assert_values, read, tensor
from hp_dtensor.testing.simulated import run_ranks

Tensor = Any


@pytest.fixture
def x(hp_platform: Platform) -> Tensor:
    return tensor(hp_platform, [1.0, 2.0, 3.0], requires_grad=True)


def test_gradients_accumulate_in_leaves(hp_platform: Platform, x: Tensor) -> None:
    ops = hp_platform.ops
    assert hp_platform.get_grad(x) is None
    hp_platform.backward(ops.sum(ops.mul(x, x)))
    assert_values(hp_platform, hp_platform.get_grad(x), [2, 4, 6])
    hp_platform.backward(ops.sum(ops.mul(x, 10.0)))
    assert_values(hp_platform, hp_platform.get_grad(x), [12, 14, 16])
    hp_platform.set_grad(x, None)
    assert hp_platform.get_grad(x) is None


def test_a_gradient_may_be_given_and_set(hp_platform: Platform, x: Tensor) -> None:
    hp_platform.backward(hp_platform.ops.mul(x, x), tensor(hp_platform, [1.0, 0.0, -1.0]))
    assert_values(hp_platform, hp_platform.get_grad(x), [2, 0, -6])
    hp_platform.set_grad(x, tensor(hp_platform, [7.0, 8.0, 9.0]))
    assert_values(hp_platform, hp_platform.get_grad(x), [7, 8, 9])


def test_a_retained_graph_is_used_twice(hp_platform: Platform, x: Tensor) -> None:
    loss = hp_platform.ops.sum(hp_platform.ops.mul(x, x))
    hp_platform.backward(loss, retain_graph=True)
    hp_platform.backward(loss)
    assert_values(hp_platform, hp_platform.get_grad(x), [4, 8, 12])


def test_a_leaf_used_twice_gets_the_sum(hp_platform: Platform, x: Tensor) -> None:
    ops = hp_platform.ops
    hp_platform.backward(ops.sum(ops.add(ops.mul(x, 3.0), ops.mul(x, x))))
    assert_values(hp_platform, hp_platform.get_grad(x), [5, 7, 9])


def test_grad_returns_gradients_and_touches_none(hp_platform: Platform, x: Tensor) -> None:
    ops = hp_platform.ops
    y = tensor(hp_platform, [4.0, 5.0, 6.0], requires_grad=True)
    # torch's own `grad` raises for an unused input unless it is allowed explicitly.
    unused = tensor(hp_platform, [1.0], requires_grad=True)
    outputs = [ops.mul(x, y), ops.mul(x, 2.0)]
    weights = [tensor(hp_platform, [1.0, 1.0, 0.0]), tensor(hp_platform, [0.0, 1.0, 1.0])]
    gradients = hp_platform.grad(outputs, [x, unused, y], weights)
    assert_values(hp_platform, gradients[0], [4, 7, 2])
    assert gradients[1] is None
    assert_values(hp_platform, gradients[2], [1, 2, 0])
    assert all(hp_platform.get_grad(leaf) is None for leaf in (x, y, unused))


def test_grad_leaves_gradients_that_leaves_have(hp_platform: Platform, x: Tensor) -> None:
    ops = hp_platform.ops
    y = tensor(hp_platform, [4.0, 5.0, 6.0], requires_grad=True)
    hp_platform.backward(ops.sum(ops.add(ops.mul(x, 3.0), ops.mul(y, 7.0))))
    before = hp_platform.get_grad(x)
    (gradient,) = hp_platform.grad([ops.sum(ops.mul(ops.mul(x, y), 5.0))], [x])
    for found, expected in ((gradient, [20, 25, 30]), (before, [3, 3, 3])):
        assert_values(hp_platform, found, expected)
    for leaf, expected in ((x, [3, 3, 3]), (y, [7, 7, 7])):
        assert_values(hp_platform, hp_platform.get_grad(leaf), expected)
    hp_platform.backward(ops.sum(x))
    assert_values(hp_platform, hp_platform.get_grad(x), [4, 4, 4])
    assert_values(hp_platform, gradient, [20, 25, 30])


def test_a_gradient_that_was_read_stays_when_another_is_set(hp_platform: Platform, x: Tensor) -> None:
    hp_platform.backward(hp_platform.ops.sum(hp_platform.ops.mul(x, 3.0)))
    before = hp_platform.get_grad(x)
    given = tensor(hp_platform, [7.0, 8.0, 9.0])
    hp_platform.set_grad(x, given)
    assert_values(hp_platform, before, [3, 3, 3])
    hp_platform.set_grad(x, hp_platform.get_grad(x))
    assert_values(hp_platform, hp_platform.get_grad(x), [7, 8, 9])
    hp_platform.set_grad(x, None)
    assert_values(hp_platform, before, [3, 3, 3])
    assert_values(hp_platform, given, [7, 8, 9])


def test_gradients_of_inner_tensors(hp_platform: Platform, x: Tensor) -> None:
    inner = hp_platform.ops.mul(x, 2.0)
    (gradient,) = hp_platform.grad([hp_platform.ops.sum(hp_platform.ops.mul(inner, inner))], [inner])
    assert_values(hp_platform, gradient, [4, 8, 12])


def test_gradient_hooks_run_in_order_on_complete_gradients(hp_platform: Platform, x: Tensor) -> None:
    """Hooks of one tensor run as registered, those of later tensors first, each once with the sum over all uses."""
    ops = hp_platform.ops
    y = ops.mul(x, 2.0)
    found: list[tuple[str, list[float]]] = []
    for name, hooked in (("x, first", x), ("y, first", y), ("y, second", y), ("x, second", x)):
        hp_platform.add_gradient_hook(hooked, lambda g, name=name: found.append((name, read(hp_platform, g).tolist())))
    hp_platform.backward(ops.sum(ops.add(y, ops.mul(y, 3.0))))
    of_y, of_x = [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]
    assert found == [("y, first", of_y), ("y, second", of_y), ("x, first", of_x), ("x, second", of_x)]
    assert_values(hp_platform, hp_platform.get_grad(x), of_x)


def test_recording_is_switched_in_nested_blocks(hp_platform: Platform, x: Tensor) -> None:
    assert hp_platform.is_grad_enabled()
    with hp_platform.no_grad():
        assert not hp_platform.is_grad_enabled()
        assert not hp_platform.requires_grad(hp_platform.ops.mul(x, 2.0))
        with hp_platform.enable_grad():
            assert hp_platform.is_grad_enabled()
            assert hp_platform.requires_grad(hp_platform.ops.mul(x, 2.0))
        assert not hp_platform.is_grad_enabled()
    assert hp_platform.is_grad_enabled()


def test_the_flag_returns_after_an_error(hp_platform: Platform) -> None:
    with pytest.raises(KeyError), hp_platform.no_grad():
        raise KeyError
    assert hp_platform.is_grad_enabled()


def test_leaves_and_flags(hp_platform: Platform, x: Tensor) -> None:
    y = hp_platform.ops.mul(x, 2.0)
    assert hp_platform.is_leaf(x)
    assert not hp_platform.is_leaf(y)
    assert hp_platform.requires_grad(y)
    hp_platform.set_requires_grad(x, False)
    assert not hp_platform.requires_grad(x)
    assert not hp_platform.requires_grad(hp_platform.ops.mul(x, 2.0))


def test_a_linear_map_and_its_dual(hp_platform: Platform, x: Tensor) -> None:
    ops = hp_platform.ops
    recording = []

    def forward(t: Tensor) -> Tensor:
        recording.append(hp_platform.is_grad_enabled())
        return ops.cat([t, t], 0)

    def backward(g: Tensor) -> Tensor:
        recording.append(hp_platform.is_grad_enabled())
        return ops.mul(ops.narrow(g, 0, 0, 3), 100.0)

    y = hp_platform.linear_map(ops.mul(x, 2.0), forward, backward)
    assert_values(hp_platform, y, [2, 4, 6, 2, 4, 6])
    hp_platform.backward(ops.mul(y, 1.0), tensor(hp_platform, [1.0, 2, 3, 4, 5, 6]))
    assert_values(hp_platform, hp_platform.get_grad(x), [200, 400, 600])
    # A recorded backward would keep the graph alive, and every tensor in it.
    assert recording == [False, False]


def test_an_identity_map_keeps_its_own_gradient(hp_platform: Platform, x: Tensor) -> None:
    ops = hp_platform.ops
    # The forward returns its argument. Without a tensor of its own, the other use of `x` would get the factor 10 too.
    seen = hp_platform.linear_map(x, lambda t: t, lambda g: ops.mul(g, 10.0))
    hp_platform.backward(ops.sum(ops.add(ops.mul(seen, 2.0), x)))
    assert_values(hp_platform, x, [1, 2, 3])
    assert_values(hp_platform, hp_platform.get_grad(x), [21, 21, 21])


def test_a_linear_map_of_an_empty_tensor(hp_platform: Platform) -> None:
    nothing = tensor(hp_platform, np.zeros((0, 2)), requires_grad=True)
    y = hp_platform.linear_map(nothing, lambda t: hp_platform.ops.mul(t, 2.0), lambda g: hp_platform.ops.mul(g, 2.0))
    hp_platform.backward(y, tensor(hp_platform, np.zeros((0, 2))))
    assert tuple(hp_platform.get_grad(nothing).shape) == (0, 2)


def test_a_linear_map_without_gradients_is_only_its_forward(hp_platform: Platform) -> None:
    y = hp_platform.linear_map(tensor(hp_platform, [1.0]), lambda t: hp_platform.ops.mul(t, 3.0), lambda g: g)
    assert_values(hp_platform, y, [3])
    assert not hp_platform.requires_grad(y)


def test_a_custom_function_with_several_inputs_and_outputs(hp_platform: Platform, x: Tensor) -> None:
    ops = hp_platform.ops
    y = tensor(hp_platform, [4.0, 5.0, 6.0], requires_grad=True)
    seen: list[Any] = []

    def forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return ops.mul(a, b), ops.sub(a, b)

    def backward(product: Tensor | None, difference: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        seen.append(difference)
        return ops.mul(product, 7.0), None

    product, difference = hp_platform.custom_function(forward, backward, x, y)
    assert_values(hp_platform, product, [4, 10, 18])
    assert_values(hp_platform, difference, [-3, -3, -3])
    hp_platform.backward(ops.sum(product))
    assert_values(hp_platform, hp_platform.get_grad(x), [7, 7, 7])
    assert hp_platform.get_grad(y) is None
    assert seen == [None]


def test_a_custom_function_whose_result_gets_no_gradient(hp_platform: Platform, x: Tensor) -> None:
    ops, seen = hp_platform.ops, []

    def backward(grad: Any) -> Tensor:
        seen.append(grad)
        return ops.mul(grad, 2.0)

    y = hp_platform.custom_function(lambda t: ops.mul(t, 2.0), backward, x)
    # `y` gets no gradient. A framework may skip its backward, or call it with zeros, but must not pass None.
    z = hp_platform.custom_function(lambda t: ops.mul(t, 3.0), lambda grad: [None], y)
    (grad,) = hp_platform.grad([ops.add(ops.sum(z), ops.sum(ops.square(x)))], [x])
    np.testing.assert_array_equal(hp_platform.to_numpy(grad), 2 * hp_platform.to_numpy(x))
    assert all(not hp_platform.to_numpy(grad).any() for grad in seen)


def test_a_custom_function_of_indices(hp_platform: Platform, x: Tensor) -> None:
    ops = hp_platform.ops
    index = tensor(hp_platform, [2, 0], "int64")
    picked = hp_platform.custom_function(
        lambda t, i: ops.index_select(t, 0, i), lambda g: (ops.cat([g, ops.mul(ops.narrow(g, 0, 0, 1), 0.0)], 0), None),
        x, index,
    )  # fmt: skip
    assert_values(hp_platform, picked, [3, 1])
    hp_platform.backward(picked, tensor(hp_platform, [1.0, 2.0]))
    assert_values(hp_platform, hp_platform.get_grad(x), [1, 2, 0])


def test_an_error_in_a_backward_reaches_the_caller_and_harms_nothing(hp_platform: Platform, x: Tensor) -> None:
    def backward(g: Tensor) -> Tensor:
        raise ArithmeticError("no gradient today")

    y = hp_platform.linear_map(x, lambda t: hp_platform.ops.mul(t, 2.0), backward)
    with pytest.raises(Exception, match="no gradient today"):
        hp_platform.backward(hp_platform.ops.sum(y))
    assert not hp_platform.is_in_backward()
    hp_platform.set_grad(x, None)
    hp_platform.backward(hp_platform.ops.sum(hp_platform.ops.mul(x, x)))
    assert_values(hp_platform, hp_platform.get_grad(x), [2, 4, 6])


def test_a_custom_function_whose_backward_has_raised_may_be_tried_again(hp_platform: Platform, x: Tensor) -> None:
    ops, tries = hp_platform.ops, []

    def backward(g: Tensor) -> Tensor:
        tries.append(g)
        # Fails once: the node must stay usable for a second backward.
        if len(tries) == 1:
            raise ArithmeticError("no gradient today")
        return ops.mul(g, 2.0)

    y = hp_platform.custom_function(lambda t: ops.mul(t, 2.0), backward, x)
    grad = tensor(hp_platform, [1.0, 2.0, 3.0])
    with pytest.raises(Exception, match="no gradient today"):
        hp_platform.backward(y, grad)
    hp_platform.backward(y, grad)
    assert_values(hp_platform, hp_platform.get_grad(x), [2, 4, 6])


def test_a_backward_knows_whether_it_was_given_inputs(hp_platform: Platform, x: Tensor) -> None:
    seen: list[bool] = []

    def backward(g: Tensor) -> Tensor:
        seen.append(hp_platform.is_for_parameters())
        return g

    def loss() -> Tensor:
        return hp_platform.ops.sum(hp_platform.linear_map(x, lambda t: hp_platform.ops.mul(t, 1.0), backward))

    hp_platform.backward(loss())
    hp_platform.grad([loss()], [x])
    hp_platform.backward(loss())
    assert seen == [True, False, True]


def test_a_backward_is_known_to_run_in_its_thread_alone(hp_platform: Platform, x: Tensor) -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(hp_platform.is_in_backward())

    def backward(g: Tensor) -> Tensor:
        look()
        # Another thread, such as a simulated rank, may run its forward while this one runs a backward.
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return g

    def forward(t: Tensor) -> Tensor:
        look()
        return hp_platform.ops.mul(t, 1.0)

    y = hp_platform.ops.sum(hp_platform.linear_map(x, forward, backward))
    hp_platform.grad([y], [x])
    look()
    assert seen == [False, True, False, False]


def check_order_of_nodes(platform: Platform, name: str) -> tuple[list[list[int]], list[float]]:
    """Run independent nodes that communicate in backward, and return their orders and this rank's gradients."""
    group = current_world(platform).all
    orders: list[list[int]] = []
    found = []
    for _ in range(4):
        order: list[int] = []

        def node(x: Tensor, number: int, order: list[int] = order) -> Tensor:
            def backward(grad: Tensor) -> Tensor:
                order.append(number)
                # Other simulated ranks run meanwhile.
                assert {each[0] for each in group.all_gather_bytes(bytes([number]))} == {number}
                return platform.ops.mul(grad, 1.0 + group.rank)

            return platform.custom_function(lambda each: platform.ops.mul(each, 1.0), backward, x)

        # Other sizes, and with them other times and addresses, on each rank.
        leaf = tensor(platform, np.ones(3 + 40 * group.rank), requires_grad=True)
        total = platform.ops.sum(platform.ops.cat([node(leaf, number) for number in range(6)], 0))
        if name == "grad":
            (gradient,) = platform.grad([total], [leaf])
        else:
            platform.backward(total)
            gradient = platform.get_grad(leaf)
        orders.append(order)
        found.append(float(read(platform, gradient)[0]))
    return orders, found


@pytest.mark.parametrize("name", ["backward", "grad"])
def test_independent_nodes_run_in_one_order_on_all_ranks(hp_platform: Platform, name: str) -> None:
    """Their backwards communicate, so ranks with other orders would read each other's messages.

    An engine that orders by address or time needs a number on each node, by which the platform's `_custom_function`
    chains them, or a walk of its own. Each thread's backward must be separate from those of other threads.
    """
    results = run_ranks(check_order_of_nodes, 3, hp_platform, hp_platform, name)
    assert [orders for orders, _ in results] == [results[0][0]] * 3
    assert [found for _, found in results] == [[6.0 * (1 + rank)] * 4 for rank in range(3)]
