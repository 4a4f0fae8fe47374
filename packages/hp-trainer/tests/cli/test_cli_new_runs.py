"""New runs: what could not train is refused before anything starts, all at once."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest
from cli_runs import GOOD, make_run

from hp_trainer import cli
from hp_trainer.cli import train
from hp_trainer.config import TrainerConfig
from hp_trainer.launch import platforms, preflight
from hp_trainer.parallel import ParallelDims
from hp_trainer.registries import Registries
from hp_trainer.run import RunFolder

EXAMPLE = Path(__file__).parents[4] / "examples" / "moe_small.yaml"


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
        "= 4/6 is not an integer\n"
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
        "run.yaml:4: data.path: does not exist\n"
        "    expected: a text file, or a folder with text files\n"
        f"    got: {work}/none.txt\n"
        f"    try: a path that exists ({work} does)\n"
        "run.yaml:9: run.folder: has files that do not belong to a run\n"
        "    expected: a new folder\n"
        "    got: out\n"
        "    try: another --run.folder\n"
    )
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
        "    expected: an integer: total number of optimizer steps\n"
        "    try: --training.steps=...\n"
        "--launch.local_ranks: launch.local_ranks: wrong type\n"
        "    expected: an integer or null\n"
        "    got: 'two' (text)\n"
    )


def test_a_pipeline_of_a_model_that_cannot_be_split_is_refused(work: Path, error) -> None:
    assert error("run.yaml", "--launch.local_ranks=4", "--parallel.pp=2") == (
        "hp-train: run.yaml: 1 problem\n"
        "--parallel.pp: parallel.pp: model 'tiny' has no num_hidden_layers, and cannot be split into stages\n"
    )


def test_compiled_tensor_parallel_blocks_are_refused(work: Path, error) -> None:
    expected_message = error("run.yaml", "--launch.local_ranks=2", "--parallel.tp=2", "--training.compile=true")
    assert "training.compile: tensor parallel blocks compute on DTensors" in expected_message


@pytest.mark.parametrize(
    ("known", "expected_message"),
    [
        ((), "training.compile: platform torch does not compile modules\n    expected: false\n    got: true\n"),
        (
            ("eager", "inductor"),
            "training.compile_backend: platform torch has no such compiler\n    expected: eager or inductor\n"
            "    got: inducter\n    try: training.compile_backend=inductor\n",
        ),
    ],
)
def test_an_unknown_compiler_is_refused(
    work: Path, error, monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...], expected_message: str
) -> None:
    monkeypatch.setattr(preflight, "compile_backends", lambda platform: known)
    assert expected_message in error("run.yaml", "--training.compile=true", "--training.compile_backend=inducter")


def test_more_processes_than_the_machine_can_hold_are_refused(work: Path, error, monkeypatch) -> None:
    monkeypatch.setattr(preflight.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 2**20))
    message = "each rank is a process, and so many do not fit into the memory of this machine\n"
    batch = "--training.global_batch_size=65"
    assert f"launch.local_ranks: {message}    expected: at most 64\n    got: 65\n" in error(
        "run.yaml", "--launch.local_ranks=65", batch
    )
    assert f"launch.cpu_ranks: {message}" in error("run.yaml", "--launch.cpu_ranks=65", batch)


def test_empty_folders_are_refused(work: Path, error) -> None:
    expected_message = error("run.yaml", "--run.folder=", "--checkpoint.folder=")
    assert "run.folder: empty\n    expected: a folder, or null\n" in expected_message
    assert "checkpoint.folder: empty\n    expected: a path\n" in expected_message


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
            "--training.compile: training.compile: context parallel attention communicates, which cannot be "
            "compiled\n    expected: false, or parallel.cp = 1\n    got: true\n",
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
        "--training.global_batch_size: training.global_batch_size: cannot be split over dp_replicate*dp_shard = 1*4 = "
        "4 ranks of micro-batches of 2\n"
        "    expected: a multiple of 8\n"
        "    got: 10\n"
        "    try: training.global_batch_size=8 or 16\n"
    )


def test_experts_that_the_ranks_cannot_share_are_refused(work: Path, error) -> None:
    arguments = ("--model.num_experts=6", "--launch.local_ranks=4", "--parallel.ep=4")
    assert "--parallel.ep: parallel.ep: num_experts = 6 cannot be split over ep = 4" in error("run.yaml", *arguments)


def test_data_without_text_is_refused(work: Path, error) -> None:
    (work / "corpus.txt").write_bytes(b"\xff\x00")
    assert "run.yaml:4: data.path: contains no text" in error("run.yaml")


def test_the_folder_of_another_run_is_refused(work: Path, error) -> None:
    run = make_run(work)
    assert f"run.yaml:9: run.folder: has the run {run.run_id}\n" in error("run.yaml")


def test_what_the_system_refuses_is_told_without_a_traceback(work: Path, prepared: list, capsys) -> None:
    (work / "corpus").write_text("a file, not a folder")
    assert cli.main(["run.yaml", "--run.folder=corpus/run"]) == 2
    expected_message = capsys.readouterr().err
    assert f"--run.folder: run.folder: cannot be created: {work / 'corpus'} is not a folder\n" in expected_message


def test_folders_that_cannot_be_written_are_refused(work: Path, error, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "locked").mkdir()
    access = os.access
    # The superuser may write anywhere, so the answer of the system is given here.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != work / "locked" and access(path, mode))
    expected_message = error("run.yaml", "--run.folder=locked/a/run", "--checkpoint.folder=locked/b")
    where = f"is not writable: {work / 'locked'} belongs to another user or is read-only\n"
    assert f"--run.folder: run.folder: {where}    expected: a writable folder\n" in expected_message
    assert f"--checkpoint.folder: checkpoint.folder: {where}" in expected_message


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
    monkeypatch.setattr(train, "check_new_run", lambda loaded, folder, ranks, known: seen.append(ranks) or [])
    for accelerators in (0, 1, 2, 8):
        monkeypatch.setattr(platforms, "num_accelerators", lambda platform, found=accelerators: found)
        assert cli.main(["run.yaml", f"--run.folder=run{accelerators}", "--launch.cpu_ranks=4"]) == 0
    assert cli.main(["run.yaml", "--run.folder=three", "--launch.local_ranks=3"]) == 0
    assert seen == [4, 1, 2, 8, 3]


def test_more_ranks_than_accelerators_are_refused_with_the_way_out(
    work: Path, error, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "max_local_ranks", lambda platform: 1)
    assert error("run.yaml", "--launch.local_ranks=4") == (
        "hp-train: run.yaml: 1 problem\n"
        "--launch.local_ranks: launch.local_ranks: there is only one accelerator on this machine, and each rank needs "
        "its own\n"
        "    expected: at most 1\n"
        "    got: 4\n"
        "    try: launch.local_ranks=1, or in the environment HP_DEVICE=cpu, to train on the CPU, or "
        "HP_BACKEND=gloo, to share accelerators\n"
    )
    monkeypatch.setattr(preflight, "max_local_ranks", lambda platform: 2)
    assert "are only 2 accelerators" in error("run.yaml", "--launch.local_ranks=4")
    monkeypatch.setattr(preflight, "max_local_ranks", lambda platform: None)
    assert cli.main(["check", "run.yaml", "--launch.local_ranks=4"]) == 0


def test_how_ranks_share_sequences_is_told(work: Path, prepared: list, capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths need not divide; where costs have decided, a table lists all of them, the chosen one marked."""
    given = ["check", "run.yaml", "--launch.local_ranks=3", "--parallel.cp=3", "--model.num_experts=3"]
    assert cli.main(given) == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sequences: ")]
    marked = printed[2].split()
    assert marked[:2] == ["sequences:", "*"]
    assert printed[0] == f"sequences: 3 ranks share each by {marked[2]}, which costs least in a layer:"
    assert {line.split()[-5] for line in printed[2:]} == {"all_gather", "ring", "ulysses"}
    assert cli.main([*given, "--parallel.cp_method=ring"]) == 0
    ring = capsys.readouterr().out
    assert "sequences: 3 ranks share each by ring\n" in ring
    assert "within their documents" not in ring
    for method, is_printed in (("ring", True), ("ulysses", False)):  # ranks that exchange heads have contiguous rows
        assert cli.main([*given, "--data.packing=documents", f"--parallel.cp_method={method}"]) == 0
        expected_message = "sequences: documents are sharded over the ranks, for equal work on each"
        assert (expected_message in capsys.readouterr().out) == is_printed


@pytest.mark.parametrize("accelerators", [0, 1, 2, 8])
def test_the_example_fits_any_machine(
    tmp_path: Path, prepared: list, installed: Registries, monkeypatch: pytest.MonkeyPatch, accelerators: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(platforms, "num_accelerators", lambda platform: accelerators)
    monkeypatch.setattr(preflight, "max_local_ranks", lambda platform: accelerators or None)
    assert cli.main([str(EXAMPLE), "--data.max_tokens=100000"]) == 0
    ((config, *_),) = prepared
    dims = ParallelDims.from_config(config.parallel, accelerators or 4, config.model.options.num_experts)
    assert (dims.dp_shard, dims.ep) == (accelerators or 4, accelerators or 4)


def test_a_file_that_is_not_there_is_told(work: Path, error) -> None:
    assert error("nope.yaml").startswith("hp-train: nope.yaml: 1 problem\nnope.yaml: cannot be read\n")


def test_no_platform_and_several_platforms_are_told(work: Path, error, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "installed_platforms", list)
    assert error("run.yaml") == (
        "hp-train: run.yaml: 1 problem\n"
        "platform: no platform is installed\n"
        "    try: pip install hp-platform-FRAMEWORK (from a clone: pip install ./packages/hp-platform-FRAMEWORK)\n"
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
