"""Expert parallelism by variable all-to-all.

`AllToAllDispatcher` sends one row per token and destination rank, and `CopyPerExpertDispatcher`, as most
implementations do, one per token and expert.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_to_all_rows_data
from hp_dtensor.comm.mesh import as_group
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.parallel.recompute import saved_value
from hp_moe.dispatch.base import ChunkedDispatcher, Dispatched, PendingCombine, PendingDispatch
from hp_moe.dispatch.permutation import TokenPermutation, rows_of_slots, sorted_slots
from hp_moe.dispatch.row_exchange import RoundedExchange, Route, RowExchange, block_width, find_wire_format
from hp_moe.exceptions import ExpertParallelError
from hp_moe.grouped_gemm import GroupSizes
from hp_moe.routing import FAULTY, DeviceTable, Routing, count_keys, faults, local_numbers, refuse_faulty

Tensor = Any


class AllToAllDispatcher(ChunkedDispatcher):
    """Expert parallelism over a process group: rank i owns the i-th chunk of the experts.

    A token is sent once to each rank that owns experts of it, however many these are: the receiving rank copies the row
    for its experts, and sums their results before they are sent back.

    Forward uses four all-to-alls (sizes; rows; expert numbers and scores; results). The second and third run at the
    same time. The host waits for the device once, for the sizes. Backward uses three. Recomputation
    (`hp_dtensor.parallel.recompute`) reuses the sizes and permutations of forward.

    Args:
        group: the ranks that share the experts; the last ranks may own none.
        num_experts: number of experts of all ranks.
        chunk: number of experts of a rank; None to divide them evenly.
        wire_format: `int8` or `fp8` to send rows to the experts in 8 bits, with a float32 scale for each 128 elements.
            Results and gradients are not rounded, and gradients are those of unrounded rows. None for no rounding.
        num_chunks: number of chunks in which tokens are sent. `GroupedExperts` computes one chunk while the next ones
            and the results of earlier ones are sent, in forward and backward. Sizes are exchanged once. Gradients of
            weights are summed over chunks, so they differ by rounding.

    Examples:
        >>> def program():
        ...     dispatcher = AllToAllDispatcher(init_device_mesh("cpu", (2,)).get_group(), num_experts=2)
        ...     experts = platform.from_numpy(np.array([[0], [1], [1]]))
        ...     x = platform.ops.ones((3, 4), platform.dtype("float32"))
        ...     return dispatcher.dispatch(x, Routing(experts, platform.from_numpy(np.array([1, 2])))).sizes.host
        >>> run_ranks(program, 2)  # rank 0 has expert 0, rank 1 expert 1
        [(2,), (4,)]
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        *,
        chunk: int | None = None,
        wire_format: str | None = None,
        num_chunks: int = 1,
    ) -> None:
        group = as_group(group)
        assert group.platform is not None
        if num_chunks < 1:
            raise ExpertParallelError(f"num_chunks must be at least 1, got {num_chunks}")
        self.num_chunks = num_chunks
        self.group = group
        self.platform = group.platform
        self.num_experts = num_experts
        self.chunk = -(-num_experts // group.size) if chunk is None else chunk
        # Chunks are rounded up, so that the last ranks may own fewer experts, or none.
        self.first = min(group.rank * self.chunk, num_experts)
        self.num_local = min(self.chunk, num_experts - self.first)
        # The rank of each expert, and the group's size for dropped choices.
        self._owners = numpy.append(numpy.arange(num_experts) // self.chunk, group.size)
        self._local_numbers = local_numbers(self.platform, num_experts, self.first, self.num_local)
        self.wire_format = None if wire_format is None else find_wire_format(group.platform, wire_format)

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send each token to every rank that owns experts of it; see `TokenDispatcher`."""
        (pending,) = self._start_chunks(x, routing, [int(x.shape[0])])
        return self.finish_dispatch(pending)

    def start_dispatch(self, x: Tensor, routing: Routing) -> list[PendingDispatch]:
        # As even as possible.
        bounds = [int(x.shape[0]) * i // self.num_chunks for i in range(self.num_chunks + 1)]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        return self._start_chunks(x, routing, lengths)

    def _start_chunks(self, x: Tensor, routing: Routing, lengths: list[int]) -> list[PendingDispatch]:
        """Exchange the sizes of all chunks, and start to send each chunk; `dispatch` sends one."""
        # Recomputation in backward repeats the other exchanges with the sizes that forward agreed on.
        routes = saved_value(lambda: self._plan_routes(routing, lengths))
        tokens, choices = self._split_chunks(x, lengths), self._split_chunks(self._choices(routing), lengths)
        pending = []
        for chunk, chunk_choices, (route, sizes) in zip(tokens, choices, routes, strict=True):
            # Two messages, since rows may be in another dtype or in 8 bits. All ranks start the exchanges in this
            # order, by which the messages of a group are matched.
            rows, others = self._exchange(route), RowExchange(self.group, route)
            handles = rows.start(chunk), others.start(chunk_choices)
            pending.append(PendingDispatch(rows, others, *handles, route, sizes, routing))
        return pending

    def finish_dispatch(self, pending: PendingDispatch) -> Dispatched:
        rows, choices = pending.rows.wait(pending.rows_handle), pending.choices.wait(pending.choices_handle)
        return self._dispatched(rows, choices, pending.route, pending.sizes, pending.routing)

    def start_combine(self, y: Tensor, dispatched: Dispatched) -> PendingCombine:
        exchange = RowExchange(self.group, dispatched.route, is_return=True)
        return PendingCombine(exchange, exchange.start(y))

    def finish_combine(self, pending: PendingCombine) -> Tensor:
        return pending.exchange.wait(pending.handle)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return RowExchange(self.group, dispatched.route, is_return=True).exchange(y)

    def report_fault(self, code: int, device: Any = None) -> None:
        """Send an error code instead of sizes; see `TokenDispatcher`."""
        n = self.group.size
        # The message of `_plan_routes`, in which the other ranks are waiting.
        sizes = numpy.zeros((n, self.num_chunks * (1 + self.chunk)), numpy.int64)
        sizes[:, 0] = code * FAULTY
        all_to_all_rows_data(self.platform.from_numpy(sizes, device), self.group, [1] * n, [1] * n)

    def _plan_routes(self, routing: Routing, lengths: list[int]) -> list[tuple[Route, GroupSizes]]:
        """Exchange sizes with all ranks; returns the route and the rows of each own expert, for each chunk.

        Args:
            lengths: number of tokens of each chunk.
        """
        # One row per distinct rank, however many experts a token has there.
        destinations = self._destinations(routing.experts)
        by_chunk = self._split_chunks(destinations, lengths)
        if len(lengths) == 1:
            counts = [routing.counts]
        else:
            experts = self._split_chunks(routing.experts, lengths)
            # Numbers out of range are reported below; `_counts` ignores them.
            counts = [self._counts(each) for each in experts]
        faulty = faults(self.platform, routing, self.num_experts, self.group.ranks[self.group.rank])
        mine = self._sizes(by_chunk, counts, faulty)
        theirs, each = self.platform.ops.zeros_like(mine), [1] * self.group.size
        work = self.group.all_to_all_into(theirs, mine, each, each, async_op=True)
        # Sorted while the sizes are sent.
        orders = []
        for keys in by_chunk:
            slots = sorted_slots(self.platform, keys)
            orders.append((slots, rows_of_slots(self.platform, slots, *map(int, keys.shape))))
        work.wait()
        plans = self._read_sizes(mine, theirs, len(lengths))
        return [
            (Route(TokenPermutation(self.platform, keys, sum(sent), order), sent, received), sizes)
            for keys, order, (sent, received, sizes) in zip(by_chunk, orders, plans, strict=True)
        ]

    def _counts(self, experts: Tensor) -> Tensor:
        """Count the choices of each expert: int64 `[num_experts]`. Numbers out of range are not counted."""
        ops, number = self.platform.ops, self.num_experts
        keys = ops.clamp(experts, min=0, max=number) if experts.shape[0] else experts
        return ops.narrow(count_keys(self.platform, keys, number + 1), 0, 0, number)

    def _split_chunks(self, x: Tensor, lengths: list[int]) -> list[Tensor]:
        """Split the rows of `x` into chunks of these lengths."""
        return [x] if len(lengths) == 1 else [*self.platform.ops.split(x, lengths, 0)]

    def _destinations(self, experts: Tensor) -> Tensor:
        """Return the distinct ranks of each token as keys `[tokens, slots]`, with the group's size in empty slots.

        The number of slots is the smaller one of ranks and `top_k`, since sums over slots read all of them.

        Args:
            experts: int `[tokens, top_k]`. Numbers out of range are reported after the exchange of sizes.
        """
        return self._by_rank(experts) if self.group.size <= int(experts.shape[1]) else self._first_ones(experts)

    def _by_rank(self, experts: Tensor) -> Tensor:
        """Return keys with one slot for each rank. O(top_k * ranks)."""
        ops, size = self.platform.ops, self.group.size
        # How many experts of the token each rank owns. A sum, since integer minima are slow on some platforms.
        found = ops.sum(self._is_owned.look_up(experts), 1)
        ranks = ops.expand(ops.arange(size, found.dtype), (int(experts.shape[0]), size))
        return ops.masked_fill(ranks, ops.eq(found, 0), size)

    def _first_ones(self, experts: Tensor) -> Tensor:
        """Return keys with `top_k` slots, of which repeated ranks are empty. O(top_k**2)."""
        ops, int64, top_k = self.platform.ops, self.platform.dtype("int64"), int(experts.shape[1])
        owners = self._ranks_of_experts.look_up(experts)
        if top_k == 1:
            return owners
        # Lower triangle without the diagonal: a slot is a repeat if an earlier one has the same rank.
        earlier = self._constant(numpy.tril(numpy.ones((1, top_k, top_k), numpy.int64), -1), owners)
        same = ops.cast(ops.eq(ops.unsqueeze(owners, 2), ops.unsqueeze(owners, 1)), int64)
        repeats = ops.sum(ops.mul(same, earlier), 2)
        return ops.masked_fill(owners, ops.gt(repeats, 0), self.group.size)

    @functools.cached_property
    def _ranks_of_experts(self) -> DeviceTable:
        return DeviceTable(self.platform, self._owners)

    @functools.cached_property
    def _is_owned(self) -> DeviceTable:
        """1 for the rank of each expert, 0 for other ranks: `[num_experts + 1, ranks]`."""
        return DeviceTable(self.platform, self._owners[:, None] == numpy.arange(self.group.size))

    def _sizes(self, destinations: list[Tensor], counts: list[Tensor], faulty: Tensor) -> Tensor:
        """Return the sizes to send, int64: a line for each rank, with the rows and the inputs of its experts by chunk.

        Args:
            destinations: keys of the rows of each chunk.
            counts: choices of each expert, int64 `[num_experts]`, by chunk.
            faulty: result of `faults`, which is sent to all ranks, so that they raise together.
        """
        ops, n, width = self.platform.ops, self.group.size, 1 + self.chunk
        columns: list[Tensor] = []
        for keys, count in zip(destinations, counts, strict=True):
            # Key n marks empty slots, which are not sent.
            rows = ops.narrow(count_keys(self.platform, keys, n + 1), 0, 0, n)
            # The error code is added to the sizes of the first chunk, which every rank receives, even without rows.
            rows = rows if columns else ops.add(rows, faulty)
            if n * self.chunk > self.num_experts:
                count = ops.cat([count, ops.zeros((n * self.chunk - self.num_experts,), count.dtype)], 0)
            columns += [ops.reshape(rows, (n, 1)), ops.reshape(count, (n, self.chunk))]
        if len(counts) < self.num_chunks:
            # Padded to the width for all chunks: a rank that reports a fault does not know how many chunks others send.
            columns.append(ops.zeros((n, (self.num_chunks - len(counts)) * width), counts[0].dtype))
        return ops.cat(columns, 1)

    def _read_sizes(
        self, mine: Tensor, theirs: Tensor, num_chunks: int
    ) -> list[tuple[tuple[int, ...], tuple[int, ...], GroupSizes]]:
        """Return for each chunk the rows sent to and received from each rank, and the rows of each own expert.

        The host waits for the device here, once per call, and reads both directions together.
        """
        n, width = self.group.size, 1 + self.chunk
        host = self.platform.to_numpy(self.platform.ops.cat([mine, theirs], 0))
        # Checked after the exchange, in which every rank has sent its error code to all others.
        refuse_faulty([*host[:, 0]])
        plans = []
        for first in range(0, num_chunks * width, width):
            # Received lines come after the sent ones; summed over the ranks that send.
            own = host[n:, first + 1 : first + 1 + self.num_local].sum(0)
            sizes = GroupSizes(self.platform, self._constant(own, mine), _ints(own))
            plans.append((_ints(host[:n, first]), _ints(host[n:, first]), sizes))
        return plans

    def _sent_bytes(self, route: Route, dim: int, itemsize: int, routing: Routing) -> int:
        """Return the bytes that this rank sends: sizes, rows with their experts and scores, and results."""
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        row = result = dim * itemsize
        if self.wire_format is not None:
            # One byte per element, and a float32 scale per block.
            row = dim + 4 * (dim // block_width(dim))
        choices = int(routing.experts.shape[1]) * (4 if routing.scores is None else 8)
        sizes = len(others) * (1 + self.chunk) * 8
        return sizes + sum(route.sent[rank] * (row + choices) + route.received[rank] * result for rank in others)

    def _exchange(self, route: Route) -> RowExchange:
        if self.wire_format is None:
            return RowExchange(self.group, route)
        return RoundedExchange(self.group, route, self.wire_format)

    def _choices(self, routing: Routing) -> Tensor:
        """Return the expert numbers and scores of each token in one tensor, to be sent as one message.

        Numbers are converted to float32, which is exact up to 2**24 experts.
        """
        experts = self.platform.ops.cast(routing.experts, self.platform.dtype("float32"))
        return experts if routing.scores is None else self.platform.ops.cat([experts, routing.scores], 1)

    def _dispatched(
        self, rows: Tensor, choices: Tensor, route: Route, sizes: GroupSizes, routing: Routing
    ) -> Dispatched:
        """Return the record of received rows and their `_choices`."""
        platform, ops, top_k = self.platform, self.platform.ops, int(routing.experts.shape[1])
        scores = None if routing.scores is None else ops.narrow(choices, 1, top_k, top_k)

        def order() -> TokenPermutation:
            # Detached: only the scores in the same message have gradients.
            experts = ops.cast(ops.narrow(platform.detach(choices), 1, 0, top_k), platform.dtype("int64"))
            return TokenPermutation(platform, self._local_numbers.look_up(experts), sum(sizes.host))

        sent_bytes = self._sent_bytes(route, int(rows.shape[1]), platform.itemsize(rows.dtype), routing)
        return Dispatched(rows, sizes, scores, saved_value(order), route, sent_bytes)

    def _constant(self, array: numpy.ndarray, like: Tensor) -> Tensor:
        """Return an int64 tensor on the device of `like`."""
        return self.platform.from_numpy(array.astype(numpy.int64), self.platform.device_of(like))


def _ints(values: numpy.ndarray) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


class CopyPerExpertDispatcher(AllToAllDispatcher):
    """Sends `top_k` copies of every token, even to the same rank, and as many results back.

    It is the usual method, and the reference for `AllToAllDispatcher`.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        ...     ExpertParallel("copy_per_expert").apply(layer, init_device_mesh("cpu", (2,)))
        ...     return tuple(layer(platform.ops.ones((3, 4), platform.dtype("float32"))).shape)
        >>> run_ranks(program, 2)
        [(3, 4), (3, 4)]
    """

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send a copy of each token to each of its experts; see `TokenDispatcher`."""
        tokens, top_k = (int(size) for size in routing.experts.shape)
        # Each copy is routed as a token with one expert.
        copies = saved_value(
            lambda: TokenPermutation(
                self.platform,
                self._constant(numpy.arange(tokens * top_k).reshape(tokens, top_k), x),
                tokens * top_k,
            )
        )
        shape = (tokens * top_k, 1)
        single = replace(
            routing,
            experts=self.platform.ops.reshape(routing.experts, shape),
            scores=None if routing.scores is None else self.platform.ops.reshape(routing.scores, shape),
        )
        return replace(super().dispatch(copies.permute(x), single), copies=copies)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        assert dispatched.copies is not None
        return dispatched.copies.unpermute(super().combine(y, dispatched))
