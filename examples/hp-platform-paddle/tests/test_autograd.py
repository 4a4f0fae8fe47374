"""Gradients of Paddle's own tensors, whose leaves the platform must know."""

import copy
import sys
import threading

import numpy as np
import paddle
import pytest

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.platform.selection import get_platform


def plain(values):
    made = paddle.to_tensor(values)
    made.stop_gradient = False
    return made


def weight(values):
    start = paddle.nn.initializer.Assign(np.array([values], "float32"))
    return paddle.nn.Linear(1, len(values), weight_attr=start).weight


MAKERS = {
    "flag": plain,
    "to_tensor": lambda values: paddle.to_tensor(values, stop_gradient=False),
    "tensor": lambda values: paddle.tensor(values, requires_grad=True),
    "copy": lambda values: copy.copy(plain(values)),
    "deepcopy": lambda values: copy.deepcopy(plain(values)),
    "layer": weight,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_grad_leaves_gradients_of_all_leaves(make):
    platform = get_platform("paddle")
    x, other, fresh = make([1.0, 2.0]), make([3.0, 4.0]), make([1.0, 1.0])
    ((x + other) * 3).sum().backward()
    held = x.grad
    (gradient,) = platform.grad([(x * other * fresh).sum()], [x])
    assert gradient.numpy().ravel().tolist() == [3, 4]
    assert [each.numpy().ravel().tolist() for each in (held, x.grad, other.grad)] == [[3, 3]] * 3
    assert fresh.grad is None


def test_an_unknown_leaf_is_refused_unless_it_is_an_input():
    platform, x = get_platform("paddle"), plain([1.0, 2.0])
    leaf = paddle.Tensor(value=x.numpy(), stop_gradient=False)
    with pytest.raises(CapabilityError, match=r"assign `x.stop_gradient = False`"):
        platform.grad([(x * leaf).sum()], [x])
    (leaf * 3).sum().backward()
    (gradient,) = platform.grad([(x * leaf).sum()], [leaf])
    assert (gradient.numpy().tolist(), leaf.grad.numpy().tolist()) == ([1, 2], [3, 3])


def test_an_empty_leaf_keeps_its_gradient():
    platform, x = get_platform("paddle"), plain(np.zeros((0, 2), "float32"))
    (x * 3).sum().backward()
    (gradient,) = platform.grad([(x * 2).sum()], [x])
    assert gradient.numpy().shape == platform.get_grad(x).numpy().shape == (0, 2)


def test_a_thread_makes_leaves_while_another_takes_gradients():
    platform, x = get_platform("paddle"), plain([1.0])
    kept = [plain([1.0]) for _ in range(5000)]
    done = threading.Event()

    def work():
        while not done.is_set():
            kept.append(plain([1.0]))

    thread, interval = threading.Thread(target=work), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(10):
            (gradient,) = platform.grad([x * 2], [x])
            assert gradient.item() == 2
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
