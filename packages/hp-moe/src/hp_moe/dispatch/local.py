"""The dispatcher of a rank that owns all experts."""

from __future__ import annotations

from typing import Any

import numpy

from hp_dtensor.parallel.recompute import kept
from hp_dtensor.platform.interface import Platform
from hp_moe.dispatch.base import Dispatched, TokenDispatcher
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.grouped_gemm import GroupSizes
from hp_moe.routing import Routing

Tensor = Any


class LocalDispatcher(TokenDispatcher):
    """Leaves rows where they are and finds their expert-major order; nothing is communicated.

    Example:
        >>> x = platform.ops.ones((3, 4), platform.dtype("float32"))
        >>> experts = platform.from_numpy(np.array([[0, 1], [1, 2], [0, 2]]))
        >>> routing = Routing(experts, platform.from_numpy(np.array([2, 2, 2])))
        >>> sent = LocalDispatcher(platform).dispatch(x, routing)
        >>> sent.sizes.host  # inputs of each expert
        (2, 2, 2)
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Find the order of tokens by expert; see `TokenDispatcher`."""
        sizes = GroupSizes(self.platform, routing.counts)
        if routing.is_expert_major:
            return Dispatched(x, sizes, routing.scores, None)
        num_rows = sum(sizes.host) if routing.has_dropped else int(numpy.prod(routing.experts.shape))
        # Kept: a recomputation in backward must see the order of forward, and need not sort again.
        permutation = kept(lambda: TokenPermutation(self.platform, routing.experts, num_rows))
        return Dispatched(x, sizes, routing.scores, permutation)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Return `y`; see `TokenDispatcher`."""
        return y
