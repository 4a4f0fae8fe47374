"""`hp-train doctor` on one and on two real ranks."""

from __future__ import annotations

import json
import re
from unittest import mock

import pytest

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing.conformance import test_collectives
from hp_trainer import cli
from hp_trainer.cli import doctor
from hp_trainer.launch import examination
from hp_trainer.planning import find_device

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MS_ROLE", "SLURM_PROCID")


# Sizes for the figures of a machine take half a minute; these give figures of the same kinds.
SMALL = {
    "_SHAPES": examination._SHAPES[:2],
    "_LONGEST_PRODUCT": 0.01,
    "_BLOCKS": ((64, 1, 64), (64, 2, 64), (128, 1, 64), (64, 1, 128), (128, 2, 64)),
    "_COPIED_BYTES": 2**22,
    "_COLLECTIVE_BYTES": (2**14, 2**16, 2**18),
}


def examine(platform_name):
    """Examine in sizes that take a second."""
    with mock.patch.multiple(examination, **SMALL):
        return examination.examine(platform_name)


@pytest.fixture
def command(platform, rank_pool, monkeypatch, tmp_path):
    """Run the command with arguments; local ranks are those of the pool. Returns exit code and output folder."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def launch(target, arguments, count, on, timeout_seconds):
        return rank_pool(count).run(target, *arguments)

    monkeypatch.setattr(doctor, "launch", launch)
    monkeypatch.setattr(doctor, "examine", examine)
    return lambda *arguments: cli.main(["doctor", f"--platform={platform.name}", *arguments])


@pytest.mark.usefixtures("torch_suffices")
def test_one_process_measures_itself(platform, command, tmp_path, capsys):
    assert command("--to", str(tmp_path / "report.md"), "--to", str(tmp_path / "device.yaml")) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"hp-train doctor: {platform.name}, 1 rank on 1 machine\n")
    assert "problems: none\n" in out
    text = (tmp_path / "report.md").read_text()
    figures = json.loads(re.search(r"```json\n(.*?)\n```", text, re.DOTALL)[1])
    assert all(each["error"] is None for each in figures["checks"])
    assert len(figures["checks"]) > 20
    assert {each["dtype"] for each in figures["products"]} >= {"float32"}
    assert figures["facts"][0]["versions"][platform.name]
    assert figures["pairs"] == figures["overlaps"] == []
    # One rank has no links, of which a plan needs some.
    assert "add inner_bandwidth" in (tmp_path / "device.yaml").read_text()


@pytest.mark.usefixtures("torch_suffices")
def test_two_ranks_measure_their_link(platform, command, tmp_path, capsys):
    assert command("--ranks=2", "--to", str(tmp_path / "report.md"), "--to", str(tmp_path / "device.yaml")) == 0
    out = capsys.readouterr().out
    assert re.search(r"^links +rank of 2 ranks: latency [\d.e+]+ us, bandwidth [\d.e+-]+ GB/s$", out, re.MULTILINE)
    figures = json.loads(re.search(r"```json\n(.*?)\n```", (tmp_path / "report.md").read_text(), re.DOTALL)[1])
    assert len(figures["checks"]) > 20
    assert all(each["error"] is None for each in figures["checks"])
    (pair,) = figures["pairs"]
    assert pair["ranks"] == [0, 1]
    measured = [each["flops"] for each in figures["products"]]
    measured += [pair["latency"], pair["bandwidth"], figures["copy_bandwidth"], figures["host_bandwidth"]]
    measured += [each[name] for each in figures["overlaps"] for name in ("seconds", "product_seconds", "both_seconds")]
    assert len(figures["overlaps"]) == 3
    assert min(measured) > 0
    device = find_device(str(tmp_path / "device.yaml"))
    assert device.is_host
    assert device.ranks_per_node == 2
    assert device.inner_bandwidth == device.outer_bandwidth > 0


def test_the_ranks_of_a_launcher_take_part(platform, command, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda name: pytest.fail(str(platform.world.size)))
    place = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    # The world is joined before the examination, and left whatever happens in it.
    with pytest.raises(pytest.fail.Exception, match=r"^1$"):
        command()
    assert platform.world is None
    assert command("--ranks=2") == 2
    assert "a launcher has started this process" in capsys.readouterr().err


def test_a_wrong_result_is_reported_with_its_rank(platform, command, monkeypatch, capsys):
    def wrong(*arguments):
        raise AssertionError("expected 3, got 4")

    monkeypatch.setattr(test_collectives, "check_bytes", wrong)
    monkeypatch.setattr(examination, "_CHECKED_DTYPES", ())
    monkeypatch.setattr(test_collectives, "check_many_at_once", lambda *arguments: None)
    assert command() == 1
    assert "checks: collectives: wrong: wrong result on rank 0: expected 3, got 4" in capsys.readouterr().out


def test_ranks_that_cannot_meet_are_a_problem(command, monkeypatch, tmp_path, capsys):
    def launch(*arguments, **options):
        raise LaunchError("rank 1 of 2 could not start: no route to host")

    monkeypatch.setattr(doctor, "launch", launch)
    assert command("--ranks=2", "--to", str(tmp_path / "device.yaml")) == 1
    out = capsys.readouterr().out
    assert "rank 1 of 2 could not start: no route to host" in out
    assert "versions" in out
    assert not (tmp_path / "device.yaml").exists()


def test_a_device_that_cannot_be_used_is_a_problem(command, monkeypatch, capsys):
    def broken(name):
        raise RuntimeError("CUDA error: device is busy")

    monkeypatch.setattr(doctor, "examine", broken)
    assert command() == 1
    assert "RuntimeError: CUDA error: device is busy" in capsys.readouterr().out
