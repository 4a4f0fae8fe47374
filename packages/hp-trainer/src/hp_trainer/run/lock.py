"""The lock of a run: one job at a time trains it, on one machine or on several that share a file system."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hp_trainer._files import link_new, read_plain_text
from hp_trainer.exceptions import RunFolderError, RunLockedError

LOCK_FILE = "lock.json"
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
_POLL_SECONDS = 0.5
_ATTEMPTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        nonce: of this holding; two holdings of one process differ.
        host: name of its machine.
        boot: boot of that machine; empty where the system does not tell.
        namespace: the namespace of its process id (each container has its own); empty where there is none.
        pid: its process id.
        started: start of the process in clock ticks after boot, which tells it from a later one with its id.
        since: when it took the lock, UTC.
        beat: grows with every sign of life.
    """

    nonce: str
    host: str
    boot: str
    namespace: str
    pid: int
    started: int
    since: str
    beat: int = 0

    @classmethod
    def this_process(cls) -> Holder:
        """Return the present process as a holder from now on."""
        return cls(
            nonce=secrets.token_hex(8),
            host=socket.gethostname(),
            boot=_read_text("/proc/sys/kernel/random/boot_id"),
            namespace=_link_text("/proc/self/ns/pid"),
            pid=os.getpid(),
            started=_start_of(os.getpid()) or 0,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def is_known_here(self) -> bool:
        """Return whether this process can see the holder, so that its end is certain and need not be waited for."""
        me = Holder.this_process()
        return (self.host, self.boot, self.namespace) == (me.host, me.boot, me.namespace) and bool(me.started)

    def is_alive_here(self) -> bool:
        """Return whether the holder, known here, still runs. O(1)."""
        return _start_of(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """The right to train a run, held from `acquire` to `release`, or inside a `with` block.

    The lock is a file in the run's folder that names its holder; it is made in one step by a hard link, which NFS
    does atomically too. A thread of the holder renews it every `HEARTBEAT_SECONDS`. A lock is stale when its holder
    is gone from this machine, or, on another machine, when it has not been renewed for `STALE_SECONDS` as measured
    here: no clocks are compared.

    Args:
        folder: the run's folder, which exists.
        tell: is given a line when another machine's lock has to be watched for a while.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None] | None = None) -> None:
        self.path = folder / LOCK_FILE
        self._folder, self._tell = folder, tell or _to_stderr
        self._holder: Holder | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def nonce(self) -> str:
        """This holding's name, by which `check_owner` knows it."""
        assert self._holder is not None, "the lock is not held"
        return self._holder.nonce

    def acquire(self) -> Self:
        """Take the lock.

        Raises:
            RunLockedError: a live job holds it; says which.
            OSError: the folder cannot be written.
        """
        while not self._create():
            found = read_holder(self._folder)
            if found is None or not self._is_stale(found):
                continue
            self._remove(found)
        self._delete_leftovers()
        self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)
        self._thread.start()
        return self

    def release(self) -> None:
        """Give the lock back; nothing happens where another job has taken it over."""
        if self._holder is None:
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        holder, self._holder = self._holder, None
        with contextlib.suppress(OSError, RunFolderError), self._guard():
            found = read_holder(self._folder)
            if found is not None and found.nonce == holder.nonce:
                self.path.unlink()

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _create(self) -> bool:
        """Make the lock file, whole from its first moment; False: there is one."""
        holder = Holder.this_process()
        mine = self._write_beside(holder)
        try:
            link_new(mine, self.path)
        except (FileExistsError, FileNotFoundError):
            # Of another job; or ours was taken for a leftover by a container that has this machine's name.
            return False
        finally:
            mine.unlink(missing_ok=True)
        self._holder = holder
        return True

    def _is_stale(self, found: Holder) -> bool:
        """Return whether the holder is gone; False: the lock has changed hands meanwhile.

        Raises:
            RunLockedError: it is alive.
        """
        if found.is_known_here():
            if found.is_alive_here():
                raise _locked(self._folder, found)
            return True
        self._tell(
            f"the run is locked by {found}; waiting up to {STALE_SECONDS:g} s for a sign of life, as it cannot be "
            "seen from here"
        )
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            now = read_holder(self._folder)
            if now is None or now.nonce != found.nonce:
                return False
            if now.beat != found.beat:
                raise _locked(self._folder, found)
        return True

    def _remove(self, stale: Holder) -> None:
        """Take a stale lock away, and never another that took its place at this moment."""
        with self._guard():
            found = read_holder(self._folder)
            if found is None or found.nonce != stale.nonce:
                return
            doomed = self.path.with_name(f"{LOCK_FILE}.stale-{secrets.token_hex(4)}")
            self.path.rename(doomed)
            taken = _parse(doomed)
            if taken is not None and taken.nonce != stale.nonce:
                # Only where the file system has no locks of its own: another job was faster. Its lock goes back.
                link_new(doomed, self.path)
            # Who takes the run now may have deleted it as a leftover.
            doomed.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Hold the system's own lock of the folder for a moment, where the file system has such a thing."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _delete_leftovers(self) -> None:
        """Delete what processes left that were killed while they wrote: those of this machine that have ended, and
        of others what is a minute old, on the file server's own clock.
        """
        for path in self._folder.glob(f"{LOCK_FILE}.*"):
            with contextlib.suppress(OSError):
                is_old = path.stat().st_mtime < self.path.stat().st_mtime - 60
                if is_old or _is_of_ended_process(path.name):
                    path.unlink()

    def _renew(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            # A full or unreachable disk fails training by itself; the lock goes on trying.
            with contextlib.suppress(OSError, RunFolderError), self._guard():
                self._beat()

    def _beat(self) -> None:
        holder, found = self._holder, read_holder(self._folder)
        if holder is None or found is None or found.nonce != holder.nonce:
            return
        mine = self._write_beside(Holder(**(asdict(found) | {"beat": found.beat + 1})))
        try:
            mine.replace(self.path)
        finally:
            mine.unlink(missing_ok=True)

    def _write_beside(self, holder: Holder) -> Path:
        place = f"{holder.host}-{holder.pid}-{holder.started}"
        path = self.path.with_name(f"{LOCK_FILE}.{place}-{secrets.token_hex(4)}")
        with path.open("x", encoding="utf-8") as out:
            json.dump(asdict(holder), out)
            out.flush()
            os.fsync(out.fileno())
        return path


def read_holder(folder: Path) -> Holder | None:
    """Return who holds the lock of the run in `folder`, or None when nobody does.

    Raises:
        RunFolderError: the lock file is damaged.
    """
    path = folder / LOCK_FILE
    # Where there are no hard links a lock is empty for a moment.
    for _ in range(_ATTEMPTS):
        if (found := _parse(path)) is not None:
            return found
        if not path.exists():
            return None
        time.sleep(0.02)
    raise RunFolderError(f"{path} is damaged; delete it if no job trains this run")


def check_owner(folder: Path, nonce: str) -> None:
    """Refuse to go on where another job has taken the run over.

    Raises:
        RunLockedError: the lock is not that of `nonce` any more.
    """
    found = read_holder(folder)
    if found is None or found.nonce != nonce:
        who = "its lock is gone" if found is None else f"it is now trained by {found}"
        raise RunLockedError(f"this job has lost the run {folder}: {who}; nothing more is written")


def _locked(folder: Path, holder: Holder) -> RunLockedError:
    return RunLockedError(
        f"the run {folder} is being trained by {holder}; wait until it has ended, or stop it there "
        f"(kill {holder.pid}). Only if it is certainly gone, delete {folder / LOCK_FILE}"
    )


def _parse(path: Path) -> Holder | None:
    try:
        values = json.loads(read_plain_text(path))
    except (OSError, ValueError, RecursionError):
        return None
    kinds: dict[str, Any] = {field.name: int if field.type == "int" else str for field in fields(Holder)}
    if not isinstance(values, dict) or set(values) != set(kinds):
        return None
    if any(type(values[name]) is not kind for name, kind in kinds.items()):
        return None
    return Holder(**values)


def _is_of_ended_process(name: str) -> bool:
    """Return whether a file beside the lock is named after a process of this machine that has ended."""
    place, _, _ = name.removeprefix(f"{LOCK_FILE}.").rpartition("-")
    host, *numbers = place.rsplit("-", 2)
    if host != socket.gethostname() or len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        return False
    return numbers[1] != "0" and _start_of(int(numbers[0])) != int(numbers[1])


def _start_of(pid: int) -> int | None:
    """Return the start of a process in clock ticks after boot (field 22 of proc(5)'s stat); None: there is none."""
    text = _read_text(f"/proc/{pid}/stat")
    # The name, in brackets, may hold spaces and brackets; a zombie has ended.
    state, *rest = text.rpartition(")")[2].split() or [""]
    return int(rest[18]) if len(rest) > 18 and state != "Z" else None


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _link_text(path: str) -> str:
    try:
        return str(os.readlink(path))
    except OSError:
        return ""


def _to_stderr(line: str) -> None:
    print(f"hp-train: {line}", file=sys.stderr, flush=True)
