"""Facts of pipelines' schedules, of which plans are made."""

from __future__ import annotations

import pytest

from hp_trainer.planning.pipeline import InFlight, PipelineFacts, pipeline_facts


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


@pytest.mark.parametrize("name", ["1f1b", "zero_bubble_h1", "zero_bubble_v", "interleaved_1f1b", "dualpipe_v"])
def test_long_steps_are_told_from_short_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = None if name in ("1f1b", "zero_bubble_h1") else 2
    full = facts(name, 2, 48, stages)
    monkeypatch.setattr("hp_trainer.planning.pipeline.MAX_ACTIONS", 10)
    shorter = facts(name, 2, 48, stages)
    assert shorter.before_gradients == full.before_gradients
    assert shorter.with_gradients == full.with_gradients
    assert shorter.bubble == pytest.approx(full.bubble, rel=0.05)
