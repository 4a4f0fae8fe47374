"""Expert parallelism in which every rank gets all tokens."""

from __future__ import annotations

from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_gather_varying, gather_data, reduce_scatter
from hp_dtensor.comm.mesh import as_group
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.parallel.recompute import saved_value
from hp_dtensor.spec.placements import Shard
from hp_moe.dispatch.base import Dispatched, TokenDispatcher
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.grouped_gemm import GroupSizes
from hp_moe.routing import FAULTY, Routing, faults, local_numbers, refuse_faulty

Tensor = Any


class AllGatherDispatcher(TokenDispatcher):
    """All-gathers the tokens of all ranks, and reduce-scatters the results of each rank's experts.

    If nearly every token has experts on nearly every rank, it sends as much as `AllToAllDispatcher`, in fewer messages
    of more equal size.

    Args:
        group: the ranks that share the experts; rank i owns the i-th chunk, and the last ones may own none.
        num_experts: number of experts of all ranks.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        ...     ExpertParallel("all_gather").apply(layer, init_device_mesh("cpu", (2,)))
        ...     return tuple(layer(platform.ops.ones((3, 4), platform.dtype("float32"))).shape)
        >>> run_ranks(program, 2)
        [(3, 4), (3, 4)]
    """

    def __init__(self, group: ProcessGroup, num_experts: int) -> None:
        group = as_group(group)
        assert group.platform is not None
        self.group = group
        self.platform = group.platform
        self.num_experts = num_experts
        self.first, self.num_local = Shard(0).interval(num_experts, group.size, group.rank)
        self._local_numbers = local_numbers(self.platform, num_experts, self.first, self.num_local)

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Gather all tokens with their experts and scores; see `TokenDispatcher`."""
        group = self.group
        lengths, sizes = saved_value(lambda: self._exchange_sizes(int(x.shape[0]), routing))
        # Differentiable: backward is a reduce-scatter, which sums the gradients of all ranks for each token.
        rows = all_gather_varying(x, group, 0, lengths)
        scores = None if routing.scores is None else all_gather_varying(routing.scores, group, 0, lengths)

        def order() -> TokenPermutation:
            # Expert numbers have no gradient, so the gather without a backward is used.
            experts = gather_data(self.platform.contiguous(routing.experts), group, 0, lengths)
            return TokenPermutation(self.platform, self._local_numbers.look_up(experts), sum(sizes.host))

        return Dispatched(rows, sizes, scores, saved_value(order), lengths, self._sent_bytes(lengths, x, routing))

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum the results of all ranks for this rank's tokens; see `TokenDispatcher`."""
        return reduce_scatter(y, self.group, 0, dispatched.route)

    def report_fault(self, code: int, device: Any = None) -> None:
        """Gather an error code instead of sizes; see `TokenDispatcher`."""
        sizes = numpy.zeros((1, 1 + self.num_experts), numpy.int64)
        # The same shape and order of collectives as in `_exchange_sizes`, which the other ranks are in.
        sizes[0, 0] = code * FAULTY
        gather_data(self.platform.from_numpy(sizes, device), self.group, 0, [1] * self.group.size)

    def _exchange_sizes(self, num_tokens: int, routing: Routing) -> tuple[tuple[int, ...], GroupSizes]:
        """Return the number of tokens of each rank, and of rows of each own expert. The host waits for the device."""
        ops, n = self.platform.ops, self.group.size
        tokens = self.platform.from_numpy(numpy.array([num_tokens]), self.platform.device_of(routing.counts))
        faulty = faults(self.platform, routing, self.num_experts, self.group.ranks[self.group.rank])
        # One gather for the number of tokens, the error code that is added to it, and the counts.
        mine = ops.cat([ops.add(tokens, faulty), routing.counts], 0)
        every = self.platform.to_numpy(gather_data(ops.unsqueeze(mine, 0), self.group, 0, [1] * n))
        refuse_faulty([*every[:, 0]])
        own = every[:, 1 + self.first : 1 + self.first + self.num_local].sum(0)
        sizes = self.platform.from_numpy(own.astype(numpy.int64), self.platform.device_of(routing.counts))
        host = tuple(int(size) for size in own)
        return tuple(int(length) for length in every[:, 0]), GroupSizes(self.platform, sizes, host)

    def _sent_bytes(self, lengths: tuple[int, ...], x: Tensor, routing: Routing) -> int:
        """Return the bytes that this rank sends: sizes, tokens with experts and scores to all others, and results."""
        others, mine = self.group.size - 1, lengths[self.group.rank]
        row = int(x.shape[1]) * self.platform.itemsize(x.dtype)
        # 8 bytes of expert and 4 of score for each choice.
        choices = int(routing.experts.shape[1]) * (8 if routing.scores is None else 12)
        return others * (8 * (1 + self.num_experts) + mine * (row + choices)) + (sum(lengths) - mine) * row
