"""Facts of pipelines' schedules, of which plans are made."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest

from hp_trainer.cli.plan import load_for_planning
from hp_trainer.exceptions import ScheduleError
from hp_trainer.launch import layout_problems
from hp_trainer.pipeline import ActionSeconds, Schedule, build_schedule, register_schedule, schedules
from hp_trainer.planning.devices import find_device
from hp_trainer.planning.pipeline import InFlight, PipelineFacts, bubble, pipeline_facts
from hp_trainer.planning.search import search_layouts


def facts(name: str, ranks: int, micro_batches: int, stages: int | None = None, **options: bool) -> PipelineFacts:
    return pipeline_facts(name, ranks, micro_batches, stages, **options)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_all_forwards_first_holds_every_micro_batch_and_finds_gradients_with_one_less(ranks, micro_batches) -> None:
    found = facts("gpipe", ranks, micro_batches)
    for place, (before, after) in enumerate(zip(found.before_gradients, found.with_gradients, strict=True)):
        is_last = place == ranks - 1
        assert before == InFlight(micro_batches, 0, micro_batches * is_last, 0)
        assert after == InFlight(micro_batches - 1, 0, (micro_batches - 1) * is_last, 0)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_one_forward_one_backward_holds_as_many_after_its_first_gradients(ranks) -> None:
    found = facts("1f1b", ranks, 4 * ranks)
    assert [each.live for each in found.before_gradients] == [ranks - place for place in range(ranks)]
    assert found.with_gradients == found.before_gradients


def test_the_first_place_of_a_v_holds_as_many_with_gradients_but_none_that_wait() -> None:
    found = facts("zero_bubble_v", 2, 4)
    before, after = found.before_gradients[0], found.with_gradients[0]
    assert (before.live, before.pending) == (2.0, 0.5)
    assert (after.live, after.pending) == (2.0, 0.0)


def test_a_place_that_computes_again_has_nothing_pending() -> None:
    found = facts("zero_bubble_v", 2, 4, recomputes=True)
    assert all(not each.pending for each in (*found.before_gradients, *found.with_gradients))


@pytest.mark.parametrize("micro_batches", [48, 49, 50, 53])
@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "zero_bubble_v", "interleaved_1f1b", "dualpipe_v"])
def test_long_steps_are_extrapolated_from_short_ones(
    name: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = None if name in ("1f1b", "zero_bubble_h1") else 2
    seconds = ActionSeconds(input_grad=1.4, weight_grad=0.6)
    with monkeypatch.context() as patched:
        patched.setattr("hp_trainer.planning.pipeline.repeats_itself", lambda name: False)
        for cached in (pipeline_facts, bubble):
            cached.cache_clear()
        full = facts(name, 4, micro_batches, stages), bubble(name, 4, micro_batches, stages, seconds)
    for cached in (pipeline_facts, bubble):
        cached.cache_clear()
    monkeypatch.setattr("hp_trainer.planning.pipeline.MAX_ACTIONS", 10)
    shorter = facts(name, 4, micro_batches, stages), bubble(name, 4, micro_batches, stages, seconds)
    assert shorter[0].before_gradients == full[0].before_gradients
    assert shorter[0].with_gradients == full[0].with_gradients
    for name in ("backwards_after_no_forward", "backwards_after_other_stage"):
        assert getattr(shorter[0], name) == pytest.approx(getattr(full[0], name), rel=0.15)
    assert shorter[1] == pytest.approx(full[1], rel=0.05)


@pytest.mark.parametrize(("weight_grad", "idle"), [(1.0, 7), (0.2, 18.2)])
def test_the_idle_time_of_a_plan_follows_from_the_times_of_its_stages(weight_grad: float, idle: float) -> None:
    seconds = ActionSeconds(input_grad=2 - weight_grad, weight_grad=weight_grad)
    assert bubble("interleaved_zero_bubble", 8, 32, 2, seconds) == pytest.approx(idle / 192)


# Two rounds of two ranks are four micro-batches, which are no multiple of 8, but one of 4.
@pytest.mark.parametrize(("batch", "multiple", "exists"), [(16, 8, True), (18, 4, False)])
def test_a_registered_schedule_is_planned_with_its_own_number_of_micro_batches(
    batch: int, multiple: int, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Schedule:
        if num_microbatches % multiple:
            raise ScheduleError("no multiple")
        return build_schedule("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches)

    # A registry that is forgotten after the test.
    monkeypatch.setattr(schedules, "_registry", functools.cache(schedules._registry.__wrapped__))
    monkeypatch.setattr("hp_trainer.planning.pipeline.MAX_ACTIONS", 10)
    register_schedule(f"multiples of {multiple}", build)
    (tmp_path / "run.yaml").write_text("data: {path: none.txt}\nmodel: {num_hidden_layers: 2, num_experts: null}\n")
    settings = {"training.global_batch_size": str(batch), "training.steps": "1", "training.micro_batch_size": "1"}
    settings |= {"pipeline.schedule": f"multiples of {multiple}", "parallel.pp": "2"}
    config = load_for_planning(str(tmp_path / "run.yaml"), [*settings.items()]).config
    ranking = search_layouts(config, 2, find_device("H100"), math.inf)
    for is_shortened in (True, False):
        found = [each.what for each in layout_problems(config, 2, is_shortened=is_shortened)]
        assert found == ([] if exists else ["no multiple"])
    assert any(plan.shape.dims.pp == 2 for plan in ranking.fastest()) == exists
    assert ("pipeline.schedule: no multiple" in ranking.reasons) == (not exists)
