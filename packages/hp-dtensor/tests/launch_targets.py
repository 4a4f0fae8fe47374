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
from hp_dtensor.exceptions import PluginError
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
        if how == "plugin":
            raise PluginError("plugin 'odd' failed")
        if how == "bus":
            os.kill(os.getpid(), signal.SIGBUS)
        if how == "unpicklable":
            return lambda: None
    time.sleep(600)


def is_running(pid):
    """Return whether a process has not ended, as a zombie has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def write_pid(folder):
    """Write this rank's process id into a file, which is complete as soon as it exists."""
    own = Path(folder) / f"{my_world()[0]}.part"
    own.write_text(str(os.getpid()))
    own.rename(own.with_suffix(".pid"))


def wait_for_end(rank, folder):
    """Return when the process of a rank that has called `write_pid` has ended."""
    file = Path(folder) / f"{rank}.pid"
    while not file.exists() or is_running(int(file.read_text())):
        time.sleep(0.01)


def write_pid_and_hang(folder):
    write_pid(folder)
    time.sleep(600)


def fail_after_another_died(victim, folder):
    """Kill the victim; its partners raise an error of their own after that, as after a lost connection."""
    write_pid(folder)
    if my_world()[0] == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_end(victim, folder)
    raise ConnectionError("connection closed by peer")


def fail_in_turn(order, folder):
    """Ranks fail one after the other, in the order given."""
    write_pid(folder)
    rank = my_world()[0]
    for before in order[: order.index(rank)]:
        wait_for_end(before, folder)
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

    pid = Path(folder) / f"{my_world()[0]}.part"
    pid.write_text(str(os.getpid()))
    pid.rename(pid.with_suffix(".pids"))
    ctypes.PyDLL(None).sleep(600)


def signals_blocked_in_a_child():
    """Return the mask of blocked signals of a process that this one starts."""
    status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16)
