"""Activations that a rank has to hold, and the cost of not holding them: computing again, or copies to the host.

Choice of what each block of a model keeps, computes again or has on the host, within a budget of activations.

Choice of the recomputation of a run: by its settings, or to stay within a budget of activations.

Rates of this job's devices by which recomputation, transfers and copies to the host are weighed, measured now.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.platform.interface import Platform
from hp_trainer.config import TrainerConfig
from hp_trainer.models import DecoderConfig
from hp_trainer.models.decoder.activations import ActivationShape, decoder_activations
from hp_trainer.models.estimates import BlockActivations
from hp_trainer.models.recomputation import NOTHING_AGAIN, BlockRecompute, Kind, block_names
from hp_trainer.parallel import ParallelDims, context_style
from hp_trainer.pipeline import simulate
from hp_trainer.sizes import format_size, parse_size
from hp_trainer.training.pipelined import exchange_over, num_microbatches, plan_stages


@dataclass(frozen=True, kw_only=True)
class CostRates:
    """Time of a byte, in operations of matrix products that take as long.

    Attributes:
        moved: of a byte that a cheap operation writes: about 5 on a CPU, 100 to 300 on a GPU.
        sent: of a byte that goes to another rank.
        host: of a byte that goes to host memory, or comes from there: 20,000 on an H100 with 16 lanes of PCIe 4.
    """

    moved: float = 100.0
    sent: float = 5000.0
    host: float = 20_000.0

    def describe(self) -> str:
        """Return the rates in one line.

        Example:
            >>> CostRates(moved=100, sent=5000, host=20_000).describe()
            'a byte written takes the time of 100 operations of products, one sent 5,000, one copied to the host 20,000'
        """
        return (
            f"a byte written takes the time of {self.moved:,.0f} operations of products, one sent {self.sent:,.0f}, "
            f"one copied to the host {self.host:,.0f}"
        )

    def work(self, block: BlockActivations) -> float:
        """Return the work of a forward, in operations."""
        return self.again(block, BlockRecompute(mode="full"))

    def again(self, block: BlockActivations, recompute: BlockRecompute) -> float:
        """Return the work of what a block computes again, in operations."""
        moved, sent = block.moved_again(recompute), block.sent_again(recompute)
        return block.flops_again(recompute) + self.moved * moved + self.sent * sent

    def waited(self, block: BlockActivations, chosen: BlockRecompute, forward: float, backward: float) -> float:
        """Return the wait for a block's copies to the host and back, in operations.

        Args:
            forward: work of the next block's forward, beside which the copies to the host are made.
            backward: work of the next block's backward, beside which they are brought back.
        """
        copied = self.host * (block.kept(chosen) - block.on_device(chosen))
        return max(0.0, copied - forward) + max(0.0, copied - backward)


ESTIMATED = CostRates()
"""Rates about right on any accelerator, where none have been measured."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Activations that one rank has to hold.

    Attributes:
        blocks: those that the rank has, in the order of forward.
        head: the final norm, head and loss; None: another rank has them.
        in_flight: micro-batches whose activations it holds at once.
        ends: indices of blocks that are the last of a stage, whose tensors stay on the device; the last one always is.
    """

    blocks: tuple[BlockActivations, ...]
    head: BlockActivations | None = None
    in_flight: float = 1.0
    ends: frozenset[int] = frozenset()

    def stays(self, index: int) -> bool:
        """Return whether a block's tensors stay on the device whatever is chosen: backward begins with them."""
        return index == len(self.blocks) - 1 or index in self.ends

    def peak(self, chosen: Sequence[BlockRecompute]) -> float:
        """Return the most bytes on the device at once.

        Backward has freed what is behind the block that it is in. Tensors of the block in front of it come back from
        the host in the place of those that it has used, while blocks further in front have theirs there.

        Example:
            >>> x = KeptTensor(name="x", kind="input", saved=1, result=1)
            >>> block = BlockActivations(tensors=(x, KeptTensor(name="rest", kind="rest", saved=9)))
            >>> demand = Demand(blocks=(block,) * 3)
            >>> demand.peak([BlockRecompute(mode="full")] * 3), demand.peak([NOTHING_AGAIN] * 3)
            (12.0, 30.0)
            >>> demand.peak([BlockRecompute(offloads=True)] * 3)
            10.0
        """
        peak = waiting = before = before_waiting = 0.0
        for index, (block, each) in enumerate(zip(self.blocks, chosen, strict=True)):
            here = block.kept(each)
            room = min(before - before_waiting, block.makes_room(each))
            peak = max(peak, waiting + before - room + here + block.temporary(each))
            waiting += before_waiting
            before, before_waiting = here, here if self.stays(index) else block.on_device(each)
        if self.head is not None:
            peak = max(peak, waiting + before + self.head.kept() + self.head.working)
        return (self.in_flight - 1) * (waiting + before_waiting) + peak

    def work(self, rates: CostRates = ESTIMATED) -> float:
        """Return the work of a forward, in operations."""
        parts = [*self.blocks, *([] if self.head is None else [self.head])]
        return sum(map(rates.work, parts))

    def cost(self, chosen: Sequence[BlockRecompute], rates: CostRates = ESTIMATED) -> float:
        """Return the work that comes on top of a step: what is computed again, and waits for copies; in operations."""
        again = sum(rates.again(block, each) for block, each in zip(self.blocks, chosen, strict=True))
        return again + sum(self.waits(range(len(self.blocks)), chosen, rates))

    def waits(
        self, indices: Iterable[int], chosen: Sequence[BlockRecompute], rates: CostRates = ESTIMATED
    ) -> Iterator[float]:
        """Yield the waits for copies of these blocks, in operations."""
        for index in indices:
            if chosen[index].offloads and not self.stays(index):
                after = self.blocks[index + 1]
                forward = rates.work(after)
                backward = 2 * forward + rates.again(after, chosen[index + 1])
                yield rates.waited(self.blocks[index], chosen[index], forward, backward)

    def copied(self, chosen: Sequence[BlockRecompute]) -> float:
        """Return the bytes that a micro-batch sends to the host, and gets back."""
        return sum(
            block.kept(each) - block.on_device(each)
            for index, (block, each) in enumerate(zip(self.blocks, chosen, strict=True))
            if not self.stays(index)
        )


@dataclass(frozen=True, kw_only=True)
class RecomputePlan:
    """Choice for one rank's blocks, and the memory and time that it takes.

    Attributes:
        chosen: of each block.
        peak: bytes of activations on the device at most.
        whole: bytes at most if nothing were computed again or offloaded.
        least: bytes at most if as much as possible were.
        cost: operations that backward takes a second time; copies, transfers and waits counted as `Demand.work` counts.
        work: of a forward.
        waits: the part of `cost` that is waits for copies to the host and back.
        copied: bytes that a micro-batch has on the host.
        kept_here: the cost of the best choice that offloads nothing; None: there is none, or nothing may be offloaded.
    """

    chosen: tuple[BlockRecompute, ...]
    peak: float
    whole: float
    least: float
    cost: float
    work: float
    waits: float = 0.0
    copied: float = 0.0
    kept_here: float | None = None

    @property
    def slowdown(self) -> float:
        """Share of a step's work that comes on top; forward is a third of a step."""
        return self.share(self.cost)

    def share(self, cost: float) -> float:
        """Return a cost as a share of a step's work."""
        return cost / (3 * self.work) if self.work else 0.0


class BudgetError(ValueError):
    """A budget of activations that no choice keeps.

    Attributes:
        least: bytes of the smallest budget that works.
    """

    def __init__(self, budget: float, least: float, *, offloads: bool = False) -> None:
        where = "is computed again and offloaded" if offloads else "is computed again"
        super().__init__(
            f"activations take at least {format_size(least)} where every block {where}, more than the budget "
            f"of {format_size(budget)}"
        )
        self.least = least


def plan_recompute(
    demand: Demand,
    budget: float,
    kinds: Sequence[Kind],
    *,
    offloads: bool = False,
    rates: CostRates = ESTIMATED,
) -> RecomputePlan:
    """Choose what to compute again, and what to offload, at the least cost within a budget of activations.

    From keeping all, it goes step by step to what frees most bytes of the peak for its cost, and then takes back what
    fits after all; equal blocks are computed again from the first on, whose activations live longest. On a few blocks
    this is within a tenth of the best of all choices. A copy to the host costs what the computation of the next block
    does not hide.

    Args:
        budget: bytes.
        kinds: of operations whose results the platform can keep.
        offloads: blocks may have on the host what they keep.
        rates: measured or estimated.

    Raises:
        BudgetError: no choice stays within the budget.

    Example:
        >>> x = KeptTensor(name="x", kind="input", saved=1, result=1)
        >>> block = BlockActivations(tensors=(x, KeptTensor(name="rest", kind="rest", saved=9)))
        >>> plan = plan_recompute(Demand(blocks=(block,) * 3), budget=25, kinds=())
        >>> [each.mode for each in plan.chosen], plan.peak
        (['full', 'none', 'none'], 21.0)
    """
    here = _Search(demand, list(_options(demand, kinds, offloads=False)), rates)
    wide = _Search(demand, list(_options(demand, kinds, offloads=True)), rates) if offloads else here
    least = wide.least()
    if least > budget:
        raise BudgetError(budget, least, offloads=offloads)
    stays = here.best(budget) if here.least() <= budget else None
    found = [each for each in (stays, wide.best(budget) if offloads else None) if each is not None]
    best = min(found, key=lambda chosen: (demand.cost(chosen, rates), demand.peak(chosen)))
    return RecomputePlan(
        chosen=tuple(best),
        peak=demand.peak(best),
        whole=demand.peak([NOTHING_AGAIN] * len(demand.blocks)),
        least=least,
        cost=demand.cost(best, rates),
        work=demand.work(rates),
        waits=sum(demand.waits(range(len(best)), best, rates)),
        copied=demand.copied(best),
        kept_here=demand.cost(stays, rates) if offloads and stays is not None else None,
    )


def _options(demand: Demand, kinds: Sequence[Kind], *, offloads: bool) -> Iterator[BlockRecompute]:
    """Yield what a block can do: keep everything, some kinds of results, or its input alone; here or on the host."""
    there = {tensor.kind for block in demand.blocks for tensor in block.tensors if tensor.result}
    usable = [kind for kind in kinds if kind in there]
    for offloaded in (False, True) if offloads else (False,):
        yield BlockRecompute(offloads=offloaded)
        for mask in range(2 ** len(usable) - 1, 0, -1):
            keep = tuple(kind for index, kind in enumerate(usable) if mask >> index & 1)
            yield BlockRecompute(mode="selective", keep=keep, offloads=offloaded)
        yield BlockRecompute(mode="full", offloads=offloaded)


_MAX_EXCHANGED = 12
"""Blocks of which any two are considered together."""


class _Search:
    """Choices as indices of options, whose bytes and costs are tables by kind of block and option."""

    def __init__(self, demand: Demand, options: list[BlockRecompute], rates: CostRates) -> None:
        self._options, self._in_flight = options, demand.in_flight
        kinds = {id(block): block for block in demand.blocks}
        places = {key: index for index, key in enumerate(kinds)}
        blocks = list(kinds.values())
        self._kinds = np.array([places[id(block)] for block in demand.blocks], int)
        self._stays = np.array([demand.stays(index) for index in range(len(demand.blocks))], bool)
        self._kept = _table(blocks, options, lambda block, option: block.kept(option))
        self._on_device = _table(blocks, options, lambda block, option: block.on_device(option))
        self._makes_room = _table(blocks, options, lambda block, option: block.makes_room(option))
        self._temporary = _table(blocks, options, lambda block, option: block.temporary(option))
        self._again = _table(blocks, options, rates.again)
        self._forward = np.array([rates.work(block) for block in blocks])
        self._host = rates.host
        self._head = 0.0 if demand.head is None else demand.head.kept() + demand.head.working

    def least(self) -> float:
        """Return the peak of the option that takes least, where all blocks have the same one."""
        return float(self.peaks(self._starts(range(len(self._options)))).min())

    def best(self, budget: float) -> list[BlockRecompute] | None:
        """Return the cheapest choice that is found within the budget."""
        # From what is offloaded in part little else is reached than from all and from nothing.
        options = [i for i, each in enumerate(self._options) if not each.offloads or each.mode != "selective"]
        found = [each for each in (self._fitted(start, budget) for start in self._starts(options)) if each is not None]
        if not found:
            return None
        found.sort(key=lambda each: (self.costs(each[None])[0], self.peaks(each[None])[0]))
        chosen = min((self._exchanged(each, budget) for each in found[:2]), key=lambda each: self.costs(each[None])[0])
        return [self._option(int(index), bool(stays)) for index, stays in zip(chosen, self._stays, strict=True)]

    def _option(self, index: int, stays: bool) -> BlockRecompute:
        option = self._options[index]
        return replace(option, offloads=False) if stays else option

    def peaks(self, choices: Any) -> Any:
        """Return `Demand.peak` of each row of choices."""
        kept, waiting = self._kept[self._kinds, choices], self._on_device[self._kinds, choices]
        waiting = np.where(self._stays, kept, waiting)
        through = np.cumsum(waiting, axis=1)
        # Of the block in front everything comes, as room is made; of those further in front there is what has not left.
        beside = np.zeros_like(kept)
        room = np.minimum((kept - waiting)[:, :-1], self._makes_room[self._kinds, choices][:, 1:])
        beside[:, 1:] = through[:, :-1] - waiting[:, :-1] + kept[:, :-1] - room
        peaks = (beside + kept + self._temporary[self._kinds, choices]).max(axis=1, initial=0.0)
        whole = through[:, -1] if kept.shape[1] else np.zeros(len(choices))
        return np.maximum(peaks, (whole + self._head) if self._head else 0.0) + (self._in_flight - 1) * whole

    def costs(self, choices: Any) -> Any:
        """Return `Demand.cost` of each row of choices."""
        return self._each_cost(choices).sum(axis=1)

    def _each_cost(self, choices: Any) -> Any:
        again = self._again[self._kinds, choices]
        copied = self._host * (self._kept - self._on_device)[self._kinds, choices]
        costs = again.copy()
        forward = np.broadcast_to(self._forward[self._kinds][1:], again[:, 1:].shape)
        hidden = (forward, 2 * forward + again[:, 1:])
        waits = sum(np.maximum(0.0, copied[:, :-1] - each) for each in hidden)
        costs[:, :-1] += np.where(self._stays[:-1], 0.0, waits)
        return costs

    def _starts(self, options: Sequence[int]) -> Any:
        return np.repeat(np.array(options)[:, None], len(self._kinds), axis=1)

    def _fitted(self, start: Any, budget: float) -> Any:
        """Return a choice within the budget, from one that need not be; None if none is found from there."""
        chosen = start.copy()
        while self.peaks(chosen[None])[0] > budget:
            better = self._best_step(chosen)
            if better is None:
                return None
            chosen = better
        for index in reversed(range(len(chosen))):
            chosen = self._cheapest_that_fits(chosen, (index,), budget)
        return chosen

    def _exchanged(self, chosen: Any, budget: float) -> Any:
        """Return a choice that no change of two blocks makes cheaper: one gives what is worth more to the other."""
        for _ in range(len(chosen)):
            pairs = list(itertools.combinations(self._representatives(chosen), 2))
            better = [self._cheapest_that_fits(chosen, pair, budget) for pair in pairs]
            best = min(better, key=lambda each: self.costs(each[None])[0], default=chosen)
            if self.costs(best[None])[0] >= self.costs(chosen[None])[0]:
                return chosen
            chosen = best
        return chosen

    def _representatives(self, chosen: Any) -> list[int]:
        """Return the first and the last of the blocks that are alike and do the same, of few kinds of such."""
        seen: dict[tuple[int, int, bool], list[int]] = {}
        for index, (kind, now) in enumerate(zip(self._kinds, chosen, strict=True)):
            seen.setdefault((int(kind), int(now), bool(self._stays[index])), []).append(index)
        return sorted({each for indices in seen.values() for each in (indices[0], indices[-1])})[:_MAX_EXCHANGED]

    def _best_step(self, chosen: Any) -> Any:
        """Return the change of one block that frees most bytes of the peak for what it costs; None: none frees any."""
        seen: dict[tuple[int, int, bool], int] = {}
        for index, (kind, now) in enumerate(zip(self._kinds, chosen, strict=True)):
            # Of equal blocks the first one frees most.
            seen.setdefault((int(kind), int(now), bool(self._stays[index])), index)
        indices = np.repeat(list(seen.values()), len(self._options))
        options = np.tile(np.arange(len(self._options)), len(seen))
        choices = np.repeat(chosen[None], len(indices), axis=0)
        choices[np.arange(len(indices)), indices] = options
        freed = self.peaks(chosen[None])[0] - self.peaks(choices)
        # Where the peak is another block's own backward, keeping less of this one leads towards the next step.
        kinds = self._kinds[indices]
        bytes_kept = np.where(self._stays[indices, None], self._kept[kinds], self._on_device[kinds])
        less = bytes_kept[np.arange(len(indices)), chosen[indices]] - bytes_kept[np.arange(len(indices)), options]
        freed = np.maximum(freed, 1e-6 * less)
        rates = freed / np.maximum(self.costs(choices) - self.costs(chosen[None])[0], 1.0)
        best = int(np.argmax(rates)) if len(rates) else 0
        return choices[best] if len(rates) and rates[best] > 0 else None

    def _cheapest_that_fits(self, chosen: Any, indices: Sequence[int], budget: float) -> Any:
        """Return the choice that is cheapest if these blocks may do anything else; `chosen` itself if none is."""
        others = np.array(list(itertools.product(range(len(self._options)), repeat=len(indices))))
        choices = np.repeat(chosen[None], len(others), axis=0)
        choices[:, indices] = others
        costs = np.where(self.peaks(choices) <= budget, self.costs(choices), np.inf)
        best = int(np.argmin(costs))
        return choices[best] if costs[best] < self.costs(chosen[None])[0] else chosen


def _table(blocks: Sequence[Any], options: Sequence[BlockRecompute], tell: Any) -> Any:
    # A rank may have no blocks, of which two dimensions are to be left too.
    table = [tell(block, option) for block in blocks for option in options]
    return np.array(table, float).reshape(len(blocks), len(options))


def describe_blocks(names: Sequence[str], chosen: Sequence[BlockRecompute]) -> str:
    """Return in one line what blocks compute again: `layers.0 to layers.3 full; layers.4 none`.

    Example:
        >>> describe_blocks(["layers.0", "layers.1"], [NOTHING_AGAIN] * 2)
        'layers.0 to layers.1 none'
    """
    parts: list[tuple[str, str, BlockRecompute]] = []
    for name, recompute in zip(names, chosen, strict=True):
        if parts and parts[-1][2] == recompute:
            parts[-1] = parts[-1][0], name, recompute
        else:
            parts.append((name, name, recompute))
    return "; ".join(f"{a} {each}" if a == b else f"{a} to {b} {each}" for a, b, each in parts)


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


_LEAST_SECONDS = 2e-3
"""Time of a product that is long enough to be measured."""
_BYTES = 2**22
"""Size of the tensors that are written, sent and copied."""


def measure_rates(platform: Platform, dtype: str, group: ProcessGroup, *, offloads: bool = False) -> CostRates:
    """Return the time of a byte that is written, sent, or copied to the host, in operations of a matrix product.

    Takes a fraction of a second. Every rank of the group calls it, and gets the medians of what all have measured.

    Args:
        dtype: of computation.
        offloads: measure copies to the host too, which the platform must be able to make; else they are estimated.
    """
    with platform.no_grad():
        operations = _product_rate(platform, platform.dtype(dtype))
        x = platform.zeros((_BYTES // 4,), platform.dtype("float32"))
        found = {"moved": operations * _seconds(platform, lambda: platform.ops.mul(x, 2.0)) / _BYTES}
        if group.size > 1:
            found["sent"] = operations * _seconds(platform, lambda: _send(platform, group, x)) / _BYTES
        if offloads:
            found["host"] = (
                operations * _seconds(platform, functools.partial(_there_and_back, platform, x)) / _BYTES / 2
            )
    return agreed_rates(found, exchange_over(group))


def agreed_rates(found: dict[str, float], everyones: Callable[[Any], list[Any]]) -> CostRates:
    """Return the medians of what all ranks have measured, with estimates for what nobody has.

    Args:
        everyones: takes a value of this rank, and returns those of all ranks in one order.

    Example:
        >>> agreed_rates({"moved": 3.0}, lambda mine: [mine, {"moved": 5.0}, {"moved": 4.0}]).moved
        4.0
    """
    ranks = everyones(found)
    return dataclasses.replace(ESTIMATED, **{name: statistics.median(each[name] for each in ranks) for name in found})


def _product_rate(platform: Platform, dtype: Any) -> float:
    """Return operations of a product per second, of a size that keeps the device busy."""
    size = 256
    while True:
        x = platform.zeros((size, size), dtype)
        seconds = _seconds(platform, functools.partial(platform.ops.linear, x, x))
        if seconds >= _LEAST_SECONDS or size >= 8192:
            return 2.0 * size**3 / seconds
        size *= 2


def _send(platform: Platform, group: ProcessGroup, x: Any) -> None:
    """Exchange as many bytes as `x` has: a ring's all-reduce sends each twice, of half as many elements."""
    group.all_reduce(platform.ops.mul(x[: x.shape[0] // 2], 1.0)).wait()


def _there_and_back(platform: Platform, x: Any) -> None:
    copies = platform.host_copies()
    host, wait = copies.to_host(copies.memory(x))
    wait()
    _, wait = copies.to_device(host)
    wait()


def _seconds(platform: Platform, run: Callable[[], Any]) -> float:
    """Return the shortest of three times, after one that is not counted."""
    run()
    times = []
    for _ in range(3):
        platform.synchronize()
        begin = time.perf_counter()
        run()
        platform.synchronize()
        times.append(time.perf_counter() - begin)
    return max(min(times), 1e-9)
