"""Choice of what each block of a model keeps, computes again or has on the host, within a budget of activations."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_trainer.memory.demand import ESTIMATED, CostRates, Demand
from hp_trainer.memory.recompute import NOTHING_AGAIN, BlockRecompute, Kind
from hp_trainer.memory.sizes import format_size


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
