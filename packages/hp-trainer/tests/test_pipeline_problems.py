"""Pipelines that cannot run are refused before a rank starts, with what would work."""

from __future__ import annotations

import pytest

from hp_trainer.cli.plan import describe_run
from hp_trainer.config import parse_config
from hp_trainer.launch.preflight import check_settings
from hp_trainer.pipeline import Schedule, register_schedule
from hp_trainer.registries import Registries

RUN = """\
platform: torch
model: {name: decoder, num_hidden_layers: 6}
data: {path: corpus.txt}
training: {steps: 1, global_batch_size: 12}
"""


@pytest.fixture
def problems(installed: Registries, monkeypatch: pytest.MonkeyPatch):
    def find(world_size: int, **settings: object) -> list[str]:
        given = [(name.replace("__", "."), str(value)) for name, value in settings.items()]
        loaded = parse_config(RUN, given, registered=installed)
        return [
            f"{each.path}: {each.what}; {each.expected}; {each.got}; {each.hint}"
            for each in check_settings(loaded, world_size, installed)
            if not each.path.startswith("platform")
        ]

    return find


def test_what_fits_has_no_problems(problems) -> None:
    assert problems(2, parallel__pp=2) == []
    assert problems(4, parallel__pp=2, pipeline__schedule="zero_bubble_v", training__micro_batch_size=2) == []
    assert problems(2, parallel__pp=2, pipeline__layers="[1,5]", pipeline__microbatches=4) == []


def test_check_tells_the_samples_of_a_micro_batch(installed: Registries) -> None:
    for settings, size in (({}, 1), ({"pipeline.microbatches": "3"}, 4), ({"training.micro_batch_size": "2"}, 2)):
        config = parse_config(RUN, [("parallel.pp", "2"), *settings.items()], registered=installed).config
        assert f"each rank: 12 samples a step, {size} at a time\n" in describe_run(config, 2)


def test_more_micro_batches_than_a_schedule_can_list(problems) -> None:
    (problem,) = problems(2, parallel__pp=2, training__global_batch_size=10**9)
    assert problem.startswith("pipeline.microbatches: 1000000000 micro-batches on 2 ranks are too many")
    assert problem.endswith(
        "at most 524288 micro-batches; 1000000000; a larger training.micro_batch_size, or a smaller "
        "training.global_batch_size"
    )
    # Two stages on each rank.
    two = {"pipeline__schedule": "zero_bubble_v", "training__micro_batch_size": 1}
    (problem,) = problems(2, parallel__pp=2, training__global_batch_size=300_000, **two)
    assert problem.startswith("pipeline.microbatches: ")
    assert "; at most 262144 micro-batches; 300000; " in problem


def test_more_stages_than_layers(problems) -> None:
    assert problems(8, parallel__pp=8) == [
        "parallel.pp: num_hidden_layers = 6 cannot be split into stages for pp = 8 ranks; at most 6; 8; pp=6"
    ]
    assert problems(4, parallel__pp=4, pipeline__schedule="interleaved_1f1b") == [
        "pipeline.stages_per_rank: num_hidden_layers = 6 cannot be split into 4 * 2 = 8 stages; "
        "at most 6 stages, one layer each; 8 stages; pipeline.stages_per_rank=1, or model.num_hidden_layers=8"
    ]
    # One stage a rank is no V.
    assert problems(4, parallel__pp=4, pipeline__schedule="zero_bubble_v") == [
        "pipeline.stages_per_rank: num_hidden_layers = 6 cannot be split into 4 * 2 = 8 stages; "
        "at most 6 stages, one layer each; 8 stages; pipeline.schedule=1f1b, or model.num_hidden_layers=8"
    ]


@pytest.mark.parametrize(
    ("settings", "schedule", "hint"),
    [
        ({"reshard_after_forward": "true"}, "zero_bubble_h1", "1f1b, or parallel.reshard_after_forward=null"),
        ({"reduce_gradients": "micro_batch"}, "zero_bubble_v", "interleaved_1f1b, or parallel.reduce_gradients=step"),
    ],
)
def test_split_backwards_of_weights_gathered_for_each_use(problems, settings, schedule, hint) -> None:
    parallel = {f"parallel__{name}": value for name, value in settings.items()}
    (problem,) = problems(4, parallel__pp=2, pipeline__schedule=schedule, **parallel)
    assert problem.startswith("pipeline.schedule: the schedule splits backwards (rank ")
    assert problem.endswith(f"; {schedule}; pipeline.schedule={hint}")
    assert problems(4, parallel__pp=2, pipeline__schedule="interleaved_1f1b", **parallel) == []


def test_unequal_micro_batches(problems) -> None:
    assert problems(2, parallel__pp=2, pipeline__microbatches=5) == [
        "pipeline.microbatches: the 12 samples of a rank do not split into equal micro-batches; a divisor of 12; 5; "
        "pipeline.microbatches=4 or 6"
    ]
    assert problems(2, parallel__pp=2, pipeline__microbatches=4, training__micro_batch_size=2) == [
        "pipeline.microbatches: 4 micro-batches of training.micro_batch_size = 2 are not the 12 samples of a rank; "
        "6, or only one of the two settings; 4; training.micro_batch_size=null"
    ]


def test_schedules_that_do_not_exist_or_would_hang(problems) -> None:
    (message,) = problems(2, parallel__pp=2, pipeline__schedule="1f2b")
    assert message.startswith("pipeline.schedule: unknown schedule; 1f1b, dualpipe_v, gpipe")
    assert problems(1, pipeline__schedule="1f2b") == [message]
    assert problems(2, parallel__pp=2, pipeline__stages_per_rank=2) == [
        "pipeline.stages_per_rank: pipeline schedule '1f1b' has 1 stages per rank, got 2; ; ; "
        "pipeline.stages_per_rank=null"
    ]
    hanging = Schedule.parse("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1F0 1B0 1B1")
    register_schedule("hanging", lambda ranks, stages, microbatches: hanging)
    assert problems(2, parallel__pp=2, pipeline__schedule="hanging", pipeline__microbatches=2) == [
        "pipeline.schedule: the schedule deadlocks: rank 0 waits to start 0B0; rank 1 waits to start 1F1; ; ; "
        "pipeline.schedule=1f1b"
    ]


def test_listed_layers(problems) -> None:
    assert problems(2, parallel__pp=2, pipeline__layers="[1,4]") == [
        "pipeline.layers: layers of 2 stages: expected 2 numbers >= 0 that add up to 6, such as [3, 3], got [1, 4], "
        "which add up to 5; ; ; "
    ]


def test_models_that_cannot_be_split(problems) -> None:
    assert problems(2, parallel__pp=2, model="{name: tiny}") == [
        "parallel.pp: model 'tiny' has no num_hidden_layers, and cannot be split into stages; ; ; "
    ]
