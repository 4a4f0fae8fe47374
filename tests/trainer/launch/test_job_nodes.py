"""A rank dies on each of two machines, and the others go on: with the bits of an undisturbed run.

Both machines are processes here, each with its number; only their addresses are the same. In `proof_job_nodes.py`
machines die, too.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from running_commands import add_plugin, losses_of
from test_job_recovery import OPTIONS, SETTINGS, expect_same
from training_runs import skip_unless_torch_or

pytestmark = pytest.mark.real_ranks

# Sums over two ranks have one order, so simulated ranks have the same bits.
TWO_RANKS = ("--launch.nodes=2", "--launch.local_ranks=1", "--parallel.dp_shard=2", "--parallel.ep=2")
COPIES = ("--fault_tolerance.copies=1", "--fault_tolerance.interval=2")


def commands(folder, hp_train, hp_platform, monkeypatch):
    """Return a function that starts the command of a machine, as a launcher does."""
    skip_unless_torch_or(hp_platform, False)
    add_plugin(folder, "deaths", Path(__file__).with_name("deaths.py").read_text(), monkeypatch)

    def start(number: int, *settings: str, kills: dict[str, int] | None = None, launcher: tuple[str, ...] = ()):
        place = {"RANK": str(number), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        variables = {"KILLS": json.dumps(kills or {}), **({} if launcher else place)}
        arguments = (*SETTINGS, "--training.eval_interval=4", *TWO_RANKS, *COPIES, *settings)
        return hp_train("run", "run.yaml", "--run.folder=out", *arguments, launcher=launcher, variables=variables)

    return start


def finish(*commands) -> list[str]:
    found = [command.finish() for command in commands]
    assert [code for code, *_ in found] == [0] * len(found), "\n---\n".join(err for *_, err in found)
    return [err for *_, err in found]


@pytest.fixture
def node(folder, hp_train, hp_platform, monkeypatch):
    return commands(folder, hp_train, hp_platform, monkeypatch)


def test_a_rank_dies_on_each_machine(lab, folder, node):
    kills = dict.fromkeys(("3:1:forward", "5:0:backward"), signal.SIGKILL)
    err, _ = finish(*(node(number, kills=kills) for number in range(2)))
    assert sorted(path.name for path in folder.glob("*:*:*")) == sorted(kills)
    assert "without copies" not in err
    plain = lab.run("plain", {"dp_shard": 2, "ep": 2}, 2, **OPTIONS)
    expect_same(folder / "out", plain.path)
    assert losses_of(folder / "out") == losses_of(plain.path)
    assert not (folder / "out" / "nodes.json").exists()
