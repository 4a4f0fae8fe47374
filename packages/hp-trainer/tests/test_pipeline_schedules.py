"""Pipeline schedules on paper: complete, free of hangs, with the idle time and activations of their papers."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline import (
    Action,
    ActionSeconds,
    Kind,
    Schedule,
    build_schedule,
    register_schedule,
    schedule_names,
    schedules,
    simulate,
    validate,
)
from hp_trainer.pipeline.schedules import merge_backwards

STAGES = {"gpipe": (1, 2), "interleaved_1f1b": (1, 2, 3, 4), "interleaved_zero_bubble": (2, 3)}
V_SCHEDULES = ("zero_bubble_v", "dualpipe_v")
BUILT_IN = (
    "1f1b",
    "dualpipe_v",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zero_bubble_h1",
    "zero_bubble_v",
)


def stages_of(name):
    return STAGES.get(name, (2,) if name in V_SCHEDULES else (1,))


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_number_of_ranks_and_micro_batches_is_complete_and_does_not_hang(name):
    for ranks, stages, microbatches in itertools.product(range(1, 9), stages_of(name), (1, 2, 3, 5, 8, 13)):
        schedule = build_schedule(name, num_ranks=ranks, stages_per_rank=stages, num_microbatches=microbatches)
        validate(schedule)
        assert schedule.num_ranks == ranks
        assert schedule.num_stages == ranks * stages
        assert schedule.num_microbatches == microbatches


# F = I = W = 1. Idle in units of one stage's action: arXiv 1811.06965, 2104.04473, 2401.10241.
IDLE = {
    "gpipe": lambda p, v: 3 * (p - 1),
    "1f1b": lambda p, v: 3 * (p - 1),
    "interleaved_1f1b": lambda p, v: 3 * (p - 1),
    "interleaved_zero_bubble": lambda p, v: p - 1,
    "zero_bubble_h1": lambda p, v: p - 1,
    "dualpipe_v": lambda p, v: p - 1,
}
PEAK = {
    "gpipe": lambda p, v, m: m * v,
    "1f1b": lambda p, v, m: p,
    "interleaved_1f1b": lambda p, v, m: (v - 1) * p + 2 * (p - 1) + 1 if v > 1 else p,
    "interleaved_zero_bubble": lambda p, v, m: p * v,
    "zero_bubble_h1": lambda p, v, m: p,
    "zero_bubble_v": lambda p, v, m: 2 * p,
    "dualpipe_v": lambda p, v, m: 2 * p + 1,
}


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", IDLE)
def test_idle_time_is_that_of_the_paper(name, ranks):
    for stages in stages_of(name):
        if name == "gpipe" and stages > 1:
            continue  # the formula is for one stage per rank
        schedule = build_schedule(name, num_ranks=ranks, stages_per_rank=stages, num_microbatches=4 * ranks)
        assert max(simulate(schedule).idle) == IDLE[name](ranks, stages)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_rank_of_the_v_schedule_has_almost_no_gap(ranks):
    timeline = simulate(build_schedule("zero_bubble_v", num_ranks=ranks, num_microbatches=4 * ranks))
    assert max(timeline.idle) <= ranks  # ranks - 1 of them before the first forward or after the last action


# Times of input and weight gradients of a stage whose forward takes 1; attention alone makes the first ones longer.
RATIOS = ((1.0, 1.0), (1.2, 0.8), (1.5, 0.5), (1.8, 0.2))


@pytest.mark.parametrize("microbatches", [8, 9, 13, 15, 32])
@pytest.mark.parametrize("name", ["zero_bubble_h1", "interleaved_zero_bubble", "interleaved_1f1b"])
def test_idle_time_follows_its_formula_for_any_times_and_any_number_of_micro_batches(name, microbatches):
    for stages, (input_grad, weight_grad) in itertools.product(stages_of(name), RATIOS):
        schedule = build_schedule(name, num_ranks=8, stages_per_rank=stages, num_microbatches=microbatches)
        timeline = simulate(schedule, ActionSeconds(input_grad=input_grad, weight_grad=weight_grad))
        one_after_another = 1 + input_grad + (weight_grad if name == "interleaved_1f1b" else -weight_grad)
        assert max(timeline.idle) == pytest.approx(7 * one_after_another)


@pytest.mark.parametrize(("input_grad", "weight_grad", "end"), [(1.2, 0.8, 200), (1.5, 0.5, 206), (1.8, 0.2, 214)])
def test_the_v_schedule_is_fast_where_weight_gradients_are_cheap(input_grad, weight_grad, end):
    schedule = build_schedule("zero_bubble_v", num_ranks=8, num_microbatches=32)
    # The computation alone takes 192.
    assert simulate(schedule, ActionSeconds(input_grad=input_grad, weight_grad=weight_grad)).end <= end + 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", PEAK)
def test_activations_kept_are_those_of_the_paper(name, ranks):
    for stages in stages_of(name):
        schedule = build_schedule(name, num_ranks=ranks, stages_per_rank=stages, num_microbatches=4 * ranks)
        assert max(simulate(schedule).peak_activations) == PEAK[name](ranks, stages, 4 * ranks)


@pytest.mark.parametrize("microbatches", [3, 9, 13, 15, 21])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_rounds_of_more_micro_batches_hold_more_activations(name, microbatches):
    ranks = 8
    largest = -(-microbatches // max(1, microbatches // ranks))
    for stages in (2, 3):
        schedule = build_schedule(name, num_ranks=ranks, stages_per_rank=stages, num_microbatches=microbatches)
        more = (stages - 1) * (largest - ranks)
        peak = PEAK[name](ranks, stages, microbatches) + more
        assert max(simulate(schedule).peak_activations) == min(peak, stages * microbatches)


def test_rank_r_of_1f1b_keeps_one_activation_less_than_the_one_before():
    timeline = simulate(build_schedule("1f1b", num_ranks=4, num_microbatches=16))
    assert timeline.peak_activations == (4, 3, 2, 1)


def test_times_of_actions_and_transfers_count():
    schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=1)
    timeline = simulate(schedule, ActionSeconds(forward=2.0, input_grad=3.0, weight_grad=1.0, transfer=0.5))
    assert timeline.spans[Action.parse("1F0")] == (2.5, 4.5)
    assert timeline.spans[Action.parse("0B0")] == (9.0, 13.0)
    assert timeline.idle == (7.0, 7.0)


@pytest.mark.parametrize("name", BUILT_IN)
def test_text_reads_back(name):
    schedule = build_schedule(name, num_ranks=3, num_microbatches=5)
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0: 0F0", r"stage 0, micro-batch 0: expected F and B, or F, I and W, got F"),
        ("rank 0: 0F0 0B0 0B0", r"rank 0 does 0B0 2 times"),
        ("rank 0: 0F0 0W0 0I0", r"expected the order F I W"),
        ("rank 0: 0F0 0I0", r"got F I"),
        ("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1B1 1F0 1B0", r"deadlocks: rank 0 waits to start 0B0; rank 1"),
        ("rank 0: 0F0 0B0\nrank 1: 1B0 1F0", r"stage 1, micro-batch 0: expected the order F B"),
        ("", "expected stages and micro-batches, got 0 and 0"),
        (
            "rank 0: 0F0 0B0 0F999999999",
            "1 stages and 1000000000 micro-batches need at least 2000000000 actions, got 3",
        ),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(ScheduleError, match=message):
        validate(Schedule.parse(text))


def test_stages_of_ranks_without_actions_are_named():
    full = Schedule.parse("rank 0: 0F0 0B0")
    with pytest.raises(ScheduleError, match="stage 1 is on rank 5, but there are actions of 1 ranks"):
        validate(Schedule((0, 5), 1, full.actions))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 1: 0F0", "begins with 'rank 0:'"),
        ("rank 0: 0X0", "expected an action such as 2F0"),
        ("rank 0: 0F0\nrank 1: 0B0", "stage 0 is on rank 0 and on rank 1"),
        ("rank 0: 1F0 1B0", r"no rank has stages \[0\]"),
        ("rank 0: 999999999F0", r"no rank has stages \[0, 1, .* 7\] and more, but one has stage 999999999"),
        ("rank 0: 0F99999999999", "expected an action such as 2F0"),
    ],
)
def test_texts_that_are_no_schedule(text, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule.parse(text)


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("1f1", {}, "Did you mean '1f1b'"),
        (
            "1f1b",
            {"num_ranks": 0, "num_microbatches": 0},
            "num_ranks must be an integer of at least 1, got 0; num_micro",
        ),
        ("gpipe", {"num_ranks": 2, "num_microbatches": 2.5}, "num_microbatches must be an integer .*, got 2.5"),
        ("1f1b", {"stages_per_rank": 2}, "'1f1b' has 1 stages per rank, got 2"),
        ("zero_bubble_v", {"stages_per_rank": 1}, "'zero_bubble_v' has 2 stages per rank, got 1"),
    ],
)
def test_numbers_that_cannot_be(name, numbers, message):
    with pytest.raises(ScheduleError, match=message):
        build_schedule(name, **{"num_ranks": 2, "num_microbatches": 2, **numbers})


def test_a_backward_is_whole_where_nobody_waits_for_its_first_part():
    split = Schedule.parse("rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\nrank 1: 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2")
    joined = merge_backwards(split)
    # Rank 0 could begin 0B0 a unit earlier, and would wait for 1I2 all the same.
    assert str(joined) == "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\nrank 1: 1F0 1B0 1F1 1I1 1W1 1F2 1I2 1W2"
    assert simulate(joined).end == simulate(split).end == 11


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("name", ["zero_bubble_h1", "interleaved_zero_bubble", *V_SCHEDULES])
def test_unsplit_backwards_make_no_step_longer(name, ratio, monkeypatch):
    seconds = ActionSeconds(input_grad=ratio[0], weight_grad=ratio[1])
    for ranks, microbatches in itertools.product((1, 2, 7), (3, 15)):
        merged = build_schedule(name, num_ranks=ranks, num_microbatches=microbatches)
        with monkeypatch.context() as patch:
            patch.setattr(schedules, "merge_backwards", lambda split: split)
            stages = 1 if name == "zero_bubble_h1" else 2
            split = getattr(schedules, name)(ranks, stages, microbatches)
        before, after = simulate(split, seconds), simulate(merged, seconds)
        assert after.end <= 1.01 * before.end
        assert all(a <= b for a, b in zip(after.peak_activations, before.peak_activations, strict=True))
        kinds = [action.kind for each in merged.actions for action in each]
        # A rank of its own waits for nobody; others split only what fills idle time.
        assert kinds.count(Kind.INPUT_GRAD) < (1 if ranks == 1 else kinds.count(Kind.FORWARD))


def test_dualpipe_splits_only_what_fills_its_end():
    kinds = [
        action.kind for each in build_schedule("dualpipe_v", num_ranks=2, num_microbatches=8).actions for action in each
    ]
    assert (kinds.count(Kind.BACKWARD), kinds.count(Kind.INPUT_GRAD)) == (27, 5)


def test_an_action_is_a_dataclass_and_equals_no_tuple():
    action = Action(0, Kind.FORWARD, 1)
    assert dataclasses.replace(action, kind=Kind.BACKWARD) == action.of_kind(Kind.BACKWARD) == Action.parse("0B1")
    assert action != (0, Kind.FORWARD, 1)


def test_a_schedule_of_ones_own_has_a_name_once():
    def build(num_ranks, stages_per_rank, num_microbatches):
        return build_schedule("gpipe", num_ranks=num_ranks, num_microbatches=num_microbatches)

    register_schedule("mine", build)
    assert "mine" in schedule_names()
    assert build_schedule("mine", num_ranks=2, num_microbatches=3) == build(2, 1, 3)
    with pytest.raises(ScheduleError, match="'mine' is registered by"):
        register_schedule("mine", build)


def test_a_registered_function_that_makes_no_schedule_is_named():
    register_schedule("text", lambda ranks, stages, microbatches: "rank 0: 0F0 0B0")
    with pytest.raises(ScheduleError, match=r"'text': expected its function to return a Schedule .*got 'rank 0"):
        build_schedule("text", num_ranks=1, num_microbatches=1)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 1), (2, 4)])
def test_a_registered_function_whose_schedule_is_for_other_numbers_is_named(ranks, microbatches):
    name = f"two_of_two_for_{ranks}_of_{microbatches}"
    register_schedule(name, lambda *_: build_schedule("gpipe", num_ranks=2, num_microbatches=2))
    expected_message = f"actions of {ranks} ranks and {microbatches} micro-batches, got those of 2 and 2"
    with pytest.raises(ScheduleError, match=expected_message):
        build_schedule(name, num_ranks=ranks, num_microbatches=microbatches)
    assert build_schedule(name, num_ranks=2, num_microbatches=2).num_microbatches == 2
