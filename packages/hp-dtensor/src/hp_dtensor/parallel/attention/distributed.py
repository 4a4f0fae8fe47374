"""Attention of DTensors: batch and key-value heads may be cut, everything else is made whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hp_dtensor.dispatch.dispatch import dispatch
from hp_dtensor.parallel.attention.dropout import AttentionDropout
from hp_dtensor.parallel.attention.mask import AttentionMask
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.rules.factors import Dims, Factorization, uncut
from hp_dtensor.rules.registry import REQUIRED, OpCall, Parameter, Registration
from hp_dtensor.rules.tables import rule_registry
from hp_dtensor.tensor.conversions import replicate_like
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.trees import map_tensors

Tensor = Any
NAME = "hp_dtensor.attention"


def attention_of_dtensors(
    local: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
    dropout: AttentionDropout | None,
) -> Tensor:
    """Run `local` on the parts that each rank has, after bringing inputs to placements in which that is right."""
    _register()
    first = next(x for x in (query, key, value, sinks) if isinstance(x, DTensor))
    platform, batch = first.device_mesh.platform, query.shape[0]
    positions = _positions(mask, first)

    p = 0.0 if dropout is None else dropout.p
    numbers = _numbers(platform, dropout, query, first)

    def run(*args: Any) -> Tensor:
        q, k, v, rows, own_sinks, seeds, heads = map_tensors(args, DTensor, platform.unwrap)
        own = mask if rows is None or rows.shape[0] == batch else mask.of_rows(rows)
        own_dropout = None if seeds is None else AttentionDropout(p, seeds, heads)
        return local(q, k, v, own, scale, soft_cap, own_sinks, own_dropout)

    return dispatch(platform, NAME, run, (query, key, value, positions, sinks, *numbers), {})


def _positions(mask: AttentionMask, like: DTensor) -> Tensor | None:
    """Return the mask's positions as a DTensor, so that a cut batch cuts them too."""
    if mask.positions is None:
        return None
    platform = get_platform(like.device_mesh.platform)
    is_tensor = isinstance(mask.positions, (DTensor, platform.Tensor))
    return replicate_like(mask.positions if is_tensor else platform.from_numpy(mask.positions), like)


def _numbers(platform: Platform, dropout: AttentionDropout | None, query: Tensor, like: DTensor) -> tuple[Any, Any]:
    """Return the seeds of all rows and the numbers of all heads as DTensors, so that a cut query cuts them too."""
    if dropout is None or dropout.p == 0:
        return None, None
    found = dropout.rows(platform, query.shape[0]), dropout.numbers(platform, query.shape[1])
    seeds, heads = (replicate_like(platform.from_numpy(np.ascontiguousarray(x, np.int64)), like) for x in found)
    return seeds, heads


@functools.cache
def _register() -> None:
    names = ("query", "key", "value", "positions", "sinks", "seeds", "heads")
    optional = {"positions", "sinks", "seeds", "heads"}
    parameters = tuple(Parameter(name, None if name in optional else REQUIRED) for name in names)
    rule_registry().add(NAME, Registration(_rule, parameters, by_type=True, own=True), NAME)


def _rule(call: OpCall) -> Factorization:
    """Query heads are key-value heads times the group that shares one."""
    query, key, value = (spec.shape for spec in call.tensors[:3])
    groups = query[1] // max(key[1], 1)
    sizes = {"batch": query[0], "heads": key[1], "group": groups, "q": query[2], "k": key[2]}
    sizes |= {"width": query[3], "out": value[3]}
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
    return Factorization(inputs, ((("batch",), heads, ("q",), ("out",)),), sizes, cuts=uncut(fixed))
