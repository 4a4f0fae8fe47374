"""A run is trained by one job at a time; the error of the second one names the first."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hp_trainer._files import writer_name
from hp_trainer.exceptions import RunFolderError, RunLockedError
from hp_trainer.run import RunFolder, RunLock, lock
from hp_trainer.run.lock import Holder, check_owner, read_holder

HOLD = "import sys, time; from pathlib import Path; from hp_trainer.run import RunLock; "
KEEP = HOLD + "RunLock(Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(600)"


@pytest.fixture
def other(tmp_path: Path):
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", KEEP, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.5)
    monkeypatch.setattr(lock, "_POLL_SECONDS", 0.02)


def write_lock(folder: Path, holder: Holder) -> None:
    (folder / "lock.json").write_text(json.dumps(asdict(holder)))


def elsewhere(nonce: str = "other") -> Holder:
    """A process of another machine."""
    return replace(Holder.this_process(), host="gpu7", writer="another-1-1", nonce=nonce)


def ended() -> Holder:
    """A process of this machine that has ended: another one has its id now."""
    return replace(Holder.this_process(), writer=f"{writer_name().rpartition('-')[0]}-1")


def test_a_lock_is_free_again_after_its_release(tmp_path: Path) -> None:
    with RunLock(tmp_path) as held:
        found = read_holder(tmp_path)
        assert found is not None
        assert (found.nonce, found.pid) == (held.nonce, os.getpid())
        with pytest.raises(RunLockedError, match=rf"is being trained by process {os.getpid()} on "):
            RunLock(tmp_path).acquire()
        check_owner(tmp_path, held.nonce)
    assert list(tmp_path.iterdir()) == []
    RunLock(tmp_path).acquire().release()


def test_the_second_job_is_told_who_holds_the_run(tmp_path: Path, other: subprocess.Popen) -> None:
    with pytest.raises(RunLockedError) as caught:
        RunLock(tmp_path).acquire()
    message = str(caught.value)
    assert message.startswith(f"the run {tmp_path} is being trained by process {other.pid} on ")
    assert f"(kill {other.pid})" in message
    assert str(tmp_path / "lock.json") in message


def test_the_lock_of_a_stopped_process_holds_and_that_of_a_killed_one_does_not(
    tmp_path: Path, other: subprocess.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(RunLockedError):
        RunLock(tmp_path).acquire()
    other.kill()
    other.wait()
    monkeypatch.setattr(lock, "STALE_SECONDS", float("inf"))  # nothing is waited for when the end is certain
    RunLock(tmp_path).acquire().release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_has_got_the_same_number_is_another_one(tmp_path: Path) -> None:
    write_lock(tmp_path, ended())
    with RunLock(tmp_path) as held:
        check_owner(tmp_path, held.nonce)


@pytest.mark.usefixtures("quick")
def test_a_lock_of_another_machine_is_watched_for_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    write_lock(tmp_path, elsewhere())
    began = time.monotonic()
    with RunLock(tmp_path, messages.append):
        assert time.monotonic() - began >= 0.5
    (line,) = messages
    assert line.startswith(f"the run is locked by process {os.getpid()} on gpu7, since ")

    alive, stop = elsewhere("alive"), threading.Event()

    def beat() -> None:
        for number in itertools.count():
            write_beside = tmp_path / "lock.json.next"
            write_beside.write_text(json.dumps(asdict(replace(alive, beat=number))))
            write_beside.replace(tmp_path / "lock.json")
            if stop.wait(0.05):
                return

    monkeypatch.setattr(lock, "STALE_SECONDS", 300.0)  # on a busy machine a heartbeat may come late
    write_lock(tmp_path, alive)
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(RunLockedError, match="on gpu7"):
            RunLock(tmp_path, messages.append).acquire()
    finally:
        stop.set()
        thread.join()


@pytest.mark.usefixtures("quick")
def test_the_heartbeat_goes_on_while_the_lock_is_held(tmp_path: Path) -> None:
    def beat() -> int:
        found = read_holder(tmp_path)
        assert found is not None
        return found.beat

    with RunLock(tmp_path):
        deadline = time.monotonic() + 300
        while beat() < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_who_has_lost_the_run_neither_renews_nor_releases_the_lock_of_another(tmp_path: Path) -> None:
    run = RunFolder(tmp_path, "mine")
    with RunLock(tmp_path) as held:
        with held._guard():  # as a job that takes a run over; a heartbeat may be under way
            write_lock(tmp_path, elsewhere())
        held._beat()
        with pytest.raises(RunLockedError, match=r"it is now trained by process .* on gpu7"):
            check_owner(tmp_path, held.nonce)
        with pytest.raises(RunLockedError):
            run.check_owner()
    assert read_holder(tmp_path) == elsewhere_like(tmp_path)
    (tmp_path / "lock.json").unlink()
    with pytest.raises(RunLockedError, match="its lock was deleted"):
        run.check_owner()
    RunFolder(tmp_path).check_owner()


def elsewhere_like(folder: Path) -> Holder:
    return Holder(**json.loads((folder / "lock.json").read_text()) | {"nonce": "other", "host": "gpu7"})


def test_of_many_jobs_that_find_a_stale_lock_at_once_one_gets_the_run(tmp_path: Path) -> None:
    write_lock(tmp_path, ended())
    outcome: list[object] = []
    ready = threading.Barrier(8)

    def try_it() -> None:
        ready.wait()
        try:
            outcome.append(RunLock(tmp_path).acquire())
        except RunLockedError as error:
            outcome.append(error)

    threads = [threading.Thread(target=try_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [one for one in outcome if isinstance(one, RunLock)]
    assert (len(outcome), len(held)) == (8, 1)
    check_owner(tmp_path, held[0].nonce)
    held[0].release()


def test_a_folder_that_is_deleted_meanwhile_is_an_error(tmp_path: Path) -> None:
    """Of two jobs that start in one new folder, one may fail and remove it before the other one has its lock."""
    with pytest.raises(FileNotFoundError, match=r"gone/lock\.json"):
        RunLock(tmp_path / "gone").acquire()


def test_a_job_whose_temporary_file_is_swept_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, links = os.link, []

    def swept(source: Path, target: Path) -> None:
        links.append(source)
        if len(links) == 1:
            RunFolder(tmp_path).sweep()
        link(source, target)

    monkeypatch.setattr(lock.os, "link", swept)
    with RunLock(tmp_path) as held:
        check_owner(tmp_path, held.nonce)
    assert len(links) == 2


def truncated(text: str) -> str:
    return text[:-5]


def without_pid(text: str) -> str:
    return text.replace('"pid"', '"pit"')


@pytest.mark.parametrize("damage", [truncated, without_pid, lambda text: "[" * 100_000, lambda text: ""])
def test_a_damaged_lock_is_told_with_what_to_do(tmp_path: Path, damage: Callable[[str], str]) -> None:
    write_lock(tmp_path, elsewhere())
    path = tmp_path / "lock.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(RunFolderError, match=r"lock.json is damaged.*; delete it if no job trains this run"):
        RunLock(tmp_path).acquire()


def test_the_lock_is_ours_where_nfs_made_it_and_its_answer_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def asked_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(lock.os, "link", asked_twice)
    with RunLock(tmp_path) as held:
        check_owner(tmp_path, held.nonce)
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(lock.os, "link", refused)
    with RunLock(tmp_path), pytest.raises(RunLockedError):
        RunLock(tmp_path).acquire()
