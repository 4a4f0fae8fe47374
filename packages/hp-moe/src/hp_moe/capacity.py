"""Capacity: a bound on the choices of one expert in a micro-batch, and the choices that are dropped beyond it.

The bound and what is dropped are those of the whole micro-batch, wherever its tokens are. So the ranks show each other
their choices, and the host waits for the device: a price that dropless routing, the default, does not pay.
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
    """A bound on the choices of an expert.

    Attributes:
        factor: the bound over the mean number of choices of an expert, rounded up to whole choices.
        drop: the choices that go are those of lowest score (`probability`) or of the last tokens (`position`); among
            equals, those of the last tokens. Tokens are in the order of the ranks that are given different ones, then
            of their place in the input. Where plain inputs are parts of a sequence (`MoE.sequence_mesh`), the order is
            therefore not that of the whole sequences, and other choices may go than on one rank: all that `position`
            drops, and of equal scores.

    Raises:
        MoEConfigError: a factor that is not above 0 or infinite, or another policy.

    Example:
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
        """Return the most choices that an expert may have of a micro-batch's tokens, those of all ranks."""
        return math.ceil(self.factor * num_tokens * top_k / num_experts)


@dataclass(frozen=True)
class Choices:
    """The choices of some tokens, on the host.

    Attributes:
        experts: int64 `[tokens, top_k]`.
        scores: float32 `[tokens, top_k]`.
        order: int64 `[tokens]`, a token's place in the input that the ranks of its block share.
    """

    experts: Array
    scores: Array
    order: Array

    def encoded(self) -> bytes:
        return self.experts.tobytes() + self.scores.tobytes() + self.order.tobytes()

    @classmethod
    def decoded(cls, data: bytes, top_k: int) -> Choices:
        # A choice has 12 bytes, its expert's and its score's, and a token 8 more, its place.
        tokens = len(data) // (top_k * 12 + 8)
        scores_at, order_at = tokens * top_k * 8, tokens * top_k * 12
        return cls(
            numpy.frombuffer(data[:scores_at], numpy.int64).reshape(tokens, top_k),
            numpy.frombuffer(data[scores_at:order_at], numpy.float32).reshape(tokens, top_k),
            numpy.frombuffer(data[order_at:], numpy.int64),
        )


def kept_choices(
    mine: Choices, capacity: Capacity, num_experts: int, group: ProcessGroup | None, block_size: int = 1
) -> Array:
    """Return which of this rank's choices are within the capacity: bool `[tokens, top_k]`.

    Args:
        group: ranks that route different tokens of the micro-batch; None: this rank routes them all.
        block_size: so many consecutive ranks of the group share one input.
    """
    top_k = mine.experts.shape[1]
    # Every rank sorts the choices of all ranks, and so need not be told which of its own are dropped.
    parts = [mine] if group is None else [Choices.decoded(d, top_k) for d in group.all_gather_bytes(mine.encoded())]
    me = 0 if group is None else group.rank
    lengths = [len(part.order) for part in parts]
    bound = capacity.bound(sum(lengths), top_k, num_experts)
    kept = _within_bound(parts, lengths, capacity.drop, num_experts, bound, block_size)
    first = sum(lengths[:me])
    return kept[first : first + lengths[me]]


def _within_bound(
    parts: list[Choices], lengths: list[int], drop: DropPolicy, num_experts: int, bound: int, block_size: int
) -> Array:
    experts = numpy.concatenate([part.experts for part in parts])
    scores = numpy.concatenate([part.scores for part in parts])
    block = numpy.repeat(numpy.arange(len(parts)) // block_size, lengths)
    order = numpy.concatenate([part.order for part in parts])
    tokens, top_k = experts.shape
    slots = numpy.arange(top_k)
    keys = [numpy.broadcast_to(key, experts.shape).reshape(-1) for key in (slots, order[:, None], block[:, None])]
    if drop == "probability":
        keys.append(-scores.reshape(-1))
    # The last key counts first: by expert, then by score where that decides, then by block, place and slot.
    by_expert = numpy.lexsort([*keys, experts.reshape(-1)])
    counts = numpy.bincount(experts.reshape(-1), minlength=num_experts)
    starts = numpy.concatenate([[0], numpy.cumsum(counts)[:-1]])
    place = numpy.empty(tokens * top_k, numpy.int64)
    place[by_expert] = numpy.arange(tokens * top_k) - numpy.repeat(starts, counts)
    return place.reshape(tokens, top_k) < bound
