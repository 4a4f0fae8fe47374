"""The dense feed-forward network of a decoder block."""

from __future__ import annotations

from typing import Any

from hp_dtensor.parallel import nn

Tensor = Any


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): `w2(silu(w1(x)) * w3(x))`.

    Example:
        >>> with nn.building(platform):
        ...     layer = FeedForward(dim=4, hidden_dim=8)
        >>> tuple(layer(platform.ops.ones((2, 3, 4), platform.dtype("float32"))).shape)
        (2, 3, 4)
    """

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim)
        self.w2 = nn.Linear(hidden_dim, dim)
        self.w3 = nn.Linear(dim, hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to every token: `[..., dim]` -> `[..., dim]`."""
        return self.w2(self.ops.mul(self.ops.silu(self.w1(x)), self.w3(x)))
