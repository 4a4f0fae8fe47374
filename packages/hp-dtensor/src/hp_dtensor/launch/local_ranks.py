"""`LocalRanks`: the local processes of one job, from start to end, and the report of the rank that failed."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.launch.environment import threads_of_rank
from hp_dtensor.launch.rank_process import HOST, Failed, Returned, Run, Setup

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[4]); "
    "from hp_dtensor.launch.rank_process import main; main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == 'True')"
)
IMPORT_SECONDS = 300.0  # minimal limit for starting an interpreter and importing a framework on a busy machine
_OTHERS_SECONDS = 1.0  # waiting time for errors of other ranks after the first one
_STACK_SECONDS = 10.0  # maximal time for the ranks to write their stacks
_END_SECONDS = 10.0  # maximal time from a closed pipe to the end of the process, which may have to free much memory
STOPPED = ("T",)  # states of proc(5)
_STOPPED_STATES = (*STOPPED, "t")  # or by a debugger
SILENT_STATES = (*_STOPPED_STATES, "Z", "X")  # stopped or ended
_TAIL_LINES = 30
_TAIL_BYTES = 20_000
# faulthandler writes the main thread last, and this is its outermost frame: the dump is complete after it.
_LAST_FRAME = b'File "<string>", line 1 in <module>'
_START_ATTEMPTS = 3
_LOOPBACK_SECONDS = 30.0
# `fork_server` replaces it by a function that forks a process which has imported the framework.
start_process: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen


@dataclass(slots=True)
class Process:
    """The process of one rank. `output` is its log, or None if it writes to this process's terminal."""

    rank: int
    popen: subprocess.Popen[bytes]
    connection: Connection
    output: IO[bytes] | None
    failure: Failure | None = None
    has_ended: bool = False

    def send(self, message: Any) -> None:
        """Send a message to the rank. The end of a rank is detected and reported where its answer is read."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(message)

    def signal(self, signum: int) -> None:
        """Send a signal to the rank and its children. The process group exists until the rank is reaped."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signum)

    def write_stacks(self) -> None:
        """Make the rank write its Python stacks to its output. Its children get no signal, which would end them."""
        # `os.kill` reaches the rank alone; `signal` would reach its process group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.popen.pid, signal.SIGUSR1)

    def state(self) -> str:
        """Return the state letter of the process (proc(5)), or an empty string if the system does not report it."""
        try:
            stat = Path(f"/proc/{self.popen.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        # The second field is the program's name in parentheses, which may contain spaces and parentheses itself.
        return "".join(stat.rpartition(")")[2].split()[:1])

    def exit_code(self) -> int | None:
        """Return the exit code of a rank whose pipe is closed, without reaping it: its group can still be signalled."""
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            found = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            time.sleep(0.01)
        return None

    def failure_of_end(self) -> Failure:
        """Return the failure of a rank whose pipe is closed and that has reported none."""
        return failure_of_end(self.exit_code(), self.tail())

    def release(self) -> None:
        """Kill what remains of the rank and its children, and release its resources."""
        self.signal(signal.SIGKILL)
        # Reaped last: until then the process group exists and can be signalled.
        self.popen.wait()
        self.connection.close()
        if self.output is not None:
            self.output.close()

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.end_of_output().decode(errors="replace").splitlines()[-_TAIL_LINES:])

    def end_of_output(self, begin: int = 0) -> bytes:
        """Return the log from byte `begin` on, limited to its last `_TAIL_BYTES`."""
        if self.output is None:
            return b""
        # `pread` instead of `seek`: the rank writes at the shared position of the same open file.
        size = self.output_size()
        return os.pread(self.output.fileno(), _TAIL_BYTES, max(begin, size - _TAIL_BYTES))

    def output_size(self) -> int:
        return 0 if self.output is None else os.fstat(self.output.fileno()).st_size


@dataclass(slots=True)
class Output:
    """Destination of the ranks' output: logs in `folder`, else temporary files, and for rank 0 the `terminal`."""

    folder: Path | None = None
    terminal: bool = True

    def file_of(self, rank: int, *, again: bool = False) -> IO[bytes] | None:
        """Return an open file for a rank's output, or None for the terminal; `again` to append to its log."""
        # Spare processes have no rank yet.
        if rank < 0 or (rank == 0 and self.terminal):
            return None
        if self.folder is None:
            return tempfile.TemporaryFile()
        self.folder.mkdir(parents=True, exist_ok=True)
        return (self.folder / f"rank{rank}.log").open("a+b" if again else "w+b")


@dataclass(slots=True)
class LocalRanks:
    """Connected ranks of one job on this machine.

    Args:
        platform: its name.
        size: ranks of the job.
        timeout_seconds: limit for joining the job and, if the platform supports it, for each collective.
        grace_seconds: time between asking the ranks to end and killing them.
        num_nodes: machines of the job, with equally many ranks each.
    """

    platform: str
    size: int
    output: Output = field(default_factory=Output)
    timeout_seconds: float = 300.0
    grace_seconds: float = 5.0
    num_nodes: int = 1
    _processes: list[Process] = field(default_factory=list)
    # Duplicates of standard output and error, for ranks that may become rank 0.
    _terminal: tuple[int, ...] = ()

    def start(self, check: Callable[[], None] = lambda: None) -> None:
        """Start all ranks and wait until each has joined the job.

        Rank 0 chooses a free port, which another process may take before it is used. The start is then repeated.

        Args:
            check: called after each started process. If it raises, all ranks are ended.
        """
        if self.size > 1:
            _check_loopback()
        for attempt in range(_START_ATTEMPTS):
            try:
                return self._start(check)
            except _AddressTaken:
                if attempt == _START_ATTEMPTS - 1:
                    raise

    def _start(self, check: Callable[[], None]) -> None:
        try:
            self._import_frameworks(check)
            # All have imported the framework. Only now is the port chosen, so that it is free for a short time only.
            self._send_all(None)
            address = self._collect(self._processes[:1], self.timeout_seconds)[0]
            self._send_all(address)
            self._collect(self._processes, self.timeout_seconds)
        except BaseException:
            self.terminate()
            raise

    def run(self, target: str, args: tuple[Any, ...], timeout_seconds: float | None) -> list[Any]:
        """Run `target` on every rank and return the results by rank, or end all of them and raise a LaunchError."""
        try:
            self._send_all(Run(target, pickle.dumps(args)))
            return self._collect(self._processes, timeout_seconds)
        except BaseException:
            self.terminate()
            raise

    def signal(self, signum: int) -> None:
        """Send a signal to every rank."""
        for process in self._processes:
            process.signal(signum)

    def write_stacks(self) -> None:
        """Make every rank write its Python stacks to its output."""
        for process in self._processes:
            process.write_stacks()

    def stop(self) -> None:
        """End the ranks normally, and kill those that have not ended within the grace time."""
        self._send_all(None)
        self._await_end(self.grace_seconds)
        self._clear()

    def terminate(self) -> None:
        """End the ranks by SIGTERM, and by SIGKILL after the grace time."""
        for process in self._processes:
            process.signal(signal.SIGTERM)
            # A stopped process handles SIGTERM only after SIGCONT.
            process.signal(signal.SIGCONT)
        self._await_end(self.grace_seconds)
        self._clear()

    def kill(self) -> None:
        """Kill the ranks without a grace time."""
        self._clear()

    @property
    def has_ranks(self) -> bool:
        """True if a process of a rank has not ended."""
        return any(not process.has_ended for process in self._processes)

    @property
    def argv(self) -> tuple[str, ...]:
        return tuple(sys.argv)

    # Internals -------------------------------------------------------------------------------------------

    def _import_frameworks(self, check: Callable[[], None]) -> list[Any]:
        """Start all processes, wait until each has imported its framework, and return their answers."""
        for rank in range(self.size):
            with interrupts_blocked():
                self._processes.append(self._spawn(rank))
            check()
        for process in self._processes:
            self._set_up(process)
        return self._collect(self._processes, max(self.timeout_seconds, IMPORT_SECONDS))

    def _set_up(self, process: Process, **options: Any) -> None:
        """Send a process its first message; `options` are further fields of `Setup`."""
        place = (self.platform, process.rank, self.size, self._local_size, self.timeout_seconds, self.argv)
        self._send(process, Setup(*place, **options))

    @property
    def _local_size(self) -> int:
        return self.size // self.num_nodes

    def _spawn(self, rank: int, *, again: bool = False) -> Process:
        output = self.output.file_of(rank, again=again)
        ours, theirs = Pipe()
        with theirs:
            fd = theirs.fileno()
            is_main = threading.current_thread() is threading.main_thread()
            path = json.dumps([entry or os.getcwd() for entry in sys.path])
            inherited = {name: value for name, value in os.environ.items() if not _is_launchers(name)}
            node, local_rank = (0, rank) if rank < 0 else divmod(rank, self._local_size)
            place = {"RANK": rank, "WORLD_SIZE": self.size, "GROUP_RANK": node}
            place |= {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": self._local_size}
            environment = inherited | threads_of_rank(self._local_size)
            environment |= {name: str(value) for name, value in place.items()}
            popen = start_process(
                # -P: modules in the working directory, such as a json.py, must not shadow the imports of _START.
                [sys.executable, "-P", "-u", "-c", _START, str(fd), str(os.getpid()), str(is_main), path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                env=environment,
                pass_fds=[fd, *self._terminal],
                # In a new session, Ctrl-C reaches only this process, which then decides which signal the ranks get.
                start_new_session=True,
            )
        return Process(rank, popen, ours, output)

    def _send_all(self, message: Any) -> None:
        for process in self._processes:
            self._send(process, message)

    def _send(self, process: Process, message: Any) -> None:
        process.send(message)

    def _collect(self, processes: Sequence[Process], timeout_seconds: float | None) -> list[Any]:
        """Return one answer of each process. Raise as soon as any rank fails."""
        answers: dict[int, Any] = {}
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while len(answers) < len(processes):
            for process, message in self._messages(_remaining(deadline)):
                answers[process.rank] = message
            if any(process.failure for process in self._processes):
                raise self._failed()
            missing = [process for process in processes if process.rank not in answers]
            if missing and deadline is not None and time.monotonic() >= deadline:
                raise self._late(missing, timeout_seconds or 0.0)
        return [answers[process.rank] for process in processes]

    def _messages(self, timeout_seconds: float | None) -> Iterator[tuple[Process, Any]]:
        """Wait until messages are available, yield the answers, and store failures in their processes."""
        alive = {process.connection: process for process in self._processes if not process.has_ended}
        for connection in wait(list(alive), timeout_seconds):
            process = alive[connection]  # type: ignore[index]
            try:
                message = process.connection.recv()
            except (EOFError, ConnectionResetError):
                process.has_ended = True
                if process.failure is None:
                    process.failure = process.failure_of_end()
                continue
            if isinstance(message, Failed):
                process.failure = failure_of_exception(message)
            elif isinstance(message, Failure):
                process.failure = message
            else:
                yield process, message.value if isinstance(message, Returned) else message

    def _failed(self) -> LaunchError:
        """Return the error for the user, after a short wait for errors of other ranks, which may be the cause."""
        # Monotonic, as all times here: a correction of the system's clock must not change a timeout.
        deadline = time.monotonic() + _OTHERS_SECONDS
        while any(not p.failure and not p.has_ended for p in self._processes) and time.monotonic() < deadline:
            for _ in self._messages(_remaining(deadline)):
                pass
        failed = [(process.rank, process.failure) for process in self._processes if process.failure]
        # A rank that died without an exception caused the errors of its peers, which may arrive here before its end is
        # detected. Otherwise the earliest error is the cause of the others.
        (rank, first), *others = sorted(failed, key=lambda item: (not item[1].died, item[1].when))
        lines = [f"rank {rank} of {self.size} {first.headline}", first.details]
        lines += [f"rank {other} {failure.headline}" for other, failure in others]
        silent = [process for process in self._processes if not process.failure and not process.has_ended]
        # A stopped rank never reports anything, and may be what the others timed out on.
        stopped = [process for process in silent if process.state() in _STOPPED_STATES]
        lines += [f"rank {process.rank} is stopped, as by SIGSTOP" for process in stopped]
        message = "\n".join(line.rstrip() for line in lines if line)
        error = (_AddressTaken if first.address_in_use else LaunchError)(message, rank, first.kind, first.signal)
        if first.traceback:
            error.__cause__ = _RankError(f"rank {rank}:\n{first.traceback}")
        return error

    def _late(self, missing: Sequence[Process], seconds: float) -> LaunchError:
        """Return the error of ranks that did not answer in time, with their Python stacks."""
        self._await_stacks(missing)
        stacks = "\n".join(f"rank {process.rank}:\n{process.tail()}" for process in missing)
        who = ", ".join(str(process.rank) for process in missing)
        return LaunchError(f"no answer from rank {who} of {self.size} within {seconds:g} s\n{stacks}", missing[0].rank)

    def _await_stacks(self, processes: Sequence[Process]) -> None:
        """Make every rank write its Python stacks, and wait until the logs of `processes` contain them."""
        begins = [(process, process.output_size()) for process in processes if process.output is not None]
        self.write_stacks()
        deadline = time.monotonic() + _STACK_SECONDS
        while begins and time.monotonic() < deadline:
            begins = [
                (process, begin)
                for process, begin in begins
                if _LAST_FRAME not in process.end_of_output(begin) and process.state() not in SILENT_STATES
            ]
            time.sleep(0.02)

    def _await_end(self, seconds: float) -> None:
        """Wait until all processes have ended, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while any(not process.has_ended for process in self._processes) and time.monotonic() < deadline:
            for _ in self._messages(_remaining(deadline)):
                pass

    def _clear(self) -> None:
        """Kill all remaining processes of the ranks, including their children, and release their resources."""
        for process in self._processes:
            process.signal(signal.SIGKILL)
        for process in self._processes:
            process.release()
        self._processes = []


def _check_loopback() -> None:
    """Raise if processes of this machine cannot connect to each other, as in a container without networks."""
    try:
        with socket.create_server((HOST, 0)) as server:
            socket.create_connection(server.getsockname(), _LOOPBACK_SECONDS).close()
    except OSError as error:
        raise LaunchError(
            f"the ranks cannot connect to each other: {HOST} does not answer ({error}). Bring this machine's loopback "
            "interface up: ip link set lo up"
        ) from error


class _RankError(Exception):
    """The traceback of an exception in a rank, as the cause of the error raised here."""


class _AddressTaken(LaunchError):
    """A failed start, because another process took the chosen port before it was used."""


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in this thread and in processes started in the block, until `rank_process.main` unblocks it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _is_launchers(name: str) -> bool:
    """Return whether a variable belongs to the launcher of this process. Ranks of a new job must not inherit it."""
    return name.startswith(("TORCHELASTIC_", "MS_SCHED_", "MS_NODE_", "MS_WORKER_")) or name in (
        "GROUP_RANK",
        "ROLE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "MS_ROLE",
        "RANK_ID",
        "RANK_SIZE",
    )


_ADDRESS_IN_USE = re.compile(r"EADDRINUSE|address (is )?already in use|errno: 98", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one rank.

    Attributes:
        headline: what happened, in one line, to follow `rank 3 of 8`.
        details: traceback or last output.
        when: `time.monotonic()` of the exception, or of the detection of an end.
        died: whether the process ended without reporting an exception.
        address_in_use: the port for joining the job was taken.
        kind: class name of the exception.
        signal: number of the signal that has ended the process; None: none.
        traceback: its traceback, where `details` leaves it out.
    """

    headline: str
    details: str
    when: float
    died: bool = False
    address_in_use: bool = False
    kind: str = ""
    signal: int | None = None
    traceback: str = ""


# What usually ends a process by a signal.
_HINTS: dict[int, str] = {
    signal.SIGKILL: "; the machine may have run out of memory",
    signal.SIGBUS: "; a file that it had mapped into memory was truncated or its disk failed, or /dev/shm is full",
}


def failure_of_exception(message: Failed) -> Failure:
    """Return the failure of a rank that has reported an exception."""
    verb = "could not start" if message.phase == "start" else "failed"
    in_use = message.phase == "start" and bool(_ADDRESS_IN_USE.search(message.what))
    details, rest = (message.traceback, "") if message.needs_traceback else ("", message.traceback)
    what = f"{verb}: {message.what}"
    return Failure(what, details, message.when, address_in_use=in_use, kind=message.kind, traceback=rest)


def failure_of_end(code: int | None, tail: str) -> Failure:
    """Return the failure of a process that has ended with exit code `code`, the negative of a signal's number."""
    details, now = f"its last output:\n{tail}" if tail else "", time.monotonic()
    if code is not None and code < 0:
        hint = _HINTS.get(-code, "")
        # SIGABRT is a consequence: frameworks abort a process whose peer has ended.
        died = -code != signal.SIGABRT
        return Failure(f"was killed by {signal.Signals(-code).name}{hint}", details, now, died, signal=-code)
    return Failure(f"ended without a result, exit code {code}", details, now, died=True)
