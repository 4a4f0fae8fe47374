"""The models of the equality proof: MLP, transformer, tied embedding, frozen base with adapters, mixture of experts.

Every dimension is 1, 3 or 7. With `exact`, operations that round are replaced by ones that keep integers
integers, and small: clamping instead of norms, of softmax and of gates.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

from hp_dtensor.parallel import nn
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import replicate_like
from hp_moe import Activation, MoE, Scoring

DIM, WIDE, VOCABULARY, LENGTH, NUM_EXPERTS = 3, 7, 7, 3, 7
MODELS = ("mlp", "transformer", "tied", "frozen", "moe")
# Large, so that the norm of a small row does not magnify rounding.
NORM_EPSILON = 0.1


class Norm(nn.Module):
    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact = exact
        self.weight = self.parameter((DIM,))

    def forward(self, x):
        if self.exact:
            return self.ops.mul(self.ops.clamp(x, -1.0, 1.0), self.weight)
        return self.ops.rms_norm(x, self.weight, NORM_EPSILON)


class FeedForward(nn.Module):
    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact = exact
        self.up = nn.Linear(DIM, WIDE, bias=True)
        self.down = nn.Linear(WIDE, DIM)

    def forward(self, x):
        y = self.up(x)
        return self.down(self.ops.clamp(y, 0.0, 2.0) if self.exact else self.ops.silu(y))


class Attention(nn.Module):
    """Seven causal heads of width 1."""

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact = exact
        self.q, self.k, self.v = nn.Linear(DIM, WIDE), nn.Linear(DIM, WIDE), nn.Linear(DIM, WIDE)
        self.out = nn.Linear(WIDE, DIM)

    def forward(self, x):
        q, k, v = (self._heads(each(x)) for each in (self.q, self.k, self.v))
        y = self._clamped(q, k, v) if self.exact else self.ops.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(self.ops.reshape(self.ops.transpose(y, 1, 2), (*x.shape[:2], WIDE)))

    def _heads(self, x):
        return self.ops.transpose(self.ops.reshape(x, (*x.shape[:2], WIDE, 1)), 1, 2)

    def _clamped(self, q, k, v):
        scores = self.ops.clamp(self.ops.matmul(q, self.ops.transpose(k, 2, 3)), 0.0, 1.0)
        mask = self.platform.from_numpy(numpy.tril(numpy.ones((LENGTH, LENGTH), numpy.float32)))
        return self.ops.matmul(self.ops.mul(scores, replicate_like(mask, scores)), v)


class Adapter(nn.Module):
    """A residual of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(DIM, 1), nn.Linear(1, DIM)

    def forward(self, x):
        return self.ops.add(x, self.back(self.into(x)))


class Block(nn.Module):
    def __init__(self, kind: str, exact: bool) -> None:
        super().__init__()
        self.attention_norm = None if kind == "mlp" else Norm(exact)
        self.attention = None if kind == "mlp" else Attention(exact)
        self.norm = Norm(exact)
        self.mix = _experts(exact) if kind == "moe" else FeedForward(exact)
        self.adapter = Adapter() if kind == "frozen" else None
        self.scale = self.parameter((1,))

    def forward(self, x):
        if self.attention is not None:
            x = self.ops.add(x, self.attention(self.attention_norm(x)))
        x = self.ops.add(x, self.ops.mul(self.mix(self.norm(x)), self.scale))
        return x if self.adapter is None else self.adapter(x)


class Net(nn.Module):
    """`[batch, length]` ids (MLP: `[batch, length, dim]` numbers) -> `[batch, length, vocabulary]`."""

    def __init__(self, kind: str, exact: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM, bias=True) if kind == "mlp" else nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList([Block(kind, exact) for _ in range(2)])
        self.head = nn.Linear(DIM, VOCABULARY)
        if kind == "tied":
            self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Scores are the logits themselves, and the gate of an expert is a clamp.
LOGITS = Scoring(lambda ops, logits: logits, lambda ops, chosen: chosen, lambda ops, logits, scores: logits)
CLAMPED = Activation("clamped", lambda ops, gate, up: ops.mul(ops.clamp(gate, 0.0, 1.0), up))


def _experts(exact: bool) -> Any:
    if not exact:
        return MoE(DIM, WIDE, NUM_EXPERTS, 2)
    layer = MoE(DIM, WIDE, NUM_EXPERTS, 2, load_balance_coeff=1.0, activation=CLAMPED)
    layer.router.scoring = LOGITS
    # Which expert is chosen must not hang on the order of equal scores.
    apart = numpy.arange(NUM_EXPERTS, dtype=numpy.float32) / 8
    layer.platform.copy_(layer.expert_bias, layer.platform.from_numpy(apart))
    return layer


def build(platform: Platform, kind: str, exact: bool) -> Any:
    """Return the model with its initial values: random numbers, or -1, 0 and 1."""
    with nn.building(platform):
        model = Net(kind, exact)
    for index, (name, parameter) in enumerate(platform.named_parameters(model)):
        rng = numpy.random.default_rng([7, index])
        shape = tuple(parameter.shape)
        scale = 0.3 if len(shape) == 1 else 0.8 / math.sqrt(shape[-1])
        values = rng.integers(-1, 2, shape) if exact else scale * rng.normal(size=shape) + (len(shape) == 1) * 0.7
        platform.copy_(parameter, platform.from_numpy(values.astype(numpy.float32)))
        if kind == "frozen" and not name.endswith(("norm.weight", "into.weight", "back.weight")):
            platform.set_requires_grad(parameter, False)
    return model
