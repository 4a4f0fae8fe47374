"""The search of layouts, which shares and leaves out work, against the plan of each layout by itself."""

from __future__ import annotations

import dataclasses
import math

import pytest
from planned_runs import config_of, shape_of

from hp_trainer.models.recomputation import KINDS
from hp_trainer.planning.devices import find_device
from hp_trainer.planning.plan import plan_step
from hp_trainer.planning.search import search_layouts
from hp_trainer.planning.shapes import recompute_of
from hp_trainer.training.activation_budget import plan_activations

SETTINGS = {
    "model__num_hidden_layers": 8,
    "model__num_experts": 4,
    "model__num_dense_layers": 3,
    "pipeline__schedule": "interleaved_1f1b",
}
DEVICE = find_device("H100")


@pytest.mark.parametrize("limit", [0.0, 150e3, math.inf])
def test_a_search_finds_the_plans_of_all_layouts(limit: float) -> None:
    config = config_of(**SETTINGS)
    ranking = search_layouts(config, 8, DEVICE, limit)
    everything = search_layouts(config, 8, DEVICE, math.inf)
    alone = [plan_step(config, plan.shape.dims, DEVICE, every_rank=False) for plan in everything.fastest()]
    fitting = {plan.shape.dims: plan for plan in alone if plan.peak <= limit}
    assert len(ranking.fitting) + ranking.num_too_large == len(alone) > 50
    as_configured = [plan for plan in ranking.fastest() if plan.shape.config is config]
    assert {plan.shape.dims for plan in as_configured} == set(fitting)
    for plan in as_configured:
        same = fitting[plan.shape.dims]
        assert (plan.memory, plan.times, plan.traffic) == (same.memory, same.times, same.traffic)


@pytest.mark.parametrize("limit", [150e3, math.inf])
def test_the_fastest_layouts_are_found_without_the_times_of_all(limit: float) -> None:
    ranking = search_layouts(config_of(**SETTINGS), 8, DEVICE, limit)
    fastest = ranking.fastest(5)
    # Computed on first use, and stored in the plan then.
    assert not all("times" in vars(plan) for ways in ranking.fitting for plan in ways)
    quickest = [min(ways, key=lambda plan: plan.time.total) for ways in ranking.fitting]
    assert fastest == sorted(quickest, key=lambda plan: plan.time.total)[:5]


def test_the_smallest_of_the_layouts_that_do_not_fit_is_told() -> None:
    config = config_of(**SETTINGS, training__recompute="full")
    ranking = search_layouts(config, 8, DEVICE, 1.0)
    often = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, reduce_gradients="micro_batch"))
    every = [
        *search_layouts(config, 8, DEVICE, math.inf).fastest(),
        *search_layouts(often, 8, DEVICE, math.inf).fastest(),
    ]
    assert ranking.smallest is not None
    assert ranking.smallest.peak == min(plan.peak for plan in every)


def test_the_quickest_way_to_fit_is_taken() -> None:
    """Blocks computed again, gradients reduced after each micro-batch, or both where neither is enough."""
    config = config_of(**SETTINGS, training__micro_batch_size=1, training__sequence_length=256)
    dims = shape_of(config, 2).dims

    def is_same(plan) -> bool:
        found = plan.shape.dims
        return (found.dp_shard, found.ep, found.expert_mesh) == (2, 1, "folded")

    again = dataclasses.replace(config.training, recompute="full")
    often = dataclasses.replace(config.parallel, reduce_gradients="micro_batch")
    changed = [{}, {"training": again}, {"parallel": often}, {"training": again, "parallel": often}]
    ways = [plan_step(dataclasses.replace(config, **each), dims, DEVICE, every_rank=False) for each in changed]
    for limit in sorted({plan.peak for plan in ways}):
        fitting = search_layouts(config, 2, DEVICE, limit).fastest()
        (found,) = [plan for plan in fitting if is_same(plan)]
        expected = [plan for plan in ways[:3] if plan.peak <= limit] or [ways[3]]
        if ways[0].peak <= limit:
            expected = ways[:1]
        assert found.time.total == min(plan.time.total for plan in expected)
    smallest = min(plan.peak for plan in ways)
    assert not any(map(is_same, search_layouts(config, 2, DEVICE, smallest - 1).fastest()))


def test_layouts_with_more_micro_batches_than_a_schedule_may_have_are_illegal() -> None:
    # With two stages, 2^20 forwards are 2^19 micro-batches.
    few, many = (
        search_layouts(config_of(training__global_batch_size=size, training__micro_batch_size=1), 2, DEVICE, math.inf)
        for size in (2**19, 2**20)
    )
    assert any(plan.shape.dims.pp == 2 for plan in few.fastest())
    assert not any(plan.shape.dims.pp == 2 for plan in many.fastest())
    assert "pipeline.microbatches: 1048576 micro-batches on 2 ranks are too many actions for a schedule" in many.reasons


def test_gradients_of_split_backwards_are_not_reduced_before_the_end() -> None:
    config = config_of(**SETTINGS | {"pipeline__schedule": "zero_bubble_v"}, training__micro_batch_size=1)
    ranking = search_layouts(config, 8, DEVICE, 150e3)
    reduced = {
        plan.shape.dims.pp for plan in ranking.fastest() if plan.shape.config.parallel.reduce_gradients != "step"
    }
    assert reduced <= {1}


def test_a_budget_is_planned_for_experts_as_the_device_computes_them() -> None:
    """A CPU computes experts one by one in half precision, which keeps more than one operation for all of them."""
    config = config_of(model__num_experts=4, training__dtype="bfloat16", training__activation_budget="260KiB")
    shape = shape_of(config, 1)
    one_by_one, fused = (
        plan_activations(config, shape.dims, KINDS, fused_experts=fuses).of_layers() for fuses in (False, True)
    )
    assert recompute_of(shape) == one_by_one != fused
