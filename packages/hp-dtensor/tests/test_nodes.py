"""Machines of a job: who is welcome, how a lost one is noticed, and which one takes its place."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hp_dtensor.exceptions import CapabilityError, LaunchError
from hp_dtensor.launch import Nodes, Replacement, launch, nodes
from hp_dtensor.launch.local_ranks import Failure
from hp_dtensor.launch.nodes import _LENGTH, RanksOfNodes, _Channel, _connect
from hp_dtensor.launch.rank_process import Generation, Imported, Meet


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(3, tmp_path / "nodes.json", "127.0.0.1") as found:
        yield found


@pytest.fixture
def come(job: Nodes, tmp_path: Path) -> Iterator[Callable[[int], _Channel]]:
    """Connects a machine of a number."""
    channels = []

    def connect(number: int) -> _Channel:
        channels.append(_connect(tmp_path / "nodes.json", number, 10.0, lambda: None))
        return channels[-1]

    yield connect
    for channel in channels:
        channel.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "hello",
    [
        b'{"token": "no", "node": 1}',
        '{"token": "\N{LATIN SMALL LETTER E WITH ACUTE}"}'.encode(),
        rb'{"token": "\ud800"}',
        b"[" * 5000,
        b"\xff",
        b"[]",
    ],
)
def test_a_process_without_the_secret_is_not_welcome(job: Nodes, tmp_path: Path, hello: bytes) -> None:
    port = json.loads((tmp_path / "nodes.json").read_text())["port"]
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        connection.sendall(_LENGTH.pack(len(hello)) + hello)
        # Closed, perhaps before all was read.
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert not job._nodes


def test_a_process_that_says_nothing_is_not_waited_for(
    job: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_GREETING_SECONDS", 0.1)
    port = json.loads((tmp_path / "nodes.json").read_text())["port"]
    with socket.create_connection(("127.0.0.1", port), 30) as connection:
        assert connection.recv(1) == b""


def test_only_its_owner_can_read_the_secret(job: Nodes, tmp_path: Path) -> None:
    assert (tmp_path / "nodes.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["nodes.json"]


def test_a_machine_does_not_take_another_server_for_the_first_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_GREETING_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        values = {"host": "127.0.0.1", "port": server.getsockname()[1], "token": "of an earlier job"}
        (tmp_path / "nodes.json").write_text(json.dumps(values))
        with pytest.raises(
            LaunchError, match=r"machine 1: .* did not come within 0.5 s .*does not welcome this machine"
        ):
            _connect(tmp_path / "nodes.json", 1, 0.5, lambda: None)


def test_a_machine_is_welcome_again_when_its_former_process_is_lost(
    job: Nodes, come: Callable[[int], _Channel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_RETRY_SECONDS", 0.05)
    former = come(1)
    with pytest.raises(LaunchError, match="does not welcome"):
        _connect(tmp_path / "nodes.json", 1, 0.3, lambda: None)
    former.close()
    come(1)
    until(lambda: job.fill() == [2])


def test_a_spare_machine_takes_a_place_and_one_that_comes_back_its_own(
    job: Nodes, come: Callable[[int], _Channel]
) -> None:
    second, _third = come(2), come(3)
    # Machine 3 is spare, and takes the place of machine 1, which has not come.
    until(lambda: job.fill() == [])
    assert [node and node.number for node in map(job.place, range(3))] == [None, 3, 2]
    second.close()
    until(lambda: job.lost() == [2])
    come(1)
    until(lambda: job.fill() == [])
    assert [node and node.number for node in map(job.place, range(3))] == [None, 3, 1]


def test_without_other_machines_their_places_are_shared(job: Nodes, come: Callable[[int], _Channel]) -> None:
    first, second = come(1), come(2)
    until(lambda: job.fill() == [])
    first.close()
    until(lambda: job.lost() == [1])
    job.share()
    assert [node and node.number for node in map(job.place, range(3))] == [None, 2, 2]
    second.close()
    until(lambda: job.lost() == [1, 2])
    job.share()
    assert [job.place(place) for place in range(3)] == [None, None, None]
    assert job.hosts() == ("127.0.0.1",) * 3


def test_a_machine_whose_ranks_do_not_go_on_takes_a_place_later(job: Nodes, come: Callable[[int], _Channel]) -> None:
    _first, second = come(1), come(2)
    until(lambda: job.fill() == [])
    ranks = RanksOfNodes("none", 6, num_nodes=3, replacement=Replacement(1), nodes=job)
    machines = [job.place(number) for number in (1, 1, 1, 1, 2, 2)]
    ranks._processes = [node.start(rank, 6, again=False) for rank, node in enumerate(machines) if node is not None]
    # A rank of machine 1 has died, and those of the others go on, numbered again.
    ranks._go_on_with([0, 1, 4, 5])
    assert job.lost() == []
    assert [node and node.number for node in map(job.place, range(3))] == [None, None, 2]
    second.close()
    until(lambda: job.lost() == [2])
    assert job.fill() == []
    assert [node and node.number for node in map(job.place, range(3))] == [None, None, 1]
    # When all ranks start again, each machine has its own place.
    come(2)
    job.clear()
    until(lambda: job.fill() == [])
    assert [node and node.number for node in map(job.place, range(3))] == [None, 1, 2]


def test_how_a_rank_ended_is_known_only_with_its_end(job: Nodes, come: Callable[[int], _Channel]) -> None:
    """A failure without an end would be that of a rank that still runs, and end the job."""
    channel = come(1)
    until(lambda: job.fill() == [2])
    node = job.place(1)
    assert node is not None
    process = node.start(2, 6, again=False)
    asked = channel.receive()
    assert asked == {"do": "start", "id": 0, "rank": 2, "size": 6, "again": False}
    channel.send({"id": 0, "message": {"kind": "Imported"}})
    failure = {"headline": "was killed by SIGKILL", "details": "", "when": 1e9, "died": True, "signal": 9}
    channel.send({"id": 0, "failure": failure, "has_ended": True})
    assert process.connection.recv() == Imported()
    with pytest.raises(EOFError):
        process.connection.recv()
    assert process.failure is None
    found = process.failure_of_end()
    # On the clock of this machine.
    assert (found.headline, found.signal) == ("was killed by SIGKILL", 9)
    assert found.when < 1e9


def test_an_error_of_a_rank_arrives_before_its_end(job: Nodes, come: Callable[[int], _Channel]) -> None:
    channel = come(1)
    until(lambda: job.fill() == [2])
    node = job.place(1)
    assert node is not None
    process = node.start(2, 6, again=False)
    channel.send({"id": 0, "failure": {"headline": "failed", "details": "", "when": 0.0}, "has_ended": False})
    found = process.connection.recv()
    assert isinstance(found, Failure)
    assert found.headline == "failed"
    assert not process.connection.poll()


def test_ranks_of_a_lost_machine_count_as_one_death(job: Nodes, come: Callable[[int], _Channel]) -> None:
    channel = come(1)
    until(lambda: job.fill() == [2])
    node = job.place(1)
    assert node is not None
    processes = [node.start(rank, 6, again=False) for rank in (2, 3)]
    channel.close()
    for process in processes:
        with pytest.raises(EOFError):
            process.connection.recv()
        assert process.failure_of_end().headline == "was lost with its machine, 127.0.0.1"
    ranks = RanksOfNodes("none", 6, num_nodes=3, replacement=Replacement(1), nodes=job)
    # Their ends may be noticed one after the other.
    assert [ranks._count([process]) for process in processes] == [1, 0]
    # A rank that is started on it meanwhile has ended, too.
    late = node.start(3, 6, again=True)
    with pytest.raises(EOFError):
        late.connection.recv()


def test_what_is_no_message_ends_a_machine(
    job: Nodes, come: Callable[[int], _Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = []
    monkeypatch.setattr("threading.excepthook", errors.append)
    channel = come(1)
    until(lambda: job.fill() == [2])
    channel.send({"what": "is this"})
    until(lambda: job.lost() == [1, 2])
    assert channel.receive() is None
    assert [each.exc_type for each in errors] == [KeyError]


def test_a_machine_that_is_silent_for_long_is_lost(
    job: Nodes, come: Callable[[int], _Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_STUCK_SECONDS", 1)
    come(1)
    until(lambda: job.fill() == [2])
    until(lambda: job.lost() == [1, 2])


def test_times_of_a_generation_are_those_of_each_machines_clock() -> None:
    meet = Meet(Generation(3, (1, 2), time.monotonic() - 5, "why", True, True, ("a", "b"), (2, 3), 2), "a:1")
    sent = json.loads(json.dumps(nodes._encode(meet)))
    assert -6 < sent["generation"]["lost_at"] <= -5
    found = nodes._decode(sent)
    assert abs(found.generation.lost_at - meet.generation.lost_at) < 1
    sent["generation"]["lost_at"] = 0.0
    assert nodes._encode(found)["generation"].keys() == sent["generation"].keys()
    again = found.generation
    assert (found.address, again.newcomers, again.hosts, again.machines) == ("a:1", (1, 2), ("a", "b"), (1, 1))


def test_several_machines_need_rules_and_equally_many_ranks(job: Nodes) -> None:
    for num_ranks, replacement in ((3, None), (4, Replacement(1))):
        expected = f"launch on 3 machines needs replacement, .* num_ranks={num_ranks}"
        with pytest.raises(LaunchError, match=expected):
            launch("no:function", num_ranks=num_ranks, replacement=replacement, nodes=job)


def test_machines_that_do_not_come_are_reported(
    job: Nodes, come: Callable[[int], _Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    come(2)
    ranks = RanksOfNodes(
        "none", 6, timeout_seconds=0.3, num_nodes=3, replacement=Replacement(1, node_seconds=0.1), nodes=job
    )
    with pytest.raises(LaunchError, match=re.escape("1 of 3 machines have not come")):
        ranks._start(lambda: None)


def test_processes_that_join_a_job_once_are_replaced_on_one_machine_only(
    job: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RanksOfNodes, "_await_nodes", lambda ranks, seconds: [])
    monkeypatch.setattr(RanksOfNodes, "_import_frameworks", lambda ranks, check: [Imported(joins_once=True)])
    ranks = RanksOfNodes("none", 6, num_nodes=3, replacement=Replacement(1), nodes=job)
    with pytest.raises(CapabilityError, match="platform none cannot replace ranks on several machines"):
        ranks._start(lambda: None)
