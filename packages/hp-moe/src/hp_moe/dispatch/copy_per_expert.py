"""Expert parallel with one copy of a row for each expert, as most implementations send them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy

from hp_dtensor.parallel.recompute import kept
from hp_moe.dispatch.all_to_all import AllToAllDispatcher
from hp_moe.dispatch.base import Dispatched
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.routing import Routing

Tensor = Any


class CopyPerExpertDispatcher(AllToAllDispatcher):
    """Sends `top_k` copies of every token, even those that go to the same rank, and brings as many results back.

    It is an oracle of `AllToAllDispatcher`, and what that is compared with.

    Example:
        >>> def program():
        ...     with nn.building(platform):
        ...         layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2)
        ...     ExpertParallel("copy_per_expert").apply(layer, init_device_mesh("cpu", (2,)))
        ...     return tuple(layer(platform.ops.ones((3, 4), platform.dtype("float32"))).shape)
        >>> run_ranks(program, 2)
        [(3, 4), (3, 4)]
    """

    def dispatch(self, x: Tensor, routing: Routing) -> Dispatched:
        """Send a copy of each token to each of its experts; see `TokenDispatcher`."""
        tokens, top_k = (int(size) for size in routing.experts.shape)
        copies = kept(lambda: self._copies(tokens, top_k, x))
        shape = (tokens * top_k, 1)
        single = replace(
            routing,
            experts=self.platform.ops.reshape(routing.experts, shape),
            scores=None if routing.scores is None else self.platform.ops.reshape(routing.scores, shape),
        )
        return replace(super().dispatch(copies.permute(x), single), copies=copies)

    def combine(self, y: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring every copy's result back and add up those of a token; see `TokenDispatcher`."""
        assert dispatched.copies is not None
        return dispatched.copies.unpermute(super().combine(y, dispatched))

    def _copies(self, tokens: int, top_k: int, x: Tensor) -> TokenPermutation:
        keys = self._constant(numpy.arange(tokens * top_k).reshape(tokens, top_k), x)
        return TokenPermutation(self.platform, keys, tokens * top_k)
