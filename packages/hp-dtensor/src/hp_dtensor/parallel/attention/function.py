"""`attention`: the one function through which models attend, on plain tensors and on DTensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from hp_dtensor.exceptions import AttentionError
from hp_dtensor.parallel.attention.autograd_node import attention_node
from hp_dtensor.parallel.attention.blocks import Plan, plan_blocks
from hp_dtensor.parallel.attention.distributed import attention_of_dtensors
from hp_dtensor.parallel.attention.dropout import AttentionDropout, placed
from hp_dtensor.parallel.attention.mask import AttentionMask, Tokens
from hp_dtensor.parallel.attention.products import Options, attend, attend_grad
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import platform_of_tensor
from hp_dtensor.tensor.dtensor import DTensor

Tensor = Any
Route = tuple[Callable[[AttentionMask], bool], Callable[..., Tensor]]
routed_attention: ContextVar[Route | None] = ContextVar("hp_dtensor.parallel.attention.route", default=None)
"""Set inside a module whose attention is not this rank's own affair: for which masks, and what attends instead."""
TILE = 512
"""Most queries and keys of a block whose scores are held as a matrix."""


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

    The matrix of scores is never held whole, neither in forward nor in backward: the framework's fused kernels are
    taken where they can be, else blocks are merged by their log-sum-exp in float32. Inside a `ContextParallel` module
    the tensors are this rank's part of a sequence, and this is `context_parallel_attention`.

    Args:
        query: `[batch, heads, queries, head_dim]`, floating; plain, or a DTensor: cut over batch or heads it is
            computed as it lies, other cuts are gathered.
        key: `[batch, key-value heads, keys, head_dim]`; query head h reads key-value head
            `h // (heads / key-value heads)`.
        value: `[batch, key-value heads, keys, value width]`.
        mask: the keys that each query sees.
        scale: factor on the products of queries and keys; None: 1 / sqrt(head_dim).
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`, as in Gemma 2 (arXiv 2408.00118).
        sinks: `[heads]`, one more score per head that takes its share of the softmax and has no value, as in gpt-oss
            (arXiv 2508.10925).
        dropout: entries of the softmax that are dropped, the same ones on any ranks; the framework's fused kernels do
            not know of places, so blocks are computed that hold their scores. None: none, as in evaluation.

    Raises:
        AttentionError: shapes, mask or options that do not fit each other.

    Example:
        >>> q = platform.from_numpy(np.ones((1, 4, 3, 8), "float32"))
        >>> k = v = platform.from_numpy(np.ones((1, 2, 3, 8), "float32"))
        >>> tuple(attention(q, k, v, mask=AttentionMask()).shape)
        (1, 4, 3, 8)
    """
    check_inputs(query, key, value, mask, soft_cap, sinks, dropout)
    route = routed_attention.get()
    if route is not None and route[0](mask):
        return route[1](query, key, value, mask=mask, scale=scale, soft_cap=soft_cap, sinks=sinks, dropout=dropout)
    scale = 1.0 / math.sqrt(max(query.shape[3], 1)) if scale is None else float(scale)
    if any(isinstance(x, DTensor) for x in (query, key, value, sinks)):
        return attention_of_dtensors(local_attention, query, key, value, mask, scale, soft_cap, sinks, dropout)
    return local_attention(query, key, value, mask, scale, soft_cap, sinks, dropout)


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    soft_cap: float | None,
    sinks: Tensor | None,
    dropout: AttentionDropout | None,
) -> None:
    """Refuse tensors, a mask or options that do not fit each other; see `attention`."""
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


def local_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Compute `attention` of plain tensors."""
    platform = platform_of_tensor(query)
    queries, keys = query.shape[2], key.shape[2]
    documents = mask.documents(platform)
    window = mask.window if mask.window is not None and mask.window < keys else None
    causal = mask.causal and queries > 1
    places = np.arange(keys - queries, keys), np.arange(keys)
    dropped = placed(platform, dropout, query, *places)
    plain = documents is None and window is None and soft_cap is None and sinks is None and dropped is None
    is_usual = math.isclose(scale, 1.0 / math.sqrt(max(query.shape[3], 1)), rel_tol=1e-9)
    fits = platform.has_fused_attention(query, value) or queries * keys <= TILE * TILE
    if plain and is_usual and fits and (not causal or queries == keys):
        shared = query.shape[1] != key.shape[1]
        return platform.ops.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=shared)
    options = Options(scale, soft_cap, mask.causal, window, dropped)
    tile = tile_of(platform, query, value, options)
    remembered = ("plan", queries, keys, window, tile)
    plan = mask.remembered(remembered, lambda: _local_plan(mask, documents, window, queries, keys, tile))
    return blockwise(platform, query, key, value, sinks, plan, options)


def tile_of(platform: Platform, query: Tensor, value: Tensor, options: Options) -> int | None:
    """Return the most queries and keys of a block; None where kernels hold no matrix of scores."""
    can_be_fused = options.soft_cap is None and options.dropout is None
    return None if can_be_fused and platform.has_fused_blocks(query, value) else TILE


def _local_plan(
    mask: AttentionMask, documents: Any, window: int | None, queries: int, keys: int, tile: int | None
) -> Plan:
    of_queries = None if documents is None else documents[:, keys - queries :]
    return plan_blocks(
        Tokens(np.arange(keys - queries, keys), of_queries),
        Tokens(np.arange(keys), documents),
        mask.causal,
        window,
        tile,
    )


def blockwise(
    platform: Platform, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, plan: Plan, options: Options
) -> Tensor:
    """Attend over the blocks of a plan as one autograd node."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attend(platform, q, k, v, plan, options)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return attend_grad(platform, grad, q, k, v, out, lse, plan, options)

    return attention_node(platform, query, key, value, sinks, forward, backward)
