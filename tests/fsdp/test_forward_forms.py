"""Forwards in other forms than one call of the root: several at once, small modules, methods other than forward."""

from __future__ import annotations

import numpy
from fsdp_training import Block, Case, build, full_grads, held_bytes, mesh_of, micro_loss

from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import fully_shard, register_fsdp_forward_method

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
