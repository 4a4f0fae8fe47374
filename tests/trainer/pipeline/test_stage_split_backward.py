"""The two parts of a split backward give the gradients of a full one, bit by bit, and the first leaves parameters."""

from __future__ import annotations

import numpy as np
import pytest

from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_trainer.pipeline import PipelineStage
from hp_trainer.pipeline.transfers import layout_of


class Tangle(nn.Module):
    """A weight used twice on one path and once beside it, a bias, a branch that no input reaches, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(4, 4, bias=True)
        self.once = nn.Linear(4, 4)
        self.apart = self.parameter((4,))
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        ops = self.ops
        y = self.twice(ops.silu(self.twice(x)))
        z = ops.add(self.once(y), self.twice(x))
        return ops.add(ops.mul(z, y), ops.square(self.apart)), ops.mul(y, 2.0), ops.square(self.apart)


@pytest.fixture
def model(hp_platform):
    if not hp_platform.splits_backward:
        pytest.skip(f"{hp_platform.name} runs both parts at once")
    with nn.building(hp_platform):
        model = Tangle()
    init_parameters(model, lambda name, shape: Normal(0.5), seed=1)
    return model


def leaf(platform, seed=0):
    values = np.random.default_rng(seed).standard_normal((3, 4)).astype(np.float32)
    x = platform.from_numpy(values)
    platform.set_requires_grad(x, True)
    return x


def grads_of(platform, model):
    return {
        name: None if (grad := platform.get_grad(p)) is None else platform.to_numpy(grad).copy()
        for name, p in platform.named_parameters(model)
    }


def output_grads(platform, outputs):
    return [platform.from_numpy(np.full(tuple(y.shape), 1.0 + i, np.float32)) for i, y in enumerate(outputs)]


def test_both_parts_together_are_a_backward(hp_platform, model):
    x = leaf(hp_platform)
    outputs = model(x)
    total = hp_platform.zeros((), hp_platform.dtype("float32"))
    for y, grad in zip(outputs, output_grads(hp_platform, outputs), strict=True):
        total = hp_platform.ops.add(total, hp_platform.ops.sum(hp_platform.ops.mul(y, grad)))
    hp_platform.backward(total)
    expected, expected_x = grads_of(hp_platform, model), hp_platform.to_numpy(hp_platform.get_grad(x)).copy()
    for _, parameter in hp_platform.named_parameters(model):
        hp_platform.set_grad(parameter, None)
    again = leaf(hp_platform)
    outputs = model(again)
    (dx,), finish = hp_platform.split_backward(outputs, output_grads(hp_platform, outputs), [again])
    assert set(map(type, grads_of(hp_platform, model).values())) == {type(None)}
    np.testing.assert_allclose(hp_platform.to_numpy(dx), expected_x, rtol=1e-6)
    assert hp_platform.get_grad(again) is None
    finish()
    found = grads_of(hp_platform, model)
    for name, grad in expected.items():
        if grad is None:
            assert found[name] is None
        else:
            np.testing.assert_allclose(found[name], grad, rtol=2e-6, atol=1e-6, err_msg=name)


def test_micro_batches_may_finish_in_any_order(hp_platform, model):
    inputs = [leaf(hp_platform, seed) for seed in range(3)]
    finishes = []
    for x in inputs:
        y = model(x)[0]
        finishes.append(hp_platform.split_backward([y], output_grads(hp_platform, [y]), [x])[1])
    for index in (1, 2, 0):
        finishes[index]()
    found = grads_of(hp_platform, model)
    for _, parameter in hp_platform.named_parameters(model):
        hp_platform.set_grad(parameter, None)
    for index in (1, 2, 0):
        hp_platform.backward(hp_platform.ops.sum(model(inputs[index])[0]))
    for name, grad in grads_of(hp_platform, model).items():
        if grad is not None:
            np.testing.assert_allclose(found[name], grad, rtol=2e-6, atol=1e-6, err_msg=name)


class RepeatedStage(PipelineStage):
    def call(self, args, kwargs):
        return checkpoint(self.submod.once, *args, platform=self.platform)


def test_a_stage_that_is_computed_again_is_not_split(hp_platform, model):
    """Between both parts it would hold what recomputation has made; so its full backward is the first part."""
    stage = RepeatedStage(model, 1, 2)
    x = leaf(hp_platform)
    layout, _ = layout_of(hp_platform, x, "x")
    _, (y,) = stage.outputs(0, stage.forward(0, layout, [x], {}, None))
    (grad,) = stage.input_grad(0, output_grads(hp_platform, [y]))
    found = hp_platform.to_numpy(hp_platform.get_grad(model.once.weight)).copy()
    stage.weight_grad(0)
    np.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.get_grad(model.once.weight)), found)
    assert np.abs(hp_platform.to_numpy(grad)).max() > 0


def test_a_platform_that_cannot_says_so(hp_platform):
    if hp_platform.splits_backward:
        pytest.skip("it can")
    with pytest.raises(CapabilityError, match="cannot split a backward; call backward instead"):
        hp_platform.split_backward([], [], [])


def test_the_first_stage_has_no_first_part(hp_platform, model):
    """Nobody waits for the gradients of its inputs, so all of its backward can fill idle time."""
    stage = PipelineStage(model, 0, 2)
    _, (y, *_) = stage.outputs(0, stage.forward_first(0, (leaf(hp_platform),), {}))
    shaped_as = [y, y, model.apart]
    assert stage.input_grad(0, [hp_platform.ops.ones_like(each) for each in shaped_as]) == []
    assert grads_of(hp_platform, model)["once.weight"] is None
    stage.weight_grad(0)
    assert grads_of(hp_platform, model)["once.weight"] is not None


class Reused(nn.Module):
    """A weight of three uses one after the other, and one that is computed and then used twice, in two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.thrice = nn.Linear(4, 4)
        self.scaled = self.parameter((4, 4))
        self.bias = self.parameter((4,))

    def forward(self, x):
        ops = self.ops
        weight = ops.mul(self.scaled, 1.5)
        y = ops.mul(x, ops.sum(ops.square(weight)))
        for _ in range(3):
            y = ops.silu(self.thrice(y))
        return ops.add(ops.matmul(y, weight), ops.mul(self.bias, y))


def test_weights_used_again_add_up_as_in_a_backward(hp_platform, model):
    with nn.building(hp_platform):
        reused = Reused()
    init_parameters(reused, lambda name, shape: Normal(0.5), seed=2)
    found = []
    for splits in (False, True):
        for _, parameter in hp_platform.named_parameters(reused):
            hp_platform.set_grad(parameter, None)
        x = leaf(hp_platform)
        y = reused(x)
        (grad,) = output_grads(hp_platform, [y])
        if splits:
            (dx,), finish = hp_platform.split_backward([y], [grad], [x])
            finish()
        else:
            hp_platform.backward(y, grad)
            dx = hp_platform.get_grad(x)
        found.append(grads_of(hp_platform, reused) | {"x": hp_platform.to_numpy(dx).copy()})
    for name, expected in found[0].items():
        np.testing.assert_array_equal(found[1][name], expected, err_msg=name)


class ByHand(nn.Module):
    """Two weights that are computed, used in a node whose backward is given, and used elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.left = self.parameter((4, 4))
        self.right = self.parameter((4, 4))

    def forward(self, x):
        ops, platform = self.ops, self.platform
        left, right = ops.mul(self.left, 1.5), ops.mul(self.right, 0.5)

        def forward(x, left, right):
            return ops.matmul(ops.matmul(x, left), right), ops.mul(x, 2.0)

        def backward(grad, unused):
            assert unused is None, "nothing has used the second output"
            through = ops.matmul(grad, ops.transpose(right, 0, 1))
            found = ops.matmul(through, ops.transpose(left, 0, 1)), ops.matmul(ops.transpose(x, 0, 1), through)
            return *found, ops.matmul(ops.transpose(ops.matmul(x, left), 0, 1), grad)

        y, _ = platform.custom_function(forward, backward, x, left, right)
        return ops.add(y, ops.mul(ops.sum(ops.square(left)), ops.sum(right)))


def test_a_backward_of_a_node_that_is_given_is_split_too(hp_platform, model):
    with nn.building(hp_platform):
        by_hand = ByHand()
    init_parameters(by_hand, lambda name, shape: Normal(0.5), seed=3)
    x, again = leaf(hp_platform), leaf(hp_platform)
    y = by_hand(x)
    (grad,) = output_grads(hp_platform, [y])
    hp_platform.backward(y, grad)
    expected = grads_of(hp_platform, by_hand)
    for _, parameter in hp_platform.named_parameters(by_hand):
        hp_platform.set_grad(parameter, None)
    (dx,), finish = hp_platform.split_backward([by_hand(again)], [grad], [again])
    finish()
    np.testing.assert_array_equal(hp_platform.to_numpy(dx), hp_platform.to_numpy(hp_platform.get_grad(x)))
    for name, found in grads_of(hp_platform, by_hand).items():
        np.testing.assert_array_equal(found, expected[name], err_msg=name)


def test_a_hook_changes_a_gradient_once(hp_platform, model):
    """Also that of a tensor where the parameters' part begins."""
    inputs = [leaf(hp_platform), leaf(hp_platform)]
    grads = []
    for x in inputs:
        for _, parameter in hp_platform.named_parameters(model):
            hp_platform.set_grad(parameter, None)
        y = model.once(x)
        y.register_hook(lambda grad: grad * 3.0)
        if x is inputs[0]:
            hp_platform.backward(hp_platform.ops.sum(y))
        else:
            hp_platform.split_backward([hp_platform.ops.sum(y)], [None], [x])[1]()
        grads.append(grads_of(hp_platform, model)["once.weight"])
    np.testing.assert_array_equal(grads[1], grads[0])
