"""Ragged shards in plans: they enter and leave that form in steps of their own."""

from __future__ import annotations

from collections.abc import Sequence

from hp_dtensor.redistribute.segments import Placements
from hp_dtensor.spec.placements import Placement, RaggedShard, Replicate, Shard, StridedShard


def without_ragged(placements: Placements) -> Placements:
    return tuple(Shard(p.dim) if isinstance(p, RaggedShard) else p for p in placements)


def restored(state: Placements, source: Placements, back: dict[Placements, Placements]) -> Placements:
    """Return a state of the search with the ragged shards that stood still in place again."""
    if state in back:
        return back[state]
    return tuple(p if isinstance(p, RaggedShard) else now for p, now in zip(source, state, strict=True))


# Ragged shards --------------------------------------------------------------------------------------------

_Links = list[tuple[Placements, Placements]]


def around_ragged(
    mesh_shape: tuple[int, ...], source: Placements, target: Placements
) -> tuple[_Links, tuple[Placements, Placements], _Links]:
    """Return (steps before, the pair to plan freely, steps after), each step a pair of placements.

    Ragged parts are known on an axis' own line only, so an axis that is ragged now or then, and does not
    stand still, leaves and takes that form in steps of its own.
    """
    moving = _moving(mesh_shape, source, target)
    ragged = [a for a in moving if isinstance(source[a], RaggedShard) or isinstance(target[a], RaggedShard)]
    if not ragged:
        return [], (source, target), []
    # One axis by itself needs no detour: both forms are known on its line.
    if len(moving) == 1:
        return [(source, target)], (target, target), []
    before = _unragged(source, target, moving)
    after = _unragged(target, source, moving)
    first, last = (before[-1][1] if before else source), (after[-1][1] if after else target)
    return before, (first, last), [(b, a) for a, b in reversed(after)]


def _moving(mesh_shape: tuple[int, ...], source: Placements, target: Placements) -> list[int]:
    """Return the axes that differ, and those whose part of a dimension depends on one that does."""
    differ = [a for a, (s, t) in enumerate(zip(source, target, strict=True)) if s != t]
    dims = {
        p.dim: min(a for a in differ if source[a].is_shard(p.dim) or target[a].is_shard(p.dim))
        for a in differ
        for p in (source[a], target[a])
        if isinstance(p, (Shard, StridedShard, RaggedShard))
    }
    return [
        a
        for a, p in enumerate(source)
        if a in differ or (isinstance(p, (Shard, StridedShard, RaggedShard)) and a > dims.get(p.dim, len(mesh_shape)))
    ]


def _unragged(placements: Placements, other: Placements, moving: Sequence[int]) -> _Links:
    """Return steps from `placements` to others without ragged shards on the moving axes, one axis at a time, innermost
    first.
    """
    dims = {p.dim: a for a in reversed(moving) if isinstance(p := placements[a], RaggedShard)}
    links: _Links = []
    now = placements
    for axis in reversed(range(len(placements))):
        placement = now[axis]
        if not isinstance(placement, (Shard, StridedShard, RaggedShard)) or axis < dims.get(placement.dim, len(now)):
            continue
        outermost = axis == dims[placement.dim]
        # A plain shard where the other side is cut here too; a dimension that is to be whole is gathered at once, not
        # cut anew first.
        to_shard = outermost and not other[axis].is_replicate()
        new: Placement = Shard(placement.dim) if to_shard else Replicate()
        after = (*now[:axis], new, *now[axis + 1 :])
        links.append((now, after))
        now = after
    return links
