"""Choice of what each block of a model computes again, so that its activations stay within a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hp_trainer.memory.kept_activations import BlockActivations
from hp_trainer.memory.recompute import NOTHING_AGAIN, BlockRecompute, Kind
from hp_trainer.memory.sizes import format_size

FLOPS_PER_BYTE_MOVED = 100.0
"""Operations of matrix products in the time in which a byte is written: about 5 on a CPU, 100 to 300 on a GPU."""
FLOPS_PER_BYTE_SENT = 5000.0
"""Operations in the time in which a byte goes to another rank."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Activations that one rank has to hold.

    Attributes:
        blocks: those that the rank has, in the order of forward.
        head: the final norm, head and loss; None: another rank has them.
        in_flight: micro-batches whose activations it holds at once.
    """

    blocks: tuple[BlockActivations, ...]
    head: BlockActivations | None = None
    in_flight: float = 1.0

    def peak(self, chosen: Sequence[BlockRecompute]) -> float:
        """Return the most bytes at once; backward has freed what is behind the block that it is in.

        Example:
            >>> x = KeptTensor(name="x", kind="input", saved=1, result=1)
            >>> block = BlockActivations(tensors=(x, KeptTensor(name="rest", kind="rest", saved=9)))
            >>> demand = Demand(blocks=(block,) * 3)
            >>> demand.peak([BlockRecompute(mode="full")] * 3), demand.peak([NOTHING_AGAIN] * 3)
            (12.0, 30.0)
        """
        below, peak = 0.0, 0.0
        for block, recompute in zip(self.blocks, chosen, strict=True):
            below += block.kept(recompute)
            peak = max(peak, below + block.temporary(recompute))
        if self.head is not None:
            peak = max(peak, below + self.head.kept() + self.head.working)
        return (self.in_flight - 1) * below + peak

    @property
    def work(self) -> float:
        """Operations of a forward, with those of matrix products in whose time its copies and transfers are made."""
        parts = [*self.blocks, *([] if self.head is None else [self.head])]
        return sum(_block_cost(part, BlockRecompute(mode="full")) for part in parts)


@dataclass(frozen=True, kw_only=True)
class RecomputePlan:
    """Choice for one rank's blocks, and the memory and time that it takes.

    Attributes:
        chosen: of each block.
        peak: bytes of activations at most.
        whole: bytes at most if nothing were computed again.
        least: bytes at most if as much as possible were.
        cost: operations that backward takes a second time, copies and transfers counted as `Demand.work` counts them.
        work: of a forward.
    """

    chosen: tuple[BlockRecompute, ...]
    peak: float
    whole: float
    least: float
    cost: float
    work: float

    @property
    def slowdown(self) -> float:
        """Share of a step's work that comes on top; forward is a third of a step."""
        return self.cost / (3 * self.work) if self.work else 0.0


class BudgetError(ValueError):
    """A budget of activations that no choice keeps.

    Attributes:
        least: bytes of the smallest budget that works.
    """

    def __init__(self, budget: float, least: float) -> None:
        super().__init__(
            f"activations take at least {format_size(least)} where every block is computed again, more than the budget "
            f"of {format_size(budget)}"
        )
        self.least = least


def plan_recompute(demand: Demand, budget: float, kinds: Sequence[Kind]) -> RecomputePlan:
    """Choose what to compute again at the least cost, so that a rank's activations stay within a budget.

    From keeping all, it goes step by step to what frees most bytes of the peak for its cost, and then takes back what
    fits after all; equal blocks are computed again from the first on, whose activations live longest. On a few blocks
    this is within a tenth of the best of all choices.

    Args:
        budget: bytes.
        kinds: of operations whose results the platform can keep.

    Raises:
        BudgetError: no choice stays within the budget.

    Example:
        >>> x = KeptTensor(name="x", kind="input", saved=1, result=1)
        >>> block = BlockActivations(tensors=(x, KeptTensor(name="rest", kind="rest", saved=9)))
        >>> plan = plan_recompute(Demand(blocks=(block,) * 3), budget=25, kinds=())
        >>> [each.mode for each in plan.chosen], plan.peak
        (['full', 'none', 'none'], 21.0)
    """
    there = {tensor.kind for block in demand.blocks for tensor in block.tensors if tensor.result}
    options = list(_options([kind for kind in kinds if kind in there]))
    whole = [NOTHING_AGAIN] * len(demand.blocks)
    starts = [[option] * len(demand.blocks) for option in options]
    least = min(demand.peak(start) for start in starts)
    if least > budget:
        raise BudgetError(budget, least)
    found = [each for each in (_fitted(demand, start, budget, options) for start in starts) if each is not None]
    best = min(found, key=lambda chosen: (_cost(demand, chosen), demand.peak(chosen)))
    return RecomputePlan(
        chosen=tuple(best),
        peak=demand.peak(best),
        whole=demand.peak(whole),
        least=least,
        cost=_cost(demand, best),
        work=demand.work,
    )


def _options(kinds: Sequence[Kind]) -> Iterator[BlockRecompute]:
    """Yield what a block can do: keep everything, some kinds of results, or its input alone."""
    yield NOTHING_AGAIN
    for mask in range(2 ** len(kinds) - 1, 0, -1):
        keep = tuple(kind for index, kind in enumerate(kinds) if mask >> index & 1)
        yield BlockRecompute(mode="selective", keep=keep)
    yield BlockRecompute(mode="full")


def _fitted(
    demand: Demand, start: Sequence[BlockRecompute], budget: float, options: Sequence[BlockRecompute]
) -> list[BlockRecompute] | None:
    """Return a choice within the budget, from one that need not be; None if none is found from there."""
    chosen = list(start)
    while demand.peak(chosen) > budget:
        better = _best_step(demand, chosen, options)
        if better is None:
            return None
        chosen[better[0]] = better[1]
    for index in reversed(range(len(chosen))):
        chosen[index] = _cheapest_that_fits(demand, chosen, index, budget, options)
    return chosen


def _best_step(
    demand: Demand, chosen: list[BlockRecompute], options: Sequence[BlockRecompute]
) -> tuple[int, BlockRecompute] | None:
    """Return the change of one block that frees most bytes of the peak for what it costs; None: none frees any."""
    peak, best, best_rate, seen = demand.peak(chosen), None, 0.0, set()
    for index, (block, now) in enumerate(zip(demand.blocks, chosen, strict=True)):
        # Of equal blocks the first one frees most.
        if (block, now) in seen:
            continue
        seen.add((block, now))
        for option in options:
            freed = peak - demand.peak([*chosen[:index], option, *chosen[index + 1 :]])
            # Where the peak is another block's own backward, keeping less of this one leads towards the next step.
            freed = max(freed, 1e-6 * (block.kept(now) - block.kept(option)))
            more = _block_cost(block, option) - _block_cost(block, now)
            rate = freed / max(more, 1.0)
            if freed > 0 and rate > best_rate:
                best, best_rate = (index, option), rate
    return best


def _cheapest_that_fits(
    demand: Demand, chosen: list[BlockRecompute], index: int, budget: float, options: Sequence[BlockRecompute]
) -> BlockRecompute:
    block, now = demand.blocks[index], chosen[index]
    for option in sorted(options, key=lambda each: _block_cost(block, each)):
        if _block_cost(block, option) >= _block_cost(block, now):
            return now
        if demand.peak([*chosen[:index], option, *chosen[index + 1 :]]) <= budget:
            return option
    return now


def _cost(demand: Demand, chosen: Sequence[BlockRecompute]) -> float:
    return sum(_block_cost(block, each) for block, each in zip(demand.blocks, chosen, strict=True))


def _block_cost(block: BlockActivations, recompute: BlockRecompute) -> float:
    """Return what a block computes again, in operations of matrix products that take as long."""
    moved, sent = block.moved_again(recompute), block.sent_again(recompute)
    return block.flops_again(recompute) + FLOPS_PER_BYTE_MOVED * moved + FLOPS_PER_BYTE_SENT * sent


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
