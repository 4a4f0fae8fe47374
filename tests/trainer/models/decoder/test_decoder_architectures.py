"""The examples of architectures: each is what it is called, and trains alike on both frameworks in any layout."""

from __future__ import annotations

import pytest
from architecture_losses import ARCHITECTURES, EXAMPLES, REFERENCE, assert_as_on_one_rank_of_torch
from training_runs import Lab

from hp_trainer.config import load_config
from hp_trainer.models.hugging_face import ARCHITECTURES as KNOWN
from hp_trainer.models.hugging_face.export import find_architecture
from hp_trainer.plugins import registries


def test_every_architecture_has_an_example():
    assert ARCHITECTURES == sorted(KNOWN) == sorted(REFERENCE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_example_is_the_architecture_that_it_is_called(name):
    config = load_config(EXAMPLES / f"{name}.yaml", registered=registries()).config
    assert find_architecture(config.model.options).model_type == name


# All architectures in all layouts, twenty steps each, are in proof_architectures.py.
@pytest.mark.parametrize(
    ("name", "layout"),
    [("gemma2", "1 rank"), ("gpt_oss", "2 ranks, tensor parallel"), ("deepseek_v3", "2 ranks, sharded")],
)
def test_the_first_losses_are_those_of_one_rank_on_torch(lab: Lab, name, layout):
    if lab.platform.name != "torch" and name == "deepseek_v3":
        pytest.skip("two simulated ranks take most of a minute there: one of the two")
    assert_as_on_one_rank_of_torch(lab, name, layout, steps=3 if lab.platform.name == "torch" else 2)
