"""Groups over sockets: what they do after a failure, and how their ranks meet."""

from __future__ import annotations

import errno
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from array_platform import ArrayPlatform

from hp_dtensor.comm import meeting_point, sockets
from hp_dtensor.comm.meeting_point import MeetingPoint
from hp_dtensor.comm.sockets import SocketWorld
from hp_dtensor.exceptions import CollectiveError, PlatformError


@pytest.fixture
def on_ranks(free_port):
    """`on_ranks(program, size, timeout_seconds)`: the results of `program(world)` on ranks in threads."""

    def run(program, size, timeout_seconds):
        address = f"127.0.0.1:{free_port()}"

        def one(rank):
            world = SocketWorld(rank, size, ArrayPlatform(), address, timeout_seconds)
            return program(world), world

        with ThreadPoolExecutor(size) as threads:
            # Closed together at the end: a rank that has left must not be taken for one that is late.
            found = [each.result() for each in [threads.submit(one, rank) for rank in range(size)]]
        for _, world in found:
            world.close()
        return [result for result, _ in found]

    return run


def test_a_group_is_refused_after_a_collective_that_timed_out(on_ranks):
    """The messages of the failed call must not serve the next one."""
    others_failed = threading.Barrier(3)

    def program(world):
        def reduced(value):
            x = np.full(2, value)
            try:
                world.all.all_reduce(x)
            except CollectiveError as error:
                return str(error)
            return x.tolist()

        found = [reduced(1.0)]
        if world.rank == 1:
            others_failed.wait()
        found.append(reduced(10.0))
        if world.rank != 1:
            others_failed.wait()
        found.append(reduced(100.0))
        world.release(world.all)
        return [*found, reduced(1000.0)]

    # Also the time in which the ranks must meet.
    first, late, last = on_ranks(program, 3, 2.0)
    assert first[0] == late[0] == last[0] == [3.0, 3.0]
    assert late[1] == [30.0, 30.0]  # the others had sent theirs
    assert "has sent nothing" in late[2]
    for found in (first, last):
        assert "waits for a message of rank 1, which has sent nothing for 2 s" in found[1]
        assert all("all_reduce on rank" in each and "[0, 1, 2] has failed before" in each for each in found[2:])
    assert "has failed before" in late[3]


def test_a_wait_that_has_timed_out_does_not_succeed_later(on_ranks):
    def program(world):
        if world.rank == 0:
            return None
        work = world.all.start_exchange([None, None], [np.zeros(2), None])
        for _ in range(2):
            with pytest.raises(CollectiveError, match="has sent nothing"):
                work.wait()
        return True

    assert on_ranks(program, 2, 0.2) == [None, True]


def test_closing_a_world_ends_its_threads_and_is_noticed(on_ranks):
    readers = []

    def program(world):
        # Before the barrier: rank 0 may have closed its world when rank 1 goes on.
        readers.extend(each for each in threading.enumerate() if each.name.startswith("messages of rank"))
        world.all.barrier()
        if world.rank == 0:
            world.close()
            return None
        with pytest.raises(CollectiveError, match="rank 0, which has ended"):
            world.all.receive(np.zeros(2), 0)
        return True

    assert on_ranks(program, 2, 5.0) == [None, True]
    for reader in readers:
        reader.join(5.0)
    assert readers
    assert not any(reader.is_alive() for reader in readers)


def test_ranks_meet_although_others_connect(on_ranks, monkeypatch):
    """To every rank's port: a program that says nothing, and one that speaks another protocol."""
    create, strays = socket.create_server, []

    def visited(*arguments, **options):
        server = create(*arguments, **options)
        strays.extend(socket.create_connection(server.getsockname()[:2]) for _ in range(2))
        strays[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        return server

    monkeypatch.setattr(socket, "create_server", visited)
    monkeypatch.setattr(sockets, "_GREETING_SECONDS", 0.1)
    assert (
        on_ranks(lambda world: world.all.all_gather_bytes(bytes([world.rank])), 3, 20.0) == [[b"\0", b"\1", b"\2"]] * 3
    )
    for stray in strays:
        stray.close()


def test_the_check_of_the_port_accepts_no_rank(monkeypatch, free_port):
    """A rank would take it for the meeting point, and fail when the check closes its socket."""
    port, answers, plain = free_port(), [], socket.socket

    class Probe(socket.socket):
        def __exit__(self, *error):
            with plain() as rank:
                answers.append(rank.connect_ex(("127.0.0.1", port)))
            super().__exit__(*error)

    monkeypatch.setattr(meeting_point.socket, "socket", Probe)
    MeetingPoint(0, 2, f"127.0.0.1:{port}", True, 5.0).reach()
    assert answers == [errno.ECONNREFUSED]


def test_ranks_that_cannot_meet_say_why(monkeypatch, capsys, free_port):
    monkeypatch.setattr(meeting_point, "_FIRST_REPORT_SECONDS", 0.1)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(PlatformError, match=f"rank 0 of 2 could not join the job at {address} within 0.5 s: timed out"):
        SocketWorld(0, 2, ArrayPlatform(), address, 0.5)
    assert f"rank 0 of 2 waits at the meeting point {address}, where not all" in capsys.readouterr().err
    with pytest.raises(PlatformError, match=f"rank 1 of 2 could not reach the meeting point {address} within 0.5 s"):
        SocketWorld(1, 2, ArrayPlatform(), address, 0.5)
    assert "still waits for the meeting point" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["a..b:29500", f"{'a' * 64}:29500", "localhost", "localhost:0", "localhost:\u00b2"])
def test_an_address_that_cannot_be_one(address):
    with pytest.raises(PlatformError, match=re.escape(f"must be host:port, such as 127.0.0.1:29500; got {address!r}")):
        MeetingPoint(1, 2, address, False, 1.0)


def test_a_late_meeting_leaves_the_rest_of_the_time(monkeypatch):
    point = MeetingPoint(1, 2, "localhost:29500", False, 10.0, started=100.0)
    monkeypatch.setattr(meeting_point, "time", SimpleNamespace(monotonic=lambda: 104.0))
    assert point.remaining_seconds() == 6.0
