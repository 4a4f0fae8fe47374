"""Degrees of parallelism that a model or a layout has no use for are refused, not taken without a word."""

from __future__ import annotations

import pytest

from hp_trainer.config import parse_config
from hp_trainer.launch.preflight import layout_problems
from hp_trainer.registries import Registries

RUN = """\
platform: torch
model: {name: decoder}
data: {path: corpus.txt}
training: {steps: 1, global_batch_size: 8}
"""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [("parallel.ep", "2")],
            "parallel.ep: the model has no experts; parallel.ep=1",
        ),
        (
            [("parallel.ulysses_degree", "2")],
            "parallel.ulysses_degree: parallel.cp = 1, so sequences are not sharded; "
            "parallel.cp=2, or parallel.ulysses_degree=null",
        ),
    ],
)
def test_degrees_without_use(installed: Registries, settings: list[tuple[str, str]], message: str) -> None:
    config = parse_config(RUN, settings, registered=installed).config
    found = [f"{each.path}: {each.what}; {each.hint}" for each in layout_problems(config, 2)]
    assert found == [message]


def test_degrees_that_are_used_or_filled_in(installed: Registries) -> None:
    for settings in (
        [("parallel.ep", "2"), ("model.num_experts", "4")],
        [("parallel.ep", "-1")],
        [("parallel.ulysses_degree", "2"), ("parallel.cp", "2")],
        [("parallel.ulysses_degree", "1")],
    ):
        config = parse_config(RUN, settings, registered=installed).config
        assert list(layout_problems(config, 2)) == []
