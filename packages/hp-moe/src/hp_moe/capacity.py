"""Expert capacity: a bound on the tokens of an expert in a micro-batch; choices beyond it are dropped.

The bound applies to the micro-batch of all ranks together. The ranks therefore gather all choices, and the host waits
for the device. Dropless routing, the default, does neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy

from hp_dtensor.comm.process_group import ProcessGroup
from hp_moe.exceptions import MoEConfigError

Array = numpy.ndarray
DropPolicy = Literal["probability", "position"]


@dataclass(frozen=True)
class Capacity:
    """A bound on the number of tokens that choose an expert.

    Attributes:
        factor: the bound as a multiple of the mean number of choices per expert; rounded up.
        drop: which choices are dropped: those with the lowest scores (`probability`) or of the last tokens
            (`position`). Among equal scores the last tokens are dropped. Tokens are ordered by the rank that they are
            given to, then by position in the input. If plain inputs are shards of a sequence (`MoE.sequence_mesh`),
            this is not the order in the sequence, and other choices may be dropped than on one rank: with `position`
            any of them, with `probability` those of equal scores.

    Raises:
        MoEConfigError: the factor is not positive and finite, or `drop` is neither policy.

    Examples:
        >>> with nn.building(platform):
        ...     layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2, capacity=Capacity(1.25))
        >>> layer.capacity.bound(num_tokens=16, top_k=2, num_experts=4)
        10
    """

    factor: float
    drop: DropPolicy = "probability"

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf or self.drop not in ("probability", "position"):
            raise MoEConfigError(
                f"capacity: expected a factor above 0 and drop 'probability' or 'position', got {self.factor} and "
                f"{self.drop!r}"
            )

    def bound(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Return the maximum number of choices of one expert, for `num_tokens` tokens of all ranks."""
        return math.ceil(self.factor * num_tokens * top_k / num_experts)


@dataclass(frozen=True)
class Choices:
    """The selected experts of some tokens, on the host.

    Attributes:
        experts: int64 `[tokens, top_k]`.
        scores: float32 `[tokens, top_k]`.
        positions: int64 `[tokens]`, the position of each token in the input.
    """

    experts: Array
    scores: Array
    positions: Array

    def encoded(self) -> bytes:
        """Return the arrays as bytes, to be sent to other ranks."""
        return self.experts.tobytes() + self.scores.tobytes() + self.positions.tobytes()

    @classmethod
    def decoded(cls, data: bytes, top_k: int) -> Choices:
        """Parse the result of `encoded`."""
        # 8 bytes of expert and 4 of score for each choice, and 8 of position for each token.
        tokens = len(data) // (top_k * 12 + 8)
        scores_at, positions_at = tokens * top_k * 8, tokens * top_k * 12
        return cls(
            numpy.frombuffer(data[:scores_at], numpy.int64).reshape(tokens, top_k),
            numpy.frombuffer(data[scores_at:positions_at], numpy.float32).reshape(tokens, top_k),
            numpy.frombuffer(data[positions_at:], numpy.int64),
        )


def choices_within_capacity(
    mine: Choices, capacity: Capacity, num_experts: int, group: ProcessGroup | None, block_size: int = 1
) -> Array:
    """Return which of this rank's choices are within the capacity: bool `[tokens, top_k]`.

    Args:
        group: ranks that route different tokens of the micro-batch; None if this rank routes all of them.
        block_size: number of consecutive ranks of the group that share one input.
    """
    top_k = mine.experts.shape[1]
    # Every rank sorts the choices of all ranks, which replaces a second exchange for the result.
    every = [mine] if group is None else [Choices.decoded(d, top_k) for d in group.all_gather_bytes(mine.encoded())]
    rank = 0 if group is None else group.rank
    lengths = [len(each.positions) for each in every]
    bound = capacity.bound(sum(lengths), top_k, num_experts)
    within = _within_bound(every, lengths, capacity.drop, num_experts, bound, block_size)
    first = sum(lengths[:rank])
    return within[first : first + lengths[rank]]


def _within_bound(
    every: list[Choices], lengths: list[int], drop: DropPolicy, num_experts: int, bound: int, block_size: int
) -> Array:
    """Return for each choice of all ranks whether it is one of the `bound` choices that its expert accepts.

    Bool `[tokens of all ranks, top_k]`. O(n log n) for n choices.
    """
    experts = numpy.concatenate([each.experts for each in every])
    scores = numpy.concatenate([each.scores for each in every])
    # Ranks that share one input form one block, in which tokens are ordered by position, not by rank.
    block = numpy.repeat(numpy.arange(len(every)) // block_size, lengths)
    positions = numpy.concatenate([each.positions for each in every])
    tokens, top_k = experts.shape
    slots = numpy.arange(top_k)
    keys = [numpy.broadcast_to(key, experts.shape).reshape(-1) for key in (slots, positions[:, None], block[:, None])]
    if drop == "probability":
        keys.append(-scores.reshape(-1))
    # lexsort takes the last key as the primary one: expert, then (for `probability`) score, block, position and slot.
    by_expert = numpy.lexsort([*keys, experts.reshape(-1)])
    counts = numpy.bincount(experts.reshape(-1), minlength=num_experts)
    starts = numpy.concatenate([[0], numpy.cumsum(counts)[:-1]])
    rank_in_expert = numpy.empty(tokens * top_k, numpy.int64)
    # Position in the sorted order minus the start of the expert's choices.
    rank_in_expert[by_expert] = numpy.arange(tokens * top_k) - numpy.repeat(starts, counts)
    return rank_in_expert.reshape(tokens, top_k) < bound
