"""The interfaces of token dispatchers, the records of a dispatch, and the dispatcher of a rank with all experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy

from hp_dtensor.parallel.recompute import saved_value
from hp_dtensor.platform.interface import Platform
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.dispatch.row_exchange import Route, RowExchange
from hp_moe.grouped_gemm import GroupSizes
from hp_moe.routing import Routing

Tensor = Any


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

    Examples:
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


class TokenDispatcher(ABC):
    """Sends tokens to their experts (`dispatch`) and the sum of each token's results back (`combine`).

    Both methods are differentiable. Every rank of a group calls them in the same order, including ranks without tokens
    and ranks whose experts get none.

    Examples:
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

    Examples:
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

    Examples:
        >>> with nn.building(platform):
        ...     type(GroupedExperts(dim=4, hidden_dim=8, num_experts=2).dispatcher).__name__
        'LocalDispatcher'
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
        return y
