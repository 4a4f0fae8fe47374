"""Routing: the experts of the tokens of one call, with their scores and counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from hp_dtensor.platform.interface import Platform
from hp_moe.exceptions import ExpertParallelError

Tensor = Any


@dataclass(frozen=True, slots=True)
class Routing:
    """Destinations of the tokens of one call: decided once, and kept until their results are back.

    Attributes:
        experts: int64 `[tokens, top_k]`, global expert numbers; one may repeat within a token.
        counts: int64 `[num_experts]`: number of choices of each expert.
        scores: float32 `[tokens, top_k]`; None: results are not weighted.
        is_expert_major: tokens are sorted by expert already and `top_k` is 1.
        has_dropped: there may be choices with the number of experts in place of an expert, which go nowhere.
        takes_nonfinite: scores that are no finite numbers are let through.

    Example:
        >>> experts = platform.from_numpy(np.array([[0, 1], [1, 2]]))  # of two tokens, two each
        >>> routing = Routing(experts, counts=platform.from_numpy(np.array([1, 2, 1])))
        >>> tuple(routing.experts.shape)
        (2, 2)
    """

    experts: Tensor
    counts: Tensor
    scores: Tensor | None = None
    is_expert_major: bool = False
    has_dropped: bool = False
    takes_nonfinite: bool = False

    @classmethod
    def expert_major(cls, platform: Platform, counts: Tensor, num_rows: int, num_experts: int) -> Routing:
        """Return the routing of rows that are sorted by expert; this waits for the device, to read the counts.

        Args:
            counts: rows of each expert, an integer tensor `[num_experts]`.
            num_rows: rows there are.
            num_experts: experts there are, those of all ranks.

        Raises:
            ExpertParallelError: there is not one count for each expert, one is no whole number or below 0, or they do
                not add up to the rows.
        """
        host = platform.to_numpy(counts)
        _check_counts(host, num_rows, num_experts)
        experts = numpy.repeat(numpy.arange(num_experts), host).reshape(-1, 1)
        int64 = platform.ops.cast(counts, platform.dtype("int64"))
        return cls(platform.from_numpy(experts, platform.device_of(counts)), int64, is_expert_major=True)


def count_keys(platform: Platform, keys: Tensor, num_keys: int) -> Tensor:
    """Count how often each key below `num_keys` occurs in an int tensor of any shape: int64 `[num_keys]`."""
    size = int(numpy.prod(keys.shape))
    if size == 0:
        return platform.zeros((num_keys,), platform.dtype("int64"))
    return platform.ops.bincount(platform.ops.reshape(keys, (size,)), num_keys)


def local_numbers(platform: Platform, experts: Tensor, first: int, num_local: int) -> Tensor:
    """Renumber experts from the first of a rank; those of other ranks become `num_local`, which sorts last."""
    ops = platform.ops
    local = ops.sub(experts, first)
    elsewhere = ops.logical_or(ops.lt(local, 0), ops.ge(local, num_local))
    return ops.masked_fill(local, elsewhere, num_local)


def _check_counts(counts: numpy.ndarray, num_rows: int, num_experts: int) -> None:
    """Refuse counts that do not describe the rows: products of too few rows would go unnoticed."""
    if counts.shape != (num_experts,):
        raise ExpertParallelError(
            f"num_tokens_per_expert: expected one count for each of {num_experts} experts, got shape "
            f"{list(counts.shape)}"
        )
    if counts.dtype.kind not in "iu" or (counts < 0).any():
        raise ExpertParallelError(
            f"num_tokens_per_expert: expected whole numbers of rows, got {counts.tolist()} ({counts.dtype})"
        )
    if counts.sum() != num_rows:
        raise ExpertParallelError(
            f"num_tokens_per_expert: the counts {counts.tolist()} add up to {int(counts.sum())}, but there are "
            f"{num_rows} rows"
        )
