"""`hp-train` with real ranks: what it writes, and how it ends when it is stopped, killed or started by a launcher."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from running_commands import (
    BIN,
    END_SECONDS,
    ENDLESS,
    START_SECONDS,
    TWO_RANKS,
    losses_of,
    newest_step,
    steps_of,
    wait_for_step,
)
from training_runs import skip_unless_torch_or

from hp_trainer.metrics import read_metrics
from hp_trainer.run import RunFolder

pytestmark = pytest.mark.real_ranks


def assert_resumes(hp_train, run: Path, *overrides: str) -> None:
    """Four more steps by `hp-train resume` end the run well."""
    first = newest_step(run)
    code, out, err = hp_train("resume", str(run), f"--training.steps={first + 4}", *overrides).finish()
    assert code == 0, err
    assert out.endswith(f"run folder: {run}\n")
    assert steps_of(run) == list(range(1, first + 5))
    assert newest_step(run) == first + 4


# Prints the imports of a framework, which it refuses, and at the end which of these modules were imported.
WATCHED = """\
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "mindspore"):
            print("import of", name, file=sys.stderr, flush=True)
            raise ImportError("refused")
sys.meta_path.insert(0, Refuse())
from hp_trainer.cli import main
code = main(sys.argv[1:])
late = ("pydantic", "yaml", "matplotlib", "rich", "tokenizers", "mlflow", "wandb", "hp_trainer.parallel")
print([name for name in late if name in sys.modules], code)
"""


def watched(folder, platform, *arguments: str) -> tuple[str, str]:
    """Output and errors of a command that cannot import a framework."""
    environment = {**os.environ, "HP_PLATFORM": platform.name, "HP_DEVICE": "cpu"}
    command = [sys.executable, "-P", "-c", WATCHED, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=START_SECONDS)
    return done.stdout, done.stderr


def test_commands_import_only_what_they_need(folder, hp_platform):
    assert watched(folder, hp_platform, "--help")[0].endswith("\n[] 0\n")
    out, err = watched(folder, hp_platform, "check", "run.yaml", *TWO_RANKS)
    assert out.endswith("['pydantic', 'yaml', 'hp_trainer.parallel'] 0\n")
    # Neither to count accelerators where no driver is, nor for the names of dispatchers.
    assert err == ""


def test_a_run_says_what_it_does_before_it_imports_a_framework(folder, hp_platform):
    # One rank is this process; the process that several are forked from says nothing.
    _, err = watched(folder, hp_platform, "run.yaml")
    name = hp_platform.name
    assert err.splitlines()[:3] == ["hp-train: reading run.yaml", f"hp-train: importing {name}", f"import of {name}"]


def test_a_run_from_the_command_to_the_samples(folder, hp_train, hp_platform):
    arguments = ("--generate.prompts=['ab', 'ü']", "--generate.max_new_tokens=5", "--training.eval_interval=3")
    trackers = "--metrics.trackers=[jsonl, progress, loss_curve]"
    # The other processes here are forked; these are started as a user's are.
    new = hp_platform.name == "torch"
    code, out, err = hp_train("run.yaml", "--run.folder=out", *TWO_RANKS, *arguments, trackers, new=new).finish()
    assert code == 0, err
    run = RunFolder.open(folder / "out")
    assert steps_of(run.path) == [1, 2, 3, 4, 5, 6]
    assert run.loss_picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000003", "step-00000006"]
    assert (run.logs / "rank1.log").is_file()
    assert "parameters, 2 ranks on" in out
    said = ["reading run.yaml", f"importing {hp_platform.name}", "preparing the data"]
    said += [f"starting 2 ranks on {hp_platform.name}", "building the model"]
    assert err.splitlines()[:5] == [f"hp-train: {line}" for line in said]
    assert re.search(r"step 6/6  loss \d\.\d{4}  [\d,]+ tokens/s  lr \S+  [\d.]+ GiB  \S+ GFLOP/s  left 0:00", out)
    assert "step 3: evaluation loss" in out
    samples = run.samples_file.read_text()
    assert "\nab" in samples
    assert "\nü" in samples
    assert "run folder: out" in out
    # The resolved configuration is a configuration: the same run again, elsewhere.
    config = run.load_config().config
    assert (config.launch.local_ranks, config.training.eval_interval, config.run.folder) == (2, 3, "out")
    code, out, err = hp_train("generate", "out", "--prompt", "naïve", "--generate.temperature=0").finish()
    assert code == 0, err
    assert out.startswith("naïve")
    again = hp_train("run.yaml", "--run.folder=out").finish()
    assert again[0] == 2
    assert "has the run" in again[2]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_stopped_run_ends_in_order_and_goes_on(folder, hp_train, hp_platform, sign):
    skip_unless_torch_or(hp_platform, sign == signal.SIGINT)
    command = hp_train("run.yaml", "--run.folder=out", *TWO_RANKS, *ENDLESS)
    run = folder / "out"
    wait_for_step(run, 7, command)
    # As a terminal does, to all that is in the foreground.
    os.killpg(command.process.pid, sign)
    code, _, err = command.finish(END_SECONDS)
    assert code == 128 + sign
    done = steps_of(run)[-1]
    assert newest_step(run) == done, "the step under way was finished and saved"
    # Before it a slow machine may have reported a step or a save that took long.
    assert err.splitlines()[-1] == (
        f"hp-train: stopped by {sign.name}. The newest checkpoint is of step {done} of 100000; "
        "continue with `hp-train resume out`"
    )
    assert "Traceback" not in err
    assert command.processes() == []
    # Both signals leave the same checkpoint, and a killed rank leaves one on every platform.
    if sign == signal.SIGINT and hp_platform.name == "torch":
        assert_resumes(hp_train, run, *TWO_RANKS)


@pytest.mark.usefixtures("torch_suffices")
def test_a_run_in_one_process_stops_the_same_way(folder, hp_train):
    command = hp_train("run.yaml", "--run.folder=out", *ENDLESS)
    wait_for_step(folder / "out", 3, command)
    # The run is locked: a second job names the owner, and touches nothing.
    code, out, err = hp_train("resume", "out").finish()
    assert (code, out) == (1, "")
    *_, last = err.splitlines()
    assert last.startswith(f"hp-train: the run out is being trained by process {command.process.pid} on ")
    os.kill(command.process.pid, signal.SIGTERM)
    code, _, err = command.finish(END_SECONDS)
    assert code == 128 + signal.SIGTERM
    assert "stopped by SIGTERM. The newest checkpoint is of step " in err
    assert newest_step(folder / "out") == steps_of(folder / "out")[-1]
    assert not list((folder / "out").glob("lock.json*"))


@pytest.mark.usefixtures("torch_suffices")
def test_a_signal_before_training_ends_at_once(folder, hp_train):
    command = hp_train("run.yaml", "--run.folder=out", *TWO_RANKS, new=True)
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "out" / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    command.process.send_signal(signal.SIGINT)
    code, _, err = command.finish(END_SECONDS)
    assert code == 128 + signal.SIGINT
    *_, last = err.splitlines()
    assert last.startswith("hp-train: stopped by SIGINT")
    assert "Traceback" not in err


def test_a_killed_rank_is_named_and_the_checkpoint_before_goes_on(folder, hp_train):
    command = hp_train("run.yaml", "--run.folder=out", *TWO_RANKS, *ENDLESS)
    run = folder / "out"
    wait_for_step(run, 7, command)
    os.kill(command.rank(1), signal.SIGKILL)
    code, _, err = command.finish(END_SECONDS)
    assert code == 1
    assert "rank 1 of 2 was killed by SIGKILL" in err
    assert command.processes() == []
    assert newest_step(run) % 5 == 0
    assert_resumes(hp_train, run, "--launch.local_ranks=1", "--parallel.dp_shard=-1", "--parallel.ep=1")


def torchrun(port: int, node: int, folder: Path) -> tuple[str, ...]:
    return (
        *("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}", "--nproc-per-node=1"),
        *("--master-addr=127.0.0.1", f"--master-port={port}", "-m", "hp_trainer"),
    )


def msrun(port: int, node: int, folder: Path) -> tuple[str, ...]:
    number = ("--worker_num=2", "--local_worker_num=1", f"--node_rank={node}")
    return (
        *(str(BIN / "msrun"), *number, "--join=True"),
        *("--master_addr=127.0.0.1", f"--master_port={port}", f"--log_dir={folder / f'machine{node}'}"),
        str(BIN / "hp-train"),
    )


LAUNCHERS = {"torch": torchrun, "mindspore": msrun}


def test_two_machines_of_the_frameworks_launcher_train_one_model(folder, lab, hp_train, hp_platform, free_port):
    if hp_platform.name not in LAUNCHERS:
        pytest.skip(f"{hp_platform.name} has no launcher of its own")
    port = free_port()
    expected = lab.reference("one")
    # Each rank imports the framework for seconds; `dtensor/launch/test_environment.py` has two on a machine.
    degrees = ("--parallel.tp=2", "--parallel.ep=2", "--parallel.etp=1")
    launcher = LAUNCHERS[hp_platform.name]
    machines = [
        hp_train("run.yaml", "--run.folder=out", *degrees, launcher=launcher(port, node, folder)) for node in range(2)
    ]
    ended = [machine.finish() for machine in machines]
    assert [code for code, _, _ in ended] == [0, 0], ended
    run = folder / "out"
    assert "run folder" in ended[0][1]
    assert "run folder" not in ended[1][1], "the second machine has no rank 0"
    assert next(read_metrics(run / "metrics.jsonl"))["world_size"] == 2
    np.testing.assert_allclose(losses_of(run), losses_of(expected.path), rtol=2e-5)
    index = json.loads((run / "checkpoints" / "step-00000006" / "index.json").read_text())
    assert len(index["shard_bytes"]) == 2
    assert index["state"]["samples"] == 48


# Bad input -----------------------------------------------------------------------------------------------------


BAD = {
    "too little text": (("--data.path=short.txt",), "one sample takes 17"),
    "nothing to evaluate with": (
        ("--training.eval_interval=2", "--data.eval_fraction=0"),
        "the evaluation data have no sample",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_data_that_will_not_do_are_refused_before_any_rank_starts(folder, hp_train, hp_platform, arguments, message):
    skip_unless_torch_or(hp_platform, False)
    (folder / "short.txt").write_text("short")
    before = set(itertools.chain(folder.iterdir()))
    code, out, err = hp_train("run.yaml", "--run.folder=out", *TWO_RANKS, *arguments).finish()
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    # The cache of prepared data, which the next run looks into first, is no part of the run.
    left = {path for path in folder.iterdir() if path.name != ".data"}
    assert left == before, "nothing is left of a run that could not begin"


@pytest.mark.usefixtures("torch_suffices")
def test_processes_that_a_forked_command_forks_by_itself_count_as_left_running(hp_train):
    command = hp_train(launcher=("-c", "import os, time\nif os.fork() == 0: time.sleep(100)"))
    assert command.process.wait(START_SECONDS) == 0
    (left,) = command.processes()
    assert os.getsid(left) == command.process.pid
    command.kill_everything()
    assert command.processes() == []
