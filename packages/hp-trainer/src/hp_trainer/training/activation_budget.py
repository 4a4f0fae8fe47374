"""Recomputation and offloading under a budget of activation memory (`training.activation_budget`).

`Demand` has the activations of a rank, and computes memory and cost of a choice of what to recompute and offload. Costs
are compared by `CostRates`, measured by `measure_rates` if wanted. `plan_activations` searches the cheapest choice for
every rank of a pipeline."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.platform.interface import Platform
from hp_moe import has_fused_experts
from hp_trainer._coordination import all_gather_object
from hp_trainer.config import TrainerConfig
from hp_trainer.models.estimates import BlockActivations, MicroBatchShape, estimates_of
from hp_trainer.models.recomputation import NOTHING_RECOMPUTED, BlockRecompute, Kind, block_names
from hp_trainer.parallel import ParallelDims, context_style
from hp_trainer.parallel.context import context_cost
from hp_trainer.pipeline import simulate
from hp_trainer.sizes import format_size, parse_size
from hp_trainer.training.pipelined_model import num_microbatches, plan_stages


@dataclass(frozen=True, kw_only=True)
class CostRates:
    """Time of a byte, expressed as the operations of matrix products that take equally long.

    Attributes:
        moved: for a byte that a cheap operation writes: about 5 on a CPU, 100 to 300 on a GPU.
        sent: for a byte sent to another rank.
        host: for a byte copied to or from host memory: 20,000 on an H100 with 16 lanes of PCIe 4.
    """

    moved: float = 100.0
    sent: float = 5000.0
    host: float = 20_000.0

    def describe(self) -> str:
        """Return the rates in one line.

        Examples:
            >>> CostRates(moved=100, sent=5000, host=20_000).describe()
            'time of a byte in operations of products: 100 if written, 5,000 if sent, 20,000 if copied to the host'
        """
        return (
            f"time of a byte in operations of products: {self.moved:,.0f} if written, {self.sent:,.0f} if sent, "
            f"{self.host:,.0f} if copied to the host"
        )

    def work(self, block: BlockActivations) -> float:
        """Return the work of a block's forward, in operations."""
        return self.recomputation(block, BlockRecompute(mode="full"))

    def recomputation(self, block: BlockActivations, recompute: BlockRecompute) -> float:
        """Return the work of a block's recomputation, in operations."""
        moved, sent = block.recomputed_bytes(recompute), block.recomputed_sent(recompute)
        return block.recomputed_flops(recompute) + self.moved * moved + self.sent * sent


ESTIMATED = CostRates()
"""Rates that are roughly right on any accelerator."""


def bytes_in_backward(saved: Any, pending: Any, reusable: Any, temporary: Any) -> tuple[Any, Any]:
    """Return the bytes on the device at the end of each block's backward, and the most bytes during it.

    When backward is in a block, the tensors of later blocks are freed. Offloaded tensors of the preceding block come
    back from the host and reuse memory that this block frees; those of earlier blocks are still on the host.

    Args:
        saved, reusable, temporary: float arrays `[..., blocks]`, in the order of forward: for each block the bytes that
            the methods of `BlockActivations` with these names return.
        pending: `[..., blocks]`, bytes of each block on the device between its forward and its backward.

    Returns:
        Two arrays `[..., blocks]`.
    """
    preceding, reused = np.zeros_like(saved), np.zeros_like(saved)
    preceding[..., 1:] = saved[..., :-1]
    preceding[..., 2:] += np.cumsum(pending, axis=-1)[..., :-2]
    reused[..., 1:] = np.minimum((saved - pending)[..., :-1], reusable[..., 1:])
    return preceding, preceding - reused + saved + temporary


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Activations that one rank has to hold.

    Attributes:
        blocks: activations of the rank's blocks, in the order of forward.
        head: activations of the final norm, head and loss; None: another rank has them.
        in_flight: micro-batches whose activations are held at once.
        ends: indices of blocks that end a stage; the last block always does.
    """

    blocks: tuple[BlockActivations, ...]
    head: BlockActivations | None = None
    in_flight: float = 1.0
    ends: frozenset[int] = frozenset()

    def never_offloads(self, index: int) -> bool:
        """Return whether a block's tensors always remain on the device, because backward starts with them."""
        return index == len(self.blocks) - 1 or index in self.ends

    def peak(self, chosen: Sequence[BlockRecompute]) -> float:
        """Return the most bytes on the device at once, given the choice for each block.

        Examples:
            >>> x = SavedActivation(name="x", kind="input", saved=1, result=1)
            >>> block = BlockActivations(tensors=(x, SavedActivation(name="rest", kind="rest", saved=9)))
            >>> demand = Demand(blocks=(block,) * 3)
            >>> demand.peak([BlockRecompute(mode="full")] * 3), demand.peak([NOTHING_RECOMPUTED] * 3)
            (12.0, 30.0)
            >>> demand.peak([BlockRecompute(offloads=True)] * 3)
            10.0
        """
        search, choices = self._search(chosen)
        return float(search.peaks(choices)[0])

    def work(self, rates: CostRates = ESTIMATED) -> float:
        """Return the work of the forward of one micro-batch, head included, in operations."""
        blocks = [*self.blocks, *([] if self.head is None else [self.head])]
        return sum(map(rates.work, blocks))

    def cost(self, chosen: Sequence[BlockRecompute], rates: CostRates = ESTIMATED) -> float:
        """Return the additional work of a micro-batch in operations: recomputation, and copies that are not hidden."""
        search, choices = self._search(chosen, rates)
        return float(search.costs(choices)[0])

    def exposed(self, chosen: Sequence[BlockRecompute], rates: CostRates = ESTIMATED) -> float:
        """Return the part of `cost` for copies that computation does not hide."""
        search, choices = self._search(chosen, rates)
        return float(search.exposed(choices)[0])

    def offloaded(self, chosen: Sequence[BlockRecompute]) -> float:
        """Return the bytes of a micro-batch that are copied to the host and back."""
        return sum(
            block.saved(each) - block.on_device(each)
            for index, (block, each) in enumerate(zip(self.blocks, chosen, strict=True))
            if not self.never_offloads(index)
        )

    def _search(self, chosen: Sequence[BlockRecompute], rates: CostRates = ESTIMATED) -> tuple[_Search, Any]:
        """Return a search over the options of a choice, and the choice as it takes it."""
        options = list(dict.fromkeys(chosen))
        return _Search(self, options, rates), np.array([[options.index(each) for each in chosen]], int)


@dataclass(frozen=True, kw_only=True)
class RecomputePlan:
    """The choice for one rank's blocks, with its memory and cost.

    Attributes:
        chosen: recomputation of each block.
        peak: most bytes of activations on the device.
        peak_saving_all: the peak if nothing were recomputed or offloaded.
        least: the least peak of one choice for all blocks.
        cost: additional work of a micro-batch in operations, see `Demand.cost`.
        work: work of the forward of a micro-batch in operations, see `Demand.work`.
        exposed: part of `cost` for copies to the host and back that computation does not hide.
        offloaded: bytes of a micro-batch on the host.
        cost_without_offload: cost of the best choice that offloads nothing; None if there is none, or if nothing may be
            offloaded.
    """

    chosen: tuple[BlockRecompute, ...]
    peak: float
    peak_saving_all: float
    least: float
    cost: float
    work: float
    exposed: float = 0.0
    offloaded: float = 0.0
    cost_without_offload: float | None = None

    @property
    def slowdown(self) -> float:
        """Additional work as a share of the work without it, of which forward is a third."""
        return self.share(self.cost)

    def share(self, cost: float) -> float:
        """Return a cost as a share of the work of forward and backward."""
        return cost / (3 * self.work) if self.work else 0.0


class BudgetError(ValueError):
    """No choice stays within a budget of activations; `least` is one that can be satisfied."""

    def __init__(self, budget: float, least: float, *, offloads: bool = False) -> None:
        where = "is recomputed and offloaded" if offloads else "is recomputed"
        super().__init__(
            f"activations take at least {format_size(least)} if every block {where}, more than the budget "
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
    """Choose what to recompute and what to offload, at the least cost within a budget of activations.

    A greedy search starts from one choice for all blocks. It repeatedly changes the block that frees most bytes of the
    peak per additional work, until the budget is met. Then it restores what fits again. Of equal blocks, the first
    ones are recomputed, whose activations live longest. For few blocks the cost is within a tenth of the optimum.

    Args:
        kinds: kinds of operations whose results the platform can save.
        offloads: blocks may have their saved tensors on the host.

    Examples:
        >>> x = SavedActivation(name="x", kind="input", saved=1, result=1)
        >>> block = BlockActivations(tensors=(x, SavedActivation(name="rest", kind="rest", saved=9)))
        >>> plan = plan_recompute(Demand(blocks=(block,) * 3), budget=25, kinds=())
        >>> [each.mode for each in plan.chosen], plan.peak
        (['full', 'none', 'none'], 21.0)
    """
    on_device = _Search(demand, list(_options(demand, kinds, offloads=False)), rates)
    search = _Search(demand, list(_options(demand, kinds, offloads=True)), rates) if offloads else on_device
    least = search.least()
    if least > budget:
        raise BudgetError(budget, least, offloads=offloads)
    # Searched separately, because the larger search is greedy and may miss the best choice without offload.
    without = on_device.best(budget) if on_device.least() <= budget else None
    found = [each for each in (without, search.best(budget) if offloads else None) if each is not None]
    best = min(found, key=lambda chosen: (demand.cost(chosen, rates), demand.peak(chosen)))
    return RecomputePlan(
        chosen=tuple(best),
        peak=demand.peak(best),
        peak_saving_all=demand.peak([NOTHING_RECOMPUTED] * len(demand.blocks)),
        least=least,
        cost=demand.cost(best, rates),
        work=demand.work(rates),
        exposed=demand.exposed(best, rates),
        offloaded=demand.offloaded(best),
        cost_without_offload=demand.cost(without, rates) if offloads and without is not None else None,
    )


def _options(demand: Demand, kinds: Sequence[Kind], *, offloads: bool) -> Iterator[BlockRecompute]:
    """Yield the options of a block: save everything, some kinds of results, or only its input; offloaded or not."""
    present = {tensor.kind for block in demand.blocks for tensor in block.tensors if tensor.result}
    usable = [kind for kind in kinds if kind in present]
    for offloaded in (False, True) if offloads else (False,):
        yield BlockRecompute(offloads=offloaded)
        # Every non-empty subset of the kinds, all of them first.
        for mask in range(2 ** len(usable) - 1, 0, -1):
            keep = tuple(kind for index, kind in enumerate(usable) if mask >> index & 1)
            yield BlockRecompute(mode="selective", keep=keep, offloads=offloaded)
        yield BlockRecompute(mode="full", offloads=offloaded)


_MAX_EXCHANGED = 12
"""Blocks of which any two are changed together; the number of pairs is quadratic."""


class _Search:
    """Search over choices: int arrays `[blocks]` of indices of options, or `[choices, blocks]` for several at once.

    Bytes and costs are tables `[kinds of blocks, options]`.
    """

    def __init__(self, demand: Demand, options: list[BlockRecompute], rates: CostRates) -> None:
        self._options, self._in_flight = options, demand.in_flight
        # Blocks of one kind are one object, so that tables have a row per kind, not per block.
        kinds = {id(block): block for block in demand.blocks}
        row_of = {key: index for index, key in enumerate(kinds)}
        blocks = list(kinds.values())
        self._kinds = np.array([row_of[id(block)] for block in demand.blocks], int)
        self._never_offloads = np.array([demand.never_offloads(index) for index in range(len(demand.blocks))], bool)
        self._saved = _table(blocks, options, lambda block, option: block.saved(option))
        self._on_device = _table(blocks, options, lambda block, option: block.on_device(option))
        self._reusable = _table(blocks, options, lambda block, option: block.reusable(option))
        self._temporary = _table(blocks, options, lambda block, option: block.temporary(option))
        self._recomputed = _table(blocks, options, rates.recomputation)
        self._forward = np.array([rates.work(block) for block in blocks])
        self._host = rates.host
        self._head = 0.0 if demand.head is None else demand.head.saved() + demand.head.working

    def least(self) -> float:
        """Return the least peak if all blocks have the same option."""
        return float(self.peaks(self._starts(range(len(self._options)))).min())

    def best(self, budget: float) -> list[BlockRecompute] | None:
        """Return the cheapest choice found within the budget; None if none is found."""
        # Starting from partly offloaded options reaches little that the other options do not. The option of the least
        # peak is a start in any case, so that a choice is found if one option for all blocks fits.
        options = [i for i, each in enumerate(self._options) if not each.offloads or each.mode != "selective"]
        options.append(int(np.argmin(self.peaks(self._starts(range(len(self._options)))))))
        found = [each for each in (self._fitted(start, budget) for start in self._starts(options)) if each is not None]
        if not found:
            return None
        found.sort(key=lambda each: (self.costs(each[None])[0], self.peaks(each[None])[0]))
        chosen = min((self._exchanged(each, budget) for each in found[:2]), key=lambda each: self.costs(each[None])[0])
        pairs = zip((self._options[int(index)] for index in chosen), self._never_offloads, strict=True)
        return [replace(option, offloads=False) if stays else option for option, stays in pairs]

    def peaks(self, choices: Any) -> Any:
        """Return the most bytes on the device at once, for each row of choices."""
        tables = (self._saved, self._on_device, self._reusable, self._temporary)
        saved, on_device, reusable, temporary = (table[self._kinds, choices] for table in tables)
        pending = np.where(self._never_offloads, saved, on_device)
        _, peaks = bytes_in_backward(saved, pending, reusable, temporary)
        total = pending.sum(axis=1)
        at_loss = (total + self._head) if self._head else 0.0
        # The other micro-batches in flight are not in backward, and hold what they hold after forward.
        return np.maximum(peaks.max(axis=1, initial=0.0), at_loss) + (self._in_flight - 1) * total

    def costs(self, choices: Any) -> Any:
        """Return the additional work of a micro-batch in operations, for each row of choices."""
        return self._recomputed[self._kinds, choices].sum(axis=1) + self.exposed(choices)

    def exposed(self, choices: Any) -> Any:
        """Return the part of `costs` for copies that the next block's forward and backward do not hide."""
        recomputed = self._recomputed[self._kinds, choices]
        copied = self._host * (self._saved - self._on_device)[self._kinds, choices]
        # Backward computes gradients of inputs and of weights: two products for each one of forward.
        forward = self._forward[self._kinds][1:]
        hidden = (forward, 2 * forward + recomputed[:, 1:])
        exposed = sum(np.maximum(0.0, copied[:, :-1] - each) for each in hidden)
        return np.where(self._never_offloads[:-1], 0.0, exposed).sum(axis=1)

    def _starts(self, options: Sequence[int]) -> Any:
        """Return `[options, blocks]`: for each option the choice that has it for all blocks."""
        return np.repeat(np.array(options)[:, None], len(self._kinds), axis=1)

    def _fitted(self, start: Any, budget: float) -> Any:
        """Return a choice within the budget, found by single changes from `start`; None if none is found."""
        chosen = start.copy()
        while self.peaks(chosen[None])[0] > budget:
            better = self._best_step(chosen)
            if better is None:
                return None
            chosen = better
        # The last blocks are restored first: their activations live for the shortest time.
        for index in reversed(range(len(chosen))):
            chosen = self._cheapest_that_fits(chosen, (index,), budget)
        return chosen

    def _exchanged(self, chosen: Any, budget: float) -> Any:
        """Return a choice within the budget that no change of two representative blocks makes cheaper."""
        for _ in range(len(chosen)):
            # O(pairs * options**2) choices are evaluated, each in O(blocks).
            pairs = list(itertools.combinations(self._representatives(chosen), 2))
            better = [self._cheapest_that_fits(chosen, pair, budget) for pair in pairs]
            best = min(better, key=lambda each: self.costs(each[None])[0], default=chosen)
            if self.costs(best[None])[0] >= self.costs(chosen[None])[0]:
                return chosen
            chosen = best
        return chosen

    def _representatives(self, chosen: Any) -> list[int]:
        """Return the first and the last block of each group of equal blocks with the same option, at most a dozen."""
        seen: dict[tuple[int, int, bool], list[int]] = {}
        for index, (kind, now) in enumerate(zip(self._kinds, chosen, strict=True)):
            seen.setdefault((int(kind), int(now), bool(self._never_offloads[index])), []).append(index)
        return sorted({each for indices in seen.values() for each in (indices[0], indices[-1])})[:_MAX_EXCHANGED]

    def _best_step(self, chosen: Any) -> Any:
        """Return the choice after the change of one block that frees most bytes per cost; None if none frees any."""
        seen: dict[tuple[int, int, bool], int] = {}
        for index, (kind, now) in enumerate(zip(self._kinds, chosen, strict=True)):
            # Of equal blocks, changing the first one frees most.
            seen.setdefault((int(kind), int(now), bool(self._never_offloads[index])), index)
        indices = np.repeat(list(seen.values()), len(self._options))
        options = np.tile(np.arange(len(self._options)), len(seen))
        choices = np.repeat(chosen[None], len(indices), axis=0)
        choices[np.arange(len(indices)), indices] = options
        freed = self.peaks(chosen[None])[0] - self.peaks(choices)
        kinds = self._kinds[indices]
        bytes_held = np.where(self._never_offloads[indices, None], self._saved[kinds], self._on_device[kinds])
        less = bytes_held[np.arange(len(indices)), chosen[indices]] - bytes_held[np.arange(len(indices)), options]
        # If the peak is within another block's backward, a change frees nothing yet, but enables later ones. One that
        # raises the peak is excluded: the search could undo it in the next step, and would not end.
        freed = np.where(freed < 0, 0.0, np.maximum(freed, 1e-6 * less))
        # At least 1 operation, so that changes that cost nothing, or less, do not divide by zero.
        rates = freed / np.maximum(self.costs(choices) - self.costs(chosen[None])[0], 1.0)
        best = int(np.argmax(rates)) if len(rates) else 0
        return choices[best] if len(rates) and rates[best] > 0 else None

    def _cheapest_that_fits(self, chosen: Any, indices: Sequence[int], budget: float) -> Any:
        """Return the cheapest choice that differs from `chosen` in these blocks only; `chosen` if none is cheaper."""
        others = np.array(list(itertools.product(range(len(self._options)), repeat=len(indices))))
        choices = np.repeat(chosen[None], len(others), axis=0)
        choices[:, indices] = others
        costs = np.where(self.peaks(choices) <= budget, self.costs(choices), np.inf)
        best = int(np.argmin(costs))
        return choices[best] if costs[best] < self.costs(chosen[None])[0] else chosen


def _table(blocks: Sequence[Any], options: Sequence[BlockRecompute], value: Any) -> Any:
    """Return `value(block, option)` as float64 `[blocks, options]`."""
    # Reshaped explicitly, because a rank may have no blocks.
    table = [value(block, option) for block in blocks for option in options]
    return np.array(table, float).reshape(len(blocks), len(options))


def describe_blocks(names: Sequence[str], chosen: Sequence[BlockRecompute]) -> str:
    """Return the recomputation of blocks in one line: `layers.0 to layers.3 full; layers.4 none`.

    Examples:
        >>> describe_blocks(["layers.0", "layers.1"], [NOTHING_RECOMPUTED] * 2)
        'layers.0 to layers.1 none'
    """
    spans: list[tuple[str, str, BlockRecompute]] = []
    for name, recompute in zip(names, chosen, strict=True):
        if spans and spans[-1][2] == recompute:
            spans[-1] = spans[-1][0], name, recompute
        else:
            spans.append((name, name, recompute))
    return "; ".join(f"{a} {each}" if a == b else f"{a} to {b} {each}" for a, b, each in spans)


@dataclass(frozen=True)
class StageDemand:
    """Activations on one rank of a pipeline."""

    layers: tuple[int, ...]
    demand: Demand


@dataclass(frozen=True)
class ActivationPlan:
    """The choice for a full model: one plan for each rank of the pipeline."""

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
    """Return the sizes of one micro-batch of a run on one rank."""
    training, options = config.training, config.model.options
    batch = max(1, training.global_batch_size // dims.dp_size // num_microbatches(config, dims))
    context: dict[str, Any] = {}
    if dims.cp_enabled:
        style = context_style(dims, options, training)
        context["ulysses_degree"] = style.ulysses_degree
        context["cp_method"] = "ulysses" if style.ulysses_degree == dims.cp else str(style.method)
        context["attention_cost"] = functools.cache(
            lambda window: context_cost(dims, options, training, window=window, batch=batch)
        )
    return MicroBatchShape(
        batch=batch,
        length=training.sequence_length,
        dtype=training.dtype,
        tp=dims.tp,
        cp=dims.cp,
        **context,
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
    for rank in range(dims.pp):
        parts = plan.parts_of(rank)
        layers = tuple(parts.layers or ())
        stages = [plan.stages[index].layers for index in plan.indices_of(rank)]
        demand = Demand(
            blocks=tuple(activations.blocks[layer] for layer in layers),
            head=activations.head if parts.head else None,
            # The peak counts pairs of a stage and a micro-batch, each of which holds one stage's share of the blocks.
            in_flight=peaks[rank] / len(stages),
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
    """Choose what each block recomputes or offloads within `training.activation_budget`, alike for equal rates."""
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
    """Return whether a platform computes all experts of a block in one operation: on a CPU only in float32."""
    return has_fused_experts(platform) and (dtype == "float32" or not on_host)


_LEAST_SECONDS = 2e-3
"""Shortest time of a product that is measured reliably."""
_BYTES = 2**22
"""Size of the tensors that are written, sent and copied to measure rates."""


def measure_rates(platform: Platform, dtype: str, group: ProcessGroup, *, offloads: bool = False) -> CostRates:
    """Measure the rates of the devices of a group, `offloads` too; a collective call, which returns medians."""
    with platform.no_grad():
        operations = _product_rate(platform, platform.dtype(dtype))
        x = platform.zeros((_BYTES // 4,), platform.dtype("float32"))
        found = {"moved": operations * _seconds(platform, lambda: platform.ops.mul(x, 2.0)) / _BYTES}
        if group.size > 1:
            found["sent"] = operations * _seconds(platform, lambda: _send(platform, group, x)) / _BYTES
        if offloads:
            found["host"] = operations * _seconds(platform, functools.partial(_round_trip, platform, x)) / _BYTES / 2
    ranks = all_gather_object(group, found)
    return replace(ESTIMATED, **{name: statistics.median(each[name] for each in ranks) for name in found})


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
    """Send about as many bytes as `x` has: a ring all-reduce of half the elements sends each of them twice."""
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
