"""Load balance without an auxiliary loss: expert biases, and metrics of the experts' loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_reduce_data
from hp_moe.moe import MoE

Tensor = Any


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Load balance of one layer: the distribution of its tokens over its experts.

    Attributes:
        tokens: choices counted (tokens times `top_k`).
        max_violation: the largest load over the mean one, less 1; 0 when even.
        min_ratio: the smallest load over the mean one.
        coefficient_of_variation: standard deviation of the loads over their mean.
        idle_experts: experts without a token.

    Example:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2, load_balance_coeff=1e-3)
        >>> y = model(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> loads = update_expert_bias(model)  # by the layer's name; this one is the model itself
        >>> [load.tokens for load in loads.values()]
        [6]
    """

    tokens: int
    max_violation: float
    min_ratio: float
    coefficient_of_variation: float
    idle_experts: int

    @classmethod
    def of(cls, counts: Sequence[int] | numpy.ndarray) -> LoadMetrics:
        """Return the metrics of tokens per expert; all zero when no token was counted."""
        loads = numpy.asarray(counts, numpy.float64)
        mean = loads.mean()
        if mean == 0:
            return cls(0, 0.0, 0.0, 0.0, len(loads))
        return cls(
            int(loads.sum()),
            float(loads.max() / mean - 1),
            float(loads.min() / mean),
            float(loads.std() / mean),
            int((loads == 0).sum()),
        )


def moe_layers(model: Any) -> dict[str, MoE]:
    """Return the mixture-of-experts layers of a module of any platform, by dotted name.

    Example:
        >>> with nn.building(platform):
        ...     model = nn.ModuleList([FeedForward(4, 8), MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)])
        >>> [*moe_layers(model)]
        ['1']
    """
    from hp_dtensor.parallel.nn import Module
    from hp_dtensor.platform.selection import get_platform

    platform = model.platform if isinstance(model, Module) else get_platform()
    return {name: layer for name, layer in platform.named_modules(model) if isinstance(layer, MoE)}


def update_expert_bias(model: Any) -> dict[str, LoadMetrics]:
    """Move every layer's expert bias against its load since the last call; to be called once per optimizer step.

    Experts with less than the mean load gain `load_balance_coeff`, those with more lose it, and the mean of
    the steps is taken off. All layers share one all-reduce over the ranks that routed different tokens, so
    every rank takes the same step and returns the same metrics.

    Example:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2, load_balance_coeff=1e-3)
        >>> y = model(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> loads = update_expert_bias(model)  # by the layer's name; this one is the model itself
        >>> [load.tokens for load in loads.values()]
        [6]
    """
    layers = moe_layers(model)
    if not layers:
        return {}
    loads = _global_loads(list(layers.values()))
    for layer, load in zip(layers.values(), loads, strict=True):
        if layer.expert_bias is not None:
            step = layer.load_balance_coeff * _bias_direction(load)
            bias = layer.platform.to_numpy(layer.expert_bias) + step.astype(numpy.float32)
            new = layer.platform.from_numpy(bias, layer.platform.device_of(layer.expert_bias))
            layer.platform.copy_(layer.expert_bias, new)
    return {name: LoadMetrics.of(load) for name, load in zip(layers, loads, strict=True)}


def _global_loads(layers: list[MoE]) -> list[numpy.ndarray]:
    """Return the tokens per expert of each layer over all ranks, on the host."""
    first = layers[0]
    assert all(layer.token_mesh == first.token_mesh for layer in layers)
    counts = first.ops.cat([layer.take_counts() for layer in layers], 0)
    if first.token_mesh is not None:
        counts = all_reduce_data(counts, first.token_mesh.get_group())
    ends = numpy.cumsum([layer.num_experts for layer in layers])
    return numpy.split(first.platform.to_numpy(counts), ends[:-1])


def _bias_direction(load: numpy.ndarray) -> numpy.ndarray:
    direction = numpy.sign(load.mean() - load)
    centred: numpy.ndarray = direction - direction.mean()
    return centred
