"""Recomputation chosen by a budget or by settings: what is chosen, reported and refused, and that no number changes."""

from __future__ import annotations

import itertools
import random

import pytest
from training_runs import FOUR_RANKS, events, losses, tensors, train_rank

from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.testing import run_ranks
from hp_trainer.models.estimates import BlockActivations, SavedActivation
from hp_trainer.models.recomputation import KINDS, NOTHING_RECOMPUTED, BlockRecompute
from hp_trainer.parallel import ParallelDims
from hp_trainer.training.activation_budget import (
    ESTIMATED,
    BudgetError,
    CostRates,
    Demand,
    _options,
    measure_rates,
    micro_batch_shape,
    plan_activations,
    plan_recompute,
    stage_demands,
)

SETTINGS = {"training__steps": 2, "checkpoint__interval": None, "model__num_hidden_layers": 3}


def block(*sizes, working=0.0):
    kinds = ("input", "attention", "products", "rest")
    tensors = [
        SavedActivation(
            name=kind, kind=kind, saved=size, result=size / 2 if kind == "products" else size, flops=size * 90
        )
        for kind, size in zip(kinds, sizes, strict=True)
    ]
    return BlockActivations(tensors=tuple(tensors), working=working)


DENSE, WIDE = block(8, 20, 100, 60, working=30), block(8, 60, 40, 200, working=50)
DEMANDS = {
    "equal blocks": Demand(blocks=(DENSE,) * 5),
    "two kinds": Demand(blocks=(DENSE, WIDE, DENSE, WIDE)),
    "with a head": Demand(blocks=(WIDE, DENSE, DENSE), head=block(0, 0, 0, 400, working=300)),
    "in flight": Demand(blocks=(DENSE, WIDE), in_flight=3.0),
    "two stages": Demand(blocks=(DENSE, WIDE, WIDE, DENSE), in_flight=2.0, ends=frozenset({1})),
}


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("name", DEMANDS)
def test_plans_are_near_the_best_of_all_choices(name, share):
    demand = DEMANDS[name]
    options = list(_options(demand, ("attention", "products"), offloads=False))
    choices = list(itertools.product(options, repeat=len(demand.blocks)))
    peaks = [demand.peak(each) for each in choices]
    budget = min(peaks) + share * (demand.peak([NOTHING_RECOMPUTED] * len(demand.blocks)) - min(peaks))
    plan = plan_recompute(demand, budget, ("attention", "products"))
    assert demand.peak(plan.chosen) == plan.peak <= budget
    best = min(demand.cost(each) for each, peak in zip(choices, peaks, strict=True) if peak <= budget)
    assert plan.cost <= 1.1 * best


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("host", [3_000.0, 20_000.0, 200_000.0])
@pytest.mark.parametrize("name", ["two kinds", "with a head", "two stages"])
def test_plans_with_offload_are_near_the_best_of_all_choices(name, host, share):
    demand, options, rates = DEMANDS[name], list(_options(DEMANDS[name], (), offloads=True)), CostRates(host=host)
    choices = list(itertools.product(options, repeat=len(demand.blocks)))
    peaks = [demand.peak(each) for each in choices]
    budget = min(peaks) + share * (demand.peak([NOTHING_RECOMPUTED] * len(demand.blocks)) - min(peaks))
    plan = plan_recompute(demand, budget, (), offloads=True, rates=rates)
    assert demand.peak(plan.chosen) == plan.peak <= budget
    best = min(demand.cost(each, rates) for each, peak in zip(choices, peaks, strict=True) if peak <= budget)
    assert plan.cost <= 1.1 * best


@pytest.mark.timeout(60)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_the_search_ends_where_changes_that_save_less_raise_the_peak(share):
    """Tensor parallel ranks save shards of gathered rows; a recomputation holds all rows, as `held` and `result`."""
    kinds = {"input": (1, 0, 5, 0), "products": (20, 10, 4, 10), "collectives": (0, 10, 20, 10), "rest": (1, 0, 0, 0)}
    tensors = [
        SavedActivation(name=kind, kind=kind, saved=saved, held=held, result=result, flops=flops)
        for kind, (saved, held, result, flops) in kinds.items()
    ]
    demand = Demand(blocks=(BlockActivations(tensors=tuple(tensors)),) * 2, in_flight=1.5)
    options = list(_options(demand, KINDS, offloads=True))
    least = min(demand.peak([each] * 2) for each in options)
    plan = plan_recompute(demand, (1 + share) * least, KINDS, offloads=True)
    assert plan.peak <= (1 + share) * least
    choices = [each for each in itertools.product(options, repeat=2) if demand.peak(each) <= (1 + share) * least]
    assert plan.cost <= 1.1 * min(map(demand.cost, choices))


def test_of_twelve_blocks_those_are_computed_again_that_cost_least():
    rng = random.Random(0)
    blocks = tuple(block(8, *(rng.randint(5, 300) for _ in range(3)), working=20) for _ in range(12))
    demand, options = Demand(blocks=blocks), list(_options(Demand(blocks=blocks), (), offloads=False))
    choices = list(itertools.product(options, repeat=12))
    peaks, costs = [demand.peak(each) for each in choices], [demand.cost(each) for each in choices]
    full_value = demand.peak([NOTHING_RECOMPUTED] * 12)
    for share in (0.2, 0.5, 0.8):
        budget = min(peaks) + share * (full_value - min(peaks))
        plan = plan_recompute(demand, budget, ())
        assert plan.peak <= budget
        assert plan.cost <= 1.1 * min(cost for cost, peak in zip(costs, peaks, strict=True) if peak <= budget)


def test_a_large_budget_keeps_everything_and_too_small_a_one_is_refused():
    demand = DEMANDS["two kinds"]
    assert set(plan_recompute(demand, 1e9, KINDS).chosen) == {NOTHING_RECOMPUTED}
    with pytest.raises(BudgetError, match="activations take at least") as message:
        plan_recompute(demand, 10, KINDS)
    assert plan_recompute(demand, message.value.least, KINDS).peak == message.value.least


@pytest.mark.parametrize("offloads", [False, True])
def test_a_rank_without_blocks_has_a_plan_too(lab, offloads):
    """Such as the first of a pipeline that has the embedding alone, or the last with the head alone."""
    head = block(0, 0, 0, 400, working=300)
    plan = plan_recompute(Demand(blocks=(), head=head, in_flight=2.0), 1e9, KINDS, offloads=offloads)
    assert (plan.chosen, plan.peak, plan.cost) == ((), 700, 0)
    with pytest.raises(BudgetError):
        plan_recompute(Demand(blocks=(), head=head), 699, KINDS, offloads=offloads)
    settings = {"pipeline__layers": "[0, 3]", "training__activation_budget": "1GiB", "model__num_hidden_layers": 3}
    config = lab.config({"pp": 2}, training__offload_activations=offloads, **settings)
    plans = plan_activations(config, ParallelDims(world_size=2, pp=2), KINDS)
    assert [len(plan.chosen) for plan in plans.plans] == [0, 3]
    assert len(plans.describe()) == 2


def test_a_block_that_is_computed_again_is_whole_in_its_backward():
    # The input that is saved, then attention, products, the rest, and gradients between them.
    assert Demand(blocks=(DENSE,)).peak([BlockRecompute(mode="full")]) == 8 + (20 + 100 + 60) + 30


def test_offload_is_chosen_where_its_copies_are_hidden():
    demand = DEMANDS["equal blocks"]
    budget = 0.8 * demand.peak([NOTHING_RECOMPUTED] * 5)
    hidden = plan_recompute(demand, budget, KINDS, offloads=True, rates=CostRates(host=1.0))
    assert {each.mode for each in hidden.chosen} == {"none"}
    assert (hidden.cost, hidden.exposed) == (0.0, 0.0)
    assert hidden.offloaded > 0
    assert hidden.cost_without_offload > 0
    dear = plan_recompute(demand, budget, KINDS, offloads=True, rates=CostRates(host=1e9))
    assert dear.offloaded == 0
    assert dear.cost == dear.cost_without_offload == plan_recompute(demand, budget, KINDS).cost


def test_a_budget_that_recomputation_alone_does_not_keep():
    demand = Demand(blocks=(DENSE,) * 12)
    least = demand.peak([BlockRecompute(mode="full")] * 12)
    with pytest.raises(BudgetError, match="if every block is recomputed, more"):
        plan_recompute(demand, least - 1, KINDS)
    plan = plan_recompute(demand, least - 1, KINDS, offloads=True)
    assert plan.cost_without_offload is None
    assert plan.peak < least
    # Backward begins with the last block: it stays.
    assert not plan.chosen[-1].offloads
    with pytest.raises(BudgetError, match="is recomputed and offloaded"):
        plan_recompute(demand, plan.least - 1, KINDS, offloads=True)


@pytest.mark.parametrize(
    ("schedule", "per_rank", "held", "ends"),
    [("1f1b", None, [2, 1], [{2}, {1}]), ("interleaved_1f1b", 2, [2.5, 1.5], [{1, 2}, {0, 1}])],
)
def test_each_place_of_a_pipeline_counts_the_micro_batches_that_it_holds(lab, schedule, per_rank, held, ends):
    settings = {"pipeline__schedule": schedule, "pipeline__stages_per_rank": per_rank}
    config = lab.config({"pp": 2}, training__micro_batch_size=1, model__num_hidden_layers=5, **settings)
    dims = ParallelDims(world_size=2, pp=2)
    demands = [stage.demand for stage in stage_demands(config, dims, micro_batch_shape(config, dims))]
    assert [each.in_flight for each in demands] == held
    assert [each.ends for each in demands] == ends
    assert [each.head is None for each in demands] == [True, False]


def test_planning_a_deep_model_takes_no_time():
    plan = plan_recompute(Demand(blocks=(DENSE, WIDE) * 32, in_flight=4), 15_000, KINDS)
    assert plan.peak <= 15_000 < plan.peak_saving_all


MODES = {
    "every other block": {"recompute": "full", "recompute_every": 2},
    "by name": {"recompute": "full", "recompute_blocks": "[layers.1*]"},
    "selective": {"recompute": "selective"},
    "collectives": {"recompute": "selective", "recompute_keep": "[collectives]"},
    "budget": {"activation_budget": "200KiB"},
    "budget with offload": {"activation_budget": "200KiB", "offload_activations": "true"},
}


# MindSpore takes its time, and the choice is the same on every platform.
ON_ALL_PLATFORMS = ("selective",)


@pytest.mark.usefixtures("torch_suffices")
def test_weights_are_bitwise_those_without_recomputation(lab):
    more = {"training__micro_batch_size": 4, **SETTINGS}
    retained = lab.run("retained", FOUR_RANKS["experts sharded"], 4, **more)
    for mode in MODES if lab.platform.name == "torch" else ON_ALL_PLATFORMS:
        settings = {f"training__{name}": value for name, value in MODES[mode].items()}
        again = lab.run(mode, FOUR_RANKS["experts sharded"], 4, **more, **settings)
        assert losses(again) == losses(retained)
        found, expected = tensors(again, ["model."]), tensors(retained, ["model."])
        assert {key for key, value in expected.items() if found[key].tobytes() != value.tobytes()} == set(), mode
        assert events(again, "step")[-1]["metrics"] == events(retained, "step")[-1]["metrics"]


def test_measured_costs_are_the_same_on_all_ranks(lab, capfd):
    """Each rank measures other times: without agreement they would recompute differently, and hang."""
    settings = {"activation_budget": "300KiB", "activation_costs": "measured", "offload_activations": "true"}
    more = {**SETTINGS, **{f"training__{name}": value for name, value in settings.items()}}
    lab.run("measured", {"dp_shard": 2}, 2, training__micro_batch_size=4, **more)
    assert "activations: time of a byte in operations of products" in capfd.readouterr().err

    def rank():
        return measure_rates(lab.platform, "float32", current_world(lab.platform).all, offloads=True)

    found = run_ranks(rank, 2, lab.platform)
    assert found[0] == found[1]
    assert min(found[0].moved, found[0].sent, found[0].host) > 0
    assert ESTIMATED not in found


@pytest.mark.usefixtures("torch_suffices")
def test_kept_collectives_are_not_made_again(lab):
    def collectives(**settings):
        settings = {f"training__{name}": value for name, value in settings.items()}
        # Otherwise backward gathers again what is not recomputed.
        degrees = {"dp_shard": 1, "tp": 2, "tp_reshard_after_forward": False}
        run = lab.start(str(settings), degrees, model__num_experts=None, **SETTINGS, **settings)

        def rank():
            with record_collectives() as log:
                train_rank(run, lab.platform)
            return log.count("all_gather") + log.count("reduce_scatter")

        return run_ranks(rank, 2, lab.platform)[0]

    none, full = collectives(), collectives(recompute="full")
    assert full > none
    assert collectives(recompute="selective", recompute_keep="[collectives]") == none


LARGER = {"model__num_hidden_layers": 6, "model__num_experts": None, "training__sequence_length": 256}
LARGER |= {"training__global_batch_size": 4, "training__steps": 2, "model__intermediate_size": 96}


def counted_peak(lab, **settings):
    """Return the most bytes that operations of a step hold at once, and the configuration."""
    run = lab.start(str(settings), **{**SETTINGS, **LARGER, **settings})
    config = run.load_config().config

    def rank():
        from hp_platform_torch.trainer.counted_step import counted_bytes
        from hp_trainer.training import Trainer

        trainer = Trainer(run, config, lab.platform)
        step, batch = trainer._step, trainer._train_batches.read(0)
        step.accumulate_gradients(batch)
        with counted_bytes() as live:
            step.accumulate_gradients(batch)
        return live.peak, config

    return run_ranks(rank, 1, lab.platform)[0]


def test_the_measured_peak_stays_within_the_budget(lab):
    if lab.platform.name != "torch":
        pytest.skip("the bytes are counted on torch")
    full_value, config = counted_peak(lab)
    for budget in (int(full_value * 0.75), int(full_value * 0.5), int(full_value * 0.35), int(full_value * 0.28)):
        measured, config = counted_peak(lab, training__activation_budget=f"{budget}B")
        plan = plan_activations(config, ParallelDims(), KINDS)
        assert measured <= plan.plans[0].peak <= budget
        assert measured > 0.6 * plan.plans[0].peak


def test_the_measured_peak_of_offloaded_blocks_is_that_of_their_demand(lab):
    if lab.platform.name != "torch":
        pytest.skip("the bytes are counted on torch")
    sizes = {"model__intermediate_size": 320, "model__num_hidden_layers": 3, "training__sequence_length": 64}
    measured, config = counted_peak(lab, **sizes, training__offload_activations="true")
    (stage,) = stage_demands(config, ParallelDims(), micro_batch_shape(config, ParallelDims()))
    assert stage.demand.peak([BlockRecompute(offloads=True)] * 3) == pytest.approx(measured, rel=0.1)
