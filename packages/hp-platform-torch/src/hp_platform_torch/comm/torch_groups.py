"""Our process groups as torch's: entered in torch's tables, around the same connections."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import NoCommunicationGroup
from hp_platform_torch.comm.backends import BACKEND_NAMES


class CalledByTorch:
    """The methods of torch's process groups, for functions of torch.distributed that are given one of ours.

    Those whose names ours has with another meaning (`rank`, `size`, `broadcast`, `barrier`) are asked of functions
    that `patches/process_groups.py` replaces.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(dist.ProcessGroup, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(as_torchs(self), name)


class GroupOfOne(CalledByTorch, NoCommunicationGroup):
    """A group of this rank alone in a job of torch.distributed."""


def as_torchs(value: Any) -> Any:
    """Return one of our groups as torch's around the same connection, anything else as it is."""
    if not isinstance(value, ProcessGroup):
        return value
    assert value.platform is not None
    return torch_group(value, value.platform.device_types[0])


def torch_group(group: ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Return a group as one that torch's functions take, around the same backend.

    `dist.new_group` would make a second connection, and every rank of the job would have to come to it.
    """
    world_group = dist.group.WORLD
    assert world_group is not None
    if group.ranks == tuple(range(dist.get_world_size())):
        return world_group
    name = f"hp_{device_type}_{'_'.join(map(str, group.ranks))}"
    found = next((pg for pg, known in distributed_c10d._world.pg_names.items() if known == name), None)
    return found if found is not None else _register(group, name, device_type)


def _register(group: ProcessGroup, name: str, device_type: str) -> dist.ProcessGroup:
    """Enter a group in torch's tables, as `dist.new_group` does with those that it makes."""
    store = dist.PrefixStore(name, distributed_c10d._get_default_store())
    made = dist.ProcessGroup(store, group.rank, group.size)
    kind = dist.Backend.backend_type_map[BACKEND_NAMES[device_type]]
    made._set_default_backend(kind)
    connection: Any = dist.ProcessGroupGloo(store, 0, 1) if group.size == 1 else group.connection(device_type)  # type: ignore[attr-defined]
    made._register_backend(torch.device(device_type), kind, connection)
    made._set_group_name(name)
    made._set_group_desc(name)
    tables = distributed_c10d._world
    tables.pg_map[made] = (BACKEND_NAMES[device_type], store)
    tables.pg_names[made] = name
    tables.pg_backend_config[made] = f"{device_type}:{BACKEND_NAMES[device_type]}"
    tables.pg_to_tag[made] = f"ptd:{name}"
    tables.tags_to_pg.setdefault(f"ptd:{name}", []).append(made)
    tables.pg_group_ranks[made] = {rank: index for index, rank in enumerate(group.ranks)}
    distributed_c10d._register_process_group(name, made)
    return made
