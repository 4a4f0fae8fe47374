"""The naive planner: exhaustive search over placements, every cost counted element by element.

It knows single-axis reductions and an exchange in which each rank receives only what it lacks, nothing about
how shards nest, and no closed form. The planner must never need more.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from hp_dtensor.spec.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.spec.tensor_spec import split_ranges

Placements = tuple[Placement, ...]
Pairs = dict[tuple[Placements, Placements], int]


def placement_options(ndim: int, *more: Placement) -> list[Placement]:
    """Return replicated, partial sum and every shard."""
    return [Replicate(), Partial(), *(Shard(dim) for dim in range(ndim)), *more]


def exhaustive_volumes(mesh_shape: Sequence[int], shape: Sequence[int], options: Sequence[Placement]) -> Pairs:
    """Return, for every pair of placements, the fewest elements that all ranks together must send."""
    states = list(itertools.product(options, repeat=len(mesh_shape)))
    held = {state: _held(mesh_shape, shape, state) for state in states}
    edges = {state: list(_edges(mesh_shape, held, state, states)) for state in states}
    return {(source, target): n for source in states for target, n in _distances(edges, source).items()}


def _distances(edges: dict[Placements, list[tuple[Placements, int]]], source: Placements) -> dict[Placements, int]:
    """Return the least volumes from one state to all by Dijkstra's algorithm."""
    found: dict[Placements, int] = {}
    ticket = itertools.count()
    queue = [(0, next(ticket), source)]
    while queue:
        spent, _, state = heapq.heappop(queue)
        if state in found:
            continue
        found[state] = spent
        for arrival, cost in edges[state]:
            if arrival not in found:
                heapq.heappush(queue, (spent + cost, next(ticket), arrival))
    return found


def _held(mesh_shape: Sequence[int], shape: Sequence[int], state: Placements) -> list[frozenset[int]]:
    """Return, per rank, the numbers of the elements that it holds (partial results count)."""
    result = []
    for coordinate in itertools.product(*map(range, mesh_shape)):
        indices = []
        for dim, size in enumerate(shape):
            ranges: tuple[tuple[int, int], ...] = ((0, size),)
            for axis, placement in enumerate(state):
                if placement.is_shard(dim):
                    ranges = split_ranges(ranges, placement, mesh_shape[axis])[coordinate[axis]]
            indices.append([i for start, stop in ranges for i in range(start, stop)])
        result.append(frozenset(_number(shape, index) for index in itertools.product(*indices)))
    return result


def _number(shape: Sequence[int], index: Sequence[int]) -> int:
    number = 0
    for size, i in zip(shape, index, strict=True):
        number = number * size + i
    return number


def _edges(
    mesh_shape: Sequence[int],
    held: dict[Placements, list[frozenset[int]]],
    state: Placements,
    states: Sequence[Placements],
) -> Iterator[tuple[Placements, int]]:
    for arrival in states:
        differ = [a for a, (s, t) in enumerate(zip(state, arrival, strict=True)) if s != t]
        if not differ:
            continue
        if [s.is_partial() for s in state] == [t.is_partial() for t in arrival]:
            yield arrival, sum(len(t - s) for s, t in zip(held[state], held[arrival], strict=True))
        elif len(differ) == 1 and arrival[differ[0]].is_partial():
            if all(t >= s for s, t in zip(held[state], held[arrival], strict=True)) and _covers(
                mesh_shape, held[state], held[arrival], differ[0]
            ):
                yield arrival, 0
        elif len(differ) == 1:
            yield from _reduction(mesh_shape, held, state, arrival, differ[0])


def _covers(mesh_shape: Sequence[int], now: list[frozenset[int]], then: list[frozenset[int]], axis: int) -> bool:
    """Return whether the ranks along `axis` together hold all that each of them will hold as partial results."""
    return all(frozenset().union(*(now[r] for r in line)) >= then[line[0]] for line in _lines(mesh_shape, axis))


def _reduction(
    mesh_shape: Sequence[int],
    held: dict[Placements, list[frozenset[int]]],
    state: Placements,
    arrival: Placements,
    axis: int,
) -> Iterator[tuple[Placements, int]]:
    """Return the volume of an all-reduce, or of a reduce-scatter where each rank keeps a part of its line."""
    ranks = mesh_shape[axis]
    total = 0
    for line in _lines(mesh_shape, axis):
        if any(not held[arrival][r] <= held[state][r] for r in line):
            return
        kept = sum(len(held[arrival][r]) for r in line)
        whole = len(held[state][line[0]])
        total += (ranks - 1) * whole + (kept - whole)
    yield arrival, total


def _lines(mesh_shape: Sequence[int], axis: int) -> list[list[int]]:
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
        numbers.setdefault((*coordinate[:axis], *coordinate[axis + 1 :]), []).append(number)
    assert all(len(line) == mesh_shape[axis] for line in numbers.values())
    return list(numbers.values())


def mean_bytes(elements: int, mesh_shape: Sequence[int], itemsize: int) -> float:
    """Return the bytes sent per rank."""
    return elements * itemsize / math.prod(mesh_shape)
