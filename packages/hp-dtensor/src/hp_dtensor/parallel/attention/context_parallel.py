"""`context_parallel_attention`: attention of a sequence that ranks share, by the exchange of heads, keys or both.

`ContextParallel`: the style under which an attention module works on this rank's part of a sequence.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh, require_mesh
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.saved_tensors import saved_value
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention.all_gather import gathering_attention, plan_gather
from hp_dtensor.parallel.attention.attention import (
    attention_of_dtensors,
    check_inputs,
    local_attention,
    routed_attention,
    tile_of,
)
from hp_dtensor.parallel.attention.blockwise import Options
from hp_dtensor.parallel.attention.masks import AttentionDropout, AttentionMask, Tokens, placed
from hp_dtensor.parallel.attention.ring import plan_ring, ring_attention
from hp_dtensor.parallel.attention.sharding import SequenceSharding, positions_of_all
from hp_dtensor.parallel.attention.ulysses import HeadShares, heads_for_sequence, sequence_for_heads
from hp_dtensor.parallel.parallelize_module import ParallelStyle
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any
Method = Literal["ring", "all_gather"]
METHODS = ("ring", "all_gather")


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    device_mesh: DeviceMesh,
    *,
    mask: AttentionMask,
    cut: SequenceSharding | None = None,
    method: Method = "ring",
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Return `attention` of a sequence that the ranks of a mesh share, `[batch, heads, own tokens, value width]`.

    Of the ranks, `cut.ulysses_degree` exchange heads for tokens; among the others keys and values travel. The result,
    and the gradients, are those of one device, whatever the lengths, heads and key-value heads: nothing needs to
    divide.

    Args:
        query, key, value: as of `attention`, with this rank's tokens; plain, or DTensors of another mesh that are cut
            over batch or heads (tensor parallel ones).
        device_mesh: of one dimension; its ranks share the sequence.
        mask: with this rank's positions, if any.
        cut: the tokens of each rank; None: equally many, head and tail chunks if the mask is causal.
        method: `"ring"`: keys and values go around, each hop while the rank computes; `"all_gather"`: those that are
            seen are gathered before. It means nothing where all ranks exchange heads.
        scale, soft_cap, sinks, dropout: as of `attention`; sinks are those of all heads, and `dropout` is the same on
            all of these ranks.

    Raises:
        AttentionError: what does not fit; a method that there is not; positions that are not those of the cut.

    Example:
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     q = k = v = platform.from_numpy(np.ones((1, 4, 6, 8), "float32"))
        ...     return tuple(context_parallel_attention(q, k, v, mesh, mask=AttentionMask()).shape)
        >>> run_ranks(program, 2)  # of 12 tokens, each rank has 6
        [(1, 4, 6, 8), (1, 4, 6, 8)]
    """
    check_inputs(query, key, value, mask, soft_cap, sinks, dropout)
    mesh = require_mesh("context_parallel_attention", device_mesh)
    job = _Job.of(query, key, mesh, mask, cut, method)
    scale = 1.0 / math.sqrt(max(query.shape[3], 1)) if scale is None else float(scale)
    if any(isinstance(x, DTensor) for x in (query, key, value, sinks)):
        return attention_of_dtensors(job.attention, query, key, value, mask, scale, soft_cap, sinks, dropout)
    return job.attention(query, key, value, mask, scale, soft_cap, sinks, dropout)


def check_method(what: str, method: str) -> None:
    """Refuse a method that there is not."""
    if method not in METHODS:
        hint = ": heads are exchanged among the cut's ulysses_degree ranks, which may be all" * (method == "ulysses")
        raise AttentionError(f"{what}: method must be one of {METHODS}, got {method!r}{hint}")


@dataclass(frozen=True)
class _Job:
    """One call's ranks: the group of all, and how they share the sequence."""

    platform: Platform
    group: ProcessGroup
    mesh: DeviceMesh
    cut: SequenceSharding
    method: str

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        mesh: DeviceMesh,
        mask: AttentionMask,
        cut: SequenceSharding | None,
        method: str,
    ) -> _Job:
        if mesh.ndim != 1:
            raise AttentionError(f"context_parallel_attention takes a mesh of one dimension, got {mesh!r}")
        check_method("context_parallel_attention", method)
        size, own = mesh.size(), query.shape[2]
        if cut is None:
            cut = SequenceSharding(length=own * size, ranks=size, balanced=mask.causal)
        group = mesh.get_group()
        expected = cut.places(group.rank).size if cut.ranks == size else None
        if cut.ranks != size or expected != own or key.shape[2] != own:
            raise AttentionError(
                f"context_parallel_attention: rank {group.rank} of {size} has {own} queries and {key.shape[2]} keys; "
                f"{cut} gives it {expected if expected is not None else 'nothing'}: every rank takes its part of the "
                "whole batch, by the cut's take"
            )
        return cls(mesh.platform, group, mesh, cut, method)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: AttentionMask,
        scale: float,
        soft_cap: float | None,
        sinks: Tensor | None,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        """Attend with plain tensors, of the heads and rows that this rank has."""
        mask = mask.remembered(("whole", self.group.ranks, self.cut), lambda: self._whole(mask))
        window = mask.window if mask.window is not None and mask.window < self.cut.length else None
        options = Options(scale, soft_cap, mask.causal, window)
        if dropout is not None:  # resolved before heads are exchanged: it knows the numbers of all
            numbers = dropout.numbers(self.platform, query.shape[1])
            dropout = AttentionDropout(dropout.p, dropout.rows(self.platform, query.shape[0]), numbers)
        degree = self.cut.ulysses_degree
        if degree == 1:
            return self._among_ring(query, key, value, sinks, mask, options, dropout)
        ring, within = divmod(self.group.rank, degree)
        neighbours = self._subgroup(range(ring * degree, (ring + 1) * degree))
        lengths = [self.cut.places(ring * degree + u).size for u in range(degree)]
        shares = HeadShares.of(query.shape[1], key.shape[1], degree)
        q, k, v = heads_for_sequence(self.platform, (query, key, value), neighbours, shares, lengths)
        expansion = shares.expansion(within)
        if expansion is not None:
            index = self.platform.from_numpy(np.array(expansion, np.int64))
            k, v = (self.platform.ops.index_select(x, 1, index) for x in (k, v))
        first, last = shares.queries[within]
        # Each rank's gradient of the sinks is its contribution, here that of its heads.
        own_sinks = None if sinks is None else self.platform.ops.narrow(sinks, 0, first, last - first)
        own_dropout = None
        if dropout is not None:
            own_dropout = AttentionDropout(dropout.p, dropout.seed, dropout.heads[first:last])
        out = self._among_ring(q, k, v, own_sinks, mask, options, own_dropout)
        return sequence_for_heads(self.platform, out, neighbours, shares, lengths)

    def _among_ring(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: AttentionMask,
        options: Options,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        """Attend with the tokens of this rank's Ulysses group, and those of the others on its ring."""
        size, degree = self.cut.ring_size, self.cut.ulysses_degree
        if q.shape[1] == 0:
            return _without_heads(self.platform, q, v)
        if size == 1:
            return local_attention(q, k, v, mask, options.scale, options.soft_cap, sinks, dropout)
        ring, within = divmod(self.group.rank, degree)
        places = self.cut.ring_places(ring)
        options = replace(options, dropout=placed(self.platform, dropout, q, places, places))
        tile = tile_of(self.platform, q, v, options)
        group = self._subgroup(range(within, self.cut.ranks, degree))
        run = ring_attention if self.method == "ring" else gathering_attention
        return run(self.platform, q, k, v, sinks, group, self._plan(ring, mask, options, tile), options)

    def _plan(self, ring: int, mask: AttentionMask, options: Options, tile: int | None) -> Any:
        """Return the plan of the ring's member `ring`, which is found once, or once per mask if it has documents."""
        make, documents = _PLANS[self.method], mask.documents(self.platform)
        if documents is None:
            return _plan_without_documents(make, self.cut, ring, options.causal, options.window, tile)

        def find() -> Any:
            places = [self.cut.ring_places(each) for each in range(self.cut.ring_size)]
            tokens = [Tokens(each, documents[:, each]) for each in places]
            return make(tokens, ring, options.causal, options.window, tile)

        return mask.remembered((self.method, self.cut, ring, tile), find)

    def _whole(self, mask: AttentionMask) -> AttentionMask:
        """Return the mask of the whole sequence, of which `mask` has this rank's positions."""
        return AttentionMask(mask.causal, mask.window, positions_of_all(self.platform, self.group, self.cut, mask))

    def _subgroup(self, ranks: range) -> ProcessGroup:
        if len(ranks) == self.group.size:
            return self.group
        return self.mesh.world.group([self.group.ranks[rank] for rank in ranks])


_PLANS: dict[str, Callable[..., Any]] = {"ring": plan_ring, "all_gather": plan_gather}


# A plan holds the place of every token, 8 MiB for each million: few lengths at a time.
@functools.lru_cache(maxsize=64)
def _plan_without_documents(
    make: Callable[..., Any], cut: SequenceSharding, ring: int, causal: bool, window: int | None, tile: int | None
) -> Any:
    """Return `make`'s plan of sequences that are one document each: the same in every step."""
    return make([Tokens(cut.ring_places(each)) for each in range(cut.ring_size)], ring, causal, window, tile)


def _without_heads(platform: Platform, q: Tensor, v: Tensor) -> Tensor:
    """Return the result of a rank that has no heads, in the graph, so that its backward takes part in exchanges."""
    return platform.ops.reshape(q, (*q.shape[:3], v.shape[3]))


Module = Any
_cut_in_use: ContextVar[SequenceSharding | None] = ContextVar("hp_dtensor.parallel.attention.sharding", default=None)


@contextlib.contextmanager
def use_sequence_sharding(cut: SequenceSharding | None) -> Iterator[None]:
    """Have models with `ContextParallel` that are called inside take their inputs as parts by `cut`.

    Rows of packed documents are cut differently from batch to batch, so that whoever cuts a batch says how. What is
    computed again in backward is computed with the cut of its forward.

    Args:
        cut: None: the style's own for a length, of rows that are not packed.

    Example:
        >>> cut = ContextParallel().cut(10, 2, positions=np.array([[*range(8), *range(2)]]))
        >>> with use_sequence_sharding(cut):  # model(cut.take(ids, rank), cut.take(positions, rank))
        ...     cut.documents
        ((8, 2),)
    """
    token = _cut_in_use.set(cut)
    try:
        yield
    finally:
        _cut_in_use.reset(token)


class ContextParallel(ParallelStyle):
    """Have every `attention` inside a module be that of a sequence which the ranks of the mesh share.

    The module, a whole model too, is given this rank's part of the sequence: tokens, targets and positions, as
    `SequenceSharding.take` gives them; that of packed documents is set by
    `use_sequence_sharding`. Rotary angles must come from these
    positions. All else in a model works token by token and is not changed. Parameters stay as they are; their gradients
    are this rank's contribution, to be summed over the mesh (`hp_fsdp.fully_shard` over it does).

    Args:
        method: `"ring"` or `"all_gather"`; see `context_parallel_attention`.
        ulysses_degree: ranks that exchange heads.
        balanced: head and tail chunks, see `SequenceSharding`; None: if the mask is causal.
        length: tokens of the whole sequence; None: the ranks exchange how many they have, once per mask.
        whole_without_positions: where a mask has no positions, every rank was given the whole sequence and attends by
            itself, as in generating text; False: such a sequence is cut too.

    Raises:
        AttentionError: no such method.

    Example:
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
        ulysses_degree: int = 1,
        balanced: bool | None = None,
        length: int | None = None,
        whole_without_positions: bool = False,
    ) -> None:
        check_method("ContextParallel", method)
        self.method, self.ulysses_degree, self.balanced, self.length = method, ulysses_degree, balanced, length
        self.whole_without_positions = whole_without_positions

    def cut(self, length: int, ranks: int, causal: bool = True, positions: Any = None) -> SequenceSharding:
        """Return the tokens of each rank for a sequence of `length`.

        Args:
            positions: int64 array `[batch, length]` of the whole rows, see `AttentionMask`: the cut is balanced within
                their documents, unless `balanced` is False, and is set by
                `use_sequence_sharding`; None: by the length alone.

        Raises:
            AttentionError: `ulysses_degree` does not divide the ranks, or positions of another length.
        """
        if positions is not None and np.shape(positions)[1:] != (length,):
            raise AttentionError(
                f"ContextParallel.cut: positions of shape {list(np.shape(positions))}; expected [batch, {length}], "
                "those of whole rows"
            )
        if positions is not None and self.balanced is not False:
            return SequenceSharding.of_positions(
                positions, ranks=ranks, ulysses_degree=self.ulysses_degree, even_hops=self.method == "ring"
            )
        balanced = causal if self.balanced is None else self.balanced
        return SequenceSharding(length=length, ranks=ranks, ulysses_degree=self.ulysses_degree, balanced=balanced)

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        platform, routes = device_mesh.platform, _Routes()
        self.cut(0, device_mesh.size())  # refuses a degree that does not divide the ranks

        def attend(query: Tensor, key: Tensor, value: Tensor, *, mask: AttentionMask, **options: Any) -> Tensor:
            cut = self._cut_of(query, mask, device_mesh)
            return context_parallel_attention(
                query, key, value, device_mesh, mask=mask, cut=cut, method=self.method, **options
            )

        def is_cut(mask: AttentionMask) -> bool:
            return mask.positions is not None or not self.whole_without_positions

        def before(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            routes.enter((is_cut, attend))

        def after(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            routes.leave()

        if device_mesh.size() > 1:
            platform.add_forward_pre_hook(module, before, prepend=True)
            platform.add_forward_hook(module, after, always_call=True)
        return module

    def _cut_of(self, query: Tensor, mask: AttentionMask, mesh: DeviceMesh) -> SequenceSharding:
        own, group = query.shape[2], mesh.get_group()
        # Backward may compute this again, after the `with` of the cut: `checkpoint` has kept it, and so has the mask
        # where another one repeats (torch's) or the mask was made outside of what is repeated.
        in_use = saved_value(_cut_in_use.get)
        given: SequenceSharding | None = mask.remembered(("cut", group.ranks), lambda: in_use)
        if mask.positions is None and in_use not in (None, given):
            raise AttentionError(
                f"ContextParallel: a mask without positions was used with the cut {given}, and is used again within "
                f"`use_sequence_sharding` of {in_use}; expected a mask of its own for each forward pass"
            )
        if given is not None:
            return given

        def whole_length() -> int:
            return sum(int(each) for each in group.all_gather_bytes(str(own).encode()))

        length = self.length
        if length is None:
            length = mask.remembered(("length", group.ranks, own), whole_length)
        return self.cut(length, mesh.size(), mask.causal)


class _Routes(threading.local):
    """Forwards of the module that this thread has begun, outermost first."""

    def __init__(self) -> None:
        self._tokens: list[Token[Any]] = []

    def enter(self, route: Any) -> None:
        self._tokens.append(routed_attention.set(route))

    def leave(self) -> None:
        if self._tokens:
            routed_attention.reset(self._tokens.pop())
