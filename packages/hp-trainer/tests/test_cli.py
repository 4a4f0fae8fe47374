"""`hp-train` refuses bad input before anything starts, all at once; the rest is handed on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from hp_dtensor.exceptions import LaunchError
from hp_trainer import cli
from hp_trainer.checkpoint import Box, LocalStorage, TensorPart, list_checkpoints, save_checkpoint
from hp_trainer.cli import commands, runs
from hp_trainer.cli.help import USAGE, describe_option
from hp_trainer.config import TrainerConfig, list_options, load_config, to_plain
from hp_trainer.launch import platforms, preflight, world_size
from hp_trainer.machine_errors import describe_machine_error
from hp_trainer.parallel import ParallelDims
from hp_trainer.plugins import registries
from hp_trainer.registries import Registries
from hp_trainer.run import RunFolder, create_run

EXAMPLE = Path(__file__).parents[3] / "examples" / "moe_small.yaml"
OPTIONS = Path(__file__).with_name("options.txt")

GOOD = """\
model:
  name: tiny
data:
  path: corpus.txt
training:
  steps: 4
  sequence_length: 8
run:
  folder: out
"""


class Started(Exception):
    """Training would have begun."""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: Registries) -> Path:
    """A working directory with a configuration and a corpus; training itself is not reached."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MS_ROLE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.yaml").write_text(GOOD)
    (tmp_path / "corpus.txt").write_text("some text " * 100)
    return tmp_path


@pytest.fixture
def error(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a refused command prints."""

    def error(*arguments: str) -> str:
        assert cli.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return error


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Stands in for the ranks: notes the configuration and what `prepare` gives."""
    found: list[tuple] = []

    def train(config, path, prepare) -> Path:
        checkpoint = prepare()
        (path / "samples.txt").write_text("after 7 steps: def main\n")
        found.append((config, path, checkpoint))
        return path

    monkeypatch.setattr(runs, "launch_training", train)
    return found


def make_run(work: Path, step: int = 2) -> RunFolder:
    """A run with a checkpoint."""
    config = load_config(work / "run.yaml", registered=registries()).config
    run = create_run(work / "out", config)
    save(run, step)
    return run


def save(run: RunFolder, step: int) -> None:
    """A further checkpoint of a run."""
    part = TensorPart("w", "float32", (2,), [(Box.whole((2,)), np.ones(2, np.float32))])
    model = to_plain(run.load_config().config.model)
    save_checkpoint(LocalStorage(run.checkpoints), [part], step=step, model=model, state={"loss": 0.5})


# A new run ---------------------------------------------------------------------------------------------------


def test_a_good_configuration_is_prepared_once(work: Path, prepared: list, capsys) -> None:
    assert cli.main(["run.yaml", "--training.steps=7", "--launch.local_ranks", "2"]) == 0
    ((config, path, checkpoint),) = prepared
    assert (config.training.steps, config.launch.local_ranks, config.platform) == (7, 2, "torch")
    assert (path, checkpoint) == (Path("out"), None)
    assert RunFolder.open(path).load_config().config == config
    assert (path / "data" / "data.json").is_file()
    assert capsys.readouterr().out == "after 7 steps: def main\nrun folder: out\n"


def test_without_a_folder_the_run_is_named_after_the_file(work: Path, prepared: list) -> None:
    assert cli.main(["run.yaml", "--run.folder=null"]) == 0
    assert prepared[0][1].parent == Path("runs")
    assert prepared[0][1].name.startswith("run-20")


def test_all_that_is_wrong_is_told_at_once(work: Path, error, prepared: list) -> None:
    (work / "out").mkdir()
    (work / "out" / "mine.txt").write_text("x")
    (work / "run.yaml").write_text(GOOD.replace("corpus.txt", "none.txt") + "parallel: {tp: 3, cp: 2}\n")
    assert error("run.yaml", "--launch.local_ranks=4", "--platform=troch") == (
        "hp-train: run.yaml: 6 problems\n"
        "--platform: platform: is not installed\n"
        "    expected: torch\n"
        "    got: troch\n"
        "    try: torch\n"
        "run.yaml:10: parallel.dp_shard: -1 cannot be filled: world_size / (dp_replicate*cp*tp*pp) = 4 / (1*2*3*1) "
        "= 4/6 is no whole number\n"
        "    expected: dp_replicate*cp*tp*pp to divide 4\n"
        "    got: 6\n"
        "    try: tp=2, or launch.local_ranks=6\n"
        "run.yaml:10: parallel.tp: num_attention_heads = 4 cannot be split over tp = 3\n"
        "    expected: a divisor of 4\n"
        "    got: 3\n"
        "    try: tp=2 or 4\n"
        "run.yaml:10: parallel.tp: num_key_value_heads = 2 cannot be split over tp = 3\n"
        "    expected: a divisor of 2\n"
        "    got: 3\n"
        "    try: tp=2\n"
        "run.yaml:10: parallel.cp: seq_len = 8 cannot be split over cp*tp = 2*3 = 6\n"
        "    expected: cp*tp to divide 8\n"
        "    got: 6\n"
        "    try: seq_len=6 or 12, or cp*tp=4 or 8\n"
        "run.yaml:4: data.path: does not exist\n"
        "    expected: a text file, or a folder that holds some\n"
        f"    got: {work}/none.txt\n"
        f"    try: a path that exists ({work} does)\n"
        "run.yaml:9: run.folder: holds files that are no run\n"
        "    expected: a new folder\n"
        "    got: out\n"
        "    try: another --run.folder, or `hp-train resume out`\n"
    ).replace("6 problems", "7 problems")
    assert prepared == []
    assert sorted(path.name for path in (work / "out").iterdir()) == ["mine.txt"]


def test_keys_and_types_are_told_before_anything_else(work: Path, error) -> None:
    (work / "run.yaml").write_text("model: {name: tiny}\ntraning:\n  steps: 4\n")
    assert error("run.yaml", "--launch.local_ranks=two") == (
        "hp-train: run.yaml: 3 problems\n"
        "run.yaml:2: traning: unknown key\n"
        f"    expected: one of {', '.join(sorted(field.name for field in fields(TrainerConfig)))}\n"
        "    try: training\n"
        "run.yaml: training.steps: missing\n"
        "    expected: a whole number: optimizer steps of the whole run\n"
        "    try: --training.steps=...\n"
        "--launch.local_ranks: launch.local_ranks: wrong type\n"
        "    expected: a whole number or null\n"
        "    got: 'two' (text)\n"
    )


def test_a_pipeline_of_a_model_that_cannot_be_cut_is_refused(work: Path, error) -> None:
    assert error("run.yaml", "--launch.local_ranks=4", "--parallel.pp=2") == (
        "hp-train: run.yaml: 1 problem\n"
        "--parallel.pp: parallel.pp: model 'tiny' has no num_hidden_layers by which to cut it into stages\n"
    )


def test_compiled_tensor_parallel_blocks_are_refused(work: Path, error) -> None:
    told = error("run.yaml", "--launch.local_ranks=2", "--parallel.tp=2", "--training.compile=true")
    assert "training.compile: tensor parallel blocks compute on DTensors" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--parallel.cp=4", "--parallel.cp_method=ulysses", "--parallel.ulysses_degree=2"),
            "--parallel.cp_method: parallel.cp_method: ulysses exchanges heads among all 4 ranks, not among "
            "ulysses_degree = 2\n    expected: ring or all_gather for the others\n    got: ulysses\n"
            "    try: cp_method=ring, or ulysses_degree=null\n",
        ),
        (
            ("--parallel.cp=4", "--parallel.cp_method=ulysses", "--model.num_attention_heads=2"),
            "parallel.ulysses_degree: there are only num_attention_heads / tp = 2 heads to exchange among 4 ranks\n"
            "    expected: at most 2\n    got: 4\n    try: ulysses_degree=1 or 2 and cp_method=ring\n",
        ),
        (
            ("--parallel.cp=4", "--training.compile=true"),
            "--training.compile: training.compile: attention of context parallel ranks exchanges keys or heads, which "
            "is not compiled\n    expected: false, or parallel.cp = 1\n    got: true\n",
        ),
        (
            ("--parallel.cp=4", "--parallel.ulysses_degree=3"),
            "--parallel.ulysses_degree: parallel.ulysses_degree: must divide cp\n    expected: a divisor of cp = 4\n"
            "    got: 3\n    try: ulysses_degree=2 or 4\n",
        ),
        (
            ("--parallel.cp=4", "--training.sequence_length=3"),
            "--parallel.cp: parallel.cp: sequences of 3 tokens leave some of cp*tp = 4*1 ranks without any\n"
            "    expected: cp*tp of at most 3\n    got: 4\n    try: cp=3\n",
        ),
    ],
    ids=["one name for two things", "too few heads", "compiled", "no divisor", "too short"],
)
def test_sequences_that_ranks_cannot_share_are_refused(work: Path, error, arguments, message) -> None:
    assert error("run.yaml", "--launch.local_ranks=4", *arguments).endswith(message)


def test_a_batch_that_the_ranks_cannot_share_is_refused(work: Path, error) -> None:
    arguments = ("--launch.local_ranks=4", "--training.global_batch_size=10", "--training.micro_batch_size=2")
    assert error("run.yaml", *arguments) == (
        "hp-train: run.yaml: 1 problem\n"
        "--training.global_batch_size: training.global_batch_size: cannot be shared by dp_replicate*dp_shard = 1*4 = 4 "
        "ranks of micro-batches of 2\n"
        "    expected: a multiple of 8\n"
        "    got: 10\n"
        "    try: training.global_batch_size=8 or 16\n"
    )


def test_experts_that_the_ranks_cannot_share_are_refused(work: Path, error) -> None:
    arguments = ("--model.num_experts=6", "--launch.local_ranks=4", "--parallel.ep=4")
    assert "--parallel.ep: parallel.ep: num_experts = 6 cannot be split over ep = 4" in error("run.yaml", *arguments)


def test_data_without_text_is_refused(work: Path, error) -> None:
    (work / "corpus.txt").write_bytes(b"\xff\x00")
    assert "run.yaml:4: data.path: holds no text" in error("run.yaml")


def test_the_folder_of_another_run_is_refused(work: Path, error) -> None:
    run = make_run(work)
    assert f"run.yaml:9: run.folder: holds the run {run.run_id}\n" in error("run.yaml")


def test_what_the_system_refuses_is_told_without_a_traceback(work: Path, prepared: list, capsys) -> None:
    (work / "corpus").write_text("a file, not a folder")
    assert cli.main(["run.yaml", "--run.folder=corpus/run"]) == 2
    told = capsys.readouterr().err
    assert f"--run.folder: run.folder: cannot be made: {work / 'corpus'} is no folder\n" in told


def test_folders_that_cannot_be_written_are_refused(work: Path, error, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "locked").mkdir()
    access = os.access
    # The superuser may write anywhere, so the answer of the system is given here.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != work / "locked" and access(path, mode))
    told = error("run.yaml", "--run.folder=locked/a/run", "--checkpoint.folder=locked/b")
    where = f"cannot be written: {work / 'locked'} belongs to another user or is read-only\n"
    assert f"--run.folder: run.folder: {where}    expected: a folder that you may write to\n" in told
    assert f"--checkpoint.folder: checkpoint.folder: {where}" in told


def test_a_run_folder_in_the_file_counts_from_the_file(work: Path, prepared: list) -> None:
    (work / "configs").mkdir()
    (work / "configs" / "run.yaml").write_text(GOOD.replace("corpus.txt", "../corpus.txt"))
    assert cli.main(["configs/run.yaml"]) == 0
    assert cli.main(["configs/run.yaml", "--run.folder=here"]) == 0
    assert [path for _, path, _ in prepared] == [Path("configs/out"), Path("here")]


def test_local_ranks_are_the_accelerators_or_else_those_of_the_cpu(
    work: Path, prepared: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(runs, "check_new_run", lambda loaded, folder, ranks, known: seen.append(ranks) or [])
    for accelerators in (0, 1, 2, 8):
        monkeypatch.setattr(world_size, "num_accelerators", lambda platform, found=accelerators: found)
        assert cli.main(["run.yaml", f"--run.folder=run{accelerators}", "--launch.cpu_ranks=4"]) == 0
    assert cli.main(["run.yaml", "--run.folder=three", "--launch.local_ranks=3"]) == 0
    assert seen == [4, 1, 2, 8, 3]


def test_more_ranks_than_accelerators_are_refused_with_the_way_out(
    work: Path, error, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "num_accelerators", lambda platform: 1)
    assert error("run.yaml", "--launch.local_ranks=4") == (
        "hp-train: run.yaml: 1 problem\n"
        "--launch.local_ranks: launch.local_ranks: there is only one accelerator on this machine, and each rank needs "
        "its own\n"
        "    expected: at most 1\n"
        "    got: 4\n"
        "    try: launch.local_ranks=1, or HP_DEVICE=cpu in the environment to train on the CPU\n"
    )
    monkeypatch.setattr(preflight, "num_accelerators", lambda platform: 2)
    assert "are only 2 accelerators" in error("run.yaml", "--launch.local_ranks=4")


@pytest.mark.parametrize("accelerators", [0, 1, 2, 8])
def test_the_example_fits_any_machine(
    tmp_path: Path, prepared: list, installed: Registries, monkeypatch: pytest.MonkeyPatch, accelerators: int
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (world_size, preflight):
        monkeypatch.setattr(module, "num_accelerators", lambda platform: accelerators)
    assert cli.main([str(EXAMPLE), "--data.max_tokens=100000"]) == 0
    ((config, *_),) = prepared
    dims = ParallelDims.from_config(config.parallel, accelerators or 4, config.model.options.num_experts)
    assert (dims.dp_shard, dims.ep) == (accelerators or 4, accelerators or 4)


def test_a_misspelt_command_is_told_the_nearest(work: Path, error) -> None:
    assert error("resme", "out").startswith(
        "hp-train: there is no command or file 'resme'; did you mean `hp-train resume`?\nusage: "
    )
    assert "did you mean `hp-train layouts`?" in error("layout")
    assert "cannot be read" in error("resume.yaml"), "a file that is not there"


def test_torchrun_is_told_the_error_that_it_prints_last(work: Path, error, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(work / "error.json"))
    told = error("run.yaml", "--training.stpes=3")
    written = json.loads((work / "error.json").read_text())["message"]
    assert written["message"] == written["extraInfo"]["py_callstack"] == told.removesuffix("\n")
    assert int(written["extraInfo"]["timestamp"]) > 0


def test_a_full_disk_is_told_with_what_to_do(work: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config, path, prepare) -> Path:
        raise OSError(28, "No space left on device", "out/run.json")

    monkeypatch.setattr(runs, "launch_training", full)
    assert cli.main(["run.yaml"]) == 1
    told = capsys.readouterr().err
    assert told == "hp-train: out/run.json: the disk is full (No space left on device); free some space\n"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PermissionError(13, "Permission denied", "out"), "out: you may not write or read there (Permission denied); "),
        (OSError(30, "Read-only file system", "out"), "out: the file system is read-only (Read-only file system); "),
        (OSError(122, "Disk quota exceeded", "out"), "out: your quota of the disk is used up (Disk quota exceeded); "),
        (OSError(5, "Input/output error"), "the disk or the network file system failed (Input/output error); "),
        (MemoryError(), "the memory is used up: no more is given to this process; use more memory or ranks, "),
        (MemoryError("Unable to allocate 1 TiB"), "the memory is used up: Unable to allocate 1 TiB; "),
        (ImportError("x.so: cannot allocate memory"), "the memory is used up: x.so: cannot allocate memory; "),
        (OSError("something else"), "something else\n"),
    ],
)
def test_errors_of_the_machine_are_one_line(
    work: Path, capsys, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fail(config, path, prepare) -> Path:
        raise error

    monkeypatch.setattr(runs, "launch_training", fail)
    assert cli.main(["run.yaml"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"hp-train: {told}")
    assert shown.count("\n") == 1


def test_other_errors_keep_their_traceback(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(config, path, prepare) -> Path:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(runs, "launch_training", fail)
    with pytest.raises(RuntimeError, match="a mistake of ours"):
        cli.main(["run.yaml"])
    assert describe_machine_error(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert describe_machine_error(RuntimeError("a mistake of ours")) is None
    assert describe_machine_error(LaunchError("rank 0 was killed; the machine may have run out of memory")) is None


def test_variables_of_a_launcher_that_make_no_sense_are_told(
    work: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cli.main(["run.yaml"]) == 1
    assert "MASTER_ADDR is not set" in capsys.readouterr().err


def test_each_rank_of_a_launcher_tells_what_only_it_may_have_found(
    work: Path, prepared: list, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["run.yaml", "--parallel.tp=3"]) == 2
    assert capsys.readouterr().err == "", "rank 0 finds the same"
    assert cli.main(["resume", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("hp-train: rank 1: nothing holds no run")
    # The folder and the data are looked at by the rank that prepares the run, when the others can hear of it.
    monkeypatch.setenv("RANK", "0")
    (work / "corpus.txt").unlink()
    monkeypatch.setattr(runs, "launch_training", lambda config, path, prepare: prepare())
    assert cli.main(["run.yaml"]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_told(work: Path, error) -> None:
    assert error("nope.yaml").startswith("hp-train: nope.yaml: 1 problem\nnope.yaml: cannot be read\n")


def test_no_platform_and_several_platforms_are_told(work: Path, error, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "installed_platforms", list)
    assert error("run.yaml") == (
        "hp-train: run.yaml: 1 problem\n"
        "platform: no platform is installed\n"
        "    try: pip install hp-platform-torch or hp-platform-mindspore\n"
    )
    assert "optimizer" not in error("run.yaml", "--optimizer.name=adamw"), "no platform has registered any"
    assert "no platform is installed" in error("layouts", "run.yaml")
    monkeypatch.setattr(platforms, "installed_platforms", lambda: ["mindspore", "torch"])
    assert error("run.yaml") == (
        "hp-train: run.yaml: 1 problem\n"
        "platform: several platforms are installed and none is chosen\n"
        "    expected: mindspore or torch\n"
        "    try: --platform=mindspore\n"
    )
    monkeypatch.setenv("HP_PLATFORM", "torch")
    (work / "out").mkdir()
    (work / "out" / "x").write_text("")
    assert "platform: " not in error("run.yaml")


# Resume ------------------------------------------------------------------------------------------------------


def test_resume_goes_on_from_the_newest_sound_checkpoint(work: Path, prepared: list, capsys) -> None:
    make_run(work)
    newer = make_checkpoint_copy(work / "out" / "checkpoints", "step-00000002", "step-00000009")
    (newer / "shard-00000.safetensors").write_bytes(b"")
    assert cli.main(["resume", "out", "--training.steps=20", "--launch.local_ranks=2"]) == 0
    ((config, path, checkpoint),) = prepared
    assert (config.training.steps, path, checkpoint) == (20, Path("out"), "step-00000002")
    assert RunFolder.open(path).load_config().config.training.steps == 20
    told = capsys.readouterr().err
    assert "passed over a checkpoint: out/checkpoints/step-00000009/index.json is of step 2" in told


def make_checkpoint_copy(folder: Path, name: str, to: str) -> Path:
    (folder / to).mkdir()
    for file in (folder / name).iterdir():
        (folder / to / file.name).write_bytes(file.read_bytes())
    return folder / to


def test_what_a_run_began_with_cannot_change(work: Path, error) -> None:
    make_run(work)
    (work / "other.txt").write_text("other")
    text = error("resume", "out", "--training.seed=1", "--data.path=other.txt", "--training.sequence_length=16")
    assert text.startswith("hp-train: out/config.yaml: 3 problems\n")
    assert "--data.path: data.path: is fixed when a run begins\n" in text
    assert "--training.seed: training.seed: is fixed when a run begins\n    expected: 0\n    got: 1\n" in text
    assert "--training.sequence_length: training.sequence_length: is fixed when a run begins\n" in text


def test_a_checkpoint_of_another_model_is_refused(work: Path, error, prepared: list) -> None:
    make_run(work)
    other = (work / "run.yaml").read_text().replace("name: tiny", "name: tiny\n  hidden_size: 32")
    (work / "run.yaml").write_text(other.replace("folder: out", "folder: second"))
    config = load_config(work / "run.yaml", registered=registries()).config
    create_run(work / "second", config)
    assert error("resume", "second", "--checkpoint.folder=out/checkpoints") == (
        f"hp-train: {work}/out/checkpoints/step-00000002 is a checkpoint of another model: "
        "hidden_size is 64 there and 32 here\n"
    )


def test_resume_without_a_run_or_a_checkpoint_is_refused(work: Path, error, prepared: list) -> None:
    assert "holds no run (no run.json)" in error("resume", "out")
    create_run(work / "out", load_config(work / "run.yaml", registered=registries()).config)
    assert "out/checkpoints holds no sound checkpoint" in error("resume", "out")


def test_a_resumed_run_compares_its_data_with_their_digest(work: Path, error, prepared: list) -> None:
    make_run(work)
    (tokens,) = Path(".data").glob("*/tokens-*.bin")
    tokens.write_bytes(bytes(tokens.stat().st_size))
    assert f"{tokens} is damaged: its tokens are not those that the run was trained on" in error("resume", "out")


def test_a_resumed_run_needs_its_prepared_data_only(work: Path, prepared: list) -> None:
    make_run(work)
    (work / "corpus.txt").unlink()
    assert cli.main(["resume", "out"]) == 0


# Start or go on ----------------------------------------------------------------------------------------------


def test_run_begins_a_run_and_then_goes_on_with_it(work: Path, prepared: list) -> None:
    assert cli.main(["run", "run.yaml"]) == 0
    assert cli.main(["run", "run.yaml"]) == 0, "killed before its first checkpoint"
    (work / "corpus.txt").unlink()
    run = RunFolder.open(Path("out"))
    save(run, 2)
    assert cli.main(["run", "run.yaml", "--training.steps=20"]) == 0
    assert [checkpoint for _, _, checkpoint in prepared] == [None, None, "step-00000002"]
    assert run.load_config().config.training.steps == 20


def remove_config(run: RunFolder) -> None:
    run.config_file.unlink()


def remove_data(run: RunFolder) -> None:
    shutil.rmtree(run.data)


def leave_half_of_the_data(run: RunFolder) -> None:
    (run.data / "data.json").unlink()
    (described,) = Path(".data").glob("*/corpus.json")
    described.unlink()


def leave_a_lock_alone(run: RunFolder) -> None:
    shutil.rmtree(run.path)
    run.path.mkdir()
    for name in ("lock.json.17-ab", "run.json.incomplete-12ab"):
        (run.path / name).write_text("{")


KILLED = [remove_config, remove_data, leave_half_of_the_data, leave_a_lock_alone]


@pytest.mark.parametrize("killed", KILLED)
def test_a_run_that_was_killed_while_it_was_made_is_made_whole(
    work: Path, prepared: list, killed: Callable[[RunFolder], None]
) -> None:
    run = create_run(work / "out", load_config(work / "run.yaml", registered=registries()).config)
    killed(run)
    assert cli.main(["run", "run.yaml"]) == 0
    assert prepared[-1][2] is None
    assert (run.data / "data.json").is_file()
    assert run.load_config().config.training.steps == 4


def test_run_refuses_what_it_cannot_go_on_with(work: Path, error, prepared: list) -> None:
    assert "run needs the folder to begin or to go on with" in error("run", "run.yaml", "--run.folder=null")
    (work / "out").mkdir()
    (work / "out" / "thesis.txt").write_text("x")
    assert "holds files that are no run" in error("run", "run.yaml")
    (work / "out" / "thesis.txt").unlink()
    make_run(work)
    assert "training.seed: is fixed when a run begins" in error("run", "run.yaml", "--training.seed=1")
    for shard in (work / "out" / "checkpoints").glob("*/shard*"):
        shard.write_bytes(b"")
    # Not from the beginning: there is something to save.
    assert "out/checkpoints holds no sound checkpoint" in error("run", "run.yaml")
    assert prepared == []


def test_resume_from_an_earlier_step_sets_later_checkpoints_aside(work: Path, prepared: list, error, capsys) -> None:
    run = make_run(work)
    save(run, 4)
    save(run, 6)
    assert "holds no checkpoint of step 3; there are: 2, 4, 6" in error("resume", "out", "--from-step=3")
    assert cli.main(["resume", "out", "--from-step=2", "--optimizer.lr=1e-4"]) == 0
    assert prepared[-1][2] == "step-00000002"
    assert capsys.readouterr().err.count("hp-train: set aside out/checkpoints/step-0000000") == 2
    assert list_checkpoints(LocalStorage(run.checkpoints)) == ["step-00000002"]
    assert cli.main(["resume", "out"]) == 0
    assert prepared[-1][2] == "step-00000002", "the later ones are not found again"
    capsys.readouterr()
    assert cli.main(["checkpoints", "out"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in table[:2]] == [
        ["step", "loss", "size", "state", "folder"],
        ["2", "0.5000", "0.0", "MiB", "sound"],
    ]
    assert [line.split()[0] for line in table[2:]] == ["4", "6"]
    assert all(".set-aside-" in line for line in table[2:])


def test_checkpoints_are_listed_with_their_damage(work: Path, capsys) -> None:
    run = create_run(work / "out", load_config(work / "run.yaml", registered=registries()).config)
    assert cli.main(["checkpoints", "out"]) == 0
    assert capsys.readouterr().out == "out/checkpoints holds no checkpoint\n"
    save(run, 2)
    save(run, 4)
    shard = run.checkpoints / "step-00000004" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\7")
    assert cli.main(["checkpoints", "out"]) == 1
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert first.split()[0] == "4"
    assert "damaged: " in first
    assert f"{shard.name}: tensor 'w' (key 'w') is damaged" in first
    assert second.split()[0] == "2"


# Generate and layouts ----------------------------------------------------------------------------------------


def test_generate_continues_the_prompts_given_or_configured(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    make_run(work)
    asked = []
    monkeypatch.setattr(commands, "get_platform", lambda name: name)
    monkeypatch.setattr(
        commands, "generate", lambda config, platform, prompts, checkpoint: asked.append(prompts) or prompts
    )
    assert cli.main(["generate", "out", "--prompt", "--a=b", "--prompt=def f", "--generate.temperature=0"]) == 0
    assert cli.main(["generate", "out"]) == 0
    assert asked == [["--a=b", "def f"], ["def ", "import "]]
    assert capsys.readouterr().out == "--a=b\ndef f\ndef \nimport \n"


def test_layouts_of_a_number_of_ranks(installed: Registries, capsys) -> None:
    assert cli.main(["layouts", "--world-size", "2"]) == 0
    assert capsys.readouterr().out.startswith("9 legal layouts of 2 ranks:\n")


def test_layouts_of_a_configuration_leave_out_what_it_cannot_do(work: Path, capsys) -> None:
    assert cli.main(["layouts", "run.yaml", "--world-size=4"]) == 0
    assert capsys.readouterr().out == (
        "9 legal layouts of 4 ranks:\n"
        "  dp_replicate  dp_shard  cp  tp  pp  ep  etp  expert_mesh\n"
        "             1         1   2   2   1   1    2       folded\n"
        "             1         1   4   1   1   1    1       folded\n"
        "             1         2   1   2   1   1    2       folded\n"
        "             1         2   2   1   1   1    1       folded\n"
        "             1         4   1   1   1   1    1       folded\n"
        "             2         1   1   2   1   1    2       folded\n"
        "             2         1   2   1   1   1    1       folded\n"
        "             2         2   1   1   1   1    1       folded\n"
        "             4         1   1   1   1   1    1       folded\n"
        "every degree must be one of: 1, 2, 4\n"
        "6 layouts cannot be used:\n"
        "  parallel.pp: model 'tiny' has no num_hidden_layers by which to cut it into stages (5 layouts)\n"
        "  parallel.tp: num_key_value_heads = 2 cannot be split over tp = 4 (1 layout)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a CONFIG or a command; `hp-train --help` tells more"),
        (["layouts"], "layouts needs a CONFIG, or a --world-size without settings"),
        (["layouts", "--world-size=0"], "--world-size must be at least 1, got 0"),
        (["layouts", "--world-size=x"], "argument --world-size: invalid int value: 'x'"),
        (["resume"], "the following arguments are required: RUN"),
        (["a.yaml", "b.yaml"], "unrecognized arguments: b.yaml"),
        (["a.yaml", "--training.steps"], "--training.steps needs a value: --training.steps=..."),
        (["--training.steps=1"], "the following arguments are required: CONFIG"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_told(error, installed, arguments: list[str], message: str) -> None:
    assert error(*arguments) == f"hp-train: {message}\n{USAGE}\n"


# Help --------------------------------------------------------------------------------------------------------


def test_the_options_are_frozen(registered: Registries) -> None:
    options = "\n".join(describe_option(one) for one in list_options(registered)) + "\n"
    assert options == OPTIONS.read_text(), f"options changed; where that is wanted, write the left side to {OPTIONS}"


def test_help_lists_every_option_and_command(installed: Registries, capsys) -> None:
    for arguments in (["--help"], ["resume", "-h"], ["layouts", "--help"]):
        assert cli.main(arguments) == 0
        text = capsys.readouterr().out
        assert text.startswith(USAGE)
        assert "  --training.steps=(a whole number; must be given)\n      optimizer steps of the whole run\n" in text
        assert "  with model.name=tiny:\n  --model.hidden_size=(a whole number; default 64)" in text


def test_help_is_quick_and_loads_no_framework() -> None:
    code = (
        "import sys; from hp_trainer.cli import main; main(['--help']);"
        "heavy = {'torch', 'mindspore', 'matplotlib', 'rich', 'safetensors'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--training.steps" in done.stdout


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hp_trainer", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "0.1.0\n")
