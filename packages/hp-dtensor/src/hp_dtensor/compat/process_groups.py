"""torch.distributed's functions for joining a job and for process groups, as thin fronts of `World`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from hp_dtensor.comm.mesh import as_group
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import World, current_world
from hp_dtensor.exceptions import CapabilityError, CollectiveError, LaunchError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform

_TCP = "tcp://"


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | timedelta = 300.0,
    platform: Platform | str | None = None,
) -> World:
    """Join a job described by the launcher's environment variables (torchrun, msrun, Slurm) or by the arguments.

    Args:
        backend: name of the platform's backend, in torch's form. None: no check. Any other name is an error.
        init_method: `env://` (default) or `tcp://host:port`, which needs `rank` and `world_size`.
        timeout: seconds, or a timedelta: limit for joining the job and, if the platform supports it, each collective.

    Raises:
        LaunchError: no launcher has started this process, or arguments are missing.
        CapabilityError: the platform does not communicate by `backend`.

    Examples:
        >>> import socket
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     port = server.getsockname()[1]
        >>> init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, platform=platform)
        >>> current_world(platform).size
        1
        >>> destroy_process_group(platform=platform)
    """
    chosen = get_platform(platform)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    world = _join(chosen, init_method, rank, world_size, seconds)
    # Checked after joining, because the platform selects its backend by its devices while it connects.
    used = world.all.backend
    if backend is not None and used not in backend:  # torch's form `cpu:gloo,cuda:nccl` names several
        # A process that has joined a job cannot join another, so it leaves before the error is raised.
        chosen.disconnect()
        raise CapabilityError(f"init_process_group: platform {chosen.name!r} communicates by {used}, not by {backend}")
    return world


def _join(platform: Platform, init_method: str | None, rank: int | None, size: int | None, seconds: float) -> World:
    """Join the job at `tcp://host:port`, or that of the launcher's environment variables."""
    from hp_dtensor.launch.environment import from_environment, launched_local_rank

    if init_method in (None, "env://"):
        if rank is not None or size is not None:
            raise LaunchError(
                "init_process_group: rank and world_size need a meeting point: init_method='tcp://host:port'"
            )
        return from_environment(platform, seconds)
    assert init_method is not None
    if not init_method.startswith(_TCP) or rank is None or size is None:
        raise LaunchError(
            "init_process_group: expected init_method 'env://', or 'tcp://host:port' with rank and world_size; "
            f"got {init_method!r}, rank={rank}, world_size={size}"
        )
    address = init_method.removeprefix(_TCP)
    world: World = platform.connect(rank, size, address, timeout_seconds=seconds, local_rank=launched_local_rank())
    return world


def destroy_process_group(group: ProcessGroup | None = None, *, platform: Platform | str | None = None) -> None:
    """Leave the job, or release one group. A released group is created again when it is next requested.

    Examples:
        >>> import socket
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     port = server.getsockname()[1]
        >>> init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, platform=platform)
        >>> current_world(platform).size
        1
        >>> destroy_process_group(platform=platform)
    """
    # As in torch, no group means all of them, and so the end of the job.
    if group is None:
        get_platform(platform).disconnect()
        return
    group = as_group(group)
    current_world(group.platform).release(group)


def get_process_group_ranks(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of a group (default: all), in group order.

    Examples:
        >>> run_ranks(lambda: get_process_group_ranks(), 2)
        [[0, 1], [0, 1]]
    """
    return list(_group(group).ranks)


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the backend of a group (default: that of all ranks): `gloo`, `nccl`, `hccl`, `simulated`, `none`, ...

    Examples:
        >>> run_ranks(lambda: isinstance(get_backend(), str), 2)
        [True, True]
    """
    return _group(group).backend


def get_group_local_rank(group: ProcessGroup | None = None) -> int:
    """Return this rank's index in a group (default: that of all ranks).

    Examples:
        >>> run_ranks(lambda: get_group_local_rank(), 2)
        [0, 1]
    """
    return _group(group).rank


def split_group(
    parent: ProcessGroup | None = None, split_ranks: Sequence[Sequence[int]] | None = None
) -> ProcessGroup | None:
    """Split `parent` (default: all ranks) into disjoint subgroups. Return this rank's subgroup, or None.

    Args:
        split_ranks: the subgroups, as ranks within the parent group. Equal on every rank.

    Raises:
        CollectiveError: subgroups are empty, overlap or are outside the parent. All problems are listed.

    Examples:
        >>> def program():
        ...     group = split_group(split_ranks=[[0, 2], [1]])
        ...     return get_process_group_ranks(group)
        >>> run_ranks(program, 3)
        [[0, 2], [1], [0, 2]]
    """
    group = _group(parent)
    subgroups = [tuple(ranks) for ranks in split_ranks or ()]
    # Of all subgroups and not only this rank's: every rank then raises the same error, and none waits for the others.
    _check_subgroups(group, subgroups)
    # Only members create their group. torch's own function must be called by every rank of the parent.
    mine = next((ranks for ranks in subgroups if group.rank in ranks), None)
    return None if mine is None else current_world(group.platform).group([group.ranks[i] for i in mine])


def _check_subgroups(parent: ProcessGroup, subgroups: Sequence[tuple[int, ...]]) -> None:
    problems = []
    members = [rank for ranks in subgroups for rank in ranks]
    if not members or not all(subgroups):
        problems.append("expected at least one subgroup, and none empty")
    outside = sorted({rank for rank in members if not 0 <= rank < parent.size})
    if outside:
        problems.append(f"ranks {outside} are outside the parent group of {parent.size}")
    repeated = sorted({rank for rank in members if members.count(rank) > 1})
    if repeated:
        problems.append(f"ranks {repeated} appear more than once")
    if problems:
        raise CollectiveError(f"split_group into {[list(ranks) for ranks in subgroups]}: {'; '.join(problems)}")


def _group(group: ProcessGroup | None) -> ProcessGroup:
    """Return a group as ours, or by default that of all ranks of the selected platform."""
    return current_world(get_platform()).all if group is None else as_group(group)
