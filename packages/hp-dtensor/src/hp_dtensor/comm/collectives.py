"""Differentiable collectives on plain local tensors, each with its dual.

On one mesh axis a value is replicated (R), sharded (S), partial (P) or varying (V: the same number entering a
computation whose result differs per rank). Gradients have the types R -> R, S -> S, P -> R, V -> P, from
which each collective's backward follows. `lengths[i]` is rank i's extent along the dimension; uneven and
empty ones are normal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.saved_tensors import COLLECTIVES, Kept, saved_result
from hp_dtensor.platform.interface import Platform

Tensor = Any
Lengths = Sequence[int]


def all_gather(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Gather the parts of all ranks (S -> R); backward keeps the local slice."""
    return _platform(group).linear_map(
        x, staying(lambda t: gather_data(t, group, dim, lengths)), lambda g: slice_data(g, group, dim, lengths)
    )


def all_gather_varying(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Gather the parts of all ranks for a use that differs per rank (S -> V); backward reduce-scatters."""
    return _platform(group).linear_map(
        x,
        staying(lambda t: gather_data(t, group, dim, lengths)),
        lambda g: reduce_scatter_data(g, group, dim, lengths),
    )


def regather_varying(x: Tensor, gathered: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Return `gathered`, the all-gather of `x` made before, for a use that differs per rank (S -> V).

    Nothing is communicated in forward; backward reduce-scatters to `x`.
    """
    platform = _platform(group)
    # Taken by the first call and not kept: the node outlives it, and a second derivative gathers anew.
    at_hand = [platform.detach(gathered)]

    def forward(t: Tensor) -> Tensor:
        return at_hand.pop() if at_hand else gather_data(t, group, dim, lengths)

    return platform.linear_map(x, forward, lambda g: reduce_scatter_data(g, group, dim, lengths))


def vary(x: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    """Return `x` for a use that differs per rank of every group (R -> V); backward all-reduces."""
    return _platform(groups[0]).linear_map(x, lambda t: t, lambda g: _all_reduce_over(g, groups))


def local_slice(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Return this rank's part (R -> S); backward all-gathers."""
    return _platform(group).linear_map(
        x, lambda t: slice_data(t, group, dim, lengths), lambda g: gather_data(g, group, dim, lengths)
    )


def all_reduce(x: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Reduce over the ranks (P -> R).

    Backward is the identity for sums, a factor 1/n for averages, and goes to the winners for max and min.
    """
    platform = _platform(group)
    # A partial sum x_r has d(sum)/d(x_r) = 1, so each rank's gradient is that of the result, which is the same on all
    # ranks already: no collective in backward.
    if op == "sum":
        return platform.linear_map(x, staying(lambda t: all_reduce_data(t, group)), lambda g: g)
    if op == "avg":
        scale = 1.0 / group.size
        return platform.linear_map(
            x, staying(lambda t: all_reduce_data(t, group, "avg")), lambda g: platform.ops.mul(g, scale)
        )
    return _all_reduce_selecting(x, group, op)


def reduce_scatter(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Sum over the ranks and keep this rank's part (P -> S); backward all-gathers."""
    return _platform(group).linear_map(
        x,
        staying(lambda t: reduce_scatter_data(t, group, dim, lengths)),
        lambda g: gather_data(g, group, dim, lengths),
    )


def all_to_all(
    x: Tensor,
    group: ProcessGroup,
    split_dim: int,
    split_lengths: Lengths,
    cat_dim: int,
    cat_lengths: Lengths,
) -> Tensor:
    """Cut along `split_dim` what was cut along `cat_dim` (S -> S); backward does the reverse."""
    return _platform(group).linear_map(
        x,
        staying(lambda t: all_to_all_data(t, group, split_dim, split_lengths, cat_dim, cat_lengths)),
        lambda g: all_to_all_data(g, group, cat_dim, cat_lengths, split_dim, split_lengths),
    )


def all_to_all_rows(x: Tensor, group: ProcessGroup, input_rows: Lengths, output_rows: Lengths) -> Tensor:
    """Send `input_rows[j]` rows (dim 0, in rank order) to rank j and receive `output_rows[j]` rows from it.

    Backward sends the gradients' rows back.
    """
    return _platform(group).linear_map(
        x,
        staying(lambda t: all_to_all_rows_data(t, group, input_rows, output_rows)),
        lambda g: all_to_all_rows_data(g, group, output_rows, input_rows),
    )


class RowMove(NamedTuple):
    """A block of rows that goes from one rank's part to a place in the new part of another, or of the same rank.

    Attributes:
        source: the group rank that has the rows, from `source_row` on.
        target: the group rank that gets them, from `target_row` on.
        rows: the number of rows.
    """

    source: int
    source_row: int
    target: int
    target_row: int
    rows: int

    def reversed(self) -> RowMove:
        return RowMove(self.target, self.target_row, self.source, self.source_row, self.rows)


def move_rows(x: Tensor, group: ProcessGroup, dim: int, moves: Sequence[RowMove]) -> Tensor:
    """Bring each row of every rank to its place along `dim`: a permutation of all rows, known to every rank.

    Backward moves the gradients' rows back.
    """
    back = [move.reversed() for move in moves]
    return _platform(group).linear_map(
        x, staying(lambda t: move_rows_data(t, group, dim, moves)), lambda g: move_rows_data(g, group, dim, back)
    )


def as_partial(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the value on the group's first rank and zeros elsewhere (R -> P); backward is the identity."""
    platform = _platform(group)
    return platform.linear_map(x, lambda t: t if group.rank == 0 else platform.ops.zeros_like(t), lambda g: g)


def staying(collective: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a collective whose result stays where a part that is computed again keeps those of collectives.

    Example:
        >>> staying(lambda x: x)(3)
        3
    """
    return lambda x: saved_result(COLLECTIVES, lambda: collective(x))


# The same on data alone, outside autograd ----------------------------------------------------------------


def gather_data(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Return all ranks' `x` put together along `dim`."""
    if group.size == 1:
        return x
    platform, x = _platform(group), _fit(group, x)
    if len(set(lengths)) == 1:
        gathered = platform.empty((group.size * x.shape[0], *x.shape[1:]) if x.shape else (group.size,), x.dtype)
        group.all_gather_into(gathered, x)
        return gathered if dim == 0 else platform.ops.cat(platform.ops.chunk(gathered, group.size, 0), dim)
    # An all-gather of the framework takes equal parts only; padding would send more than these messages do.
    parts = [platform.empty(_with_length(x, dim, length), x.dtype) for length in lengths]
    group.exchange([x] * group.size, parts)
    return platform.ops.cat(parts, dim)


def slice_data(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Return this rank's part of `x` along `dim`, as a tensor of its own."""
    if group.size == 1:
        return x
    part = _platform(group).ops.narrow(x, dim, sum(lengths[: group.rank]), lengths[group.rank])
    return _platform(group).ops.clone(part)


def reduce_scatter_data(x: Tensor, group: ProcessGroup, dim: int, lengths: Lengths) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks."""
    if group.size == 1:
        return x
    platform = _platform(group)
    if len(set(lengths)) == 1:
        rows_first = x if dim == 0 else platform.ops.cat(platform.ops.chunk(x, group.size, dim), 0)
        output = platform.empty(_with_length(x, dim, lengths[0]), x.dtype)
        group.reduce_scatter_into(output, _own_copy(group, rows_first))
        return output
    sends = [_fit(group, part) for part in platform.ops.split(x, list(lengths), dim)]
    receives = [platform.empty(sends[group.rank].shape, x.dtype) for _ in lengths]
    group.exchange(sends, receives)
    total = receives[0]
    for part in receives[1:]:
        total = platform.ops.add(total, part)
    return total


def all_reduce_data(x: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Return the reduction of all ranks' `x`, as a new tensor."""
    if group.size == 1:
        return x
    result = _own_copy(group, x)
    group.all_reduce(result, op)
    return result


def all_to_all_data(
    x: Tensor,
    group: ProcessGroup,
    split_dim: int,
    split_lengths: Lengths,
    cat_dim: int,
    cat_lengths: Lengths,
) -> Tensor:
    """Cut `x` along `split_dim`, send part j to rank j, put what comes together along `cat_dim`."""
    if group.size == 1:
        return x
    platform = _platform(group)
    # Lengths of all ranks are known to all, so nobody is asked for the shapes of messages, and empty ones are left out
    # on both sides.
    mine = split_lengths[group.rank]
    sends = [_fit(group, part) for part in platform.ops.split(x, list(split_lengths), split_dim)]
    shape = list(x.shape)
    shape[split_dim] = mine
    receives = []
    for length in cat_lengths:
        shape[cat_dim] = length
        receives.append(platform.empty(tuple(shape), x.dtype))
    group.exchange(sends, receives)
    return platform.ops.cat(receives, cat_dim)


def all_to_all_rows_data(x: Tensor, group: ProcessGroup, input_rows: Lengths, output_rows: Lengths) -> Tensor:
    """Send rows of `x` to their owners; see `all_to_all_rows`."""
    if group.size == 1:
        return x
    output = _platform(group).empty((sum(output_rows), *x.shape[1:]), x.dtype)
    group.all_to_all_into(output, _fit(group, x), output_rows, input_rows)
    return output


def move_rows_data(x: Tensor, group: ProcessGroup, dim: int, moves: Sequence[RowMove]) -> Tensor:
    """Bring rows to their places; see `move_rows`."""
    platform = _platform(group)
    ops, me = platform.ops, group.rank
    moves = sorted(moves, key=lambda move: move.target_row)
    sends: list[Tensor | None] = [None] * group.size
    receives: list[Tensor | None] = [None] * group.size
    for other in {move.target for move in moves if move.source == me} - {me}:
        rows = [ops.narrow(x, dim, m.source_row, m.rows) for m in moves if (m.source, m.target) == (me, other)]
        sends[other] = _fit(group, rows[0] if len(rows) == 1 else ops.cat(rows, dim))
    for other in {move.source for move in moves if move.target == me} - {me}:
        count = sum(m.rows for m in moves if (m.source, m.target) == (other, me))
        receives[other] = platform.empty(_with_length(x, dim, count), x.dtype)
    if any(move.source != move.target for move in moves):
        group.exchange(sends, receives)
    taken = [0] * group.size
    pieces = []
    # Messages of one sender hold their rows in the order of the target, as sorted above on both sides, so they are
    # taken one after the other.
    for move in (move for move in moves if move.target == me):
        start = move.source_row if move.source == me else taken[move.source]
        pieces.append(ops.narrow(x if move.source == me else receives[move.source], dim, start, move.rows))
        taken[move.source] += move.rows
    return ops.cat(pieces, dim) if pieces else ops.clone(ops.narrow(x, dim, 0, 0))


def _all_reduce_over(x: Tensor, groups: Sequence[ProcessGroup]) -> Tensor:
    for group in groups:
        x = all_reduce_data(x, group)
    return x


def _all_reduce_selecting(x: Tensor, group: ProcessGroup, op: str) -> Tensor:
    """Reduce by max, min or product over the ranks, with the gradient of the single-device reduction."""
    platform = _platform(group)
    kept: list[Kept] = []

    def forward(t: Tensor) -> Tensor:
        result = saved_result(COLLECTIVES, lambda: all_reduce_data(t, group, op))
        # A list: forward runs inside of the node, when both closures exist.
        kept[:] = [Kept(platform, t, result)]
        return result

    def backward(g: Tensor) -> list[Tensor]:
        data, result = kept[0].tensors
        return [grad_of_selected(g, data, result, group, op)]

    return platform.custom_function(forward, backward, x)


def grad_of_selected(grad: Tensor, x: Tensor, result: Tensor, group: ProcessGroup, op: str) -> Tensor:
    """Return the gradient of this rank's `x` for the gradient of `result`, the reduction over all ranks.

    Those that won share it equally; of a product, each gets it times the product of the others.
    """
    ops = _platform(group).ops
    if op == "product":
        # The product of the others is not result / x where x is 0. Zeros are set to 1 and counted: a rank's gradient is
        # 0 where another one has a zero.
        zeros = ops.cast(ops.eq(x, 0.0), x.dtype)
        factor = ops.add(x, zeros)
        others = ops.div(all_reduce_data(factor, group, op), factor)
        zeros_elsewhere = ops.sub(all_reduce_data(zeros, group), zeros)
        return ops.mul(grad, ops.where(ops.eq(zeros_elsewhere, 0.0), others, ops.zeros_like(zeros)))
    # Ties share the gradient, as the single-device reduction over all elements (`amax`) shares it among its winners.
    winners = ops.cast(ops.eq(x, result), x.dtype)
    return ops.div(ops.mul(grad, winners), all_reduce_data(winners, group))


def _platform(group: ProcessGroup) -> Platform:
    assert group.platform is not None
    return group.platform


def _fit(group: ProcessGroup, x: Tensor) -> Tensor:
    return _platform(group).contiguous(x)


def _own_copy(group: ProcessGroup, x: Tensor) -> Tensor:
    return _fit(group, _platform(group).ops.clone(x))


def _with_length(x: Tensor, dim: int, length: int) -> tuple[int, ...]:
    shape = list(x.shape)
    shape[dim] = length
    return tuple(shape)
