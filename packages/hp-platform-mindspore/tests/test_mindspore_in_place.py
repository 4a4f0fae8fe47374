"""Writing into DTensors: methods with an underscore, augmented assignment, assignment to parts."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, mint

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.exceptions import CapabilityError, ShardingRuleError
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.testing import run_ranks

FULL = np.arange(1, 16, dtype=np.float32).reshape(5, 3)
LAYOUTS = (Shard(0), Shard(1), Replicate())


def on_ranks(platform, fn):
    """`fn(place)` on two simulated ranks, for each layout; `place(array)` distributes."""

    def program():
        mesh = init_device_mesh("cpu", (2,), platform=platform)
        return [
            fn(lambda array, placed=placed: distribute_tensor(Tensor(array), mesh, [placed], src_data_rank=None))
            for placed in LAYOUTS
        ]

    return [result for results in run_ranks(program, 2, platform) for result in results]


def _added_twice(x):
    x += x
    x += 1
    return x


WRITES = {
    "add_": (lambda x: x.add_(x), FULL * 2),
    "add_ with alpha": (lambda x: x.add_(x, alpha=2), FULL * 3),
    "sub_": (lambda x: x.sub_(1.0), FULL - 1),
    "mul_": (lambda x: x.mul_(3), FULL * 3),
    "div_": (lambda x: x.div_(2.0), FULL / 2),
    "+=": (_added_twice, FULL * 2 + 1),
    # MindSpore's own exponentials are off by 9e-7 of NumPy's.
    "exp_": (lambda x: x.mul_(0.1).exp_(), lambda: mint.exp(mint.mul(Tensor(FULL), 0.1)).asnumpy()),
    "clamp_": (lambda x: x.clamp_(2, 5), FULL.clip(2, 5)),
    "fill_": (lambda x: x.fill_(3.0), np.full_like(FULL, 3)),
    "zero_": (lambda x: x.zero_(), FULL * 0),
    "masked_fill_": (lambda x: x.masked_fill_(x > 4, 0.0), np.where(FULL > 4, 0, FULL)),
    "relu_": (lambda x: mint.nn.functional.relu(x.sub_(5), inplace=True), np.maximum(FULL - 5, 0)),
    "floor_": (lambda x: x.div_(2).floor_(), np.floor(FULL / 2)),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_reaches_the_tensor_itself(platform, name):
    write, expected = WRITES[name]

    def program(place):
        x = place(FULL.copy())
        before = platform.version(x)
        assert write(x) is x
        assert platform.version(x) > before
        return x.asnumpy()

    expected = expected() if callable(expected) else expected
    for found in on_ranks(platform, program):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


PARTS = {
    "a row": (0, 7.0),
    "rows": (slice(1, 4), 7.0),
    "every second row": (slice(None, None, 2), -1.0),
    "a column": ((slice(None), 1), 7.0),
    "an element": ((4, -1), 7.0),
    "all": (Ellipsis, 7.0),
}


@pytest.mark.parametrize("name", PARTS)
def test_assignment_to_a_part(platform, name):
    index, value = PARTS[name]
    expected = FULL.copy()
    expected[index] = value

    def program(place):
        x = place(FULL.copy())
        x[index] = value
        return x.asnumpy()

    for found in on_ranks(platform, program):
        np.testing.assert_array_equal(found, expected)


def test_assignment_of_a_dtensor_and_by_a_mask(platform):
    expected = FULL.copy()
    expected[1:3] = FULL[3:]
    expected[expected > 11] = 0

    def program(place):
        x = place(FULL.copy())
        x[1:3] = place(FULL[3:].copy())
        x[x > 11] = 0.0
        return x.asnumpy()

    for found in on_ranks(platform, program):
        np.testing.assert_array_equal(found, expected)


def test_gradients_go_through_what_was_written(platform):
    """`x * x`, then tripled in place, then one row replaced."""

    def program(place):
        leaf, row = place(FULL.copy()), place(np.ones((1, 3), np.float32))
        for x in (leaf, row):
            platform.set_requires_grad(x, True)
        x = leaf * leaf
        x.mul_(3)
        x[2:3] = row * 2
        loss = (x * x).sum().full_tensor()
        return [g.asnumpy() for g in platform.grad([loss], [leaf, row])]

    expected = 2 * (3 * FULL**2) * 6 * FULL
    expected[2] = 0
    for of_leaf, of_row in on_ranks(platform, program):
        np.testing.assert_allclose(of_leaf, expected, rtol=1e-6)
        np.testing.assert_allclose(of_row, np.full((1, 3), 2 * 2 * 2.0), rtol=1e-6)


def test_a_needed_value_that_was_overwritten_is_noticed(platform):
    def program(place):
        leaf = place(FULL.copy())
        platform.set_requires_grad(leaf, True)
        x = leaf * 1
        loss = (x * x).sum().full_tensor()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            platform.grad([loss], [leaf])

    on_ranks(platform, program)


def test_a_recorded_write_that_views_would_not_follow_is_refused(platform):
    def program(place):
        leaf = place(FULL.copy())
        platform.set_requires_grad(leaf, True)
        x = leaf * 1
        view = x.unsqueeze(0)
        with pytest.raises(CapabilityError, match="shares memory with a view of it"):
            x.add_(1)
        with pytest.raises(CapabilityError, match="one that it is a view of"):
            view.add_(1)
        with platform.no_grad():
            view.add_(1)
        seen = x.asnumpy().copy()
        del view
        x.add_(1)
        return seen, x.asnumpy()

    for once, twice in on_ranks(platform, program):
        np.testing.assert_array_equal(once, FULL + 1)
        np.testing.assert_array_equal(twice, FULL + 2)


def test_what_does_not_fit_is_refused(platform):
    def program(place):
        full, ints = place(FULL.copy()), place(FULL.astype(np.int64))
        with pytest.raises(TypeError, match="cannot be stored in Int64"):
            ints.mul_(1.5)
        with pytest.raises((ValueError, ShardingRuleError), match=r"does not fit into|in place it would"):
            full.add_(place(np.ones((2, 5, 3), np.float32)))

    on_ranks(platform, program)
