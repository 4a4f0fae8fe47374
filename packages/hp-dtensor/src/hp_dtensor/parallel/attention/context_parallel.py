"""Context parallelism: attention over sequences sharded over ranks, by exchanging heads, keys and values, or both.

`context_parallel_attention` is the function. `ContextParallel` is the style under which every `attention` inside a
module is that function, and `context_parallel` a context in which every attention is, as in torch.

All communication follows from the token indices and documents of all ranks, which every rank knows. So no rank sends
what no other needs, and both sides of a transfer agree without asking. The sharding of packed rows depends on the
documents of the full rows. A model sees only its rank's positions, from which it cannot be derived; so it is a context
variable of the forward (`use_sequence_sharding`), saved for recomputation, and ranks compare theirs when they exchange
positions. Gradients of parameters that all ranks have, such as sinks, are each rank's contribution; `fully_shard` over
the ranks sums them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.saved_tensors import restore_in_recomputation
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention.all_gather import gathering_attention, plan_gather
from hp_dtensor.parallel.attention.blockwise import Options
from hp_dtensor.parallel.attention.functional import (
    Route,
    Settings,
    attention,
    checked_settings,
    dispatch_attention,
    local_attention,
    routed_attention,
    tile_of,
)
from hp_dtensor.parallel.attention.masks import AttentionDropout, AttentionMask, Tokens, local_dropout
from hp_dtensor.parallel.attention.ring import plan_ring, ring_attention
from hp_dtensor.parallel.attention.sharding import (
    Method,
    SequenceSharding,
    check_method,
    exchanging_ranks,
    positions_of_all,
)
from hp_dtensor.parallel.attention.ulysses import HeadShares, heads_for_sequence, sequence_for_heads
from hp_dtensor.parallel.parallelize_module import ParallelStyle
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    device_mesh: DeviceMesh,
    *,
    mask: AttentionMask,
    sharding: SequenceSharding | None = None,
    method: Method = "ring",
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Return `attention` over a sequence sharded over a mesh, `[batch, heads, own tokens, value width]`.

    `sharding.ulysses_degree` ranks exchange heads for tokens; among the others keys and values are exchanged. Results
    and gradients equal those of one device, for any lengths and numbers of heads and key-value heads: nothing needs to
    divide.

    Args:
        query, key, value: as for `attention`, with this rank's tokens; plain, or DTensors of another mesh sharded over
            batch or heads (tensor parallelism).
        device_mesh: one-dimensional; its ranks share the sequence.
        mask: with this rank's positions, if any.
        sharding: the tokens of each rank; None: equally many, in head and tail chunks if the mask is causal.
        method: `"ring"`: keys and values are passed around while ranks compute; `"all_gather"`: those that are seen are
            gathered first; without effect if all ranks exchange heads. `"ulysses"`: all ranks exchange heads.
        scale, soft_cap, sinks, dropout: as for `attention`; sinks are those of all heads, and `dropout` must be the
            same on all ranks.

    Raises:
        AttentionError: arguments that do not fit, an unknown method or one that does not fit the sharding, or positions
            that do not.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     q = k = v = platform.from_numpy(np.ones((1, 4, 6, 8), "float32"))
        ...     return tuple(context_parallel_attention(q, k, v, mesh, mask=AttentionMask()).shape)
        >>> run_ranks(program, 2)  # of 12 tokens, each rank has 6
        [(1, 4, 6, 8), (1, 4, 6, 8)]
    """
    settings = checked_settings(query, key, value, mask, scale, soft_cap, sinks, dropout)
    mesh = require_mesh("context_parallel_attention", device_mesh)
    job = _Job.of(query, key, value, mesh, mask, sharding, method)
    return dispatch_attention(job.attention, query, key, value, settings)


@dataclass(frozen=True)
class _Job:
    """One call of `context_parallel_attention`: its group of ranks, and how they share the sequence."""

    platform: Platform
    group: ProcessGroup
    mesh: DeviceMesh
    sharding: SequenceSharding
    method: str

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mesh: DeviceMesh,
        mask: AttentionMask,
        sharding: SequenceSharding | None,
        method: str,
    ) -> _Job:
        """Return the job of a call, with the default sharding filled in, after checking that the tensors fit it."""
        if mesh.ndim != 1:
            raise AttentionError(f"context_parallel_attention takes a mesh of one dimension, got {mesh!r}")
        check_method("context_parallel_attention", method)
        size, own = mesh.size(), query.shape[2]
        given = None if sharding is None or sharding.ranks != size else sharding.ulysses_degree
        degree = exchanging_ranks("context_parallel_attention", method, given, size)
        # Assumes equally many tokens per rank; the check below raises if that is not so.
        if sharding is None:
            sharding = SequenceSharding(length=own * size, ranks=size, ulysses_degree=degree, balanced=mask.causal)
        group = mesh.group_along()
        expected = sharding.indices(group.rank).size if sharding.ranks == size else None
        if sharding.ranks != size or expected != own or key.shape[2] != own:
            raise AttentionError(
                f"context_parallel_attention: rank {group.rank} of {size} has {own} queries and {key.shape[2]} keys; "
                f"{sharding} assigns it {expected if expected is not None else 'none'}. Every rank must take its shard "
                "of the full batch by `SequenceSharding.shard`"
            )
        if not query.dtype == key.dtype == value.dtype:
            raise AttentionError(
                "context_parallel_attention: expected one dtype, since tensors share messages; cast query "
                f"({query.dtype}), key ({key.dtype}) and value ({value.dtype})"
            )
        return cls(mesh.platform, group, mesh, sharding, method)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, settings: Settings) -> Tensor:
        """Return attention of plain tensors for the heads and rows that this rank has."""
        own_mask, _, _, sinks, dropout = settings

        def full_mask() -> AttentionMask:
            positions = positions_of_all(self.platform, self.group, self.sharding, own_mask)
            return AttentionMask(own_mask.causal, own_mask.window, positions)

        # One exchange of positions per mask, not per layer.
        mask = own_mask.cached(("full", self.group.ranks, self.sharding), full_mask)
        # Resolved before the exchange of heads, while rows and heads are those of the caller.
        if dropout is not None:
            numbers = dropout.numbers(self.platform, query.shape[1])
            dropout = AttentionDropout(dropout.p, dropout.rows(self.platform, query.shape[0]), numbers)
        settings, degree = settings._replace(mask=mask, dropout=dropout), self.sharding.ulysses_degree
        if degree == 1:
            return self._among_ring(query, key, value, settings)
        ring, within = divmod(self.group.rank, degree)
        # Neighbouring ranks hold neighbouring tokens, so the concatenation of their tokens is in sequence order.
        neighbours = self._subgroup(range(ring * degree, (ring + 1) * degree))
        lengths = [self.sharding.indices(ring * degree + u).size for u in range(degree)]
        shares = HeadShares.of(query.shape[1], key.shape[1], degree)
        q, k, v = heads_for_sequence(self.platform, (query, key, value), neighbours, shares, lengths)
        # Grouped-query kernels need equal groups; where local heads are uneven, key-value heads are repeated
        # explicitly.
        expansion = shares.expansion(within)
        if expansion is not None:
            index = self.platform.from_numpy(np.array(expansion, np.int64))
            k, v = (self.platform.ops.index_select(x, 1, index) for x in (k, v))
        first, last = shares.queries[within]
        # A rank's gradient of the sinks is its contribution; here that is zero for heads it does not have.
        if sinks is not None:
            settings = settings._replace(sinks=self.platform.ops.narrow(sinks, 0, first, last - first))
        if dropout is not None:
            own_dropout = AttentionDropout(dropout.p, dropout.seed, dropout.heads[first:last])
            settings = settings._replace(dropout=own_dropout)
        out = self._among_ring(q, k, v, settings)
        return sequence_for_heads(self.platform, out, neighbours, shares, lengths)

    def _among_ring(self, q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> Tensor:
        """Return attention once heads are exchanged: over the tokens of all Ulysses groups of this rank's ring."""
        degree = self.sharding.ulysses_degree
        # More ranks than heads: all ranks of this ring have none, so skipping its communication is consistent. The
        # empty result is made of the queries: so it is in the graph, and the rank takes part in backward's exchanges.
        if q.shape[1] == 0:
            return self.platform.ops.reshape(q, (*q.shape[:3], v.shape[3]))
        if self.sharding.ring_size == 1:
            return local_attention(q, k, v, settings)
        mask, scale, soft_cap, sinks, dropout = settings
        ring, within = divmod(self.group.rank, degree)
        indices = self.sharding.ring_indices(ring)
        # A window that covers the sequence masks nothing.
        window = mask.window if mask.window is not None and mask.window < self.sharding.length else None
        dropped = local_dropout(self.platform, dropout, q, indices, indices)
        options = Options(scale, soft_cap, mask.causal, window, dropped)
        # Depends on shapes and options that are equal on all ranks of the ring, so plans are too.
        tile = tile_of(self.platform, q, v, options)
        group = self._subgroup(range(within, self.sharding.ranks, degree))
        run = ring_attention if self.method == "ring" else gathering_attention
        return run(self.platform, q, k, v, sinks, group, self._plan(ring, mask, options, tile), options)

    def _plan(self, ring: int, mask: AttentionMask, options: Options, tile: int | None) -> Any:
        """Return the plan of rank `ring` of the ring.

        It is cached for all calls, or per mask if the mask has documents.
        """
        make, documents = _PLANS[self.method], mask.documents(self.platform)
        if documents is None:
            return _plan_without_documents(make, self.sharding, ring, options.causal, options.window, tile)

        # Packed rows: cached with the mask, because documents differ from batch to batch.
        def find() -> Any:
            indices = [self.sharding.ring_indices(each) for each in range(self.sharding.ring_size)]
            tokens = [Tokens(each, documents[:, each]) for each in indices]
            return make(tokens, ring, options.causal, options.window, tile)

        return mask.cached((self.method, self.sharding, ring, tile), find)

    def _subgroup(self, ranks: range) -> ProcessGroup:
        # A group is created once by the world, and reused by all layers.
        if len(ranks) == self.group.size:
            return self.group
        return self.mesh.world.group([self.group.ranks[rank] for rank in ranks])


_PLANS: dict[str, Callable[..., Any]] = {"ring": plan_ring, "all_gather": plan_gather}


# A plan holds the index of every token, 8 MiB per million tokens, so only few plans are cached.
@functools.lru_cache(maxsize=64)
def _plan_without_documents(
    make: Callable[..., Any], sharding: SequenceSharding, ring: int, causal: bool, window: int | None, tile: int | None
) -> Any:
    """Return `make`'s plan for sequences of one document each, which is the same in every step."""
    return make([Tokens(sharding.ring_indices(each)) for each in range(sharding.ring_size)], ring, causal, window, tile)


Module = Any
_sharding_in_use: ContextVar[SequenceSharding | None] = ContextVar(
    "hp_dtensor.parallel.attention.sharding", default=None
)


@contextlib.contextmanager
def use_sequence_sharding(sharding: SequenceSharding | None) -> Iterator[None]:
    """Set how the inputs of `ContextParallel` models called inside the block are sharded.

    The sharding of packed rows varies from batch to batch, so the code that shards a batch must set it. Recomputation
    in backward uses the sharding of the forward.

    Args:
        sharding: None: the style's own for the length, for rows that are not packed.

    Examples:
        >>> sharding = ContextParallel().sharding(10, 2, positions=np.array([[*range(8), *range(2)]]))
        >>> with use_sequence_sharding(sharding):  # model(sharding.shard(ids, rank), sharding.shard(positions, rank))
        ...     sharding.documents
        ((8, 2),)
    """
    token = _sharding_in_use.set(sharding)
    try:
        yield
    finally:
        _sharding_in_use.reset(token)


class ContextParallel(ParallelStyle):
    """A parallel style: every `attention` inside the module works on a sequence sharded over the mesh.

    So does torch's `scaled_dot_product_attention`, with `is_causal` or without a mask. Other ways to attend are not
    found and see one rank's tokens: `flex_attention`, fused operations of `torch.ops.aten`, kernels of other packages.
    `checkpoint` and the checkpoints of frameworks recompute as in forward; recomputation by other packages' functions
    is not found either.

    The module, which may be an entire model, is given this rank's shard of tokens, targets and positions (see
    `SequenceSharding.shard`); for packed documents the sharding is set by `use_sequence_sharding`. Rotary embeddings
    must be computed from these positions. Everything else in a model works token by token and is unchanged. Parameters
    stay as they are; their gradients are this rank's contribution, to be summed over the mesh, as `hp_fsdp.fully_shard`
    over it does.

    Args:
        method: `"ring"`, `"all_gather"` or `"ulysses"`; see `context_parallel_attention`.
        ulysses_degree: number of ranks that exchange heads; None: all of them for `"ulysses"`, else 1.
        balanced: head and tail chunks, see `SequenceSharding`; None: if the mask is causal.
        length: tokens of the full sequence; None: ranks exchange their numbers of tokens, once per mask, and in
            each call of the framework's own attention, which has none.
        replicated_without_positions: attention with a mask without positions is local, since every rank was given the
            full sequence, as in text generation; so is all of the framework's own attention. False: such sequences are
            sharded too.

    Raises:
        AttentionError: unknown method, or a `ulysses_degree` that contradicts it or does not divide the ranks.

    Examples:
        >>> class SelfAttention(nn.Module):
        ...     def forward(self, x):
        ...         return attention(x, x, x, mask=AttentionMask())
        >>> def program():
        ...     with nn.building(platform):
        ...         model = SelfAttention()
        ...     parallelize_module(model, init_device_mesh("cpu", (2,)), ContextParallel())
        ...     return tuple(model(platform.from_numpy(np.ones((1, 2, 4, 8), "float32"))).shape)
        >>> run_ranks(program, 2)  # of 8 tokens, each rank has 4
        [(1, 2, 4, 8), (1, 2, 4, 8)]
    """

    def __init__(
        self,
        *,
        method: Method = "ring",
        ulysses_degree: int | None = None,
        balanced: bool | None = None,
        length: int | None = None,
        replicated_without_positions: bool = False,
    ) -> None:
        check_method("ContextParallel", method)
        self.method, self.ulysses_degree, self.balanced, self.length = method, ulysses_degree, balanced, length
        self.replicated_without_positions = replicated_without_positions

    def sharding(self, length: int, ranks: int, causal: bool = True, positions: Any = None) -> SequenceSharding:
        """Return the sharding of a sequence of `length` tokens over `ranks`.

        Args:
            positions: int64 array `[batch, length]` of the full rows, see `AttentionMask`. The sharding is then
                balanced within their documents, unless `balanced` is False, and must be set by `use_sequence_sharding`.
                None: it depends on the length only.

        Raises:
            AttentionError: `ulysses_degree` does not divide the ranks, or positions have another length.
        """
        if positions is not None and np.shape(positions)[1:] != (length,):
            raise AttentionError(
                f"ContextParallel.sharding: expected positions [batch, {length}] of the full rows, got shape "
                f"{list(np.shape(positions))}"
            )
        degree = exchanging_ranks("ContextParallel", self.method, self.ulysses_degree, ranks)
        if positions is not None and self.balanced is not False:
            return SequenceSharding.of_positions(
                positions, ranks=ranks, ulysses_degree=degree, even_hops=self.method == "ring"
            )
        balanced = causal if self.balanced is None else self.balanced
        return SequenceSharding(length=length, ranks=ranks, ulysses_degree=degree, balanced=balanced)

    def route(self, device_mesh: DeviceMesh) -> Route:
        """Return the route that makes `attention` context parallel over the mesh.

        It routes the framework's own attention too, unless `replicated_without_positions`.
        """
        if device_mesh.ndim != 1:
            raise AttentionError(f"context parallelism: expected a mesh of one dimension, got {device_mesh!r}")
        self.sharding(0, device_mesh.size())  # raises early if the degree does not divide the ranks

        def attend(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, **options: Any) -> Tensor:
            sharding = self._sharding_of(query, mask, device_mesh)
            # The kernels that this calls on blocks may be the framework's own attention.
            token = routed_attention.set(None)
            try:
                return context_parallel_attention(
                    query, key, value, device_mesh, mask=mask, sharding=sharding, method=self.method, **options
                )
            finally:
                routed_attention.reset(token)

        def is_sharded(mask: AttentionMask) -> bool:
            return mask.positions is not None or not self.replicated_without_positions

        return Route(is_sharded, attend, None if self.replicated_without_positions else device_mesh.platform)

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        platform, routes, route = device_mesh.platform, _Routes(), self.route(device_mesh)

        def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            routes.enter(_routed(route))

        def after(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            routes.leave()

        if device_mesh.size() > 1:
            # `always_call`: the route must be reset if forward raises, or later calls in this thread would be routed.
            platform.add_forward_pre_hook(module, before, prepend=True)
            platform.add_forward_hook(module, after, always_call=True)
        return module

    def _sharding_of(self, query: Tensor, mask: AttentionMask, mesh: DeviceMesh) -> SequenceSharding:
        """Return the sharding set by `use_sequence_sharding`, else the style's own for the sequence's length."""
        own, group = query.shape[2], mesh.group_along()
        in_use = _sharding_in_use.get()
        given: SequenceSharding | None = mask.cached(("sharding", group.ranks), lambda: in_use)
        if mask.positions is None and in_use not in (None, given):
            raise AttentionError(
                f"ContextParallel: a mask without positions was used with {given} and is used again with {in_use}; "
                "expected a new mask for each forward pass"
            )
        if given is not None:
            return given

        def full_length() -> int:
            return sum(int(each) for each in group.all_gather_bytes(str(own).encode()))

        # An explicit length saves the collective below.
        length = self.length
        if length is None:
            length = mask.cached(("length", group.ranks, own), full_length)
        return self.sharding(length, mesh.size(), mask.causal)


class _Routes(threading.local):
    """The module's running forwards in this thread, outermost first."""

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[None]] = []

    def enter(self, routed: AbstractContextManager[None]) -> None:
        routed.__enter__()
        self._entered.append(routed)

    def leave(self) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)


@contextlib.contextmanager
def _routed(route: Route | None) -> Iterator[None]:
    """Route `attention` within the block; None: attend locally."""
    platform = None if route is None else route.platform
    token = routed_attention.set(route)
    try:
        # Again in a recomputation inside the same block: torch's own routing is off while `Tensor.backward` runs.
        with contextlib.nullcontext() if platform is None else platform.route_attention(_frameworks_attention):
            yield
    finally:
        routed_attention.reset(token)


# Backward may recompute after forward's block has ended, and on accelerators it does so in a thread of its own.
restore_in_recomputation(_sharding_in_use, use_sequence_sharding)
restore_in_recomputation(routed_attention, _routed)


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[Tensor] | None = None,
    method: Method = "ring",
    ulysses_degree: int | None = None,
) -> Iterator[None]:
    """Shard buffers along the sequence, and attend over the full sequence within the context, as torch's function does.

    Every `attention`, and on torch every `scaled_dot_product_attention` with `is_causal` or without a mask, works on
    the shards; `ContextParallel` lists what is not found. Ranks have head and tail chunks (see `SequenceSharding`);
    lengths need not be divisible. Call backward inside the context too. Gradients of parameters are this rank's
    contribution, to be summed over the mesh.

    Args:
        mesh: one-dimensional; its ranks share the sequence.
        buffers: plain tensors of the full sequence, equal on all ranks, without gradients: tokens, targets, tables of
            positions. Within the context each has this rank's shard, in memory of its own.
        buffer_seq_dims: the sequence dimension of each buffer.
        no_restore_buffers: those of `buffers` that keep the shard afterwards.
        method, ulysses_degree: as for `ContextParallel`.

    Raises:
        AttentionError: buffers that differ in length, require gradients or have no dimension given; a mask tensor or
            dropout of the framework's attention.

    Examples:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = platform.from_numpy(np.arange(6, dtype="int64")[None])
        ...     with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        ...         own = platform.to_numpy(x).tolist()
        ...     return own, tuple(x.shape)
        >>> run_ranks(program, 2)
        [([[0, 4, 5]], (1, 6)), ([[1, 2, 3]], (1, 6))]
    """
    mesh = require_mesh("context_parallel", mesh)
    platform, given = mesh.platform, _sequence_buffers(mesh.platform, buffers, buffer_seq_dims)
    length = given[0][0].shape[given[0][1]] if given else None
    style = ContextParallel(method=method, ulysses_degree=ulysses_degree, balanced=True, length=length)
    route = style.route(mesh)
    # All shards before the first change, so that an error leaves the buffers as they are.
    sharding = style.sharding(length or 0, mesh.size())
    shards = [sharding.shard(x, mesh.get_local_rank(), dim, platform) for x, dim in given]
    # An alias keeps the full memory: nothing is copied, and views of it are unchanged.
    full = [platform.detach(x) for x, _ in given]
    stays = [*(no_restore_buffers or ())]
    if any(all(x is not y for y, _ in given) for x in stays):
        raise AttentionError("context_parallel: expected only tensors of buffers in no_restore_buffers")
    try:
        for (x, _), shard in zip(given, shards, strict=True):
            platform.set_data(x, shard)
        with _routed(route):
            yield
    finally:
        for (x, _), before in zip(given, full, strict=True):
            if all(x is not y for y in stays):
                platform.set_data(x, before)


def _sequence_buffers(
    platform: Platform, buffers: Sequence[Tensor] | None, dims: Sequence[int] | None
) -> list[tuple[Tensor, int]]:
    """Return each buffer of `context_parallel` with its dimension."""
    listed, dims = list(buffers or ()), list(dims or ())
    problems = []
    if len(dims) != len(listed):
        problems.append(f"expected one of buffer_seq_dims for each of {len(listed)} buffers, got {len(dims)}")
    for index, (x, dim) in enumerate(zip(listed, dims, strict=False)):
        if not isinstance(x, platform.Tensor) or isinstance(x, DTensor):
            problems.append(f"buffer {index}: expected a plain tensor of the full sequence, got {type(x).__name__}")
        elif platform.requires_grad(x):
            problems.append(
                f"buffer {index} requires a gradient; shard it by SequenceSharding.shard, which backward undoes"
            )
        elif not -len(x.shape) <= dim < len(x.shape):
            problems.append(f"buffer {index} of shape {list(x.shape)} has no dimension {dim}")
    if problems:
        raise AttentionError(f"context_parallel: {'; '.join(problems)}")
    return list(zip(listed, dims, strict=True))


def _frameworks_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, is_causal: bool, scale: float | None
) -> Any:
    if routed_attention.get() is None:
        return NotImplemented
    if mask is not None or dropout:
        raise AttentionError(
            "context parallelism: scaled_dot_product_attention with an attn_mask or dropout_p, which are of one rank's "
            "tokens; call hp_dtensor.attention with an AttentionMask (windows, documents) and AttentionDropout"
        )
    return attention(query, key, value, mask=AttentionMask(causal=is_causal), scale=scale)
