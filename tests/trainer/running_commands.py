"""Running `hp-train` commands, the processes that they start, and what their runs have come to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from hp_dtensor.launch.fork_server import RECORDS, environment_of
from hp_trainer.checkpoint import LocalStorage, find_latest
from hp_trainer.metrics import read_metrics

BIN = Path(sys.executable).parent
START_SECONDS = 200  # to import a framework and join, on a busy machine
END_SECONDS = 200

LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MS_ROLE")


class Command:
    """A running `hp-train`, and all the processes that it has started.

    Args:
        records: a folder where forked processes are recorded.
        popen: `subprocess.Popen`, or that of a fork server.
        variables: environment variables to set.
    """

    def __init__(
        self,
        folder: Path,
        platform: str,
        *arguments: str,
        records: Path,
        launcher: tuple[str, ...] = (),
        popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._records = records
        # A variable of its own marks the processes of this command, wherever they are moved to.
        self.mark = f"HP_TEST_COMMAND={folder}-{time.monotonic_ns()}"
        name, value = self.mark.split("=")
        environment = {key: text for key, text in os.environ.items() if key not in LAUNCHERS_VARIABLES}
        # msrun starts `python`, whichever comes first.
        environment["PATH"] = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
        own = {"HP_PLATFORM": platform, "OMP_NUM_THREADS": "1", name: value, RECORDS: str(records)}
        self.process = popen(
            [sys.executable, *(launcher or ("-m", "hp_trainer")), *arguments],
            cwd=folder,
            env=environment | own | dict(variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self, seconds: float = START_SECONDS) -> tuple[int, str, str]:
        """(exit code, output, errors) of a command that ends by itself."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def processes(self) -> list[int]:
        """Every process that carries the mark, or was forked by one that does, and is not a zombie."""
        # The environment of a process that a forked one forks by itself is that of the fork server, without the mark.
        recorded = {int(file.name.partition("-")[0]) for file in self._records.iterdir() if self._is_marked(file)}
        pids = map(int, filter(str.isdecimal, os.listdir("/proc")))
        return [pid for pid in pids if self._is_ours(pid, recorded)]

    def line_of(self, pid: int) -> str:
        """The command line of a process; empty once it has ended."""
        try:
            return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        except OSError:
            return ""

    def rank(self, rank: int) -> int:
        """The process of a rank."""
        found = self.ranks_numbered(rank)
        assert len(found) == 1, found
        return found[0]

    def ranks_numbered(self, rank: int) -> list[int]:
        """The process of a rank, or none."""
        return [pid for pid in self.processes() if f"RANK={rank}" in self._environment(pid)]

    def ranks(self) -> list[int]:
        """The processes of all ranks."""
        return [pid for pid in self.processes() if any(name.startswith("RANK=") for name in self._environment(pid))]

    def kill_everything(self) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def _is_marked(self, record: Path) -> bool:
        return self.mark in record.read_text().split("\0")

    def _is_ours(self, pid: int, sessions: set[int]) -> bool:
        environment = self._environment(pid)
        with contextlib.suppress(ProcessLookupError):
            return self.mark in environment or (environment != [] and os.getsid(pid) in sessions)
        return False

    def _environment(self, pid: int) -> list[str]:
        return environment_of(pid, self._records)


TWO_RANKS = ("--launch.local_ranks=2", "--parallel.dp_shard=2", "--parallel.ep=2")
ENDLESS = ("--training.steps=100000", "--lr_schedule.kind=constant", "--checkpoint.interval=5", "--checkpoint.keep=3")


def wait_for_step(run: Path, step: int, command: Command) -> None:
    """Return when the metrics say that `step` is done."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if any(event["event"] == "step" and event["step"] >= step for event in read_metrics(run / "metrics.jsonl")):
            return
        if command.process.poll() is not None:
            break
        time.sleep(0.05)
    code = command.process.poll()
    command.kill_everything()
    pytest.fail(f"step {step} was not reached; exit code {code}")


def add_plugin(folder: Path, name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a plugin for commands that start from now on: they find its entry point on PYTHONPATH."""
    plugin = folder / "plugins"
    metadata = plugin / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[hp_trainer]\n{name} = {name}\n")
    (plugin / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")]))


def left_in_shared_memory(before: set[str], seconds: float = 10.0) -> list[str]:
    """Return names in shared memory that are not in `before`, and that no process has mapped for `seconds`.

    Other programs may use it meanwhile: their names are mapped, or are there for a moment only.
    """
    deadline = time.monotonic() + seconds
    left = set(os.listdir("/dev/shm")) - before
    while left:
        mapped = ""
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                mapped += maps.read_text(errors="replace")
        # A busy machine always has new names of others, so only those that were there from the start count.
        left = {name for name in left & set(os.listdir("/dev/shm")) if f"/dev/shm/{name}" not in mapped}
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    return sorted(left)


def steps_of(run: Path) -> list[int]:
    return [event["step"] for event in read_metrics(run / "metrics.jsonl") if event["event"] == "step"]


def losses_of(run: Path) -> list[float]:
    return [event["loss"] for event in read_metrics(run / "metrics.jsonl") if event["event"] == "step"]


def newest_step(run: Path) -> int:
    checkpoint = find_latest(LocalStorage(run / "checkpoints")).checkpoint
    assert checkpoint is not None
    return checkpoint.step
