"""The interface of a token dispatcher, and the record that its two halves share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from hp_moe.dispatch.exchange import RowExchange
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.grouped_gemm import GroupSizes
from hp_moe.routing import Routing

Tensor = Any


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
class Underway:
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
class Returning:
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

    def chosen(self, x: Tensor, routing: Routing) -> TokenDispatcher:
        """Return the dispatcher that takes these tokens; one that chooses among others does so at the first call."""
        return self

    def report_fault(self, code: int, device: Any = None) -> None:
        """Take part in the exchanges that `dispatch` begins with, so that all ranks raise instead of waiting.

        Called in place of `dispatch` by a rank whose inputs are at fault, which then raises. A dispatcher that does not
        override it leaves the other ranks waiting until the job is ended.

        Args:
            code: of `hp_moe.routing_checks.fault_code`.
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
    def begin(self, x: Tensor, routing: Routing) -> list[Underway]:
        """Begin to send the tokens of all chunks, in order; arguments as for `dispatch`."""

    @abstractmethod
    def arrived(self, underway: Underway) -> Dispatched:
        """Wait for one chunk; its record is as that of `dispatch`."""

    @abstractmethod
    def begin_combine(self, y: Tensor, dispatched: Dispatched) -> Returning:
        """Begin to return the results of one chunk; arguments as for `combine`."""

    @abstractmethod
    def combined(self, returning: Returning) -> Tensor:
        """Wait for the results of one chunk; `[tokens of the chunk, dim]`."""
