"""Rows to the experts that they were routed to, and back: within one rank, or over a process group."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_to_all_rows, all_to_all_rows_data
from hp_dtensor.comm.world import ProcessGroup
from hp_dtensor.parallel.recompute import kept
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Shard
from hp_moe.exceptions import ExpertParallelError
from hp_moe.plugins import plugin_manager
from hp_moe.products import GroupSizes
from hp_moe.router import Routing, count_keys
from hp_moe.row_copies import RowCopies

Tensor = Any


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What one call sent to this rank's experts; `combine` needs it back.

    Attributes:
        rows: `[rows, dim]` in expert-major order.
        sizes: rows of each of this rank's experts.
        scores: float32 `[rows, 1]`; None: results are not weighted.
        copies: which received (or own) row each of `rows` is a copy of; None: they are the same rows.
        route: how rows came from other ranks; None: they did not.
    """

    rows: Tensor
    sizes: GroupSizes
    scores: Tensor | None
    copies: RowCopies | None
    route: Route | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """One copy of a token for each rank that it goes to, and how many rows go between each two ranks."""

    copies: RowCopies
    sent: tuple[int, ...]
    received: tuple[int, ...]


class TokenDispatcher(ABC):
    """Takes tokens to their experts and brings the sum of each token's results back."""

    @abstractmethod
    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """`x` `[tokens, dim]`, this rank's own; differentiable in `x` and in the routing's scores."""

    @abstractmethod
    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """`y` `[rows, dim]`, one result for each of `dispatched.rows` -> `[tokens, dim]`; differentiable."""


class LocalDispatcher(TokenDispatcher):
    """All experts are on this rank: rows are only sorted."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        sizes = GroupSizes(self.platform, routing.counts)
        if routing.is_expert_major:
            return Dispatched(x, sizes, routing.scores, None)
        copies = kept(lambda: RowCopies(self.platform, routing.experts, _numel(routing.experts)))
        scores = None if routing.scores is None else copies.pick(routing.scores)
        return Dispatched(copies.replicate(x), sizes, scores, copies)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        return y if dispatched.copies is None else dispatched.copies.reduce(y)


class AllToAllDispatcher(TokenDispatcher):
    """Experts in chunk order over a process group; one copy of a token per rank that has experts for it.

    The copies for several experts of one rank are made there, and their results are summed there before they
    return, so a token crosses the wire once per rank and direction, not once per expert. Forward takes four
    all-to-alls (sizes; rows; expert numbers and scores; results) and waits for the device once, for the
    sizes; backward takes three. A recomputation (`hp_dtensor.parallel.recompute`) asks for the sizes no more.

    Args:
        group: the ranks that share the experts; rank i owns the i-th chunk, the last ones may own none.
        num_experts: of all ranks.
    """

    def __init__(self, group: ProcessGroup, num_experts: int) -> None:
        assert group.platform is not None
        self.group = group
        self.platform = group.platform
        self.num_experts = num_experts
        self.chunk = -(-num_experts // group.size)
        self.first, self.num_local = Shard(0).interval(num_experts, group.size, group.rank)

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        route, sizes = kept(lambda: self._route(routing))
        rows = self._send(route, x)
        experts, scores = self._send_choices(route, routing)
        copies = kept(lambda: RowCopies(self.platform, self._local_keys(experts), sum(sizes.host)))
        return Dispatched(copies.replicate(rows), sizes, None if scores is None else copies.pick(scores), copies, route)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        copies, route = dispatched.copies, dispatched.route
        assert copies is not None
        assert route is not None
        returned = all_to_all_rows(copies.reduce(y), self.group, route.received, route.sent)
        return route.copies.reduce(returned)

    def _route(self, routing: Routing) -> tuple[Route, GroupSizes]:
        keys = self._first_of_each_owner(self._owners(routing.experts))
        sent, received, sizes = self._exchange_sizes(keys, routing.counts)
        return Route(RowCopies(self.platform, keys, sum(sent)), sent, received), sizes

    def _owners(self, experts: Tensor) -> Tensor:
        """The group rank of each expert number."""
        ops = self.platform.ops
        size = _numel(experts)
        if size == 0 or self.group.size == 1:
            return ops.zeros_like(experts)
        table = self._constant(numpy.arange(self.num_experts) // self.chunk, experts)
        return ops.reshape(ops.index_select(table, 0, ops.reshape(experts, (size,))), tuple(experts.shape))

    def _first_of_each_owner(self, owners: Tensor) -> Tensor:
        """`owners`, with the group's size wherever an earlier slot of the token has the same owner. O(top_k**2)."""
        top_k = int(owners.shape[1])
        if top_k == 1:
            return owners
        ops, int64 = self.platform.ops, self.platform.dtype("int64")
        earlier = self._constant(numpy.tril(numpy.ones((1, top_k, top_k), numpy.int64), -1), owners)
        same = ops.cast(ops.eq(ops.unsqueeze(owners, 2), ops.unsqueeze(owners, 1)), int64)
        repeats = ops.sum(ops.mul(same, earlier), 2)
        return ops.masked_fill(owners, ops.gt(repeats, 0), self.group.size)

    def _exchange_sizes(self, keys: Tensor, counts: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], GroupSizes]:
        """Rows to and from each rank, and rows of each own expert: the one wait for the device."""
        ops, n, chunk = self.platform.ops, self.group.size, self.chunk
        rows = ops.narrow(count_keys(self.platform, keys, n + 1), 0, 0, n)
        padding = ops.zeros((n * chunk - self.num_experts,), counts.dtype)
        by_owner = ops.reshape(ops.cat([counts, padding], 0), (n, chunk))
        mine = ops.cat([ops.reshape(rows, (n, 1)), by_owner], 1)
        theirs = all_to_all_rows_data(mine, self.group, [1] * n, [1] * n)
        host = self.platform.to_numpy(ops.cat([mine, theirs], 0))
        own = host[n:, 1 : 1 + self.num_local].sum(0)
        sizes = self._constant(own, counts)
        return _ints(host[:n, 0]), _ints(host[n:, 0]), GroupSizes(self.platform, sizes, _ints(own))

    def _send(self, route: Route, x: Tensor) -> Tensor:
        return all_to_all_rows(route.copies.replicate(x), self.group, route.sent, route.received)

    def _send_choices(self, route: Route, routing: Routing) -> tuple[Tensor, Tensor | None]:
        """Each received row's expert numbers and scores, in one message; float32 is exact up to 2**24 experts."""
        ops, top_k = self.platform.ops, int(routing.experts.shape[1])
        experts = ops.cast(routing.experts, self.platform.dtype("float32"))
        parts = [experts] if routing.scores is None else [experts, routing.scores]
        received = self._send(route, ops.cat(parts, 1))
        experts = ops.narrow(self.platform.detach(received), 1, 0, top_k)
        scores = None if routing.scores is None else ops.narrow(received, 1, top_k, top_k)
        return ops.cast(experts, self.platform.dtype("int64")), scores

    def _local_keys(self, experts: Tensor) -> Tensor:
        """Numbers of own experts counted from zero; `num_local` for all others."""
        ops = self.platform.ops
        local = ops.sub(experts, self.first)
        elsewhere = ops.logical_or(ops.lt(local, 0), ops.ge(local, self.num_local))
        return ops.masked_fill(local, elsewhere, self.num_local)

    def _constant(self, array: numpy.ndarray, like: Tensor) -> Tensor:
        return self.platform.from_numpy(array.astype(numpy.int64), self.platform.device_of(like))


BuildDispatcher = Callable[[ProcessGroup, int], TokenDispatcher]


class DispatcherRegistry:
    """Token dispatchers by name."""

    def __init__(self) -> None:
        self._builders: dict[str, BuildDispatcher] = {}

    def add(self, name: str, build: BuildDispatcher) -> None:
        """Register `build(group, num_experts)`.

        Raises:
            ExpertParallelError: the name is taken.
        """
        if name in self._builders:
            raise ExpertParallelError(f"a token dispatcher called {name!r} is registered already")
        self._builders[name] = build

    def build(self, name: str, group: ProcessGroup, num_experts: int) -> TokenDispatcher:
        """The dispatcher called `name` for a group.

        Raises:
            ExpertParallelError: no dispatcher has that name.
        """
        if name not in self._builders:
            known = ", ".join(sorted(self._builders))
            raise ExpertParallelError(f"no token dispatcher is called {name!r}; known: {known}")
        return self._builders[name](group, num_experts)


@functools.cache
def dispatchers() -> DispatcherRegistry:
    """The built-in dispatchers and those of plugins."""
    registry = DispatcherRegistry()
    registry.add("all_to_all", AllToAllDispatcher)
    plugin_manager().hook.hp_token_dispatcher(registry=registry)
    return registry


def _numel(x: Tensor) -> int:
    return int(numpy.prod(x.shape))


def _ints(values: numpy.ndarray) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
