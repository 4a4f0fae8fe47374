"""Reports and comparisons of runs: everything that was logged, one file that loads nothing, the same each time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from hp_trainer import cli
from hp_trainer.exceptions import RunFolderError
from hp_trainer.report import MOST_POINTS, RunHistory, compare_runs, describe_layout, report_run, thin

PARALLEL = {
    "dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 2, "pp": 1, "ep": 1, "etp": None, "expert_mesh": "folded",
}  # fmt: skip


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def make_run(name: str, lr: float = 0.5, steps: int = 4, world_size: int = 4) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "run.json").write_text('{"id": "0123456789ab"}')
        config = {
            "model": {"name": "<b>tiny</b>", "num_experts": 4}, "training": {"steps": steps},
            "optimizer": {"name": "adamw", "lr": lr}, "parallel": PARALLEL, "run": {"folder": str(folder)},
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        start = {
            "event": "start", "first_step": 0, "platform": "torch", "world_size": world_size,
            "num_parameters": 3_100_000,
        }  # fmt: skip
        events = [start, *(step_event(number, lr) for number in range(1, steps + 1))]
        events += [
            {"event": "evaluation", "step": steps, "loss": 2.5, "tokens": 10, "seconds": 0.1},
            {"event": "checkpoint", "step": steps, "folder": "step-00000004", "seconds": 0.25},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return folder

    return make_run


def step_event(number: int, lr: float) -> dict:
    return {
        "event": "step", "step": number, "loss": 4.0 - number * lr, "learning_rate": lr, "gradient_norm": "inf",
        "tokens": 1000, "samples": 8 * number, "seconds": 0.5, "tokens_per_second": 2000.0,
        "metrics": {"load_variation": 0.25},
    }  # fmt: skip


class Links(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.loaded.append(tag)


def test_report_shows_what_the_run_logged(make_run) -> None:
    text = report_run(make_run("first")).read_text()
    for content in (
        "3.10 million", "4 on torch", "4 of 4", "4,000", "2.5000 at step 4", "step-00000004",
        "<td>load_variation</td><td>0.25</td>", "<td>tokens_per_second</td><td>2000</td>", "dp_shard=2", "lr: 0.5",
    ):  # fmt: skip
        assert content in text, content
    # A norm that was infinite in every step has no curve.
    assert "gradient norm" not in text


def test_loads_of_experts_are_one_picture(make_run) -> None:
    run = make_run("first")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for event in events:
        if event["event"] == "step":
            event["metrics"] |= {f"expert_load/{layer}/{expert}": expert / 2 for layer in (0, 1) for expert in range(4)}
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    text = report_run(run).read_text()
    assert text.count("load of each expert over the mean of its layer") == 1
    assert "expert load/" not in text
    assert text.count("<svg") == 2, "the loss and the experts; the other metrics of this run are constant"


def test_report_loads_nothing_and_escapes_what_a_run_says(make_run) -> None:
    text = report_run(make_run("first")).read_text()
    links = Links()
    links.feed(text)
    assert links.loaded == []
    assert not re.findall(r'(?:href|src)="(?!#)', text.replace('xlink:href="#', ""))
    assert "<b>tiny</b>" not in text
    assert "&lt;b&gt;tiny&lt;/b&gt;" in text


def test_report_of_the_same_run_is_the_same_file(make_run, tmp_path) -> None:
    run = make_run("first")
    assert report_run(run).read_bytes() == report_run(run, tmp_path / "again.html").read_bytes()


def test_run_that_has_not_begun_can_be_reported(make_run) -> None:
    run = make_run("first")
    (run / "metrics.jsonl").unlink()
    text = report_run(run).read_text()
    assert "Configuration" in text
    assert "Curves" not in text


def test_the_layout_is_that_of_the_recorded_settings() -> None:
    config = {"parallel": PARALLEL, "model": {}}
    assert " tp=2 " in describe_layout(config, 4, 0)
    assert describe_layout({"parallel": {}, "model": {}}, 4, 0).startswith("unknown: ")


def test_long_curves_are_thinned_to_means() -> None:
    points = [(step, float(step)) for step in range(1, 2 * MOST_POINTS + 2)]
    thinned = thin(points)
    assert len(thinned) <= MOST_POINTS
    assert (thinned[0], thinned[-1]) == ((3, 2.0), (2001, 2000.0))
    assert thin(points[:5]) == points[:5]
    assert thin([]) == []


def test_comparison_tells_numbers_and_settings_that_differ(make_run, tmp_path) -> None:
    text = compare_runs([make_run("a/run", lr=0.5), make_run("b/run", lr=0.25)], tmp_path / "both.html")
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert lines["optimizer.lr"].split() == ["optimizer.lr", "0.5", "0.25"]
    assert "training.steps" not in lines
    assert "run.folder" not in lines
    page = (tmp_path / "both.html").read_text()
    assert page.count(str(tmp_path / "a/run")) > 1  # in tables and legends: the folders have one name


def test_commands(make_run, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, other = make_run("first"), make_run("second")
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run}/report.html\n"
    assert cli.main(["compare", str(run), str(other), "--to", "c.html"]) == 0
    assert "curves: c.html" in capsys.readouterr().out
    for bad in (["report", str(tmp_path)], ["compare", str(run)], ["report", str(run), "--optimizer.lr=1"]):
        assert cli.main(bad) == 2
        assert capsys.readouterr().err.startswith("hp-train: ")


@pytest.mark.parametrize("content", ["a: [", "a: 2001-99-99", "a: !!bool x", "[" * 100_000])
def test_damaged_configuration_is_told(make_run, content: str) -> None:
    run = make_run("first")
    (run / "config.yaml").write_text(content)
    with pytest.raises(RunFolderError, match=r"config\.yaml is damaged"):
        RunHistory.read(run)


def test_events_of_wrong_types_are_named_and_left_out(make_run, capsys) -> None:
    run = make_run("first")
    sound = report_run(run).read_text()
    events = (run / "metrics.jsonl").read_text().splitlines()
    damaged = [
        {"event": "start", "platform": "torch", "world_size": "4", "num_parameters": 3},
        {"event": "checkpoint", "step": 4, "folder": "step-00000004"},
        {**step_event(5, 0.5), "rank_seconds": {"data": 0.1}},
        {**step_event(5, 0.5), "stragglers": [{"ranks": [1], "since": 2, "factor": "2", "work": "data", "node": None}]},
    ]
    (run / "metrics.jsonl").write_text("\n".join([*map(json.dumps, damaged), *events]) + "\n")
    capsys.readouterr()
    assert report_run(run).read_text() == sound
    assert capsys.readouterr().err == "".join(
        f"hp-train: {run}/metrics.jsonl, line {number} is damaged and is skipped: {problem}\n"
        for number, problem in enumerate(
            (
                "world_size: expected a valid integer, got '4'",
                "seconds: missing",
                "rank_seconds.data: expected a valid array, got 0.1",
                "stragglers.0.factor: expected a valid number, got '2'",
            ),
            start=1,
        )
    )


def test_times_and_loads_under_other_names_are_left_out(make_run) -> None:
    run = make_run("first")
    sound = {"data": [0.1, 0.2], "forward": [1.0, 2.0]}
    other = {"rank_seconds": {"forward": [1.0, 2.0]}, "metrics": {"expert_load/0/a": 1.0}}
    with (run / "metrics.jsonl").open("a") as out:
        for event in ({**step_event(5, 0.5), **other}, {**step_event(6, 0.5), "rank_seconds": sound}):
            out.write(json.dumps(event) + "\n")
    assert "0.1000" in report_run(run).read_text()
