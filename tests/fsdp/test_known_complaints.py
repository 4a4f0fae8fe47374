"""What users of other implementations have reported, by the public number of the report, as tests of this one.

Here: pytorch/pytorch#140044 and #180900, #153354 and #171779, #125394, #173680, mindspore-ai/hyper-parallel#685
and #735, and a mesh of its own for a parameter together with a communication of one's own, which FSDP2 refuses.
Elsewhere in this folder: uneven shards of later dimensions, #137342 and hyper-parallel#196
(`test_shard_placement.py`); clipping and one call for full parameters, #148532, #137129
(`test_torch_modules.py`, `test_full_parameters.py`); a step after an exception (`test_fsdp_errors.py`); float32
gradients of low-precision parameters, PrimeIntellect-ai/prime-rl#3234 (`test_engine.py`); parameters that some
ranks do not use, and reshard_after_forward as a number, hyper-parallel#763 (`test_fully_shard.py`,
`test_buffers_in_flight.py`).
"""

from __future__ import annotations

import functools

import numpy
import pytest
from fsdp_training import Block, Case, build, held_bytes, mesh_of, micro_loss, train_reference, whole, whole_grads

from hp_dtensor.comm.world import current_world, record_collectives
from hp_dtensor.optim.clip import clip_grad_norm_
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.spec.placements import Shard
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import Communication, ShardPlacementResult, fully_shard, register_fsdp_forward_method

# float32: sums of a few hundred products in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def assert_grads(platform, model, expected):
    for name, grad in whole_grads(platform, model).items():
        if expected[name] is not None:
            numpy.testing.assert_allclose(grad, expected[name], **CLOSE, err_msg=name)


class Late(Communication):
    """Every collective happens as late as allowed: in `wait`."""

    def all_gather(self, output, shard, group):
        return _AtWait(functools.partial(super().all_gather, output, shard, group))

    def reduce_scatter(self, output, gradients, group):
        return _AtWait(functools.partial(super().reduce_scatter, output, gradients, group))

    def all_reduce(self, shard, group):
        return _AtWait(functools.partial(super().all_reduce, shard, group))


class _AtWait:
    def __init__(self, collective):
        self.collective = collective

    def wait(self):
        collective, self.collective = self.collective, None
        if collective is not None:
            collective().wait()


@pytest.mark.parametrize("stage", [2, 3])
def test_no_buffer_is_reused_while_a_collective_runs(hp_platform, stage):
    """#140044, #180900: the all-reduce of HSDP read a buffer that the next reduce-scatter had been given."""
    case = Case((2, 2), num_blocks=4, steps=1)
    expected = train_reference(case).grads

    def rank():
        model = build(hp_platform, case)
        mesh = mesh_of(hp_platform, 2, 2)
        for each in (*model.blocks, model):
            fully_shard(each, mesh, zero_stage=stage, communication=Late(hp_platform))
        hp_platform.backward(micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 0, 0))
        assert_grads(hp_platform, model, expected)

    run_ranks(rank, 4, hp_platform)


def test_several_forwards_before_their_backwards_with_recomputation(hp_platform):
    """#153354, #171779: the second forward of a recomputed block met the state that the first had left."""

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
    expected = whole_grads(hp_platform, plain)

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


@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=["sharded", "replicas of shards"])
@pytest.mark.parametrize("how", ["listed", "threshold"])
def test_replicated_parameters_have_the_mean_gradient_and_count_once_in_the_norm(hp_platform, sizes, how):
    """hyper-parallel#685, #735: gradients off by the number of ranks, a norm of 48.47 in place of 28.98."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.large, self.small = self.parameter((7, 3)), self.parameter((3,))

        def forward(self, x):
            return self.ops.add(self.ops.matmul(self.large, x), self.ops.sum(self.ops.mul(self.small, x)))

    def rank():
        me = current_world(hp_platform).rank
        with nn.building(hp_platform):
            model = Two()
        options = {"replicate_params": [model.small]} if how == "listed" else {"threshold": 0.05}
        fully_shard(model, mesh_of(hp_platform, *sizes), **options)
        x = hp_platform.from_numpy(numpy.full((3,), 2.0 * me + 1, numpy.float32))
        hp_platform.backward(hp_platform.ops.sum(model(x)))
        # The mean of 1, 3, 5 and 7 is 4; `small` is used in each of seven rows.
        assert whole(hp_platform, hp_platform.get_grad(model.large)).tolist() == [[4.0] * 3] * 7
        assert whole(hp_platform, hp_platform.get_grad(model.small)).tolist() == [28.0] * 3
        norm = clip_grad_norm_([model.large, model.small], 1e9, platform=hp_platform)
        assert float(hp_platform.to_numpy(norm)) == pytest.approx((21 * 16 + 3 * 784) ** 0.5, rel=1e-6)

    run_ranks(rank, 4, hp_platform)


def test_small_parameters_need_no_collective_of_their_own_in_forward(hp_platform):
    """#173680: tiny modules that were gathered each on its own took a fifth of the step."""
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
    """#125394: a method other than forward met sharded parameters."""

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
        return whole_grads(hp_platform, model)

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


def test_a_mesh_for_one_parameter_goes_with_a_communication_of_ones_own(hp_platform):
    """FSDP2 refuses custom collectives where shard_placement_fn gives parameters meshes of their own."""
    case = Case((4,), num_blocks=1, steps=1)
    expected = train_reference(case).grads

    def rank():
        pairs = mesh_of(hp_platform, 2, 2)
        model = build(hp_platform, case)

        def choose(parameter):
            return ShardPlacementResult(Shard(0), pairs) if parameter.shape[0] == 11 else None

        fully_shard(model, pairs.flatten("all"), shard_placement_fn=choose, communication=Late(hp_platform))
        hp_platform.backward(micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 0, 0))
        assert_grads(hp_platform, model, expected)

    run_ranks(rank, 4, hp_platform)


def train_twice(case):
    """Weights of two runs on this rank."""
    from fsdp_training import train_sharded

    return [train_sharded(case).weights for _ in range(2)]


@pytest.mark.real_ranks
def test_two_identical_runs_are_bitwise_identical_on_real_ranks(rank_pool):
    """Simulated ranks: `test_engine.py`."""
    first, second = rank_pool(2).run("test_known_complaints:train_twice", Case((2,), tied=True, accumulate=2))
    for weights in (*first, *second):
        for name, value in first[0].items():
            numpy.testing.assert_array_equal(weights[name], value, err_msg=name)
