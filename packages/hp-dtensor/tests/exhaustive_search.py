"""The fewest bytes of redistributions, by an exhaustive search in which every cost is counted element by element.

Its steps are reductions over one axis, and an exchange in which each rank receives only the elements that it lacks. It
uses no closed form and no knowledge about nested shards."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from hp_dtensor.spec.placements import Placement
from hp_dtensor.spec.tensor_spec import split_ranges

Placements = tuple[Placement, ...]
Pairs = dict[tuple[Placements, Placements], int]


def exhaustive_volumes(mesh_shape: Sequence[int], shape: Sequence[int], options: Sequence[Placement]) -> Pairs:
    """Return, for every pair of placements, the fewest elements that all ranks together must send."""
    # O(states ** 3) with states = options ** mesh axes: for small meshes only.
    states = list(itertools.product(options, repeat=len(mesh_shape)))
    held = {state: _held(mesh_shape, shape, state) for state in states}
    edges = {state: list(_edges(mesh_shape, held, state, states)) for state in states}
    return {(source, target): n for source in states for target, n in _distances(edges, source).items()}


def _distances(edges: dict[Placements, list[tuple[Placements, int]]], source: Placements) -> dict[Placements, int]:
    """Return the least volume from one state to every other one, by Dijkstra's algorithm."""
    found: dict[Placements, int] = {}
    # Placements have no order, so the number decides between entries of equal cost.
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
    """Return, per rank, the flat indices of the elements that it holds, in full or as partial results."""
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
    """Return the row-major number of an element."""
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
    """Yield the states that one step reaches from `state`, with the volume of the step."""
    for arrival in states:
        differ = [a for a, (s, t) in enumerate(zip(state, arrival, strict=True)) if s != t]
        if not differ:
            continue
        # An exchange that reduces nothing: each rank receives the elements that it lacks.
        if [s.is_partial() for s in state] == [t.is_partial() for t in arrival]:
            yield arrival, sum(len(t - s) for s, t in zip(held[state], held[arrival], strict=True))
        # A value becomes partial for free where each rank has the elements and they are all contributed once.
        elif len(differ) == 1 and arrival[differ[0]].is_partial():
            if all(t >= s for s, t in zip(held[state], held[arrival], strict=True)) and _covers(
                mesh_shape, held[state], held[arrival], differ[0]
            ):
                yield arrival, 0
        elif len(differ) == 1:
            yield from _reduction(mesh_shape, held, state, arrival, differ[0])


def _covers(mesh_shape: Sequence[int], now: list[frozenset[int]], then: list[frozenset[int]], axis: int) -> bool:
    """Return whether the ranks along `axis` together have all elements of each rank's partial results."""
    return all(frozenset().union(*(now[r] for r in line)) >= then[line[0]] for line in _lines(mesh_shape, axis))


def _reduction(
    mesh_shape: Sequence[int],
    held: dict[Placements, list[frozenset[int]]],
    state: Placements,
    arrival: Placements,
    axis: int,
) -> Iterator[tuple[Placements, int]]:
    """Yield the volume of an all-reduce, or of a reduce-scatter if each rank keeps a shard."""
    ranks = mesh_shape[axis]
    total = 0
    for line in _lines(mesh_shape, axis):
        # A reduction only combines what the ranks hold. Reaching other elements takes an exchange, which is a step of
        # its own.
        if any(not held[arrival][r] <= held[state][r] for r in line):
            return
        # reduce-scatter: every element is sent by all ranks but its owner; all-gather: every copy but the owner's.
        copies = sum(len(held[arrival][r]) for r in line)
        elements = len(held[state][line[0]])
        total += (ranks - 1) * elements + (copies - elements)
    yield arrival, total


def _lines(mesh_shape: Sequence[int], axis: int) -> list[list[int]]:
    """Return the groups of ranks that differ in their coordinate along `axis` only."""
    numbers: dict[tuple[int, ...], list[int]] = {}
    for number, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
        numbers.setdefault((*coordinate[:axis], *coordinate[axis + 1 :]), []).append(number)
    return list(numbers.values())


def mean_bytes(elements: int, mesh_shape: Sequence[int], itemsize: int) -> float:
    """Return the mean number of bytes that a rank sends."""
    return elements * itemsize / math.prod(mesh_shape)
