"""Recomputation and offloading under a budget of activation memory (`training.activation_budget`).

`plan_activations` searches the cheapest choice for every rank of a pipeline (`recompute_search`). Its rates may be
measured (`measure_rates`).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.platform.interface import Platform
from hp_moe import has_fused_experts
from hp_trainer.config import TrainerConfig
from hp_trainer.models.estimates import MicroBatchShape, estimates_of
from hp_trainer.models.recomputation import BlockRecompute, Kind, block_names
from hp_trainer.parallel import ParallelDims, context_style
from hp_trainer.pipeline import simulate
from hp_trainer.sizes import format_size, parse_size
from hp_trainer.training.pipelined import all_gather_object_over, num_microbatches, plan_stages
from hp_trainer.training.recompute_search import (
    ESTIMATED,
    CostRates,
    Demand,
    RecomputePlan,
    describe_blocks,
    plan_recompute,
)


@dataclass(frozen=True)
class StageDemand:
    """Activations on one rank of a pipeline.

    Attributes:
        layers: indices of its blocks in the full model.
        demand: the activations that it holds.
    """

    layers: tuple[int, ...]
    demand: Demand


@dataclass(frozen=True)
class ActivationPlan:
    """The choice for a full model: one plan for each rank of the pipeline.

    Attributes:
        budget: bytes on each rank.
        stages: activations of each rank of the pipeline.
        plans: the plan of each rank of the pipeline.
    """

    budget: int
    stages: tuple[StageDemand, ...]
    plans: tuple[RecomputePlan, ...]

    def of_layers(self) -> list[BlockRecompute]:
        """Return the recomputation of each block of the full model."""
        chosen = {
            layer: recompute
            for stage, plan in zip(self.stages, self.plans, strict=True)
            for layer, recompute in zip(stage.layers, plan.chosen, strict=True)
        }
        return [chosen[layer] for layer in sorted(chosen)]

    def describe(self) -> list[str]:
        """Return one line per rank of the pipeline: what was chosen, and why."""
        return [self._line(rank) for rank in range(len(self.plans))]

    def _line(self, rank: int) -> str:
        stage, plan = self.stages[rank], self.plans[rank]
        everything = block_names(max(stage.layers) + 1) if stage.layers else []
        names = [everything[layer] for layer in stage.layers]
        where = "" if len(self.plans) == 1 else f"pipeline rank {rank}, {stage.demand.in_flight:g} micro-batches: "
        why = (
            "everything fits"
            if plan.peak_saving_all <= self.budget
            else f"saving everything takes {format_size(plan.peak_saving_all)}, saving as little as possible "
            f"{format_size(plan.least)}"
        )
        return (
            f"{where}recompute {describe_blocks(names, plan.chosen)}; {format_size(plan.peak)} of the budget of "
            f"{format_size(self.budget)}, {plan.slowdown:.1%} more work ({why}){_offload_line(plan)}"
        )


def _offload_line(plan: RecomputePlan) -> str:
    """Describe the time of copies to the host, and the choice without them."""
    if not any(each.offloads for each in plan.chosen):
        return (
            "; nothing is offloaded, which would cost more"
            if plan.cost_without_offload is not None and plan.cost
            else ""
        )
    waits = f"{plan.share(plan.exposed):.1%} of a step waits for them" if plan.exposed else "hidden by computation"
    without = (
        "without offload nothing fits"
        if plan.cost_without_offload is None
        else f"without offload {plan.share(plan.cost_without_offload):.1%} more work"
    )
    return f"; {format_size(plan.offloaded)} of each micro-batch to the host and back, {waits}; {without}"


def micro_batch_shape(config: TrainerConfig, dims: ParallelDims, *, fused_experts: bool = True) -> MicroBatchShape:
    """Return the sizes of one micro-batch of a run on one rank.

    Args:
        fused_experts: as in `MicroBatchShape`.
    """
    training = config.training
    method = "ulysses"
    if dims.cp_enabled:
        style = context_style(dims, config.model.options, training)
        method = "ulysses" if style.ulysses_degree == dims.cp else str(style.method)
    return MicroBatchShape(
        batch=max(1, training.global_batch_size // dims.dp_size // num_microbatches(config, dims)),
        length=training.sequence_length,
        dtype=training.dtype,
        tp=dims.tp,
        cp=dims.cp,
        cp_method=method,
        ep=dims.ep,
        etp=dims.etp if dims.tp_enabled else None,
        splits_tokens=dims.expert_mesh == "peer",
        fused_experts=fused_experts,
        ep_dispatcher=config.parallel.ep_dispatcher,
        ep_chunks=config.parallel.ep_chunks or 1,
        ep_node_size=config.parallel.ep_node_size,
        tp_reshards=config.parallel.tp_reshard_after_forward,
    )


def stage_demands(config: TrainerConfig, dims: ParallelDims, shape: MicroBatchShape) -> tuple[StageDemand, ...]:
    """Return the activations on each rank of the pipeline; one entry without a pipeline."""
    estimates = estimates_of(config.model.options)
    assert estimates is not None
    activations = estimates.activations(shape)
    if not dims.pp_enabled:
        layers = tuple(range(len(activations.blocks)))
        return (StageDemand(layers, Demand(blocks=activations.blocks, head=activations.head)),)
    plan = plan_stages(config, dims)
    peaks = simulate(plan.schedule).peak_activations
    found = []
    for place in range(dims.pp):
        parts = plan.parts_of(place)
        layers = tuple(parts.layers or ())
        stages = [plan.stages[index].layers for index in plan.indices_of(place)]
        demand = Demand(
            blocks=tuple(activations.blocks[layer] for layer in layers),
            head=activations.head if parts.head else None,
            in_flight=peaks[place] / len(plan.indices_of(place)),
            ends=frozenset(layers.index(max(stage)) for stage in stages if stage),
        )
        found.append(StageDemand(layers, demand))
    return tuple(found)


def plan_activations(
    config: TrainerConfig,
    dims: ParallelDims,
    kinds: Sequence[Kind],
    *,
    fused_experts: bool = True,
    rates: CostRates = ESTIMATED,
) -> ActivationPlan:
    """Choose what each block recomputes or offloads, so that every rank stays within `training.activation_budget`.

    The result is the same on every rank with the same rates: otherwise it depends only on the settings. The model's
    options must have estimates.

    Args:
        kinds: kinds of operations whose results the platform can save.
        rates: measured or estimated rates.

    Raises:
        BudgetError: no choice stays within the budget. Its `least` is that of the rank that needs most.
    """
    assert config.training.activation_budget is not None
    budget = parse_size(config.training.activation_budget)
    shape = micro_batch_shape(config, dims, fused_experts=fused_experts)
    stages = stage_demands(config, dims, shape)
    # The rank that needs most comes first, so that an error states a budget that works for all.
    needs = sorted(stages, key=lambda stage: -stage.demand.peak([BlockRecompute(mode="full")] * len(stage.layers)))
    # Compiled blocks hide their operations from selective recomputation.
    usable = tuple(kind for kind in kinds if not config.training.compile or kind == "collectives")
    offloads = config.training.offload_activations
    plans = {id(stage): plan_recompute(stage.demand, budget, usable, offloads=offloads, rates=rates) for stage in needs}
    return ActivationPlan(budget, stages, tuple(plans[id(stage)] for stage in stages))


def fuses_experts(platform: Platform, dtype: str, *, on_host: bool) -> bool:
    """Return whether a platform computes all experts of a block in one operation, which saves fewer activations.

    On a CPU the fused operation supports float32 only.
    """
    return has_fused_experts(platform) and (dtype == "float32" or not on_host)


_LEAST_SECONDS = 2e-3
"""Shortest time of a product that is measured reliably."""
_BYTES = 2**22
"""Size of the tensors that are written, sent and copied to measure rates."""


def measure_rates(platform: Platform, dtype: str, group: ProcessGroup, *, offloads: bool = False) -> CostRates:
    """Measure the rates of the devices of a group, in a fraction of a second.

    A collective: every rank of the group calls it, and gets the medians over all ranks.

    Args:
        dtype: dtype of computation.
        offloads: measure copies to the host too, which the platform must support; otherwise they are estimated.
    """
    with platform.no_grad():
        operations = _product_rate(platform, platform.dtype(dtype))
        x = platform.zeros((_BYTES // 4,), platform.dtype("float32"))
        found = {"moved": operations * _seconds(platform, lambda: platform.ops.mul(x, 2.0)) / _BYTES}
        if group.size > 1:
            found["sent"] = operations * _seconds(platform, lambda: _send(platform, group, x)) / _BYTES
        if offloads:
            found["host"] = operations * _seconds(platform, functools.partial(_round_trip, platform, x)) / _BYTES / 2
    return agreed_rates(found, all_gather_object_over(group))


def agreed_rates(found: dict[str, float], all_gather_object: Callable[[Any], list[Any]]) -> CostRates:
    """Return the medians of the rates measured on all ranks, with estimates for those not measured.

    Args:
        all_gather_object: returns the values of all ranks in one order.

    Examples:
        >>> agreed_rates({"moved": 3.0}, lambda mine: [mine, {"moved": 5.0}, {"moved": 4.0}]).moved
        4.0
    """
    ranks = all_gather_object(found)
    return dataclasses.replace(ESTIMATED, **{name: statistics.median(each[name] for each in ranks) for name in found})


def _product_rate(platform: Platform, dtype: Any) -> float:
    """Return the operations per second of a product that is large enough to fill the device."""
    size = 256
    while True:
        x = platform.zeros((size, size), dtype)
        seconds = _seconds(platform, functools.partial(platform.ops.linear, x, x))
        if seconds >= _LEAST_SECONDS or size >= 8192:
            return 2.0 * size**3 / seconds
        # Products that are too short measure the launch of the kernel.
        size *= 2


def _send(platform: Platform, group: ProcessGroup, x: Any) -> None:
    """Send as many bytes as `x` has: a ring all-reduce of half the elements sends each of them twice."""
    group.all_reduce(platform.ops.mul(x[: x.shape[0] // 2], 1.0)).wait()


def _round_trip(platform: Platform, x: Any) -> None:
    # Both directions, which is why the time is halved by the caller.
    copies = platform.host_copies()
    host, wait = copies.to_host(copies.memory(x))
    wait()
    _, wait = copies.to_device(host)
    wait()


def _seconds(platform: Platform, run: Callable[[], Any]) -> float:
    """Return the shortest of three times, after one warm-up."""
    run()
    times = []
    for _ in range(3):
        platform.synchronize()
        begin = time.perf_counter()
        run()
        platform.synchronize()
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)
