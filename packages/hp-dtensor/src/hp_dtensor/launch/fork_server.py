"""`ForkServer`: Python processes that are forked from one that has imported a framework.

A new interpreter takes two to four seconds of a core to import a framework, a fork some milliseconds. The local ranks
of `hp-train`, and the ranks and commands of tests, are therefore forked. A forked process has its own environment,
arguments, folder, files, session and random numbers, and is a child of the process that requested it. It differs from
a new one in four things: its modules were imported before it had an environment (`RANK`), all processes of a server
have one seed of hashes, `/proc/PID/environ` shows the server's environment (`environment_of` returns its own), and its
modules are not torn down when it ends.

Nothing is forked on an accelerator, whose driver does not survive a fork, if the imports have started threads, which a
fork does not have, or if variables that the imports read, such as OMP_NUM_THREADS, differ from the server's.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import pickle
import runpy
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TextIO

from hp_dtensor.launch import local_ranks
from hp_dtensor.launch.environment import threads_of_rank
from hp_dtensor.launch.local_launch import RankPool
from hp_dtensor.launch.rank_process import die_with, exit_process
from hp_dtensor.platform import plugins, selection
from hp_dtensor.platform.interface import Platform

RECORDS = "HP_TEST_FORKED"
"""Variable of a forked process: the folder where it and the processes that it forks are recorded."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from hp_dtensor.launch.fork_server import main; "
    "main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[4]), int(sys.argv[5]), sys.argv[6] == 'True')"
)
_READY = b"ready"
_LARGEST_REQUEST = 1 << 20
_MOST_FILES = 16
_PR_SET_CHILD_SUBREAPER = 36
# Libraries read these while they are imported, so a process that wants other values cannot be forked.
_READ_BY_IMPORTS = tuple("OMP_ MKL_ KMP_ GOMP_ GLOG_ MS_ LD_ PYTHON HP_DEVICE HP_BACKEND".split())
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class _Request:
    """A process to start: `python -m PROGRAM ARGUMENT ...`, with `-c`, or without option for a script.

    Attributes:
        safe_path, unbuffered: the options -P and -u.
        environment, folder: its variables and working directory.
        numbers: its number for each file descriptor that is passed with the request.
        blocked: numbers of its blocked signals.
        ignored: numbers of its ignored signals, such as SIGHUP under nohup.
    """

    option: str
    program: str
    arguments: tuple[str, ...]
    safe_path: bool
    unbuffered: bool
    environment: dict[str, str]
    folder: str
    numbers: tuple[int, ...]
    blocked: tuple[int, ...]
    ignored: tuple[int, ...]


class ForkServer:
    """Starts Python processes by forking one that has imported a platform's framework. It ends with this process.

    Args:
        platform: name of the platform.
        modules: further modules to import.
        variables: environment variables of the server in which it differs from this process.
    """

    def __init__(
        self, platform: str, modules: Sequence[str] = (), variables: Mapping[str, str] = MappingProxyType(_ONE_THREAD)
    ) -> None:
        self._platform = platform
        self._modules = modules
        # Of now, not of the first start: a test may have changed variables for its own processes.
        self._environment = {**os.environ, **variables}
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._refused = False

    def popen(self, args: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process as `subprocess.Popen` with the same arguments does, by a fork where that is possible."""
        environment = options.get("env") or dict(os.environ)
        forkable = options.get("start_new_session") and _program(args) and _alike(environment, self._environment)
        if forkable and self.is_ready():
            return _ForkedProcess(self, args, **options)
        return subprocess.Popen(args, **options)

    def run(self, args: Sequence[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, and return it with its output, as `subprocess.run` does."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, "text": True}
        with self.popen(args, **{**pipes, **options}, start_new_session=True) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            finally:
                # After a timeout.
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def close(self) -> None:
        """End the server. Processes that it has forked go on."""
        if self._socket is not None:
            # `close` alone ends nothing while a fork of this process has the same socket.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        elif self._process is not None:
            # It still imports modules, as `is_ready` was interrupted, or waits for threads that they have started.
            self._process.kill()
        if self._process is not None:
            self._process.wait()

    def request(self, request: _Request, files: Sequence[int]) -> int | None:
        """Return the process id of a new child of this process, or None if the server has died."""
        with self._lock:
            try:
                if self._socket is None:
                    raise BrokenPipeError
                with _adopting():
                    socket.send_fds(self._socket, [pickle.dumps(request)], files)
                    number = self._socket.recv(64)
            except OSError:
                number = b""
            if not number:
                self._forget()
            return int(number) if number else None

    def _forget(self) -> None:
        """Give up a server that has died. The next use starts another one, except beside a forked process."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is None:
            self._refused = True
        else:
            self._process.wait()

    def is_ready(self) -> bool:
        """Start the server, wait until it has imported all modules, and return whether processes can be forked."""
        with self._lock:
            if self._socket is None and not self._refused:
                self._start()
        return self._socket is not None

    def _start(self) -> None:
        ours, theirs = _socket_pair()
        path = json.dumps([entry or os.getcwd() for entry in sys.path])
        command = [sys.executable, "-P", "-c", _START, str(theirs.fileno()), self._platform, path]
        is_main = threading.current_thread() is threading.main_thread()
        with theirs:
            self._process = subprocess.Popen(
                [*command, json.dumps(list(self._modules)), str(os.getpid()), str(is_main)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=self._environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        if ours.recv(64) == _READY:
            self._socket = ours
        else:
            self._refused = True
            ours.close()

    @classmethod
    def beside(cls, imported: _Imported, passed: Sequence[int]) -> ForkServer:
        """Return a server for this forked process: a fork of it, without `passed`, the descriptors of its own files."""
        server = cls(imported.platform)
        server._environment = imported.environment
        server._socket, theirs = _socket_pair()
        if os.fork() == 0:
            server._socket.close()
            for number in passed:
                os.close(number)
            os.setsid()
            for number in range(3):
                os.dup2(os.open(os.devnull, os.O_RDWR), number)
            _serve(theirs, imported)
        theirs.close()
        return server


@contextlib.contextmanager
def forked_ranks(platform: str, num_ranks: int, modules: Sequence[str]) -> Iterator[bool]:
    """Context in which `launch` forks ranks from a process that has imported the framework; False if it cannot."""
    if sys.platform != "linux":
        yield False
        return
    if local_ranks.start_process is not subprocess.Popen:
        # This process was forked itself, and its server forks the ranks, too.
        yield True
        return
    server = ForkServer(platform, modules, threads_of_rank(num_ranks))
    try:
        if server.is_ready():
            with _forking(server):
                yield True
        else:
            yield False
    finally:
        server.close()


@contextlib.contextmanager
def _forking(server: ForkServer) -> Iterator[None]:
    before, local_ranks.start_process = local_ranks.start_process, server.popen
    try:
        yield
    finally:
        local_ranks.start_process = before


class ForkedRankPool(RankPool):
    """A pool whose ranks are forked by a server."""

    def __init__(self, platform: Platform, num_ranks: int, server: ForkServer) -> None:
        super().__init__(platform, num_ranks)
        self._server = server

    def run(self, target: str | Callable[..., Any], *args: Any, timeout_seconds: float | None = 300.0) -> list[Any]:
        with _forking(self._server):
            return super().run(target, *args, timeout_seconds=timeout_seconds)


class _ForkedProcess(subprocess.Popen[Any]):
    """A process of a `ForkServer`. Python's own class does all but the start."""

    def __init__(self, server: ForkServer, args: Sequence[str], **options: Any) -> None:
        self._server = server
        super().__init__(args, **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        # The parameters of the overridden method of CPython, in its order.
        pass_fds, cwd, env, _, _, _, *pipes = rest[:12]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        standard = [number if fd == -1 else fd for number, fd in enumerate((p2cread, c2pwrite, errwrite))]
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in (env or os.environ).items()}
        program = _program(args)
        assert program is not None
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        request = _Request(
            *program,
            environment,
            os.fspath(cwd or os.getcwd()),
            (0, 1, 2, *pass_fds),
            tuple(int(number) for number in blocked),
            tuple(int(number) for number in _IGNORED if signal.getsignal(number) == signal.SIG_IGN),
        )
        pid = self._server.request(request, [*standard, *pass_fds])
        if pid is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]
            return
        self.pid = pid
        self._child_created = True
        _record(self.pid, environment)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def environment_of(pid: int, records: Path) -> list[str]:
    """Return the variables, `NAME=value`, with which a running process started, perhaps recorded in `records`."""
    try:
        found = Path(f"/proc/{pid}/environ").read_text(errors="replace")
        # Empty for a zombie.
        return (records / _identity(pid)).read_text().split("\0") if found else []
    except FileNotFoundError:
        return found.split("\0") if Path(f"/proc/{pid}").exists() else []
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class _Imported:
    """A process after the imports: its environment and path before them, and the variables that they have added."""

    platform: str
    environment: dict[str, str]
    path: tuple[str, ...]
    added: dict[str, str]
    selected: Platform


def main(fd: int, platform: str, modules: list[str], parent: int, parent_is_main_thread: bool) -> None:
    """Import the framework, and serve. Each forked process runs what was requested."""
    die_with(parent, parent_is_main_thread)
    # A Ctrl-C during the imports: the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    environment, path = dict(os.environ), tuple(sys.path)
    try:
        selected = selection.get_platform(platform)
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        # A process that is not forked reports it better.
        channel.send(f"the imports have failed: {error}"[:60].encode())
        return
    # Forked processes look for plugins on their own paths.
    plugins.plugin_manager.cache_clear()
    selection._load.cache_clear()
    added = {name: value for name, value in os.environ.items() if name not in environment}
    # A fork has none of the other threads, and locks that they hold would stay locked. NumPy's OpenBLAS, though, ends
    # its threads before any fork, and starts them again when it needs them.
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    if len(os.listdir("/proc/self/task")) > 1:
        channel.send(b"the imports have started threads")
        return
    # A forked process cannot use the driver's state that looking for devices has made.
    if selected.device_types[0] != "cpu":
        channel.send(b"the platform uses accelerators")
        return
    # Collections in forked processes would copy all pages of the imported modules.
    gc.collect()
    gc.freeze()
    channel.send(_READY)
    _serve(channel, _Imported(platform, environment, path, added, selected))


def _serve(channel: socket.socket, imported: _Imported) -> NoReturn:
    """Fork for each request, until the other end is closed. A forked process ends in here, too."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    while True:
        data, files, _, _ = socket.recv_fds(channel, _LARGEST_REQUEST, _MOST_FILES)
        if not data:
            os._exit(0)
        request: _Request = pickle.loads(data)
        if _fork_orphan(channel, request):
            break
        for fd in files:
            os.close(fd)
    channel.close()
    _become(request, files, imported)
    if request.option != "-c":
        # A command may start ranks. They are forked from this state, not from that of the command later.
        local_ranks.start_process = ForkServer.beside(imported, request.numbers[3:]).popen
    _seed(imported.selected)
    _run(request)


def _fork_orphan(channel: socket.socket, request: _Request) -> bool:
    """Fork a child of the requesting process with a session of its own, and send its id. Return True in the child."""
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        between = os.getpid()
        if os.fork() != 0:
            os._exit(0)
        os.close(reading)
        # When the process between has ended, the requesting one, a subreaper now, becomes the parent.
        while os.getppid() == between:
            time.sleep(0.0005)
        os.setsid()
        for signum in set(_IGNORED) - set(request.ignored):
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
        os.write(writing, str(os.getpid()).encode())
        os.close(writing)
        return True
    os.close(writing)
    os.waitpid(between, 0)
    number = os.read(reading, 64)
    os.close(reading)
    if not number:
        # The child has died: the requesting process sees the end of this server.
        os._exit(1)
    channel.send(number)
    return False


def _become(request: _Request, files: Sequence[int], imported: _Imported) -> None:
    """Give this forked process what a new one has of its own."""
    # Two steps, since one file may have been received under the number that another one gets.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(request.numbers) + 1) for fd in files]
    for fd in files:
        os.close(fd)
    for fd, number in zip(high, request.numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update({**imported.added, **request.environment})
    inherited = _entries(imported.environment)
    own = [os.path.dirname(request.program) if request.option == "" else os.getcwd()]
    own = [] if request.safe_path else own
    sys.path[:] = [*own, *_entries(request.environment), *(entry for entry in imported.path if entry not in inherited)]
    importlib.invalidate_caches()
    sys.argv[:] = [request.option or request.program, *request.arguments]
    if request.unbuffered:
        sys.stdout, sys.stderr = _unbuffered(sys.stdout), _unbuffered(sys.stderr)


def _unbuffered(stream: TextIO) -> TextIO:
    """Return a stream to the same file that writes at once, as with -u. A process that is killed loses no output."""
    # `reconfigure(write_through=True)` is not enough: it writes to a buffer of bytes.
    raw = open(stream.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, newline="\n", write_through=True)


def _seed(platform: Platform) -> None:
    """Give this process random numbers of its own. Python's `random` has them after a fork, others have not."""
    platform.manual_seed(secrets.randbits(63))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _run(request: _Request) -> NoReturn:
    code: Any = 0
    try:
        if request.option == "-m":
            runpy.run_module(request.program, run_name="__main__", alter_sys=True)
        elif request.option == "":
            runpy.run_path(request.program, run_name="__main__")
        else:
            exec(compile(request.program, "<string>", "exec"), sys.modules["__main__"].__dict__)
    except SystemExit as leaving:
        code = 0 if leaving.code is None else leaving.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    # Tearing modules down would copy the pages of all that are imported: a second of a core.
    exit_process(code)


def _program(args: Sequence[str]) -> tuple[str, str, tuple[str, ...], bool, bool] | None:
    """Return option, program, arguments, and whether -P and -u are given, of a command that starts Python, or None."""
    first, *rest = map(str, args)
    flags = set()
    while rest and rest[0] in ("-P", "-u"):
        flags.add(rest.pop(0))
    option = rest.pop(0) if rest and rest[0] in ("-m", "-c") else ""
    if first != sys.executable or not rest or rest[0].startswith("-"):
        return None
    return option, rest[0], tuple(rest[1:]), "-P" in flags, "-u" in flags


def _alike(some: dict[str, str], others: dict[str, str]) -> bool:
    """Return whether two environments agree on the variables that are read by imports."""

    def read(environment: dict[str, str]) -> dict[str, str]:
        names = (name for name in environment if name.startswith(_READ_BY_IMPORTS) and name != "PYTHONPATH")
        return _ONE_THREAD | {name: environment[name] for name in names}

    return read(some) == read(others)


def _entries(environment: dict[str, str]) -> list[str]:
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _record(pid: int, environment: dict[str, str]) -> None:
    """Write the environment of a forked process into the folder that it names."""
    if RECORDS in environment:
        with contextlib.suppress(OSError):  # it may have ended
            text = "\0".join(f"{name}={value}" for name, value in environment.items())
            (Path(environment[RECORDS]) / _identity(pid)).write_text(text)


def _identity(pid: int) -> str:
    """Return the id of a process with its start time, since ids are used again."""
    stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    # The second field is the program's name in parentheses, which may contain spaces.
    return f"{pid}-{stat.rpartition(')')[2].split()[19]}"


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST_REQUEST)
    return pair


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Context in which this process becomes the parent of orphans among its descendants."""
    libc = ctypes.CDLL(None)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1):
        raise OSError("this system does not let a process adopt orphans")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
