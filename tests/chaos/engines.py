"""Engines that start the ranks of `kills` (hp-train itself, torchrun, Slurm, Ray), and layouts that each survives."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
STOPPED, INTERRUPTED = 128 + signal.SIGTERM, (1, 128 + signal.SIGINT, -signal.SIGINT)


@dataclass(frozen=True)
class Layout:
    """Ranks and what divides them.

    Attributes:
        goes_on: a rank that dies is replaced, and the others go on; else the engine starts all of them again.
    """

    name: str
    ranks: int
    settings: tuple[str, ...]
    goes_on: bool = True


# A state comes from the partner's memory, or from a replica.
REPLICAS = ("--parallel.dp_replicate=2",)
GO_ON = (
    Layout("2 shards with copies", 2, ("--fault_tolerance.copies=1",)),
    Layout("2 replicas (HSDP) without copies", 2, (*REPLICAS, "--fault_tolerance.copies=0")),
    Layout("2 replicas of 2 shards (HSDP) without copies", 4, (*REPLICAS, "--fault_tolerance.copies=0")),
    Layout("2 replicas of 2 shards (HSDP) with copies", 4, (*REPLICAS, "--fault_tolerance.copies=1")),
)
# From a checkpoint.
START_AGAIN = (
    Layout("2 shards that start again", 2, (), goes_on=False),
    Layout("2 replicas (HSDP) that start again", 2, REPLICAS, goes_on=False),
    Layout("2 replicas of 2 shards (HSDP) that start again", 4, REPLICAS, goes_on=False),
)
_Command = Callable[[Path, int, tuple[str, ...]], tuple[list[str], dict[str, str]]]


@dataclass(frozen=True)
class Engine:
    """A program that starts ranks.

    Attributes:
        command: the command and its variables, for a run folder, a number of processes to start, and settings.
        nodes: processes that start ranks, each as on a machine of its own; 0: the command starts ranks.
        is_rank: whether a process with this command line may be killed, in a layout that goes on or not; others start
            ranks.
        codes: exit codes of the command after it has been stopped.
        is_stopped: whether a process with this command line gets the signal; None: the command does.
        stop_signal: the signal that stops it.
    """

    name: str
    layouts: tuple[Layout, ...]
    command: _Command
    nodes: int
    is_rank: Callable[[str, bool], bool]
    codes: tuple[int, ...]
    is_stopped: Callable[[str], bool] | None = None
    stop_signal: signal.Signals = signal.SIGTERM

    def processes(self, layout: Layout) -> int:
        """Return the number of processes that the command starts: nodes, or ranks."""
        return self.nodes if layout.goes_on else layout.ranks

    def launched(self, layout: Layout) -> tuple[str, ...]:
        """Return the settings of a layout on this engine."""
        if not layout.goes_on:
            return (*layout.settings, "--launch.max_restarts=0")
        if not self.nodes:
            return (*layout.settings, f"--launch.local_ranks={layout.ranks}")
        local = layout.ranks // self.nodes
        return (*layout.settings, f"--launch.nodes={self.nodes}", f"--launch.local_ranks={local}")

    def run_folder(self, folder: Path) -> Path:
        return folder / "killed" / "hp-train"


def _is_rank(title: str, goes_on: bool) -> bool:
    """Return whether a process is a rank: one that others start again is the command itself, with its configuration."""
    return ("run.yaml" in title) != goes_on


def _is_task(title: str) -> bool:
    return "run.yaml" in title and not title.startswith("srun")


def _hp_train(run: Path, _: int, settings: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "hp_trainer", "run", "run.yaml", f"--run.folder={run}", *settings], {}


HP_TRAIN = Engine("hp-train", GO_ON, _hp_train, 0, _is_rank, (STOPPED,))


def _torchrun(run: Path, processes: int, settings: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = ["--nnodes=1", f"--nproc-per-node={processes}", f"--master-port={port}", "--max-restarts=1000"]
    command, variables = _hp_train(run, processes, settings)
    return [sys.executable, "-m", "torch.distributed.run", *options, "--monitor-interval=0.2", *command[1:]], variables


def _ray(run: Path, processes: int, settings: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    program, storage = ROOT / "examples" / "clusters" / "ray_job.py", run.parent.parent
    options = [f"--name={run.parent.name}", f"--ranks={processes}", "--max-failures=1000"]
    # A cluster of its own, whose token is not written into the user's home.
    variables = {"RAY_ADDRESS": "local", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    variables["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": processes})
    return [sys.executable, str(program), "run.yaml", str(storage), *options, *settings], variables


@contextlib.contextmanager
def _slurm() -> Iterator[Engine]:
    sys.path.append(str(ROOT / "tests" / "engines"))
    from slurm_daemons import MISSING, Slurm, is_installed

    if not is_installed():
        sys.exit(MISSING)

    # Else it would leave the daemons running.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory() as folder:
        slurm = Slurm(Path(folder))

        def srun(run: Path, processes: int, settings: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
            options = f"--nodes={processes} --ntasks-per-node=1 --overcommit --kill-on-bad-exit=0 --no-kill".split()
            return ["srun", *options, *_hp_train(run, processes, settings)[0]], slurm.environment

        try:
            slurm.start()
            # srun itself would kill its tasks at once.
            yield Engine("slurm", GO_ON, srun, 2, _is_rank, (STOPPED,), _is_task)
        finally:
            slurm.stop()


ENGINES = {
    "hp-train": HP_TRAIN,
    "torchrun": Engine("torchrun", (*GO_ON, *START_AGAIN), _torchrun, 2, _is_rank, (1, STOPPED)),
    # A driver of Ray that gets SIGTERM may abort.
    "ray": Engine(
        "ray", START_AGAIN, _ray, 0, lambda title, _: "RayTrainWorker" in title, INTERRUPTED, None, signal.SIGINT
    ),
    "slurm": None,
}


def layout_names(name: str) -> list[str]:
    """Return the names of an engine's layouts."""
    engine = ENGINES[name]
    return [layout.name for layout in (GO_ON if engine is None else engine.layouts)]


@contextlib.contextmanager
def started(name: str) -> Iterator[Engine]:
    """Return an engine, whose daemons, if any, run inside the block."""
    engine = ENGINES[name]
    if engine is not None:
        yield engine
        return
    with _slurm() as engine:
        yield engine
