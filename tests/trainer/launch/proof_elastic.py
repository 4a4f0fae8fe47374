"""Ranks are killed at random while 4, then 3, then 4 of them train: one loss curve, that of a run without any kill."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from running_commands import START_SECONDS, Command, add_plugin, losses_of, steps_of, wait_for_step

from hp_trainer.metrics import read_metrics

pytestmark = pytest.mark.real_ranks

# 12 samples are divided by 3 ranks and by 4.
SETTINGS = (
    "--training.steps=300",
    "--optimizer.lr=1e-3",
    "--training.global_batch_size=12",
    "--lr_schedule.kind=constant",
    "--checkpoint.interval=10",
    "--checkpoint.keep=2",
    "--generate.prompts=[]",
)

# While the file `slowly` is there each step takes a second, so that
# a machine that takes long to import a framework still meets a run that is not over.
PACE = """\
import time
from pathlib import Path

from hp_trainer.plugins import hookimpl


@hookimpl
def hp_before_step(record):
    if Path("slowly").exists():
        time.sleep(1.0)
"""


@pytest.fixture
def full(folder, hp_train) -> list[float]:
    """Losses of one undisturbed rank."""
    code, _, err = hp_train("run.yaml", "--run.folder=undisturbed", *SETTINGS).finish(900)
    assert code == 0, err
    return losses_of(folder / "undisturbed")


@pytest.fixture
def slowly(folder, monkeypatch) -> Callable[[bool], None]:
    """Makes the steps of runs that begin from now on take a second each, or lets them go on as fast as they can."""
    add_plugin(folder, "pace", PACE, monkeypatch)

    def choose(wanted: bool) -> None:
        if wanted:
            (folder / "slowly").touch()
        else:
            (folder / "slowly").unlink(missing_ok=True)

    return choose


def sizes_of(run: Path) -> list[int]:
    """Numbers of ranks that have trained, one after the other."""
    return [event["world_size"] for event in read_metrics(run / "metrics.jsonl") if event["event"] == "start"]


def assert_same_curve(run: Path, expected: list[float]) -> None:
    assert steps_of(run) == list(range(1, len(expected) + 1)), "every step once, in order"
    np.testing.assert_allclose(losses_of(run), expected, rtol=1e-3)


def kill_a_rank(commands: list[Command], random_: random.Random) -> None:
    time.sleep(random_.uniform(0, 1))
    os.kill(random_.choice([pid for command in commands for pid in command.ranks()]), signal.SIGKILL)


def test_local_ranks_of_changing_number(folder, hp_train, full, slowly):
    run, random_ = folder / "out", random.Random(5)
    for size, until in ((4, 100), (3, 200), (4, 300)):
        slowly(True)
        command = hp_train(
            "run",
            "run.yaml",
            "--run.folder=out",
            *SETTINGS,
            f"--launch.local_ranks={size}",
            "--launch.max_restarts=3",
            f"--training.steps={until}",
        )
        wait_for_step(run, until - 97, command)
        kill_a_rank([command], random_)
        slowly(False)
        code, _, err = command.finish(600)
        assert code == 0, err
        assert "restarting the ranks" in err
    assert sizes_of(run) == [4, 4, 3, 3, 4, 4]
    assert_same_curve(run, full)


def wait_for_sizes(run: Path, sizes: list[int]) -> None:
    """Return when the numbers of ranks that have trained, without repeats, are `sizes`."""
    deadline = time.monotonic() + 2 * START_SECONDS
    while time.monotonic() < deadline:
        found = sizes_of(run)
        if [size for index, size in enumerate(found) if found[index - 1 : index] != [size]] == sizes:
            return
        time.sleep(0.1)
    pytest.fail(f"{sizes_of(run)} ranks have trained, expected {sizes}")


def test_machines_of_torchrun_come_and_go(folder, hp_train, full, slowly, monkeypatch, free_port):
    pytest.importorskip("torch")
    # Agents of torch keep the address of a machine that has left, unless each round has a store of its own.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    run, port, random_ = folder / "out", free_port(), random.Random(6)

    def machine() -> Command:
        launcher = (
            *("-m", "torch.distributed.run", "--nnodes=3:4", "--nproc-per-node=1", "--max-restarts=20"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=proof"),
            *("--rdzv-conf=last_call_timeout=30,join_timeout=300", "--monitor-interval=0.3", "-m", "hp_trainer"),
        )
        return hp_train("run", "run.yaml", "--run.folder=out", *SETTINGS, launcher=launcher)

    slowly(False)
    machines = [machine()]
    time.sleep(8)  # the first one serves the meeting
    machines += [machine() for _ in range(3)]
    wait_for_step(run, 25, machines[0])
    # One rank dies, and its machine starts it again.
    kill_a_rank(machines, random_)
    wait_for_step(run, steps_of(run)[-1] + 25, machines[0])
    # All ranks of a machine die.
    slowly(True)
    victim = random_.choice(machines[1:])
    for pid in victim.processes():
        os.kill(pid, signal.SIGKILL)
    victim.process.communicate()
    machines.remove(victim)
    wait_for_sizes(run, [4, 3])
    machines.append(machine())
    wait_for_sizes(run, [4, 3, 4])
    slowly(False)
    ended = [each.finish(600) for each in machines]
    assert [code for code, _, _ in ended] == [0] * 4, [err[-3000:] for _, _, err in ended]
    assert_same_curve(run, full)
