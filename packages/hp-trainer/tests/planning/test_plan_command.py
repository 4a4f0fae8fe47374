"""`hp-train plan` and `hp-train layouts` without any platform: plans, searches, and bad input refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_trainer.cli import main
from hp_trainer.launch import platforms

YAML = """\
model: {vocab_size: 512, hidden_size: 64, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 4,
        head_dim: 16, intermediate_size: 128}
data: {path: none.txt}
training: {steps: 1, global_batch_size: 16, sequence_length: 64}
"""
LARGE = """\
model: {vocab_size: 128256, hidden_size: 8192, num_hidden_layers: 80, num_attention_heads: 64, num_key_value_heads: 8,
        head_dim: 128, intermediate_size: 28672}
data: {path: none.txt}
training: {steps: 1, global_batch_size: 131072, micro_batch_size: 1, sequence_length: 8192, dtype: bfloat16,
           recompute: full}
parallel: {tp: 8}
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command beside `run.yaml` and `large.yaml`, as if no platform were installed; (code, output, errors)."""
    (tmp_path / "run.yaml").write_text(YAML)
    (tmp_path / "large.yaml").write_text(LARGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platforms, "installed_platforms", lambda: [])

    def command(*words: str) -> tuple[int, str, str]:
        code = main(words)
        return code, *capsys.readouterr()

    return command


def test_plan_tells_memory_traffic_and_time(run: Run) -> None:
    code, out, _ = run("plan", "run.yaml", "--world-size=8", "--parallel.tp=2", "--device-memory=1GiB")
    assert code == 0
    for part in ("of 1.00 GiB: fits", "optimizer", "activations", "fsdp", "all_gather", "tokens/s", "time of a step"):
        assert part in out


def test_offloaded_activations_are_not_counted_on_the_device(run: Run) -> None:
    def planned(*words: str) -> tuple[float, float]:
        words = ("--world-size=64", "--training.recompute=none", "--device-memory=1TiB", "--json", *words)
        code, out, error = run("plan", "large.yaml", *words)
        assert code == 0, error
        plan = json.loads(out)
        return plan["memory"][plan["peak_rank"]]["activations"], plan["seconds"]["offload not hidden"]

    here, nothing = planned()
    offloaded, waited = planned("--training.offload_activations=true")
    # Of 80 blocks two are on the device: that of the backward, and the one in front of it. Gradients within a block
    # take about as much as these two.
    assert 2 / 80 * here <= offloaded <= 5 / 80 * here
    assert (nothing, waited > 0) == (0.0, True)
    in_stages, _ = planned("--training.offload_activations=true", "--parallel.pp=8")
    # The last block of each micro-batch under way stays.
    assert in_stages > offloaded


EXPERTS = ("--world-size=16", "--parallel.ep=16", "--model.num_experts=32", "--training.dtype=bfloat16")


def test_what_is_sent_to_experts_follows_from_the_dispatcher(run: Run) -> None:
    def sent(*words: str) -> dict[str, float]:
        code, out, error = run("plan", "run.yaml", "--json", *EXPERTS, *words)
        assert code == 0, error
        plan = json.loads(out)
        assert plan["not_planned"] == []
        return {each["axis"]: each["bytes"] for each in plan["traffic"] if each["axis"].startswith("ep")}

    full, rounded = sent(), sent("--parallel.ep_dispatcher=all_to_all_fp8")
    # One of four ways is that of rows in 8 bits; experts and scores are not rounded.
    assert 0.8 * full["ep"] < rounded["ep"] < 0.9 * full["ep"]
    levels = sent("--parallel.ep_dispatcher=two_level", "--parallel.ep_node_size=8")
    assert set(levels) == {"ep_inner", "ep_outer"}
    assert levels["ep_outer"] < full["ep"] / 2
    assert sent("--parallel.ep_dispatcher=all_gather")["ep"] > full["ep"]


@pytest.mark.parametrize("setting", ["ep_copies=1", "ep_move_interval=1", "ep_chunks=2"])
def test_settings_of_experts_that_a_plan_does_not_know_are_named(run: Run, setting: str) -> None:
    # Of two ranks, all layouts are listed, those with experts on several ranks too.
    for command, more in (("plan", ()), ("layouts", ("--world-size=2", "--parallel.ep=1"))):
        code, out, error = run(command, "run.yaml", *EXPERTS, *more, f"--parallel.{setting}")
        assert code == 0, error
        assert "not planned:" in out
        assert f"parallel.{setting.partition('=')[0]}: " in out


def test_json_has_the_same_numbers(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("plan", "run.yaml", "--world-size", "8", "--parallel.pp=2", "--json", "--to=memory.png")
    plan = json.loads(out)
    assert code == 0
    assert plan["world_size"] == 8
    assert plan["fits"]
    held = plan["memory"][0]
    parts = sum(value for name, value in held.items() if name not in ("total", "moment"))
    assert parts == pytest.approx(held["total"])
    assert len(plan["memory"]) == 2
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_million_ranks_are_planned_in_seconds(run: Run) -> None:
    def seconds() -> float:
        start = time.process_time()
        code, out, _ = run("plan", "large.yaml", "--world-size=1048576")
        assert code == 0
        assert "70,553,706,496 parameters" in out
        return time.process_time() - start

    # Others on the same core may slow down an attempt, or several.
    assert any(seconds() < 10 for _ in range(5))


def test_what_does_not_fit_is_answered_with_what_would(run: Run) -> None:
    words = ("--world-size=8", "--parallel.dp_replicate=8")
    code, out, _ = run("plan", "run.yaml", *words, "--device-memory=4MiB")
    assert code == 1
    assert "each of these settings makes this layout fit" in out
    assert "--training.offload_optimizer=true       3.70 MiB" in out
    code, out, _ = run("plan", "run.yaml", *words, "--device-memory=2MiB")
    assert code == 1
    assert "does NOT fit" in out
    assert "would fit; the fastest: --parallel." in out
    code, out, _ = run("plan", "run.yaml", "--world-size=1", "--device-memory=2MiB")
    assert code == 1
    assert "no layout of 1 ranks fits in 2.00 MiB: the smallest needs" in out


def test_layouts_are_ranked_by_time_within_the_memory(run: Run) -> None:
    code, out, _ = run("layouts", "run.yaml", "--world-size=8", "--device-memory=8MiB", "--json")
    ranking = json.loads(out)
    times = [each["seconds"] for each in ranking["best"]]
    assert code == 0
    assert 1 < len(times) <= 10
    assert times == sorted(times)
    assert all(each["memory"] <= 8 * 2**20 for each in ranking["best"])
    reasons = ranking["reasons"]
    assert reasons["tp: num_attention_heads = 4 cannot be split over tp = 8"] == 1
    assert "pp: num_hidden_layers = 4 cannot be split into stages for pp = 8 ranks" in reasons
    code, out, _ = run("layouts", "run.yaml", "--world-size=8")
    assert "the fastest by estimated time" in out
    assert "layouts cannot be used:" in out


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (("--world-size=0",), "'--world-size': 0 is not in the range 1<=x<=10000000"),
        (("--world-size=many",), "'many' is not a valid integer"),
        (
            ("--world-size=8", "--device=H10"),
            "device 'H10' is unknown; expected one of H100, H100-96GB, H200, H800, A100, 910B, or a YAML file",
        ),
        (("--world-size=8", "--device-memory=80"), "'--device-memory': expected a size above 0 with its unit"),
        (("--world-size=8", "--device-memory=1B"), "'--device-memory': 1B is too small"),
        (("--world-size=8", "--parallel.tp=3"), "try"),
        (("--world-size=8", "--device=bad.yaml"), "memory_bandwidth: Field required"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "layouts"])
def test_bad_input_is_refused(run: Run, tmp_path: Path, command: str, words: tuple[str, ...], printed: str) -> None:
    (tmp_path / "bad.yaml").write_text("memory: 80GiB\nflops: {bfloat16: -1}\nspeed: 3\n")
    code, _, error = run(command, "run.yaml", *words)
    if command == "layouts" and "--parallel.tp=3" in words:
        assert code == 0, "the search chooses degrees itself"
    else:
        assert code == 2
        assert printed in error


def test_a_picture_needs_a_folder(run: Run) -> None:
    code, out, error = run("plan", "run.yaml", "--world-size=8", "--to=nowhere/memory.png")
    assert (code, out) == (2, "")
    assert "'--to': expected a file in an existing folder, got 'nowhere/memory.png'" in error
    for path in ("", ".", "/"):
        assert "'--to': expected a file" in run("plan", "run.yaml", f"--to={path}")[2]


def test_a_device_of_ones_own(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "memory: 24GiB\nflops: {float32: 82e12}\nmemory_bandwidth: 1.0e12\nranks_per_node: 4\n"
        "inner_bandwidth: 30e9\nouter_bandwidth: 1e9\n"
    )
    code, out, _ = run("plan", "run.yaml", "--world-size=8", "--device=mine.yaml")
    assert code == 0
    assert "device: mine, 4 per node" in out
    assert "of 24.00 GiB" in out
    with open(tmp_path / "mine.yaml", "a") as file:
        file.write(f"host_bandwidth: {'9' * 400}\n")
    code, _, error = run("plan", "run.yaml", "--world-size=8", "--device=mine.yaml")
    assert code == 2
    assert "host_bandwidth: expected a number above 0" in error


@pytest.mark.parametrize(("name", "parameters"), [("dense_70b", "70,553,706,496"), ("deepseek_v3", "671,026,404,352")])
def test_the_examples_of_the_page_have_the_published_sizes(run: Run, name: str, parameters: str) -> None:
    example = Path(__file__).parents[4] / "examples" / "plans" / f"{name}.yaml"
    code, out, _ = run("plan", str(example), "--world-size=2048")
    assert code == 0
    assert f"model: {parameters} parameters, bfloat16" in out


def test_a_budget_that_no_choice_keeps_is_no_fit(run: Run) -> None:
    small = "--training.activation_budget=1KiB"
    code, printed, err = run("plan", "run.yaml", "--world-size=2", small)
    assert (code, err) == (1, "")
    last = printed.strip().splitlines()[-1]
    assert last.startswith("training.activation_budget: activations take at least ")
    assert last.endswith("more than the budget of 1.00 KiB; a run would be refused, the memory above is the least")
    code, printed, _ = run("plan", "run.yaml", "--world-size=2", small, "--json")
    assert (code, json.loads(printed)["fits"]) == (1, False)
    code, printed, _ = run("layouts", "run.yaml", "--world-size=2", small, "--json")
    found = json.loads(printed)
    assert found["num_illegal"] > 0 == found["num_fitting"]
    assert any(each.startswith("training.activation_budget: ") for each in found["reasons"])
    # Nor is a layout named as the smallest that no run could take either.
    code, printed, _ = run("plan", "run.yaml", "--world-size=2", small, "--device-memory=3MiB")
    assert code == 1
    assert printed.strip().endswith(
        "no layout of this model and batch is legal for so many ranks; hp-train layouts says why"
    )
    assert run("plan", "run.yaml", "--world-size=2", "--training.activation_budget=1GiB")[0] == 0
