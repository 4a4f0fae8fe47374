"""`attention`, the one function through which models attend, on plain tensors and DTensors.

It checks its arguments, uses the framework's fused kernel where mask and options are usual ones, and else attends block
by block (`blockwise.py`) as one autograd node (`attention_node`), which context parallelism uses too. The matrix of
scores is never held in full.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from hp_dtensor.comm.saved_tensors import ATTENTION, SavedTensors, saved_result
from hp_dtensor.dispatch.operation import dispatch
from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention.blockwise import Options, attend, attend_grad
from hp_dtensor.parallel.attention.masks import (
    AttentionDropout,
    AttentionMask,
    Plan,
    Tokens,
    local_dropout,
    plan_blocks,
)
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import platform_of_tensor
from hp_dtensor.rules.factors import Dims, Factorization, unsharded
from hp_dtensor.rules.registry import REQUIRED, OpCall, Parameter, Registration
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.tensor.conversions import replicate_like
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import map_tensors

Tensor = Any


def with_sinks(platform: Platform, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention and log-sum-exp with one more score per head, `sinks` `[heads]`, in the softmax.

    Attention sinks (gpt-oss, arXiv 2508.10925) take their share of the softmax but have no value, so that a head may
    attend to nothing. They change the log-sum-exp, and scale the result by exp(lse - new lse).
    """
    ops = platform.ops
    of_heads = _per_head(platform, sinks, lse)
    # The larger of both is subtracted before the exponentials, which cannot overflow then.
    highest = ops.maximum(lse, of_heads)
    total = ops.add(highest, ops.log(ops.add(ops.exp(ops.sub(lse, highest)), ops.exp(ops.sub(of_heads, highest)))))
    return ops.mul(out, ops.unsqueeze(ops.exp(ops.sub(lse, total)), -1)), total


def grad_of_sinks(platform: Platform, grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of `sinks`; `out` and `lse` include them."""
    ops = platform.ops
    # dL/dsink = -P_sink * rowsum(dO * O), summed over batch and queries: a sink has a score but no value, so only the
    # term of the softmax's denominator remains.
    share = ops.exp(ops.sub(_per_head(platform, sinks, lse), lse))
    delta = ops.sum(ops.mul(ops.cast(grad, lse.dtype), ops.cast(out, lse.dtype)), -1)
    return ops.neg(ops.sum(ops.mul(share, delta), (0, 2)))


def _per_head(platform: Platform, sinks: Tensor, lse: Tensor) -> Tensor:
    """Return `sinks` `[heads]` as a score for each query, in shape and dtype of `lse` `[batch, heads, queries]`."""
    ops = platform.ops
    return ops.add(ops.reshape(ops.cast(sinks, lse.dtype), (1, sinks.shape[0], 1)), ops.zeros_like(lse))


def attention_node(
    platform: Platform,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    attend: Callable[..., Sequence[Tensor]],
    attend_grad: Callable[..., Sequence[Tensor]],
) -> Tensor:
    """Return attention as one autograd node, which saves its inputs, the result and log-sum-exps.

    Args:
        attend: called with queries, keys and values; returns attention and its log-sum-exp without sinks, then further
            tensors to save.
        attend_grad: called with the gradient, queries, keys, values, the result, its log-sum-exp, and the further saved
            tensors; returns the gradients of queries, keys and values.
    """
    # A list, because backward is defined before forward has run. SavedTensors checks versions: inputs may not be
    # written in place before backward.
    saved: list[SavedTensors] = []
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)

    def forward(q: Tensor, k: Tensor, v: Tensor, *s: Tensor) -> Tensor:
        # Under `checkpoint(save=["attention"])` recomputation takes this result from forward, and only the node is made
        # again.
        out, lse, *more = saved_result(ATTENTION, lambda: attend(q, k, v))
        if s:
            out, lse = with_sinks(platform, out, lse, s[0])
        # Cast after the sinks, which are applied in the accumulator's precision.
        out = platform.ops.cast(out, q.dtype)
        saved[:] = [SavedTensors(platform, q, k, v, *s, out, lse, *more)]
        return out

    def backward(grad: Tensor) -> list[Tensor]:
        tensors = saved[0].tensors
        given, (out, lse, *more) = tensors[: len(inputs)], tensors[len(inputs) :]
        q, k, v, *s = given
        grads = list(attend_grad(grad, q, k, v, out, lse, *more))
        if s:
            grads.append(grad_of_sinks(platform, grad, out, lse, s[0]))
        return [platform.ops.cast(g, x.dtype) for g, x in zip(grads, given, strict=True)]

    return platform.custom_function(forward, backward, *inputs)


class Settings(NamedTuple):
    """The arguments of a call of `attention` besides queries, keys and values."""

    mask: AttentionMask
    scale: float
    soft_cap: float | None
    sinks: Tensor | None
    dropout: AttentionDropout | None


NAME = "hp_dtensor.attention"


def dispatch_attention(
    local: Callable[[Tensor, Tensor, Tensor, Settings], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    settings: Settings,
) -> Tensor:
    """Call `local` on plain tensors. DTensors are redistributed to placements that allow it on shards."""
    mask, _, _, sinks, dropout = settings
    # Any of the inputs may be the DTensor; it determines mesh and platform.
    first = next((x for x in (query, key, value, sinks) if isinstance(x, DTensor)), None)
    if first is None:
        return local(query, key, value, settings)
    _register()
    platform, batch = first.device_mesh.platform, query.shape[0]
    # Positions, seeds of rows and indices of heads become DTensors, so that they are sharded as batch and heads are.
    positions, seeds, heads = mask.positions, None, None
    if positions is not None:
        is_tensor = isinstance(positions, (DTensor, platform.Tensor))
        positions = replicate_like(positions if is_tensor else platform.from_numpy(positions), first)
    if dropout is not None and dropout.p != 0:
        numbers = dropout.rows(platform, batch), dropout.numbers(platform, query.shape[1])
        seeds, heads = (replicate_like(platform.from_numpy(np.ascontiguousarray(x, np.int64)), first) for x in numbers)

    def run(*args: Any) -> Tensor:
        q, k, v, rows, own_sinks, own_seeds, own_heads = map_tensors(args, DTensor, platform.unwrap)
        # Where the batch is sharded, the mask needs the positions of the local rows only.
        own = mask if rows is None or rows.shape[0] == batch else mask.of_rows(rows)
        own_dropout = None if dropout is None or seeds is None else AttentionDropout(dropout.p, own_seeds, own_heads)
        return local(q, k, v, settings._replace(mask=own, sinks=own_sinks, dropout=own_dropout))

    return dispatch(platform, NAME, run, (query, key, value, positions, sinks, seeds, heads), {})


@functools.cache
def _register() -> None:
    names = ("query", "key", "value", "positions", "sinks", "seeds", "heads")
    optional = {"positions", "sinks", "seeds", "heads"}
    parameters = tuple(Parameter(name, None if name in optional else REQUIRED) for name in names)
    # Registered once, at the first call with DTensors.
    rule_registry().add(NAME, Registration(_sharding_rule, parameters, by_type=True, own=True), NAME)


def _sharding_rule(call: OpCall) -> Factorization:
    """Return the sharding rule of attention: batch and key-value heads may be sharded, all else is gathered."""
    query, key, value = (spec.shape for spec in call.tensors[:3])
    groups = query[1] // max(key[1], 1)
    # As an Einstein factorization: batch and heads are the only factors that occur in all inputs and the output; those
    # of the score matrix and of the widths must not be sharded.
    sizes = {"batch": query[0], "heads": key[1], "group": groups, "q": query[2], "k": key[2]}
    sizes |= {"width": query[3], "out": value[3]}
    # Query heads are the product of key-value heads and groups, so that sharding key-value heads shards query heads
    # alike.
    heads = ("heads",) if groups == 1 else ("heads", "group")
    if groups == 1:
        del sizes["group"]
    inputs: tuple[Dims, ...] = (
        (("batch",), heads, ("q",), ("width",)),
        (("batch",), ("heads",), ("k",), ("width",)),
        (("batch",), ("heads",), ("k",), ("out",)),
    )
    if call["positions"] is not None:
        inputs = (*inputs, (("batch",), ("k",)))
    if call["sinks"] is not None:
        inputs = (*inputs, (heads,))
    if call["seeds"] is not None:
        inputs = (*inputs, (("batch",),), (heads,))
    fixed = frozenset({"q", "k", "width", "out"})
    return Factorization(inputs, ((("batch",), heads, ("q",), ("out",)),), sizes, limits=unsharded(fixed))


class Route(NamedTuple):
    """The context parallelism that `attention` is part of.

    Attributes:
        takes: function that returns whether attention with a mask is routed.
        attend: replaces `attention` with such a mask.
        platform: the platform whose framework's attention is routed too, if any.
    """

    takes: Callable[[AttentionMask], bool]
    attend: Callable[..., Tensor]
    platform: Platform | None


routed_attention: ContextVar[Route | None] = ContextVar("hp_dtensor.parallel.attention.route", default=None)
"""Set inside a `ContextParallel` module."""
TILE = 512
"""Maximum queries and keys of a block whose scores are held as a matrix."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: AttentionMask,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Return scaled dot-product attention `[batch, heads, queries, value width]`, in the queries' dtype.

    The matrix of scores is never held in full, neither in forward nor in backward: the framework's fused kernels are
    used where possible, else blocks are merged by log-sum-exp in float32. Inside a `ContextParallel` module the tensors
    are this rank's shard of a sequence, and this is `context_parallel_attention`.

    Args:
        query: `[batch, heads, queries, head_dim]`, floating-point; plain, or a DTensor: sharded over batch or heads it
            is used as it is, other shardings are gathered.
        key: `[batch, key-value heads, keys, head_dim]`; query head h reads key-value head
            `h // (heads / key-value heads)`.
        value: `[batch, key-value heads, keys, value width]`.
        mask: the keys that each query sees.
        scale: factor on the products of queries and keys; None: 1 / sqrt(head_dim).
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`, as in Gemma 2 (arXiv 2408.00118).
        sinks: `[heads]`, one more score per head that takes part in the softmax and has no value, as in gpt-oss
            (arXiv 2508.10925).
        dropout: dropout of softmax entries, the same ones for any sharding. Fused kernels do not support it, so blocks
            that hold their scores are used. None: no dropout, as in evaluation.

    Raises:
        AttentionError: shapes, mask or options that do not fit together.

    Examples:
        >>> q = platform.from_numpy(np.ones((1, 4, 3, 8), "float32"))
        >>> k = v = platform.from_numpy(np.ones((1, 2, 3, 8), "float32"))
        >>> tuple(attention(q, k, v, mask=AttentionMask()).shape)
        (1, 4, 3, 8)
    """
    settings = checked_settings(query, key, value, mask, scale, soft_cap, sinks, dropout)
    # Inside a ContextParallel module the tensors are shards, so the module's attention is called instead.
    route = routed_attention.get()
    if route is not None and route.takes(mask):
        return route.attend(query, key, value, mask=mask, scale=scale, soft_cap=soft_cap, sinks=sinks, dropout=dropout)
    return dispatch_attention(local_attention, query, key, value, settings)


def checked_settings(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    scale: float | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    dropout: AttentionDropout | None,
) -> Settings:
    """Return the settings of a call, with the default scale filled in.

    Raises:
        AttentionError: tensors, mask and options do not fit together; see `attention`.
    """
    q, k, v = (tuple(x.shape) for x in (query, key, value))
    problems = []
    if not isinstance(mask, AttentionMask):
        raise AttentionError(f"attention: mask must be an AttentionMask, got {type(mask).__name__}")
    if not isinstance(dropout, (AttentionDropout, type(None))):
        raise AttentionError(f"attention: dropout must be None or an AttentionDropout(p, seed), got {dropout!r}")
    if {len(q), len(k), len(v)} != {4}:
        raise AttentionError(
            f"attention takes [batch, heads, length, head_dim], got query {list(q)}, key {list(k)}, value {list(v)}"
        )
    if not q[0] == k[0] == v[0] or k[1:3] != v[1:3] or q[3] != k[3]:
        problems.append(f"query {list(q)}, key {list(k)} and value {list(v)} do not fit each other")
    if (k[1] == 0) != (q[1] == 0) or (k[1] and q[1] % k[1]):
        problems.append(f"{q[1]} query heads cannot share {k[1]} key-value heads equally")
    if (mask.causal or mask.window or mask.positions is not None) and q[2] > k[2]:
        problems.append(f"{q[2]} queries are more than {k[2]} keys, whose last ones they are under this mask")
    if mask.positions is not None and tuple(mask.positions.shape) != (k[0], k[2]):
        problems.append(f"the mask's positions {list(mask.positions.shape)} must be [batch, keys] {[k[0], k[2]]}")
    if soft_cap is not None and not soft_cap > 0:
        problems.append(f"soft_cap must be None or above 0, got {soft_cap!r}")
    if sinks is not None and tuple(sinks.shape) != (q[1],):
        problems.append(f"sinks {list(sinks.shape)} must be [heads] {[q[1]]}")
    if problems:
        raise AttentionError(f"attention: {'; '.join(problems)}")
    scale = 1.0 / math.sqrt(max(q[3], 1)) if scale is None else float(scale)
    return Settings(mask, scale, soft_cap, sinks, dropout)


def local_attention(query: Tensor, key: Tensor, value: Tensor, settings: Settings) -> Tensor:
    """Return `attention` of plain tensors."""
    mask, scale, soft_cap, sinks, dropout = settings
    platform = platform_of_tensor(query)
    queries, keys = query.shape[2], key.shape[2]
    documents = mask.documents(platform)
    # A window that covers the sequence masks nothing, and would prevent the fused kernel.
    window = mask.window if mask.window is not None and mask.window < keys else None
    # A single query is the last token, and sees all keys.
    causal = mask.causal and queries > 1
    indices = np.arange(keys - queries, keys), np.arange(keys)
    dropped = local_dropout(platform, dropout, query, *indices)
    # The framework's fused attention supports none of these.
    plain = documents is None and window is None and soft_cap is None and sinks is None and dropped is None
    # `ops.scaled_dot_product_attention` has no scale argument; it uses 1 / sqrt(head_dim).
    is_usual = math.isclose(scale, 1.0 / math.sqrt(max(query.shape[3], 1)), rel_tol=1e-9)
    # Without a fused kernel the framework would hold all scores, which is accepted only up to the size of one block.
    fits = platform.has_fused_attention(query, value) or queries * keys <= TILE * TILE
    if plain and is_usual and fits and (not causal or queries == keys):
        shared = query.shape[1] != key.shape[1]
        return platform.ops.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=shared)
    options = Options(scale, soft_cap, mask.causal, window, dropped)
    tile = tile_of(platform, query, value, options)
    # Layers share a mask, so the plan is made once per forward.
    cached = ("plan", queries, keys, window, tile)

    def make_plan() -> Plan:
        of_queries = None if documents is None else documents[:, keys - queries :]
        tokens = Tokens(indices[0], of_queries), Tokens(indices[1], documents)
        return plan_blocks(*tokens, mask.causal, window, tile)

    plan = mask.cached(cached, make_plan)
    return blockwise(platform, query, key, value, sinks, plan, options)


def tile_of(platform: Platform, query: Tensor, value: Tensor, options: Options) -> int | None:
    """Return the maximum queries and keys of a block; None if its kernel holds no matrix of scores."""
    can_be_fused = options.soft_cap is None and options.dropout is None
    return None if can_be_fused and platform.has_fused_blocks(query, value) else TILE


def blockwise(
    platform: Platform, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, plan: Plan, options: Options
) -> Tensor:
    """Return attention over the blocks of a plan, as one autograd node."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attend(platform, q, k, v, plan, options)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return attend_grad(platform, grad, q, k, v, out, lse, plan, options)

    return attention_node(platform, query, key, value, sinks, forward, backward)
