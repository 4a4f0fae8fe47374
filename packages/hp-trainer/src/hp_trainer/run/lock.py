"""The lock of a run, which lets one job at a time train it, on one machine or on several with a shared file system.

The lock file names host, process and process start of its holder, with a nonce, and is renewed every few seconds. A
job that finds a lock checks the process directly where it can see it (same boot, same process namespace), and otherwise
watches the lock for half a minute on its own clock. A job that was wrongly taken for dead finds another nonce before it
publishes or deletes a checkpoint, and stops.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import TypeAdapter

from hp_trainer import _coordination
from hp_trainer._files import has_ended, link_new, read_plain_text, write_atomically, write_new, writer_name
from hp_trainer.exceptions import RunFolderError, RunLockedError

LOCK_FILE = "lock.json"
# A job that misses fewer than six beats is slow, not dead.
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
_POLL_SECONDS = 0.5
_ATTEMPTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        nonce: unique per acquisition, also for two acquisitions by one process.
        host: name of the machine.
        pid: process id.
        writer: `writer_name` of the process, from which another one on its machine finds out whether it has ended.
        since: time at which it took the lock, UTC.
        beat: counter that grows with every renewal.
    """

    nonce: str
    host: str
    pid: int
    writer: str
    since: str
    beat: int = 0

    @classmethod
    def this_process(cls) -> Holder:
        """Return a holder for the current process and time."""
        return cls(
            nonce=secrets.token_hex(8),
            host=socket.gethostname(),
            pid=os.getpid(),
            writer=writer_name(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """The exclusive right to train a run, held from `acquire` to `release`, or inside a `with` block.

    The lock is a file in the run's folder that names its holder. It is created atomically by a hard link, which also
    works on NFS. A thread of the holder renews it every `HEARTBEAT_SECONDS`. A lock is stale if its holder has ended on
    this machine, or if the holder is elsewhere and has not renewed it for `STALE_SECONDS`. That time is measured here,
    so that clocks of different machines are never compared.

    Args:
        folder: the run's folder, which exists.
        report: called with a message when a lock of another machine has to be watched for a while.
    """

    def __init__(self, folder: Path, report: Callable[[str], None] | None = None) -> None:
        self.path = folder / LOCK_FILE
        self._folder, self._report = folder, report or _coordination.report
        self._holder: Holder | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def nonce(self) -> str:
        """The nonce of this acquisition, for `check_owner`."""
        assert self._holder is not None, "the lock is not held"
        return self._holder.nonce

    def acquire(self) -> Self:
        """Take the lock.

        Raises:
            RunLockedError: a live job holds it; the message names the job.
            OSError: the folder cannot be written.
        """
        # Each round either finds a live holder and raises, or has seen the lock change.
        while not self._create():
            found = read_holder(self._folder)
            if found is None or not self._is_stale(found):
                continue
            self._remove(found)
        self._thread = threading.Thread(target=self._renew, name="run lock", daemon=True)
        self._thread.start()
        return self

    def release(self) -> None:
        """Release the lock, unless another job has taken it over."""
        if self._holder is None:
            return
        self._stop.set()
        if self._thread is not None:
            # Joined first: a renewal after the deletion would create the file again.
            self._thread.join()
        holder, self._holder = self._holder, None
        with contextlib.suppress(OSError, RunFolderError), self._guard():
            found = read_holder(self._folder)
            # A job that took this one for dead may hold the lock by now.
            if found is not None and found.nonce == holder.nonce:
                self.path.unlink()

    def __enter__(self) -> Self:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _create(self) -> bool:
        """Create the lock file atomically; return False if there is one already."""
        holder = Holder.this_process()
        try:
            write_new(self.path, json.dumps(asdict(holder)))
        except FileExistsError:
            return False
        except FileNotFoundError:
            # Another job, which has the lock, has deleted our temporary file as a leftover; or the folder is gone.
            if not self._folder.is_dir():
                raise
            return False
        self._holder = holder
        return True

    def _is_stale(self, found: Holder) -> bool:
        """Return whether the holder has ended; False: the lock has another holder by now."""
        ended = has_ended(found.writer)
        if ended is False:
            raise _locked(self._folder, found)
        if ended:
            return True
        self._report(
            f"the run is locked by {found}, which cannot be checked from here; waiting up to {STALE_SECONDS:g} s for "
            "it to renew the lock"
        )
        # Only the beat is compared, never a time of the other machine.
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
        """Remove a stale lock, but never another lock that has just replaced it."""
        with self._guard():
            found = read_holder(self._folder)
            if found is None or found.nonce != stale.nonce:
                return
            doomed = self.path.with_name(f"{LOCK_FILE}.stale-{secrets.token_hex(4)}")
            # Renamed and read again, since between check and removal another job may have replaced the lock.
            self.path.rename(doomed)
            taken = _parse(doomed)
            if taken is not None and taken.nonce != stale.nonce:
                # Without flock another job may have been faster. Its lock is put back.
                link_new(doomed, self.path)
            doomed.unlink()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Hold an flock on the folder inside the block, if the file system supports it."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _renew(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            # A full or unreachable disk makes training itself fail; the lock keeps trying.
            with contextlib.suppress(OSError, RunFolderError), self._guard():
                self._beat()

    def _beat(self) -> None:
        holder, found = self._holder, read_holder(self._folder)
        if holder is None or found is None or found.nonce != holder.nonce:
            return
        # Atomically, so that a reader never sees a truncated lock.
        renewed = replace(found, beat=found.beat + 1)
        write_atomically(self.path, json.dumps(asdict(renewed)))


def read_holder(folder: Path) -> Holder | None:
    """Return the holder of the lock of the run in `folder`; None: it is not locked."""
    path = folder / LOCK_FILE
    # On file systems without hard links a new lock is empty for a moment.
    for _ in range(_ATTEMPTS):
        if (found := _parse(path)) is not None:
            return found
        if not path.exists():
            return None
        time.sleep(0.02)
    raise RunFolderError(f"{path} is damaged, or of another version of hp-trainer; delete it if no job trains this run")


def check_owner(folder: Path, nonce: str) -> None:
    """Raise if another job has taken the run over."""
    found = read_holder(folder)
    if found is None or found.nonce != nonce:
        who = "its lock was deleted" if found is None else f"it is now trained by {found}"
        raise RunLockedError(f"this job has lost the run {folder}: {who}; it writes nothing more")


def _locked(folder: Path, holder: Holder) -> RunLockedError:
    return RunLockedError(
        f"the run {folder} is being trained by {holder}; wait until it has ended, or stop it there "
        f"(kill {holder.pid}). Only if it has certainly ended, delete {folder / LOCK_FILE}"
    )


_HOLDER = TypeAdapter(Holder)


def _parse(path: Path) -> Holder | None:
    try:
        return _HOLDER.validate_json(read_plain_text(path), strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        # EINVAL: it is no regular file, or too large. With another error it may be sound, and must not be deleted.
        if error.errno != errno.EINVAL:
            raise
        return None
    except ValueError:
        return None
