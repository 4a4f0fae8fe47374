"""Worlds: all ranks of a job as seen from one of them, and the current world."""

from __future__ import annotations

import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.exceptions import CollectiveError
from hp_dtensor.platform.selection import platform_here

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


class _Local(threading.local):
    """The worlds of this thread's `use_world` blocks, the innermost last."""

    # Per thread, because each simulated rank is a thread with a world of its own.
    def __init__(self) -> None:
        self.worlds: list[World] = []


_local = _Local()


class World(ABC):
    """All ranks of a job, seen from one of them. Creates each process group once, on first use.

    Examples:
        >>> run_ranks(lambda: (current_world(platform).rank, current_world(platform).size), 2)
        [(0, 2), (1, 2)]
    """

    def __init__(self, rank: int, size: int, platform: Platform | None) -> None:
        self.rank = rank
        self.size = size
        self.platform = platform
        self._groups: dict[tuple[int, ...], ProcessGroup] = {}

    def group(self, ranks: Sequence[int]) -> ProcessGroup:
        """Return the group of `ranks` (global ranks, this one included). All members pass the same order.

        Raises:
            CollectiveError: this rank is not a member.
        """
        key = tuple(ranks)
        # Lazily: a job with many meshes has more groups than it ever uses, and each may cost sockets and buffers. The
        # first use is a collective, in which all members take part, so they all create the group then.
        found = self._groups.get(key)
        if found is None:
            if self.rank not in key:
                raise CollectiveError(f"rank {self.rank} asked for the group {key}, but is not a member of it")
            found = self._groups[key] = self._create_group(key)
        return found

    def groups(self) -> list[ProcessGroup]:
        """Return the groups that this rank has created so far."""
        return list(self._groups.values())

    @property
    def all(self) -> ProcessGroup:
        """Return the group of all ranks."""
        return self.group(range(self.size))

    def framework_group(self, group: ProcessGroup, device_type: str) -> Any:
        """Return `group` as the framework's own process group, or `group` itself if the framework has none."""
        return group

    @abstractmethod
    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup: ...

    def release(self, group: ProcessGroup) -> None:
        """Close a group. `group` creates another one for the same ranks."""
        # By identity: another group of the same ranks may have been created since.
        if self._groups.get(group.ranks) is group:
            del self._groups[group.ranks]
        group.close()

    def close(self) -> None:
        """Leave the job. Collectives raise afterwards."""
        for group in self._groups.values():
            group.close()
        self._groups.clear()


class NoCommunicationGroup(ProcessGroup):
    """A group of a world without communication: its ranks are known, and every collective raises."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise CollectiveError(
            f"group {self.ranks} belongs to a world without communication; start real ranks "
            "(hp_dtensor.launch) or simulated ones (hp_dtensor.testing.run_ranks)"
        )

    # A group of one rank needs none of these: the public methods copy.
    _all_reduce = _all_gather_into = _reduce_scatter_into = _all_to_all_into = _refuse
    _exchange = _broadcast = _all_gather_bytes = _refuse


class SilentWorld(World):
    """A world without communication: a single process, or any rank of a fake world for planning."""

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        return NoCommunicationGroup(ranks, ranks.index(self.rank), self.platform)


def current_world(platform: Platform | None = None) -> World:
    """Return the world of this thread: that of the innermost `use_world`, else that of the platform's job.

    Without a job it is a world of one rank. Worlds of other platforms than `platform` are skipped.

    Args:
        platform: default: the selected one. A process that was started by a launcher (torchrun, msrun, srun) and has
            not joined its job then joins it here, so that it is not taken for a single rank.

    Examples:
        >>> run_ranks(lambda: current_world(platform).rank, 3)
        [0, 1, 2]
    """
    if platform is None and not _local.worlds:
        selected = platform_here()
        return single_rank_world(None) if selected is None else joined_world(selected)
    return existing_world(platform)


def existing_world(platform: Platform | None) -> World:
    """Return the world of the innermost `use_world`, else of the job that `platform` has joined, else a single rank."""
    # A world without a platform, for planning, serves all of them.
    for used in reversed(_local.worlds):
        if platform is None or used.platform is None or used.platform is platform:
            return used
    world = platform.world if platform is not None else None
    return world if world is not None else single_rank_world(platform)


def joined_world(platform: Platform) -> World:
    """Return the current world. A process that a launcher started and that has not joined its job joins it first."""
    world = existing_world(platform)
    # By identity: a job of one rank is joined already, and has another world than a process outside of any job.
    if world is single_rank_world(platform):
        platform.join_launched()
        world = existing_world(platform)
    return world


@functools.cache
def single_rank_world(platform: Platform | None) -> World:
    """Return the world of a single rank. It is always the same object, so that its meshes are equal."""
    return SilentWorld(0, 1, platform)


@contextlib.contextmanager
def use_world(world: World) -> Iterator[World]:
    """Make `world` the current world of this thread inside the block."""
    _local.worlds.append(world)
    try:
        yield world
    finally:
        # The last occurrence, as blocks of one world may be nested, but not `pop`: a generator that holds a block open
        # may finish after a block that was entered later.
        del _local.worlds[len(_local.worlds) - 1 - _local.worlds[::-1].index(world)]


@contextlib.contextmanager
def fake_world(world_size: int, rank: int = 0) -> Iterator[World]:
    """Make a world of any size, seen from `rank`, the current one inside the block.

    For planning: there are no processes, no sockets and no framework, and collectives raise.

    Raises:
        CollectiveError: `rank` is outside the world.

    Examples:
        >>> with fake_world(1_000_000, rank=7) as world:
        ...     DeviceMesh("cuda", (1000, 1000)).get_coordinate()
        (0, 7)
    """
    if not 0 <= rank < world_size:
        raise CollectiveError(f"fake_world: rank {rank} is outside a world of {world_size} ranks")
    with use_world(SilentWorld(rank, world_size, None)) as world:
        yield world
