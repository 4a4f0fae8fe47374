"""Activations of a block: what autograd keeps of its operations, and what recomputation keeps in place of that."""

from __future__ import annotations

from dataclasses import dataclass

from hp_trainer.models.recomputation import NOTHING_AGAIN, BlockRecompute


@dataclass(frozen=True, kw_only=True)
class KeptTensor:
    """One or several tensors of a block's forward, of one micro-batch on one rank.

    Attributes:
        name: for people.
        kind: `input`: the block's own input; `routing`: decisions and counts, which are never taken again; a kind of
            operation that selective recomputation may keep; `rest`: cheap operations.
        saved: bytes that autograd keeps for backward where nothing is computed again.
        result: bytes that recomputation keeps instead: of the input, of decisions, or of results where it keeps these.
        flops: of the operations in forward; what computing them again costs.
        sent: bytes that leave this rank for them in forward, which computing them again sends once more.
    """

    name: str
    kind: str
    saved: float = 0.0
    result: float = 0.0
    flops: float = 0.0
    sent: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BlockActivations:
    """Everything that a block's forward leaves for its backward, of one micro-batch on one rank.

    Attributes:
        tensors: what is kept, in the order of forward.
        working: bytes beyond that which the backward of the block holds at most: gradients between its operations.

    Example:
        >>> x = KeptTensor(name="x", kind="input", saved=8, result=8)
        >>> tensors = (x, KeptTensor(name="gate", kind="products", saved=32))
        >>> block = BlockActivations(tensors=tensors)
        >>> block.kept(), block.kept(BlockRecompute(mode="full"))
        (40, 8)
    """

    tensors: tuple[KeptTensor, ...]
    working: float = 0.0

    def kept(self, recompute: BlockRecompute = NOTHING_AGAIN) -> float:
        """Return the bytes that stay from forward to backward, on the device or on the host."""
        if recompute.mode == "none":
            return sum(each.saved for each in self.tensors)
        always = ("input", "routing")
        return sum(each.result for each in self.tensors if each.kind in always or recompute.keeps(each.kind))

    def on_device(self, recompute: BlockRecompute = NOTHING_AGAIN) -> float:
        """Return the bytes of `kept` that are on the device also while the rest is on the host."""
        if not recompute.offloads:
            return self.kept(recompute)
        if recompute.mode == "none":
            return 0.0
        return sum(x.result for x in self.tensors if x.kind == "routing" or recompute.keeps(x.kind))

    def makes_room(self, recompute: BlockRecompute = NOTHING_AGAIN) -> float:
        """Return the bytes of `kept` whose place those of the block in front take, as backward uses them up.

        What a block is computed again from is used at once, and the block in front is back before its backward begins.
        """
        return self.kept() if recompute.mode == "none" else 0.0

    def temporary(self, recompute: BlockRecompute = NOTHING_AGAIN) -> float:
        """Return the bytes that the block's backward holds at most beyond what was kept."""
        if recompute.mode == "none":
            return self.working
        # What is kept of a result has its memory already.
        again = sum(
            max(0.0, each.saved - each.result) if recompute.keeps(each.kind) else each.saved
            for each in self.tensors
            if each.kind not in ("input", "routing")
        )
        return again + self.working

    def flops_again(self, recompute: BlockRecompute = NOTHING_AGAIN) -> float:
        """Return the operations that backward takes a second time."""
        return sum(each.flops for each in self._again(recompute))

    def sent_again(self, recompute: BlockRecompute = NOTHING_AGAIN) -> float:
        """Return the bytes that leave this rank a second time in backward."""
        return sum(each.sent for each in self._again(recompute))

    def moved_again(self, recompute: BlockRecompute = NOTHING_AGAIN) -> float:
        """Return the bytes that backward writes a second time, which is what cheap operations take their time for."""
        return sum(max(each.saved, each.result) for each in self._again(recompute))

    def _again(self, recompute: BlockRecompute) -> list[KeptTensor]:
        """Return what is computed again: a repetition ends where backward has what it needs."""
        if recompute.mode == "none":
            return []
        needed = [index for index, each in enumerate(self.tensors) if each.saved]
        kept = ("input", "routing")
        again = self.tensors[: needed[-1] + 1] if needed else ()
        return [each for each in again if each.kind not in kept and not recompute.keeps(each.kind)]
