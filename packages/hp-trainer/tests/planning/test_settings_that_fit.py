"""Settings that would make a layout fit: each is planned again as an option, and each is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_trainer.cli import main
from hp_trainer.cli.plan import load_for_planning
from hp_trainer.launch import platforms
from hp_trainer.models.recomputation import KINDS
from hp_trainer.parallel import ParallelDims
from hp_trainer.planning import find_device, plan_step
from hp_trainer.planning.advice import possible_changes
from hp_trainer.training.activation_budget import plan_activations

YAML = """\
model: {vocab_size: 512, hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 4,
        head_dim: 16, intermediate_size: 128}
data: {path: none.txt}
training: {steps: 1, global_batch_size: 16, sequence_length: 64}
"""
OTHER_RESULTS = {
    "training.dtype",
    "training.reduce_dtype",
    "training.sequence_length",
    "training.ema.decay",
    "optimizer.name",
}

Plan = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Plan `run.yaml` with a device's memory in bytes and options, without any platform: (exit code, JSON)."""
    (tmp_path / "run.yaml").write_text(YAML)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platforms, "installed_platforms", lambda: [])

    def planned(memory: float, *options: str) -> tuple[int, dict[str, Any]]:
        code = main(("plan", "run.yaml", f"--device-memory={int(memory)}B", "--json", *options))
        return code, json.loads(capsys.readouterr().out)

    return planned


def options_of(change: dict[str, Any]) -> list[str]:
    return [f"--{path}={text}" for path, text in change["settings"].items()]


CASES = {
    "one rank": (16 * 2**20, ["--world-size=1"]),
    "pipeline": (3.8 * 2**20, ["--world-size=4", "--parallel.pp=2", "--pipeline.schedule=gpipe"]),
    "micro-batches of a pipeline": (
        3.3 * 2**20,
        ["--world-size=4", "--parallel.pp=2", "--training.micro_batch_size=4", "--pipeline.microbatches=2"],
    ),
    "gradients": (2.5 * 2**20, ["--world-size=4", "--training.micro_batch_size=1", "--training.dtype=bfloat16"]),
    "averaged": (6.3 * 2**20, ["--world-size=4", "--training.ema.decay=0.9", "--training.offload_optimizer=true"]),
    "in two": (4.7 * 2**20, ["--world-size=1"]),
    "every second block": (12 * 2**20, ["--world-size=1", "--training.recompute=full", "--training.recompute_every=2"]),
    "too large a budget": (13 * 2**20, ["--world-size=1", "--training.activation_budget=20MiB"]),
}


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_told_to_fit_is_planned_so(plan: Plan, name: str) -> None:
    memory, options = CASES[name]
    code, result = plan(memory, *options)
    changes = result["would_fit"]
    assert (code, result["fits"]) == (1, False)
    assert changes
    for change in changes:
        code, changed = plan(memory, *options, *options_of(change))
        assert code == 0, change
        assert changed["memory"][changed["peak_rank"]]["total"] == change["memory"] <= memory
        assert changed["seconds"]["total"] == change["seconds"]
        assert changed["layout"] == result["layout"]
        assert bool(OTHER_RESULTS & set(change["settings"])) == (change["other_results"] is not None)
    same = [change["seconds"] for change in changes if change["other_results"] is None]
    assert same == sorted(same)
    assert all(change["other_results"] for change in changes[len(same) :])


def test_two_settings_are_named_where_none_is_enough(plan: Plan) -> None:
    _, result = plan(4.7 * 2**20, "--world-size=1")
    assert len(result["would_fit"]) > 2
    for change in result["would_fit"]:
        options = options_of(change)
        assert len(options) == 2
        for option in options:
            assert plan(4.7 * 2**20, "--world-size=1", option)[0] == 1


def test_pairs_are_named_beside_single_settings_that_change_results(plan: Plan) -> None:
    long = ["--training.micro_batch_size=1", "--training.sequence_length=1024", "--model.vocab_size=4096"]
    _, result = plan(57 * 2**20, "--world-size=1", *long)
    single = [each for each in result["would_fit"] if len(each["settings"]) == 1]
    pairs = [each for each in result["would_fit"] if len(each["settings"]) == 2]
    assert single
    assert all(each["other_results"] for each in single)
    assert pairs
    assert not any(each["other_results"] for each in pairs)


def test_what_fits_needs_no_change(plan: Plan) -> None:
    assert plan(2**30, "--world-size=1")[1]["would_fit"] == []


def test_settings_that_hold_already_or_cannot_are_not_named(plan: Plan) -> None:
    def named(memory: float, *options: str) -> set[str]:
        return {path for each in plan(memory, *options)[1]["would_fit"] for path in each["settings"]}

    assert "training.recompute" in named(16 * 2**20, "--world-size=1")
    compiled = plan(16 * 2**20, "--world-size=1", "--training.compile=true")[1]["would_fit"]
    assert {"training.recompute": "selective"} not in [each["settings"] for each in compiled]
    full = named(12 * 2**20, "--world-size=1", "--training.recompute=full", "--training.micro_batch_size=16")
    assert not any(path.startswith(("training.recompute", "training.activation")) for path in full)
    assert "training.offload_optimizer" in named(9.9 * 2**20, "--world-size=1", "--training.recompute=full")
    coded = named(9.9 * 2**20, "--world-size=1", "--training.recompute=full", "--optimizer=adamw_8bit")
    assert not coded & {"training.offload_optimizer", "optimizer.name"}


@pytest.mark.parametrize(
    ("part", "layout"),
    [
        (0.7, ["--world-size=2", "--parallel.pp=2"]),
        (0.97, ["--world-size=1", "--training.activation_budget=2MiB"]),  # itself too small
    ],
)
def test_budgets_that_no_choice_keeps_are_not_named(plan: Plan, part: float, layout: list[str]) -> None:
    result = plan(2**40, *layout)[1]["memory"]
    named = plan(part * max(each["total"] for each in result), *layout)[1]["would_fit"]
    assert named
    for change in named:
        settings = [option.removeprefix("--").split("=", 1) for option in (*layout[1:], *options_of(change))]
        config = load_for_planning("run.yaml", [(path, text) for path, text in settings]).config
        if config.training.activation_budget is not None:
            dims = ParallelDims.from_config(config.parallel, int(layout[0][-1]))
            plan_activations(config, dims, KINDS)  # raises where no choice does


def test_the_counts_of_experts_by_micro_batch_are_told(plan: Plan) -> None:
    experts = ["--model.num_experts=4", "--model.capacity_factor=1.0"]
    _, result = plan(16 * 2**20, "--world-size=1", *experts)
    smaller = [each for each in result["would_fit"] if "training.micro_batch_size" in each["settings"]]
    assert smaller
    assert all("per micro-batch" in each["other_results"] for each in smaller)


def test_split_backwards_are_not_tried_for_long_pipelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(YAML)
    config = load_for_planning(str(tmp_path / "run.yaml"), [("parallel.pp", "2")]).config
    plan = plan_step(config, ParallelDims.from_config(config.parallel, 4, None), find_device("H100"))

    def tried() -> set[str]:
        return {text for each in possible_changes(plan) for path, text in each.settings if path == "pipeline.schedule"}

    assert {"gpipe", "interleaved_1f1b", "zero_bubble_v"} <= tried()
    monkeypatch.setattr("hp_trainer.planning.advice.MAX_SPLIT_RANKS", 1)
    # Other tests register schedules of their own.
    assert tried() >= {"gpipe", "interleaved_1f1b"}
    assert not tried() & {"dualpipe_v", "interleaved_zero_bubble", "zero_bubble_h1", "zero_bubble_v"}
    main(["plan", str(tmp_path / "run.yaml"), "--world-size=4", "--parallel.pp=2", "--device-memory=1MiB"])
    out = capsys.readouterr().out
    assert "not tried on so many pipeline ranks: pipeline.schedule = dualpipe_v, interleaved_zero_bubble, zero" in out
