"""Balancing of expert loads without a loss: metrics of loads, steps of expert biases, and placement of copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_reduce_data
from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.parallel import nn
from hp_dtensor.platform.selection import get_platform
from hp_moe.dispatch import ReplicatingDispatcher
from hp_moe.exceptions import ExpertParallelError
from hp_moe.experts import dispatcher_of
from hp_moe.losses import LOSSES
from hp_moe.moe import MoE
from hp_moe.placement import CopyPlacement
from hp_moe.router import plain

Tensor = Any


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Distribution of the tokens of one layer over its experts, summed over ranks and calls.

    Attributes:
        tokens: number of choices (tokens times `top_k`), including dropped ones.
        max_violation: largest load divided by the mean load, minus 1; 0 for even loads.
        min_ratio: smallest load divided by the mean load.
        coefficient_of_variation: standard deviation of the loads divided by their mean.
        idle_experts: number of experts without tokens.
        entropy: entropy of the loads relative to even loads: 1 for even loads, 0 if one expert has all tokens.
        dropped: number of choices dropped by the capacity.
        sent_bytes: bytes sent between ranks for dispatch and combine in forward. Backward sends rows and scores again.
        loads: number of choices of each expert.
        aux_losses: auxiliary losses of the layer by name, without coefficients; balance losses are 1 for even loads.

    Examples:
        >>> metrics = LoadMetrics.of([3, 1, 0, 0])
        >>> metrics.tokens, metrics.max_violation, metrics.idle_experts
        (4, 2.0, 2)
    """

    tokens: int
    max_violation: float
    min_ratio: float
    coefficient_of_variation: float
    idle_experts: int
    entropy: float = 0.0
    dropped: int = 0
    sent_bytes: int = 0
    loads: tuple[int, ...] = ()
    aux_losses: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Sequence[int] | numpy.ndarray, **others: Any) -> LoadMetrics:
        """Return the metrics of the token counts of the experts; all are zero if there are no tokens."""
        loads = numpy.asarray(counts, numpy.float64)
        others["loads"] = tuple(int(load) for load in loads)
        mean = loads.mean()
        if mean == 0:
            return cls(0, 0.0, 0.0, 0.0, len(loads), **others)
        return cls(
            int(loads.sum()),
            float(loads.max() / mean - 1),
            float(loads.min() / mean),
            float(loads.std() / mean),
            int((loads == 0).sum()),
            entropy=_relative_entropy(loads),
            **others,
        )


def moe_layers(model: Any) -> dict[str, MoE]:
    """Return the `MoE` layers of a module of any platform, by dotted name.

    This also sets `MoE.name`, used in error messages, of layers that have none.

    Examples:
        >>> with nn.building(platform):
        ...     model = nn.ModuleList([FeedForward(4, 8), MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)])
        >>> [*moe_layers(model)]
        ['1']
    """
    # hp_dtensor modules carry their platform; for modules of a framework the default one is used.
    platform = model.platform if isinstance(model, nn.Module) else get_platform()
    layers = {name: layer for name, layer in platform.named_modules(model) if isinstance(layer, MoE)}
    for name, layer in layers.items():
        layer.name = layer.name or name
    return layers


def update_expert_bias(model: Any) -> dict[str, LoadMetrics]:
    """Update every layer's expert bias by its loads since the last call. Call it once per optimizer step.

    `load_balance_coeff` is added to the bias of experts below the mean load and subtracted for experts above it; then
    the mean of these steps is subtracted from all. One all-reduce sums the loads of all layers over the ranks that
    routed different tokens, so every rank makes the same update and returns the same metrics.

    Returns:
        The metrics of each layer by name.

    Raises:
        ExpertParallelError: layers have different `token_mesh`es.

    Examples:
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
    metrics = _global_metrics(list(layers.values()))
    for layer, metric in zip(layers.values(), metrics, strict=True):
        load = numpy.asarray(metric.loads, numpy.float64)
        if layer.expert_bias is not None:
            # The step depends on the sign of the error alone (arXiv 2408.15664). A step common to all experts changes
            # no choice and would let the biases drift, so the mean is subtracted.
            direction = numpy.sign(load.mean() - load)
            step = layer.load_balance_coeff * (direction - direction.mean())
            _write(layer, "expert_bias", layer.platform.to_numpy(plain(layer.expert_bias)) + step.astype(numpy.float32))
        # Without tokens (a step that was skipped) the last shares remain.
        if layer.last_shares is not None and metric.tokens:
            _write(layer, "last_shares", load / load.sum())
    return dict(zip(layers, metrics, strict=True))


def update_expert_copies(model: Any, loads: Mapping[str, LoadMetrics]) -> dict[str, CopyPlacement]:
    """Place the copies of experts of every layer with a `ReplicatingDispatcher` where they reduce the peak load most.

    Call it between steps with the result of `update_expert_bias`. Every rank computes the same placement.

    Returns:
        By the layer's name, the experts that each rank holds a copy of. Layers without tokens are unchanged and left
        out.

    Examples:
        >>> with nn.building(platform):
        ...     model = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        >>> y = model(platform.ops.ones((3, 4), platform.dtype("float32")))
        >>> update_expert_copies(model, update_expert_bias(model))  # all experts are on this rank
        {}
    """
    placed = {}
    for name, layer in moe_layers(model).items():
        dispatcher = dispatcher_of(layer.experts, layer.platform)
        if isinstance(dispatcher, ReplicatingDispatcher) and loads[name].tokens:
            placed[name] = dispatcher.place_copies(loads[name].loads)
    return placed


def _write(layer: MoE, buffer: str, value: numpy.ndarray) -> None:
    # In place: the buffer object stays the one that is registered.
    target = plain(getattr(layer, buffer))
    new = layer.platform.from_numpy(value.astype(numpy.float32), layer.platform.device_of(target))
    layer.platform.copy_(target, new)


def _global_metrics(layers: list[MoE]) -> list[LoadMetrics]:
    """Return the metrics of each layer over all ranks."""
    first = layers[0]
    others = [layer for layer in layers if layer.token_mesh != first.token_mesh]
    if others:
        raise ExpertParallelError(
            f"the loads of all layers are summed over one mesh: token_mesh is {_described(first.token_mesh)} for "
            f"{first.name!r}, but {_described(others[0].token_mesh)} for {others[0].name!r}"
        )
    # `take` also resets the totals, so each call covers the steps since the last one.
    sums = _sum_over_ranks(first, [layer.totals.take() for layer in layers])
    # A second all-reduce: losses are float32 and counts int64.
    losses = _losses(layers)
    metrics = []
    for layer, taken in zip(layers, sums, strict=True):
        *loads, dropped, sent_bytes = (int(each) for each in taken)
        named = losses.get(id(layer), {})
        metrics.append(LoadMetrics.of(loads, dropped=dropped, sent_bytes=sent_bytes, aux_losses=named))
    return metrics


def _losses(layers: list[MoE]) -> dict[int, dict[str, float]]:
    """Return the mean of each layer's auxiliary losses over all tokens, by `id` of the layer."""
    with_losses = [layer for layer in layers if layer.aux_losses]
    if not with_losses:
        return {}
    sums = _sum_over_ranks(with_losses[0], [layer.totals.take_losses() for layer in with_losses])
    return {
        id(layer): {
            name: float(total) / max(float(tokens), 1.0)
            for name, total in zip(LOSSES, totals, strict=True)
            if getattr(layer.aux_losses, name)
        }
        for layer, (*totals, tokens) in zip(with_losses, sums, strict=True)
    }


def _sum_over_ranks(layer: MoE, tensors: list[Tensor]) -> list[numpy.ndarray]:
    """Return the sums over ranks of several 1-D tensors, on the host, by one all-reduce of their concatenation."""
    joined = layer.ops.cat(tensors, 0)
    if layer.token_mesh is not None:
        joined = all_reduce_data(joined, layer.token_mesh.group_along())
    ends = numpy.cumsum([each.shape[0] for each in tensors])
    return numpy.split(layer.platform.to_numpy(joined), ends[:-1])


def _described(mesh: DeviceMesh | None) -> str:
    return "None" if mesh is None else mesh.describe()


def _relative_entropy(loads: numpy.ndarray) -> float:
    if len(loads) == 1:
        return 1.0
    # p log p is 0 for p = 0.
    shares = loads[loads > 0] / loads.sum()
    return float(-(shares * numpy.log(shares)).sum() / numpy.log(len(loads)))
