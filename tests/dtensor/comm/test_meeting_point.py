"""A job whose ranks cannot meet says so, with host, port and what to check, while it waits and when it gives up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hp_dtensor.comm import meeting_point
from hp_dtensor.exceptions import PlatformError

PROGRAM = Path(__file__).parents[1] / "launch" / "joined.py"
SECONDS = 200


@pytest.fixture
def connect(hp_platform, monkeypatch):
    """Joins a job of two with a time limit of a second, and reports after a tenth."""
    monkeypatch.setattr(meeting_point, "_FIRST_REPORT_SECONDS", 0.1)
    return lambda rank, address: type(hp_platform)().connect(rank, 2, address, timeout_seconds=1.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve(connect, capsys, rank):
    role = ("serve", "reach")[rank]
    with pytest.raises(PlatformError, match=rf"rank {rank} of 2 could not {role} .* n7\.invalid:29512 within 1 s"):
        connect(rank, "n7.invalid:29512")
    said = capsys.readouterr().err
    assert f"rank {rank} of 2 still waits for the meeting point n7.invalid:29512: the name n7.invalid does not" in said
    assert "/etc/hosts of every machine" in said


def test_a_meeting_point_at_which_nothing_listens(connect, capsys, free_port):
    port = free_port()
    with pytest.raises(PlatformError, match=f"rank 1 of 2 could not reach .*nothing listens at port {port} of localho"):
        connect(1, f"localhost:{port}")
    assert "Check that rank 0 was started on localhost and still runs" in capsys.readouterr().err


def test_a_meeting_point_that_does_not_answer(connect, monkeypatch, capsys):
    def silent(*arguments):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", silent)
    with pytest.raises(PlatformError, match="no firewall between the machines drops port 29512"):
        connect(1, "localhost:29512")
    assert "localhost does not answer" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_port_in_use(connect, host):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"{host}:{other.getsockname()[1]}"
        with pytest.raises(
            PlatformError, match=rf"rank 0 of 2 could not serve .* {address}: .*in use.* no other job on"
        ):
            connect(0, address)


def test_ranks_that_are_missing(connect, hp_platform, capsys, free_port):
    if hp_platform.name != "torch":
        pytest.skip("MindSpore waits for ranks without letting other Python threads run")
    address = f"localhost:{free_port()}"
    with pytest.raises(PlatformError, match=f"rank 0 of 2 could not join the job at {address} within 1 s"):
        connect(0, address)
    assert (
        f"rank 0 of 2 waits at the meeting point {address}, where not all ranks have arrived" in capsys.readouterr().err
    )


@pytest.mark.real_ranks
def test_ranks_meet_by_name_once_the_first_one_has_started(hp_platform, free_port, fork_server):
    """Frameworks that only take IP addresses get one; and a wait of some seconds is reported."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}

    def start(rank):
        environment = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOG_v": "3"}
        command = [sys.executable, str(PROGRAM), hp_platform.name]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return fork_server.popen(command, env=environment, start_new_session=True, **pipes)

    second = start(1)
    line = next((line for line in second.stderr if "hp-dtensor" in line), "")
    assert f"rank 1 of 2 still waits for the meeting point localhost:{place['MASTER_PORT']}: nothing listens" in line
    first = start(0)
    for rank, process in enumerate((first, second)):
        out, err = process.communicate(timeout=SECONDS)
        assert f"rank {rank} of 2: {[3.0] * 3}" in out, err
