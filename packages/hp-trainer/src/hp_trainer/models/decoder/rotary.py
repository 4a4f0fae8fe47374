"""Rotary positions (arXiv 2104.09864): element pairs (i, i + head_dim / 2) rotate with the token's position.

Frequencies are scaled for longer texts as in `transformers.modeling_rope_utils`, so that a model trained there computes
the same here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import replicate_like
from hp_trainer.models.decoder.options import DecoderOptions, RopeScalingConfig

Array = numpy.ndarray


def rotary_frequencies(dim: int, theta: float, scaling: RopeScalingConfig) -> tuple[Array, float]:
    """Return the angle per position of each rotated pair, and the factor on cosines and sines.

    Args:
        dim: width of the rotated part of a head.
        theta: base of the frequencies.

    Returns:
        float64 `[dim / 2]` in radians, and the factor, which is 1 except for YaRN.
    """
    # theta**(-2i / dim) for pair i (arXiv 2104.09864, section 3.2.2).
    plain = theta ** (-numpy.arange(0, dim, 2) / dim)
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, dim, theta, scaling), _yarn_attention_factor(scaling)
    return plain, 1.0


def score_factor(scaling: RopeScalingConfig) -> float:
    """Return YaRN's factor on the scores of latent attention (DeepSeek-V3's `mscale_all_dim`); 1 without YaRN."""
    if scaling.kind != "yarn" or scaling.mscale_all_dim is None:
        return 1.0
    return _magnitude(scaling.factor, scaling.mscale_all_dim) ** 2


def _llama3(plain: Array, scaling: RopeScalingConfig) -> Array:
    assert scaling.original_max_position_embeddings is not None
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    # Rotations of each pair within a text of the first training: slow pairs are scaled, fast ones unchanged.
    turns = length * plain / (2 * math.pi)
    unscaled = numpy.clip((turns - low) / (high - low), 0.0, 1.0)
    blended: Array = (1 - unscaled) * plain / scaling.factor + unscaled * plain
    return blended


def _yarn(plain: Array, dim: int, theta: float, scaling: RopeScalingConfig) -> Array:
    """Blend scaled and unscaled frequencies (arXiv 2309.00071, section 3.2)."""
    assert scaling.original_max_position_embeddings is not None
    length = scaling.original_max_position_embeddings

    def pair_that_turns(times: float) -> float:
        # The pair i with `length * theta**(-2i / dim) = 2 pi * times`, solved for i.
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    # Pairs faster than `low` keep their frequency, slower than `high` are scaled, and those between are blended.
    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # Equal bounds would divide by zero.
    high = high + 0.001 if low == high else high
    scaled = numpy.clip((numpy.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    blended: Array = scaled * plain / scaling.factor + (1 - scaled) * plain
    return blended


def _yarn_attention_factor(scaling: RopeScalingConfig) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _magnitude(scaling.factor, scaling.mscale) / _magnitude(scaling.factor, scaling.mscale_all_dim)
    return _magnitude(scaling.factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    # sqrt(1 / t) = 0.1 ln(s) + 1 (YaRN, section 3.4), with DeepSeek's factor `mscale`.
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


Tensor = Any


class RotaryTables:
    """Cosines and sines of all positions, computed once per length.

    Attributes:
        sequence_ranks: context parallel ranks that share a sequence; positions are those in the full sequence.
    """

    def __init__(self, platform: Platform, config: DecoderOptions) -> None:
        self.platform, self.sequence_ranks = platform, 1
        self.frequencies, self.factor = rotary_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def of_length(self, length: int, positions: Tensor | None, like: Tensor) -> Rotation:
        """Return the rotation of a text of `length` tokens, replicated over the mesh of `like` if that is a DTensor.

        Args:
            positions: int64 `[batch, length]`, each below the length of the full sequence; None: 0 .. length - 1 in
                every sample.
        """
        if positions is not None and self.sequence_ranks > 1:
            # A rank has one or two chunks of the sequence, each at most one token shorter than those of other ranks.
            length = (length + 2) * self.sequence_ranks
        if length not in self._tables:
            # In float64: at position 10**6 an angle in float32 is off by up to 0.03 radians.
            angles = numpy.outer(numpy.arange(length), self.frequencies)
            tables = (self.factor * numpy.cos(angles), self.factor * numpy.sin(angles))
            cos, sin = (self.platform.from_numpy(table.astype(numpy.float32)) for table in tables)
            self._tables[length] = cos, sin
        cos, sin = self._tables[length]
        ops = self.platform.ops
        if positions is not None:
            cos, sin = ops.embedding(positions, cos), ops.embedding(positions, sin)
        # Broadcastable over heads: `[(batch,) length, 1, pairs]`.
        cos, sin = ops.unsqueeze(cos, -2), ops.unsqueeze(sin, -2)
        return Rotation(self.platform, replicate_like(cos, like), replicate_like(sin, like))


class Rotation:
    """Rotates queries and keys by their positions.

    An object rather than two tensors: mixed precision casts the tensors among a module's inputs, and in 16 bits the
    angles of far positions would be wrong.
    """

    __slots__ = ("cos", "platform", "sin")

    def __init__(self, platform: Platform, cos: Tensor, sin: Tensor) -> None:
        self.platform, self.cos, self.sin = platform, cos, sin

    def __call__(self, x: Tensor, *, interleaved: bool = False) -> Tensor:
        """Rotate `x` `[batch, length, heads, head_dim]` in float32; the result has `x`'s dtype.

        Args:
            interleaved: pairs are neighbours (2i, 2i + 1). The result has them half a head apart all the same, which
                changes no score, because scores are products of two such vectors.
        """
        ops = self.platform.ops
        wide = ops.cast(x, self.platform.dtype("float32"))
        fused = None if interleaved else self.platform.fused_rotary(wide, self.cos, self.sin)
        if fused is not None:
            return ops.cast(fused, x.dtype)
        first, second = self._pairs(wide, interleaved)
        rotated = (
            ops.sub(ops.mul(first, self.cos), ops.mul(second, self.sin)),
            ops.add(ops.mul(second, self.cos), ops.mul(first, self.sin)),
        )
        return ops.cast(ops.cat(rotated, -1), x.dtype)

    def _pairs(self, x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ops = self.platform.ops
        if not interleaved:
            first, second = ops.chunk(x, 2, -1)
            return first, second
        *outer, width = x.shape
        first, second = ops.chunk(ops.reshape(x, (*outer, width // 2, 2)), 2, -1)
        return ops.squeeze(first, -1), ops.squeeze(second, -1)
