"""Attention sinks (gpt-oss, arXiv 2508.10925): one more score per head, which takes its share of the softmax.

It has no value, so that a head may attend to nothing.
"""

from __future__ import annotations

from typing import Any

from hp_dtensor.platform.interface import Platform

Tensor = Any


def with_sinks(platform: Platform, out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention and log-sum-exp with the scores `sinks` `[heads]` added to those of all keys."""
    ops = platform.ops
    of_heads = _per_head(platform, sinks, lse)
    highest = ops.maximum(lse, of_heads)
    total = ops.add(highest, ops.log(ops.add(ops.exp(ops.sub(lse, highest)), ops.exp(ops.sub(of_heads, highest)))))
    return ops.mul(out, ops.unsqueeze(ops.exp(ops.sub(lse, total)), -1)), total


def grad_of_sinks(platform: Platform, grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of `sinks`; `out` and `lse` have them in."""
    ops = platform.ops
    share = ops.exp(ops.sub(_per_head(platform, sinks, lse), lse))
    delta = ops.sum(ops.mul(ops.cast(grad, lse.dtype), ops.cast(out, lse.dtype)), -1)
    return ops.neg(ops.sum(ops.mul(share, delta), (0, 2)))


def _per_head(platform: Platform, sinks: Tensor, lse: Tensor) -> Tensor:
    ops = platform.ops
    return ops.add(ops.reshape(ops.cast(sinks, lse.dtype), (1, sinks.shape[0], 1)), ops.mul(ops.zeros_like(lse), 0.0))
