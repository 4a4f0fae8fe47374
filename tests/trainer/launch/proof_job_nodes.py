"""Machines die with their ranks, and replicas are lost one after the other: with the weights of an undisturbed run.

All machines are processes here, as in `test_job_nodes.py`.
"""

from __future__ import annotations

import re
import signal

import pytest
from running_commands import losses_of, wait_for_step
from test_job_nodes import commands, finish
from test_job_recovery import OPTIONS, expect_close, expect_same, training_with_deaths

pytestmark = pytest.mark.real_ranks

FOUR_RANKS = ("--launch.local_ranks=2", "--parallel.dp_shard=4")


@pytest.fixture
def node(folder, hp_train, hp_platform, monkeypatch):
    return commands(folder, hp_train, hp_platform, monkeypatch)


@pytest.fixture
def dying(folder, hp_train, monkeypatch):
    return training_with_deaths(folder, hp_train, monkeypatch)


def test_ranks_die_on_each_node_and_so_does_a_node(folder, node):
    plain = [node(number, *FOUR_RANKS, "--run.folder=plain") for number in range(2)]
    finish(*plain)
    kills = dict.fromkeys(("3:3:forward", "5:0:backward", "7:1:optimizer"), signal.SIGKILL)
    first, second = (node(number, *FOUR_RANKS, kills=kills | {"8:2:parent": signal.SIGKILL}) for number in range(2))
    assert second.finish()[0] == -signal.SIGKILL
    # The launcher starts it again.
    err, _ = finish(first, node(1, *FOUR_RANKS))
    assert sorted(path.name for path in folder.glob("*:*:*")) == sorted([*kills, "8:2:parent"])
    assert "without copies" not in err
    assert re.search(r"rank 2 of 4 was lost with its machine, 127.0.0.1", err), err
    expect_same(folder / "out", folder / "plain")
    assert losses_of(folder / "out") == losses_of(folder / "plain")
    assert not (folder / "out" / "nodes.json").exists()


def test_a_spare_node_takes_a_place_and_without_one_the_state_is_saved(lab, folder, node):
    settings = ("--fault_tolerance.node_seconds=3",)
    kills = {"4:1:parent": signal.SIGKILL, "8:1:parent": signal.SIGKILL}
    first, second, spare = (node(number, *settings, kills=kills) for number in range(3))
    code, _, err = first.finish()
    assert code == 1
    assert [each.finish()[0] for each in (second, spare)] == [-signal.SIGKILL] * 2
    assert "no other machine has come within fault_tolerance.node_seconds = 3, and this state has been saved" in err
    assert "without copies" not in err
    saved = re.search(r"The newest checkpoint is of step ([4-8]) of 10; continue with ", err)
    assert saved, err
    plain = lab.run("plain", {"dp_shard": 2, "ep": 2}, 2, **OPTIONS | {"training__steps": int(saved[1])})
    expect_same(folder / "out", plain.path)


def test_the_first_node_is_started_again_and_the_other_one_has_waited(lab, folder, node):
    settings = ("--checkpoint.interval=3",)
    first, second = (node(number, *settings, kills={"5:0:parent": signal.SIGKILL}) for number in range(2))
    assert first.finish()[0] == -signal.SIGKILL
    _, err = finish(node(0, *settings), second)
    assert "the first machine of the job is lost; waiting for it" in err
    plain = lab.run("plain", {"dp_shard": 2, "ep": 2}, 2, **OPTIONS)
    assert losses_of(folder / "out") == losses_of(plain.path)


def test_a_node_is_lost_and_the_replica_on_the_other_one_goes_on(lab, folder, node):
    settings = ("--parallel.dp_shard=1", "--parallel.ep=1", "--parallel.dp_replicate=2", "--fault_tolerance.copies=0")
    settings = (*settings, "--fault_tolerance.node_seconds=3")
    first, second = (node(number, *settings, kills={"5:1:parent": signal.SIGKILL}) for number in range(2))
    code, _, err = first.finish()
    assert second.finish()[0] == -signal.SIGKILL
    assert code == 0, err
    assert "with 1 of 2 replicas and the same global batch" in err
    plain = lab.run("plain", {"dp_replicate": 2}, 2, **OPTIONS)
    expect_close(folder / "out", plain.path)


def test_a_replica_is_lost_then_none_is_complete_and_the_job_goes_on_with_both(lab, folder, dying, hp_train):
    layout = ("--launch.local_ranks=4", "--parallel.dp_replicate=2", "--parallel.dp_shard=2", "--parallel.ep=2")
    settings = (*layout, "--fault_tolerance.copies=1", "--fault_tolerance.max_deaths=1")
    # Rank 0 is replaced. Then the first replica is lost, and its rank 0 with it; in the end the second one is not
    # complete either, and its state is saved with a newcomer.
    kills = ("3:0:forward", "5:1:optimizer", "8:0:backward")
    output = dying(kills, *settings, expected=1)
    assert "rank 0 of 4 has died (SIGKILL); another process takes its place" in output
    assert "rank 1 of 4 has died (SIGKILL); 2 of 4 ranks go on without it" in output
    assert "with 1 of 2 replicas and the same global batch" in output
    assert "max_deaths = 1, no replica is complete, and this state has been saved" in output
    assert "without copies" not in output
    saved = re.search(r"The newest checkpoint is of step [4-7] of 10; continue with `hp-train resume out`", output)
    assert saved, output
    # In the layout of the start.
    code, _, err = hp_train("resume", "out").finish()
    assert code == 0, err
    undisturbed = lab.run("undisturbed", {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 4, **OPTIONS)
    expect_close(folder / "out", undisturbed.path)


RENDEZVOUS = {
    "static": "--node-rank={node} --master-addr=127.0.0.1 --master-port={port}",
    "c10d": "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-id=proof",
}


def torchrun(rendezvous: str, node: int, port: int) -> tuple[str, ...]:
    place = RENDEZVOUS[rendezvous].format(node=node, port=port).split()
    options = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.2", *place)
    return ("-m", "torch.distributed.run", *options, "-m", "hp_trainer")


@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_torchrun_starts_the_machines(lab, folder, node, free_port, rendezvous):
    port, settings = free_port(), ("--checkpoint.interval=3",)
    kills = dict.fromkeys(("3:1:forward", "5:0:backward", "8:1:parent"), signal.SIGKILL)
    launchers = [torchrun(rendezvous, number, port) for number in range(2)]
    commands = [node(number, *settings, kills=kills, launcher=launcher) for number, launcher in enumerate(launchers)]
    err = "".join(finish(*commands))
    assert sorted(path.name for path in folder.glob("*:*:*")) == sorted(kills)
    assert len(re.findall(r"has died \(SIGKILL\) in step [35]; training goes on from step", err)) == 2, err
    # The agents of a static rendezvous do not restart each other's processes.
    is_replaced = "rank 1 of 2 was lost with its machine, 127.0.0.1 in step 8; training goes on from step" in err
    assert is_replaced == (rendezvous == "static"), err
    assert ("loading step-" in err) == (rendezvous == "c10d"), err
    expect_curve(lab, folder)


def test_a_machine_is_lost_with_its_torchrun(lab, folder, node, free_port):
    port, settings = free_port(), ("--checkpoint.interval=3",)
    launchers = [torchrun("static", number, port) for number in range(2)]
    # The second machine's process is stopped, so that the others wait until it has been killed.
    kills = {"8:1:parent": signal.SIGSTOP}
    first, second = (
        node(number, *settings, kills=kills, launcher=launcher) for number, launcher in enumerate(launchers)
    )
    wait_for_step(folder / "out", 7, first)
    second.kill_everything()
    err, _ = finish(first, node(1, *settings, launcher=launchers[1]))
    assert "rank 1 of 2 was lost with its machine" in err, err
    assert "without copies" not in err
    expect_curve(lab, folder)


def expect_curve(lab, folder) -> None:
    plain = lab.run("plain", {"dp_shard": 2, "ep": 2}, 2, **OPTIONS)
    assert losses_of(folder / "out") == losses_of(plain.path)
    expect_same(folder / "out", plain.path)
    assert not (folder / "out" / "nodes.json").exists()
