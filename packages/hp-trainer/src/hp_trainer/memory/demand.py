"""Activations that a rank has to hold, and the cost of not holding them: computing again, or copies to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hp_trainer.memory.kept_activations import BlockActivations
from hp_trainer.memory.recompute import BlockRecompute


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
