"""A rank that calls modules of equal size in another order is found in the same step, before gradients are set."""

from __future__ import annotations

import collections
import contextlib
import gc
import weakref
from typing import Any

import numpy
import pytest
from fsdp_training import full_grads, mesh_of

from hp_dtensor import DeviceMesh
from hp_dtensor.comm.process_group import GatheredBytes, record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import CollectiveError, LaunchError, RankMismatchError
from hp_dtensor.launch import RankPool
from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing.simulated import SimulatedGroup, run_ranks
from hp_fsdp import CallOrderError, fully_shard, hsdp, hsdp_sync_stream, memory_use
from hp_fsdp._engine.backward import PATIENCE_SECONDS
from hp_fsdp._engine.rank_checks import NUM_CODES_SENT, order_of
from hp_fsdp.exceptions import FullyShardError

WIDTH = 6
SAME = (0, 1, 2)


class Chain(nn.Module):
    """Linear maps of one size, applied in a given order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in SAME])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, order):
        for index in order:
            x = self.ops.silu(self.layers[index](x))
        return self.head(x)


def build(platform):
    with nn.building(platform):
        model = Chain()
    init_parameters(model, lambda name, shape: Normal(0.4), seed=5)
    return model


def sharded(platform, sizes, **options):
    model, mesh = build(platform), mesh_of(platform, *sizes)
    for layer in model.layers:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


def loss_of(platform, model, order, rank):
    x = numpy.random.default_rng(rank).normal(size=(4, WIDTH)).astype(numpy.float32)
    return platform.ops.sum(model(platform.from_numpy(x), order))


def step(platform, model, order=SAME):
    platform.backward(loss_of(platform, model, order, current_world(platform).rank))


def expected_grads(platform, num_ranks):
    model = build(platform)
    for rank in range(num_ranks):
        platform.backward(platform.ops.div(loss_of(platform, model, SAME, rank), num_ranks))
    return full_grads(platform, model)


def drop_grads(platform, model):
    for _, parameter in platform.named_parameters(model):
        platform.set_grad(parameter, None)


def check_step(platform, model, num_ranks):
    """Check that the next step is correct, without a reset."""
    drop_grads(platform, model)
    step(platform, model)
    for name, expected in expected_grads(platform, num_ranks).items():
        found = full_grads(platform, model)[name]
        numpy.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6, err_msg=name)


@contextlib.contextmanager
def order_error(*parts):
    """Expect the block to raise a `CallOrderError`, or an error caused by one, with all of these texts."""
    with pytest.raises(Exception) as caught:
        yield
    error = caught.value
    while not isinstance(error, CallOrderError):
        error = error.__cause__ or error.__context__
    for part in parts:
        assert part in str(error), str(error)


def swap_forward(sizes, odd_ranks, options):
    """Run steps in which some ranks swap two modules, between correct ones."""
    platform = get_platform()
    model, num_ranks = sharded(platform, sizes, **options), int(numpy.prod(sizes))
    rank = current_world(platform).rank
    if options.get("zero_stage", 3) < 3:
        # Then what is gathered does not depend on this step's calls only.
        step(platform, model)
    for _ in range(2):
        before = full_grads(platform, model)
        with order_error("layers.0 (Linear)", "layers.1 (Linear)", f"rank {rank} ", "state '", "parameters weight"):
            step(platform, model, (1, 0, 2) if rank in odd_ranks else SAME)
        for name, grad in full_grads(platform, model).items():
            numpy.testing.assert_array_equal(grad, before[name], err_msg=name)
        assert memory_use(model).full_gradients == 0
    check_step(platform, model, num_ranks)
    check_step(platform, model, num_ranks)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_another_order_in_one_step_reaches_no_gradient(torch_or, hp_platform, stage):
    torch_or(stage == 3)
    run_ranks(swap_forward, 3, hp_platform, (3,), (1,), {"zero_stage": stage})


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("options", [{"threshold": 1}, {"bucket_size": 0}, {"reshard_after_forward": 2}])
def test_another_order_is_found_whatever_is_gathered(hp_platform, options):
    """Replicated parameters, a collective for each parameter, gathers of parts retained by a few ranks."""
    run_ranks(swap_forward, 4, hp_platform, (4,), (3,), options)


@pytest.mark.usefixtures("torch_suffices")
def test_replicas_with_another_order_than_their_shards_are_found(hp_platform):
    run_ranks(swap_forward, 4, hp_platform, (2, 2), (2, 3), {})


@pytest.mark.real_ranks
@pytest.mark.parametrize(("sizes", "odd"), [((2,), (1,)), ((4,), (2,)), ((2, 2), (2, 3))])
@pytest.mark.parametrize("stage", [0, 3])
def test_another_order_is_found_on_real_ranks(torch_or, rank_pool, sizes, odd, stage):
    torch_or(stage == 3 and len(sizes) == 2)
    rank_pool(int(numpy.prod(sizes))).run("test_rank_checks_call_order:swap_forward", sizes, odd, {"zero_stage": stage})


def swap_backward():
    """Run the backwards of two models, in different orders on different ranks."""
    platform = get_platform()
    models = [sharded(platform, (2,)) for _ in range(2)]
    rank = current_world(platform).rank
    for model in models:
        step(platform, model)
        drop_grads(platform, model)
    losses = [loss_of(platform, model, SAME, rank) for model in models]
    with order_error("in backward", "rank 1 gathers"):
        platform.backward(losses[rank])
    for model in models:
        assert all(grad is None for grad in full_grads(platform, model).values())
    with order_error():
        platform.backward(losses[1 - rank])
    for model in models:
        model.reset()
    for model in models:
        check_step(platform, model, 2)


def test_another_order_of_backwards_is_found(hp_platform):
    run_ranks(swap_backward, 2, hp_platform)


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.real_ranks
def test_another_order_of_backwards_is_found_on_real_ranks(rank_pool):
    rank_pool(2).run("test_rank_checks_call_order:swap_backward")


@pytest.mark.usefixtures("torch_suffices")
def test_a_module_called_twice_instead_of_another_is_found(hp_platform):
    def rank():
        model = sharded(hp_platform, (2,))
        order = (0, 1, 0) if current_world(hp_platform).rank else SAME
        with order_error("layers.2 (Linear)"):
            step(hp_platform, model, order)
        check_step(hp_platform, model, 2)

    run_ranks(rank, 2, hp_platform)


def swap_prefetched():
    """In the second step ranks have prefetched different modules, and start different numbers of gathers."""
    platform = get_platform()
    model, rank = sharded(platform, (2,)), current_world(platform).rank
    step(platform, model)
    drop_grads(platform, model)
    try:
        step(platform, model, (1, 0, 2) if rank else SAME)
    finally:
        assert all(platform.get_grad(parameter) is None for _, parameter in platform.named_parameters(model))


def skip():
    """One rank skips a module."""
    platform = get_platform()
    model, rank = sharded(platform, (2,)), current_world(platform).rank
    step(platform, model, (0, 2) if rank else SAME)


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (swap_prefetched, ("rank 0 does nothing more in forward", "rank 1 gathers layers.0 (Linear)")),
        (skip, ("rank 0 gathers layers.1 (Linear)", "rank 1 gathers layers.2 (Linear)")),
    ],
)
def test_more_calls_on_one_rank_than_on_another_are_found(hp_platform, function, parts):
    with order_error(*parts, "restart the ranks"):
        run_ranks(function, 2, hp_platform)


@pytest.mark.real_ranks
@pytest.mark.usefixtures("forked_ranks")
def test_more_calls_on_one_real_rank_than_on_another_are_found(hp_platform):
    """On torch, ranks compare through a separate connection, independent of the collectives."""
    if hp_platform.name != "torch":
        pytest.skip("one connection for everything")
    pool = RankPool(hp_platform, 2)
    try:
        with pytest.raises(LaunchError, match=r"CallOrderError: .* gathers layers\.1 .* gathers layers\.2"):
            pool.run("test_rank_checks_call_order:skip")
    finally:
        pool.close()


@pytest.mark.usefixtures("torch_suffices")
def test_without_a_backward_the_forward_itself_or_the_next_one_says_so(hp_platform):
    def rank():
        model = sharded(hp_platform, (2,))
        number = current_world(hp_platform).rank
        order = (2, 1, 0) if number else SAME
        with hp_platform.no_grad(), order_error("in forward"):
            loss_of(hp_platform, model, order, number)
        loss_of(hp_platform, model, order, number)
        with order_error("in forward"):
            loss_of(hp_platform, model, SAME, number)
        layer = model.layers[number]
        x = hp_platform.from_numpy(numpy.ones((1, WIDTH), numpy.float32))
        with hp_platform.no_grad(), order_error("gathers layers.1 (Linear)"):
            layer(x)
        check_step(hp_platform, model, 2)

    run_ranks(rank, 2, hp_platform)


def test_accumulated_gradients_of_a_wrong_step_are_dropped(hp_platform):
    def rank():
        model = sharded(hp_platform, (2,))
        number = current_world(hp_platform).rank
        model.set_requires_gradient_sync(False)
        with order_error("in forward"):
            step(hp_platform, model, (1, 0, 2) if number else SAME)
        assert memory_use(model).full_gradients == 0
        model.set_requires_gradient_sync(True)
        check_step(hp_platform, model, 2)

    run_ranks(rank, 2, hp_platform)


@pytest.mark.usefixtures("torch_suffices")
def test_reductions_that_nobody_has_waited_for_yet_are_found(hp_platform):
    def rank():
        model = build(hp_platform)
        options = {"threshold": 0, "comm_async": True, "comm_fusion": True}
        for layer in model.layers:
            hsdp(layer, **options)
        hsdp(model, **options)
        step(hp_platform, model)
        hsdp_sync_stream()
        drop_grads(hp_platform, model)
        step(hp_platform, model, (1, 0, 2) if current_world(hp_platform).rank else SAME)
        with order_error("reduces the gradients of layers.0 (Linear)"):
            hsdp_sync_stream()
        assert all(grad is None for grad in full_grads(hp_platform, model).values())

    run_ranks(rank, 2, hp_platform)


@pytest.mark.usefixtures("torch_suffices")
def test_a_difference_after_many_actions_alike_is_found_without_its_names(hp_platform):
    def rank():
        model = sharded(hp_platform, (2,))
        many = (0, 1) * (NUM_CODES_SENT // 2)
        with order_error(f"ranks [0, 1] after {NUM_CODES_SENT} equal actions", "the next step can continue"):
            step(hp_platform, model, (*many, 2, 1) if current_world(hp_platform).rank else (*many, 1, 2))
        check_step(hp_platform, model, 2)

    run_ranks(rank, 2, hp_platform)


def test_a_comparison_that_meets_another_collective_says_so(hp_platform, monkeypatch):
    """This happens between MindSpore's ranks, which have one connection for everything."""

    def met(group, data):
        parts = [b"\0" * len(data) for _ in group.ranks]
        parts[group.rank] = data
        return GatheredBytes(parts)

    monkeypatch.setattr(SimulatedGroup, "start_all_gather_bytes", met)

    def rank():
        number = current_world(hp_platform).rank
        said = f"rank {number} has ended its forward while rank {1 - number} still gathers or reduces"
        with order_error(said, "last actions: gathers ", "restart the ranks"):
            step(hp_platform, sharded(hp_platform, (2,)))

    run_ranks(rank, 2, hp_platform)


def test_an_error_that_was_caught_keeps_nothing_alive(hp_platform):
    """Neither the model nor objects in the traceback's frames: process groups outlive them."""

    def fail():
        model = sharded(hp_platform, (2,))
        activations = set()
        with contextlib.suppress(Exception):
            step(hp_platform, model, (1, 0, 2) if current_world(hp_platform).rank else SAME)
        assert order_of(model._fsdp.group.buffers[0].shard_group).error is not None
        return weakref.ref(model), weakref.ref(activations)

    def rank():
        held = fail()
        gc.collect()
        return [reference() is not None for reference in held]

    assert run_ranks(rank, 2, hp_platform) == [[False, False]] * 2


@pytest.mark.usefixtures("torch_suffices")
def test_models_made_and_freed_one_after_another_leave_no_descriptions(hp_platform):
    """Ranks that free models at different moments still have the same number for the same buffer."""

    def rank():
        number = current_world(hp_platform).rank
        held, counts = [], []
        for _ in range(4):
            model = sharded(hp_platform, (2,))
            step(hp_platform, model)
            order = order_of(model._fsdp.group.buffers[0].shard_group)
            counts.append(len(order._described))
            held += [model] if number == 0 and not held else []
            del model
            gc.collect()
        last = sharded(hp_platform, (2,))
        check_step(hp_platform, last, 2)
        with order_error("rank 1 gathers" if number == 0 else "rank 0 gathers a group that has been freed"):
            step(hp_platform, last if number else held[0])
        return counts

    # Four groups a model.
    assert run_ranks(rank, 2, hp_platform) == [[4, 8, 8, 8], [4, 4, 4, 4]]


def test_ranks_outside_the_group_are_said_to_know_nothing(hp_platform):
    """Replicas share only reductions with the ranks that abandoned a step, and learn of it one step too late."""

    def rank():
        model = sharded(hp_platform, (2, 2))
        if current_world(hp_platform).rank >= 2:
            odd = current_world(hp_platform).rank == 3
            with order_error("can continue if ranks 0, 1, which this group cannot see, abandoned"):
                step(hp_platform, model, (1, 0, 2) if odd else SAME)
        else:
            loss_of(hp_platform, model, SAME, 0)

    run_ranks(rank, 4, hp_platform)


def test_a_model_that_one_rank_alone_has_sharded_is_found(hp_platform):
    def rank():
        models = [sharded(hp_platform, (2,)) for _ in range(2 - current_world(hp_platform).rank)]
        step(hp_platform, models[-1])

    # The comparison of what is sharded meets the other rank's first gather.
    waits = r"rank 0 waits in all_gather_bytes .*\n +rank 1 waits in all_gather tensor"
    with pytest.raises(CollectiveError, match=waits):
        run_ranks(rank, 2, hp_platform)


def test_a_reduction_that_meets_nobody_names_its_group(hp_platform, monkeypatch):
    """The first collective of the process group is a reduction."""

    def raise_error(group):
        raise RuntimeError("the other rank has ended")

    monkeypatch.setattr(SimulatedGroup, "barrier", raise_error)

    def rank():
        step(hp_platform, sharded(hp_platform, (2,), zero_stage=0))

    with pytest.raises(LaunchError, match=r"CommunicationError: .*could not reduce gradients with ranks \[0, 1\]"):
        run_ranks(rank, 2, hp_platform)


class Counted:
    """Counts the comparisons that each rank has started."""

    def __init__(self, monkeypatch):
        self.started = collections.Counter()
        start = SimulatedGroup.start_all_gather_bytes

        def counted(group, data):
            self.started[group.ranks[group.rank]] += 1
            return start(group, data)

        monkeypatch.setattr(SimulatedGroup, "start_all_gather_bytes", counted)


@pytest.mark.parametrize(
    ("stage", "sizes", "forward", "backward"),
    [(3, (2,), 1, 1), (2, (2,), 0, 1), (0, (2,), 0, 1), (3, (1, 2), 1, 1), (3, (2, 2), 1, 2), (3, (1,), 0, 0)],
)
def test_a_comparison_for_each_forward_and_backward_and_no_further_collective(
    hp_platform, monkeypatch, stage, sizes, forward, backward
):
    """There is none if no collective was started, and one over each axis of the mesh."""
    counted = Counted(monkeypatch)
    num_ranks = int(numpy.prod(sizes))

    def rank():
        model = sharded(hp_platform, sizes, zero_stage=stage)
        number = current_world(hp_platform).rank
        step(hp_platform, model)
        before = counted.started[number]
        with record_collectives() as log:
            loss = loss_of(hp_platform, model, SAME, number)
            after_forward = counted.started[number]
            hp_platform.backward(loss)
        gathers = {3: 7, 2: 0, 0: 0}[stage] * (sizes[-1] > 1)
        assert log.count("all_gather") == gathers
        assert len(log.records) == gathers + 4 * (stage != 0 and sizes[-1] > 1) + 4 * (len(sizes) == 2 or stage == 0)
        return after_forward - before, counted.started[number] - after_forward

    assert run_ranks(rank, num_ranks, hp_platform) == [(forward, backward)] * num_ranks


@pytest.mark.parametrize("sizes", [(1,), (2,), (2, 2)])
def test_a_backward_asks_for_no_result_that_is_known(hp_platform, monkeypatch, sizes):
    """With a time limit, `check` is called once per group, but only while a comparison runs."""

    def rank():
        model = sharded(hp_platform, sizes)
        loss, orders = loss_of(hp_platform, model, SAME, 0), model._fsdp.schedule.context.orders
        assert orders.is_comparing
        orders.check(60)
        limits, check = [], orders.check
        monkeypatch.setattr(orders, "check", lambda limit=None: (limits.append(limit), check(limit)))
        hp_platform.backward(loss)
        return limits

    assert run_ranks(rank, int(numpy.prod(sizes)), hp_platform) == [[PATIENCE_SECONDS, None]] * int(numpy.prod(sizes))


def error_of_every_rank(name: str) -> str:
    """Shard a module that has been sharded before on rank 1 alone, and return the error that this rank got."""
    platform = get_platform(name)
    world = current_world(platform)
    mesh = DeviceMesh("cpu", (world.size,), platform=platform)
    alone = DeviceMesh("cpu", (1,), world=world) if world.rank == 0 else DeviceMesh("cpu", [1], world=world)
    with nn.building(platform):
        model = nn.Linear(4, 6)
    if world.rank == 1:
        fully_shard(model, alone)
    with pytest.raises((FullyShardError, RankMismatchError)) as refusal:
        fully_shard(model, mesh)
    return f"{type(refusal.value).__name__}: {refusal.value}"


def test_the_others_learn_what_one_rank_has_raised(hp_platform: Platform) -> None:
    others, own = run_ranks(error_of_every_rank, 2, hp_platform, hp_platform.name)
    assert own.startswith("FullyShardError: module: ")
    assert own.endswith("Linear has been through fully_shard already")
    assert others.startswith("RankMismatchError: fully_shard(Linear): ranks differ: ")
    assert f"rank 1: failed, {own}" in others


@pytest.mark.real_ranks
def test_real_ranks_are_refused_too(hp_platform: Platform, rank_pool: Any) -> None:
    others, own = rank_pool(2).run("test_rank_checks_call_order:error_of_every_rank", hp_platform.name)
    assert own in others
