"""Groups used several times, partly without gradients, and by several backwards."""

from __future__ import annotations

import functools
import operator

import numpy
import pytest
from fsdp_training import Block, Case, build, full_grads, held_bytes, mesh_of, micro_loss

from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import fully_shard, register_fsdp_forward_method
from hp_fsdp.exceptions import FSDPStateError

DIM = 5


class Net(nn.Module):
    """Linear maps between a first and a last one. `beside` skips some parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.last = (nn.Linear(DIM, DIM, bias=True) for _ in range(4))
        self.beside = Beside()
        self.frozen = Frozen()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.outer(self.ops.tanh(self.inner(x)))


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.unused = nn.Linear(DIM, DIM, bias=True), nn.Linear(DIM, 3)

    def forward(self, x):
        return self.ops.tanh(self.map(x))


def frozen_twice(model, x, rank):
    tanh = model.ops.tanh
    return model.last(model.a(tanh(model.b(tanh(model.a(model.first(x)))))))


def trainable_within_frozen(model, x, rank):
    """The first call of the frozen module has an input without a gradient, and a trainable module inside."""
    return model.last(model.frozen(model.frozen(x)))


def partly_without_gradient(model, x, rank):
    with model.platform.no_grad():
        x = model.a(x)
    return model.last(model.b(x))


def one_called_again(model, x, rank):
    x = model.b(model.a(x))
    return model.last(model.ops.add(model.a(x), x))


def recomputed_twice(model, x, rank):
    x = model.first(x)
    for _ in range(2):
        x = checkpoint(model.beside, x, platform=model.platform)
    return model.last(x)


def recomputed_within_recomputation(model, x, rank):
    def inner(x):
        return checkpoint(model.a, x, platform=model.platform)

    return model.last(checkpoint(inner, model.first(x), platform=model.platform))


def not_on_rank_0(model, x, rank):
    x = model.first(x)
    beside = model.beside(x)
    return model.last(x if rank == 0 else model.ops.add(x, beside))


CASES = {
    frozen_twice: ("a", "b"),
    trainable_within_frozen: ("frozen.inner", "frozen"),
    partly_without_gradient: ("a, b",),
    one_called_again: ("a, b",),
    recomputed_twice: ("beside",),
    recomputed_within_recomputation: ("a",),
    not_on_rank_0: ("beside",),
}


def build_net(platform, forward):
    with nn.building(platform):
        model = Net()
    is_frozen = forward in (frozen_twice, trainable_within_frozen)
    for index, (name, parameter) in enumerate(platform.named_parameters(model)):
        values = numpy.random.default_rng(index).normal(size=tuple(parameter.shape)) * 0.5
        platform.copy_(parameter, platform.from_numpy(values.astype(numpy.float32)))
        platform.set_requires_grad(parameter, not name.startswith(("a.", "frozen.outer") if is_frozen else ()))
    model.construct = model.forward = functools.partial(forward, model)
    return model


def loss(platform, model, rank, step):
    values = numpy.random.default_rng([rank, step]).normal(size=(2, DIM)).astype(numpy.float32)
    y = model(platform.from_numpy(values), rank)
    return platform.ops.sum(platform.ops.mul(y, y))


def gradients(platform, forward, rank_losses):
    model = build_net(platform, forward)
    for each in rank_losses(model):
        platform.backward(each)
    return full_grads(platform, model)


@pytest.mark.parametrize("forward", CASES, ids=lambda forward: forward.__name__)
@pytest.mark.parametrize("bucket_size", [None, 0], ids=["one buffer", "a buffer each"])
def test_gradients_are_those_of_one_rank(hp_platform, forward, bucket_size):
    steps = 3
    expected = [
        gradients(
            hp_platform,
            forward,
            lambda model, step=step: [
                hp_platform.ops.div(loss(hp_platform, model, rank, step), 2) for rank in range(2)
            ],
        )
        for step in range(steps)
    ]

    def program():
        model, mesh = build_net(hp_platform, forward), mesh_of(hp_platform, 2)
        for names in CASES[forward]:
            modules = [operator.attrgetter(name)(model) for name in names.split(", ")]
            fully_shard(modules, mesh, bucket_size=bucket_size, reshard_after_forward=True)
        fully_shard(model, mesh)
        rank = current_world(hp_platform).rank
        for step in range(steps):
            hp_platform.backward(loss(hp_platform, model, rank, step))
            found = full_grads(hp_platform, model)
            for name, grad in expected[step].items():
                if grad is not None:
                    numpy.testing.assert_allclose(found[name], grad, rtol=1e-4, atol=1e-5, err_msg=name)
            for _, parameter in hp_platform.named_parameters(model):
                hp_platform.set_grad(parameter, None)
            assert not any(held_bytes(model))

    run_ranks(program, 2, hp_platform)


def in_turn(model, x, rank):
    return model.last(model.b(model.a(x)))


def parts_in_turn(model, x, rank):
    """The same modules, without the one that holds them."""
    return model.b(model.ops.tanh(model.a(x)))


def test_parts_called_on_their_own_cost_the_same_in_each_step(hp_platform):
    """No backward visits the calls of earlier steps, for which it would reduce zeros."""

    def part_loss(model, rank, step):
        values = numpy.random.default_rng([rank, step]).normal(size=(2, DIM)).astype(numpy.float32)
        y = parts_in_turn(model, hp_platform.from_numpy(values), rank)
        return hp_platform.ops.sum(hp_platform.ops.mul(y, y))

    steps = 4
    plain = build_net(hp_platform, in_turn)
    for step in range(steps):
        for rank in range(2):
            hp_platform.backward(hp_platform.ops.div(part_loss(plain, rank, step), 2))
    expected = full_grads(hp_platform, plain)

    def program():
        model, rank = build_net(hp_platform, in_turn), current_world(hp_platform).rank
        for module in (model.a, model.b, model):
            fully_shard(module, mesh_of(hp_platform, 2))
        hp_platform.backward(loss(hp_platform, model, rank, 0))
        for _, parameter in hp_platform.named_parameters(model):
            hp_platform.set_grad(parameter, None)
        logs = []
        for step in range(steps):
            with record_collectives() as log:
                hp_platform.backward(part_loss(model, rank, step))
            logs.append([log.count(name) for name in ("all_gather", "reduce_scatter")])
        for name, grad in full_grads(hp_platform, model).items():
            assert (grad is None) == (expected[name] is None), name
            if grad is not None:
                numpy.testing.assert_allclose(grad, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
        assert logs[1:] == [[4, 2]] * (steps - 1)
        assert not any(held_bytes(model))

    run_ranks(program, 2, hp_platform)


def test_a_backward_may_follow_one_through_later_calls_of_parts(hp_platform):
    """Both forwards run before both backwards, and a module is called between the backwards."""

    def step(model, rank):
        values = numpy.random.default_rng(rank).normal(size=(2, DIM)).astype(numpy.float32)
        x = hp_platform.from_numpy(values)
        first, second = model.a(x), model.b(x)
        hp_platform.backward(hp_platform.ops.sum(hp_platform.ops.mul(second, second)), retain_graph=True)
        third = model.a(x)
        hp_platform.backward(hp_platform.ops.sum(hp_platform.ops.mul(first, third)))

    plain = build_net(hp_platform, in_turn)
    for rank in range(2):
        step(plain, rank)
    expected = full_grads(hp_platform, plain)

    def program():
        model, rank = build_net(hp_platform, in_turn), current_world(hp_platform).rank
        for module in (model.a, model.b, model):
            fully_shard(module, mesh_of(hp_platform, 2))
        with hp_platform.no_grad():
            loss(hp_platform, model, rank, 0)
        step(model, rank)
        for name, grad in full_grads(hp_platform, model).items():
            if grad is not None:
                numpy.testing.assert_allclose(2 * grad, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)
        assert not any(held_bytes(model))

    run_ranks(program, 2, hp_platform)


def test_what_is_gathered_ahead_of_a_part_and_written_before_its_use_is_gathered_again(hp_platform):
    """A module called outside of the model prefetches the next one, which only the model calls, after a step."""

    def program():
        model, rank = build_net(hp_platform, in_turn), current_world(hp_platform).rank
        for module in (model.a, model.b, model.last, model):
            fully_shard(module, mesh_of(hp_platform, 2))
        hp_platform.backward(loss(hp_platform, model, rank, 0))
        with hp_platform.no_grad():
            model.a(hp_platform.from_numpy(numpy.zeros((2, DIM), numpy.float32)))
        for _, parameter in hp_platform.named_parameters(model):
            local = hp_platform.unwrap(parameter)
            hp_platform.copy_(local, hp_platform.ops.mul(hp_platform.detach(local), 2))
        found = loss(hp_platform, model, 0, 1)
        return hp_platform.to_numpy(hp_platform.detach(found))

    plain = build_net(hp_platform, in_turn)
    for _, parameter in hp_platform.named_parameters(plain):
        hp_platform.copy_(parameter, hp_platform.ops.mul(hp_platform.detach(parameter), 2))
    expected = hp_platform.to_numpy(hp_platform.detach(loss(hp_platform, plain, 0, 1)))
    for found in run_ranks(program, 2, hp_platform):
        numpy.testing.assert_allclose(found, expected, rtol=1e-4)


def recomputed_in_part(model, x, rank):
    return model.last(model.b(checkpoint(model.a, model.first(x), platform=model.platform)))


def backward_after_a_later_forward(platform, model, rank):
    first, _ = (loss(platform, model, rank, step) for step in range(2))
    platform.backward(first)


def one_part_without_gradient(platform, model, rank):
    loss(platform, model, rank, 0)
    x = platform.from_numpy(numpy.ones((2, DIM), numpy.float32))
    with platform.no_grad():
        model.b(x)
    y = model.a(x)
    platform.backward(platform.ops.sum(platform.ops.mul(y, y)))


STEPS = backward_after_a_later_forward, one_part_without_gradient


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_use_of_another_forward_takes_no_gradients(hp_platform, step):
    """The group is recorded in that forward, and not yet in this one."""
    plain = build_net(hp_platform, recomputed_in_part)
    for rank in range(2):
        step(hp_platform, plain, rank)
    expected = full_grads(hp_platform, plain)

    def program():
        model, mesh = build_net(hp_platform, recomputed_in_part), mesh_of(hp_platform, 2)
        fully_shard([model.a, model.b], mesh)
        fully_shard(model, mesh)
        parameters = dict(hp_platform.named_parameters(model))
        step(hp_platform, model, current_world(hp_platform).rank)
        for name, parameter in parameters.items():
            grad = hp_platform.get_grad(parameter)
            if expected[name] is not None:
                found = hp_platform.to_numpy(grad.full_tensor())
                numpy.testing.assert_allclose(2 * found, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)

    run_ranks(program, 2, hp_platform)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_step_between_a_forward_and_its_backward(hp_platform, zero_stage):
    """Full parameters in memory still have the values of the forward. A new gather would have those of the step."""

    def rank():
        mesh = mesh_of(hp_platform, 2)
        model = Net()
        for module in (model.first, model.last):
            fully_shard(module, mesh, zero_stage=zero_stage)
        fully_shard(model, mesh, zero_stage=zero_stage)
        x = hp_platform.from_numpy(numpy.ones((2, DIM), numpy.float32))

        def loss(scale):
            y = model.last(model.ops.tanh(model.first(model.ops.mul(x, scale))))
            return model.ops.sum(model.ops.mul(y, y))

        object.__setattr__(model, "forward", loss)
        alone, first, second = model(2.0), model(1.0), model(2.0)
        hp_platform.backward(alone)
        expected = full_grads(hp_platform, model.first)
        _forget_grads(hp_platform, model)
        hp_platform.backward(first)
        with hp_platform.no_grad():
            for _, parameter in hp_platform.named_parameters(model):
                parameter.add_(1.0)
        _forget_grads(hp_platform, model)
        if zero_stage in (1, 2):
            hp_platform.backward(second)
            return [expected, full_grads(hp_platform, model.first)]
        with pytest.raises(FSDPStateError, match=r"weight, .*bias: changed between a forward and its backward"):
            hp_platform.backward(second)
        model.reset()
        hp_platform.backward(model(1.0))
        return [expected, expected]

    for expected, found in run_ranks(rank, 2, hp_platform):
        for name, value in expected.items():
            numpy.testing.assert_allclose(found[name], value, rtol=1e-6)


class Momentum(nn.Module):
    """A copy that follows the trained map: the forward updates it before it computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.copy = nn.Linear(DIM, DIM, bias=True), nn.Linear(DIM, DIM, bias=True)

    def forward(self, x):
        y = self.trained(x)
        with self.platform.no_grad():
            for mine, other in zip(self._parameters_of(self.copy), self._parameters_of(self.trained), strict=True):
                halves = self.ops.mul(self.ops.add(mine, other), 0.5)
                self.platform.copy_(mine, self.platform.unwrap(halves))
            z = self.copy(x)
        return self.ops.add(y, z)

    def _parameters_of(self, module):
        return [parameter for _, parameter in self.platform.named_parameters(module)]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_what_a_forward_writes_before_a_group_computes_counts(hp_platform, zero_stage):
    """Also if the group has been prefetched, or stays unsharded."""

    def outputs(model):
        for _, parameter in hp_platform.named_parameters(model.copy):
            hp_platform.set_requires_grad(parameter, False)
        x, found = hp_platform.from_numpy(numpy.ones((2, DIM), numpy.float32)), []
        for _ in range(3):
            y = model(x)
            hp_platform.backward(hp_platform.ops.sum(y))
            found.append(hp_platform.to_numpy(y))
            _add_one(hp_platform, model.trained)
        return found

    with nn.building(hp_platform):
        expected = outputs(_initialised(Momentum()))

    def program():
        with nn.building(hp_platform):
            model = _initialised(Momentum())
        for module in (model.trained, model.copy, model):
            fully_shard(module, mesh_of(hp_platform, 2), zero_stage=zero_stage)
        return outputs(model)

    for found in run_ranks(program, 2, hp_platform):
        numpy.testing.assert_allclose(found, expected, rtol=1e-5)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(DIM, DIM, bias=True), nn.Linear(DIM, 1, bias=True)

    def generate(self, x):
        return self.generator(x)

    def judge(self, x):
        return self.critic(x)


def test_parameters_that_a_backward_does_not_use_may_have_changed(hp_platform):
    """The critic's step is between the generator's forward and backward; all are in one group."""

    def grads(model):
        made = model.generate(hp_platform.from_numpy(numpy.ones((2, DIM), numpy.float32)))
        hp_platform.backward(hp_platform.ops.sum(model.judge(hp_platform.detach(made))))
        _add_one(hp_platform, model.critic)
        hp_platform.backward(hp_platform.ops.sum(model.judge(made)))
        return full_grads(hp_platform, model)

    with nn.building(hp_platform):
        expected = grads(_initialised(Adversaries()))

    def program():
        with nn.building(hp_platform):
            model = fully_shard(_initialised(Adversaries()), mesh_of(hp_platform, 2))
        for name in ("generate", "judge"):
            register_fsdp_forward_method(model, name)
        found = grads(model)
        assert found.keys() == expected.keys()
        for name, grad in found.items():
            numpy.testing.assert_allclose(grad, expected[name], rtol=1e-5, err_msg=name)

    run_ranks(program, 2, hp_platform)


def _add_one(platform, module) -> None:
    with platform.no_grad():
        for _, parameter in platform.named_parameters(module):
            platform.copy_(parameter, platform.unwrap(platform.ops.add(parameter, 1.0)))


def _initialised(model):
    init_parameters(model, lambda name, shape: Normal(0.4), seed=1)
    return model


def _forget_grads(platform, model) -> None:
    for _, parameter in platform.named_parameters(model):
        platform.set_grad(parameter, None)


# float32: sums of a few hundred products in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def assert_grads(platform, model, expected):
    for name, grad in full_grads(platform, model).items():
        if expected[name] is not None:
            numpy.testing.assert_allclose(grad, expected[name], **CLOSE, err_msg=name)


def test_several_forwards_before_their_backwards_with_recomputation(hp_platform):
    """pytorch#153354, #171779: the second forward of a recomputed block found the state of the first one."""

    class Recomputed(nn.Module):
        def __init__(self, wraps):
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(2)])
            self.out = nn.Linear(5, 3)
            self.wraps = wraps

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, platform=self.platform) if self.wraps else block(x)
            return self.out(x)

    def make(wraps):
        with nn.building(hp_platform):
            model = Recomputed(wraps)
        for index, (_, parameter) in enumerate(hp_platform.named_parameters(model)):
            values = numpy.random.default_rng(index).normal(size=tuple(parameter.shape)) * 0.5
            hp_platform.copy_(parameter, hp_platform.from_numpy(values.astype(numpy.float32)))
        return model

    def loss(model, rank, micro):
        values = numpy.random.default_rng([rank, micro]).normal(size=(2, 5)).astype(numpy.float32)
        x = hp_platform.from_numpy(values)
        hp_platform.set_requires_grad(x, True)
        y = model(x)
        return hp_platform.ops.sum(hp_platform.ops.mul(y, y))

    plain = make(False)
    for other in range(2):
        for micro in range(3):
            hp_platform.backward(hp_platform.ops.div(loss(plain, other, micro), 2))
    expected = full_grads(hp_platform, plain)

    def rank():
        model = make(True)
        for each in (*model.blocks, model):
            fully_shard(each, mesh_of(hp_platform, 2))
        losses = [loss(model, current_world(hp_platform).rank, micro) for micro in range(3)]
        for each in losses:
            hp_platform.backward(each)
        assert held_bytes(model) == [0] * 3
        assert_grads(hp_platform, model, expected)

    run_ranks(rank, 2, hp_platform)


def test_small_parameters_need_no_collective_of_their_own_in_forward(hp_platform):
    """pytorch#173680: tiny modules, each gathered by its own collective, took a fifth of the step."""
    case = Case((2,), num_blocks=1)

    def rank():
        model = build(hp_platform, case)
        block = model.blocks[0]
        for small in (block.norm, block.up, block.down):
            fully_shard(small, mesh_of(hp_platform, 2), threshold=64)
        fully_shard(model, mesh_of(hp_platform, 2))
        with record_collectives() as log:
            micro_loss(hp_platform, model, case, 0, 0, 0)
        assert log.count("all_gather") == 1
        assert log.count() == 1

    run_ranks(rank, 2, hp_platform)


def test_hooks_of_users_see_full_parameters(hp_platform):
    """Those added after `fully_shard` too, before and after the forward. Gradients flow through what they return."""
    ops = hp_platform.ops

    def scale_input(module, args, kwargs):
        return (ops.mul(args[0], ops.sum(module.weight)), *args[1:]), kwargs

    def scale_output(module, args, kwargs, output):
        return ops.mul(output, ops.sum(module.weight))

    def losses(model, ranks):
        for module in (model.a, model.last):
            hp_platform.add_forward_pre_hook(module, scale_input, prepend=True)
            hp_platform.add_forward_hook(module, scale_output)
        return [ops.div(loss(hp_platform, model, rank, 0), len(ranks)) for rank in ranks]

    expected = gradients(hp_platform, in_turn, lambda model: losses(model, [0, 1]))

    def program():
        model, mesh = build_net(hp_platform, in_turn), mesh_of(hp_platform, 2)
        for module in (model.a, model.b, model.last, model):
            fully_shard(module, mesh)
        (own,) = losses(model, [current_world(hp_platform).rank])
        hp_platform.backward(own)
        found = full_grads(hp_platform, model)
        for name, grad in expected.items():
            if grad is not None:
                numpy.testing.assert_allclose(found[name], grad, rtol=1e-4, atol=1e-5, err_msg=name)
        assert not any(held_bytes(model))

    run_ranks(program, 2, hp_platform)


def test_other_entry_points_below_the_root(hp_platform):
    """pytorch#125394: a method other than forward found sharded parameters."""

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x)

        def encode(self, x):
            return self.ops.mul(self.linear(x), 2.0)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = Inner(), nn.Linear(3, 1)

        def forward(self, x):
            return self.head(self.ops.add(self.inner.encode(x), self.inner(x)))

    def gradients(model, ranks):
        total = None
        for each in ranks:
            y = hp_platform.ops.sum(model(hp_platform.from_numpy(numpy.full((1, 3), each + 1.0, numpy.float32))))
            total = y if total is None else hp_platform.ops.add(total, y)
        hp_platform.backward(hp_platform.ops.div(total, len(ranks)))
        return full_grads(hp_platform, model)

    def make():
        with nn.building(hp_platform):
            model = Outer()
        for _, parameter in hp_platform.named_parameters(model):
            values = numpy.arange(numpy.prod(parameter.shape), dtype=numpy.float32).reshape(tuple(parameter.shape))
            hp_platform.copy_(parameter, hp_platform.from_numpy(values))
        return model

    expected = gradients(make(), [0, 1])

    def rank():
        model = make()
        for each in (model.inner, model):
            fully_shard(each, mesh_of(hp_platform, 2))
        register_fsdp_forward_method(model.inner, "encode")
        for name, grad in gradients(model, [current_world(hp_platform).rank]).items():
            numpy.testing.assert_array_equal(grad, expected[name], err_msg=name)
        assert held_bytes(model) == [0, 0]

    run_ranks(rank, 2, hp_platform)
