"""Checks that need other ranks: that all of them make the same tensor, and that replicas are equal.

They exchange small facts on the host before any tensor is communicated, and every rank raises the same error.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.exceptions import PlacementError, RankMismatchError, ShardShapeError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement, RaggedShard
from hp_dtensor.spec.tensor_spec import TensorSpec, describe, normalize_placements

Tensor = Any
Coordinate = tuple[int, ...]


class _Mode(threading.local):
    def __init__(self) -> None:
        self.depth = 0


_mode = _Mode()
_always = os.environ.get("HP_CHECK", "") not in ("", "0")


@contextlib.contextmanager
def check_mode() -> Iterator[None]:
    """Compare, inside the block, the tensors that ranks make; with `HP_CHECK=1` this holds everywhere.

    Compared are the global shape, dtype and placements of every tensor that is made from local data, by a factory or
    by `distribute_tensor`, and of every redistribution; and the values of replicas that are taken to be equal. All
    ranks of a mesh must be in the mode together.

    Raises:
        RankMismatchError: from the operation where ranks differ; it names them.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     rows = 3 + current_world(platform).rank  # a mistake: all ranks must mean the same tensor
        ...     with check_mode():
        ...         return zeros(rows, device_mesh=mesh, placements=[Shard(0)])
        >>> try:
        ...     run_ranks(program, 2)
        ... except Exception as error:
        ...     found = str(error)
        >>> "rank" in found
        True
    """
    _mode.depth += 1
    try:
        yield
    finally:
        _mode.depth -= 1


def is_checking() -> bool:
    """Return whether this thread is in `check_mode`."""
    return _always or _mode.depth > 0


def check_created(what: str, spec: TensorSpec) -> None:
    """In `check_mode`, refuse a tensor of which ranks have another global shape, dtype or placements.

    Raises:
        RankMismatchError: naming the ranks that differ.
    """
    if is_checking():
        _check_equal(spec.mesh, what, f"{list(spec.shape)} {spec.dtype} {_describe_alike(spec)}")


def check_moved(source: TensorSpec, target: TensorSpec) -> None:
    """In `check_mode`, refuse a redistribution that differs between ranks; raises as `check_created`."""
    if is_checking():
        fact = f"{list(source.shape)} {source.dtype} {_describe_alike(source)} to {_describe_alike(target)}"
        _check_equal(source.mesh, "redistribute", fact)


def check_alike(mesh: DeviceMesh, what: str, facts: Sequence[str]) -> None:
    """Refuse facts that differ between ranks; raises as `check_created`, telling the first of them.

    Ranks exchange a digest, and the facts themselves only where digests differ.
    """
    if mesh.get_coordinate() is None or mesh.size() == 1:
        return
    data = json.dumps(list(facts)).encode()
    if len(set(_exchange(mesh, hashlib.sha256(data).digest()).values())) == 1:
        return
    told = {rank: json.loads(answer) for rank, answer in _exchange(mesh, data).items()}
    for each in itertools.zip_longest(*told.values(), fillvalue="nothing more"):
        _raise_unless_equal(what, dict(zip(told, each, strict=True)))


def _describe_alike(spec: TensorSpec) -> str:
    """Return the placements as text that every rank must share.

    The units of a ragged shard are left out where another axis cuts too: they may differ between that axis's ranks.
    """
    cut = [p for p in spec.placements if p.is_shard() or isinstance(p, RaggedShard)]
    if len(cut) < 2:
        return spec.describe_placements()
    named = zip(spec.mesh.mesh_dim_names, spec.placements, strict=True)
    short = [f"{name}:{f'Ragged({p.dim})' if isinstance(p, RaggedShard) else describe(p)}" for name, p in named]
    return f"({', '.join(short)})"


def check_replicated(what: str, x: Tensor, mesh: DeviceMesh) -> None:
    """Refuse a plain tensor that is not the same on every rank of the mesh.

    Raises:
        RankMismatchError: naming the ranks whose shape, dtype or values differ.
    """
    _check_equal(mesh, what, f"{list(x.shape)} {x.dtype}, values {digest(mesh.platform, x)}")


def digest(platform: Platform, x: Tensor) -> str:
    """Return a short fingerprint of a plain tensor's values, bit by bit."""
    return hashlib.sha256(platform.to_numpy(x).tobytes()).hexdigest()[:16]


def _check_equal(mesh: DeviceMesh, what: str, fact: str) -> None:
    if mesh.get_coordinate() is None or mesh.size() == 1:
        return
    _raise_unless_equal(what, {rank: data.decode() for rank, data in _exchange(mesh, fact.encode()).items()})


def _raise_unless_equal(what: str, facts: Mapping[int, str]) -> None:
    by_fact = ranks_by_fact(facts)
    if len(by_fact) > 1:
        raise RankMismatchError(f"{what}: ranks differ: {_told(by_fact)}. All ranks must do the same.")


def ranks_by_fact(facts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks for which each fact holds, in the order in which facts are first met."""
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, fact in facts.items():
        groups[fact].append(rank)
    return dict(groups)


def _told(by_fact: Mapping[str, Sequence[int]]) -> str:
    """Return `rank 3: <fact>; ranks 0, 1, 2: <fact>`, the fewest ranks first."""
    ordered = sorted(by_fact.items(), key=lambda item: len(item[1]))
    return "; ".join(f"{name_ranks(ranks)}: {fact}" for fact, ranks in ordered)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0, 1, 2`, naming the first eight."""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def _exchange(mesh: DeviceMesh, data: bytes) -> dict[int, bytes]:
    """Return the data that every rank of the mesh gives, by global rank in the mesh's order."""
    ranks = mesh.ranks()
    return dict(zip(ranks, mesh.world.group(ranks).all_gather_bytes(data), strict=True))


# Shards ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Local:
    """The shard of one rank, as it describes it to the others."""

    rank: int
    coordinate: Coordinate
    shape: tuple[int, ...]
    dtype: str
    digest: str


def global_shape(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the global shape that the shards of all ranks make together, after checking each of them against it.

    Args:
        shape: the global shape that is expected; None: found from the shards, which may be uneven.

    Raises:
        ShardShapeError: shards that do not fit, with the rank of each.
        RankMismatchError: replicas that differ, with their ranks, or dtypes that do.
    """
    if mesh.get_coordinate() is None:
        raise PlacementError(f"rank {mesh.world.rank} is outside mesh {mesh.describe()} and has no shard to check")
    placements = normalize_placements(mesh, placements, len(local.shape))
    shards = _shards(local, mesh)
    whole = tuple(shape) if shape is not None else _joined(shards[mesh.get_coordinate() or ()], shards, placements)
    _check_shapes(TensorSpec(mesh, placements, whole, local.dtype), shards)
    _check_replicas(placements, shards)
    return whole


def _shards(local: Tensor, mesh: DeviceMesh) -> dict[Coordinate, _Local]:
    fact = json.dumps([list(local.shape), str(local.dtype), digest(mesh.platform, local)])
    everything = _exchange(mesh, fact.encode()) if mesh.size() > 1 else {mesh.world.rank: fact.encode()}
    coordinates = itertools.product(*map(range, mesh.shape))
    shards = {}
    for coordinate, (rank, data) in zip(coordinates, everything.items(), strict=True):
        shape, dtype, values = json.loads(data)
        shards[coordinate] = _Local(rank, coordinate, tuple(shape), dtype, values)
    return shards


def _joined(mine: _Local, shards: Mapping[Coordinate, _Local], placements: Sequence[Placement]) -> tuple[int, ...]:
    """Return per dimension the sum of the shards along the axes that cut it."""
    shape = list(mine.shape)
    if len({len(shard.shape) for shard in shards.values()}) > 1:
        return tuple(shape)
    for dim in range(len(shape)):
        axes = [axis for axis, placement in enumerate(placements) if placement.is_shard(dim)]
        same_elsewhere = [
            shard for shard in shards.values() if all(axis in axes or c == 0 for axis, c in enumerate(shard.coordinate))
        ]
        if axes:
            shape[dim] = sum(shard.shape[dim] for shard in same_elsewhere)
    return tuple(shape)


def _check_shapes(spec: TensorSpec, shards: Mapping[Coordinate, _Local]) -> None:
    problems = []
    for shard in shards.values():
        wanted = _shape_at(spec, shard.coordinate)
        if shard.shape != wanted:
            problems.append(f"rank {shard.rank} has {list(shard.shape)}, expected {list(wanted)}")
    if problems:
        raise ShardShapeError(
            f"the shards of a tensor {list(spec.shape)} placed {spec.describe_placements()} do not fit: "
            f"{'; '.join(problems)}. Shards in chunk order are equal but for the last; RaggedShard takes any rows."
        )


def _shape_at(spec: TensorSpec, coordinate: Coordinate) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in ranges) for ranges in spec.ranges(coordinate))


def _check_replicas(placements: Sequence[Placement], shards: Mapping[Coordinate, _Local]) -> None:
    dtypes = ranks_by_fact({shard.rank: shard.dtype for shard in shards.values()})
    if len(dtypes) > 1:
        raise RankMismatchError(f"shards of one tensor have different dtypes: {_told(dtypes)}")
    problems = []
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            continue
        for shard in shards.values():
            first = shards[(*shard.coordinate[:axis], 0, *shard.coordinate[axis + 1 :])]
            if first.digest != shard.digest:
                problems.append(f"rank {shard.rank} differs from rank {first.rank} along axis {axis}")
    if problems:
        raise RankMismatchError(f"values that should be replicated are not: {'; '.join(problems)}")


# Always ----------------------------------------------------------------------------------------------------


def require_same(what: str, spec: TensorSpec, more: str = "") -> None:
    """Refuse a tensor of which the ranks of the mesh have another global shape, dtype or placements; always checked.

    One exchange of a few bytes; only where ranks differ, a second one of the facts that the error tells.

    Args:
        more: a further fact that must be the same, in words.

    Raises:
        RankMismatchError: on every rank of the mesh, naming the ranks and what each has.
    """
    fact = f"{list(spec.shape)} {spec.mesh.platform.dtype_name(spec.dtype)} {_describe_alike(spec)}{more}"
    _require_same_fact(spec.mesh, what, fact)


@contextlib.contextmanager
def telling_failure(mesh: DeviceMesh, what: str, exchanges: bool = True) -> Iterator[None]:
    """Let the other ranks learn of an error in the block, where they are in the `require_same` that comes after it.

    Without that, the rank that raises would leave the others waiting. It raises its own error, they
    `RankMismatchError` with its text; where all raise alike, each raises its own.

    Args:
        exchanges: whether there is a `require_same` after the block.
    """
    try:
        yield
    except Exception as error:
        if exchanges:
            with contextlib.suppress(Exception):  # this rank's own error counts
                _require_same_fact(mesh, what, _failure(error))
        raise


@contextlib.contextmanager
def telling_failure_to_alike(mesh: DeviceMesh, what: str) -> Iterator[None]:
    """Do what `telling_failure` does, where the others are in the `check_alike` that comes after the block."""
    try:
        yield
    except Exception as error:
        if isinstance(mesh, DeviceMesh):  # otherwise there is nobody to tell
            with contextlib.suppress(Exception):  # this rank's own error counts
                check_alike(mesh, what, [_failure(error)])
        raise


def _failure(error: Exception) -> str:
    return f"failed, {type(error).__name__}: {error}"


def _require_same_fact(mesh: DeviceMesh, what: str, fact: str) -> None:
    if mesh.get_coordinate() is None or mesh.size() == 1:
        return
    # Fixed in length, so that ranks need not agree on a length first.
    fingerprint = hashlib.sha256(fact.encode()).digest()[:16]
    of_all = mesh.world.group(mesh.ranks()).start_all_gather_bytes(fingerprint).wait()
    if of_all is not None and any(each != fingerprint for each in of_all):
        _check_equal(mesh, what, fact)
