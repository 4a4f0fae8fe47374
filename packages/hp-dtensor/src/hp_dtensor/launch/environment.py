"""`from_environment`: join a job that torchrun, msrun or Slurm has started, by their environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hp_dtensor.comm.world import World
from hp_dtensor.exceptions import LaunchError, PlatformError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """This process's rank, the size of its job and the address of the rendezvous, as the launcher has set them.

    Attributes:
        launcher: `torchrun`, `msrun` or `slurm`. `torchrun` includes every launcher that sets the same variables.
        local_rank, local_size: rank within this machine, and number of ranks on it.
        address: `host:port` of the rendezvous.
        is_scheduler: this process is msrun's scheduler, which runs the same command and is not a rank.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    is_scheduler: bool = False


def is_launched(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether this process was started as a rank by torchrun, msrun, Slurm's srun or `launch`."""
    return _launcher(os.environ if environ is None else environ) is not None


def rank_environment(environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
    """Return the rank and job that the launcher's variables describe, or None if no launcher has set any.

    Raises:
        LaunchError: variables are missing or invalid. The message lists all of them.
    """
    environ = os.environ if environ is None else environ
    launcher = _launcher(environ)
    return None if launcher is None else _READERS[launcher](_Variables(launcher, environ))


def leave_launcher() -> RankEnvironment | None:
    """Remove the launcher's variables from this process's environment, and return what they said.

    For a process that the launcher has started once per machine and that starts the ranks there itself.

    Raises:
        LaunchError: variables are missing or invalid.
    """
    found = rank_environment()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MS_ROLE", "SLURM_STEP_NUM_TASKS"):
        os.environ.pop(name, None)
    return found


def launched_local_rank() -> int:
    """Return this process's rank within its machine by its environment, before the job's address is known, or 0."""
    # A value that is not a number is reported when the rank joins.
    return _Variables(_launcher(os.environ) or "", os.environ).number(local_rank_variable(), 0)


def local_rank_variable() -> str:
    """Return the variable with this process's rank within its machine: its launcher's, else `LOCAL_RANK`."""
    return _LOCAL_RANKS[_launcher(os.environ) or "torchrun"]


def from_environment(platform: Platform | str | None = None, timeout_seconds: float = 300.0) -> World:
    """Join the job of this process's launcher and return its world. Further calls return the same world.

    In the scheduler process that msrun starts in addition to the ranks, which is not needed, this exits with code 0.

    Args:
        timeout_seconds: limit for joining the job and for each collective.

    Raises:
        LaunchError: no launcher has started this process, or its variables are invalid.
        PlatformError: the platform cannot be used.
    """
    found = rank_environment()
    # Before the platform is imported: the scheduler process needs none and would hold device memory.
    if found is not None and found.is_scheduler:
        raise SystemExit(0)
    chosen = get_platform(platform)
    world: World | None = chosen.world
    if world is not None:
        return world
    if found is None:
        raise LaunchError(
            "no launcher has started this process: start it with torchrun, msrun or srun, "
            "or start local ranks with hp_dtensor.launch.launch"
        )
    joined: World = chosen.connect(
        found.rank, found.size, found.address, timeout_seconds=timeout_seconds, local_rank=found.local_rank
    )
    return joined


def threads_of_rank(local_size: int) -> dict[str, str]:
    """Return variables that libraries read at import, by which a rank uses its share of the cores, unless set."""
    threads = max(1, len(os.sched_getaffinity(0)) // max(1, local_size))
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}


def device_index(local_rank: int, num_devices: int) -> int:
    """Return the index of a rank's device of those its process sees: the local rank, or 0 if Slurm shows one."""
    if local_rank < num_devices:
        return local_rank
    if num_devices == 1 and _slurm_gives_own_devices(local_rank):
        return 0
    visible = [f"{name}={value}" for name in _VISIBLE_DEVICES if (value := os.environ.get(name))]
    raise PlatformError(
        f"local rank {local_rank} has no device: its process sees {num_devices} ({', '.join(visible) or 'all'}). Start "
        f"at most {num_devices} ranks on this machine, or let each see all devices. If another launcher than Slurm "
        f"shows each rank a device of its own, set {local_rank_variable()}=0 for all"
    )


_LOCAL_RANKS = {"torchrun": "LOCAL_RANK", "msrun": "DEVICE_ID", "slurm": "SLURM_LOCALID"}
_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


def _slurm_gives_own_devices(local_rank: int) -> bool:
    # Not by the visible devices alone: a user may have set the same ones for all ranks. Nor by Slurm's variables alone:
    # ranks that torchrun has started in one task share its devices.
    per_task = os.environ.get("SLURM_GPUS_PER_TASK") or "gres/" in os.environ.get("SLURM_TRES_PER_TASK", "")
    return bool(per_task) and os.environ.get("SLURM_LOCALID") == str(local_rank)


def _launcher(environ: Mapping[str, str]) -> str | None:
    """Return the name of the launcher whose variables are set."""
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return "torchrun"
    if "MS_ROLE" in environ:
        return "msrun"
    # A batch script also has SLURM_PROCID and is not a rank. Only the tasks of a step have SLURM_STEP_NUM_TASKS.
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        return "slurm"
    return None


class _Variables:
    """Reads a launcher's environment variables and collects all problems, which `check` raises together."""

    def __init__(self, launcher: str, environ: Mapping[str, str]) -> None:
        self.launcher = launcher
        self.environ = environ
        self.problems: list[str] = []

    def text(self, name: str, advice: str = "") -> str:
        # Missing values become "" and 0, so that all problems are found before any is raised.
        value = self.environ.get(name, "")
        if not value:
            self.problems.append(f"{name} is not set{advice}")
        return value

    def number(self, name: str, default: int | None = None, advice: str = "") -> int:
        if default is not None and not self.environ.get(name):
            return default
        value = self.text(name, advice)
        if value and not value.isdecimal():
            self.problems.append(f"{name}={value!r} is not a number >= 0")
        return int(value) if value.isdecimal() else 0

    def port(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if self.environ.get(name, "").isdecimal() and not 0 < value < 65_536:
            self.problems.append(f"{name}={value} is not a port from 1 to 65535")
        return value

    def check(self, environment: RankEnvironment) -> RankEnvironment:
        if not self.problems and environment.rank >= environment.size:
            self.problems.append(f"rank {environment.rank} is outside a world of {environment.size}")
        if self.problems:
            raise LaunchError(
                f"this process looks started by {self.launcher}, but {'; '.join(self.problems)}. "
                "Unset its variables to run without a launcher."
            )
        return environment


def _torchrun(variables: _Variables) -> RankEnvironment:
    host, port = variables.text("MASTER_ADDR"), variables.port("MASTER_PORT")
    return variables.check(
        RankEnvironment(
            "torchrun",
            rank=variables.number("RANK"),
            size=variables.number("WORLD_SIZE"),
            local_rank=variables.number(_LOCAL_RANKS["torchrun"], 0),
            local_size=variables.number("LOCAL_WORLD_SIZE", 1),
            address=f"{host}:{port}",
        )
    )


def _msrun(variables: _Variables) -> RankEnvironment:
    is_scheduler = variables.environ["MS_ROLE"] == "MS_SCHED"
    host, port = variables.text("MS_SCHED_HOST"), variables.port("MS_SCHED_PORT")
    advice = "; with several machines msrun needs --node_rank"
    return variables.check(
        RankEnvironment(
            "msrun",
            rank=0 if is_scheduler else variables.number("MS_NODE_ID", advice=advice),
            size=variables.number("MS_WORKER_NUM"),
            local_rank=variables.number(_LOCAL_RANKS["msrun"], 0),
            local_size=variables.number("MS_LOCAL_WORKER_NUM", 1),
            # The scheduler process exits in `from_environment`, which leaves its port to rank 0.
            address=f"{host}:{port}",
            is_scheduler=is_scheduler,
        )
    )


def _slurm(variables: _Variables) -> RankEnvironment:
    host = variables.environ.get("MASTER_ADDR") or first_host(variables.text("SLURM_STEP_NODELIST"))
    job, restarts = variables.number("SLURM_JOB_ID"), variables.number("SLURM_RESTART_COUNT", 0)
    # All ranks must derive the same port without communicating. It is below the range of outgoing connections. A job
    # that is requeued because its port is in use meets at another one, which is none of the next jobs' either.
    port = variables.port("MASTER_PORT", 12_000 + (job + 7_919 * restarts) % 20_000)
    tasks = variables.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    return variables.check(
        RankEnvironment(
            "slurm",
            rank=variables.number("SLURM_PROCID"),
            size=variables.number("SLURM_STEP_NUM_TASKS"),
            local_rank=variables.number(_LOCAL_RANKS["slurm"]),
            local_size=tasks_of_node(tasks, variables.number("SLURM_NODEID", 0)),
            address=f"{host}:{port}",
        )
    )


_READERS: dict[str, Callable[[_Variables], RankEnvironment]] = {
    "torchrun": _torchrun,
    "msrun": _msrun,
    "slurm": _slurm,
}


def first_host(node_list: str) -> str:
    """Return the first host of Slurm's compressed node list: `gpu[003-006,9],cpu1` -> `gpu003`."""
    # A comma inside brackets does not end the host. A name may have several brackets: `rack[1-2]node[03-04]`.
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", node_list)
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group())


def tasks_of_node(counts: str, node: int) -> int:
    """Return the number of tasks on a node from Slurm's compressed list: `4(x2),3` means 4, 4 and 3."""
    found = [int(n) for n, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(repeats or 1))]
    return found[node] if node < len(found) else 1
