"""Entry points of a sharded model besides its forward: unshard by hand, other methods, calls from inside, prefetch."""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import (
    Case,
    full_grads,
    full_value,
    held_bytes,
    mesh_of,
    sharded,
    step,
)

from hp_dtensor.parallel import nn
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    fully_shard,
    register_fsdp_forward_method,
)


def test_unshard_and_reshard_by_hand(hp_platform):
    case = Case((2,), num_blocks=1)

    def rank():
        model = sharded(hp_platform, case)
        expected = full_value(hp_platform, model.blocks[0].up.weight)
        handle = model.blocks[0].unshard(async_op=True)
        handle.wait()
        found = hp_platform.to_numpy(hp_platform.ops.clone(hp_platform.detach(model.blocks[0].up.weight)))
        numpy.testing.assert_array_equal(found, expected)
        step(hp_platform, model, case)
        assert held_bytes(model) == [0, 0]
        model.unshard()
        model.reshard()
        assert isinstance(model.head.weight, DTensor)
        model.blocks[0].unshard()
        x = hp_platform.from_numpy(numpy.ones((1, 5), numpy.float32))
        hp_platform.set_grad(model.blocks[0].scale, None)
        hp_platform.backward(hp_platform.ops.sum(model.blocks[0](x)))
        assert hp_platform.get_grad(model.blocks[0].scale) is not None
        assert held_bytes(model) == [0, 0]

    run_ranks(rank, 2, hp_platform)


def test_other_entry_points(hp_platform):
    class TwoDoors(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x):
            return self.linear(x)

        def encode(self, x):
            return self.ops.mul(self.linear(x), 2.0)

    def rank():
        with nn.building(hp_platform):
            model = TwoDoors()
        fully_shard(model, mesh_of(hp_platform, 2))
        register_fsdp_forward_method(model, "encode")
        x = hp_platform.from_numpy(numpy.ones((2, 5), numpy.float32))
        hp_platform.backward(hp_platform.ops.sum(model.encode(x)))
        numpy.testing.assert_array_equal(full_value(hp_platform, hp_platform.get_grad(model.linear.weight)), 4.0)
        assert held_bytes(model) == [0]

    run_ranks(rank, 2, hp_platform)


class ManyDoors(nn.Module):
    """Its forward calls its entry points, one of which may fail before another is tried, and calls itself."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def encode(self, x, fails=False):
        if fails:
            raise ArithmeticError("on purpose")
        return self.inner(self.ops.tanh(self.first(x)))

    def decode(self, x):
        return self.last(self.ops.tanh(x))

    def forward(self, x, times=2):
        try:
            x = self.encode(x, fails=True)
        except ArithmeticError:
            x = self.encode(x)
        x = self.decode(x)
        return self.first(self(x, times - 1) if times > 1 else x)


class Retrying(nn.Module):
    """Calls itself, and continues if that fails."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(3, 3)

    def forward(self, x, is_first=True):
        if is_first:
            try:
                return self(x, False)
            except ArithmeticError:
                pass
        return self.map(x)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_may_go_on_where_a_hook_fails_in_a_call_of_itself(hp_platform, when):
    """Hooks of users may run outside of those that gather, which then see neither the call nor its failure."""

    def fail(module, args, kwargs, output=None):
        if args[1:] == (False,):
            raise ArithmeticError("on purpose")

    def rank():
        with nn.building(hp_platform):
            model = Retrying()
        hp_platform.copy_(model.map.weight, hp_platform.from_numpy(numpy.eye(3, dtype=numpy.float32)))
        fully_shard(model, mesh_of(hp_platform, 2))
        if when == "before":
            hp_platform.add_forward_pre_hook(model, fail, prepend=True)
        else:
            hp_platform.add_forward_hook(model, fail)
        for count in (1, 2):
            x = hp_platform.from_numpy(numpy.ones((2, 3), numpy.float32))
            y = model(x)
            numpy.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.detach(y)), 1)
            hp_platform.backward(hp_platform.ops.sum(y))
            numpy.testing.assert_array_equal(full_grads(hp_platform, model)["map.weight"], 2 * count)

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("within", [False, True], ids=["root", "inside"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_may_call_entry_points_and_itself(hp_platform, within, stage):
    """For the root, and for a group inside of another."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.doors, self.head = ManyDoors(), nn.Linear(5, 5)

        def forward(self, x):
            return self.head(self.doors(x)) if within else self.doors(x)

    def build():
        with nn.building(hp_platform):
            model = Around()
        for index, (_, parameter) in enumerate(hp_platform.named_parameters(model)):
            values = numpy.random.default_rng(index).normal(size=(5, 5)) * 0.5
            hp_platform.copy_(parameter, hp_platform.from_numpy(values.astype(numpy.float32)))
        return model

    def grads(model):
        x = hp_platform.from_numpy(numpy.ones((2, 5), numpy.float32))
        for _ in range(2):
            hp_platform.backward(hp_platform.ops.sum(model(x)))
        return full_grads(hp_platform, model)

    expected = grads(build())

    def rank():
        model, mesh = build(), mesh_of(hp_platform, 2)
        doors = model.doors
        for module in (doors.inner, doors, *([model] if within else [])):
            fully_shard(module, mesh, zero_stage=stage)
        for name in ("encode", "decode"):
            register_fsdp_forward_method(doors, name)
        for name, grad in grads(model).items():
            if expected[name] is not None:
                numpy.testing.assert_allclose(grad, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
        assert stage < 3 or not any(each._fsdp.group.held_bytes for each in (doors, doors.inner))

    run_ranks(rank, 2, hp_platform)


def test_explicit_prefetching(hp_platform):
    case = Case((2,), num_blocks=3)

    def rank():
        model = sharded(hp_platform, case)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
        held = []
        hp_platform.add_forward_hook(model.blocks[0].up, lambda *_: held.append(held_bytes(model)))
        step(hp_platform, model, case)
        assert all(held[0])
        assert held_bytes(model) == [0] * 4

    run_ranks(rank, 2, hp_platform)
