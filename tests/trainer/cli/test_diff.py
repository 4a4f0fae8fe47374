"""`hp-train diff`: its sides, what it trains, and its answer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hugging_face_models import write_model
from injected_faults import RECORDED, on_gradient
from training_runs import CONFIG, Lab, train_rank

from hp_dtensor.debug import Comparison, Digest, Event, Recording, compare
from hp_dtensor.debug.digest import LENGTH
from hp_dtensor.exceptions import RecordingError
from hp_dtensor.platform.registry import Registry
from hp_dtensor.testing import run_ranks
from hp_trainer.cli import diff, main
from hp_trainer.config import load_config
from hp_trainer.plugins import registries
from hp_trainer.run import create_run
from hp_trainer.training import Trainer


@pytest.fixture
def trained(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Sides train on simulated ranks of this process; the settings of each run."""
    runs: list[tuple[str, ...]] = []

    def record(side: diff.Side, folder: Path, steps: int, more: Any = ()) -> Recording:
        settings = [*side.overrides, ("training.record_steps", str(steps)), ("training.record_only", "true"), *more]
        runs.append(tuple(f"{name}={value}" for name, value in settings))
        config = load_config(side.config, settings, registered=registries()).config
        run = create_run(folder, config)
        run_ranks(train_rank, config.launch.local_ranks or 1, lab.platform, run, lab.platform)
        return Recording.load(run.digests_file)

    monkeypatch.setattr(diff.Side, "record", record)
    return runs


@pytest.fixture
def config(lab: Lab) -> str:
    path = lab.folder / "run.yaml"
    path.write_text(CONFIG.format(text=lab.text))
    return str(path)


@pytest.mark.usefixtures("torch_suffices")
def test_settings_are_for_both_sides_or_for_one(config: str, trained: Any, capsys: Any, tmp_path: Path) -> None:
    arguments = [
        "--steps=2",
        "--training.seed=3",
        "--b.launch.local_ranks=2",
        "--b.parallel.tp=2",
        "--b.parallel.etp=1",
    ]
    assert main(["diff", config, *arguments, f"--record={tmp_path / 'a.gz'}"]) == 0
    out = capsys.readouterr().out
    assert "B: torch, decoder, tp=2, 2 ranks, float32" in out
    assert "within rounding: " in out
    first, second, third = trained
    assert first[0] == second[0] == third[0] == "training.seed=3"
    assert "parallel.tp=2" in second
    assert "parallel.tp=2" not in first
    assert third[-1] == f"training.perturb_weights={2.0**-24!r}"
    # The file knows how rounding grows, so that only one run is needed now.
    assert main(["diff", str(tmp_path / "a.gz"), config, "--training.seed=3", "--steps=2"]) == 0
    assert len(trained) == 4


@pytest.mark.usefixtures("torch_suffices")
def test_a_difference_has_exit_code_1_and_a_picture(config: str, trained: Any, capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "difference.svg"
    assert main(["diff", config, "--steps=1", "--b.optimizer.lr=1e-3", f"--to={picture}"]) == 1
    out = capsys.readouterr().out
    assert "different from step 1, update of embed.weight on" in out
    assert "B is 0.2 times A" in out
    assert "elements differ by more than rounding" in out
    # Only a run that narrows gets its settings, which older versions do not know.
    assert ["record_elements=weights embed.weight" in str(run) for run in trained] == [False] * 3 + [True] * 2
    assert "within  not narrowed: computed after forward and backward" in out
    assert "<svg" in picture.read_text()


def test_the_first_differing_operation_is_named(config: str, trained: Any, capsys: Any) -> None:
    assert main(["diff", config, "--steps=1", "--b.model.attention_scale=0.5"]) == 1
    out = capsys.readouterr().out
    assert "different from step 1, forward of layers.0.attention.o_proj on" in out
    assert re.search(r"within  layers.0.attention: \d+ \w+, output; the last that agrees is layers.0.", out), out


@pytest.mark.usefixtures("torch_suffices")
def test_a_failing_run_for_operations_leaves_the_comparison(
    config: str, trained: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    record = diff.Side.record

    def failing(side: diff.Side, folder: Path, steps: int, more: Any = ()) -> Recording:
        if "training.record_operations" in dict(more):
            raise RecordingError("B ended with exit code 1:\nout of memory")
        return record(side, folder, steps, more)

    monkeypatch.setattr(diff.Side, "record", failing)
    words = ["--steps=1", "--b.model.rms_norm_eps=1e-2", f"--record={tmp_path / 'a.gz'}"]
    assert main(["diff", config, *words]) == 1
    out = capsys.readouterr().out
    assert "different from step 1, forward of layers.0.attention_norm" in out
    assert "within  not narrowed: B ended with exit code 1:\nout of memory" in out
    assert (tmp_path / "a.gz").is_file()


@pytest.mark.usefixtures("torch_suffices")
def test_a_recorded_run_is_not_trained_again(lab: Lab, config: str, trained: Any) -> None:
    run = lab.run("recorded", None, 1, **RECORDED)
    assert main(["diff", str(run.path), config, "--steps=2"]) == 0
    # B, and the growth of rounding, from B too.
    assert len(trained) == 2


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe", "gpt_oss"])
def test_the_decoder_is_within_rounding_of_transformers(
    lab: Lab, trained: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, model_type: str
) -> None:
    pytest.importorskip("transformers")
    compared: list[Comparison] = []
    monkeypatch.setattr(diff, "compare", lambda *sides: compared.append(compare(*sides)) or compared[-1])
    write_model(tmp_path / "model", model_type, vocab_size=256)
    config = tmp_path / "run.yaml"
    training = "{steps: 4, global_batch_size: 4, sequence_length: 10}"
    parts = {"model": f"{{from: {tmp_path / 'model'}}}", "data": f"{{path: {lab.text}}}", "training": training}
    config.write_text("".join(f"{name}: {value}\n" for name, value in parts.items()) + "launch: {local_ranks: 1}\n")
    assert main(["diff", str(config), f"hf:{tmp_path / 'model'}", "--steps=2"]) == 0
    out = capsys.readouterr().out
    assert "B: torch, transformers, 1 rank, float32" in out
    assert int(out.partition("within rounding: ")[2].split()[0]) > 300
    # Stacked experts too, which transformers has as one weight.
    names = {each.name for each in compared[0].differences if each.pass_ == "update"}
    experts = {"qwen3_moe": ["w1", "w2", "w3"], "gpt_oss": ["w1", "w2", "w3", "b1", "b2", "b3"]}.get(model_type, [])
    assert names >= {f"layers.2.moe.experts.{name}" for name in experts}
    if model_type != "llama":
        return
    # Another norm's epsilon is found at the first norm.
    wrong = "--a.model.rms_norm_eps=1e-2"
    assert main(["diff", str(config), f"hf:{tmp_path / 'model'}", "--steps=1", wrong]) == 1
    out = capsys.readouterr().out
    assert "forward of layers.0.attention_norm" in out
    assert "within  layers.0.attention_norm: " in out


@pytest.mark.usefixtures("torch_suffices")
def test_a_difference_in_a_stacked_weight_of_transformers_is_found(
    lab: Lab, trained: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """Its rows are compared as the decoder's weights: here the gate of one expert is scaled."""
    transformers = pytest.importorskip("transformers")
    write_model(tmp_path / "model", "qwen3_moe", vocab_size=256)
    config = tmp_path / "run.yaml"
    training = "{steps: 4, global_batch_size: 4, sequence_length: 10}"
    config.write_text(f"model: {{from: {tmp_path / 'model'}}}\ndata: {{path: {lab.text}}}\ntraining: {training}\n")
    load = transformers.AutoModelForCausalLM.from_pretrained

    def faulty(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        weight = model.model.layers[1].mlp.experts.gate_up_proj
        weight.data[2, : weight.shape[1] // 2] *= 1.5
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", faulty)
    assert main(["diff", str(config), f"hf:{tmp_path / 'model'}", "--steps=1", "--launch.local_ranks=1"]) == 1
    out = capsys.readouterr().out
    assert "different from step 0, weights of layers.1.moe.experts.w1 on" in out
    assert "indices 2 to 2 of 4 of the first dimension" in out


def test_differing_elements_and_their_ranks_are_named(
    lab: Lab, config: str, trained: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A row of a gradient is wrong in the shard of one of two ranks."""
    run = Trainer.run

    def wrong(x: np.ndarray, rank: int) -> np.ndarray:
        x.reshape(-1)[32:48] += 1
        return x

    def faulty(self: Trainer) -> int | None:
        if self.setup.mesh.world.size == 2:
            on_gradient("layers.1.attention.q_proj.weight", wrong, ranks=(1,))(self, self.setup.mesh.world.rank)
        return run(self)

    monkeypatch.setattr(Trainer, "run", faulty)
    words = ["--steps=1", "--b.parallel.tp=2", "--b.parallel.etp=1", "--b.launch.local_ranks=2"]
    assert main(["diff", config, *words]) == 1
    out = capsys.readouterr().out
    assert "different from step 1, gradient of layers.1.attention.q_proj.weight on" in out
    assert "where   16 of 256 elements differ by more than rounding: 10 of 16 in dimension 0; most at [10, " in out
    assert "where   they are on rank 1 of B" in out


@pytest.mark.usefixtures("torch_suffices")
def test_transformers_needs_the_same_model_on_the_other_side(config: str, capsys: Any, tmp_path: Path) -> None:
    assert main(["diff", config, f"hf:{tmp_path}"]) == 2
    assert "needs the same model on the other side" in capsys.readouterr().err
    assert main(["diff", f"hf:{tmp_path}", f"hf:{tmp_path}"]) == 2
    assert "one side must be" in capsys.readouterr().err


def test_missing_sources_and_failing_runs_are_told(config: str, capsys: Any, tmp_path: Path) -> None:
    assert main(["diff", "missing.yaml"]) == 2
    assert "missing.yaml does not exist" in capsys.readouterr().err
    # Not the code of a difference.
    assert main(["diff", config, "--steps=1", "--b.python=/no/python", "--a.python=/no/python"]) == 2
    assert "/no/python is no interpreter" in capsys.readouterr().err


def test_two_files_without_growth_are_refused(capsys: Any, tmp_path: Path) -> None:
    event = Event("forward", "head", "float32", Digest((1,), np.ones(LENGTH)))
    Recording({"dtypes": ["float32"]}, {1: [event]}).save(tmp_path / "a.gz")
    assert main(["diff", str(tmp_path / "a.gz"), str(tmp_path / "a.gz")]) == 2
    assert "neither recording knows how rounding grows" in capsys.readouterr().err


def test_transformers_gets_settings_for_both_sides_once(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff, "reference_names", lambda *args: {})
    pytest.importorskip("transformers")
    write_model(tmp_path / "model", "llama", vocab_size=256)
    path = tmp_path / "run.yaml"
    training = "{steps: 4, global_batch_size: 4, sequence_length: 10}"
    path.write_text(f"model: {{from: {tmp_path / 'model'}}}\ndata: {{path: {lab.text}}}\ntraining: {training}\n")
    overrides = [("parallel.tp", "2"), ("parallel.etp", "1"), ("training.recompute", "full"), ("b.training.seed", "3")]
    ours, theirs = (diff._side(s, overrides, x) for s, x in ((str(path), "a"), (f"hf:{tmp_path / 'model'}", "b")))
    side, _ = theirs.of_transformers(ours, tmp_path)
    # The layout and the recomputation are for the decoder only.
    assert side.overrides == (("training.seed", "3"),)


def test_transformers_trains_on_a_platform_that_computes_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Registry("model", "test")
    for platform in ("bow", "sling"):
        models.add("transformers", object, platform=platform)
    monkeypatch.setattr(diff, "registries", lambda: SimpleNamespace(models=models))
    monkeypatch.setattr(diff, "installed_platforms", lambda: ["arrow", "bow", "sling"])
    assert [diff._platform_of_transformers(each) for each in (None, "arrow", "sling")] == ["bow", "bow", "sling"]
    # The interpreter of that side chooses its own.
    monkeypatch.setattr(diff, "installed_platforms", lambda: ["arrow"])
    assert diff._platform_of_transformers("arrow") is None


@pytest.mark.real_ranks
def test_sides_are_trained_by_processes_of_their_own(
    config: str, hp_platform: Any, capsys: Any, fork_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--steps=1", f"--platform={hp_platform.name}", "--launch.local_ranks=1", "--b.training.micro_batch_size=4"]
    if hp_platform.name != "torch":
        pytest.skip("one platform is enough: the platform's part is that of every run")
    started: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return fork_server.run(command, 300)

    monkeypatch.setattr(diff.subprocess, "run", run)
    assert main(["diff", config, *words]) == 0
    assert "within rounding" in capsys.readouterr().out
    assert len(started) == 3, "each side, and one of them with perturbed weights"
