"""The autograd node of attention, whichever ranks hold the keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hp_dtensor.comm.saved_tensors import ATTENTION, Kept, kept_result
from hp_dtensor.parallel.attention.sinks import grad_of_sinks, with_sinks
from hp_dtensor.platform.interface import Platform

Tensor = Any


def attention_node(
    platform: Platform,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    attend: Callable[..., Sequence[Tensor]],
    attend_grad: Callable[..., Sequence[Tensor]],
) -> Tensor:
    """Attend as one autograd node, which keeps its inputs, the result and log-sum-exps.

    Args:
        attend: called with queries, keys and values; returns attention and its log-sum-exp without sinks, then what
            else is to be kept.
        attend_grad: called with the gradient, queries, keys, values, the result, its log-sum-exp, and what else was
            kept; returns the gradients of queries, keys and values.
    """
    kept: list[Kept] = []
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)

    def forward(q: Tensor, k: Tensor, v: Tensor, *s: Tensor) -> Tensor:
        out, lse, *more = kept_result(ATTENTION, lambda: attend(q, k, v))
        if s:
            out, lse = with_sinks(platform, out, lse, s[0])
        out = platform.ops.cast(out, q.dtype)
        kept[:] = [Kept(platform, q, k, v, *s, out, lse, *more)]
        return out

    def backward(grad: Tensor) -> list[Tensor]:
        tensors = kept[0].tensors
        given, (out, lse, *more) = tensors[: len(inputs)], tensors[len(inputs) :]
        q, k, v, *s = given
        grads = list(attend_grad(grad, q, k, v, out, lse, *more))
        if s:
            grads.append(grad_of_sinks(platform, grad, out, lse, s[0]))
        return [platform.ops.cast(g, x.dtype) for g, x in zip(grads, given, strict=True)]

    return platform.custom_function(forward, backward, *inputs)
