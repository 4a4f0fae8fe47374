"""Expert parallelism with temporary copies of busy experts on other ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_to_all_rows
from hp_dtensor.comm.mesh import as_group
from hp_dtensor.comm.process_group import ProcessGroup
from hp_moe.dispatch.all_to_all import AllToAllDispatcher
from hp_moe.dispatch.base import ChunkedDispatcher, Dispatched, PendingCombine, PendingDispatch
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.exceptions import ExpertParallelError
from hp_moe.placement import CopyPlacement, check_placement, inverse_permutation, place_copies, ranks_of_experts
from hp_moe.routing import DeviceTable, Routing, count_keys

Tensor = Any


class ReplicatingDispatcher(ChunkedDispatcher):
    """`AllToAllDispatcher` with copies of busy experts: a rank with a copy processes its own tokens of that expert.

    A copy is not a parameter. The expert's owner sends its weights in every forward and sums the gradients of all
    copies in backward. The optimizer, its states and checkpoints are not affected, and results differ only by
    rounding. `place_copies` changes the copies between steps. To move experts that stay busy to other ranks, with
    their weights and optimizer states, use `hp_moe.move_experts`.

    Args:
        group: the ranks that share the experts; rank i owns the i-th chunk, and the last ones may own none.
        num_experts: number of experts of all ranks.
        slots: maximum number of copies on a rank; 0 if experts are only moved.
        wire_format, num_chunks: as in `AllToAllDispatcher`.

    Attributes:
        expert_placement: the position of each expert; rank i owns the i-th chunk of positions.
        is_initial_placement: whether the position of every expert is its number.

    Raises:
        ExpertParallelError: `slots` is negative.

    Examples:
        >>> def program():
        ...     with nn.building(platform):
        ...         layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        ...     ExpertParallel(functools.partial(ReplicatingDispatcher, slots=1)).apply(
        ...         layer, init_device_mesh("cpu", (2,))
        ...     )
        ...     layer.experts.dispatcher.place_copies([90, 10, 0, 0])  # between steps, with the loads of the last one
        ...     y = layer(platform.ops.ones((3, 4), platform.dtype("float32")))
        ...     return layer.experts.dispatcher.copies
        >>> import functools
        >>> run_ranks(program, 2)[0]
        ((), (0,))
    """

    def __init__(
        self,
        group: ProcessGroup,
        num_experts: int,
        *,
        slots: int,
        wire_format: str | None = None,
        num_chunks: int = 1,
    ) -> None:
        group = as_group(group)
        assert group.platform is not None
        if slots < 0:
            raise ExpertParallelError(f"slots for copies of experts must be at least 0, got {slots}")
        self.group = group
        self.platform = group.platform
        self.num_experts = num_experts
        self.slots = slots
        self.num_chunks = num_chunks
        self.chunk = -(-num_experts // group.size)
        self._options: dict[str, Any] = {"wire_format": wire_format, "num_chunks": num_chunks}
        self.set_placement(range(num_experts))

    @property
    def copies(self) -> CopyPlacement:
        """The experts that each rank holds a copy of."""
        expert_at = inverse_permutation(self.expert_placement)
        return tuple(tuple(sorted(expert_at[position] for position in copied)) for copied in self._copied)

    def set_placement(self, placement: Sequence[int]) -> None:
        """Use a new placement of experts from the next call on, and remove all copies.

        This does not move weights; `hp_moe.move_experts` does both.

        Raises:
            ExpertParallelError: `placement` is not a permutation of all positions.
        """
        self.expert_placement = check_placement(placement, self.num_experts)
        self.is_initial_placement = self.expert_placement == tuple(range(self.num_experts))
        self._set_copies(((),) * self.group.size)

    def place_copies(self, loads: Any) -> CopyPlacement:
        """Place the copies where they reduce the peak load most; call it between steps, with equal loads on all ranks.

        Args:
            loads: tokens of each expert, summed over all ranks, such as `LoadMetrics.loads` of the last step.

        Returns:
            The experts that each rank holds a copy of in the next steps.

        Raises:
            ExpertParallelError: `loads` has another length than the number of experts, or negative numbers.
        """
        numbers = [int(load) for load in loads]
        if len(numbers) != self.num_experts or min(numbers, default=0) < 0:
            raise ExpertParallelError(
                f"loads: expected {self.num_experts} numbers of at least 0, one for each expert, got {numbers}"
            )
        by_position = [numbers[expert] for expert in inverse_permutation(self.expert_placement)]
        self._set_copies(place_copies(by_position, self.group.size, self.slots))
        return self.copies

    def with_copies(self, weight: Tensor) -> Tensor:
        """Return the weights of this rank's experts and copies; see `TokenDispatcher`."""
        if self._is_plain:
            return weight
        ops = self.platform.ops
        num_own, rest = int(weight.shape[0]), tuple(int(size) for size in weight.shape[1:])
        flat = ops.reshape(weight, (num_own, math.prod(rest)))
        # Every rank takes part if any rank holds a copy: it is a collective.
        copies = [self._receive_copies(flat)] if any(self._copied) else []
        # Zeros fill the positions of ranks with fewer experts or copies than others. No token is sent to them.
        missing = self._width - self.chunk - sum(int(each.shape[0]) for each in copies)
        blocks = [flat, self._zeros(self.chunk - num_own, flat), *copies, self._zeros(missing, flat)]
        # Tensors without rows stay in the concatenation: every rank has to send the gradients of copies in backward.
        joined = ops.cat([block for block in blocks if block is not None], 0)
        return ops.reshape(joined, (self._width, *rest))

    def _receive_copies(self, flat: Tensor) -> Tensor:
        """Return the weights of the copies on this rank, `[copies, elements]`, sent by the experts' owners.

        An all-to-all of rows: its backward returns the gradients of copies, and that of the permutation sums them.
        """
        destinations = self._destinations(int(flat.shape[0]))
        sent = tuple(int((destinations == rank).sum()) for rank in range(self.group.size))
        mine = self._copied[self.group.rank]
        received = tuple(sum(position // self.chunk == rank for position in mine) for rank in range(self.group.size))
        permutation = TokenPermutation(self.platform, self._constant(destinations, flat), sum(sent))
        return all_to_all_rows(permutation.permute(flat), self.group, sent, received)

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send each token to ranks that own its experts or hold copies; see `TokenDispatcher`."""
        return self._inner.dispatch(x, self._to_slots(routing))

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return self._inner.combine(y, dispatched)

    def start_dispatch(self, x: Tensor, routing: Routing) -> list[PendingDispatch]:
        return self._inner.start_dispatch(x, self._to_slots(routing))

    def finish_dispatch(self, pending: PendingDispatch) -> Dispatched:
        return self._inner.finish_dispatch(pending)

    def start_combine(self, y: Tensor, dispatched: Dispatched) -> PendingCombine:
        return self._inner.start_combine(y, dispatched)

    def finish_combine(self, pending: PendingCombine) -> Tensor:
        return self._inner.finish_combine(pending)

    def report_fault(self, code: int, device: Any = None) -> None:
        self._inner.report_fault(code, device)

    @property
    def _is_plain(self) -> bool:
        """True if no expert is moved or copied, so that expert numbers can be used as they are."""
        return self.is_initial_placement and not any(self._copied)

    def _set_copies(self, copied: CopyPlacement) -> None:
        """Number the slots of all ranks, and build the table from experts to slots.

        A slot is the place of one expert's weights on one rank. Each rank has `_width` consecutive slots: first its own
        positions, then the copies of `copied` positions. The inner dispatcher treats slots as its experts.
        """
        self._copied = copied
        ranks = self.group.size
        self._width = self.chunk + max(map(len, copied))
        self._holders = ranks_of_experts(self.num_experts, copied)
        if self._is_plain:
            self._inner = AllToAllDispatcher(self.group, self.num_experts, chunk=self.chunk, **self._options)
            return
        # The table repeats after the least common multiple of all numbers of holders (bounded by MAX_COPIES).
        turns = math.lcm(*map(len, self._holders)) if self._holders else 1
        # The last row stands for dropped choices, whose slot is beyond all others.
        slots = numpy.full((self.num_experts + 1, turns), ranks * self._width)
        for expert, position in enumerate(self.expert_placement):
            holders = self._holders[position]
            for turn in range(turns):
                # This rank serves its own tokens if it can. Otherwise consecutive tokens alternate between the holders,
                # and each rank starts with another one.
                rank = (
                    self.group.rank if self.group.rank in holders else holders[(turn + self.group.rank) % len(holders)]
                )
                # A rank's own positions come first, then its copies.
                is_own = position // self.chunk == rank
                slot = position % self.chunk if is_own else self.chunk + copied[rank].index(position)
                slots[expert, turn] = rank * self._width + slot
        self._turns, self._slots = turns, DeviceTable(self.platform, slots.reshape(-1))
        self._inner = AllToAllDispatcher(self.group, ranks * self._width, chunk=self._width, **self._options)

    def _to_slots(self, routing: Routing) -> Routing:
        """Return the routing with slots instead of expert numbers."""
        if self._is_plain:
            return routing
        ops, (tokens, top_k) = self.platform.ops, routing.experts.shape
        turns = self._turns
        slots = routing.experts
        if int(tokens) * int(top_k):
            turn = self._constant((numpy.arange(int(tokens)) % turns)[:, None], routing.experts)
            # Numbers out of range are reported by the inner dispatcher; here they must not index the table.
            known = ops.clamp(routing.experts, min=0, max=self.num_experts)
            slots = self._slots.look_up(ops.add(ops.mul(known, turns), turn))
            # Negative numbers stay negative, so that the inner dispatcher reports them.
            slots = ops.where(ops.lt(routing.experts, 0), routing.experts, slots)
        num_slots = self.group.size * self._width
        counts = ops.narrow(count_keys(self.platform, ops.clamp(slots, min=0), num_slots + 1), 0, 0, num_slots)
        return Routing(slots, counts, routing.scores, False, routing.has_dropped, routing.allow_nonfinite)

    def _destinations(self, num_own: int) -> numpy.ndarray:
        """Return the ranks that receive a copy of each own expert, `[own experts, ranks]`, filled up with `ranks`."""
        size, first = self.group.size, self.group.rank * self.chunk
        destinations = numpy.full((num_own, size), size)
        for row in range(num_own):
            others = [rank for rank in self._holders[first + row] if rank != self.group.rank]
            destinations[row, : len(others)] = others
        return destinations

    def _zeros(self, rows: int, like: Tensor) -> Tensor | None:
        """Return rows of zeros like those of a 2-D tensor, or None for no rows."""
        return self.platform.ops.zeros((rows, int(like.shape[1])), like.dtype) if rows else None

    def _constant(self, array: numpy.ndarray, like: Tensor) -> Tensor:
        """Return an int64 tensor on the device of `like`."""
        return self.platform.from_numpy(array.astype(numpy.int64), self.platform.device_of(like))
