"""The estimated time of a step against what must hold of any estimate."""

from __future__ import annotations

import dataclasses
import math

import pytest
from planned_runs import config_of

from hp_trainer.parallel import ParallelDims
from hp_trainer.planning.devices import Device, find_device
from hp_trainer.planning.plan import StepPlan, plan_step
from hp_trainer.planning.step_time import seconds_of

H100 = find_device("H100")
NO_LATENCY = dataclasses.replace(H100, inner_latency=1e-30, outer_latency=1e-30)
IDEAL = dataclasses.replace(NO_LATENCY, inner_bandwidth=1e40, outer_bandwidth=1e40)
# Products take the time of their operations alone, whatever the size of their operands.
FAST_MEMORY = dataclasses.replace(H100, memory_bandwidth=1e40, operation_seconds=0.0)
EXPERTS = {"model__num_experts": 4, "model__num_dense_layers": 1}


def plan(device: Device = H100, /, world_size: int = 8, degrees: dict | None = None, **settings) -> StepPlan:
    """Return the plan of a layout, whose other ranks share the weights."""
    degrees = degrees or {}
    rest = world_size // math.prod(
        value for name, value in degrees.items() if name in ("dp_replicate", "cp", "tp", "pp")
    )
    if degrees.get("expert_mesh") == "peer":
        rest //= degrees["ep"]
    given = {"expert_mesh": "folded", "dp_shard": rest, **degrees, "world_size": world_size}
    return plan_step(config_of(training__global_batch_size=64, **settings), ParallelDims(**given), device)


@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"cp": 2}, {"dp_replicate": 2}, {"pp": 2}])
def test_twice_the_data_parallel_ranks_halve_the_products(degrees: dict) -> None:
    few, many = (plan(FAST_MEMORY, world_size=number, degrees=degrees) for number in (8, 16))
    assert sum(each.products for each in few.times) == pytest.approx(2 * sum(each.products for each in many.times))


LAYOUTS = [
    {},
    {"tp": 2},
    {"cp": 2},
    {"dp_replicate": 4},
    {"ep": 4},
    {"ep": 2, "expert_mesh": "peer"},
    {"ep": 2, "tp": 2, "etp": 2},
]


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_without_links_to_wait_for_there_is_computation_alone(degrees: dict) -> None:
    time = plan(IDEAL, degrees=degrees, **EXPERTS).time
    assert time.total == pytest.approx(time.products + time.memory + time.update)
    waits = dataclasses.replace(H100, hidden={})
    assert plan(waits, degrees=degrees, **EXPERTS).time.total > time.total


def test_every_collective_waits_for_its_ranks_once() -> None:
    found, slow = plan(degrees={"tp": 2}), dataclasses.replace(IDEAL, inner_latency=1.0, hop_seconds=0.0)
    assert "all_reduce" in {each.collective for each in found.traffic}
    for each in found.traffic:
        assert seconds_of(each, found.shape, slow) == pytest.approx(each.count)


def test_messages_of_a_pipeline_wait_for_two_ranks_only() -> None:
    hops = dataclasses.replace(H100, hop_seconds=1.0)
    idle = [plan(each, degrees={"pp": 4}, model__num_hidden_layers=4).time.idle for each in (H100, hops)]
    assert 0 < idle[0] == idle[1]


def test_a_rank_with_the_embedding_alone_computes_nothing() -> None:
    first, last = plan(degrees={"pp": 2}, pipeline__layers=[0, 2]).times
    assert first.products == 0 < last.products
    assert all(math.isfinite(each.total) for each in (first, last))


@pytest.mark.parametrize("degrees", [*LAYOUTS, {"pp": 2}])
def test_slower_devices_take_longer(degrees: dict) -> None:
    base = plan(degrees=degrees, **EXPERTS).time
    # Longer computation hides longer gathers: sums of the same parts may differ in their last bit.
    least = base.total * (1 - 1e-12)
    for name in ("memory_bandwidth", "inner_bandwidth", "efficiency"):
        slower = dataclasses.replace(H100, **{name: getattr(H100, name) / 2})
        assert plan(slower, degrees=degrees, **EXPERTS).time.total >= least
    twice = dataclasses.replace(FAST_MEMORY, flops={name: 2 * rate for name, rate in H100.flops.items()})
    once, half = (plan(each, degrees=degrees, **EXPERTS).time.products for each in (FAST_MEMORY, twice))
    assert half == pytest.approx(once / 2)


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_products_of_all_ranks_are_those_of_the_model(degrees: dict) -> None:
    """Peers compute all but experts each for themselves, and ranks that share an expert its gate; nothing else."""
    one = plan(FAST_MEMORY, world_size=1, **EXPERTS).time.products
    many = plan(FAST_MEMORY, degrees=degrees, **EXPERTS).time.products
    if degrees.get("expert_mesh") == "peer":
        assert one < 8 * many < degrees["ep"] * one
    else:
        # 64 samples of 16 tokens, 16 wide, in the one block with experts.
        gate = 6 * 64 * 16 * 16 * EXPERTS["model__num_experts"] / (H100.flops["float32"] * H100.efficiency)
        assert 8 * many == pytest.approx(one + (degrees.get("etp", 1) - 1) * gate)


def test_recomputation_repeats_at_most_a_forward() -> None:
    time = plan(FAST_MEMORY, training__recompute="full").time
    assert 0 < time.recomputation < time.products / 3
    assert plan().time.recomputation == 0


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_idle_time_of_a_pipeline_is_that_of_its_schedule(microbatches: int) -> None:
    layers = {"model__num_hidden_layers": 4, "pipeline__microbatches": microbatches}
    found = plan(IDEAL, world_size=2, degrees={"pp": 2}, **layers)
    time = found.time
    # 1F1B: (ranks - 1) / micro-batches of the time that a rank works (arXiv 2104.04473).
    assert time.idle == pytest.approx((time.products + time.memory) / microbatches)


def test_offloaded_state_takes_the_links_of_the_host() -> None:
    slow = dataclasses.replace(H100, host_bandwidth=1.0)
    retained, offloaded = plan(slow).time, plan(slow, training__offload_optimizer="true").time
    assert offloaded.update > retained.update
    assert offloaded.products == retained.products


def test_small_products_wait_for_their_operands() -> None:
    def products(batch: int) -> float:
        return plan(world_size=1, training__micro_batch_size=batch).time.products

    # Weights are read once for each micro-batch.
    assert products(64) < products(8) < products(1)


@pytest.mark.parametrize(("axis", "degrees"), [("tp", {"tp": 2}), ("weights", {}), ("ep", {"ep": 4})])
def test_hidden_exchanges_are_not_waited_for(axis: str, degrees: dict) -> None:
    settings = EXPERTS | ({"parallel__ep_chunks": 2} if axis == "ep" else {})
    none, half = (dataclasses.replace(H100, hidden={axis: share} if share else {}) for share in (0.0, 0.5))
    exposed, hidden = (plan(each, degrees=degrees, **settings).time for each in (none, half))
    if axis == "weights":
        assert hidden.weights == pytest.approx(exposed.weights / 2)
    else:
        # Of two chunks of tokens, one can be hidden.
        share = 0.75 if axis == "ep" else 0.5
        assert hidden.exchanges[axis] == pytest.approx(share * exposed.exchanges[axis])


def test_ranks_share_processors() -> None:
    shared = dataclasses.replace(H100, processors=2)
    alone, all_eight = plan(world_size=8).time, plan(shared, world_size=8).time
    assert all_eight.products == pytest.approx(4 * alone.products)
    assert plan(shared, world_size=2).time.products == pytest.approx(plan(world_size=2).time.products)


def test_ranks_that_share_processors_compute_while_others_idle() -> None:
    settings = {"world_size": 4, "degrees": {"pp": 4}, "model__num_hidden_layers": 4, "pipeline__microbatches": 8}
    # 3 / 8 of the time that a rank computes is idle time of 1F1B. Four ranks on two processors are never all idle.
    assert plan(IDEAL, **settings).time.idle > 0
    assert plan(dataclasses.replace(IDEAL, processors=2), **settings).time.idle == pytest.approx(0)
    three = dataclasses.replace(IDEAL, processors=3)
    time = plan(three, **settings).time
    assert time.idle == pytest.approx((1.375 * 3 / 4 - 1) * (time.products + time.memory))


def test_compiled_blocks_move_fewer_bytes() -> None:
    assert plan(training__compile="true").time.memory < plan().time.memory


def test_blocks_of_other_ranks_are_slower() -> None:
    ring, heads = ({"cp": 2, "cp_method": method} for method in ("ring", "ulysses"))
    assert plan(FAST_MEMORY, degrees=ring).time.products > plan(FAST_MEMORY, degrees=heads).time.products
