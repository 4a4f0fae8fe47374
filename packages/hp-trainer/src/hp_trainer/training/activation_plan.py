"""Choice of the recomputation of a run: by its settings, or to stay within a budget of activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_trainer.config import TrainerConfig
from hp_trainer.memory import (
    ESTIMATED,
    BlockRecompute,
    CostRates,
    Demand,
    Kind,
    RecomputePlan,
    describe_blocks,
    format_size,
    parse_size,
    plan_recompute,
)
from hp_trainer.models import DecoderConfig
from hp_trainer.models.decoder.activation_bytes import ActivationShape, decoder_activations
from hp_trainer.models.recomputation import block_names
from hp_trainer.parallel import ParallelDims, context_style
from hp_trainer.pipeline import simulate
from hp_trainer.training.stages import num_microbatches, plan_stages


@dataclass(frozen=True)
class StageDemand:
    """Activations of one place in the pipeline.

    Attributes:
        layers: its blocks' indices in the whole model.
        demand: what it has to hold.
    """

    layers: tuple[int, ...]
    demand: Demand


@dataclass(frozen=True)
class ActivationPlan:
    """The choice for a whole model: one plan for each place in the pipeline.

    Attributes:
        budget: bytes on each rank.
        stages: of each place.
        plans: of each place.
    """

    budget: int
    stages: tuple[StageDemand, ...]
    plans: tuple[RecomputePlan, ...]

    def of_layers(self) -> list[BlockRecompute]:
        """Return what each block of the whole model computes again."""
        chosen = {
            layer: recompute
            for stage, plan in zip(self.stages, self.plans, strict=True)
            for layer, recompute in zip(stage.layers, plan.chosen, strict=True)
        }
        return [chosen[layer] for layer in sorted(chosen)]

    def describe(self) -> list[str]:
        """Return in one line for each place what was chosen, and why."""
        return [self._line(place) for place in range(len(self.plans))]

    def _line(self, place: int) -> str:
        stage, plan = self.stages[place], self.plans[place]
        everything = block_names(max(stage.layers) + 1) if stage.layers else []
        names = [everything[layer] for layer in stage.layers]
        where = "" if len(self.plans) == 1 else f"stage rank {place}, {stage.demand.in_flight:g} micro-batches: "
        why = (
            "everything fits"
            if plan.whole <= self.budget
            else f"keeping everything takes {format_size(plan.whole)}, keeping as little as possible "
            f"{format_size(plan.least)}"
        )
        return (
            f"{where}recompute {describe_blocks(names, plan.chosen)}; {format_size(plan.peak)} of the budget of "
            f"{format_size(self.budget)}, {plan.slowdown:.1%} more work ({why}){_offload_line(plan)}"
        )


def _offload_line(plan: RecomputePlan) -> str:
    """Return what copies to the host take and save, and what would be chosen without them."""
    if not any(each.offloads for each in plan.chosen):
        return "; nothing is offloaded, which would cost more" if plan.kept_here is not None and plan.cost else ""
    waits = f"{plan.share(plan.waits):.1%} of a step waits for them" if plan.waits else "all beside computation"
    without = (
        "without offload nothing fits"
        if plan.kept_here is None
        else f"without offload {plan.share(plan.kept_here):.1%} more work"
    )
    return f"; {format_size(plan.copied)} of each micro-batch to the host and back, {waits}; {without}"


def activation_shape(config: TrainerConfig, dims: ParallelDims, *, fused_experts: bool = True) -> ActivationShape:
    """Return the sizes of one micro-batch of a run on one rank.

    Args:
        fused_experts: as in `ActivationShape`.
    """
    training = config.training
    share = training.global_batch_size // dims.dp_size
    batch = training.micro_batch_size or share
    if dims.pp_enabled:
        batch = max(1, share // num_microbatches(config, dims))
    return ActivationShape(
        batch=batch,
        length=training.sequence_length,
        dtype=training.dtype,
        tp=dims.tp,
        cp=dims.cp,
        cp_method=_cp_method(config, dims),
        ep=dims.ep,
        etp=dims.etp,
        splits_tokens=dims.expert_mesh == "peer",
        fused_experts=fused_experts,
    )


def stage_demands(config: TrainerConfig, dims: ParallelDims, shape: ActivationShape) -> tuple[StageDemand, ...]:
    """Return the activations of each place in the pipeline of a decoder's run; without one there is one place."""
    activations = decoder_activations(config.model.options, shape)
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
    """Choose what each block computes again or offloads, so that every rank stays within `training.activation_budget`.

    The same on every rank that has the same rates: beside them it depends on the settings alone.

    Args:
        kinds: of operations whose results the platform can keep.
        rates: measured, or estimated.

    Raises:
        BudgetError: no choice stays within the budget; its `least` is that of the rank that needs most.
    """
    assert config.training.activation_budget is not None
    budget = parse_size(config.training.activation_budget)
    shape = activation_shape(config, dims, fused_experts=fused_experts)
    stages = stage_demands(config, dims, shape)
    # The rank that needs most comes first, so that an error tells what works for all.
    needs = sorted(stages, key=lambda stage: -stage.demand.peak([BlockRecompute(mode="full")] * len(stage.layers)))
    offloads, usable = config.training.offload_activations, _usable(config, kinds)
    plans = {id(stage): plan_recompute(stage.demand, budget, usable, offloads=offloads, rates=rates) for stage in needs}
    return ActivationPlan(budget, stages, tuple(plans[id(stage)] for stage in stages))


def is_plannable(options: Any) -> bool:
    """Return whether the activations of a model with these options are known."""
    return isinstance(options, DecoderConfig)


def _usable(config: TrainerConfig, kinds: Sequence[Kind]) -> tuple[Kind, ...]:
    # What is compiled hides its operations.
    return tuple(kind for kind in kinds if not config.training.compile or kind == "collectives")


def _cp_method(config: TrainerConfig, dims: ParallelDims) -> str:
    if not dims.cp_enabled:
        return "ulysses"
    style = context_style(dims, config.model.options, config.training)
    return "ulysses" if style.ulysses_degree == dims.cp else str(style.method)
