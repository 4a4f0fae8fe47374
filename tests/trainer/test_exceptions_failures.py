"""Disks, limits, closed terminals and early signals: one line that says where and what to do, and the exit code."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
from running_commands import END_SECONDS, START_SECONDS, TWO_RANKS, newest_step, steps_of, wait_for_step
from training_runs import skip_unless_torch_or

pytestmark = pytest.mark.real_ranks


def shell(folder, platform, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in which `$HP` is `hp-train`."""
    command = f"HP={shlex.quote(shlex.join([sys.executable, '-m', 'hp_trainer']))}; {script}"
    environment = os.environ | {"HP_PLATFORM": platform.name, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=START_SECONDS
    )


# `ulimit -f 8` and hp-train, as a script, since no shell can be forked from a process that has imported the framework.
LIMITED = """\
import resource, runpy
resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 1024, 8 * 1024))
runpy.run_module("hp_trainer", run_name="__main__", alter_sys=True)
"""


def test_a_file_size_limit_is_told_with_the_path_and_what_is_safe(folder, hp_platform, hp_train):
    skip_unless_torch_or(hp_platform, False)
    (folder / "limited.py").write_text(LIMITED)
    code, _, err = hp_train("run.yaml", "--run.folder=out", launcher=("limited.py",)).finish()
    assert code == 1
    *_, message, left = err.splitlines()
    assert message.startswith(
        "hp-train: writing a checkpoint failed; rank 0: out/checkpoints/step-00000003.incomplete-"
    )
    assert "/shard-00000.safetensors: the file would be larger than this process may write" in message
    assert message.endswith("raise the limit (ulimit -f)")
    assert left == "There is no checkpoint yet; start again with `hp-train run out/config.yaml --run.folder=out`"
    assert "Traceback" not in err
    assert list((folder / "out" / "checkpoints").iterdir()) == []
    # What it says is so.
    assert hp_train("run", "out/config.yaml", "--run.folder=out").finish()[0] == 0


def test_the_same_limit_in_one_of_several_ranks(folder, hp_platform):
    skip_unless_torch_or(hp_platform, False)
    done = shell(folder, hp_platform, f"ulimit -f 8; $HP run.yaml --run.folder=out {shlex.join(TWO_RANKS)}")
    assert done.returncode == 1
    assert (
        "CheckpointError: writing a checkpoint failed; rank 0: out/checkpoints/step-00000003.incomplete-" in done.stderr
    )
    assert "the file would be larger than this process may write" in done.stderr
    assert "There is no checkpoint yet; start again with `hp-train run out/config.yaml --run.folder=out`" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("torch_suffices")
def test_a_signal_to_a_rank_in_its_first_moment_stops_the_run(folder, hp_train):
    command = hp_train("run.yaml", "--run.folder=out", *TWO_RANKS, new=True)
    deadline = time.monotonic() + START_SECONDS
    while not command.ranks_numbered(1) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(command.rank(1), signal.SIGTERM)
    code, _, err = command.finish(END_SECONDS)
    assert code == 128 + signal.SIGTERM, err
    assert "hp-train: stopped by SIGTERM. There is no checkpoint yet; " in err
    assert "Traceback" not in err


@pytest.mark.usefixtures("torch_suffices")
def test_a_run_goes_on_when_nobody_reads_what_it_says(folder, hp_platform, hp_train):
    progress = "--metrics.trackers=[jsonl, {name: progress, interval_seconds: 0}]"
    process = hp_train("run.yaml", "--run.folder=out", "--generate.prompts=[ab]", progress).process
    # All other lines are lost.
    assert process.stderr.readline() == "hp-train: reading run.yaml\n"
    process.stdout.close()
    process.stderr.close()
    assert process.wait(END_SECONDS) == 0
    assert steps_of(folder / "out") == [1, 2, 3, 4, 5, 6]
    # A new process, as a forked one has files under these numbers.
    done = shell(folder, hp_platform, "$HP run run.yaml --run.folder=out >&- 2>&- <&-")
    assert done.returncode == 0
    assert newest_step(folder / "out") == 6


@pytest.mark.usefixtures("torch_suffices")
def test_a_terminal_that_is_closed_stops_the_run_in_order(folder, hp_train):
    command = hp_train("run.yaml", "--run.folder=out", "--training.steps=100000", "--checkpoint.interval=5")
    wait_for_step(folder / "out", 3, command)
    os.kill(command.process.pid, signal.SIGUSR1)
    while "Current thread" not in (line := command.process.stderr.readline()):
        assert line, "the stacks of a run in one process"
    # As the terminal goes: nothing can be written any more, and then the signal comes.
    command.process.stdout.close()
    command.process.stderr.close()
    os.kill(command.process.pid, signal.SIGHUP)
    assert command.process.wait(END_SECONDS) == 128 + signal.SIGHUP
    assert newest_step(folder / "out") == steps_of(folder / "out")[-1]


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize(("script", "code", "message"), [
    # The reader has ended before anything is written.
    ("mkfifo p; : < p & exec > p; wait; $HP --help; exit $?", 128 + signal.SIGPIPE, ""),
    ("$HP --help > /dev/full", 1, "hp-train: the disk is full"),
    ("$HP --help >&-", 0, ""),
])  # fmt: skip
def test_output_that_cannot_be_written(folder, hp_platform, script, code, message):
    done = shell(folder, hp_platform, script)
    assert done.returncode == code
    assert done.stderr.startswith(message)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
