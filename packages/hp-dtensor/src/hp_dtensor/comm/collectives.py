"""Differentiable collectives on plain local tensors, each with its dual as backward.

On one mesh axis a value is replicated (R), sharded (S), partial (P) or varying (V: an equal value on all ranks, used in
a computation that differs per rank). Gradients have the types R -> R, S -> S, P -> R, V -> P, which determine the
backward of each collective. `lengths[i]` is the size of rank i's shard along the dimension. Shards may be uneven and
empty.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hp_dtensor.comm.process_group import ProcessGroup, pack
from hp_dtensor.comm.saved_tensors import COLLECTIVES, current_record, saved_result
from hp_dtensor.platform.interface import Platform

Tensor = Any
Lengths = Sequence[int]


def all_gather(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Gather the shards of all ranks (S -> R). Backward takes the local slice."""
    return _platform(group).linear_map(
        x, saving_result(lambda t: gather_data(t, group, dim, lengths)), lambda g: slice_data(g, group, dim, lengths)
    )


def all_gather_varying(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Gather the shards of all ranks for a use that differs per rank (S -> V). Backward reduce-scatters."""
    return _platform(group).linear_map(
        x,
        saving_result(lambda t: gather_data(t, group, dim, lengths)),
        lambda g: reduce_scatter_data(g, group, dim, lengths),
    )


def vary(x: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    """Return `x` for a use that differs per rank of every group (R -> V). Backward all-reduces."""
    return _platform(groups[0]).linear_map(x, lambda t: t, lambda g: functools.reduce(all_reduce_data, groups, g))


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks (P -> R). Backward communicates nothing: each summand has the gradient of the sum."""
    return _platform(group).linear_map(x, saving_result(lambda t: all_reduce_data(t, group)), lambda g: g)


def reduce_scatter(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Sum over the ranks and return this rank's shard (P -> S). Backward all-gathers."""
    return _platform(group).linear_map(
        x,
        saving_result(lambda t: reduce_scatter_data(t, group, dim, lengths)),
        lambda g: gather_data(g, group, dim, lengths),
    )


def all_to_all_rows(x: Tensor, group: ProcessGroup, input_rows: Lengths, output_rows: Lengths) -> Tensor:
    """Send `input_rows[j]` rows, in order, to rank j and receive `output_rows[j]` from it; backward the reverse."""
    return _platform(group).linear_map(
        x,
        saving_result(lambda t: all_to_all_rows_data(t, group, input_rows, output_rows)),
        lambda g: all_to_all_rows_data(g, group, output_rows, input_rows),
    )


class RowMove(NamedTuple):
    """A block of `rows` rows, from row `source_row` of a group rank to row `target_row` of another, or the same."""

    source: int
    source_row: int
    target: int
    target_row: int
    rows: int


def saving_result(collective: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a collective that recomputation does not repeat if it saves the results of collectives.

    Examples:
        >>> saving_result(lambda x: x)(3)
        3
    """

    def saving(x: Tensor) -> Tensor:
        if current_record.get() is None:
            return collective(x)
        return saved_result(COLLECTIVES, lambda: collective(x))

    return saving


def gather_data(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Return the concatenation of all ranks' `x` along `dim`."""
    if group.size == 1:
        return x
    platform, x = _platform(group), _contiguous(group, x)
    if len(set(lengths)) == 1:
        gathered = platform.empty((group.size * x.shape[0], *x.shape[1:]) if x.shape else (group.size,), x.dtype)
        group.all_gather_into(gathered, x)
        # Blocks arrive in rank order along dim 0. For another dimension one more copy reorders them.
        return gathered if dim == 0 else platform.ops.cat(platform.ops.chunk(gathered, group.size, 0), dim)
    # An all-gather of the framework takes equal shards only, and padding would send more bytes than these messages.
    shards = [platform.empty(_with_length(x, dim, length), x.dtype) for length in lengths]
    group.exchange([x] * group.size, shards)
    return platform.ops.cat(shards, dim)


def slice_data(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Return this rank's shard of `x` along `dim`, as a tensor of its own."""
    if group.size == 1:
        return x
    shard = _platform(group).ops.narrow(x, dim, sum(lengths[: group.rank]), lengths[group.rank])
    # A view would keep the storage of the full `x` alive, and share its version counter.
    return _platform(group).ops.clone(shard)


def reduce_scatter_data(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Return this rank's shard along `dim` of the sum over ranks."""
    if group.size == 1:
        return x
    platform = _platform(group)
    if len(set(lengths)) == 1:
        # The framework's reduce-scatter divides dim 0 only.
        rows_first = x if dim == 0 else platform.ops.cat(platform.ops.chunk(x, group.size, dim), 0)
        output = platform.empty(_with_length(x, dim, lengths[0]), x.dtype)
        # The collective may overwrite its input, hence the copy.
        group.reduce_scatter_into(output, _own_copy(group, rows_first))
        return output
    sends = [_contiguous(group, shard) for shard in platform.ops.split(x, list(lengths), dim)]
    receives = [platform.empty(sends[group.rank].shape, x.dtype) for _ in lengths]
    group.exchange(sends, receives)
    # In rank order, so that the sum is reproducible bit by bit.
    total = receives[0]
    for term in receives[1:]:
        total = platform.ops.add(total, term)
    return total


def all_reduce_data(x: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Return the reduction of all ranks' `x`, as a new tensor."""
    if group.size == 1:
        return x
    # Reduced in place, and `x` may be an activation that autograd has saved.
    result = _own_copy(group, x)
    group.all_reduce(result, op)
    return result


def all_to_all_rows_data(x: Tensor, group: ProcessGroup, input_rows: Lengths, output_rows: Lengths) -> Tensor:
    """Send rows of `x` to their owners; see `all_to_all_rows`."""
    if group.size == 1:
        return x
    output = _platform(group).empty((sum(output_rows), *x.shape[1:]), x.dtype)
    group.all_to_all_into(output, _contiguous(group, x), output_rows, input_rows)
    return output


def move_rows_data(x: Tensor, group: ProcessGroup, dim: int, moves: Sequence[RowMove]) -> Tensor:
    """Permute the rows (along `dim`) of all ranks. Every rank knows all moves."""
    platform = _platform(group)
    ops, me = platform.ops, group.rank
    moves = sorted(moves, key=lambda move: move.target_row)
    sends: list[Tensor | None] = [None] * group.size
    receives: list[Tensor | None] = [None] * group.size
    for other in {move.target for move in moves if move.source == me} - {me}:
        rows = [ops.narrow(x, dim, m.source_row, m.rows) for m in moves if (m.source, m.target) == (me, other)]
        sends[other] = _contiguous(group, rows[0] if len(rows) == 1 else ops.cat(rows, dim))
    for other in {move.source for move in moves if move.target == me} - {me}:
        count = sum(m.rows for m in moves if (m.source, m.target) == (other, me))
        receives[other] = platform.empty(_with_length(x, dim, count), x.dtype)
    if any(move.source != move.target for move in moves):
        group.exchange(sends, receives)
    taken = [0] * group.size
    blocks = []
    # A message holds its rows in the order of the target, because both sides sorted the moves above. So the rows of
    # each message are consumed from front to back.
    for move in (move for move in moves if move.target == me):
        start = move.source_row if move.source == me else taken[move.source]
        blocks.append(ops.narrow(x if move.source == me else receives[move.source], dim, start, move.rows))
        taken[move.source] += move.rows
    return ops.cat(blocks, dim) if blocks else ops.clone(ops.narrow(x, dim, 0, 0))


def grad_of_selected(grad: Tensor, x: Tensor, result: Tensor, group: ProcessGroup, op: str) -> Tensor:
    """Return the gradient of this rank's `x` from that of `result`, the reduction over all ranks.

    For max and min the ranks that hold the result share the gradient equally. For a product each rank gets it times the
    product of the others.
    """
    ops = _platform(group).ops
    if op == "product":
        # The product of the others is not result / x where x is 0. So zeros are replaced by 1 and counted: the gradient
        # of a rank is 0 where another rank has a zero.
        zeros = ops.cast(ops.eq(x, 0.0), x.dtype)
        factor = ops.add(x, zeros)
        others = ops.div(all_reduce_data(factor, group, op), factor)
        zeros_elsewhere = ops.sub(all_reduce_data(zeros, group), zeros)
        return ops.mul(grad, ops.where(ops.eq(zeros_elsewhere, 0.0), others, ops.zeros_like(zeros)))
    # Ties share the gradient, as in `amax` on a single device.
    winners = ops.cast(ops.eq(x, result), x.dtype)
    return ops.div(ops.mul(grad, winners), all_reduce_data(winners, group))


def _platform(group: ProcessGroup) -> Platform:
    assert group.platform is not None
    return group.platform


def _contiguous(group: ProcessGroup, x: Tensor) -> Tensor:
    return _platform(group).contiguous(x)


def _own_copy(group: ProcessGroup, x: Tensor) -> Tensor:
    platform = _platform(group)
    return platform.contiguous(platform.ops.clone(x))


def _with_length(x: Tensor, dim: int, length: int) -> tuple[int, ...]:
    shape = list(x.shape)
    shape[dim] = length
    return tuple(shape)


def unpack(platform: Platform, message: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Split a vector made by `pack` into tensors of these shapes, views of it."""
    found, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        part = message if size == message.shape[0] else platform.ops.narrow(message, 0, start, size)
        found.append(platform.ops.reshape(part, shape))
        start += size
    return found


def exchange_packed(
    group: ProcessGroup,
    sends: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    dtype: Any,
    device: Any = None,
) -> list[list[Tensor]]:
    """Exchange one message of several tensors between each pair of ranks, and return the tensors from each rank.

    Args:
        sends: the tensors for each rank. Those for this rank itself are returned as they are.
        shapes: the shapes of the tensors from each rank; an empty list for one that sends nothing.
        device: of the results; default: this rank's.
    """
    platform, me = _platform(group), group.rank
    messages = [pack(platform, x) if x and j != me else None for j, x in enumerate(sends)]
    receives = [empty_message(platform, x, dtype, device) if x and j != me else None for j, x in enumerate(shapes)]
    # A rank without messages connects too: the connection of the others waits for it.
    receives[me] = empty_message(platform, [], dtype, device)
    group.exchange(messages, receives)
    receives[me] = None
    found = [unpack(platform, x, each) if x is not None else [] for x, each in zip(receives, shapes, strict=True)]
    found[me] = list(sends[me])
    return found


def empty_message(platform: Platform, shapes: Sequence[tuple[int, ...]], dtype: Any, device: Any = None) -> Tensor:
    """Return uninitialized memory for a message of tensors of these shapes."""
    return platform.empty((sum(math.prod(shape) for shape in shapes),), dtype, device)
