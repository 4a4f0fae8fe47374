"""Comparison of the replicas of shards, which every rank updates by itself, in `check_mode`."""

from __future__ import annotations

import json
from collections.abc import Iterable

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.exceptions import RankMismatchError
from hp_dtensor.spec.rank_checks import digest, is_checking, name_ranks, ranks_by_fact
from hp_fsdp._engine.flat_buffer import FlatBuffer
from hp_fsdp._engine.group import ParameterGroup


def check_replicas(groups: Iterable[ParameterGroup]) -> None:
    """In `check_mode`: check that ranks that hold the same shards of these groups hold the same values.

    Two exchanges for each buffer with replicas; reads the shards on the host.

    Raises:
        RankMismatchError: on all ranks of the group, naming the parameters and which ranks agree.
    """
    for group in groups if is_checking() else ():
        for buffer in group.buffers:
            if buffer.replicate_group is not None:
                problem = _problem(buffer, buffer.replicate_group).encode()
                found = [each.decode() for each in buffer.shard_group.all_gather_bytes(problem) if each]
                if found:
                    raise RankMismatchError(
                        f"group {group.name}: replicas differ: {'; '.join(found)}. What writes parameters must write "
                        "the same on every rank; load a state dict, or broadcast them, to make them equal again"
                    )


def _problem(buffer: FlatBuffer, replicas: ProcessGroup) -> str:
    """Name the parameters whose replicas differ, and the ranks that agree; empty if all are equal."""
    platform, shard = buffer.platform, buffer.shard
    mine = json.dumps({each.name: digest(platform, buffer.part_of(each, shard)) for each in buffer.parameters})
    everybody = [json.loads(answer) for answer in replicas.all_gather_bytes(mine.encode())]
    differing = sorted(name for name, value in everybody[0].items() if any(each[name] != value for each in everybody))
    if not differing:
        return ""
    values = [json.dumps([each[name] for name in differing]) for each in everybody]
    alike = ranks_by_fact(dict(zip(replicas.ranks, values, strict=True)))
    return f"{', '.join(differing)} on {' than on '.join(map(name_ranks, alike.values()))}"
