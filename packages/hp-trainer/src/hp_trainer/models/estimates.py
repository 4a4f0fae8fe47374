"""Memory, operations and traffic of a model, known before the model is built.

`hp-train plan`, `hp-train layouts` and `training.activation_budget` work with every model whose options have a method
`estimates()` that returns a `ModelEstimates`. The decoder computes its own by formulas (`models/decoder`). A module
without `estimates()` is counted on tensors without memory (`hp_trainer.planning`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from hp_trainer.models.base import ModelPart
from hp_trainer.models.recomputation import NOTHING_RECOMPUTED, BlockRecompute

if TYPE_CHECKING:
    from hp_dtensor.parallel.attention import ContextCost
    from hp_fsdp import PlannedParameter
    from hp_trainer.parallel import ParallelDims

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class MicroBatchShape:
    """Sizes of one micro-batch on one rank, and the degrees that shard its tensors.

    Attributes:
        batch: samples of the micro-batch.
        length: tokens of a sample, over all `cp` ranks.
        dtype: dtype of computation.
        cp_method: `ulysses`, `ring` or `all_gather`; ignored where `cp` is 1.
        ulysses_degree: how many of the `cp` ranks exchange heads.
        etp: tensor parallel ranks within an expert; None: `tp`.
        splits_tokens: the ranks of `ep` have the same tokens, and each routes some of them (a peer mesh).
        fused_experts: the platform computes all experts in one operation. torch does so on CUDA, and on the CPU in
            float32.
        ep_dispatcher: how tokens are sent to experts; None: `all_to_all`.
        ep_chunks: chunks in which they are sent.
        ep_node_size: ranks of a node, for the dispatchers `two_level` and `auto`.
        tp_reshards: of sequences that `tp` ranks gather, each rank saves its shard, and backward gathers again.
        attention_cost: returns the cost of one layer's attention over `cp` ranks, by the layer's window; None: its
            exchanges are not counted.

    Examples:
        >>> MicroBatchShape(batch=2, length=8, cp=2).tokens
        8.0
    """

    batch: int
    length: int
    dtype: str = "float32"
    tp: int = 1
    cp: int = 1
    cp_method: str = "ulysses"
    ulysses_degree: int = 1
    ep: int = 1
    etp: int | None = None
    splits_tokens: bool = False
    fused_experts: bool = True
    ep_dispatcher: str | None = None
    ep_chunks: int = 1
    ep_node_size: int | None = None
    tp_reshards: bool = True
    attention_cost: Callable[[int | None], ContextCost] | None = field(default=None, compare=False, repr=False)

    @property
    def tokens(self) -> float:
        """Tokens of this rank before `tp` shards them, the mean over `cp` ranks."""
        return self.batch * self.length / self.cp

    @property
    def most_tokens(self) -> int:
        """Tokens of the `cp` rank that has most, before `tp` shards them."""
        return self.batch * -(-self.length // self.cp)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in computation."""
        return ITEMSIZE[self.dtype]

    @property
    def expert_tp(self) -> int:
        """Tensor parallel ranks within an expert."""
        return self.tp if self.etp is None else self.etp


# Activations and their exchanges --------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one mesh axis.

    Attributes:
        axis: an axis of the mesh that `ParallelDims.build_mesh` returns, or several joined by `+`; `ep_inner` and
            `ep_outer`: ranks of `ep` in one node, and those with the same index in different nodes.
        collective: the collective's name in `record_collectives`.
        bytes: bytes that one rank sends to others in all of them together, the mean over ranks.
        count: number of collectives.
        overlaps: the collectives run while the rank computes.
    """

    axis: str
    collective: str
    bytes: float
    count: float
    overlaps: bool = False

    def times(self, factor: float) -> Traffic:
        """Return `factor` times as many of these collectives."""
        return Traffic(self.axis, self.collective, self.bytes * factor, self.count * factor, self.overlaps)


def sum_traffic(every: Iterable[Traffic]) -> list[Traffic]:
    """Return the sums of collectives of one kind over one axis, without those that send nothing."""
    found: dict[tuple[str, str, bool], list[float]] = {}
    for each in every:
        if each.bytes:
            sums = found.setdefault((each.axis, each.collective, each.overlaps), [0.0, 0.0])
            sums[0] += each.bytes
            sums[1] += each.count
    return [Traffic(axis, name, sums[0], sums[1], overlaps) for (axis, name, overlaps), sums in found.items()]


@dataclass(frozen=True, kw_only=True)
class SavedActivation:
    """One or several tensors of a block's forward, for one micro-batch on one rank.

    Attributes:
        name: shown to people.
        kind: `input` for the block's own input; `routing` for a router's decisions and counts, which are never
            recomputed; a kind of operation whose results selective recomputation may save (`KINDS`); `rest` for cheap
            operations.
        saved: bytes that autograd saves for backward if the block is not recomputed.
        held: bytes that a recomputed block holds beyond `saved` from its recomputation to its backward: gathered
            tensors of which `saved` counts only the shard.
        result: bytes that a recomputed block saves from forward instead of `saved`; of the input, of decisions, and of
            results of saved kinds.
        flops: operations in forward, which is also the cost of recomputing them.
        operands: bytes of the operands and results of products in forward, which bound the rate of small products.
        operations: number of operations in forward.
        forward: collectives of forward, which recomputation repeats.
        backward: collectives of backward.
        regathered: collectives of backward in a block that is not recomputed, where `saved` counts only the shard.
    """

    name: str
    kind: str
    saved: float = 0.0
    held: float = 0.0
    result: float = 0.0
    flops: float = 0.0
    operands: float = 0.0
    operations: int = 1
    forward: tuple[Traffic, ...] = ()
    backward: tuple[Traffic, ...] = ()
    regathered: tuple[Traffic, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlockActivations:
    """Everything that the forward of a block saves for its backward, for one micro-batch on one rank.

    Attributes:
        tensors: the saved tensors, in the order of forward.
        working: most bytes that the block's backward holds beyond saved tensors, such as gradients of activations.

    Examples:
        >>> x = SavedActivation(name="x", kind="input", saved=8, result=8)
        >>> tensors = (x, SavedActivation(name="gate", kind="products", saved=32))
        >>> block = BlockActivations(tensors=tensors)
        >>> block.saved(), block.saved(BlockRecompute(mode="full"))
        (40, 8)
    """

    tensors: tuple[SavedActivation, ...] = ()
    working: float = 0.0

    def saved(self, recompute: BlockRecompute = NOTHING_RECOMPUTED) -> float:
        """Return the bytes saved from forward to backward, on the device or on the host."""
        if recompute.mode == "none":
            return sum(each.saved for each in self.tensors)
        # A recomputation starts from the block's input, and must route tokens as the forward did.
        always = ("input", "routing")
        return sum(each.result for each in self.tensors if each.kind in always or recompute.saves(each.kind))

    def on_device(self, recompute: BlockRecompute = NOTHING_RECOMPUTED) -> float:
        """Return the bytes of `saved` that stay on the device while the others are on the host."""
        if not recompute.offloads:
            return self.saved(recompute)
        if recompute.mode == "none":
            return 0.0
        # Results of saved kinds and decisions stay on the device: see `BlockRecompute.offloads`.
        return sum(x.result for x in self.tensors if x.kind == "routing" or recompute.saves(x.kind))

    def reusable(self, recompute: BlockRecompute = NOTHING_RECOMPUTED) -> float:
        """Return the bytes that this block's backward frees while the preceding block's tensors arrive from the host.

        They can take the freed memory. A recomputed block frees nothing in time, since they arrive during its
        recomputation.
        """
        return self.saved() if recompute.mode == "none" else 0.0

    def temporary(self, recompute: BlockRecompute = NOTHING_RECOMPUTED) -> float:
        """Return the most bytes that the block's backward holds beyond `saved`."""
        if recompute.mode == "none":
            return self.working
        # A saved result has its memory already; only what autograd saves beyond it is new.
        recomputed = sum(
            max(0.0, each.saved - each.result) if recompute.saves(each.kind) else each.saved + each.held
            for each in self.tensors
            if each.kind not in ("input", "routing")
        )
        return recomputed + self.working

    def recomputed_flops(self, recompute: BlockRecompute = NOTHING_RECOMPUTED, kind: str | None = None) -> float:
        """Return the operations that backward repeats, of all kinds or of `kind`."""
        return sum(each.flops for each in self._recomputed(recompute) if kind in (None, each.kind))

    def recomputed_sent(self, recompute: BlockRecompute = NOTHING_RECOMPUTED) -> float:
        """Return the bytes that this rank sends a second time in backward."""
        return sum(x.bytes for each in self._recomputed(recompute) for x in each.forward)

    def traffic(self, recompute: BlockRecompute = NOTHING_RECOMPUTED) -> Iterator[Traffic]:
        """Yield what this rank sends in forward and backward."""
        for each in self.tensors:
            yield from (*each.forward, *each.backward, *(each.regathered if recompute.mode == "none" else ()))
        yield from (x for each in self._recomputed(recompute) for x in each.forward)

    def recomputed_bytes(self, recompute: BlockRecompute = NOTHING_RECOMPUTED) -> float:
        """Return the bytes that backward writes a second time, which bound the time of cheap operations."""
        # Recomputation writes a result even where autograd does not save it.
        return sum(max(each.saved, each.result) for each in self._recomputed(recompute))

    def _recomputed(self, recompute: BlockRecompute) -> list[SavedActivation]:
        if recompute.mode == "none":
            return []
        # Recomputation stops after the last tensor that backward needs; what follows is not repeated.
        needed = [index for index, each in enumerate(self.tensors) if each.saved]
        repeated = self.tensors[: needed[-1] + 1] if needed else ()
        return [each for each in repeated if each.kind not in ("input", "routing") and not recompute.saves(each.kind)]


@dataclass(frozen=True, kw_only=True)
class ModelActivations:
    """Activations of every part of a model, for one micro-batch on one rank.

    Attributes:
        blocks: activations of all blocks of the full model, in order. Blocks of one kind share one object.
        head: activations of the final norm, the head and the loss.
        embedding: activations of the embedding.
    """

    blocks: tuple[BlockActivations, ...]
    head: BlockActivations
    embedding: BlockActivations = BlockActivations()


# Parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ModelParameters:
    """The parameters of a part of a model on one rank, by the FSDP group that shards them.

    Attributes:
        root: embedding, final norm and head.
        tied_embedding: an embedding that two pipeline stages share, which has a group of its own.
        blocks: parameters of each block without its experts, by the block's index.
        experts: parameters of each block's experts, by the block's index; dense blocks are absent.
    """

    root: tuple[PlannedParameter, ...]
    tied_embedding: tuple[PlannedParameter, ...] = ()
    blocks: dict[int, tuple[PlannedParameter, ...]] = field(default_factory=dict)
    experts: dict[int, tuple[PlannedParameter, ...]] = field(default_factory=dict)


# The interface -------------------------------------------------------------------------------------------


class ModelEstimates(Protocol):
    """Interface of a model to the planner.

    Attributes:
        num_layers: number of blocks.
        hidden_size: width of the activations that one pipeline stage sends to the next.
        buffer_bytes: bytes of tensors that are no parameters; every rank has all of them.
        is_recomputable: blocks can be recomputed and offloaded.
        retains_dtypes: parameters keep the dtypes they were built with when training computes in float32.
        has_micro_batch_statistics: training depends on the size of a micro-batch, such as through expert capacities.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def buffer_bytes(self) -> int: ...

    @property
    def is_recomputable(self) -> bool: ...

    @property
    def retains_dtypes(self) -> bool: ...

    @property
    def has_micro_batch_statistics(self) -> bool: ...

    def block_name(self, layer: int) -> str:
        """Return the name of a block for messages."""

    def layer_kind(self, layer: int) -> Hashable:
        """Return a key that is equal for blocks whose parameters have the same shapes."""

    def unreached_blocks(self) -> tuple[int, ...] | None:
        """Return the leading blocks that backward does not reach; None: all before the first trained parameter."""

    def parameters(self, dims: ParallelDims, part: ModelPart, *, freeze: tuple[str, ...] = ()) -> ModelParameters:
        """Return the parameters of a part of the model on the rank that has most of them.

        Args:
            dims: shapes are those of shards over tensor and expert parallel ranks, and not yet sharded over data.
            part: the part; its `layers` are not None.
            freeze: patterns of names that are not trained.
        """

    def activations(self, shape: MicroBatchShape) -> ModelActivations:
        """Return the activations of one micro-batch, and what the ranks exchange for them."""

    def step_flops(self, samples: int, length: int) -> float:
        """Return the operations of all ranks for so many samples, forward and backward, nothing recomputed."""


def estimates_of(options: Any) -> ModelEstimates | None:
    """Return the estimates of a model by its options; None where they have no method `estimates`."""
    estimates = getattr(options, "estimates", None)
    found: ModelEstimates | None = None if estimates is None else estimates()
    return found
