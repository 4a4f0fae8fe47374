"""Ranks are killed at random while 4, then 3, then 4 of them train: one loss curve, that of a run without any kill."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from running_commands import Command, losses_of, newest_step, steps_of, wait_for_step

from hp_trainer.metrics import read_metrics

pytestmark = pytest.mark.real_ranks

# 12 samples are divided by 3 ranks and by 4.
SETTINGS = (
    "--training.steps=600",
    "--optimizer.lr=1e-3",
    "--training.global_batch_size=12",
    "--lr_schedule.kind=constant",
    "--checkpoint.interval=20",
    "--checkpoint.keep=2",
    "--generate.prompts=[]",
)


@pytest.fixture
def whole(folder, hp_train) -> list[float]:
    """Losses of one rank that nobody kills."""
    code, _, err = hp_train("run.yaml", "--run.folder=whole", *SETTINGS).finish(900)
    assert code == 0, err
    return losses_of(folder / "whole")


def assert_same_curve(run: Path, expected: list[float], sizes: set[int]) -> None:
    assert steps_of(run) == list(range(1, len(expected) + 1)), "every step once, in order"
    np.testing.assert_allclose(losses_of(run), expected, rtol=1e-3)
    assert {event["world_size"] for event in read_metrics(run / "metrics.jsonl") if event["event"] == "start"} == sizes


def kill_at_random(command: Command, size: int, random_: random.Random) -> None:
    time.sleep(random_.uniform(0, 1))
    os.kill(command.rank(random_.randrange(size)), signal.SIGKILL)


def test_local_ranks_of_changing_number(folder, hp_train, whole):
    run, random_ = folder / "out", random.Random(5)
    kills = 0
    for size, until in ((4, 150), (3, 300), (4, None)):
        command = hp_train(
            "run",
            "run.yaml",
            "--run.folder=out",
            *SETTINGS,
            f"--launch.local_ranks={size}",
            "--launch.max_restarts=3",
            *(() if until is None else (f"--training.steps={until}",)),
        )
        begun = steps_of(run)[-1] if steps_of(run) else 0
        wait_for_step(run, begun + 25, command)
        if command.process.poll() is None:
            kill_at_random(command, size, random_)
            kills += 1
        code, _, err = command.finish(600)
        assert code == 0, err
        assert "starting the ranks again" in err
    assert kills == 3
    assert_same_curve(run, whole, {3, 4})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_machines_of_torchrun_come_and_go(folder, hp_train, whole, monkeypatch):
    pytest.importorskip("torch")
    # Agents of torch keep the address of a machine that has left, unless each round has a store of its own.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    run, port, random_ = folder / "out", free_port(), random.Random(6)

    def machine() -> Command:
        launcher = (
            *("-m", "torch.distributed.run", "--nnodes=3:4", "--nproc-per-node=1", "--max-restarts=20"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=proof"),
            *("--rdzv-conf=last_call_timeout=5,join_timeout=300", "--monitor-interval=0.3", "-m", "hp_trainer"),
        )
        return hp_train("run", "run.yaml", "--run.folder=out", *SETTINGS, launcher=launcher)

    def until_step(step: int) -> None:
        wait_for_step(run, step, machines[0])

    machines = [machine()]
    time.sleep(8)  # the first one serves the meeting
    machines += [machine() for _ in range(3)]
    until_step(50)
    victim = random_.choice(machines[1:])
    for pid in victim.processes():
        os.kill(pid, signal.SIGKILL)
    victim.process.communicate()
    machines.remove(victim)
    until_step(newest_step(run) + 50)
    machines.append(machine())
    ended = [each.finish(600) for each in machines]
    assert [code for code, _, _ in ended] == [0] * 4, [err[-3000:] for _, _, err in ended]
    assert_same_curve(run, whole, {3, 4})
