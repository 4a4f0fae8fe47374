"""Local ranks as real processes: they run, fail, are stopped, and leave nothing behind."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import launch_targets as targets
import pytest

from hp_dtensor.exceptions import LaunchError, PlatformError
from hp_dtensor.launch import RankPool, launch, local_ranks
from hp_dtensor.launch.local_ranks import LocalRanks, Output

pytestmark = pytest.mark.usefixtures("array_plugin")
SECONDS = 300.0  # for what takes milliseconds on an idle machine; ranks that are not stopped wait for 600


def wait_for(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def pids_in(folder, num_ranks):
    files = [Path(folder) / f"{rank}.pids" for rank in range(num_ranks)]
    wait_for(lambda: all(file.exists() for file in files))
    return [int(pid) for file in files for pid in file.read_text().split()]


def ended(pids):
    return not any(targets.is_running(pid) for pid in pids)


@pytest.fixture
def pool():
    with RankPool("array", 3) as pool:
        yield pool


# Results and environment ---------------------------------------------------------------------------------


def test_launch_returns_the_results_by_rank():
    assert launch(targets.my_world, num_ranks=3, platform="array") == [(0, 3), (1, 3), (2, 3)]


def test_a_target_may_be_a_name_and_gets_its_arguments():
    assert launch("launch_targets:add", ("a", "b"), 2, "array") == ["ab", "ab"]


def test_the_only_platform_is_the_default():
    assert launch(targets.my_world) == [(0, 1)]


def test_ranks_have_torchruns_variables_and_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "outer job")
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    found = launch(targets.my_environment, ([*names, "TORCHELASTIC_RUN_ID", "MS_ROLE"],), 2, "array")
    for rank, variables in enumerate(found):
        assert list(variables.values()) == [str(rank), str(rank), "2", "2", "127.0.0.1", "2", None, None]


def test_all_ranks_meet_at_one_address():
    first, second = launch(targets.my_address, num_ranks=2, platform="array")
    assert first == second
    assert first.startswith("127.0.0.1:")


def test_modules_of_the_working_directory_do_not_run_in_the_ranks(tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "pickle", "sitecustomize", "hp_dtensor"):
        (here / f"{name}.py").write_text("import pathlib\npathlib.Path('ran').touch()\nraise SystemExit('no')\n")
    monkeypatch.chdir(here)
    # Without empty entries, as after a trailing colon: with one, the user adds the working directory to the path.
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entries))
    assert launch(targets.add, (1, 2), 2, "array") == [3, 3]
    assert not (here / "ran").exists()


def test_exit_code_0_is_no_failure():
    assert launch(targets.leave_with_exit_0, num_ranks=2, platform="array") == [None, None]


def test_rank_0_writes_to_the_terminal_and_the_others_to_their_logs(tmp_path, capfd):
    launch(targets.speak, ("hello",), 3, "array", log_dir=tmp_path / "logs")
    shown = capfd.readouterr()
    assert shown.out == "hello from 0\n"
    assert shown.err == "error hello from 0\n"
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == ["rank1.log", "rank2.log"]
    assert (tmp_path / "logs" / "rank2.log").read_text() == "hello from 2\nerror hello from 2\n"


# Bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [lambda: None, print.__call__, textwrap], ids=["lambda", "method", "module"])
def test_functions_that_have_no_importable_name_are_refused(target):
    with pytest.raises(LaunchError, match="ranks get functions by name"):
        launch(target, platform="array")


def test_a_name_needs_a_module():
    with pytest.raises(LaunchError, match="expected 'module:function'"):
        launch("add", platform="array")


def test_an_unknown_platform_is_refused_before_anything_starts():
    with pytest.raises(PlatformError, match="platform 'arrow' is not installed; found: array"):
        launch(targets.my_world, platform="arrow")


def test_at_least_one_rank():
    with pytest.raises(LaunchError, match="at least one rank, got num_ranks=0"):
        launch(targets.my_world, num_ranks=0, platform="array")


def test_a_missing_function_is_named():
    with pytest.raises(LaunchError, match=r"rank \d of 2 failed: AttributeError: .*'nothing'"):
        launch("launch_targets:nothing", num_ranks=2, platform="array")


# Failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 of 3 failed: ValueError: bad weights in rank 1\nTraceback[^$]*launch_targets.py"),
        ("exit", r"rank 1 of 3 failed: SystemExit: 7"),
        ("quit", r"rank 1 of 3 ended without a result, exit code 0\nits last output:\nquitting"),
        ("kill", r"rank 1 of 3 was killed by SIGKILL; the machine may have run out of memory"),
        ("bus", r"rank 1 of 3 was killed by SIGBUS; a file that it had mapped into memory was truncated or its disk"),
        ("unpicklable", r"rank 1 of 3 failed: .*(pickle|get) local object"),
    ],
)
def test_a_failing_rank_is_reported_within_seconds(how, message):
    start = time.monotonic()
    with pytest.raises(LaunchError, match=message) as caught:
        launch(targets.fail, (1, how), 3, "array")
    assert caught.value.rank == 1
    assert time.monotonic() - start < SECONDS


def test_an_error_whose_message_is_enough_has_its_traceback_as_cause():
    with pytest.raises(LaunchError) as caught:
        launch(targets.fail, (1, "plugin"), 2, "array")
    assert str(caught.value) == "rank 1 of 2 failed: PluginError: plugin 'odd' failed"
    assert re.match(r"rank 1:\nTraceback[^$]*launch_targets.py", str(caught.value.__cause__))


def test_a_machine_without_loopback_is_named_before_any_rank_starts(monkeypatch):
    def unreachable(address, timeout):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(local_ranks.LocalRanks, "_start", None)
    with pytest.raises(LaunchError, match=r"127\.0\.0\.1 does not answer .*Network is unreachable.*ip link set lo up"):
        launch(targets.fail, (1, "exit"), 2, "array")


@pytest.fixture
def patient(monkeypatch):
    """Every rank's error is waited for, as long as a busy machine takes."""
    monkeypatch.setattr(local_ranks, "_OTHERS_SECONDS", SECONDS)


@pytest.mark.usefixtures("patient")
def test_the_rank_that_died_comes_before_the_errors_that_follow_from_it(tmp_path):
    with pytest.raises(LaunchError) as caught:
        launch(targets.fail_after_another_died, (2, str(tmp_path)), 3, "array")
    assert caught.value.rank == 2
    first, *others = str(caught.value).splitlines()
    assert first.startswith("rank 2 of 3 was killed by SIGKILL")
    assert sorted(others) == [
        "rank 0 failed: ConnectionError: connection closed by peer",
        "rank 1 failed: ConnectionError: connection closed by peer",
    ]


@pytest.mark.usefixtures("patient")
def test_the_first_error_comes_first(tmp_path):
    with pytest.raises(LaunchError) as caught:
        launch(targets.fail_in_turn, ([1, 0], str(tmp_path)), 2, "array")
    assert caught.value.rank == 1
    lines = [line for line in str(caught.value).splitlines() if line.startswith("rank")]
    assert lines == [
        "rank 1 of 2 failed: ValueError: rank 1 was number 0",
        "rank 0 failed: ValueError: rank 0 was number 1",
    ]


def test_a_rank_that_cannot_start_is_reported(monkeypatch, install):
    install("hp-platform-shy", {"shy": "shy_platform"}, shy_platform=SHY_PLATFORM)
    with pytest.raises(LaunchError, match=r"rank 1 of 2 could not start: ConnectionError: no network"):
        launch(targets.my_world, num_ranks=2, platform="shy")


def test_a_taken_port_is_chosen_again(install, tmp_path):
    install("hp-platform-shy", {"shy": "shy_platform"}, shy_platform=TAKEN_PORT_PLATFORM)
    assert launch("launch_targets:add", (1, 2), 2, "shy") == [3, 3]
    assert len(list(tmp_path.glob("tried-*"))) == 2


SHY_PLATFORM = """
import array_platform
from hp_dtensor.platform.plugins import hookimpl

class Shy(array_platform.ArrayPlatform):
    name = "shy"
    def connect(self, rank, *args, **kwargs):
        if rank == 1:
            raise ConnectionError("no network")
        return super().connect(rank, *args, **kwargs)

@hookimpl
def hp_platform():
    return Shy()
"""

TAKEN_PORT_PLATFORM = """
import pathlib
import array_platform
from hp_dtensor.platform.plugins import hookimpl

class Shy(array_platform.ArrayPlatform):
    name = "shy"
    def connect(self, rank, size, address, **kwargs):
        if rank == 0:
            folder = pathlib.Path(__file__).parent
            (folder / ("tried-" + address)).touch()
            if len(list(folder.glob("tried-*"))) == 1:
                raise RuntimeError("bind failed: EADDRINUSE")
        return super().connect(rank, size, address, **kwargs)

@hookimpl
def hp_platform():
    return Shy()
"""


# The pool ------------------------------------------------------------------------------------------------


def test_the_pool_keeps_its_processes(pool):
    assert pool.run(targets.my_world) == [(0, 3), (1, 3), (2, 3)]
    assert pool.run(targets.my_pid) == pool.run(targets.my_pid)


def test_the_pool_starts_again_after_a_failure(pool):
    before = pool.run(targets.my_pid)
    with pytest.raises(LaunchError, match="rank 2 of 3 failed: ValueError"):
        pool.run(targets.fail, 2)
    wait_for(lambda: ended(before))
    assert not set(before) & set(pool.run(targets.my_pid))


def test_the_pool_notices_ranks_that_died_between_two_runs(pool):
    pids = pool.run(targets.my_pid)
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: not targets.is_running(pids[1]))
    with pytest.raises(LaunchError, match="rank 1 of 3 was killed by SIGKILL"):
        pool.run(targets.fail, 9)
    assert pool.run(targets.my_world) == [(0, 3), (1, 3), (2, 3)]


def test_ranks_that_do_not_answer_are_shown_with_their_stacks(pool, tmp_path, monkeypatch):
    late = LocalRanks._late

    def late_in_time(ranks, missing, seconds):
        # On a busy machine the time may be up before they have come to the function.
        wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 3)
        monkeypatch.setattr(local_ranks, "_STACK_SECONDS", SECONDS)
        return late(ranks, missing, seconds)

    monkeypatch.setattr(LocalRanks, "_late", late_in_time)
    with pytest.raises(LaunchError, match=r"no answer from rank 0, 1, 2 of 3 within 0.1 s\n") as caught:
        pool.run(targets.write_pid_and_hang, str(tmp_path), timeout_seconds=0.1)
    stacks = str(caught.value).split("\nrank ")[1:]
    assert [stack[0] for stack in stacks] == ["0", "1", "2"]
    assert all("in write_pid_and_hang" in stack for stack in stacks)


def test_closing_the_pool_leaves_no_process(pool):
    pids = pool.run(targets.my_pid)
    pool.close()
    assert ended(pids)


def test_pools_in_threads_do_not_die_with_them():
    found = []
    with RankPool("array", 2) as pool:
        thread = threading.Thread(target=lambda: found.append(pool.run(targets.my_pid)))
        thread.start()
        thread.join()
        assert pool.run(targets.my_pid) == found[0]


# Nothing stays behind ------------------------------------------------------------------------------------


SCRIPT_HEAD = """\
import os, signal, sys
import launch_targets as targets
from hp_dtensor.launch import launch, RankPool
signal.signal(signal.SIGINT, signal.default_int_handler)  # nohup, and shells in the background, have them ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""


def start_script(folder, body):
    """A process of its own that starts ranks; the folder gets what they write."""
    script = Path(folder) / "script.py"
    script.write_text(SCRIPT_HEAD + textwrap.dedent(body))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


LAUNCH_AND_WAIT = """
    if __name__ == "__main__":
        launch(targets.write_pid_and_wait, ({folder!r}, {ignored}), 2, "array", grace_seconds=0.5)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_ranks_and_what_they_started(tmp_path, number):
    process = start_script(tmp_path, LAUNCH_AND_WAIT.format(folder=str(tmp_path), ignored=()))
    pids = pids_in(tmp_path, 2)
    os.kill(process.pid, number)
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == -number
    assert ("KeyboardInterrupt" in error) == (number == signal.SIGINT)
    wait_for(lambda: ended(pids))


def test_ranks_that_ignore_signals_are_killed_after_the_grace_time(tmp_path):
    ignored = (int(signal.SIGINT), int(signal.SIGTERM))
    process = start_script(tmp_path, LAUNCH_AND_WAIT.format(folder=str(tmp_path), ignored=ignored))
    pids = pids_in(tmp_path, 2)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGTERM
    wait_for(lambda: ended(pids))


def test_when_the_parent_is_killed_its_ranks_end(tmp_path):
    process = start_script(tmp_path, LAUNCH_AND_WAIT.format(folder=str(tmp_path), ignored=()))
    pids = pids_in(tmp_path, 2)
    process.kill()
    process.wait(SECONDS)
    wait_for(lambda: ended(pids[::2]))
    for grandchild in pids[1::2]:
        os.kill(grandchild, signal.SIGKILL)
    process.communicate(timeout=SECONDS)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the parent-death signal of Linux")
def test_when_the_parent_is_killed_even_ranks_stuck_in_native_code_end(tmp_path):
    body = 'launch(targets.hold_native_call, (os.path.dirname(__file__),), 2, "array")'
    process = start_script(tmp_path, body)
    ranks = pids_in(tmp_path, 2)
    process.kill()
    process.communicate(timeout=SECONDS)
    wait_for(lambda: ended(ranks))


def test_ranks_may_end_in_their_own_way_when_a_signal_comes(tmp_path):
    process = start_script(
        tmp_path,
        f"""
        def note(*_):
            print("the handler that was there")
        signal.signal(signal.SIGTERM, note)
        arguments = ({int(signal.SIGTERM)}, {str(tmp_path)!r})
        print(launch(targets.end_well_on, arguments, 2, "array", stop_seconds={SECONDS}))
        assert signal.getsignal(signal.SIGTERM) is note
        """,
    )
    wait_for(lambda: len(list(tmp_path.glob("*.ready"))) == 2)
    os.kill(process.pid, signal.SIGTERM)
    output, error = process.communicate(timeout=SECONDS)
    assert (process.returncode, error) == (0, "")
    assert output == "the handler that was there\n['saved', 'saved']\n"
    assert len(list(tmp_path.glob("*.saved"))) == 2


@pytest.fixture
def interruptible():
    """Ctrl-C is not ignored, as it is under nohup, which ranks would inherit."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_in_the_first_moment_of_a_rank_is_told_as_one(monkeypatch):
    spawn = LocalRanks._spawn

    def interrupted(ranks, rank):
        process = spawn(ranks, rank)
        if rank == 1:
            process.signal(signal.SIGINT)
        return process

    monkeypatch.setattr(LocalRanks, "_spawn", interrupted)
    with pytest.raises(LaunchError, match="rank 1 of 2 could not start: KeyboardInterrupt") as caught:
        launch(targets.my_world, (), 2, "array")
    assert (caught.value.rank, caught.value.kind) == (1, "KeyboardInterrupt")
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_rank_waits_for_the_others_is_told_as_one():
    ranks = LocalRanks("array", 2, Output(terminal=False))
    ranks.start()
    one = ranks._processes[1]
    one.signal(signal.SIGINT)
    assert one.connection.poll(SECONDS)
    # It may still be returning from the report of its start.
    with pytest.raises(LaunchError, match=r"rank 1 of 2 (failed|could not start): KeyboardInterrupt") as caught:
        ranks.run("launch_targets:my_world", (), None)
    assert caught.value.kind == "KeyboardInterrupt"


def test_a_signal_before_any_rank_is_there_stops_all_of_them(monkeypatch, tmp_path):
    (tmp_path / "pids").mkdir()
    received, before = [], signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    spawn, spawned = LocalRanks._spawn, []

    def told_first(ranks, rank):
        if not spawned:
            signal.raise_signal(signal.SIGTERM)
        spawned.append(rank)
        return spawn(ranks, rank)

    monkeypatch.setattr(LocalRanks, "_spawn", told_first)
    try:
        assert launch(targets.write_pid_and_wait, (str(tmp_path / "pids"),), 2, "array", stop_seconds=600) == []
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (received, spawned) == ([signal.SIGTERM], [0])
    assert not list((tmp_path / "pids").iterdir())


def test_processes_that_a_rank_starts_take_ctrl_c():
    assert launch(targets.signals_blocked_in_a_child, (), 2, "array") == [0, 0]


def test_a_script_starts_ranks_with_its_own_functions_and_classes(tmp_path):
    process = start_script(
        tmp_path,
        """
        from dataclasses import dataclass

        @dataclass
        class Pair:
            left: int
            right: int

        def swap(pair):
            return Pair(pair.right, pair.left)

        if __name__ == "__main__":
            print(launch(swap, (Pair(1, 2),), 2, "array"))
        """,
    )
    output, error = process.communicate(timeout=SECONDS)
    assert (output, error) == ("[Pair(left=2, right=1), Pair(left=2, right=1)]\n", "")


def test_no_file_stays_open_or_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    gc.collect()  # files that tests before this one have let go
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(LaunchError):
        launch(targets.fail, (1, "kill"), 2, "array")
    launch(targets.my_world, num_ranks=2, platform="array")
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith("tmp")]
