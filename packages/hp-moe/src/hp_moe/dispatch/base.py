"""The interfaces of token dispatchers, the permutation of tokens into key order, and the local dispatcher.

All sums over the copies of a token are gathers in slot order. Unlike those of a scatter-add on a GPU, their results do
not depend on scheduling.
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
    """A linear map that copies each row once for each of its keys and sorts the copies by key; and its transpose.

    Copies with equal keys stay in the order of rows. A key is an expert or a destination rank. A row has `slots` keys
    (usually `top_k`), some of which may be empty. Sorting is deferred to the first use, since fused experts may compute
    the order themselves.

    Args:
        keys: int `[rows, slots]`; empty slots hold a key larger than all others.
        num_copies: number of slots that are not empty.

    Attributes:
        keys: the argument.

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
        """Flat index of the slot of each copy, int `[copies]`."""
        return self.platform.ops.narrow(self._order, 0, 0, self.num_copies)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Index of the copy of each slot, int `[rows * slots]`; `num_copies` for empty slots."""
        ops = self.platform.ops
        # The argsort of a permutation is its inverse: it maps slots to positions in the sorted order. Empty slots sort
        # last, and share the first position behind all copies.
        return ops.clamp(ops.argsort(self._order, 0, stable=True), max=self.num_copies)

    @functools.cached_property
    def rows(self) -> Tensor:
        """Index of the row of each copy, int `[copies]`."""
        if self.num_slots == 1 or self.num_copies == 0:
            return self.entries
        ops = self.platform.ops
        # The row of a slot is its number divided by `num_slots`; a gather from a table avoids the integer division.
        rows = ops.arange(self.num_rows, self.platform.dtype("int64"))
        return ops.index_select(ops.repeat_interleave(rows, self.num_slots, 0), 0, self.entries)

    @functools.cached_property
    def _order(self) -> Tensor:
        """Flat indices of all slots, sorted by key."""
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
        """Gather the score of each copy: `[rows, slots]` -> `[copies, 1]`; differentiable."""
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
        """Gather the copy of each slot, zeros for empty slots: `[copies, dim]` -> `[rows * slots, dim]`."""
        size = self.num_rows * self.num_slots
        if self.num_copies < size:
            # Empty slots read the row of zeros appended here.
            y = self.platform.ops.cat([y, self.platform.ops.zeros((1, y.shape[1]), y.dtype)], 0)
        return self._select(y, self.positions, size)

    def _select(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        """Gather rows. An empty index returns zeros without rows, because `x` may have no rows to index."""
        if size == 0:
            return self.platform.zeros((0, x.shape[1]), x.dtype)
        return self.platform.ops.index_select(x, 0, index)


@dataclass(frozen=True, slots=True)
class Route:
    """The rows exchanged between ranks in one call; each row is one token sent to one rank.

    Attributes:
        permutation: from this rank's tokens to the rows that it sends, ordered by destination rank.
        sent: number of rows sent to each rank, in rank order.
        received: number of rows received from each rank, in rank order.
    """

    permutation: TokenPermutation
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The result of `TokenDispatcher.dispatch`, which is passed to `combine`.

    It holds all state of one call, so several micro-batches may be in flight through one dispatcher.

    Attributes:
        rows: `[rows, dim]`, local or received tokens, each one once even if it has several experts on this rank.
        sizes: number of inputs of each of this rank's experts.
        scores: float32 `[rows, slots]`; None if results are not weighted.
        permutation: from `rows` to the inputs of this rank's experts in expert-major order; None if they are equal.
        route: the exchange with other ranks, as the dispatcher describes it; None if no row leaves its rank.
        sent_bytes: bytes that this rank sends in dispatch and combine.
        copies: from this rank's tokens to the rows that were dispatched, if there are several per token; else None.
        outer: record of the exchange between nodes, if there are two levels.

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
    """A chunk of tokens being sent; `ChunkedDispatcher.finish_dispatch` waits for it.

    Attributes:
        rows: exchange of the rows.
        choices: exchange of their experts and scores.
        rows_handle, choices_handle: tensors to pass to `RowExchange.wait` of both.
        route, sizes: as in `Dispatched`.
        routing: routing of all chunks.
    """

    rows: RowExchange
    choices: RowExchange
    rows_handle: Tensor
    choices_handle: Tensor
    route: Route
    sizes: GroupSizes
    routing: Routing


@dataclass(frozen=True, slots=True)
class PendingCombine:
    """The results of a chunk being sent back; `ChunkedDispatcher.finish_combine` waits for them."""

    exchange: RowExchange
    handle: Tensor
    route: Route


class TokenDispatcher(ABC):
    """Sends tokens to their experts (`dispatch`) and the sum of each token's results back (`combine`).

    Both methods are differentiable. Every rank of a group calls them in the same order, including ranks without tokens
    and ranks whose experts get none.

    Example:
        >>> issubclass(AllToAllDispatcher, TokenDispatcher)
        True
    """

    @abstractmethod
    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send tokens to the ranks that own their experts.

        Args:
            x: plain `[tokens, dim]`, this rank's tokens.
            routing: the experts of each token and their differentiable scores.
        """

    def with_copies(self, weight: Tensor) -> Tensor:
        """Return the weights of all experts that `dispatch` returns rows for: those of this rank, and of copies.

        Args:
            weight: plain `[own experts, ...]`, to which gradients of copies are added.
        """
        return weight

    def resolve(self, x: Tensor, routing: Routing) -> TokenDispatcher:
        """Return the dispatcher to use for these tokens. `AutoDispatcher` chooses one at the first call."""
        return self

    def report_fault(self, code: int, device: Any = None) -> None:
        """Report invalid inputs in the first exchange of `dispatch`, so that all ranks raise.

        A rank with invalid inputs calls this instead of `dispatch`, and then raises. If a dispatcher does not override
        it, the other ranks wait until the job is terminated.

        Args:
            code: error code from `hp_moe.routing.fault_code`.
            device: device of the tokens; None for the platform's default.
        """

    @abstractmethod
    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return `[tokens, dim]`, the sum of its experts' results for each token given to `dispatch`.

        Args:
            y: `[rows, dim]`, the (weighted) sum of the results of this rank's experts for each of `dispatched.rows`.
            dispatched: the record returned by `dispatch`.
        """


class ChunkedDispatcher(TokenDispatcher):
    """A dispatcher that can send tokens in chunks, so that experts compute one chunk while others are sent.

    All methods are differentiable, and called by every rank of a group in the same order.

    Attributes:
        num_chunks: number of chunks; with 1, only `dispatch` and `combine` are called.

    Example:
        >>> issubclass(AllToAllDispatcher, ChunkedDispatcher)
        True
    """

    num_chunks: int

    @abstractmethod
    def start_dispatch(self, x: Tensor, routing: Routing) -> list[PendingDispatch]:
        """Start to send all chunks, in order; arguments as for `dispatch`."""

    @abstractmethod
    def finish_dispatch(self, pending: PendingDispatch) -> Dispatched:
        """Wait for one chunk and return its record, as `dispatch` does."""

    @abstractmethod
    def start_combine(self, y: Tensor, dispatched: Dispatched) -> PendingCombine:
        """Start to send the results of one chunk back; arguments as for `combine`."""

    @abstractmethod
    def finish_combine(self, pending: PendingCombine) -> Tensor:
        """Wait for the results of one chunk, `[tokens of the chunk, dim]`."""


class LocalDispatcher(TokenDispatcher):
    """Dispatcher of a rank with all experts: sorts rows by expert, without communication.

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
        """Compute the order of tokens by expert; see `TokenDispatcher`."""
        # Not read from the device, unless an implementation of the experts needs them on the host.
        sizes = GroupSizes(self.platform, routing.counts)
        if routing.is_expert_major:
            return Dispatched(x, sizes, routing.scores, None)
        # Reading the sizes waits for the device, and is needed only if choices were dropped.
        num_rows = sum(sizes.host) if routing.has_dropped else int(numpy.prod(routing.experts.shape))
        # Saved, so that recomputation in backward uses the order of forward and need not sort again.
        permutation = saved_value(lambda: TokenPermutation(self.platform, routing.experts, num_rows))
        return Dispatched(x, sizes, routing.scores, permutation)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return `y`; see `TokenDispatcher`."""
        return y
