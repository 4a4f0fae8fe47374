"""One YAML file, read strictly: every mistake is reported at once, with its place and what to write instead."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from hp_trainer.config import (
    AdamWConfig,
    Component,
    LoadedConfig,
    TrainerConfig,
    TrainingConfig,
    dump_config,
    load_config,
    parse_config,
)
from hp_trainer.config.sections import Text, adapter
from hp_trainer.data import TextDataConfig
from hp_trainer.exceptions import ConfigError
from hp_trainer.plugins import registries
from hp_trainer.registries import Registries

MINIMAL = """\
model:
  name: tiny
training:
  steps: 20
"""


@pytest.fixture
def parse(registered: Registries):
    def parse(text: str, *overrides: tuple[str, str]) -> LoadedConfig:
        return parse_config(text, overrides, source="run.yaml", registered=registered)

    return parse


@pytest.fixture
def refusal(parse):
    """The message that refuses a configuration, without its first line."""

    def refusal(text: str, *overrides: tuple[str, str]) -> str:
        with pytest.raises(ConfigError) as caught:
            parse(text, *overrides)
        title, _, rest = str(caught.value).partition("\n")
        count = len(caught.value.problems)
        assert title == f"run.yaml: {count} problem{'s' if count > 1 else ''}"
        return rest

    return refusal


def test_what_is_not_given_has_its_default(parse) -> None:
    config = parse(MINIMAL).config
    assert (config.training.steps, config.training.seed, config.parallel.dp_shard) == (20, 0, -1)
    assert (config.model.name, config.model.options.hidden_size) == ("tiny", 64)
    assert config.data == Component("text", TextDataConfig())
    assert [tracker.name for tracker in config.metrics.trackers] == ["jsonl", "progress", "loss_curve", "expert_loads"]


def test_a_named_section_has_the_schema_of_what_it_names(parse) -> None:
    config = parse(MINIMAL + "data: {name: text, path: corpus.txt}\noptimizer: {lr: 1e-3}\n").config
    assert Path(config.data.options.path) == Path("corpus.txt").absolute()
    assert config.optimizer.name == "adamw"
    assert config.optimizer.options.lr == 1e-3  # YAML 1.1 alone would read this as text


def test_a_list_of_components_takes_names_and_sections(parse) -> None:
    text = MINIMAL + "metrics:\n  trackers: [jsonl, {name: progress, interval_seconds: 2}]\n"
    trackers = parse(text).config.metrics.trackers
    assert [tracker.name for tracker in trackers] == ["jsonl", "progress"]
    assert trackers[1].options.interval_seconds == 2.0


def test_relative_paths_are_those_of_the_file_and_of_the_command_line(tmp_path, registered, monkeypatch) -> None:
    (tmp_path / "configs").mkdir()
    file = tmp_path / "configs" / "run.yaml"
    file.write_text(MINIMAL + "data: {path: texts/a.txt}\ncheckpoint: {folder: /far/away}\n")
    monkeypatch.chdir(tmp_path)
    config = load_config("configs/run.yaml", registered=registered).config
    assert config.data.options.path == str(tmp_path / "configs" / "texts" / "a.txt")
    assert config.checkpoint.folder == "/far/away"
    config = load_config(file, [("data.path", "b.txt"), ("checkpoint.folder", "saved")], registered=registered).config
    assert (config.data.options.path, config.checkpoint.folder) == (str(tmp_path / "b.txt"), str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("line", "expected_message"),
    [
        ("data: {path: ''}", "data.path: empty\n    expected: a path"),
        ("optimizer: {lr: .inf}", "out of range\n    expected: a number finite and > 0\n    got: .inf"),
        ("optimizer: {lr: 1e30}", "out of range\n    expected: a number > 0 and <= 1e+12\n    got: 1e30"),
        ("optimizer: {eps: .nan}", "out of range\n    expected: a number finite and > 0\n    got: .nan"),
        ("optimizer: {betas: [0.9, .inf]}", "a number finite and >= 0 and < 1\n    got: .inf"),
        (f"model: {{name: tiny, hidden_size: {10**30}}}", f">= 1 and <= 2147483647\n    got: {10**30}"),
        ("model: {name: tiny, hidden_size: 1e30}", "wrong type"),
        (f"model: {{name: tiny, hidden_size: {'9' * 6000}}}", f"an integer\n    got: '{'9' * 57}...' (number)"),
        (f"optimizer: {{lr: {'9' * 400}}}", f"a number finite and > 0\n    got: {'9' * 57}..."),
        ("optimizer: {lr: 0x_}", "a number\n    got: '0x_' (text)"),
        ("parallel: {ep: !!int abc}", "an integer\n    got: 'abc' (text)"),
        ("parallel: {ep: 0}", "parallel.ep: out of range\n    expected: -1 or an integer >= 1\n    got: 0"),
        ("parallel: {ep: -1, expert_mesh: peer}", "parallel.ep: -1 needs expert_mesh = folded"),
        ("launch: {timeout_seconds: 3}", "out of range\n    expected: a number >= 10\n    got: 3"),
        (f"generate: {{seed: {2**63}}}", f">= 0 and <= {2**63 - 1}\n    got: {2**63}"),
    ],
)
def test_values_that_would_reach_the_ranks_before_they_fail_are_refused(
    refusal, line: str, expected_message: str
) -> None:
    assert expected_message in refusal(f"training: {{steps: 4}}\n{line}\n")


def test_a_misspelt_key_names_the_right_one(refusal) -> None:
    assert refusal(MINIMAL + "lr_schedule:\n  warmup_step: 5\n") == (
        "run.yaml:6: lr_schedule.warmup_step: unknown key\n"
        "    expected: one of decay_steps, final_fraction, kind, warmup_steps\n"
        "    try: lr_schedule.warmup_steps"
    )


def test_a_misspelt_section_names_the_right_one(refusal) -> None:
    assert refusal(MINIMAL + "paralel:\n  tp: 2\n").endswith("    try: parallel")


def keys_of(schema: type) -> str:
    return ", ".join(sorted(field.name for field in fields(schema)))


def test_a_key_in_the_wrong_section_names_the_right_section(refusal) -> None:
    assert refusal(MINIMAL + "  lr: 0.1\n") == (
        f"run.yaml:5: training.lr: unknown key\n    expected: one of {keys_of(TrainingConfig)}\n    try: optimizer.lr"
    )


def test_options_of_a_component_are_checked_against_its_own_schema(refusal) -> None:
    assert refusal("model:\n  name: tiny\n  hiden_size: 8\ntraining: {steps: 1}\n") == (
        "run.yaml:3: model.hiden_size: unknown key\n"
        "    expected: one of hidden_size, num_attention_heads, num_experts, num_key_value_heads\n"
        "    try: model.hidden_size"
    )


def test_an_unknown_name_is_told_with_the_nearest_one(refusal) -> None:
    assert refusal("model: {name: tinny}\ntraining: {steps: 1}\noptimizer:\n  name: adam\n") == (
        "run.yaml:1: model.name: unknown model\n"
        "    expected: decoder, tiny\n"
        "    got: 'tinny'\n"
        "    try: tiny\n"
        "run.yaml:4: optimizer.name: unknown optimizer\n"
        "    expected: adafactor, adamw, adamw_8bit, lion, muon, sgd\n"
        "    got: 'adam'\n"
        "    try: adamw"
    )


def test_what_must_be_given_is_asked_for(refusal) -> None:
    assert refusal("model: {name: tiny}\n") == (
        "run.yaml: training.steps: missing\n"
        "    expected: an integer: total number of optimizer steps\n"
        "    try: --training.steps=..."
    )
    assert refusal("model: {name: tiny}\ntraining:\n  seed: 1\n").startswith("run.yaml:3: training.steps: missing")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed: fifty", "wrong type\n    expected: an integer\n    got: 'fifty' (text)"),
        ('seed: "50"', "wrong type\n    expected: an integer\n    got: '50' (text)\n    try: 50 without quotes"),
        ("seed: 1.5", "wrong type\n    expected: an integer\n    got: '1.5' (number)"),
        ("seed: true", "wrong type\n    expected: an integer\n    got: 'true' (true or false)"),
        ("seed: null", "wrong type\n    expected: an integer\n    got: null"),
        ("seed: [1]", "wrong type\n    expected: an integer\n    got: a list of 1"),
        ("seed: {a: 1}", "wrong type\n    expected: an integer\n    got: a section"),
        ("seed: 12:30", "wrong type\n    expected: an integer\n    got: '12:30' (text)"),
        ("seed: -1", "out of range\n    expected: an integer >= 0\n    got: -1"),
        ("clip_norm: 0", "out of range\n    expected: a number > 0\n    got: 0"),
        ("clip_norm: small", "wrong type\n    expected: a number or null\n    got: 'small' (text)"),
        (
            "dtype: bfloat",
            "unknown value\n    expected: float32, bfloat16 or float16\n    got: 'bfloat' (text)\n    try: bfloat16",
        ),
    ],
)
def test_a_wrong_value_says_what_was_expected(refusal, line: str, message: str) -> None:
    name = line.partition(":")[0]
    assert refusal(f"{MINIMAL}  {line}\n") == f"run.yaml:5: training.{name}: {message}"


def test_text_that_yaml_takes_for_something_else_needs_quotes(refusal) -> None:
    assert refusal(MINIMAL + "data:\n  path: 2024\n") == (
        "run.yaml:6: data.path: wrong type\n"
        "    expected: text or null\n"
        "    got: '2024' (integer)\n"
        '    try: "2024" in quotes'
    )


def test_lists_are_checked_item_by_item(refusal) -> None:
    assert refusal(MINIMAL + "optimizer:\n  betas: [0.9]\n") == (
        "run.yaml:6: optimizer.betas: wrong length\n    expected: a list of 2: a number, a number\n    got: a list of 1"
    )
    assert refusal(MINIMAL + "generate:\n  prompts: [a, 3]\n") == (
        "run.yaml:6: generate.prompts[1]: wrong type\n"
        "    expected: text\n"
        "    got: '3' (integer)\n"
        '    try: "3" in quotes'
    )


def test_a_key_given_twice_is_refused_with_both_lines(refusal) -> None:
    assert refusal(MINIMAL + "  seed: 1\n  seed: 2\n") == (
        "run.yaml:6: training.seed: given twice\n    got: run.yaml:5 and run.yaml:6"
    )


def test_a_section_must_be_one(refusal) -> None:
    assert refusal("model: {name: tiny}\ntraining: 5\n") == (
        "run.yaml:2: training: wrong type\n    expected: a section\n    got: '5' (integer)"
    )
    assert refusal("- a\n") == "run.yaml: not a section\n    expected: key: value lines"


def test_settings_of_one_section_are_checked_together(refusal) -> None:
    assert refusal(MINIMAL + "  global_batch_size: 8\n  micro_batch_size: 3\n") == (
        "run.yaml:6: training.micro_batch_size: does not divide global_batch_size = 8\n"
        "    expected: a divisor of 8\n"
        "    got: 3"
    )


def test_all_problems_come_at_once(refusal) -> None:
    text = refusal("model: {name: tiny, x: 1}\ntraining: {seed: a}\nplatfrom: torch\nlaunch: {local_ranks: 0}\n")
    paths = [line.split(": ")[1] for line in text.splitlines() if line.startswith("run.yaml")]
    assert paths == ["platfrom", "model.x", "training.steps", "training.seed", "launch.local_ranks"]


@pytest.mark.parametrize("text", ["a: [1\n", "a: b: c\n", "\ta: 1\n", "a: 'x\n"])
def test_text_that_is_not_yaml_is_told_with_its_line(refusal, text: str) -> None:
    assert refusal(text).startswith("run.yaml:")
    assert ": not YAML: " in refusal(text)


def test_nothing_in_a_file_can_run_code(refusal, tmp_path: Path) -> None:
    target = tmp_path / "made"
    text = f"data:\n  path: !!python/object/apply:os.mkdir ['{target}']\n"
    assert "tags are not supported" in refusal(MINIMAL + text)
    assert not target.exists()


BILLION = "\n".join(
    ["  x0: &x0 [a, a, a, a, a, a, a, a, a]"]
    + [f"  x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 9)}]" for n in range(1, 10)]
)


@pytest.mark.parametrize(
    ("text", "expected_message"),
    [
        (f"generate:\n{BILLION}\n", "more than 20,000 values, counting each use of an alias (*name)"),
        ("generate: " + "[" * 60 + "]" * 60, "nested more than 50 levels deep"),
        ("generate: " + "[" * 100_000, "nested more than 50 levels deep"),
        ("#" * 2**21, "longer than 1,048,576 characters"),
    ],
    ids=["aliases of aliases", "deep", "very deep", "long"],
)
@pytest.mark.timeout(120)  # aliases of aliases, all written out, would take longer than anybody waits
def test_texts_that_would_fill_the_memory_are_refused_at_once(refusal, text: str, expected_message: str) -> None:
    assert expected_message in refusal(text)


def test_a_value_that_contains_itself_is_refused(refusal) -> None:
    assert "contains itself" in refusal(MINIMAL + "generate:\n  prompts: &a [*a]\n")


def test_aliases_are_read(parse) -> None:
    config = parse("model: {name: tiny}\ntraining: {steps: &n 7, seed: *n}\n").config
    assert config.training.seed == 7


def test_an_override_takes_precedence_and_makes_missing_sections(parse) -> None:
    config = parse(
        MINIMAL,
        ("training.steps", "50"),
        ("parallel.tp", "2"),
        ("platform", "mindspore"),
        ("optimizer.lr", "3e-4"),
        ("optimizer.betas", "[0.8, 0.9]"),
        ("training.clip_norm", "null"),
    ).config
    assert (config.training.steps, config.parallel.tp, config.platform) == (50, 2, "mindspore")
    assert (config.optimizer.options.lr, config.optimizer.options.betas) == (3e-4, (0.8, 0.9))
    assert config.training.clip_norm is None


def test_an_override_may_fill_a_section_that_is_null(parse) -> None:
    assert parse(MINIMAL + "parallel:\n", ("parallel.tp", "2")).config.parallel.tp == 2


def test_text_of_an_override_needs_no_quotes(parse) -> None:
    config = parse(MINIMAL, ("data.path", "a: {b"), ("run.folder", "2024")).config
    assert (Path(config.data.options.path).name, config.run.folder) == ("a: {b", "2024")


def test_a_wrong_override_names_the_option(refusal) -> None:
    assert refusal(MINIMAL, ("training.stpes", "5"), ("training.steps", "many"), ("seed", "1")) == (
        "--seed: seed: unknown key\n"
        f"    expected: one of {keys_of(TrainerConfig)}\n"
        "    try: training.seed\n"
        "--training.stpes: training.stpes: unknown key\n"
        f"    expected: one of {keys_of(TrainingConfig)}\n"
        "    try: training.steps\n"
        "--training.steps: training.steps: wrong type\n"
        "    expected: an integer\n"
        "    got: 'many' (text)"
    )


def test_an_override_below_a_value_is_refused(refusal) -> None:
    assert refusal(MINIMAL, ("training.steps.more", "5")) == (
        "--training.steps.more: training.steps.more: training.steps is a value, not a section\n"
        "    got: a value at run.yaml:4"
    )


def test_an_override_that_is_not_yaml_is_told(refusal) -> None:
    assert "--training.steps: training.steps: not YAML" in refusal(MINIMAL, ("training.steps", "[1"))


def test_the_resolved_configuration_reads_back_equal(parse) -> None:
    config = parse(
        MINIMAL,
        ("data.path", "yes"),
        ("optimizer.eps", "1e-8"),
        ("generate.prompts", '["a: b", "", "\\u00e9\\n", "null", "3"]'),
        ("metrics.trackers", "[{name: progress, interval_seconds: 0.5}]"),
        ("model.num_experts", "8"),
    ).config
    assert parse(dump_config(config)).config == config


@pytest.mark.parametrize("text", ["1e30", "-1E-5", "1e", "e5", "12:30", "null", "0x1f", ".inf", "yes"])
def test_a_text_that_looks_like_a_number_is_read_back_as_text(parse, text: str) -> None:
    config = parse(MINIMAL, ("generate.prompts", f"['{text}']")).config
    assert config.generate.prompts == (text,)
    assert parse(dump_config(config)).config == config


def test_the_place_of_a_value_is_known_after_loading(parse) -> None:
    loaded = parse(MINIMAL, ("parallel.tp", "2"))
    assert loaded.sources["training.steps"] == "run.yaml:4"
    assert loaded.sources["parallel.tp"] == "--parallel.tp"


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, registered: Registries) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(ConfigError) as caught:
        load_config(path, registered=registered)
    assert str(caught.value) == (
        f"{path}: 1 problem\n{path}: cannot be read\n    expected: a YAML file\n    got: No such file or directory"
    )
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(path, registered=registered)


def test_configurations_are_frozen(parse) -> None:
    config: TrainerConfig = parse(MINIMAL).config
    with pytest.raises(AttributeError):
        config.training.steps = 5  # type: ignore[misc]


def test_batches_may_be_given_in_tokens(registered: Registries) -> None:
    text = "training: {steps: 1, sequence_length: 8, global_batch_tokens: 64, micro_batch_tokens: 16}"
    config = parse_config(text, registered=registered).config
    assert (config.training.global_batch_size, config.training.micro_batch_size) == (8, 2)
    assert parse_config(dump_config(config), registered=registered).config == config
    with pytest.raises(ConfigError, match=r"training\.global_batch_tokens: not a multiple of sequence_length = 8"):
        parse_config("training: {steps: 1, sequence_length: 8, global_batch_tokens: 65}", registered=registered)


def test_a_section_derived_by_a_plain_dataclass_is_refused() -> None:
    """Its inherited settings would have pydantic's field objects as defaults."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Derived(AdamWConfig):
        momentum: float = 0.5

    with pytest.raises(TypeError, match="Derived derives from a section: declare it by @section"):
        Derived()
    again = pickle.loads(pickle.dumps(AdamWConfig(lr=0.5)))
    assert dataclasses.replace(again, weight_decay=0.25).lr == copy.deepcopy(again).lr == 0.5


@dataclasses.dataclass(frozen=True)
class Inner:
    """Options of a plugin within its options, which may contain themselves."""

    sizes: list[int]
    next: Inner | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner


def test_plain_dataclasses_and_lists_of_plugins_are_validated_strictly() -> None:
    value = {"inner": {"sizes": (1, 2), "next": {"sizes": (3,)}}}
    assert adapter(Outer).validate_python(value) == Outer(Inner([1, 2], Inner([3])))
    for wrong in ({"sizes": ("1",)}, {"sizes": (1,), "other": 2}, {"sizes": (1,), "next": {"sizes": (1.5,)}}):
        with pytest.raises(ValidationError):
            adapter(Outer).validate_python({"inner": wrong})


def test_an_empty_entry_in_a_list_of_sections_is_refused(refusal) -> None:
    expected_message = refusal(MINIMAL + "optimizer: {parameter_groups: [null, {lr_factor: 0.0}]}\n")
    assert "optimizer.parameter_groups" in expected_message


def test_characters_that_no_file_name_may_have_are_refused(refusal) -> None:
    for escape in ("\\0", "\\ud800"):
        assert "zero character or half of a surrogate pair" in refusal(MINIMAL + f'include: "a{escape}b"\n')


def test_more_layers_than_any_model_has_are_refused() -> None:
    options = registries().models.options("decoder")
    with pytest.raises(ValidationError, match="less than or equal to 10000"):
        options(num_hidden_layers=10**9)


def test_every_number_below_the_smallest_is_reported(refusal) -> None:
    message = refusal(MINIMAL + "optimizer: {lr: 1e-40, eps: 1e-40}\n")
    assert "optimizer.lr" in message
    assert "optimizer.eps" in message


def test_a_text_of_a_file_can_be_pickled() -> None:
    again = pickle.loads(pickle.dumps(Text("a", Path("b"))))
    assert (again, again.folder) == ("a", Path("b"))
