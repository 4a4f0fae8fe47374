"""Perplexity of a run's model is the same by command and in training, and the tasks of lm-eval are left to it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from training_runs import FOUR_RANKS, events

from hp_dtensor.testing import run_ranks
from hp_trainer import cli, evaluation
from hp_trainer.cli.report import evaluate_on_rank

STEP = re.compile(r"step (\d+): loss ([\d.]+) nats per token, perplexity ([\d.]+), over ([\d,]+) tokens")


def evaluate(capsys, *words: str) -> tuple[int, float, float, int]:
    assert cli.main(["evaluate", *words]) == 0
    step, loss, perplexity, tokens = STEP.search(capsys.readouterr().out).groups()
    return int(step), float(loss), float(perplexity), int(tokens.replace(",", ""))


def test_all_samples_are_evaluated_once_on_any_number_of_ranks(lab, capsys):
    settings = {"training__eval_batches": None, "training__eval_interval": 2, "data__eval_fraction": 0.1}
    settings |= {"training__steps": 2, "checkpoint__interval": 2}
    (one,) = events(lab.run("one", **settings), "evaluation")
    (four,) = events(lab.run("four", FOUR_RANKS["folded"], 4, training__micro_batch_size=2, **settings), "evaluation")
    assert one["tokens"] == four["tokens"] == 24 * 16  # of 400 tokens, in batches of 8
    assert four["loss"] == pytest.approx(one["loss"], rel=2e-5)
    assert one["perplexity"] == pytest.approx(math.exp(one["loss"]))
    step, loss, perplexity, tokens = evaluate(capsys, str(lab.folder / "four"))
    assert (step, tokens) == (2, one["tokens"])
    assert loss == pytest.approx(one["loss"], abs=1e-4)
    assert perplexity == pytest.approx(one["perplexity"], rel=1e-3)


def test_other_data_are_evaluated_without_changing_the_run(lab, capsys):
    run = lab.run("run", training__eval_interval=6, training__eval_batches=None)
    before = sorted(path.name for path in run.path.rglob("*"))
    (lab.folder / "other.jsonl").write_text(json.dumps({"text": "zzzz" * 40}) + "\n")
    _, other, _, tokens = evaluate(capsys, str(run.path), f"--data.path={lab.folder / 'other.jsonl'}")
    assert tokens == 160
    (held_out,) = events(run, "evaluation")
    assert other > held_out["loss"] + 0.5, "letters that the model has never seen"
    _, same, _, count = evaluate(capsys, str(run.path), f"--data.eval=[{lab.folder / 'other.jsonl'}]")
    assert (same, count) == (other, tokens)
    assert sorted(path.name for path in run.path.rglob("*")) == before


@pytest.mark.parametrize("layout", [{}, {"parallel.tp": "2"}, {"parallel.ep": "2", "parallel.dp_replicate": "2"}])
def test_ranks_that_share_an_evaluation_find_what_one_finds(lab, layout):
    if lab.platform.name != "torch" and layout:
        pytest.skip("four simulated ranks are slow there: sharded alone")
    run = lab.run("run", training__steps=2, data__eval_fraction=0.1, training__micro_batch_size=2)
    (lab.folder / "other.txt").write_text("abc def " * 45)
    for more in ([], [("data.path", str(lab.folder / "other.txt"))]):
        alone = evaluate_on_rank(str(run.path), more, "last", lab.platform.name, False)
        arguments = (str(run.path), [*layout.items(), *more], "last", lab.platform.name, True)
        for step, loss, tokens in run_ranks(evaluate_on_rank, 4, lab.platform, *arguments):
            assert (step, tokens) == (alone[0], alone[2])
            assert loss == pytest.approx(alone[1], rel=1e-6)


@pytest.mark.usefixtures("torch_suffices")
def test_several_ranks_of_this_machine_evaluate(lab, capsys):
    run = lab.run("run", training__steps=1, data__eval_fraction=0.1)
    alone = evaluate(capsys, str(run.path))
    assert evaluate(capsys, str(run.path), "--launch.local_ranks=2") == pytest.approx(alone)


def test_a_layout_that_cannot_evaluate_is_refused_before_a_rank_starts(lab, capsys):
    run = lab.run("run", training__steps=1)
    assert cli.main(["evaluate", str(run.path), "--launch.local_ranks=2", "--parallel.tp=4"]) == 2
    assert "parallel.tp" in capsys.readouterr().err
    assert cli.main(["evaluate", str(run.path), "--launch.local_ranks=2", "--parallel.pp=2"]) == 2
    assert "parallel.pp: evaluation does not support pipelines" in capsys.readouterr().err


def test_data_that_cannot_be_evaluated_are_refused(lab, capsys):
    run = lab.run("run", training__steps=1, data__eval_fraction=0)
    assert cli.main(["evaluate", str(run.path)]) == 2
    assert "there are no evaluation samples; give some by --data.path" in capsys.readouterr().err
    assert cli.main(["evaluate", str(run.path), "--data.path=none.txt"]) == 2
    assert "data.path: does not exist" in capsys.readouterr().err


def test_tasks_need_an_exported_model_and_the_library(tmp_path: Path, monkeypatch, capsys):
    assert cli.main(["evaluate", str(tmp_path), "--tasks=hellaswag"]) == 2
    assert "has no exported model (no config.json); write one with `hp-train export" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(evaluation.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["evaluate", str(tmp_path), "--tasks=hellaswag"]) == 2
    assert "tasks need lm-eval, but lm_eval and transformers cannot be imported" in capsys.readouterr().err


def test_tasks_are_run_by_lm_eval_with_its_own_options(tmp_path: Path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "lm_eval.py").write_text(
        "import json, sys; json.dump(sys.argv[1:], open('given.json', 'w')); sys.exit(3)"
    )
    monkeypatch.setattr(evaluation.importlib.util, "find_spec", lambda name: object())
    monkeypatch.chdir(tmp_path)
    assert cli.main(["evaluate", str(tmp_path), "--tasks=hellaswag,arc_easy", "--limit", "10"]) == 3
    given = json.loads((tmp_path / "given.json").read_text())
    assert given == [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={tmp_path}",
        "--tasks",
        "hellaswag,arc_easy",
        "--limit=10",
    ]
