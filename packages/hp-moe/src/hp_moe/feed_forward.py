"""The dense feed-forward network of a decoder block."""

from __future__ import annotations

from typing import Any

from hp_dtensor.parallel import nn
from hp_moe.activations import Activation, find_activation

Tensor = Any


class FeedForward(nn.Module):
    """`w2(activation(w1(x), w3(x)))`, SwiGLU (arXiv 2002.05202) unless said otherwise.

    Args:
        activation: a name (`swiglu`, `geglu`, `geglu_tanh`, `reglu`, `relu_squared`, `gelu`, `clamped_swiglu`) or an
            `Activation`; `w3` is None for one without a gate.
        bias: the three products have biases.

    Raises:
        MoEConfigError: no activation has this name.

    Example:
        >>> with nn.building(platform):
        ...     layer = FeedForward(dim=4, hidden_dim=8)
        >>> tuple(layer(platform.ops.ones((2, 3, 4), platform.dtype("float32"))).shape)
        (2, 3, 4)
    """

    def __init__(
        self, dim: int, hidden_dim: int, activation: str | Activation = "swiglu", *, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = find_activation(activation)
        self.w1 = nn.Linear(dim, hidden_dim, bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias)
        self.w3 = nn.Linear(dim, hidden_dim, bias) if self.activation.is_gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to every token: `[..., dim]` -> `[..., dim]`."""
        up = None if self.w3 is None else self.w3(x)
        return self.w2(self.activation.apply(self.ops, self.w1(x), up))
