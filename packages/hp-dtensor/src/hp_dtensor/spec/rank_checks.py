"""Checks between ranks: that all of them create the same tensor, and that replicas are equal.

They exchange short descriptions on the host before any tensor is communicated, and every rank raises the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.exceptions import RankMismatchError, ShardShapeError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.thread_region import ThreadRegion
from hp_dtensor.spec.placements import Placement, RaggedShard
from hp_dtensor.spec.tensor_spec import TensorSpec, describe, normalize_placements

Tensor = Any
Coordinate = tuple[int, ...]


_mode = ThreadRegion()
_always = os.environ.get("HP_CHECK", "") not in ("", "0")


def check_mode() -> contextlib.AbstractContextManager[None]:
    """Inside the block, compare between ranks the tensors that they create. With `HP_CHECK=1` this is always done.

    Compared are the global shape, dtype and placements of every tensor that is created from local data, by a factory or
    by `distribute_tensor`, and of every redistribution; and the values of replicas that should be equal. All ranks of a
    mesh must enter the mode together.

    Raises:
        RankMismatchError: from the operation in which ranks differ. Names the ranks.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     rows = 3 + current_world(platform).rank  # a mistake: the global shape differs between ranks
        ...     with check_mode():
        ...         return zeros(rows, device_mesh=mesh, placements=[Shard(0)])
        >>> try:
        ...     run_ranks(program, 2)
        ... except Exception as error:
        ...     found = str(error)
        >>> "rank" in found
        True
    """
    return _mode.of_all()


def is_checking() -> bool:
    """Return whether this thread is in `check_mode`."""
    return _always or _mode.depth > 0


def check_created(what: str, spec: TensorSpec) -> None:
    """In `check_mode`, check that all ranks create, by `what`, a tensor of one global shape, dtype and placements."""
    if is_checking():
        check_alike(spec.mesh, what, [f"{list(spec.shape)} {spec.dtype} {_describe_alike(spec)}"])


def check_redistribution(source: TensorSpec, target: TensorSpec) -> None:
    """In `check_mode`, check that all ranks call the same redistribution. Raises like `check_created`."""
    if _always or _mode.depth > 0:
        fact = f"{list(source.shape)} {source.dtype} {_describe_alike(source)} to {_describe_alike(target)}"
        check_alike(source.mesh, "redistribute", [fact])


def check_alike(mesh: DeviceMesh, what: str, facts: Sequence[str]) -> None:
    """Check that descriptions are equal on all ranks. Raises like `check_created`, with the first one that differs.

    Ranks exchange a digest, and the descriptions themselves only if digests differ.
    """
    # A rank outside the mesh is in no group with the others, and no rank waits for it.
    if mesh.get_coordinate() is None or mesh.size() == 1:
        return
    data = json.dumps(list(facts)).encode()
    # A digest of fixed length, so that one all-gather is enough: ranks need not exchange lengths first.
    fingerprint = hashlib.sha256(data).digest()[:16]
    ranks = mesh.ranks()
    group = mesh.world.group(ranks)
    of_all = group.start_all_gather_bytes(fingerprint).wait()
    if of_all is None or all(each == fingerprint for each in of_all):
        return
    everything = [json.loads(answer) for answer in group.all_gather_bytes(data)]
    for each in itertools.zip_longest(*everything, fillvalue="nothing more"):
        by_fact = ranks_by_fact(dict(zip(ranks, each, strict=True)))
        if len(by_fact) > 1:
            raise RankMismatchError(f"{what}: ranks differ: {_ranks_and_facts(by_fact)}. All ranks must do the same.")


def _describe_alike(spec: TensorSpec) -> str:
    """Return the placements as text, without units of ragged shards, which may differ along another sharded axis."""
    if sum(placement.is_shard() for placement in spec.placements) < 2:
        return spec.describe_placements()
    named = zip(spec.mesh.mesh_dim_names, spec.placements, strict=True)
    short = [f"{name}:{f'Ragged({p.dim})' if isinstance(p, RaggedShard) else describe(p)}" for name, p in named]
    return f"({', '.join(short)})"


def check_replicated(what: str, x: Tensor, mesh: DeviceMesh) -> None:
    """Check that a plain tensor is equal on all ranks of the mesh. Raises like `check_created`."""
    check_alike(mesh, what, [f"{list(x.shape)} {x.dtype}, values {digest(mesh.platform, x)}"])


def digest(platform: Platform, x: Tensor) -> str:
    """Return a short fingerprint of the values of a plain tensor. It differs if any bit differs."""
    if platform.is_meta(x):
        return "no data"
    return hashlib.sha256(platform.to_numpy(x).tobytes()).hexdigest()[:16]


def ranks_by_fact(facts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return fact -> its ranks, in the order in which facts first occur."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, fact in facts.items():
        groups[fact].append(rank)
    return dict(groups)


def _ranks_and_facts(by_fact: Mapping[str, Sequence[int]]) -> str:
    """Return `rank 3: <fact>; ranks 0, 1, 2: <fact>`, the fewest ranks first."""
    # The minority is likely the mistake.
    ordered = sorted(by_fact.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{name_ranks(ranks)}: {fact}" for fact, ranks in ordered)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0, 1, 2`, naming the first eight."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


@dataclass(frozen=True, slots=True)
class _Local:
    """Description of the shard of one rank, as exchanged."""

    rank: int
    coordinate: Coordinate
    shape: tuple[int, ...]
    dtype: str
    digest: str


def global_shape(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the global shape, `shape` if given, of a tensor, after checking the shards of all ranks of the mesh."""
    placements = normalize_placements(mesh, placements, len(local.shape))
    shards = _shards(local, mesh)
    full = tuple(shape) if shape is not None else _summed(shards[mesh.get_coordinate() or ()], shards, placements)
    _check_shapes(TensorSpec(mesh, placements, full, local.dtype), shards)
    _check_replicas(placements, shards)
    return full


def _shards(local: Tensor, mesh: DeviceMesh) -> dict[Coordinate, _Local]:
    """Return the descriptions of all ranks' shards by mesh coordinate."""
    # A digest in place of the values: a few bytes per rank tell replicas apart, however large they are.
    fact = json.dumps([list(local.shape), str(local.dtype), digest(mesh.platform, local)])
    everything = zip(mesh.ranks(), mesh.world.group(mesh.ranks()).all_gather_bytes(fact.encode()), strict=True)
    coordinates = itertools.product(*map(range, mesh.shape))
    shards = {}
    for coordinate, (rank, data) in zip(coordinates, everything, strict=True):
        shape, dtype, values = json.loads(data)
        shards[coordinate] = _Local(rank, coordinate, tuple(shape), dtype, values)
    return shards


def _summed(mine: _Local, shards: Mapping[Coordinate, _Local], placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return for each dimension the sum of the shard sizes along the axes that shard it."""
    shape = list(mine.shape)
    # Shards with different numbers of dimensions are reported by the check of shapes that follows.
    if len({len(shard.shape) for shard in shards.values()}) > 1:
        return tuple(shape)
    for dim in range(len(shape)):
        axes = [axis for axis, placement in enumerate(placements) if placement.is_shard(dim)]
        # One line of ranks: the sizes along the axes that shard the dimension, at coordinate 0 of all others.
        same_elsewhere = [
            shard for shard in shards.values() if all(axis in axes or c == 0 for axis, c in enumerate(shard.coordinate))
        ]
        if axes:
            shape[dim] = sum(shard.shape[dim] for shard in same_elsewhere)
    return tuple(shape)


def _check_shapes(spec: TensorSpec, shards: Mapping[Coordinate, _Local]) -> None:
    problems = []
    for shard in shards.values():
        wanted = tuple(sum(stop - start for start, stop in ranges) for ranges in spec.ranges(shard.coordinate))
        if shard.shape != wanted:
            problems.append(f"rank {shard.rank} has {list(shard.shape)}, expected {list(wanted)}")
    if problems:
        raise ShardShapeError(
            f"the shards of a tensor {list(spec.shape)} placed {spec.describe_placements()} do not fit: "
            f"{'; '.join(problems)}. "
            "Shards are equal except the last ones, as by torch.chunk; RaggedShard allows any sizes."
        )


def _check_replicas(placements: Sequence[Placement], shards: Mapping[Coordinate, _Local]) -> None:
    dtypes = ranks_by_fact({shard.rank: shard.dtype for shard in shards.values()})
    if len(dtypes) > 1:
        raise RankMismatchError(f"shards of one tensor have different dtypes: {_ranks_and_facts(dtypes)}")
    problems = []
    # Each replica is compared with the first one of its own line, not with all others: O(ranks * axes).
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            continue
        for shard in shards.values():
            first = shards[(*shard.coordinate[:axis], 0, *shard.coordinate[axis + 1 :])]
            if first.digest != shard.digest:
                problems.append(f"rank {shard.rank} differs from rank {first.rank} along axis {axis}")
    if problems:
        raise RankMismatchError(f"values that should be replicated are not: {'; '.join(problems)}")


def require_same(what: str, spec: TensorSpec, more: str = "") -> None:
    """Check, always, that ranks pass one global shape, dtype, placements and text `more`. Raises like `check_alike`."""
    dtype = spec.mesh.platform.dtype_name(spec.dtype)
    check_alike(spec.mesh, what, [f"{list(spec.shape)} {dtype} {_describe_alike(spec)}{more}"])


@contextlib.contextmanager
def reporting_failure(mesh: DeviceMesh, what: str, exchanges: bool = True) -> Iterator[None]:
    """Report an error inside the block to the other ranks, which wait in the check after the block.

    Without the report they would wait forever. This rank raises its own error, the others a `RankMismatchError` with
    its text. If all ranks raise the same error, each raises its own.

    Args:
        exchanges: whether a `check_alike` or `require_same` follows the block; if not, nothing is reported.
    """
    try:
        yield
    except Exception as error:
        # The error may be that it is not a mesh.
        if exchanges and isinstance(mesh, DeviceMesh):
            with contextlib.suppress(Exception):  # this rank raises its own error instead
                check_alike(mesh, what, [f"failed, {type(error).__name__}: {error}"])
        raise
