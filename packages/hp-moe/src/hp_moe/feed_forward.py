"""The dense feed-forward network of a decoder block, and activations of feed-forward networks.

A gated activation maps two products, `gate = w1 @ row` and `up = w3 @ row`, to the hidden row. One without a gate maps
the first alone, and its network has no `w3`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor.parallel import nn
from hp_moe.exceptions import MoEConfigError

Tensor = Any
Ops = Any


@dataclass(frozen=True)
class Activation:
    """An activation of feed-forward networks.

    Args:
        name: name in messages.
        apply: differentiable element-wise function of (ops, gate, up) that returns the hidden row. `gate` and `up` are
            `[..., hidden_dim]`; `up` is None without a gate. `ops` are the platform's operations.
        is_gated: whether `up` is used, so that the network has a weight `w3`.

    Examples:
        >>> cubed = Activation("cubed", lambda ops, gate, up: ops.pow(gate, 3.0), is_gated=False)
        >>> with nn.building(platform):
        ...     layer = FeedForward(dim=4, hidden_dim=8, activation=cubed)
        >>> layer.w3 is None
        True
    """

    name: str
    apply: Callable[[Ops, Tensor, Tensor | None], Tensor]
    is_gated: bool = True


def clamped_swiglu(limit: float = 7.0, alpha: float = 1.702, up_offset: float = 1.0) -> Activation:
    """Return gpt-oss' activation: `min(gate, limit) * sigmoid(alpha * gate) * (clamp(up, -limit, limit) + up_offset)`.

    The gate within the sigmoid is clamped too. Source: the model card of gpt-oss (arXiv 2508.10925) and its public
    implementation.

    Raises:
        MoEConfigError: `limit` is not above 0.

    Examples:
        >>> gate = platform.from_numpy(np.array([100.0], np.float32))
        >>> hidden = clamped_swiglu().apply(platform.ops, gate, gate)  # 7 * sigmoid(1.702 * 7) * (7 + 1)
        >>> round(float(platform.to_numpy(hidden)[0]), 2)
        56.0
    """
    if not limit > 0:
        raise MoEConfigError(f"clamped_swiglu: limit must be above 0, got {limit}")

    def apply(ops: Ops, gate: Tensor, up: Tensor | None) -> Tensor:
        gate = ops.clamp(gate, max=limit)
        gate = ops.mul(gate, ops.sigmoid(ops.mul(gate, alpha)))
        return ops.mul(gate, ops.add(ops.clamp(up, min=-limit, max=limit), up_offset))

    return Activation(f"clamped_swiglu({limit}, {alpha}, {up_offset})", apply)


def _gelu_tanh(ops: Ops, x: Tensor) -> Tensor:
    cubic = ops.add(x, ops.mul(ops.mul(ops.mul(x, x), x), 0.044715))
    # (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel.
    return ops.mul(x, ops.sigmoid(ops.mul(cubic, 2 * math.sqrt(2 / math.pi))))


def _gated(function: Callable[[Ops, Tensor], Tensor]) -> Callable[[Ops, Tensor, Tensor | None], Tensor]:
    return lambda ops, gate, up: ops.mul(function(ops, gate), up)


SWIGLU = Activation("swiglu", _gated(lambda ops, gate: ops.silu(gate)))

_BY_NAME = {
    activation.name: activation
    for activation in (
        SWIGLU,
        # arXiv 2002.05202; the second with the approximation that Gemma uses.
        Activation("geglu", _gated(lambda ops, gate: ops.gelu(gate))),
        Activation("geglu_tanh", _gated(_gelu_tanh)),
        Activation("reglu", _gated(lambda ops, gate: ops.relu(gate))),
        # arXiv 2109.08668.
        Activation("relu_squared", lambda ops, gate, up: ops.square(ops.relu(gate)), is_gated=False),
        Activation("gelu", lambda ops, gate, up: ops.gelu(gate), is_gated=False),
    )
}


@functools.cache
def find_activation(activation: str | Activation) -> Activation:
    """Return the activation of this name, or `activation` itself.

    Raises:
        MoEConfigError: no activation has this name; the message lists the known names.
    """
    if isinstance(activation, Activation):
        return activation
    if activation == "clamped_swiglu":
        return clamped_swiglu()
    if activation not in _BY_NAME:
        known = ", ".join(sorted([*_BY_NAME, "clamped_swiglu"]))
        raise MoEConfigError(f"activation must be one of {known}, or an Activation, got {activation!r}")
    return _BY_NAME[activation]


class FeedForward(nn.Module):
    """Feed-forward network `w2(activation(w1(x), w3(x)))`, by default with SwiGLU (arXiv 2002.05202).

    Args:
        activation: a name (`swiglu`, `geglu`, `geglu_tanh`, `reglu`, `relu_squared`, `gelu`, `clamped_swiglu`) or an
            `Activation`; `w3` is None for one without a gate.
        bias: give the three linear layers biases.

    Raises:
        MoEConfigError: no activation has this name.

    Examples:
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
