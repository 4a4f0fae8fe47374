"""Reductions of host arrays, one per rank, in rank order: the same bits on every rank and in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from mindspore import Tensor

from hp_dtensor.comm.process_group import no_average_of
from hp_platform_mindspore.tensor.memory import FLOATING, NAMES, decode, encode

Array = np.ndarray[Any, Any]
Reduction = Callable[[Sequence[Array]], Array]

PAIRWISE: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "product": np.multiply,
}


def reduction_of(x: Tensor, op: str) -> Reduction:
    """Return the function that reduces arrays of the dtype of `x`, one per rank, to one.

    Sums and products of bool mean any and all.

    Raises:
        CapabilityError: the average of a dtype that is not floating-point.
    """
    check_average(x, op)
    return _reduce_bfloat16(op) if NAMES[x.dtype] == "bfloat16" else _reduce_in_rank_order(op)


def check_average(x: Tensor, op: str) -> None:
    """Refuse averages of integers, which are no numbers of their dtype."""
    if op == "avg" and x.dtype not in FLOATING:
        raise no_average_of(x.dtype)


def _reduce_in_rank_order(op: str) -> Reduction:
    """Reduce pair by pair; every intermediate result has the dtype of the parts."""

    def reduction(parts: Sequence[Array]) -> Array:
        total = reduce(PAIRWISE[op], parts)
        return (total / len(parts)).astype(total.dtype) if op == "avg" else total

    return reduction


def _reduce_bfloat16(op: str) -> Reduction:
    """Reduce bit patterns pair by pair, with every intermediate result rounded to bfloat16."""

    def pair(x: Array, y: Array) -> Array:
        return encode(PAIRWISE[op](decode(x), decode(y)))

    def reduction(parts: Sequence[Array]) -> Array:
        total = reduce(pair, parts)
        return encode(decode(total) / np.float32(len(parts))) if op == "avg" else total

    return reduction
