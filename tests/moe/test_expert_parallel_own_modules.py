"""Experts modules and dispatches of one's own under the parallel styles."""

from __future__ import annotations

import functools
import math

import numpy
import pytest

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.saved_tensors import SavedTensors
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.spec.placements import Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import (
    Activation,
    AuxLosses,
    BaseExpertParallel,
    Capacity,
    ExpertParallel,
    ExpertParallelError,
    ExpertTensorParallel,
    GroupedExperts,
    MoE,
    ReplicatedExperts,
    TensorParallel,
    expert_shard_dim,
)

DIM, HIDDEN, EXPERTS = 8, 4, 5
# float32 sums in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


class LoopExperts(nn.Module):
    """Someone else's experts: a loop over the experts that it has, `w2(w1(x) * w3(x))`."""

    def __init__(self):
        super().__init__()
        self.w1 = self.parameter((EXPERTS, HIDDEN, DIM))
        self.w2 = self.parameter((EXPERTS, DIM, HIDDEN))
        self.w3 = self.parameter((EXPERTS, HIDDEN, DIM))

    def forward(self, x, num_tokens_per_expert):
        assert not isinstance(self.w1, DTensor)
        counts = self.platform.to_numpy(num_tokens_per_expert).tolist()
        assert len(counts) == self.w1.shape[0]
        parts, first = [], 0
        for expert, count in enumerate(counts):
            rows = self.ops.narrow(x, 0, first, count)
            w1, w2, w3 = (self.ops.squeeze(self.ops.narrow(w, 0, expert, 1), 0) for w in (self.w1, self.w2, self.w3))
            hidden = self.ops.mul(self.ops.linear(rows, w1), self.ops.linear(rows, w3))
            parts.append(self.ops.linear(hidden, w2))
            first += count
        return self.ops.cat(parts, 0) if parts else self.ops.mul(x, 0.0)


def built(platform, kind=LoopExperts):
    with nn.building(platform):
        return kind()


def batches(ranks):
    """Rows in expert-major order with their counts, different on every rank; one rank has none."""
    random = numpy.random.default_rng(3)
    counts = random.integers(0, 4, (ranks, EXPERTS))
    counts[-1] = 0
    return [(random.normal(size=(int(each.sum()), DIM)).astype(numpy.float32), each) for each in counts]


def forward_and_backward(platform, experts, rows, counts, *, by_name=False):
    """Results, gradient of the rows and gradients of the weights, of the sum of squared results."""
    x, counts = platform.from_numpy(rows.copy()), platform.from_numpy(counts.copy())
    platform.set_requires_grad(x, True)
    y = experts(x, num_tokens_per_expert=counts) if by_name else experts(x, counts)
    platform.backward(platform.ops.sum(platform.ops.mul(y, y)))
    grads = {name: platform.get_grad(weight) for name, weight in platform.named_parameters(experts)}
    full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
    return (
        platform.to_numpy(y),
        platform.to_numpy(platform.get_grad(x)),
        {k: platform.to_numpy(g) for k, g in full.items()},
    )


def on_one_rank(platform, kind, parts):
    """The same rows on one rank, sorted by expert, and the results in the order of the parts."""
    experts = built(platform, kind)
    init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
    owner = numpy.concatenate([numpy.repeat(numpy.arange(EXPERTS), counts) for _, counts in parts])
    order = numpy.argsort(owner, kind="stable")
    rows = numpy.concatenate([rows for rows, _ in parts])[order]
    y, dx, dw = forward_and_backward(platform, experts, rows, numpy.bincount(owner, minlength=EXPERTS))
    back = numpy.argsort(order)
    return y[back], dx[back], dw


def assert_same_numbers(results, y, dx, dw):
    """Compare every rank's outputs and gradients with those of one rank, whose rows all ranks share."""
    numpy.testing.assert_allclose(numpy.concatenate([each[0] for each in results]), y, **CLOSE)
    numpy.testing.assert_allclose(numpy.concatenate([each[1] for each in results]), dx, **CLOSE)
    for _, _, got in results:
        for name, expected in dw.items():
            numpy.testing.assert_allclose(got[name], expected, err_msg=name, **CLOSE)


@pytest.mark.parametrize("kind", [LoopExperts, lambda: GroupedExperts(DIM, HIDDEN, EXPERTS)], ids=["loop", "ours"])
@pytest.mark.parametrize("style", [ExpertParallel(), ReplicatedExperts()], ids=["ep", "replicated"])
@pytest.mark.parametrize("by_name", [False, True], ids=["", "by name"])
def test_experts_of_ones_own_give_the_numbers_of_one_rank(platform, kind, style, by_name):
    parts = batches(2)

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("ep",), platform=platform)
        experts = style.apply(built(platform, kind), mesh)
        init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
        found = forward_and_backward(platform, experts, *parts[mesh.get_local_rank()], by_name=by_name)
        assert isinstance(experts.w1, DTensor), "the weights are back after forward"
        return found

    y, dx, dw = on_one_rank(platform, kind, parts)
    results = run_ranks(rank, 2, platform)
    assert_same_numbers(results, y, dx, dw)


def test_own_experts_under_fully_shard_give_the_numbers_of_one_rank(platform):
    fully_shard = pytest.importorskip("hp_fsdp").fully_shard
    parts = batches(4)

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2, 2), mesh_dim_names=("efsdp", "ep"), platform=platform)
        experts = ExpertParallel().apply(built(platform), mesh["ep"])
        fully_shard(experts, mesh["efsdp"])
        experts.set_reduce_op_type("sum", recurse=False)
        init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
        return forward_and_backward(platform, experts, *parts[mesh.world.rank])

    y, dx, dw = on_one_rank(platform, LoopExperts, parts)
    results = run_ranks(rank, 4, platform)
    assert_same_numbers(results, y, dx, dw)


@pytest.mark.parametrize("bias", [False, True])
def test_fewer_experts_than_ranks_are_sharded_along_another_dimension(platform, bias):
    """Two or three experts on four ranks: none holds a full expert more than another."""
    fully_shard = pytest.importorskip("hp_fsdp").fully_shard
    parts = batches(8)

    def kind():
        return GroupedExperts(DIM, HIDDEN, EXPERTS, bias=bias)

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (4, 2), mesh_dim_names=("efsdp", "ep"), platform=platform)
        experts = ExpertParallel().apply(built(platform, kind), mesh["ep"])
        dim = expert_shard_dim(EXPERTS, 2, 4)
        fully_shard(experts, mesh["efsdp"], shard_placement_fn=lambda weight: Shard(dim))
        experts.set_reduce_op_type("sum", recurse=False)
        init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
        held = sum(math.prod(platform.unwrap(each).shape) for _, each in platform.named_parameters(experts))
        return *forward_and_backward(platform, experts, *parts[mesh.world.rank]), held

    y, dx, dw = on_one_rank(platform, kind, parts)
    results = run_ranks(rank, 8, platform)
    numpy.testing.assert_allclose(numpy.concatenate([each[0] for each in results]), y, **CLOSE)
    numpy.testing.assert_allclose(numpy.concatenate([each[1] for each in results]), dx, **CLOSE)
    for at, (_, _, got, held) in enumerate(results):
        # Those of experts 0 to 2, or 3 and 4, on four ranks; unsharded experts would leave one with none.
        of_all = (3 if at % 2 == 0 else 2) * 3 * DIM * HIDDEN
        assert held > 0 if bias else held == of_all / 4
        for name, expected in dw.items():
            numpy.testing.assert_allclose(got[name], expected, err_msg=name, **CLOSE)


def test_own_experts_that_are_sharded_return_their_share_of_the_sum(platform):
    (rows, counts), *_ = batches(4)

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2, 2), mesh_dim_names=("ep", "etp"), platform=platform)
        experts = ExpertTensorParallel().apply(built(platform), mesh)
        init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
        with platform.no_grad():
            return platform.to_numpy(experts(platform.from_numpy(rows), platform.from_numpy(counts)))

    expected, *_ = on_one_rank(platform, LoopExperts, [(rows, counts)])
    first, second, third, fourth = run_ranks(rank, 4, platform)
    numpy.testing.assert_allclose(first + second, expected, **CLOSE)
    numpy.testing.assert_allclose(third + fourth, expected, **CLOSE)


@pytest.mark.parametrize(
    ("style", "mesh_shape", "recompute"),
    [
        (None, (1,), True),
        (ExpertParallel(), (2,), True),
        (TensorParallel(), (2,), False),
        (ExpertTensorParallel(), (2, 2), False),
    ],
    ids=["one rank", "ep", "hidden sharded", "both"],
)
def test_experts_of_ones_own_in_a_layer(platform, style, mesh_shape, recompute):
    """The same results and gradients as of `GroupedExperts` with the same activation."""
    x = numpy.random.default_rng(5).normal(size=(7, DIM)).astype(numpy.float32)
    product = Activation("product", lambda ops, gate, up: ops.mul(gate, up))
    options = {"aux_losses": AuxLosses(0.1, 0.2, 0.3, 0.4), "capacity": Capacity(1.0)}

    def rank(own):
        mesh = init_device_mesh(platform.device_types[0], mesh_shape, platform=platform)
        with nn.building(platform):
            moe = MoE(DIM, HIDDEN, EXPERTS, 2, activation=product, **options)
            if own:
                moe.experts = LoopExperts()
        if style is not None:
            style.apply(moe, mesh)
        init_parameters(moe, lambda name, shape: Normal(0.5), seed=1)
        rows = platform.from_numpy(x)
        platform.set_requires_grad(rows, True)
        y = checkpoint(moe, rows, platform=platform) if recompute else moe(rows)
        platform.backward(platform.ops.sum(platform.ops.mul(y, y)))
        grads = {name: platform.get_grad(weight) for name, weight in platform.named_parameters(moe)}
        full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
        found = {"output": platform.detach(y), "input": platform.get_grad(rows), **full}
        return {name: platform.to_numpy(each) for name, each in found.items()}

    size = math.prod(mesh_shape)
    for own, ours in zip(
        *(run_ranks(functools.partial(rank, own), size, platform) for own in (True, False)), strict=True
    ):
        assert own.keys() == ours.keys()
        for name, expected in ours.items():
            numpy.testing.assert_allclose(own[name], expected, err_msg=name, **CLOSE)


class IdleExperts(LoopExperts):
    """Experts that compute, and keep for backward, nothing where they get no rows."""

    def forward(self, x, num_tokens_per_expert):
        return super().forward(x, num_tokens_per_expert) if x.shape[0] else x


def test_a_rank_without_rows_is_computed_again_as_far_as_the_others(platform):
    rows = numpy.random.default_rng(3).normal(size=(4, DIM)).astype(numpy.float32)
    counts = numpy.array([4] + [0] * (EXPERTS - 1))

    def rank(recompute):
        mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("ep",), platform=platform)
        experts = ExpertParallel().apply(built(platform, IdleExperts), mesh)
        init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
        x, sizes = platform.from_numpy(rows.copy()), platform.from_numpy(counts.copy())
        platform.set_requires_grad(x, True)
        y = checkpoint(experts, x, sizes, platform=platform) if recompute else experts(x, sizes)
        platform.backward(platform.ops.sum(platform.ops.square(y)))
        return platform.to_numpy(platform.get_grad(x))

    for again, once in zip(*(run_ranks(rank, 2, platform, recompute) for recompute in (True, False)), strict=True):
        numpy.testing.assert_array_equal(again, once)


class AskingTwice(LoopExperts):
    """Experts whose last node looks up twice what it has saved."""

    def forward(self, x, num_tokens_per_expert):
        platform, retained = self.platform, []

        def forward(y):
            retained[:] = [SavedTensors(platform, y)]
            return self.ops.mul(y, y)

        def backward(grad):
            (once,), (twice,) = retained[0].tensors, retained[0].tensors
            return self.ops.mul(grad, self.ops.add(once, twice))

        return platform.custom_function(forward, backward, super().forward(x, num_tokens_per_expert))


def test_weights_are_back_where_a_repetition_ends_within_the_experts(platform):
    counts = numpy.array([1] * EXPERTS)
    rows = numpy.random.default_rng(3).normal(size=(EXPERTS, DIM)).astype(numpy.float32)

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("ep",), platform=platform)
        experts = ExpertParallel().apply(built(platform, AskingTwice), mesh)
        init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
        found = []
        for run in (experts, lambda *given: checkpoint(experts, *given, platform=platform)):
            x, sizes = platform.from_numpy(rows.copy()), platform.from_numpy(counts.copy())
            platform.set_requires_grad(x, True)
            platform.backward(platform.ops.sum(run(x, sizes)))
            assert isinstance(experts.w1, DTensor)
            found.append(platform.to_numpy(platform.get_grad(x)))
        numpy.testing.assert_array_equal(*found)

    run_ranks(rank, 2, platform)


class Counted(ExpertParallel):
    """A style of one's own that looks at what is dispatched and doubles what comes back."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _partition_fn(self, name, module, device_mesh):
        super()._partition_fn(name, module, device_mesh)
        self.seen.append("partition")

    def _token_dispatch(self, module, inputs, device_mesh):
        rows, counts = super()._token_dispatch(module, inputs, device_mesh)
        self.seen.append((rows.shape[0], int(counts.shape[0])))
        return rows, counts

    def _token_combine(self, module, output, device_mesh):
        return super()._token_combine(module, output, device_mesh) * 2


@pytest.mark.parametrize("before", [False, True])
def test_a_style_may_override_its_dispatch_and_combine(platform, before):
    x = numpy.random.default_rng(5).normal(size=(2, 6, DIM)).astype(numpy.float32)

    def layer(style):
        mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("ep",), platform=platform)
        with nn.building(platform):
            moe = MoE(DIM, HIDDEN, EXPERTS, 2, score_before_experts=before)
        style.apply(moe, mesh["ep"])
        init_parameters(moe, lambda name, shape: Normal(0.5), seed=1)
        mine = platform.from_numpy(x[mesh.get_local_rank()])
        return platform.to_numpy(platform.detach(moe(mine)))

    def rank():
        style = Counted()
        return layer(ExpertParallel()), layer(style), style.seen

    results = run_ranks(rank, 2, platform)
    for expected, got, _ in results:
        numpy.testing.assert_allclose(got, 2 * expected, **CLOSE)
    (_, first), (_, second) = ([*seen] for _, _, seen in results)
    assert first[0] + second[0] == 2 * 6 * 2, "each token has two experts"
    assert (first[1], second[1]) == (3, 2), "experts in chunk order"


class ThreeMethods(BaseExpertParallel):
    """A style of the three methods alone, as HyperParallel's subclasses: all experts on every rank, results doubled."""

    def _partition_fn(self, name, module, device_mesh):
        pass

    def _token_dispatch(self, module, inputs, device_mesh):
        return inputs

    def _token_combine(self, module, output, device_mesh):
        return output * 2


def test_a_style_may_define_the_three_methods_alone(platform):
    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("ep",), platform=platform)
        with nn.building(platform):
            experts, others = GroupedExperts(DIM, HIDDEN, EXPERTS), GroupedExperts(DIM, HIDDEN, EXPERTS)
        init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
        x = numpy.random.default_rng(5).normal(size=(EXPERTS, DIM)).astype(numpy.float32)
        given = platform.from_numpy(x), platform.from_numpy(numpy.ones(EXPERTS, numpy.int64))
        expected = platform.to_numpy(platform.detach(experts(*given)))
        ThreeMethods().apply(experts, mesh)
        numpy.testing.assert_allclose(platform.to_numpy(platform.detach(experts(*given))), 2 * expected, **CLOSE)
        with pytest.raises(ExpertParallelError, match="BaseExpertParallel must define _placements or _partition_fn"):
            BaseExpertParallel().apply(others, mesh)

    run_ranks(rank, 2, platform)


class OwnWay(TensorParallel):
    """A dispatch that keeps what it needs itself: nothing."""

    def _token_dispatch(self, module, inputs, device_mesh):
        return inputs

    def _token_combine(self, module, output, device_mesh):
        return output


def test_a_style_may_do_without_the_default_dispatch(platform):
    (rows, counts), *_ = batches(2)

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("tp",), platform=platform)
        experts = OwnWay().apply(built(platform), mesh)
        init_parameters(experts, lambda name, shape: Normal(0.5), seed=1)
        with platform.no_grad():
            return platform.to_numpy(experts(platform.from_numpy(rows), platform.from_numpy(counts)))

    expected, *_ = on_one_rank(platform, LoopExperts, [(rows, counts)])
    numpy.testing.assert_allclose(sum(run_ranks(rank, 2, platform)), expected, **CLOSE)


class WithBias(LoopExperts):
    def __init__(self):
        super().__init__()
        self.bias = self.parameter((EXPERTS, DIM))


def test_what_a_style_cannot_place_is_refused(platform):
    def rank():
        mesh = init_device_mesh(platform.device_types[0], (1,), mesh_dim_names=("ep",), platform=platform)
        with pytest.raises(ExpertParallelError, match="WithBias also has bias: override _partition_fn"):
            ExpertParallel().apply(built(platform, WithBias), mesh)
        with nn.building(platform):
            linear = nn.Linear(2, 2)
        with pytest.raises(ExpertParallelError, match=r"3-D weights w1, w2 \(and w3\), got"):
            ExpertParallel().apply(linear, mesh)
        experts = ExpertParallel().apply(built(platform), mesh)
        x = platform.from_numpy(numpy.zeros((3, DIM), numpy.float32))
        with pytest.raises(ExpertParallelError, match="add up to 2, but there are 3 rows"):
            experts(x, platform.from_numpy(numpy.array([2, 0, 0, 0, 0])))
        assert isinstance(experts.w1, DTensor)

    run_ranks(rank, 1, platform)
