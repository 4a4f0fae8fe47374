"""The published JSON Schema: it is up to date, accepts what the loader accepts, and finds what editors should find."""

from __future__ import annotations

import json
from pathlib import Path

import pluggy
import pytest
import yaml

from hp_dtensor.platform.plugins import PROJECT_NAME
from hp_trainer import hookspecs, plugins
from hp_trainer.config import dump_config, json_schema, parse_config
from hp_trainer.config.yaml_tree import parse_yaml, plain
from hp_trainer.exceptions import ConfigError
from hp_trainer.registries import Registries, fill_registries

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "docs" / "config.schema.json"
EXAMPLES = [path for path in sorted(ROOT.glob("examples/**/*.yaml")) if path.parent.name != "clusters"]


@pytest.fixture(scope="module")
def components() -> Registries:
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    manager.register(plugins, name="hp_trainer")
    return fill_registries(manager)


@pytest.fixture(scope="module")
def errors_of(components):
    """Return a function that returns the paths of what the schema rejects in a YAML text."""
    validator = jsonschema.Draft202012Validator(json_schema(components))
    validator.check_schema(validator.schema)

    def errors_of(text: str) -> list[str]:
        # As editors read it: variables are not substituted.
        tree, _ = parse_yaml(text, "run.yaml")
        found = json.loads(json.dumps(plain(tree)))
        return [error.json_path for error in validator.iter_errors(found)]

    return errors_of


@pytest.mark.skipif(not PUBLISHED.exists(), reason="the package is tested without the repository")
def test_the_published_schema_is_up_to_date(components) -> None:
    text = json.dumps(json_schema(components), indent=1) + "\n"
    assert text == PUBLISHED.read_text(), f"settings changed; where that is wanted, write the left side to {PUBLISHED}"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid_and_names_the_schema(errors_of, path: Path) -> None:
    text = path.read_text()
    assert errors_of(text) == []
    first = text.partition("\n")[0]
    assert (path.parent / first.removeprefix("# yaml-language-server: $schema=")).resolve() == PUBLISHED.resolve()


@pytest.mark.parametrize(
    "text",
    [
        "include: [base.yaml, more.yaml]\noptimizer: muon\nparallel:\n",
        "training: {steps: '${env:STEPS}', clip_norm: 1, micro_batch_size: null}",
        "model: {name: 'my_model.py:build', width: 48}\ndata: {sources: [a.txt, {path: b.txt, weight: 2}]}",
        "parameter_groups:\ndata: {sources: null, eval: null, path: a.txt}",
        "optimizer: {name: adamw_8bit, betas: [0.9, 0.95], block_size: 64}\nmodel: {from: directory}",
        "metrics: {trackers: [jsonl, {name: progress, interval_seconds: 2}]}\nparallel: {tp_plan: {'*.up': colwise}}",
    ],
)
def test_what_the_loader_accepts_is_valid(errors_of, text: str) -> None:
    assert errors_of(text) == []


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("trainin: {steps: 1}", "$"),
        ("training: {stpes: 1}", "$.training"),
        ("training: {steps: many}", "$.training.steps"),
        ("training: {steps: 0}", "$.training.steps"),
        ("training: {steps: 1.5}", "$.training.steps"),
        ("training: {compile: 1}", "$.training.compile"),
        ("training: {dtype: bfloat}", "$.training.dtype"),
        ("training: {ema: {decay: -1}}", "$.training.ema.decay"),
        ("launch: {cpu_ranks: 3000000000}", "$.launch.cpu_ranks"),
        ("platform: 3", "$.platform"),
        ("generate: {prompts: [a, 3]}", "$.generate.prompts[1]"),
        ("optimizer: {betas: [0.9]}", "$.optimizer.betas"),
        ("optimizer: {betas: [0.9, -1]}", "$.optimizer.betas[1]"),
        ("optimizer: {momentum: 0.9}", "$.optimizer"),
        ("optimizer: {name: muon, block_size: 64}", "$.optimizer"),
        ("optimizer: {name: adam}", "$.optimizer.name"),
        ("optimizer: adam", "$.optimizer"),
        ("model: {rope_scaling: {factor: 0.5}}", "$.model.rope_scaling.factor"),
        ("data: {sources: [{weight: 1}]}", "$.data.sources[0]"),
        ("metrics: {trackers: [{name: progress, seconds: 1}]}", "$.metrics.trackers[0]"),
        ("parallel: {tp_plan: {up: diagonal}}", "$.parallel.tp_plan"),
    ],
)
def test_faults_are_found_where_the_loader_finds_them(errors_of, components, text: str, path: str) -> None:
    assert set(errors_of(text)) == {path}
    with pytest.raises(ConfigError):
        parse_config(text, [("training.steps", "1")] if "steps" not in text else [], registered=components)


def test_the_resolved_configuration_is_valid(errors_of, components) -> None:
    text = "training: {steps: 1}\nmodel: {num_experts: 4}\ndata: {sources: [a.txt]}\noptimizer: {name: adafactor}"
    config = parse_config(text, registered=components).config
    resolved = dump_config(config)
    assert errors_of(resolved) == []
    assert yaml.safe_load(resolved)["optimizer"]["name"] == "adafactor"


def test_settings_have_help_defaults_and_bounds(components) -> None:
    schema = json_schema(components)
    seed = schema["properties"]["training"]["properties"]["seed"]
    assert seed["description"] == "seed of the initial weights and of the order of samples"
    assert (seed["default"], seed["anyOf"][0]) == (0, {"minimum": 0, "maximum": 2**63 - 1, "type": "integer"})
    assert schema["properties"]["training"]["additionalProperties"] is False
    assert set(schema["properties"]["optimizer"]["properties"]["name"]["anyOf"][0]["enum"]) == set(
        components.optimizers.names()
    )
