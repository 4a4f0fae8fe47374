"""The ranks of a job over torch.distributed, and the backends that their groups communicate by."""

from __future__ import annotations

import functools
import hashlib
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import World
from hp_dtensor.exceptions import CollectiveError
from hp_platform_torch.comm.device_capabilities import shares_devices
from hp_platform_torch.comm.groups import FACTS, TorchGroup
from hp_platform_torch.comm.staged_group import StagedGroup
from hp_platform_torch.comm.torch_groups import GroupOfOne

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


class TorchWorld(World):
    """Ranks of a job joined through torch.distributed, whose default group is the group of all ranks.

    Args:
        store: the key-value store where members of a new group connect; None for a job of one rank.
        timeout: the longest that a collective waits for a peer.
    """

    platform: Platform

    def __init__(self, rank: int, size: int, platform: Platform, store: dist.Store | None, timeout: timedelta) -> None:
        super().__init__(rank, size, platform)
        self._store = store
        self._timeout = timeout
        self._closed = False

    def _create_group(self, ranks: tuple[int, ...]) -> ProcessGroup:
        if self._closed:
            raise CollectiveError(f"rank {self.rank} has left the job; it cannot make the group {ranks}")
        rank = ranks.index(self.rank)
        if len(ranks) == 1:
            return GroupOfOne(ranks, rank, self.platform)
        kind = StagedGroup if self.platform.device_types[0] != "cpu" and shares_devices() else TorchGroup
        return kind(ranks, rank, self.platform, functools.partial(self.connect, ranks))

    def connect(self, ranks: tuple[int, ...], device_type: str) -> dist.Backend:
        """Return a backend that carries tensors of a device type, or `FACTS`, between `ranks`; all of them call it."""
        if ranks == tuple(range(self.size)) and device_type != FACTS:
            return dist.group.WORLD._get_backend(torch.device(device_type))  # type: ignore[union-attr]
        members = hashlib.sha256(repr(ranks).encode()).hexdigest()
        store = dist.PrefixStore(f"{device_type}/{members}", self._store)
        return _BACKENDS[device_type](store, ranks.index(self.rank), len(ranks), self._timeout)

    def close(self) -> None:
        self._closed = True
        super().close()
        self._store = None


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def _hccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    options = ProcessGroupHCCL.Options()
    options._timeout = timeout
    return ProcessGroupHCCL(store, rank, size, options)


_BACKENDS = {"cpu": _gloo, "cuda": _nccl, "npu": _hccl, FACTS: _gloo}
