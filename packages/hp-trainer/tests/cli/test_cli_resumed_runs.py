"""Resumed runs: from which checkpoint, and what may have changed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import make_run, save

from hp_trainer import cli, plugins
from hp_trainer.checkpoint import LocalStorage, catalog, list_checkpoints, list_set_aside, open_latest, prune
from hp_trainer.cli import report
from hp_trainer.config import load_config
from hp_trainer.plugins import registries
from hp_trainer.run import RunFolder, RunLock, create_run
from hp_trainer.run import folder as folder_module
from hp_trainer.run import lock as lock_module


def test_resume_goes_on_from_the_newest_sound_checkpoint(work: Path, prepared: list, capsys) -> None:
    make_run(work)
    newer = make_checkpoint_copy(work / "out" / "checkpoints", "step-00000002", "step-00000009")
    (newer / "shard-00000.safetensors").write_bytes(b"")
    assert cli.main(["resume", "out", "--training.steps=20", "--launch.local_ranks=2"]) == 0
    ((config, path, checkpoint),) = prepared
    assert (config.training.steps, path, checkpoint) == (20, Path("out"), "step-00000002")
    assert RunFolder.open(path).load_config().config.training.steps == 20
    message = capsys.readouterr().err
    assert "skipped a checkpoint: out/checkpoints/step-00000009/index.json is of step 2" in message


def test_a_run_of_a_platform_that_is_not_here_goes_on_with_the_one_that_is(
    work: Path, prepared: list, error, capsys
) -> None:
    run = make_run(work)
    settings = run.config_file.read_text()
    assert "platform: null" in settings
    run.config_file.write_text(settings.replace("platform: null", "platform: elsewhere"))
    assert cli.main(["resume", "out"]) == 0
    ((config, _, _),) = prepared
    assert config.platform == "torch"
    message = capsys.readouterr().err
    assert message == "hp-train: the run was trained on elsewhere, which is not installed here; continuing with torch\n"
    assert RunFolder.open(work / "out").load_config().config.platform == "torch"
    message = error("resume", "out", "--platform=elsewhere")
    assert "platform: is not installed" in message
    assert "install the package that provides it: its entry point 'elsewhere' of group 'hp_dtensor'" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"model: [\n", "out/config.yaml:2: not YAML"),
        (b"\xff", "cannot be read"),
        (b"model: 2001-99-99\n", "out/config.yaml:1: model.name"),
        (b"model: !!timestamp x\n", "out/config.yaml:1: model.name"),
    ],
)
def test_a_damaged_configuration_is_one_problem(work: Path, error, content: bytes, message: str) -> None:
    make_run(work).config_file.write_bytes(content)
    assert message in error("resume", "out")


def test_checkpoints_that_are_skipped_do_not_count_when_old_ones_are_deleted(work: Path, prepared: list) -> None:
    """Damage of the contents alone is found when a run continues, not when it deletes its old checkpoints."""
    run = make_run(work)
    save(run, 4)
    storage = LocalStorage(run.checkpoints)
    save(run, 4)
    for name in ("step-00000004", "step-00000004-2"):
        shard = run.checkpoints / name / "shard-00000.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + b"\7")
    assert cli.main(["resume", "out"]) == 0
    assert prepared[-1][2] == "step-00000002"
    save(run, 3)
    assert prune(storage, keep=1) == ["step-00000002"]
    assert list_checkpoints(storage) == ["step-00000003"]
    assert len(list_set_aside(storage)) == 2


def test_metrics_that_are_a_named_pipe_are_refused(work: Path, prepared: list, error) -> None:
    """Opening it would wait for a reader."""
    run = make_run(work)
    os.mkfifo(run.metrics_file)
    assert "out/metrics.jsonl is a named pipe; expected a regular file: move it away" in error("resume", "out")


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
    assert "--data.path: data.path: cannot change after the start of a run\n" in text
    assert (
        "--training.seed: training.seed: cannot change after the start of a run\n    expected: 0\n    got: 1\n" in text
    )
    assert "--training.sequence_length: training.sequence_length: cannot change after the start of a run\n" in text


def test_a_checkpoint_of_another_model_is_refused(work: Path, error, prepared: list) -> None:
    make_run(work)
    other = (work / "run.yaml").read_text().replace("name: tiny", "name: tiny\n  hidden_size: 32")
    (work / "run.yaml").write_text(other.replace("folder: out", "folder: second"))
    config = load_config(work / "run.yaml", registered=registries()).config
    create_run(work / "second", config)
    assert error("resume", "second", "--checkpoint.folder=out/checkpoints") == (
        f"hp-train: skipped a checkpoint: {work}/out/checkpoints/step-00000002 is a checkpoint of another model: "
        "hidden_size is 64 there and 32 here\n"
        f"hp-train: {work}/out/checkpoints has no valid checkpoint; restore one of them or its settings, or start "
        "a new run in another folder\n"
    )


def test_resume_without_a_run_or_a_checkpoint_is_refused(work: Path, error, prepared: list) -> None:
    assert "has no run (no run.json)" in error("resume", "out")
    create_run(work / "out", load_config(work / "run.yaml", registered=registries()).config)
    way = "start again with `hp-train run out/config.yaml --run.folder=out`"
    assert error("resume", "out") == f"hp-train: out/checkpoints has no valid checkpoint; {way}\n"


def test_a_resumed_run_compares_its_data_with_their_digest(work: Path, error, prepared: list) -> None:
    make_run(work)
    (tokens,) = Path(".data").glob("*/tokens-*.bin")
    tokens.write_bytes(bytes(tokens.stat().st_size))
    message = error("resume", "out")
    assert f"{tokens} is damaged between bytes 0 and {tokens.stat().st_size}: its tokens are not those that" in message
    # The advice works.
    assert f"; delete {tokens.parent}, and the next start prepares the same data again" in message
    shutil.rmtree(tokens.parent)
    assert cli.main(["resume", "out"]) == 0


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
def test_a_run_that_was_killed_while_it_was_created_is_completed(
    work: Path, prepared: list, killed: Callable[[RunFolder], None]
) -> None:
    run = create_run(work / "out", load_config(work / "run.yaml", registered=registries()).config)
    killed(run)
    assert cli.main(["run", "run.yaml"]) == 0
    assert prepared[-1][2] is None
    assert (run.data / "data.json").is_file()
    assert run.load_config().config.training.steps == 4


@pytest.mark.parametrize("command", [("resume", "out"), ("run", "run.yaml"), ("checkpoints", "out")], ids=" ".join)
@pytest.mark.parametrize("lost", ["run.json", "config.yaml", "data", "data/data.json", "logs", "all"])
def test_small_files_that_are_lost_are_rebuilt_from_a_checkpoint(
    work: Path, prepared: list, capsys, lost: str, command: tuple[str, ...]
) -> None:
    run = make_run(work)
    identity, settings, notes = run.run_id, run.config_file.read_bytes(), (run.data / "data.json").read_bytes()
    # They are not needed: nothing is read or compared with them.
    (work / "corpus.txt").write_text("another text " * 100)
    for file in [run.path / lost] if lost != "all" else run.path.iterdir():
        if file != run.checkpoints:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    assert cli.main(command) == 0
    assert (run.run_id, (run.data / "data.json").read_bytes()) == (identity, notes)
    if command[0] == "checkpoints":
        assert run.config_file.read_bytes() == settings
    else:
        assert [checkpoint for *_, checkpoint in prepared] == ["step-00000002"]
    rebuilt = {"data": "data/data.json", "all": "run.json, config.yaml, data/data.json", "logs": None}.get(lost, lost)
    message = "" if rebuilt is None else f"hp-train: rebuilt what out had lost: {rebuilt}\n"
    assert capsys.readouterr().err == message


def test_a_new_folder_does_not_become_the_run_whose_checkpoints_it_shares(work: Path, prepared: list, capsys) -> None:
    run = make_run(work)
    new = work / "new"
    new.mkdir()  # as the lock does
    assert RunFolder.restore(new, LocalStorage(run.checkpoints)) == []
    assert list(new.iterdir()) == []
    # Nor does a run that lost a file take that of the other run.
    other = create_run(work / "other", run.load_config().config)
    other.config_file.unlink()
    assert RunFolder.restore(other.path, LocalStorage(run.checkpoints)) == []


@pytest.mark.parametrize("change", ["--training.freeze=[w]", "--optimizer.name=sgd"])
def test_a_change_that_no_checkpoint_fits_leaves_the_configuration(work: Path, prepared: list, error, change) -> None:
    run = make_run(work)
    before = run.config_file.read_bytes()
    if "optimizer" in change:
        run.config_file.write_text(run.config_file.read_text().replace("name: adamw", "name: other"))
        before, change = run.config_file.read_bytes(), "--optimizer.name=adamw"
    message = error("resume", "out", change)
    assert "whose checkpoints have other optimizer states" in message
    assert "hp-train resume out --reset-optimizer" in message
    assert run.config_file.read_bytes() == before
    assert prepared == []


def test_an_earlier_checkpoint_may_have_another_optimizer_than_the_configuration(work: Path, prepared: list) -> None:
    run = make_run(work)
    run.config_file.write_text(run.config_file.read_text().replace("name: adamw", "name: other"))
    assert cli.main(["resume", "out", "--from-step=2", "--optimizer.name=adamw"]) == 0
    assert len(prepared) == 1


def test_checkpoints_without_copies_go_on_with_the_configuration(work: Path, prepared: list, error, capsys) -> None:
    """Earlier versions wrote none."""
    run = make_run(work)
    newest = open_latest(LocalStorage(run.checkpoints))
    (run.checkpoints / newest.folder / "index.json").write_text(replace(newest.index, state={}).dump())
    for file in run.path.iterdir():
        if file != run.checkpoints:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
    assert "run.folder: has checkpoints of a run" in error("run.yaml")
    message = error("resume", "out")
    assert (
        "no checkpoint has a copy; continue with the configuration that started the run: `hp-train run CONFIG"
        in message
    )
    assert cli.main(["run", "run.yaml"]) == 0
    assert prepared[-1][2] == "step-00000002"
    assert capsys.readouterr().err == "hp-train: rebuilt what out had lost: data\n"


BUILDER = """\
from dataclasses import dataclass

@dataclass(frozen=True)
class Options:
    width: int = 8

def {name}(options: Options):
    raise AssertionError("no rank is started")
"""


def test_a_model_file_may_move_and_its_function_be_renamed(
    work: Path, prepared: list, error, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "own.py").write_text(BUILDER.format(name="build"))
    (work / "run.yaml").write_text((work / "run.yaml").read_text().replace("name: tiny", "name: own.py:build"))
    run = make_run(work)
    (work / "own.py").unlink()
    (work / "src").mkdir()
    (work / "src" / "model.py").write_text(BUILDER.format(name="make"))
    # As in a process of its own.
    plugins.registries.cache_clear()
    for name in [name for name in sys.modules if name.startswith("hp_user_own_")]:
        monkeypatch.delitem(sys.modules, name)
    assert "if it has moved, give its new path, such as --model.name=FILE.py:NAME" in error("resume", "out")
    old, new = f"{work}/own.py:build", f"{work}/src/model.py:make"
    note = f"hp-train: the checkpoint is of {old}, continued by {new}; its tensors are compared\n"
    assert cli.main(["checkpoints", "out", "--model.name=src/model.py:make"]) == 0
    assert cli.main(["resume", "out", "--model.name=src/model.py:make"]) == 0
    assert capsys.readouterr().err == note
    assert run.load_config().config.model.name == new
    # Again elsewhere, and by the command for restart loops. Options are compared as before.
    (work / "src" / "model.py").rename(work / "third.py")
    settings = (work / "run.yaml").read_text().replace("own.py:build", "third.py:make")
    (work / "run.yaml").write_text(settings)
    assert cli.main(["run", "run.yaml"]) == 0
    assert [checkpoint for *_, checkpoint in prepared] == ["step-00000002"] * 2
    capsys.readouterr()
    assert "model.width: cannot change after the start of a run" in error("run", "run.yaml", "--model.width=16")


def test_a_model_of_a_file_cannot_take_the_place_of_another_model(work: Path, error, prepared: list) -> None:
    """Its options are not those of the run, whose configuration has no unknown key."""
    make_run(work)
    (work / "own.py").write_text(BUILDER.format(name="build").replace("width", "height"))
    what = "model.name: cannot change after the start of a run\n    expected: tiny\n    got: "
    message = error("resume", "out", "--model.name=own.py:build")
    assert f"{what}own.py:build\n    try: a new run" in message
    assert message.startswith("hp-train: out/config.yaml: 1 problem\n")
    text = (work / "run.yaml").read_text()
    (work / "run.yaml").write_text(text.replace("name: tiny", "name: own.py:build"))
    message = error("run", "run.yaml")
    assert f"{what}{work}/own.py:build\n    try: a new run" in message
    assert "unknown key" not in message


def test_run_refuses_what_it_cannot_go_on_with(work: Path, error, prepared: list) -> None:
    assert "run needs the folder of the run to start or continue" in error("run", "run.yaml", "--run.folder=null")
    (work / "out").mkdir()
    (work / "out" / "thesis.txt").write_text("x")
    assert "has files that do not belong to a run" in error("run", "run.yaml")
    (work / "out" / "thesis.txt").unlink()
    make_run(work)
    assert "training.seed: cannot change after the start of a run" in error("run", "run.yaml", "--training.seed=1")
    for shard in (work / "out" / "checkpoints").glob("*/shard*"):
        shard.write_bytes(b"")
    # Not from the beginning: there is something to save.
    *passed_over, message = error("run", "run.yaml").splitlines()
    assert len(passed_over) == len(list((work / "out" / "checkpoints").iterdir()))
    assert message.startswith("hp-train: out/checkpoints has no valid checkpoint; restore one of them")
    assert prepared == []


def test_resume_from_an_earlier_step_sets_later_checkpoints_aside(work: Path, prepared: list, error, capsys) -> None:
    run = make_run(work)
    save(run, 4)
    save(run, 6)
    assert "has no checkpoint of step 3; available steps: 2, 4, 6" in error("resume", "out", "--from-step=3")
    assert cli.main(["resume", "out", "--from-step=2", "--optimizer.lr=1e-4"]) == 0
    assert prepared[-1][2] == "step-00000002"
    assert capsys.readouterr().err.count("hp-train: moved out/checkpoints/step-0000000") == 2
    assert list_checkpoints(LocalStorage(run.checkpoints)) == ["step-00000002"]
    assert cli.main(["resume", "out"]) == 0
    assert prepared[-1][2] == "step-00000002", "the later ones are not found again"
    capsys.readouterr()
    assert cli.main(["checkpoints", "out"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in table[:2]] == [
        ["step", "loss", "size", "state", "folder"],
        ["2", "0.5000", "0.0", "MiB", "valid"],
    ]
    assert [line.split()[0] for line in table[2:]] == ["4", "6"]
    assert all(".set-aside-" in line for line in table[2:])


def test_checkpoints_are_listed_with_their_damage(work: Path, capsys) -> None:
    run = create_run(work / "out", load_config(work / "run.yaml", registered=registries()).config)
    assert cli.main(["checkpoints", "out"]) == 0
    assert capsys.readouterr().out == "out/checkpoints has no checkpoint\n"
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


class Failing:
    """Reads of paths with a text in them fail a number of times, as on a network file system."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, text: str, times: int) -> None:
        self.times, self._text = times, text
        self._stat = Path.stat
        monkeypatch.setattr(Path, "stat", self.of)
        monkeypatch.setattr(catalog, "_PAUSE_SECONDS", 0.0)

    @property
    def of(self) -> Callable[..., os.stat_result]:
        def stat(path: Path, **options: bool) -> os.stat_result:
            if self._text in str(path) and self.times:
                self.times -= 1
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return self._stat(path, **options)

        return stat


@pytest.mark.parametrize("command", [["resume", "out"], ["run", "run.yaml"], ["generate", "out"]])
def test_a_checkpoint_that_cannot_be_read_is_not_taken_for_damaged(
    work: Path, prepared: list, capsys, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    save(make_run(work), 4)
    monkeypatch.setattr(report, "import_platform", lambda name: name)
    monkeypatch.setattr(report, "generate", lambda config, platform, prompts, checkpoint: [checkpoint.folder])
    failing = Failing(monkeypatch, "step-00000004/shard", 100)
    assert cli.main(command) == 1
    assert "out/checkpoints/step-00000004/shard-00000.safetensors: the network file system has lost the file" in (
        capsys.readouterr().err
    )
    assert list_checkpoints(LocalStorage(work / "out" / "checkpoints")) == ["step-00000004", "step-00000002"]
    # It may fail for a moment only.
    failing.times = 2
    assert cli.main(command) == 0
    assert "step-00000004" in (capsys.readouterr().out if command[0] == "generate" else prepared[-1][2])


def test_small_files_that_cannot_be_read_are_not_called_damaged(
    work: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The advice for damaged ones is to delete them."""

    def unreadable(path: Path, *limits: int) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    run = make_run(work)
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "read_plain_text", unreadable)
        assert cli.main(["resume", "out"]) == 1
    assert "out/run.json: permission denied (Permission denied); " in capsys.readouterr().err
    with RunLock(run.path), monkeypatch.context() as patch:
        patch.setattr(lock_module, "read_plain_text", unreadable)
        with pytest.raises(PermissionError, match=r"lock\.json"):
            RunLock(run.path).acquire()


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 260, "hidden_size": 8,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32,
}  # fmt: skip


def test_a_run_goes_on_when_the_directory_of_its_model_is_gone(work: Path, prepared: list, error, capsys) -> None:
    """As `resume` does; without a checkpoint the weights of the directory are needed."""
    (work / "hf").mkdir()
    (work / "hf" / "config.json").write_text(json.dumps(LLAMA))
    text = (work / "run.yaml").read_text()
    (work / "run.yaml").write_text(text.replace("name: tiny", "name: decoder\n  from: hf"))
    create_run(work / "out", load_config(work / "run.yaml", registered=registries()).config)
    shutil.move(work / "hf", work / "elsewhere")
    assert "run.yaml:3: model.from: " in error("run", "run.yaml")
    save(RunFolder.open(work / "out"), 2)
    assert cli.main(["run", "run.yaml"]) == 0
    ((config, _, checkpoint),) = prepared
    assert (config.model.source, checkpoint) == (str(work / "hf"), "step-00000002")
    message = f"{work / 'hf'} is missing; the run continues with its own copy, out/model\n"
    assert capsys.readouterr().err == f"hp-train: {message}"
    assert cli.main(["resume", "out"]) == 0
    capsys.readouterr()
    assert "model.rms_norm_eps: cannot change" in error("run", "run.yaml", "--model.rms_norm_eps=1e-5")
    # It is there again, under another name.
    assert cli.main(["run", "run.yaml", "--model.from=elsewhere"]) == 2
    assert "model.from: cannot change after the start of a run" in capsys.readouterr().err
