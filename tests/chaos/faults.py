"""Faults: done to the process that trains, or to the files of its run."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Audit events of Python (docs.python.org, "Audit events table") that change files.
_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate")

# Called before an operation on a file, with the number of operations up to it and the path.
Act = Callable[[int, str], None]


def watch_operations(folder: Path, act: Act) -> None:
    """Call `act(number, path)` before each operation of this process that changes files of a folder."""
    count = 0
    prefix = str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in _EVENTS or not arguments:
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        if event == "open" and (not isinstance(arguments[2], int) or arguments[2] & os.O_ACCMODE == os.O_RDONLY):
            return
        if os.path.abspath(path).startswith(prefix):
            count += 1
            act(count, path)

    sys.addaudithook(hook)


def kill_at(number: int) -> Act:
    """Return an act that ends the process at an operation as a power failure would."""
    return signal_at(number, signal.SIGKILL)


def signal_at(number: int, sent: int) -> Act:
    """Return an act that sends this process a signal at an operation."""

    def act(count: int, path: str) -> None:
        if count == number:
            os.kill(os.getpid(), sent)

    return act


def fail_at(number: int, code: int) -> Act:
    """Return an act that makes an operation, and all after it, fail with a system error."""

    def act(count: int, path: str) -> None:
        if count >= number:
            raise OSError(code, os.strerror(code), path)

    return act


def slow_down(seconds: float) -> Act:
    """Return an act that delays every operation."""
    return lambda count, path: time.sleep(seconds)


def count_into(file: Path) -> Act:
    """Return an act that notes how many operations there are."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)

    def act(count: int, path: str) -> None:
        os.pwrite(descriptor, str(count).encode(), 0)

    return act


def jump_the_clock(seed: int) -> None:
    """Make `time.time` jump by up to ten years, forth and back, at every call."""
    real, random_ = time.time, random.Random(seed)
    time.time = lambda: real() + random_.uniform(-3e8, 3e8)


def truncate(path: Path, random_: random.Random) -> None:
    os.truncate(path, random_.randrange(max(1, path.stat().st_size)))


def flip(path: Path, random_: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(random_.choice([1, 1, 20])):
        if data:
            data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    path.write_bytes(data)


def zero(path: Path, random_: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def delete(path: Path, random_: random.Random) -> None:
    path.unlink()


def double(path: Path, random_: random.Random) -> None:
    path.write_bytes(path.read_bytes() * 2)


def make_folder(path: Path, random_: random.Random) -> None:
    path.unlink()
    path.mkdir()


def nest(path: Path, random_: random.Random) -> None:
    path.write_text("[" * 100_000)


DAMAGES = (truncate, flip, zero, delete, double, make_folder, nest)


def damage(run: Path, random_: random.Random) -> list[tuple[str, Path]]:
    """Damage one or two files of a run; return how, and which."""
    done = []
    for _ in range(random_.choice([1, 1, 2])):
        path = random_.choice(sorted(found for found in run.rglob("*") if found.is_file()))
        how = random_.choice(DAMAGES)
        how(path, random_)
        done.append((how.__name__, path))
    return done


def describe(done: list[tuple[str, Path]]) -> str:
    return " and ".join(f"{how} {path}" for how, path in done)


def copy(run: Path, to: Path) -> Path:
    """Copy a run, in place of one that is there."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(run, to, symlinks=True))
