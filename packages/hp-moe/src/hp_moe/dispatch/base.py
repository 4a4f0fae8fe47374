"""Permutation of tokens into key order, and its transpose: two linear maps that are each other's backward.

Every sum runs over a row's copies in slot order. Results therefore do not depend on scheduling, which a
scatter-add on a GPU would.

The interface of a token dispatcher, and the record that its two halves share.

The dispatcher of a rank that owns all experts.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy

from hp_dtensor.parallel.recompute import saved_value
from hp_dtensor.platform.interface import Platform
from hp_moe.dispatch.exchange import RowExchange
from hp_moe.grouped_gemm import GroupSizes
from hp_moe.routing import Routing

Tensor = Any


class TokenPermutation:
    """One copy of a row for each of its keys, sorted by key; copies with equal keys keep the order of rows.

    A key is what the copies are sorted by: an expert, or a destination rank. A row has `slots` of them
    (`top_k`, usually), not all of which need a copy.

    Args:
        keys: int `[rows, slots]`; a slot without a copy holds a key above all others.
        num_copies: number of slots with a copy.

    The orders are sorted when first asked for: fused experts may have a quicker way to them.

    Attributes:
        keys: as given.

    Example:
        >>> keys = platform.from_numpy(np.array([[2, 0], [1, 2]]))  # two rows, a copy for each of two keys
        >>> permutation = TokenPermutation(platform, keys, num_copies=4)
        >>> platform.to_numpy(permutation.rows).tolist()  # in key order
        [0, 1, 0, 1]
    """

    def __init__(self, platform: Platform, keys: Tensor, num_copies: int) -> None:
        self.platform = platform
        self.keys = keys
        self.num_rows, self.num_slots = (int(size) for size in keys.shape)
        self.num_copies = num_copies

    @functools.cached_property
    def entries(self) -> Tensor:
        """The flat index of each copy's slot, int `[copies]`."""
        return self.platform.ops.narrow(self._order, 0, 0, self.num_copies)

    @functools.cached_property
    def positions(self) -> Tensor:
        """The copy of each slot, int `[rows * slots]`; `num_copies` for a slot without one."""
        ops = self.platform.ops
        # The argsort of a permutation is its inverse_permutation: from slots to places in the sorted order.
        return ops.clamp(ops.argsort(self._order, 0, stable=True), max=self.num_copies)

    @functools.cached_property
    def rows(self) -> Tensor:
        """The row that each copy is of, int `[copies]`."""
        if self.num_slots == 1 or self.num_copies == 0:
            return self.entries
        ops = self.platform.ops
        rows = ops.arange(self.num_rows, self.platform.dtype("int64"))
        return ops.index_select(ops.repeat_interleave(rows, self.num_slots, 0), 0, self.entries)

    @functools.cached_property
    def _order(self) -> Tensor:
        """The flat indices of all slots, sorted by key."""
        ops = self.platform.ops
        # Stable, so that copies with equal keys keep the order of rows: every sum over them has one order.
        return ops.argsort(ops.reshape(self.keys, (self.num_rows * self.num_slots,)), 0, stable=True)

    def permute(self, x: Tensor) -> Tensor:
        """Copy rows into key order: `[rows, dim]` -> `[copies, dim]`; backward is `unpermute`."""
        return self.platform.linear_map(x, self._permute, self._unpermute)

    def unpermute(self, y: Tensor) -> Tensor:
        """Sum the copies of each row: `[copies, dim]` -> `[rows, dim]`; backward is `permute`."""
        return self.platform.linear_map(y, self._unpermute, self._permute)

    def permute_scores(self, scores: Tensor) -> Tensor:
        """Take the score of each copy's slot: `[rows, slots]` -> `[copies, 1]`; differentiable."""
        shape = (self.num_rows, self.num_slots)
        ops = self.platform.ops

        def forward(scores: Tensor) -> Tensor:
            flat = ops.reshape(scores, (self.num_rows * self.num_slots, 1))
            return self._select(flat, self.entries, self.num_copies)

        return self.platform.linear_map(scores, forward, lambda g: ops.reshape(self._at_slots(g), shape))

    def _permute(self, x: Tensor) -> Tensor:
        return self._select(x, self.rows, self.num_copies)

    def _unpermute(self, y: Tensor) -> Tensor:
        at_slots = self._at_slots(y)
        if self.num_slots == 1:
            return at_slots
        ops = self.platform.ops
        return ops.sum(ops.reshape(at_slots, (self.num_rows, self.num_slots, y.shape[1])), 1)

    def _at_slots(self, y: Tensor) -> Tensor:
        """Put copies back at their slots, zeros elsewhere: `[copies, dim]` -> `[rows * slots, dim]`."""
        size = self.num_rows * self.num_slots
        if self.num_copies < size:
            # A slot without a copy reads the row of zeros that is added at the end.
            y = self.platform.ops.cat([y, self.platform.ops.zeros((1, y.shape[1]), y.dtype)], 0)
        return self._select(y, self.positions, size)

    def _select(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        if size == 0:
            return self.platform.zeros((0, x.shape[1]), x.dtype)
        return self.platform.ops.index_select(x, 0, index)


@dataclass(frozen=True, slots=True)
class Route:
    """The rows that travel between ranks in one call; every row is one token on its way to one rank.

    Attributes:
        permutation: own tokens -> rows to send, ordered by destination rank.
        sent: number of rows sent to each rank, in rank order.
        received: number of rows received from each rank, in rank order.
    """

    permutation: TokenPermutation
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The result of `TokenDispatcher.dispatch`; `combine` needs it back.

    It belongs to one call, so several micro-batches may be in flight through one dispatcher.

    Attributes:
        rows: `[rows, dim]`, own tokens or received ones, each once however many of this rank's experts it has.
        sizes: number of inputs of each of this rank's experts.
        scores: float32 `[rows, slots]`; None: results are not weighted.
        permutation: `rows` -> inputs of this rank's experts in expert-major order; None: they are the same rows in
            the same order.
        route: the way from and to the other ranks, in the dispatcher's own terms; None: no row left its rank.
        sent_bytes: bytes that leave this rank in dispatch and combine.
        copies: own tokens -> rows that were dispatched, where those are more; None: they are the same.
        outer: record of the way between nodes, where there are two levels.

    Example:
        >>> x = platform.ops.ones((3, 4), platform.dtype("float32"))
        >>> experts = platform.from_numpy(np.array([[0, 1], [1, 2], [0, 2]]))
        >>> routing = Routing(experts, platform.from_numpy(np.array([2, 2, 2])))
        >>> sent = LocalDispatcher(platform).dispatch(x, routing)
        >>> sent.sizes.host  # inputs of each expert
        (2, 2, 2)
    """

    rows: Tensor
    sizes: GroupSizes
    scores: Tensor | None
    permutation: TokenPermutation | None
    route: Any = None
    sent_bytes: int = 0
    copies: TokenPermutation | None = None
    outer: Dispatched | None = None


@dataclass(frozen=True, slots=True)
class PendingDispatch:
    """The tokens of one chunk on their way; `ChunkedDispatcher.arrived` waits for them.

    Attributes:
        rows, choices: exchanges of the rows, and of their experts and scores.
        arriving, arriving_choices: tokens to wait for them with.
        route, sizes: as in `Dispatched`.
        routing: of all chunks.
    """

    rows: RowExchange
    choices: RowExchange
    arriving: Tensor
    arriving_choices: Tensor
    route: Route
    sizes: GroupSizes
    routing: Routing


@dataclass(frozen=True, slots=True)
class PendingCombine:
    """The results of one chunk on their way back; `ChunkedDispatcher.combined` waits for them."""

    exchange: RowExchange
    arriving: Tensor
    route: Route


class TokenDispatcher(ABC):
    """Takes tokens to their experts and brings the sum of each token's results back.

    Both methods are differentiable. Every rank of a group calls them in the same order, also a rank that has no tokens
    or whose experts get none.

    Example:
        >>> issubclass(AllToAllDispatcher, TokenDispatcher)
        True
    """

    @abstractmethod
    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send tokens to the ranks that own their experts.

        Args:
            x: plain `[tokens, dim]`, this rank's own tokens.
            routing: the experts of each token, with scores to differentiate through.
        """

    def with_copies(self, weight: Tensor) -> Tensor:
        """Return the weights of the experts that `dispatch` brings rows for, from those that this rank owns.

        Args:
            weight: plain `[own experts, ...]`. Gradients of copies go back to it.
        """
        return weight

    def resolve(self, x: Tensor, routing: Routing) -> TokenDispatcher:
        """Return the dispatcher that takes these tokens; one that chooses among others does so at the first call."""
        return self

    def report_fault(self, code: int, device: Any = None) -> None:
        """Take part in the exchanges that `dispatch` begins with, so that all ranks raise instead of waiting.

        Called in place of `dispatch` by a rank whose inputs are at fault, which then raises. A dispatcher that does not
        override it leaves the other ranks waiting until the job is ended.

        Args:
            code: of `hp_moe.routing.fault_code`.
            device: of the tokens; None: the platform's default.
        """

    @abstractmethod
    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return `[tokens, dim]`, for each token of `dispatch` the sum of its experts' results.

        Args:
            y: `[rows, dim]`, for each of `dispatched.rows` the (weighted) sum of this rank's experts' results.
            dispatched: the record that `dispatch` returned for these tokens.
        """


class ChunkedDispatcher(TokenDispatcher):
    """Lets experts work on a part of the tokens while others travel, where `num_chunks` is above 1.

    All its methods are differentiable, and called by every rank of a group in the same order.

    Attributes:
        num_chunks: parts that tokens travel in; 1: `dispatch` and `combine` alone are called.

    Example:
        >>> issubclass(AllToAllDispatcher, ChunkedDispatcher)
        True
    """

    num_chunks: int

    @abstractmethod
    def start_dispatch(self, x: Tensor, routing: Routing) -> list[PendingDispatch]:
        """Begin to send the tokens of all chunks, in order; arguments as for `dispatch`."""

    @abstractmethod
    def finish_dispatch(self, underway: PendingDispatch) -> Dispatched:
        """Wait for one chunk; its record is as that of `dispatch`."""

    @abstractmethod
    def start_combine(self, y: Tensor, dispatched: Dispatched) -> PendingCombine:
        """Begin to return the results of one chunk; arguments as for `combine`."""

    @abstractmethod
    def finish_combine(self, returning: PendingCombine) -> Tensor:
        """Wait for the results of one chunk; `[tokens of the chunk, dim]`."""


class LocalDispatcher(TokenDispatcher):
    """Leaves rows where they are and finds their expert-major order; nothing is communicated.

    Example:
        >>> x = platform.ops.ones((3, 4), platform.dtype("float32"))
        >>> experts = platform.from_numpy(np.array([[0, 1], [1, 2], [0, 2]]))
        >>> routing = Routing(experts, platform.from_numpy(np.array([2, 2, 2])))
        >>> sent = LocalDispatcher(platform).dispatch(x, routing)
        >>> sent.sizes.host  # inputs of each expert
        (2, 2, 2)
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Find the order of tokens by expert; see `TokenDispatcher`."""
        sizes = GroupSizes(self.platform, routing.counts)
        if routing.is_expert_major:
            return Dispatched(x, sizes, routing.scores, None)
        num_rows = sum(sizes.host) if routing.has_dropped else int(numpy.prod(routing.experts.shape))
        # Kept: a recomputation in backward must see the order of forward, and need not sort again.
        permutation = saved_value(lambda: TokenPermutation(self.platform, routing.experts, num_rows))
        return Dispatched(x, sizes, routing.scores, permutation)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return `y`; see `TokenDispatcher`."""
        return y
