"""Expert parallelism in which busy experts have copies on other ranks, for as long as they are busy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_to_all_rows
from hp_dtensor.comm.process_group import ProcessGroup
from hp_moe.dispatch.all_to_all import AllToAllDispatcher
from hp_moe.dispatch.base import ChunkedDispatcher, Dispatched, Returning, TokenPermutation, Underway
from hp_moe.exceptions import ExpertParallelError
from hp_moe.placement import Placement, check_homes, inverse, owners, place_copies
from hp_moe.routing import Routing, count_keys

Tensor = Any


class ReplicatingDispatcher(ChunkedDispatcher):
    """`AllToAllDispatcher` with copies of busy experts: a rank that has one works on its own tokens of that expert.

    A copy is no parameter. Its weights come from the expert's owner in every forward, and the gradients of all copies
    are added up there in backward: the optimizer, its state and checkpoints know nothing of it, and where the copies
    are changes no result but by rounding. `place` moves them between steps. What stays busy may rather move as a whole:
    `hp_moe.move_experts` gives experts other homes, with their weights and optimizer states.

    Args:
        group: the ranks that share the experts; rank i owns the i-th chunk, and the last ones may own none.
        num_experts: number of experts of all ranks together.
        slots: the most copies that a rank takes; 0: none, for experts that only move.
        wire_format, num_chunks: as in `AllToAllDispatcher`.

    Attributes:
        homes: the place of each expert, of which rank i owns the i-th chunk; at first its own number.
        is_home: every expert lives at the place of its number.

    Raises:
        ExpertParallelError: fewer than no slots.

    Example:
        >>> def program():
        ...     with nn.building(platform):
        ...         layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        ...     ExpertParallel(functools.partial(ReplicatingDispatcher, slots=1)).apply(
        ...         layer, init_device_mesh("cpu", (2,))
        ...     )
        ...     layer.experts.dispatcher.place([90, 10, 0, 0])  # between steps, by the loads of the last one
        ...     y = layer(platform.ops.ones((3, 4), platform.dtype("float32")))
        ...     return layer.experts.dispatcher.placement
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
        self.live_at(range(num_experts))

    @property
    def placement(self) -> Placement:
        """The experts that each rank has a copy of."""
        expert_at = inverse(self.homes)
        return tuple(tuple(sorted(expert_at[place] for place in extra)) for extra in self._copied)

    def live_at(self, homes: Sequence[int]) -> None:
        """Send tokens to experts at these homes from now on, of which there are no copies at first.

        The weights must be there: `hp_moe.move_experts` brings them.

        Raises:
            ExpertParallelError: not each place once.
        """
        self.homes = check_homes(homes, self.num_experts)
        self.is_home = self.homes == tuple(range(self.num_experts))
        self._copy_at(((),) * self.group.size)

    def place(self, loads: Any) -> Placement:
        """Move the copies to where they help most, between steps; every rank must be given the same loads.

        Args:
            loads: tokens of each expert, of all ranks, as `LoadMetrics.loads` of the last step.

        Returns:
            The experts that each rank has a copy of from now on.

        Raises:
            ExpertParallelError: not one load for each expert, or one below 0.
        """
        numbers = [int(load) for load in loads]
        if len(numbers) != self.num_experts or min(numbers, default=0) < 0:
            raise ExpertParallelError(
                f"loads: expected {self.num_experts} numbers of at least 0, one for each expert, got {numbers}"
            )
        by_place = [numbers[expert] for expert in inverse(self.homes)]
        self._copy_at(place_copies(by_place, self.group.size, self.slots))
        return self.placement

    def with_copies(self, weight: Tensor) -> Tensor:
        """Return the weights of this rank's experts and copies; see `TokenDispatcher`."""
        if self._is_plain:
            return weight
        ops = self.platform.ops
        num_own, rest = int(weight.shape[0]), tuple(int(size) for size in weight.shape[1:])
        flat = ops.reshape(weight, (num_own, math.prod(rest)))
        copies = [self._copies(flat)] if any(self._copied) else []
        # Ranks with fewer experts or copies than others have zeros in their places, for which there are no tokens.
        missing = self._width - self.chunk - sum(int(each.shape[0]) for each in copies)
        parts = [flat, self._zeros(self.chunk - num_own, flat), *copies, self._zeros(missing, flat)]
        # Also those without a row: gradients of copies are sent in backward by every rank.
        whole = ops.cat([part for part in parts if part is not None], 0)
        return ops.reshape(whole, (self._width, *rest))

    def _copies(self, flat: Tensor) -> Tensor:
        """Return the copies that this rank has, `[copies, numbers of an expert]`, from the experts of all ranks."""
        keys = self._destinations(int(flat.shape[0]))
        sent = tuple(int((keys == rank).sum()) for rank in range(self.group.size))
        permutation = TokenPermutation(self.platform, self._constant(keys, flat), sum(sent))
        return all_to_all_rows(permutation.permute(flat), self.group, sent, self._received())

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send each token to ranks that have its experts; see `TokenDispatcher`."""
        return self._inner.dispatch(x, self._to_places(routing))

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return sums to their tokens' ranks and add them up there; see `TokenDispatcher`."""
        return self._inner.combine(y, dispatched)

    def begin(self, x: Tensor, routing: Routing) -> list[Underway]:
        """Begin to send all chunks of the tokens; see `ChunkedDispatcher`."""
        return self._inner.begin(x, self._to_places(routing))

    def arrived(self, underway: Underway) -> Dispatched:
        """Wait for the rows of a chunk; see `ChunkedDispatcher`."""
        return self._inner.arrived(underway)

    def begin_combine(self, y: Tensor, dispatched: Dispatched) -> Returning:
        """Begin to return the results of a chunk; see `ChunkedDispatcher`."""
        return self._inner.begin_combine(y, dispatched)

    def combined(self, returning: Returning) -> Tensor:
        """Wait for the results of a chunk's tokens; see `ChunkedDispatcher`."""
        return self._inner.combined(returning)

    def report_fault(self, code: int, device: Any = None) -> None:
        """Send a fault in place of sizes; see `TokenDispatcher`."""
        self._inner.report_fault(code, device)

    @property
    def _is_plain(self) -> bool:
        """Experts are where their numbers say, and nowhere else."""
        return self.is_home and not any(self._copied)

    def _copy_at(self, copied: Placement) -> None:
        """Number what ranks have: rank times `_width`, then a rank's own places, then its copies of other places."""
        self._copied = copied
        ranks = self.group.size
        self._width = self.chunk + max(map(len, copied))
        self._owners = owners(self.num_experts, copied)
        if self._is_plain:
            self._inner = AllToAllDispatcher(self.group, self.num_experts, chunk=self.chunk, **self._options)
            return
        turns = math.lcm(*map(len, self._owners)) if self._owners else 1
        self._places = numpy.full((self.num_experts + 1, turns), ranks * self._width)
        for expert, home in enumerate(self.homes):
            held = self._owners[home]
            for turn in range(turns):
                # At home where it is; else the tokens of all ranks take turns, each rank beginning with another.
                at = self.group.rank if self.group.rank in held else held[(turn + self.group.rank) % len(held)]
                self._places[expert, turn] = at * self._width + self._place_on(at, home)
        self._inner = AllToAllDispatcher(self.group, ranks * self._width, chunk=self._width, **self._options)

    def _place_on(self, rank: int, home: int) -> int:
        if home // self.chunk == rank:
            return home - rank * self.chunk
        return self.chunk + self._copied[rank].index(home)

    def _to_places(self, routing: Routing) -> Routing:
        """Return the routing with the places of experts in place of their numbers."""
        if self._is_plain:
            return routing
        ops, (tokens, top_k) = self.platform.ops, routing.experts.shape
        size = int(tokens) * int(top_k)
        turns = self._places.shape[1]
        places = routing.experts
        if size:
            turn = self._constant((numpy.arange(int(tokens)) % turns)[:, None], routing.experts)
            # Numbers out of range are told of by the fault that they are; they must not be read with.
            known = ops.clamp(routing.experts, min=0, max=self.num_experts)
            index = ops.reshape(ops.add(ops.mul(known, turns), turn), (size,))
            table = self._constant(self._places.reshape(-1), routing.experts)
            places = ops.reshape(ops.index_select(table, 0, index), (int(tokens), int(top_k)))
            places = ops.where(ops.lt(routing.experts, 0), routing.experts, places)
        number = self.group.size * self._width
        counts = ops.narrow(count_keys(self.platform, ops.clamp(places, min=0), number + 1), 0, 0, number)
        return Routing(places, counts, routing.scores, False, routing.has_dropped, routing.takes_nonfinite)

    def _destinations(self, num_own: int) -> numpy.ndarray:
        """Return the ranks that get a copy of each own expert, `[own experts, ranks]`; the number of ranks: none."""
        size, first = self.group.size, self.group.rank * self.chunk
        keys = numpy.full((num_own, size), size)
        for row in range(num_own):
            others = [rank for rank in self._owners[first + row] if rank != self.group.rank]
            keys[row, : len(others)] = others
        return keys

    def _received(self) -> tuple[int, ...]:
        mine = self._copied[self.group.rank]
        return tuple(sum(home // self.chunk == rank for home in mine) for rank in range(self.group.size))

    def _zeros(self, rows: int, like: Tensor) -> Tensor | None:
        return self.platform.ops.zeros((rows, int(like.shape[1])), like.dtype) if rows else None

    def _constant(self, array: numpy.ndarray, like: Tensor) -> Tensor:
        """An int64 tensor on the device of `like`."""
        return self.platform.from_numpy(array.astype(numpy.int64), self.platform.device_of(like))
