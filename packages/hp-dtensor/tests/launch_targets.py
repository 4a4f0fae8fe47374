"""Functions that the ranks of test_launch.py run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.selection import get_platform


def my_world():
    world = current_world(get_platform("array"))
    return world.rank, world.size


def my_environment(names):
    return {name: os.environ.get(name) for name in names}


def my_address():
    return get_platform("array").address


def my_pid():
    return os.getpid()


def add(x, y):
    return x + y


def speak(text):
    rank = my_world()[0]
    print(f"{text} from {rank}")
    print(f"error {text} from {rank}", file=sys.stderr)


def fail(rank, how="raise"):
    """One rank fails; the others wait for it, as in a collective."""
    if my_world()[0] == rank:
        if how == "raise":
            raise ValueError(f"bad weights in rank {rank}")
        if how == "exit":
            sys.exit(7)
        if how == "quit":
            print("quitting", flush=True)
            os._exit(0)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "unpicklable":
            return lambda: None
    time.sleep(600)


def fail_after_another_died(victim):
    """Kill the victim; its partners raise an error of their own a moment later, as after a lost connection."""
    if my_world()[0] == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    raise ConnectionError("connection closed by peer")


def fail_in_turn(order):
    """Ranks fail one after the other, in the order given."""
    rank = my_world()[0]
    time.sleep(0.5 * order.index(rank))
    raise ValueError(f"rank {rank} was number {order.index(rank)}")


def leave_with_exit_0():
    sys.exit(0)


def write_pid_and_wait(folder, ignored=()):
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    rank = my_world()[0]
    pids = Path(folder) / f"{rank}.part"
    pids.write_text(f"{os.getpid()} {child.pid}")
    pids.rename(Path(folder) / f"{rank}.pids")
    time.sleep(600)


def end_well_on(number, folder):
    """Ends in its own way when asked to, leaving a file that says so."""
    asked = []
    signal.signal(number, lambda *_: asked.append(number))
    rank = my_world()[0]
    (Path(folder) / f"{rank}.ready").touch()
    while not asked:
        time.sleep(0.01)
    (Path(folder) / f"{rank}.saved").touch()
    return "saved"


def hold_native_call(folder):
    """Waits without ever running Python again, as in a stuck collective."""
    import ctypes

    (Path(folder) / f"{my_world()[0]}.pids").write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(600)


def signals_blocked_in_a_child():
    """Return the mask of blocked signals of a process that this one starts."""
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16)
