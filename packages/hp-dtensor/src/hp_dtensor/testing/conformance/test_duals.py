"""The differentiable collectives: exact values, duals and types of gradients.

With the data of all ranks as one vector, a collective is a linear map A and its backward is the adjoint A*:
`<A x, w> = <x, A* w>` for every x and w. The inner product of a value and its gradient follows from the value's type on
the axis (see `hp_dtensor.comm.collectives`), counting every number once. All data is integer-valued, so both sides are
exactly equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hp_dtensor.comm import collectives
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.testing.conformance.ranks import Array, Ranks, assert_values, groups, read, small_integers, tensor

Tensor = Any
Map = Callable[[Tensor], Tensor]

# Types whose value, and whose gradient, is the same number on every rank of the axis.
SAME_VALUE = {"R": True, "V": True, "S": False, "P": False}
SAME_GRADIENT = {"R": True, "P": True, "S": False, "V": False}


def check_gather_and_scatter(name: str | Platform) -> None:
    """S -> R, S -> V and P -> S along every dimension, with even, uneven and empty shards."""
    platform = get_platform(name)
    for group in groups(platform):
        for dim, lengths in itertools.product((0, 1), _all_lengths(group.size)):
            shape = [3, 4]
            shape[dim] = sum(lengths)
            shards = _shards(small_integers("float32", shape, 1), dim, lengths)
            mine, joined = shards[group.rank], np.concatenate(shards, dim)
            partial = [small_integers("float32", shape, rank) for rank in group.ranks]
            summed = _shards(np.sum(partial, 0), dim, lengths)[group.rank]
            at = group, dim, lengths
            _check(group, "S", "R", mine, joined, lambda x, at=at: collectives.all_gather(x, *at))
            _check(group, "S", "V", mine, joined, lambda x, at=at: collectives.all_gather_varying(x, *at))
            _check(group, "P", "S", partial[group.rank], summed, lambda x, at=at: collectives.reduce_scatter(x, *at))


def check_reduce_and_vary(name: str | Platform) -> None:
    """P -> R and R -> V."""
    platform = get_platform(name)
    for group in groups(platform):
        for shape in ((3, 2), (), (0, 2)):
            partial = [small_integers("float32", shape, rank) * group.size for rank in group.ranks]
            mine, total = partial[group.rank], np.sum(partial, 0)
            same = partial[0]
            _check(group, "P", "R", mine, total, lambda x, group=group: collectives.all_reduce(x, group))
            _check(group, "R", "V", same, same, lambda x, group=group: collectives.vary(x, [group]))


def check_rows(name: str | Platform) -> None:
    """Rows are sent to other ranks, and their gradients back."""
    platform = get_platform(name)
    for group in groups(platform):
        size = group.size
        for rows in (np.fromfunction(lambda i, j: (2 * i + 3 * j + 1) % 4, (size, size), dtype=int), np.eye(size) * 2):
            rows = rows.astype(int)
            leaving, arriving = rows[group.rank].tolist(), rows[:, group.rank].tolist()
            mine = [small_integers("float32", (n, 2), 3 * group.rank + j) for j, n in enumerate(leaving)]
            target = [small_integers("float32", (n, 2), 3 * i + group.rank) for i, n in enumerate(arriving)]
            at = group, leaving, arriving
            exchange = lambda x, at=at: collectives.all_to_all_rows(x, *at)  # noqa: E731
            _check(group, "S", "S", np.concatenate(mine), np.concatenate(target), exchange)


def check_composition(name: str | Platform) -> None:
    """A replicated weight used on shards has the gradient of the single-device computation."""
    platform = get_platform(name)
    ops = platform.ops
    for group in groups(platform):
        lengths = _all_lengths(group.size)[1]
        rows = small_integers("float32", (sum(lengths), 3), 2)
        weight = tensor(platform, small_integers("float32", (3,), 4), requires_grad=True)
        x = tensor(platform, _shards(rows, 0, lengths)[group.rank], requires_grad=True)
        # Each rank uses the weight on other rows, so its gradients differ and are summed in backward.
        shard = ops.mul(x, collectives.vary(weight, [group]))
        everything = collectives.all_gather(shard, group, 0, lengths)
        loss = ops.sum(ops.mul(everything, everything))
        platform.backward(loss)
        expected = 2 * rows * rows * read(platform, weight)
        assert_values(platform, platform.get_grad(weight), expected.sum(0), f"in {group.ranks}")
        scaled = 2 * rows * read(platform, weight) ** 2
        assert_values(platform, platform.get_grad(x), _shards(scaled, 0, lengths)[group.rank], f"in {group.ranks}")


def _check(group: ProcessGroup, source: str, target: str, mine: Array, expected: Array, apply: Map) -> None:
    """Check value, adjoint identity and gradient type of one map from type `source` to type `target`."""
    platform = group.platform
    assert platform is not None
    context = f"{source} -> {target} in {group.ranks}"
    x = tensor(platform, mine, requires_grad=True)
    y = apply(x)
    assert_values(platform, y, expected, context)
    seed = 11 if SAME_GRADIENT[target] else 12 + group.rank
    # The gradient must itself be of the target's type: equal on all ranks for R and P, and otherwise different on each,
    # so that a gradient of the wrong rank is noticed.
    w = small_integers("float32", expected.shape, seed)
    platform.backward(y, tensor(platform, w))
    gradient = read(platform, platform.get_grad(x))
    assert gradient.shape == mine.shape, context
    left, right = _inner(group, target, expected, w), _inner(group, source, mine, gradient)
    assert left == right, f"{context}: <A x, w> is {left}, <x, A* w> is {right}"
    if SAME_GRADIENT[source]:
        # Compared as bytes: replicas that differ in the last bit drift apart in training.
        assert len(set(group.all_gather_bytes(gradient.tobytes()))) == 1, f"{context}: gradients differ"


def _inner(group: ProcessGroup, kind: str, value: Array, gradient: Array) -> float:
    """Return the inner product over the group, counting each number once: R has the same product on every rank."""
    # In float64, whose sums of such integers are exact in any order.
    mine = float(np.sum(np.asarray(value, np.float64) * gradient))
    by_rank = [float(text) for text in group.all_gather_bytes(repr(mine).encode())]
    return by_rank[0] if SAME_VALUE[kind] and SAME_GRADIENT[kind] else sum(by_rank)


def _all_lengths(size: int) -> list[tuple[int, ...]]:
    """Return shard lengths: even, chunks with a short or empty last one, ragged, and all rows on the last rank."""
    chunk = 2
    short = 2 * size - 1 if size > 1 else 1
    chunked = tuple(max(0, min(chunk, short - 1 - chunk * i)) for i in range(size))
    ragged = tuple((3 * i + 1) % 4 for i in range(size))
    all_on_last = (*(0 for _ in range(size - 1)), 3)
    return [(chunk,) * size, chunked, ragged, all_on_last]


def _shards(full: Array, dim: int, lengths: Sequence[int]) -> list[Array]:
    return np.split(full, np.cumsum(lengths)[:-1], dim)


DUAL_CHECKS = (
    check_gather_and_scatter,
    check_reduce_and_vary,
    check_rows,
    check_composition,
)


def test_duals(ranks: Ranks, dual_check: Callable[..., Any]) -> None:
    ranks.run(dual_check)
