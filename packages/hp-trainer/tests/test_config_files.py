"""Configurations of several files and of the environment: what is merged, where paths count from, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hp_trainer.config import LoadedConfig, dump_config, load_config, parse_config
from hp_trainer.exceptions import ConfigError
from hp_trainer.registries import Registries

BASE = """\
model: {name: tiny, hidden_size: 32}
training: {steps: 4, seed: 7}
optimizer: {lr: 0.5, weight_decay: 0.0}
"""


@pytest.fixture
def load(tmp_path: Path, registered: Registries) -> Callable[..., LoadedConfig]:
    def load(text: str, overrides=(), **others: str) -> LoadedConfig:
        for name, content in others.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".yaml").write_text(content)
        (tmp_path / "run.yaml").write_text(text)
        return load_config(tmp_path / "run.yaml", overrides, registered=registered)

    return load


def test_own_settings_override_included_ones(load) -> None:
    config = load("include: base.yaml\ntraining: {steps: 9}\n", base=BASE).config
    assert (config.training.steps, config.training.seed, config.model.options.hidden_size) == (9, 7, 32)


def test_later_files_override_earlier_ones_and_the_command_line_all(load) -> None:
    text = "include: [base.yaml, more.yaml]\n"
    more = "training: {steps: 5}\noptimizer: {lr: 0.25}\n"
    config = load(text, [("optimizer.lr", "0.125")], base=BASE, more=more).config
    assert (config.training.steps, config.training.seed, config.optimizer.options.lr) == (5, 7, 0.125)


def test_another_component_leaves_the_options_of_the_included_one_behind(load) -> None:
    base = BASE + "metrics: {trackers: [jsonl]}\n"
    with pytest.raises(ConfigError, match="unknown model"):
        load("include: base.yaml\nmodel: {name: huge}\n", base=base)
    config = load("include: base.yaml\nmodel: {name: tiny}\n", base=base).config
    assert config.model.options.hidden_size == 32
    assert [each.name for each in config.metrics.trackers] == ["jsonl"]


def test_paths_count_from_the_file_in_which_they_stand(load, tmp_path) -> None:
    config = load("include: parts/base.yaml\n", parts__base=BASE + "data: {path: corpus}\n").config
    assert config.data.options.path == str(tmp_path / "parts" / "corpus")


def test_included_files_include_others(load) -> None:
    config = load("include: a.yaml\n", a="include: parts/b.yaml\n", parts__b=BASE).config
    assert config.training.seed == 7


def test_problems_name_the_included_file_and_line(load, tmp_path) -> None:
    with pytest.raises(ConfigError) as refused:
        load("include: base.yaml\n", base="model: {name: tiny}\ntraining:\n  stepps: 4\n")
    assert f"{tmp_path / 'base.yaml'}:3: training.stepps: unknown key" in str(refused.value)


@pytest.mark.parametrize(
    ("include", "message"),
    [
        ("missing.yaml", "missing.yaml cannot be read"),
        ("run.yaml", "includes itself"),
        ("circle.yaml", "includes itself"),
        ("[base.yaml, 3]", "expected: a YAML file, or a list of them"),
        ("{base: yaml}", "expected: a YAML file, or a list of them"),
        ("broken.yaml", "not YAML"),
        ("list.yaml", "not a section"),
    ],
)
def test_includes_that_cannot_be_are_told(load, include: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"include|not YAML|not a section") as refused:
        load(f"include: {include}\n", base=BASE, circle="include: circle.yaml\n", broken="a: [\n", list="- a\n")
    assert message in str(refused.value)


def test_variables_are_read_as_if_they_stood_in_the_file(load, monkeypatch) -> None:
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.setenv("PART", "b")
    monkeypatch.delenv("SEED", raising=False)
    text = "model: {name: tiny}\ntraining: {steps: '${env:NONE:-x}'}\n"
    with pytest.raises(ConfigError, match=r"training.steps"):
        load(text)
    training = "training:\n  steps: ${env:STEPS}\n  seed: ${env:SEED:-5}\n"
    text = f"model: {{name: tiny}}\n{training}data:\n  path: a/${{env:PART}}/c\n"
    config = load(text).config
    assert (config.training.steps, config.training.seed) == (12, 5)
    assert config.data.options.path.endswith("/a/b/c")


def test_a_variable_that_is_not_set_is_told_with_its_line(load, monkeypatch) -> None:
    monkeypatch.delenv("STEPS", raising=False)
    with pytest.raises(ConfigError, match=r"run.yaml:2: training.steps: the environment variable STEPS is not set"):
        load("model: {name: tiny}\ntraining: {steps: '${env:STEPS}'}\n")


def test_only_references_to_the_environment_are_replaced(load, monkeypatch, registered) -> None:
    monkeypatch.setenv("HOME", "/elsewhere")
    text = "model: {name: tiny}\ntraining: {steps: 1}\ngenerate: {prompts: ['$HOME ${HOME} $${env:HOME}']}\n"
    config = load(text).config
    assert config.generate.prompts == ("$HOME ${HOME} ${env:HOME}",)
    assert parse_config(dump_config(config), registered=registered).config == config
