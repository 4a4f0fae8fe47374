"""Expert parallelism by variable all-to-all, with one row per token and destination rank on the wire."""

from __future__ import annotations

from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_to_all_rows, all_to_all_rows_data
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.parallel.recompute import kept
from hp_moe.dispatch.base import Dispatched, Route, TokenDispatcher
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.dispatch.wire_formats import WireFormat, block_width, find_wire_format
from hp_moe.grouped_gemm import GroupSizes
from hp_moe.routing import Routing, count_keys, local_numbers
from hp_moe.routing_checks import FAULTY, faults, refuse_faulty

Tensor = Any


class AllToAllDispatcher(TokenDispatcher):
    """Expert parallelism over a process group: rank i owns the i-th chunk of the experts.

    One row per token and destination rank crosses the wire in each direction, however many experts of that rank
    the token has: rows are copied for the experts there, and their results are summed there before they return.

    Forward takes four all-to-alls (sizes; rows; expert numbers and scores; results) and waits for the device
    once, for the sizes; backward takes three. A recomputation (`hp_dtensor.parallel.recompute`) reuses the
    sizes and permutations of forward.

    Args:
        group: the ranks that share the experts; where experts run out, the last ranks own none.
        num_experts: number of experts of all ranks together.
        chunk: experts of a rank; None: as many as all have when they share them evenly.
        wire_format: `int8` or `fp8`: rows go to the experts in 8 bits, a float32 scale for each 128 of a row. Results
            and gradients return as they are; the gradient is that of rows which were not rounded. None: no rounding.

    Example:
        >>> def program():
        ...     dispatcher = AllToAllDispatcher(init_device_mesh("cpu", (2,)).get_group(), num_experts=2)
        ...     experts = platform.from_numpy(np.array([[0], [1], [1]]))
        ...     x = platform.ops.ones((3, 4), platform.dtype("float32"))
        ...     return dispatcher.dispatch(x, Routing(experts, platform.from_numpy(np.array([1, 2])))).sizes.host
        >>> run_ranks(program, 2)  # rank 0 has expert 0, rank 1 expert 1
        [(2,), (4,)]
    """

    def __init__(
        self, group: ProcessGroup, num_experts: int, *, chunk: int | None = None, wire_format: str | None = None
    ) -> None:
        assert group.platform is not None
        self.group = group
        self.platform = group.platform
        self.num_experts = num_experts
        self.chunk = -(-num_experts // group.size) if chunk is None else chunk
        self.first = min(group.rank * self.chunk, num_experts)
        self.num_local = min(self.chunk, num_experts - self.first)
        self.wire_format = None if wire_format is None else find_wire_format(group.platform, wire_format)

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send each token to every rank that owns experts of it; see `TokenDispatcher`."""
        # Kept: a recomputation in backward replays the exchange with the sizes that forward agreed on.
        route, sizes = kept(lambda: self._plan_route(routing))
        rows = self._send(route, x) if self.wire_format is None else self._send_rounded(route, x, self.wire_format)
        experts, scores = self._send_choices(route, routing)
        permutation = kept(lambda: self._by_local_expert(experts, sizes))
        return Dispatched(rows, sizes, scores, permutation, route, self._sent_bytes(route, x, routing))

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return sums to their tokens' ranks and add them up there; see `TokenDispatcher`."""
        route = dispatched.route
        assert route is not None
        returned = all_to_all_rows(y, self.group, route.received, route.sent)
        return route.permutation.unpermute(returned)

    def report_fault(self, code: int, device: Any = None) -> None:
        """Send a fault in place of sizes; see `TokenDispatcher`."""
        n = self.group.size
        sizes = numpy.zeros((n, 1 + self.chunk), numpy.int64)
        sizes[:, 0] = code * FAULTY
        all_to_all_rows_data(self.platform.from_numpy(sizes, device), self.group, [1] * n, [1] * n)

    # Sizes and order of rows ------------------------------------------------------------------------------

    def _plan_route(self, routing: Routing) -> tuple[Route, GroupSizes]:
        """Agree with all ranks on the rows that travel, and on the rows of each of this rank's experts."""
        destinations = self._without_repeats(self._owners(routing.experts))
        faulty = faults(self.platform, routing, self.num_experts, self.group.ranks[self.group.rank])
        sent, received, sizes = self._exchange_sizes(destinations, routing.counts, faulty)
        return Route(TokenPermutation(self.platform, destinations, sum(sent)), sent, received), sizes

    def _owners(self, experts: Tensor) -> Tensor:
        """Map expert numbers, int64 `[tokens, top_k]`, to the group ranks that own them; none: the group's size."""
        ops = self.platform.ops
        size = _numel(experts)
        if size == 0:
            return ops.zeros_like(experts)
        # Numbers out of range, which are reported once all ranks know of them, must not be read with.
        experts = ops.clamp(experts, min=0, max=self.num_experts)
        owners = numpy.append(numpy.arange(self.num_experts) // self.chunk, self.group.size)
        table = self._constant(owners, experts)
        return ops.reshape(ops.index_select(table, 0, ops.reshape(experts, (size,))), tuple(experts.shape))

    def _without_repeats(self, owners: Tensor) -> Tensor:
        """Replace each owner that an earlier slot of the same token has by the group's size. O(top_k**2)."""
        top_k = int(owners.shape[1])
        if top_k == 1:
            return owners
        ops, int64 = self.platform.ops, self.platform.dtype("int64")
        earlier = self._constant(numpy.tril(numpy.ones((1, top_k, top_k), numpy.int64), -1), owners)
        same = ops.cast(ops.eq(ops.unsqueeze(owners, 2), ops.unsqueeze(owners, 1)), int64)
        repeats = ops.sum(ops.mul(same, earlier), 2)
        return ops.masked_fill(owners, ops.gt(repeats, 0), self.group.size)

    def _exchange_sizes(
        self, destinations: Tensor, counts: Tensor, faulty: Tensor
    ) -> tuple[tuple[int, ...], tuple[int, ...], GroupSizes]:
        """Return rows sent to each rank, rows received from each, and rows of each own expert.

        Args:
            faulty: as `faults` returns it; it goes to all ranks, which then raise together.

        This is where the host waits for the device, once per call: both directions are read together.
        """
        ops, n, chunk = self.platform.ops, self.group.size, self.chunk
        rows = ops.narrow(count_keys(self.platform, destinations, n + 1), 0, 0, n)
        padding = ops.zeros((n * chunk - self.num_experts,), counts.dtype)
        by_owner = ops.reshape(ops.cat([counts, padding], 0), (n, chunk))
        mine = ops.cat([ops.reshape(ops.add(rows, faulty), (n, 1)), by_owner], 1)
        theirs = all_to_all_rows_data(mine, self.group, [1] * n, [1] * n)
        host = self.platform.to_numpy(ops.cat([mine, theirs], 0))
        refuse_faulty([*host[:n, 0], *host[n:, 0]])
        own = host[n:, 1 : 1 + self.num_local].sum(0)
        sizes = self._constant(own, counts)
        return _ints(host[:n, 0]), _ints(host[n:, 0]), GroupSizes(self.platform, sizes, _ints(own))

    def _by_local_expert(self, experts: Tensor, sizes: GroupSizes) -> TokenPermutation:
        """Return the order of received rows by this rank's experts, from the numbers of all their experts."""
        local = local_numbers(self.platform, experts, self.first, self.num_local)
        return TokenPermutation(self.platform, local, sum(sizes.host))

    def _sent_bytes(self, route: Route, x: Tensor, routing: Routing) -> int:
        """Return the bytes that leave this rank: sizes, rows with their experts and scores, and results."""
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        dim = int(x.shape[1])
        row = result = dim * self.platform.itemsize(x.dtype)
        if self.wire_format is not None:
            row = dim + 4 * (dim // block_width(dim))
        choices = int(routing.experts.shape[1]) * (4 if routing.scores is None else 8)
        sizes = len(others) * (1 + self.chunk) * 8
        return sizes + sum(route.sent[rank] * (row + choices) + route.received[rank] * result for rank in others)

    # Rows -------------------------------------------------------------------------------------------------

    def _send(self, route: Route, x: Tensor) -> Tensor:
        """Exchange one row per token and destination: `[tokens, width]` -> `[rows received, width]`."""
        return all_to_all_rows(route.permutation.permute(x), self.group, route.sent, route.received)

    def _send_rounded(self, route: Route, x: Tensor, wire_format: WireFormat) -> Tensor:
        """Exchange rows in 8 bits with a scale for each block; backward returns gradients as they are."""
        ops, dim = self.platform.ops, int(x.shape[1])
        width = block_width(dim)

        def forward(rows: Tensor) -> Tensor:
            blocks = ops.reshape(ops.cast(rows, self.platform.dtype("float32")), (-1, dim // width, width))
            codes, scales = wire_format.encode(blocks)
            lengths = self.group, route.sent, route.received
            codes = all_to_all_rows_data(ops.reshape(codes, (-1, dim)), *lengths)
            scales = all_to_all_rows_data(ops.reshape(scales, (-1, dim // width)), *lengths)
            blocks = ops.reshape(codes, (-1, dim // width, width))
            decoded = wire_format.decode(blocks, ops.reshape(scales, (-1, dim // width, 1)))
            return ops.cast(ops.reshape(decoded, (-1, dim)), rows.dtype)

        return self.platform.linear_map(
            route.permutation.permute(x),
            forward,
            lambda grad: all_to_all_rows_data(grad, self.group, route.received, route.sent),
        )

    def _send_choices(self, route: Route, routing: Routing) -> tuple[Tensor, Tensor | None]:
        """Exchange the expert numbers and scores of each row in one message.

        Numbers travel as float32 beside the scores, which is exact up to 2**24 experts.
        """
        ops, top_k = self.platform.ops, int(routing.experts.shape[1])
        experts = ops.cast(routing.experts, self.platform.dtype("float32"))
        parts = [experts] if routing.scores is None else [experts, routing.scores]
        received = self._send(route, ops.cat(parts, 1))
        experts = ops.narrow(self.platform.detach(received), 1, 0, top_k)
        scores = None if routing.scores is None else ops.narrow(received, 1, top_k, top_k)
        return ops.cast(experts, self.platform.dtype("int64")), scores

    def _constant(self, array: numpy.ndarray, like: Tensor) -> Tensor:
        """An int64 tensor on the device of `like`."""
        return self.platform.from_numpy(array.astype(numpy.int64), self.platform.device_of(like))


def _numel(x: Tensor) -> int:
    return int(numpy.prod(x.shape))


def _ints(values: numpy.ndarray) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
