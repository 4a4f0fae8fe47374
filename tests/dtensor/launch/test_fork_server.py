"""Processes forked from one that has imported the framework: what they have of their own, and when none is forked."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from hp_dtensor.launch.fork_server import RECORDS, ForkServer, environment_of
from hp_dtensor.platform.selection import get_platform

pytestmark = pytest.mark.real_ranks

ABOUT = """\
import json, os, random, signal, sys
import numpy
names = ("A", "B", "PYTHONPATH")
print(json.dumps({
    "parent": os.getppid(), "session": os.getsid(0) == os.getpid(), "folder": os.getcwd(), "argv": sys.argv,
    "variables": {name: os.environ[name] for name in names if name in os.environ}, "path": sys.path[:2],
    "input": sys.stdin.read(), "numbers": [random.random(), numpy.random.rand()],
    "frameworks": [name for name in ("torch", "mindspore", "hp_platform_numpy") if name in sys.modules],
    "threads": len(os.listdir("/proc/self/task")),
    "blocked": [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
    "ignored": [int(each) for each in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(each) is signal.SIG_IGN],
    "files": [int(each) for each in os.listdir("/proc/self/fd")],
}))
os.environ["B"] = "changed"
sys.path.insert(0, "/changed")
"""


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Processes with another number of threads are not forked."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def numpy_platform(torch_suffices, numpy_platform_path, monkeypatch):
    """A platform that is imported in a moment, for tests of other things than frameworks."""
    for entry in numpy_platform_path:
        monkeypatch.syspath_prepend(entry)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*numpy_platform_path, os.environ.get("PYTHONPATH", "")]))
    return "numpy"


def start(server, code: str, *arguments: str, **options) -> subprocess.Popen[str]:
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True, **options}
    return server.popen([sys.executable, "-c", textwrap.dedent(code), *arguments], **options)


def about(server, *arguments: str, **options) -> dict:
    process = start(server, ABOUT, *arguments, **options)
    out, _ = process.communicate("given", timeout=100)
    assert process.returncode == 0
    return json.loads(out)


def test_a_forked_process_has_what_a_new_one_has(fork_server, hp_platform, tmp_path):
    environment = {**os.environ, "A": "1", "PYTHONPATH": str(tmp_path)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        first = about(fork_server, "x", cwd=tmp_path, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    second = about(fork_server)
    assert first["frameworks"] == [hp_platform.name], "a fork of a process that has imported it"
    assert first["threads"] == 1
    assert (first["parent"], first["session"], first["folder"]) == (os.getpid(), True, str(tmp_path))
    assert (first["argv"], first["input"]) == (["-c", "x"], "given")
    assert first["variables"] == {"A": "1", "PYTHONPATH": str(tmp_path)}
    assert first["path"] == [str(tmp_path), str(tmp_path)]
    assert (first["blocked"], first["ignored"]) == ([signal.SIGUSR2], [])
    # Nothing of the first is in the second, whose random numbers are others.
    assert second["variables"] == {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    assert "/changed" not in second["path"]
    assert second["blocked"] == [int(each) for each in before]
    assert all(some != others for some, others in zip(first["numbers"], second["numbers"], strict=True))


def test_files_are_passed_by_number(fork_server):
    reading, writing = os.pipe()
    process = start(fork_server, "import os, sys; os.write(int(sys.argv[1]), b'!')", str(writing), pass_fds=[writing])
    os.close(writing)
    # The pipe's only other end is that of the process: the server has kept none.
    assert os.read(reading, 10) == b"!"
    assert os.read(reading, 10) == b""
    os.close(reading)
    assert process.wait(100) == 0


def test_files_with_high_numbers_are_passed(fork_server, tmp_path):
    with (tmp_path / "written").open("w+b") as file:
        for number in range(500, 505):
            os.dup2(file.fileno(), number)
            code = "import os, sys; os.write(int(sys.argv[1]), b'!'); os._exit(0)"
            assert start(fork_server, code, str(number), pass_fds=[number]).wait(100) == 0
            os.close(number)
        # All have written at one position, that of this file.
        assert os.pread(file.fileno(), 10, 0) == b"!" * 5


def test_a_killed_process_loses_no_output(fork_server):
    code = """
        import os, signal, sys
        print("all", end="")
        print("of it", end="", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
    process = fork_server.popen([sys.executable, "-u", "-c", textwrap.dedent(code)], **pipes)
    assert process.communicate(timeout=100) == (b"all", b"of it")


def test_ignored_signals_stay_ignored(fork_server):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert about(fork_server)["ignored"] == [signal.SIGHUP]
    finally:
        signal.signal(signal.SIGHUP, before)
    assert about(fork_server)["ignored"] == []


@pytest.mark.parametrize(("code", "expected"), [
    ("import sys; sys.exit(3)", 3),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ("raise ValueError('reported')", 1),
    ("import sys; sys.exit('reported')", 1),
    ("import sys; sys.exit(None)", 0),
    ("import sys; print('reported', file=sys.stderr, end=''); sys.exit('')", 1),
    # Its thread is idle, and no daemon.
    ("from concurrent.futures import ThreadPoolExecutor; pool = ThreadPoolExecutor(1); pool.submit(int)", 0),
])  # fmt: skip
def test_the_end_of_a_process_is_reported(fork_server, code, expected):
    process = start(fork_server, code, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=100)
    assert process.returncode == expected
    # No report of leaks, which some extensions write when the interpreter ends.
    assert err.endswith("reported\n") if expected == 1 else err == ""


def test_a_file_that_a_program_leaves_open_has_all_that_was_written(fork_server, tmp_path):
    code = """
        import sys
        text, data = open(sys.argv[1], "w"), open(sys.argv[2], "wb")
        text.write("last"), data.write(b"1")
    """
    process = start(fork_server, code, str(tmp_path / "text"), str(tmp_path / "data"))
    process.communicate(timeout=100)
    assert process.returncode == 0
    assert ((tmp_path / "text").read_text(), (tmp_path / "data").read_text()) == ("last", "1")


def test_the_environment_of_a_forked_process_is_recorded(fork_server, tmp_path):
    process = start(fork_server, "input()", env={**os.environ, RECORDS: str(tmp_path), "A": "1"})
    assert "A=1" in environment_of(process.pid, tmp_path)
    process.communicate("\n", timeout=100)
    assert environment_of(process.pid, tmp_path) == []
    # Of others it is that of the system.
    assert "A=1" not in environment_of(os.getpid(), tmp_path)
    assert environment_of(os.getpid(), tmp_path) == Path("/proc/self/environ").read_text().split("\0")


LAUNCHES = """\
import os, sys
from hp_dtensor.launch import launch
from hp_dtensor.launch.fork_server import forked_ranks

def about():
    return os.getppid(), os.environ["OMP_NUM_THREADS"], "imported" in sys.modules, os.environ["RANK"]

if __name__ == "__main__":
    os.environ.pop("OMP_NUM_THREADS", None)
    with forked_ranks(sys.argv[1], 2, ["imported"]) as possible:
        found = launch(about, (), 2, sys.argv[1])
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    print(possible, found == [(os.getpid(), threads, possible, rank) for rank in "01"], sys.argv[1] in sys.modules)
"""


def launches(platform, tmp_path, module):
    """Return what a process prints that launches two ranks after importing `module`."""
    (tmp_path / "imported.py").write_text(module)
    (tmp_path / "launches.py").write_text(LAUNCHES)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(tmp_path / "launches.py"), platform]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[-2]


def test_ranks_are_forked_by_a_process_that_needs_no_framework(hp_platform, tmp_path):
    assert launches(hp_platform.name, tmp_path, "") == "True True False"


def test_ranks_are_new_processes_where_the_imports_of_a_server_fail(numpy_platform, tmp_path):
    assert launches(numpy_platform, tmp_path, "raise OSError") == "False True True"


def test_variables_that_imports_read_need_a_new_interpreter(fork_server):
    assert about(fork_server, env={**os.environ, "OMP_NUM_THREADS": "7"})["frameworks"] == []


THREADED = "import threading, time\nthreading.Thread(target=time.sleep, args=[1000]).start()\n"
ACCELERATED = (
    "from hp_dtensor.platform.selection import get_platform\nget_platform({!r}).device_types = ('cuda', 'cpu')\n"
)


@pytest.mark.parametrize("source", [THREADED, ACCELERATED], ids=["threads", "accelerators"])
def test_no_process_is_forked_after_imports_that_a_fork_breaks(numpy_platform, tmp_path, monkeypatch, source):
    (tmp_path / "imported.py").write_text(source.format(numpy_platform))
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer(numpy_platform, ["imported"])
    assert about(server)["frameworks"] == []
    server.close()
    # Its threads would keep it running.
    assert server._process.returncode in ((-signal.SIGKILL,) if source == THREADED else (0, -signal.SIGKILL))


def test_processes_are_forked_again_after_the_end_of_the_server(numpy_platform, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    server = ForkServer(numpy_platform)
    assert about(server)["frameworks"] == ["hp_platform_numpy"]
    server._process.kill()
    server._process.wait()
    # A new interpreter, then a fork of another server.
    assert about(server)["frameworks"] == []
    assert about(server)["frameworks"] == ["hp_platform_numpy"]
    server.close()


def test_a_process_gets_signals_at_once(fork_server):
    for _ in range(20):
        process = start(fork_server, "input()")
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=100)
        assert process.returncode == -signal.SIGTERM


def test_a_passed_file_ends_when_a_script_closes_it(fork_server, tmp_path):
    (tmp_path / "script.py").write_text("import os, sys\nos.close(int(sys.argv[1]))\ninput()\n")
    reading, writing = os.pipe()
    command = [sys.executable, str(tmp_path / "script.py"), str(writing)]
    process = fork_server.popen(command, pass_fds=[writing], stdin=subprocess.PIPE, start_new_session=True)
    os.close(writing)
    assert select.select([reading], [], [], 30)[0], "the file is still open in another process"
    os.close(reading)
    process.communicate(b"\n", timeout=100)
    assert process.returncode == 0


def test_the_server_ends_with_its_client_and_its_processes_go_on(numpy_platform):
    code = f"""
        import os, subprocess, sys
        from hp_dtensor.launch.fork_server import ForkServer
        server = ForkServer({numpy_platform!r})
        # Lines in one write, as two processes write them; an unbuffered `print` makes two.
        child = "import os; os.write(1, b'%d\\\\n' % os.getppid()); input(); os.write(1, b'%d\\\\n' % os.getppid())"
        server.popen([sys.executable, "-c", child], start_new_session=True)
        os.write(1, b'%d\\n' % server._process.pid)
        input()
    """
    client = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    numbers = {int(client.stdout.readline()) for _ in range(2)}
    assert client.pid in numbers
    (server,) = numbers - {client.pid}
    client.kill()
    client.wait()
    # The pipe is the child's as well, and still open: it ends by itself.
    client.stdin.write("\n")
    client.stdin.flush()
    assert int(client.stdout.readline()) != client.pid
    assert client.stdout.read() == ""
    ended = threading.Event()
    while environment_of(server, Path("/none")) and not ended.wait(0.05):
        pass


def test_ranks_of_a_pool_differ_in_nothing_but_their_place(rank_pool, hp_platform):
    found = rank_pool(2).run(place, hp_platform.name)
    assert [rank for rank, *_ in found] == ["0", "1"]
    assert {parent for _, parent, *_ in found} == {os.getpid()}
    for numbers in list(zip(*found, strict=True))[2:]:
        assert len(set(numbers)) == 2


def place(platform: str) -> tuple[str, int, float, float]:
    import numpy

    ours = get_platform(platform)
    (drawn,) = ours.to_numpy(ours.random("uniform", (1,), ours.dtype("float32")))
    return os.environ["RANK"], os.getppid(), float(numpy.random.rand()), float(drawn)
