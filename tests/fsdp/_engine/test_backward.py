"""Ranks whose losses use different modules of the same model, including nested and frozen groups."""

from __future__ import annotations

import functools

import numpy
import pytest
from fsdp_training import full_grads, held_bytes, mesh_of

from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import fully_shard

DIM = 4
NUM_RANKS = 2


class Level(nn.Module):
    """A linear map followed by the next level, whose output it returns too."""

    def __init__(self, depth) -> None:
        super().__init__()
        self.map = nn.Linear(DIM, DIM)
        self.inner = Level(depth - 1) if depth > 1 else None

    def forward(self, x):
        x = self.ops.tanh(self.map(x))
        if self.inner is None:
            return x, x
        inside, _ = self.inner(x)
        return self.ops.add(x, inside), inside


class Net(nn.Module):
    """A first map, then nested levels, and parallel ones."""

    def __init__(self, depth, number) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.level = Level(depth) if depth else None
        self.others = nn.ModuleList([Level(1) for _ in range(number)])


def levels_only_on_rank_0(model, x, rank):
    x = model.first(x)
    y, _ = model.level(x)
    return model.ops.add(x, y) if rank == 0 else x


def an_inner_level_only_on_rank_1(model, x, rank):
    """Its output reaches the loss of rank 1 without the levels around it."""
    x = model.first(x)
    outer, inside = model.level(x)
    return model.ops.add(x, outer if rank == 0 else inside)


def others_only_on_rank_0(model, x, rank):
    x = y = model.first(x)
    for other in model.others:
        y, _ = other(y)
    return model.ops.add(x, y) if rank == 0 else x


def the_last_call_only_on_rank_0(model, x, rank):
    """Two modules alternate: the call that rank 1 skips is not the first one of that module."""
    first, second = model.others
    x, _ = first(second(first(model.first(x))[0])[0])
    y, _ = second(x)
    return model.ops.add(x, y) if rank == 0 else x


def build(platform, forward, depth, number, frozen):
    with nn.building(platform):
        model = Net(depth, number)
    for index, (name, parameter) in enumerate(platform.named_parameters(model)):
        values = numpy.random.default_rng(index).normal(size=tuple(parameter.shape)) * 0.5
        platform.copy_(parameter, platform.from_numpy(values.astype(numpy.float32)))
        platform.set_requires_grad(parameter, not any(part in name for part in frozen))
    model.construct = model.forward = functools.partial(forward, model)
    return model


def loss(platform, model, rank):
    values = numpy.random.default_rng(rank).normal(size=(2, DIM)).astype(numpy.float32)
    y = model(platform.from_numpy(values), rank)
    return platform.ops.sum(platform.ops.mul(y, y))


CASES = {
    "two levels": (levels_only_on_rank_0, 2, 0, ()),
    "four levels": (levels_only_on_rank_0, 4, 0, ()),
    "frozen in a level": (levels_only_on_rank_0, 4, 0, ("level.inner",)),
    "frozen around a level": (levels_only_on_rank_0, 3, 0, ("level.map", "level.inner.map")),
    "an inner level": (an_inner_level_only_on_rank_1, 3, 0, ()),
    "one frozen": (others_only_on_rank_0, 0, 1, ("others",)),
    "all frozen but the root": (others_only_on_rank_0, 0, 4, ("others",)),
    "some frozen": (others_only_on_rank_0, 0, 4, ("others.0", "others.2", "others.3")),
    "in turns": (the_last_call_only_on_rank_0, 0, 2, ()),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ahead", [None, 0, 3])
def test_gradients_and_collectives_are_those_of_all_ranks(hp_platform, name, ahead):
    model = build(hp_platform, *CASES[name])
    for rank in range(NUM_RANKS):
        hp_platform.backward(hp_platform.ops.div(loss(hp_platform, model, rank), NUM_RANKS))
    expected = full_grads(hp_platform, model)

    def program():
        model, mesh = build(hp_platform, *CASES[name]), mesh_of(hp_platform, NUM_RANKS)
        levels = [module for _, module in hp_platform.named_modules(model) if isinstance(module, Level)]
        for module in (*reversed(levels), model):
            fully_shard(module, mesh)
        if ahead is not None:
            model.set_buffers_in_flight(gathered_ahead=ahead)
        with record_collectives() as log:
            hp_platform.backward(loss(hp_platform, model, current_world(hp_platform).rank))
        for parameter, grad in expected.items():
            found = full_grads(hp_platform, model)[parameter]
            assert (found is None) == (grad is None), parameter
            if grad is not None:
                numpy.testing.assert_allclose(found, grad, rtol=1e-5, atol=1e-6, err_msg=parameter)
        assert not any(held_bytes(model))
        return [record.name for record in log.records]

    first, *others = run_ranks(program, NUM_RANKS, hp_platform)
    assert all(other == first for other in others)


def frozen_in_front(model, x, rank):
    x, _ = model.level(x)
    for other in model.others:
        x, _ = other(x)
    return model.first(x)


def test_frozen_groups_that_no_gradient_comes_to_are_not_gathered_for_backward(hp_platform):
    def program():
        model = build(hp_platform, frozen_in_front, 1, 4, ("level", "others"))
        for module in (model.level, *model.others, model):
            fully_shard(module, mesh_of(hp_platform, NUM_RANKS))
        model.set_buffers_in_flight(gathered_ahead=0)
        with record_collectives() as log:
            hp_platform.backward(loss(hp_platform, model, current_world(hp_platform).rank))
        return log.count("all_gather")

    assert run_ranks(program, NUM_RANKS, hp_platform) == [6] * NUM_RANKS


def test_a_list_of_a_module_and_one_inside_of_it_may_be_the_root(hp_platform):
    def forward(model, x, rank):
        x, _ = model.level(x)
        for other in model.others:
            x, _ = other(x)
        return model.first(model.level(x)[0])

    settings = forward, 2, 1, ()
    model = build(hp_platform, *settings)
    for rank in range(NUM_RANKS):
        hp_platform.backward(hp_platform.ops.div(loss(hp_platform, model, rank), NUM_RANKS))
    expected = full_grads(hp_platform, model)

    def program():
        model, mesh = build(hp_platform, *settings), mesh_of(hp_platform, NUM_RANKS)
        fully_shard(model.others[0], mesh)
        fully_shard([model, model.level], mesh)
        for _ in range(2):
            hp_platform.backward(loss(hp_platform, model, current_world(hp_platform).rank))
            for name, grad in full_grads(hp_platform, model).items():
                numpy.testing.assert_allclose(grad, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
            for _, parameter in hp_platform.named_parameters(model):
                hp_platform.set_grad(parameter, None)
            assert not any(held_bytes(model))

    run_ranks(program, NUM_RANKS, hp_platform)
