"""torch.distributed's names for joining a job and asking about groups, as fronts of `World` and `ProcessGroup`."""

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
    """Join a job, as the launcher's environment variables say (torchrun, msrun, Slurm) or as given.

    Args:
        backend: default: the platform's own. Another one is refused.
        init_method: `env://` (default) or `tcp://host:port`, which needs `rank` and `world_size`.
        timeout: seconds.

    Raises:
        LaunchError: no launcher has started this process, or arguments are missing.
        CapabilityError: the platform does not communicate by `backend`.

    Example:
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
    # Only now known: the platform chooses by its devices, and joining is what tells.
    used = world.all.backend
    if backend is not None and used not in backend:  # torch's form `cpu:gloo,cuda:nccl` names several
        chosen.disconnect()
        raise CapabilityError(f"init_process_group: platform {chosen.name!r} communicates by {used}, not by {backend}")
    return world


def _join(platform: Platform, init_method: str | None, rank: int | None, size: int | None, seconds: float) -> World:
    from hp_dtensor.launch import from_environment

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
    world: World = platform.connect(rank, size, init_method.removeprefix(_TCP), timeout_seconds=seconds)
    return world


def destroy_process_group(group: ProcessGroup | None = None, *, platform: Platform | str | None = None) -> None:
    """Leave the job (no group given), or let go of one group, which is made anew when it is asked for again.

    Example:
        >>> import socket
        >>> with socket.create_server(("127.0.0.1", 0)) as server:
        ...     port = server.getsockname()[1]
        >>> init_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1, platform=platform)
        >>> current_world(platform).size
        1
        >>> destroy_process_group(platform=platform)
    """
    if group is None:
        get_platform(platform).disconnect()
        return
    group = as_group(group)
    current_world(group.platform).release(group)


def get_process_group_ranks(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of a group (default: all), in group order.

    Example:
        >>> run_ranks(lambda: get_process_group_ranks(), 2)
        [[0, 1], [0, 1]]
    """
    return list(_group(group).ranks)


def get_backend(group: ProcessGroup | None = None) -> str:
    """Return the backend of a group (default: that of all ranks): `gloo`, `nccl`, `hccl`, `simulated`, `none`, ...

    Example:
        >>> run_ranks(lambda: isinstance(get_backend(), str), 2)
        [True, True]
    """
    return _group(group).backend


def get_group_local_rank(group: ProcessGroup | None = None) -> int:
    """Return this rank's index in a group (default: that of all ranks).

    Example:
        >>> run_ranks(lambda: get_group_local_rank(), 2)
        [0, 1]
    """
    return _group(group).rank


def split_group(
    parent: ProcessGroup | None = None, split_ranks: Sequence[Sequence[int]] | None = None
) -> ProcessGroup | None:
    """Return the group of this rank among disjoint parts of `parent` (default: all), or None if it is in no part.

    Args:
        split_ranks: parts as ranks within the parent group; the same on every rank.

    Raises:
        CollectiveError: all that is wrong with the parts.

    Example:
        >>> def program():
        ...     group = split_group(split_ranks=[[0, 2], [1]])
        ...     return get_process_group_ranks(group)
        >>> run_ranks(program, 3)
        [[0, 2], [1], [0, 2]]
    """
    whole = _group(parent)
    parts = [tuple(part) for part in split_ranks or ()]
    _check_parts(whole, parts)
    mine = next((part for part in parts if whole.rank in part), None)
    return None if mine is None else current_world(whole.platform).group([whole.ranks[i] for i in mine])


def _check_parts(whole: ProcessGroup, parts: Sequence[tuple[int, ...]]) -> None:
    problems = []
    members = [rank for part in parts for rank in part]
    if not members or not all(parts):
        problems.append("expected at least one part, and none empty")
    outside = sorted({rank for rank in members if not 0 <= rank < whole.size})
    if outside:
        problems.append(f"ranks {outside} are outside the parent group of {whole.size}")
    repeated = sorted({rank for rank in members if members.count(rank) > 1})
    if repeated:
        problems.append(f"ranks {repeated} appear more than once")
    if problems:
        raise CollectiveError(f"split_group into {[list(part) for part in parts]}: {'; '.join(problems)}")


def _group(group: ProcessGroup | None) -> ProcessGroup:
    return current_world(get_platform()).all if group is None else as_group(group)
