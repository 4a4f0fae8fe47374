"""Main program of one local rank: joins the job, runs functions for its parent process, and ends with it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import io
import operator
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hp_dtensor.exceptions import CapabilityError, HPError, LaunchError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform


@dataclass(frozen=True, slots=True)
class Setup:
    """First message to a rank: the platform, its rank and the size of the job.

    Attributes:
        rank, size: where ranks are replaced, those of generation 0; see `Generation.slots`.
        local_size: ranks on each machine of the job.
        replaces: ranks that die are replaced.
        terminal: standard output and error of the parent, for a process that becomes rank 0; empty: it keeps its own.
        preload: function to import; then a second `Setup` follows when this spare process takes the place of a rank.
        log: file to write to from now on; empty: no other one.
    """

    platform: str
    rank: int
    size: int
    local_size: int
    timeout_seconds: float
    argv: tuple[str, ...]
    replaces: bool = False
    preload: str = ""
    log: str = ""
    terminal: tuple[int, ...] = ()

    @property
    def local_rank(self) -> int:
        return self.rank % self.local_size


@dataclass(frozen=True, slots=True)
class Failed:
    """Report of an exception in a rank.

    Attributes:
        phase: `start` or `run`.
        what: class and message of the exception.
        traceback: traceback of the exception.
        needs_traceback: whether it helps a user; False for errors whose message is enough.
        when: `time.monotonic()` of the failure. The earliest failure is reported as the cause.
        kind: name of the exception's class.
    """

    phase: str
    what: str
    traceback: str
    needs_traceback: bool
    when: float
    kind: str


@dataclass(frozen=True, slots=True)
class Returned:
    """Report of a function's return value."""

    value: Any


@dataclass(frozen=True, slots=True)
class Run:
    """Request to run a function, by name. Its pickled arguments are loaded after its module has been imported."""

    target: str
    args: bytes


@dataclass(frozen=True, slots=True)
class Generation:
    """The ranks of a job between two deaths of ranks, as one rank sees them.

    Attributes:
        number: 0 for the ranks that started the job; one more after each replacement.
        newcomers: ranks whose processes are not those of the generation before.
        lost_at: `time.monotonic()` of the death that ended the generation before, on the clock of this machine.
        reason: how the replaced ranks ended, for messages.
        is_last: no further death is survived; the ranks should save their state, and end.
        lacks_node: the reason for `is_last`: no other machine has taken the place of a lost one in time.
        hosts: the address of each machine.
        slots: for each rank, the rank in generation 0 whose place its process has. A job that goes on with fewer ranks
            numbers them again.
        local_size: slots of each machine.
    """

    number: int = 0
    newcomers: tuple[int, ...] = ()
    lost_at: float = 0.0
    reason: str = ""
    is_last: bool = False
    lacks_node: bool = False
    hosts: tuple[str, ...] = ("127.0.0.1",)
    slots: tuple[int, ...] = (0,)
    local_size: int = 1

    @property
    def first_size(self) -> int:
        """The number of ranks in generation 0."""
        return self.local_size * len(self.hosts)

    @property
    def machines(self) -> tuple[int, ...]:
        """For each rank, the index of its machine in `hosts`."""
        return tuple(slot // self.local_size for slot in self.slots)


@dataclass(frozen=True, slots=True)
class Imported:
    """Report of a rank that waits for the first `Meet`; `joins_once`: its process cannot join a second job."""

    joins_once: bool = False


@dataclass(frozen=True, slots=True)
class Leave:
    """Message to a survivor: a rank has died; leave the process groups of this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Meet:
    """Message to all ranks: join the next generation at an address, served by rank 0 with `memory`, else the parent."""

    generation: Generation
    address: str
    memory: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stay:
    """Answer to `Lost`: no rank has died, so the error of this rank has another cause."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Report of a rank whose collective failed, perhaps at a death, or has waited for its full timeout (`hung`)."""

    generation: int
    hung: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """Report of a survivor that has left the process groups of a generation and waits for the next one."""

    generation: int


@dataclass(frozen=True, slots=True)
class Joined:
    """Report of a rank that has joined a generation."""

    generation: int


_SCRIPT_MODULE = "__hp_main__"


def target_name(target: str | Callable[..., Any]) -> str:
    """Return the name, `"module:function"`, by which another process imports `target`. Lambdas raise a LaunchError."""
    if isinstance(target, str):
        if ":" not in target:
            raise LaunchError(f"target {target!r}: expected 'module:function'")
        return target
    name = getattr(target, "__qualname__", "")
    try:
        found = operator.attrgetter(name)(sys.modules.get(getattr(target, "__module__", "")))
    except AttributeError:
        found = None
    # A local function or lambda has a qualified name, too, but another process would not find the same object by it.
    if found is not target:
        raise LaunchError(
            f"ranks get functions by name, and {target!r} has none that another process could import; "
            "define it at the top level of a module"
        )
    return f"{_module_of(target)}:{name}"


def _module_of(target: Callable[..., Any]) -> str:
    """Return the name of the module that defines `target`, or the path of the script that this process runs."""
    if target.__module__ != "__main__":
        return target.__module__
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    path = getattr(main, "__file__", None)
    if path is None:
        raise LaunchError(f"{target!r} was defined interactively; ranks can only import it from a file")
    # The ranks load the script under this name, so results of its classes are unpickled from it here.
    sys.modules[_SCRIPT_MODULE] = main
    return str(Path(path).resolve())


def load_target(name: str) -> Callable[..., Any]:
    """Return the function with a name that `target_name` returned in another process."""
    module_name, _, attribute = name.rpartition(":")
    module = _load_script(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    found: Callable[..., Any] = operator.attrgetter(attribute)(module)
    return found


@functools.cache
def _load_script(path: str) -> ModuleType:
    """Import a script under a name other than `__main__`, so that its `if __name__ == "__main__"` part does not run."""
    spec = importlib.util.spec_from_file_location(_SCRIPT_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # The parent pickles instances of the script's classes as members of `__main__`.
    sys.modules[_SCRIPT_MODULE] = sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module


HOST = "127.0.0.1"
ORPHANED = 113  # exit code
_PR_SET_PDEATHSIG = 1


class Link:
    """The pipe to the parent, read by a thread that ends this process with it, and calls `on_leave` at a death."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.on_leave: Callable[[], None] = lambda: None
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                # Messages of this module only, whose arguments for user code are bytes: nothing is imported here.
                message = pickle.loads(self._connection.recv_bytes())
                self._inbox.put(message)
                if isinstance(message, Leave):
                    self.on_leave()
        except (EOFError, OSError):
            os._exit(ORPHANED)

    def receive(self) -> Any:
        return self._inbox.get()

    def send(self, message: Any) -> None:
        # Not `Connection.send`: with it torch passes tensors in shared memory, for which the parent has no key.
        self._connection.send_bytes(pickle.dumps(message))


def main(fd: int, parent: int, parent_is_main_thread: bool) -> None:
    """Run the parent's requests until it sends None (normal end) or one fails."""
    os.set_inheritable(fd, False)
    die_with(parent, parent_is_main_thread)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    link = Link(Connection(fd))
    setup: Setup = link.receive()
    sys.argv[:] = setup.argv
    global _member
    try:
        # The parent blocks SIGINT: Ctrl-C while the interpreter starts would end in a traceback and exit code 1.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        platform = get_platform(setup.platform)
        # All ranks import their framework before any joins, so that the import does not count against the join timeout.
        if setup.preload:
            load_target(setup.preload)
        link.send(Imported(_joins_once(platform)) if setup.replaces else None)
        if setup.replaces:
            _member = _Member(link, setup, platform)
            _member.meet()
        else:
            _join(link, setup, platform)
            link.send(None)
    except BaseException as error:
        _report(link, "start", error)
        exit_process(1)
    succeeded = False
    try:
        succeeded = _serve(link)
    except BaseException as error:
        # A signal that arrived while this rank was sending or waiting for a request.
        _report(link, "run", error)
    finally:
        platform.disconnect()
        exit_process(0 if succeeded else 1)


def _join(link: Link, setup: Setup, platform: Platform) -> None:
    """Join the job, in step with the other ranks."""
    link.receive()
    if setup.rank == 0:
        # Chosen as late as possible, so that no other process takes the port first.
        link.send(free_address())
    address = link.receive()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address.split(":")
    platform.connect(
        setup.rank, setup.size, address, timeout_seconds=setup.timeout_seconds, local_rank=setup.local_rank
    )


def free_address() -> str:
    """Return an address of this machine with a port that no process uses now."""
    # Port 0: the system assigns a free one.
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return f"{HOST}:{probe.getsockname()[1]}"


def _joins_once(platform: Platform) -> bool:
    try:
        _, close = platform.serve_meeting_point(HOST)
    except CapabilityError:
        return True
    close()
    return False


class _Member:
    """A rank of a job whose dead ranks are replaced: it joins one generation of process groups after the other."""

    def __init__(self, link: Link, setup: Setup, platform: Platform) -> None:
        self._link, self._setup, self._platform = link, setup, platform
        self.generation = Generation()
        self.has_ended = False
        self.memory: tuple[str, ...] = ()
        for file in setup.terminal:
            os.set_inheritable(file, False)
        link.on_leave = self._end

    def next_generation(self, *, hung: bool) -> Generation | None:
        self._link.send(Lost(self.generation.number, hung))
        return self.meet()

    def meet(self) -> Generation | None:
        """Join the next generation; None: there is none, because no rank has died."""
        while True:
            message = self._link.receive()
            if isinstance(message, Stay):
                return None
            if isinstance(message, Setup):
                self._take_place(message)
                continue
            if isinstance(message, Leave):
                self.leave(message)
                continue
            assert isinstance(message, Meet), message
            self.has_ended = False
            try:
                self._connect(message)
            except (HPError, RuntimeError):
                if not message.generation.number:
                    raise
                # Perhaps another rank has died at the meeting point, which the parent then has closed.
                self._platform.disconnect()
                self._link.send(Lost(message.generation.number))
                continue
            self.generation = message.generation
            self._link.send(Joined(message.generation.number))
            return self.generation

    def leave(self, message: Leave) -> None:
        """Close the connections, at which survivors fail that wait for this rank in another group."""
        self._platform.disconnect()
        # Connections end with their last reference, which cycles of the old model have.
        gc.collect()
        self._link.send(Left(message.generation))

    def _take_place(self, setup: Setup) -> None:
        """Become a rank, in a process that was started as a spare."""
        self._setup = setup
        place = {"RANK": setup.rank, "LOCAL_RANK": setup.local_rank, "GROUP_RANK": setup.rank // setup.local_size}
        os.environ |= {name: str(value) for name, value in place.items()}
        if setup.log:
            log = os.open(setup.log, os.O_WRONLY | os.O_APPEND)
            _write_to(log, log)
            os.close(log)

    def _connect(self, meet: Meet) -> None:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = meet.address.split(":")
        setup, self.memory = self._setup, meet.memory
        rank, size = meet.generation.slots.index(setup.rank), len(meet.generation.slots)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        if rank == 0 and setup.terminal:
            _write_to(*setup.terminal)
        connect = self._platform.connect if meet.memory else self._platform.connect_served
        connect(rank, size, meet.address, timeout_seconds=setup.timeout_seconds, local_rank=setup.local_rank)

    def _end(self) -> None:
        self.has_ended = True
        # The main thread may be closing the same connections; its error is the one that counts.
        with contextlib.suppress(Exception):
            self._platform.abort_collectives()


def _write_to(output: int, error: int) -> None:
    """Let standard output and error write to other files from now on."""
    for stream, file in ((sys.stdout, output), (sys.stderr, error)):
        stream.flush()
        os.dup2(file, stream.fileno())


_member: _Member | None = None


def current_generation() -> Generation | None:
    """Return the generation of this rank's job; None where dead ranks are not replaced."""
    return None if _member is None else _member.generation


def lasting_memory() -> tuple[str, ...]:
    """Return the paths of two files in memory that only this rank uses, and after its death the process in its place.

    There are none where the ranks that survive a death keep their processes, and their memory. The files are empty at
    the start of a job, and are removed at its end.
    """
    return () if _member is None else _member.memory


def generation_has_ended() -> bool:
    """Return whether a rank of this generation is known to have died, for code that waits outside of collectives."""
    return _member is not None and _member.has_ended


def next_generation(*, hung: bool = False) -> Generation | None:
    """Join the next generation of the job's ranks, after a collective of this rank has failed.

    Waits until a rank is known to have died. The world of the platform is another one afterwards: meshes and everything
    on them must be built again, and no reference to the old ones be left.

    Args:
        hung: the collective failed at its timeout; ranks that do not report the same are ended and replaced.

    Returns:
        The generation; None: no rank has died, and the error has another cause.

    Raises:
        LaunchError: this process is not a rank of a job with `replacement`.
    """
    if _member is None:
        raise LaunchError("next_generation: dead ranks of this job are not replaced; start it with replacement=")
    return _member.next_generation(hung=hung)


_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def exit_process(code: int) -> NoReturn:
    """Exit with `os._exit` as multiprocessing does: framework threads may abort a finalizing interpreter."""
    # Ends the idle threads of executors, and waits for all others that are no daemons.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # Files that the program has left open, of which Python writes the last lines when it deletes them, and standard
    # output. Text first, as its lines go to a buffer of bytes.
    left = [each for each in gc.get_objects() if type(each) in _BUFFERED]
    for stream in (*sorted(left, key=lambda each: _BUFFERED.index(type(each))), sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _serve(link: Link) -> bool:
    """Run the parent's requests until it sends None or one fails. Return whether all succeeded."""
    has_run = False
    while (request := link.receive()) is not None:
        if isinstance(request, Leave):
            # A rank died after this one has returned, which the parent finds out from both; or this one has joined and
            # waits for its first request.
            if not has_run and _member is not None:
                _member.leave(request)
                _member.meet()
            continue
        has_run = True
        try:
            link.send(Returned(_run(request)))
        except BaseException as error:
            _report(link, "run", error)
            return False
    return True


def _run(request: Run) -> Any:
    """Run a function. `sys.exit(0)` in it counts as a normal end."""
    try:
        target = load_target(request.target)
        return target(*pickle.loads(request.args))
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            return None
        raise


def _report(link: Link, phase: str, error: BaseException) -> None:
    """Send an exception to the parent, as text: the exception itself may not be picklable."""
    # Clocks of one machine's processes agree, so the parent can tell which rank failed first.
    when = time.monotonic()
    needs_traceback = not isinstance(error, HPError) or error.needs_traceback
    text = "".join(traceback.format_exception(error))
    link.send(Failed(phase, f"{type(error).__name__}: {error}", text, needs_traceback, when, type(error).__name__))
    sys.stdout.flush()
    sys.stderr.flush()


def die_with(parent: int, parent_is_main_thread: bool) -> None:
    """On Linux, have the kernel kill this process when its parent dies.

    Unlike the thread of `Link`, this works while native code holds the GIL. Linux sends the signal when the *thread*
    that started this process ends, so it is set only if that was the main thread.
    """
    if sys.platform == "linux" and parent_is_main_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have died before the call, in which case no signal comes.
        if os.getppid() != parent:
            os._exit(ORPHANED)
