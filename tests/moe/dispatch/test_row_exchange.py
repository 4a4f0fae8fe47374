"""Tokens that are sent in chunks: experts work meanwhile, in both directions, and the results are the same."""

from __future__ import annotations

import functools

import numpy
import pytest
from moe_layouts import BY_DISPATCHER, DIM, LAYOUTS, train
from slow_link import slow_link
from test_expert_parallel import CLOSE, NUM_SAMPLES

from hp_dtensor.comm.links import Links
from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.parallel import nn
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import (
    AllToAllDispatcher,
    AutoDispatcher,
    DispatchRates,
    ExpertParallel,
    ExpertParallelError,
    GroupedExperts,
    MoE,
    Routing,
)
from hp_moe.dispatch.auto import best_num_chunks
from hp_moe.dispatch.row_exchange import RowExchange


def trained(**kwargs):
    program = functools.partial(train, "in chunks", NUM_SAMPLES, options={"num_shared_experts": 1}, steps=2, **kwargs)
    return run_ranks(program, LAYOUTS["in chunks"].size)


def test_runs_and_recomputed_runs_repeat_bit_by_bit():
    first, *others = trained(), trained(), trained(recompute=True)
    for results in others:
        for one, other in zip(first, results, strict=True):
            for a, b in zip(one.outputs + one.input_grads, other.outputs + other.input_grads, strict=True):
                numpy.testing.assert_array_equal(a, b)
            for key, weight in one.weights.items():
                numpy.testing.assert_array_equal(weight, other.weights[key], err_msg=key)


def built(platform, mesh, dispatcher, experts=None, dim=DIM):
    with nn.building(platform):
        layer = MoE(dim, 6, 4, 2, num_shared_experts=1)
        if experts is not None:
            layer.experts = experts(dim, 6, 4)
    ExpertParallel(dispatcher).apply(layer, mesh)
    init_parameters(layer, lambda name, shape: Normal(0.3), seed=3)
    return layer


def stepped(platform, layer, tokens):
    """Output, and gradients of the tokens and the weights."""
    x = platform.from_numpy(tokens)
    platform.set_requires_grad(x, True)
    y = layer(x)
    platform.backward(platform.ops.sum(platform.ops.mul(y, y)))
    grads = [platform.get_grad(p) for _, p in platform.named_parameters(layer)]
    return [platform.to_numpy(platform.detach(platform.unwrap(each))) for each in (y, platform.get_grad(x), *grads)]


@pytest.mark.parametrize("num_tokens", [(5, 0), (1, 2), (0, 0)])
def test_any_number_of_chunks_of_any_number_of_tokens(platform, num_tokens):
    """Fewer tokens than chunks too. Gradients of weights are sums in another order; all else is a token's own."""

    def rank(num_chunks):
        mesh = init_device_mesh(platform.device_types[0], (2,), platform=platform)
        layer = built(platform, mesh, functools.partial(AllToAllDispatcher, num_chunks=num_chunks))
        me = mesh.get_local_rank()
        return stepped(platform, layer, numpy.random.default_rng(me).normal(size=(num_tokens[me], DIM)).astype("f4"))

    expected = run_ranks(rank, 2, platform, 1)
    for num_chunks in (2, 4):
        for got, wanted in zip(run_ranks(rank, 2, platform, num_chunks), expected, strict=True):
            for a, b in zip(got, wanted, strict=True):
                numpy.testing.assert_allclose(a, b, **CLOSE)


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first first", "last first"])
def test_two_micro_batches_in_flight(platform, num_chunks, order):
    """As in a pipeline: both forwards come before the backwards, and neither takes the other's rows or memory."""

    def rank(in_flight):
        mesh = init_device_mesh(platform.device_types[0], (2,), platform=platform)
        layer = built(platform, mesh, functools.partial(AllToAllDispatcher, num_chunks=num_chunks))
        random = numpy.random.default_rng(mesh.get_local_rank())
        inputs = [platform.from_numpy(random.normal(size=(tokens, DIM)).astype("f4")) for tokens in (5, 3)]
        for x in inputs:
            platform.set_requires_grad(x, True)
        results = {}
        if in_flight:
            results = {index: layer(x) for index, x in enumerate(inputs)}
        for index in order:
            y = results[index] if in_flight else layer(inputs[index])
            platform.backward(platform.ops.sum(platform.ops.mul(y, y)))
        found = [*inputs, *(p for _, p in platform.named_parameters(layer))]
        return [platform.to_numpy(platform.detach(platform.unwrap(platform.get_grad(each)))) for each in found]

    for got, wanted in zip(run_ranks(rank, 2, platform, True), run_ranks(rank, 2, platform, False), strict=True):
        for a, b in zip(got, wanted, strict=True):
            numpy.testing.assert_array_equal(a, b)


class Noted(GroupedExperts):
    """Experts that note when they work, in which direction."""

    def __init__(self, *args):
        super().__init__(*args)
        self.log = []

    def _results(self, hidden, *args):
        results = super()._results(hidden, *args)
        return self.platform.linear_map(results, self._noted("experts"), self._noted("experts"))

    def _noted(self, what):
        def note(x):
            self.log.append(what)
            return x

        return note


def test_all_chunks_are_under_way_before_the_first_is_worked_on(platform, monkeypatch):
    """By the order of events, in forward and in backward; the shared expert computes while the rows are sent."""

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (1,), platform=platform)
        layer = built(platform, mesh, functools.partial(AllToAllDispatcher, num_chunks=2), Noted)
        log, start = layer.experts.log, RowExchange._start

        def noted_start(self, rows, *args):
            what = "rows" if rows.shape[1] == DIM else "choices"
            log.append(f"{what} begin")
            wait = start(self, rows, *args)

            def noted_wait():
                log.append(f"{what} wait")
                return wait()

            return noted_wait

        shared = layer._shared
        layer._shared = lambda x: layer.platform.linear_map(
            shared(x), layer.experts._noted("shared"), layer.experts._noted("shared")
        )
        monkeypatch.setattr(RowExchange, "_start", noted_start)
        x = platform.ops.ones((4, DIM), platform.dtype("float32"))
        platform.set_requires_grad(x, True)
        y = layer(x)
        forward = [*log]
        log.clear()
        platform.backward(platform.ops.sum(y))
        return forward, log

    ((forward, backward),) = run_ranks(rank, 1, platform)
    rows = ["rows wait", "choices wait", "experts", "rows begin"]
    assert forward == [*["rows begin", "choices begin"] * 2, "shared", *rows * 2, *["rows wait"] * 2]
    back = ["rows wait", "experts", "choices begin", "rows begin"]
    assert [each for each in backward if each != "shared"] == [
        *["rows begin"] * 2,
        *back * 2,
        *["choices wait", "rows wait"] * 2,
    ]
    assert backward.index("shared") < backward.index("choices wait"), "while the gradients of rows return"


def dispatched_and_combined(dim, num_tokens):
    """Dispatch this rank's tokens, weight them by the sum of their scores and combine; values and gradients.

    Three ranks own two experts each, and no token has experts of the last rank. All numbers are small integers.
    """
    platform = get_platform()
    group = init_device_mesh(platform.device_types[0], (3,), platform=platform).group_along()
    random = numpy.random.default_rng(group.rank)
    shape = (num_tokens[group.rank], 2)
    experts = random.integers(0, 4, shape)
    x, weight = (random.integers(-2, 3, (shape[0], dim)).astype("f4") for _ in range(2))
    scores = random.integers(1, 3, shape).astype("f4")
    inputs = [platform.from_numpy(each) for each in (x, scores)]
    for each in inputs:
        platform.set_requires_grad(each, True)
    counts = platform.from_numpy(numpy.bincount(experts.reshape(-1), minlength=6))
    dispatcher = AllToAllDispatcher(group, 6)
    sent = dispatcher.dispatch(inputs[0], Routing(platform.from_numpy(experts), counts, inputs[1]))
    y = dispatcher.combine(platform.ops.mul(sent.rows, platform.ops.sum(sent.scores, 1, keepdim=True)), sent)
    grads = platform.grad([y], inputs, [platform.from_numpy(weight)])
    # Each token is sent to one or two ranks, each of which returns it once.
    copies = 1 + (experts[:, :1] // 2 != experts[:, 1:] // 2)
    total = scores.sum(1, keepdims=True)
    expected = copies * total * x, copies * total * weight, copies * (x * weight).sum(1, keepdims=True) + 0 * scores
    return [(platform.to_numpy(platform.detach(a)), b) for a, b in zip((y, *grads), expected, strict=True)]


@pytest.mark.real_ranks
@pytest.mark.parametrize("dim", [4, 512], ids=["small", "through shared memory"])
def test_tokens_are_sent_and_summed_over_real_ranks(platform, rank_pool, dim):
    """Uneven ranks, one without tokens and one without rows, in small messages and in those of shared memory."""
    for results in rank_pool(3).run(dispatched_and_combined, dim, (700, 0, 600)):
        for found, expected in results:
            numpy.testing.assert_array_equal(found, expected)


def transfers(num_chunks):
    """The transfers of this rank in a step on a slow link."""
    platform = get_platform()
    mesh = init_device_mesh(platform.device_types[0], (2,), platform=platform)
    layer = built(platform, mesh, functools.partial(AllToAllDispatcher, num_chunks=num_chunks), dim=64)
    tokens = numpy.random.default_rng(mesh.get_local_rank()).normal(size=(200, 64)).astype("f4")
    stepped(platform, layer, tokens)
    group = mesh.group_along()
    group.barrier()
    with slow_link(group, bytes_per_second=4e5) as timeline:
        stepped(platform, layer, tokens)
    return timeline


@pytest.mark.real_ranks
def test_on_slow_links_rows_travel_while_experts_compute(platform, rank_pool):
    if platform.name == "mindspore":
        pytest.skip("MindSpore's collectives between CPUs end before they return")
    for timeline in rank_pool(2).run(transfers, 4):
        # All rows and choices of forward are on their way before the first are waited for.
        _, *forward = timeline[:9]
        assert max(each.started for each in forward) < min(each.waited for each in forward)


@pytest.mark.parametrize(("sent", "work", "chunks"), [(1e-3, 2e-3, 8), (1e-3, 0.0, 1), (0.0, 1e-3, 1), (2e-4, 4e-4, 2)])
def test_the_number_of_chunks_by_the_cost_model(sent, work, chunks):
    """None where either sending or computing takes no time; few where an exchange costs as much as it saves."""
    found, seconds = best_num_chunks(sent, work, DispatchRates(Links(latency=2e-5)))
    assert found == chunks
    assert seconds <= 2 * sent + work + 4 * 2e-5 + 1e-12


@pytest.mark.parametrize("wanted", [None, 2])
def test_auto_chooses_chunks_and_says_why(platform, wanted):
    rates = DispatchRates(Links(latency=1e-4, bandwidth=1e5), flops=1e6)

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), platform=platform)
        layer = built(platform, mesh, functools.partial(AutoDispatcher, rates=rates, num_chunks=wanted))
        tokens = numpy.random.default_rng(mesh.get_local_rank()).normal(size=(30, DIM)).astype("f4")
        return stepped(platform, layer, tokens), layer.experts.dispatcher

    for got, dispatcher in run_ranks(rank, 2, platform):
        assert numpy.isfinite(got[0]).all()
        assert dispatcher.num_chunks == (wanted or 8)
        assert dispatcher.reason.startswith("all_to_all: ")
        assert ("; in 8 chunks, " in dispatcher.reason) == (wanted is None)


def test_chunks_that_cannot_be_are_refused(platform):
    with pytest.raises(ExpertParallelError, match=r"num_chunks = 2 is for the dispatchers all_to_all, .*'all_gather'"):
        ExpertParallel("all_gather", num_chunks=2)

    def rank():
        with pytest.raises(ExpertParallelError, match="num_chunks must be at least 1, got 0"):
            AllToAllDispatcher(
                init_device_mesh(platform.device_types[0], (2,), platform=platform).group_along(), 4, num_chunks=0
            )

    run_ranks(rank, 2, platform)


def test_chunks_have_a_layout():
    assert "in chunks" in BY_DISPATCHER
