"""Every collective on every dtype of the platform, compared with NumPy on the data of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from hp_dtensor.comm.world import current_world
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.testing.conformance.ranks import Array, Ranks, assert_values, groups, small_integers, tensor

# Also 0-d and empty tensors: a rank without data must still take part.
SHAPES = ((2, 3), (), (0, 2))
WAYS = (False, True)  # values of `async_op`
REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "product": np.multiply}


def check_all_reduce(name: str | Platform, dtype: str, op: str) -> None:
    platform = get_platform(name)
    for group in groups(platform):
        for shape, async_op in itertools.product(SHAPES, WAYS):
            by_rank = [_operand(dtype, shape, rank, op, group.size) for rank in group.ranks]
            x = tensor(platform, by_rank[group.rank], dtype)
            group.all_reduce(x, op, async_op).wait()
            assert_values(platform, x, _reduced(by_rank, op), f"{op} in {group.ranks}")


def check_reduce_scatter(name: str | Platform, dtype: str, op: str) -> None:
    platform = get_platform(name)
    for group in groups(platform):
        for rows, async_op in itertools.product((2, 1, 0), WAYS):
            shape = (rows * group.size, 3)
            by_rank = [_operand(dtype, shape, rank, op, group.size) for rank in group.ranks]
            output = platform.empty((rows, 3), platform.dtype(dtype))
            x = tensor(platform, by_rank[group.rank], dtype)
            group.reduce_scatter_into(output, x, op, async_op).wait()
            mine = slice(rows * group.rank, rows * (group.rank + 1))
            assert_values(platform, output, _reduced(by_rank, op)[mine], f"{op} in {group.ranks}")


def check_all_gather(name: str | Platform, dtype: str) -> None:
    platform = get_platform(name)
    for group in groups(platform):
        for shape, async_op in itertools.product(SHAPES, WAYS):
            by_rank = [small_integers(dtype, shape, rank) for rank in group.ranks]
            # Scalars have no dimension to be concatenated along, so their gathered tensor is 1-d.
            expected = np.stack(by_rank) if shape == () else np.concatenate(by_rank)
            output = platform.empty(expected.shape, platform.dtype(dtype))
            group.all_gather_into(output, tensor(platform, by_rank[group.rank], dtype), async_op).wait()
            assert_values(platform, output, expected, f"in {group.ranks}")


def check_all_to_all(name: str | Platform, dtype: str) -> None:
    platform = get_platform(name)
    for group in groups(platform):
        for rows, async_op in itertools.product(_splits(group.size), WAYS):
            x = np.concatenate([_message(dtype, rows, group.rank, j) for j in range(group.size)])
            expected = np.concatenate([_message(dtype, rows, i, group.rank) for i in range(group.size)])
            output = platform.empty(expected.shape, platform.dtype(dtype))
            arriving, leaving = rows[:, group.rank].tolist(), rows[group.rank].tolist()
            sent = tensor(platform, x, dtype)
            group.all_to_all_into(output, sent, arriving, leaving, async_op).wait()
            assert_values(platform, output, expected, f"rows {rows.tolist()} in {group.ranks}")
            if group.indexes_rows(sent):
                # The rows are sent from back to front, and received ones are added in pairs to ones.
                pairs, backwards = np.arange(len(expected)) // 2, np.arange(len(x))[::-1].copy()
                added = np.ones((len(expected), *x.shape[1:]), x.dtype)
                output = tensor(platform, added, dtype)
                np.add.at(added, pairs, expected)
                indices = {"input_index": platform.from_numpy(backwards), "output_index": platform.from_numpy(pairs)}
                sent = tensor(platform, x[::-1].copy(), dtype)
                group.all_to_all_into(output, sent, arriving, leaving, async_op, **indices).wait()
                assert_values(platform, output, added, f"rows {rows.tolist()} in {group.ranks}, indexed")


def check_messages(name: str | Platform, dtype: str) -> None:
    """Every rank sends each other one three messages before it receives any."""
    platform = get_platform(name)
    for group in groups(platform):
        others = [j for j in range(group.size) if j != group.rank]
        # Senders differ in the order of their shapes, so messages that are mixed up do not fit their receivers.
        shapes = SHAPES[group.rank % 2 :] + SHAPES[: group.rank % 2]
        sent = [
            # Asynchronous: all ranks send first, so blocking sends could wait for each other without end.
            group.send(tensor(platform, small_integers(dtype, shape, group.ranks[group.rank] + j), dtype), j, True)
            for j in others
            for shape in shapes
        ]
        for j in others:
            theirs = SHAPES[j % 2 :] + SHAPES[: j % 2]
            received = [platform.empty(shape, platform.dtype(dtype)) for shape in theirs]
            works = [group.receive(x, j, async_op=True) for x in received]
            # Receives may be waited for in another order than they were posted.
            for work in works[::-1]:
                work.wait()
            for x, shape in zip(received, theirs, strict=True):
                expected = small_integers(dtype, shape, group.ranks[j] + group.rank)
                assert_values(platform, x, expected, f"from {j} in {group.ranks}")
        for work in sent:
            work.wait()


def check_exchange(name: str | Platform, dtype: str) -> None:
    platform = get_platform(name)
    for group in groups(platform):
        for rows in _splits(group.size):
            sends = [tensor(platform, _message(dtype, rows, group.rank, j), dtype) for j in range(group.size)]
            receives = [
                platform.empty((rows[i, group.rank], 2), platform.dtype(dtype)) if rows[i, group.rank] else None
                for i in range(group.size)
            ]
            group.exchange(sends, receives)
            for i, received in enumerate(receives):
                if received is not None:
                    assert_values(platform, received, _message(dtype, rows, i, group.rank), f"from {i}")


def check_exchange_of_sequences(name: str | Platform, dtype: str) -> None:
    """Check messages of several tensors, which `wait` reads."""
    platform = get_platform(name)
    for group in groups(platform):
        others = [j for j in range(group.size) if j != group.rank]
        for rows in _splits(group.size):
            sends: list[Any] = [None] * group.size
            receives: list[Any] = [None] * group.size
            for j in others:
                message = tensor(platform, _message(dtype, rows, group.rank, j), dtype)
                sends[j] = [message, message]
                receives[j] = platform.empty((4 * rows[j, group.rank],), platform.dtype(dtype))
            read = []

            def check(j: int, message: Any, rows: Any = rows, read: list[int] = read) -> None:
                expected = _message(dtype, rows, j, group.rank).reshape(-1)  # noqa: B023 - called in this round
                assert_values(platform, message, np.concatenate([expected, expected]), f"from {j}")
                read.append(j)

            # This rank's own entry is no message, and a second wait reads none again.
            sends[group.rank] = [tensor(platform, np.ones(1), dtype)] * 2
            receives[group.rank] = platform.empty((2,), platform.dtype(dtype))
            work = group.start_exchange(sends, receives, check)
            work.wait()
            work.wait()
            assert sorted(read) == [j for j in others if rows[j, group.rank]]


def check_broadcast(name: str | Platform, dtype: str) -> None:
    platform = get_platform(name)
    for group in groups(platform):
        for source, shape, async_op in itertools.product(range(group.size), SHAPES, WAYS):
            x = tensor(platform, small_integers(dtype, shape, group.ranks[group.rank]), dtype)
            group.broadcast(x, source, async_op).wait()
            assert_values(platform, x, small_integers(dtype, shape, group.ranks[source]), f"from {source}")


def check_bytes(name: str | Platform) -> None:
    platform = get_platform(name)
    for group in groups(platform):
        # Lengths differ, and rank 0 sends nothing: a backend with buffers of equal size must exchange lengths or pad.
        by_rank = [bytes([rank]) * (3 * rank) for rank in group.ranks]
        assert group.all_gather_bytes(by_rank[group.rank]) == by_rank
        assert group.all_gather_bytes(b"") == [b""] * group.size
        group.barrier()


def check_many_at_once(name: str | Platform) -> None:
    """Collectives of several groups in flight at the same time."""
    platform = get_platform(name)
    work, expected = [], []
    for group in groups(platform):
        for scale in (1, 10):
            x = tensor(platform, np.full((3,), scale * (group.ranks[group.rank] + 1)))
            # Nothing is waited for before all have been started. All ranks start them in the same order, as backends
            # require.
            work.append((group.all_reduce(x, async_op=True), x))
            expected.append(scale * sum(rank + 1 for rank in group.ranks))
    for (handle, x), total in zip(work, expected, strict=True):
        handle.wait()
        assert_values(platform, x, [total] * 3)


def where_am_i(name: str | Platform) -> tuple[int, int, tuple[int, ...]]:
    world = current_world(get_platform(name))
    return world.rank, world.size, world.all.ranks


def _operand(dtype: str, shape: tuple[int, ...], rank: int, op: str, size: int) -> Array:
    """Return numbers whose product over ranks stays small, or whose average over `size` ranks is an integer."""
    numbers = small_integers(dtype, shape, rank)
    if op == "product":
        return np.abs(numbers) % 2 + 1
    return numbers * size if op == "avg" else numbers


def _reduced(by_rank: list[Array], op: str) -> Any:
    return np.mean(by_rank, axis=0) if op == "avg" else reduce(REDUCTIONS[op], by_rank)


def _splits(size: int) -> list[Array]:
    """Return tables of rows sent from rank i to rank j: uneven, with a rank that receives nothing, and all zeros."""
    uneven = np.fromfunction(lambda i, j: (i * 2 + j * 3 + 1) % 4, (size, size), dtype=int)
    without_last = uneven.copy()
    without_last[:, -1] = 0
    return [uneven, without_last, np.zeros_like(uneven)]


def _message(dtype: str, rows: Array, source: int, target: int) -> Array:
    return small_integers(dtype, (int(rows[source, target]), 2), 3 * source + target)


def test_ranks_are_numbered(ranks: Ranks) -> None:
    members = tuple(range(ranks.size))
    assert ranks.run(where_am_i) == [(rank, ranks.size, members) for rank in members]


REDUCTION_CHECKS = (check_all_reduce, check_reduce_scatter)
MOVE_CHECKS = (
    check_all_gather,
    check_all_to_all,
    check_exchange,
    check_exchange_of_sequences,
    check_broadcast,
    check_messages,
)


def test_reductions(
    ranks: Ranks, hp_platform: Platform, reduction_check: Callable[..., Any], reduced_dtype: str
) -> None:
    # An average of integers would have to be rounded, which backends do differently or refuse.
    averages = ("avg",) if hp_platform.is_floating(hp_platform.dtype(reduced_dtype)) else ()
    for op in ("sum", "max", "min", "product", *averages):
        ranks.run(reduction_check, reduced_dtype, op)


def test_moves(ranks: Ranks, move_check: Callable[..., Any], moved_dtype: str) -> None:
    ranks.run(move_check, moved_dtype)


def test_bytes_of_any_length_and_barriers(ranks: Ranks) -> None:
    ranks.run(check_bytes)


def test_collectives_of_several_groups_in_flight_together(ranks: Ranks) -> None:
    ranks.run(check_many_at_once)
