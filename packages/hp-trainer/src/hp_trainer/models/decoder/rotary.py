"""Rotary frequencies, and the ways to stretch them beyond the length that a model was trained on.

Each kind follows `transformers.modeling_rope_utils`, so that a model that was trained there means the same here.

Rotary positions (arXiv 2104.09864): pairs (i, i + head_dim / 2) turn with the token's position.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.conversions import replicate_like
from hp_trainer.models.decoder.config import DecoderConfig, RopeScalingConfig

Array = numpy.ndarray


def rotary_frequencies(dim: int, theta: float, scaling: RopeScalingConfig) -> tuple[Array, float]:
    """Return the angle per position of each rotated pair, and the factor on cosines and sines.

    Args:
        dim: width of a head's rotated part.
        theta: base of the angles.

    Returns:
        float64 `[dim / 2]` in radians, and the factor (1 but for YaRN).
    """
    plain = theta ** (-numpy.arange(0, dim, 2) / dim)
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(plain, dim, theta, scaling), _yarn_attention_factor(scaling)
    return plain, 1.0


def score_factor(scaling: RopeScalingConfig) -> float:
    """Return the factor on latent attention's scores that comes with YaRN (DeepSeek-V3's `mscale_all_dim`)."""
    if scaling.kind != "yarn" or scaling.mscale_all_dim is None:
        return 1.0
    return _magnitude(scaling.factor, scaling.mscale_all_dim) ** 2


def _llama3(plain: Array, scaling: RopeScalingConfig) -> Array:
    assert scaling.original_max_position_embeddings is not None
    length, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    # Turns of each pair within a text of the first training: few-turning pairs are slowed, fast ones kept.
    turns = length * plain / (2 * math.pi)
    kept = numpy.clip((turns - low) / (high - low), 0.0, 1.0)
    blended: Array = (1 - kept) * plain / scaling.factor + kept * plain
    return blended


def _yarn(plain: Array, dim: int, theta: float, scaling: RopeScalingConfig) -> Array:
    """Blend slowed and plain angles by frequency (arXiv 2309.00071, section 3.2)."""
    assert scaling.original_max_position_embeddings is not None
    length = scaling.original_max_position_embeddings

    def pair_that_turns(times: float) -> float:
        return dim * math.log(length / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # Equal ends would divide by zero.
    high = high + 0.001 if low == high else high
    slowed = numpy.clip((numpy.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    blended: Array = slowed * plain / scaling.factor + (1 - slowed) * plain
    return blended


def _yarn_attention_factor(scaling: RopeScalingConfig) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        return _magnitude(scaling.factor, scaling.mscale) / _magnitude(scaling.factor, scaling.mscale_all_dim)
    return _magnitude(scaling.factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


Tensor = Any


class RotaryTables:
    """Cosines and sines by length, made once each.

    Attributes:
        sequence_ranks: ranks that share a sequence; positions are those of the whole.
    """

    def __init__(self, platform: Platform, config: DecoderConfig) -> None:
        self.platform, self.sequence_ranks = platform, 1
        self.frequencies, self.factor = rotary_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def of_length(self, length: int, positions: Tensor | None, like: Tensor) -> Rotation:
        """Return the rotation of a text of `length` tokens, replicated where `like` is distributed.

        Args:
            positions: int64 `[batch, length]`, each below the length of the whole sequence; None: 0 .. length - 1 in
                every sample.
        """
        if positions is not None and self.sequence_ranks > 1:
            # This rank has one or two chunks of the sequence, each at most one token shorter than another rank's.
            length = (length + 2) * self.sequence_ranks
        if length not in self._tables:
            # In float64: at position 10**6 an angle in float32 is off by up to 0.03 radians.
            angles = numpy.outer(numpy.arange(length), self.frequencies)
            tables = (self.factor * numpy.cos(angles), self.factor * numpy.sin(angles))
            cos, sin = (self.platform.from_numpy(table.astype(numpy.float32)) for table in tables)
            self._tables[length] = cos, sin
        cos, sin = (self._rows(table, positions) for table in self._tables[length])
        return Rotation(self.platform, replicate_like(cos, like), replicate_like(sin, like))

    def _rows(self, table: Tensor, positions: Tensor | None) -> Tensor:
        """Return the rows of the positions with a dimension for the heads: `[(batch,) length, 1, pairs]`."""
        ops = self.platform.ops
        return ops.unsqueeze(table if positions is None else ops.embedding(positions, table), -2)


class Rotation:
    """Turns queries and keys.

    An object rather than two tensors, so that mixed precision, which casts a module's inputs, leaves the
    angles of far positions exact.
    """

    __slots__ = ("cos", "platform", "sin")

    def __init__(self, platform: Platform, cos: Tensor, sin: Tensor) -> None:
        self.platform, self.cos, self.sin = platform, cos, sin

    def __call__(self, x: Tensor, *, interleaved: bool = False) -> Tensor:
        """Turn `x` `[batch, length, heads, head_dim]`, in float32; the result has `x`'s dtype.

        Args:
            interleaved: the pairs are neighbours (2i, 2i + 1); in the result they lie half a head apart all the same,
                which scores, products of two such vectors, do not see.
        """
        ops = self.platform.ops
        first, second = self._pairs(ops.cast(x, self.platform.dtype("float32")), interleaved)
        turned = (
            ops.sub(ops.mul(first, self.cos), ops.mul(second, self.sin)),
            ops.add(ops.mul(second, self.cos), ops.mul(first, self.sin)),
        )
        return ops.cast(ops.cat(turned, -1), x.dtype)

    def _pairs(self, x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
        ops = self.platform.ops
        if not interleaved:
            first, second = ops.chunk(x, 2, -1)
            return first, second
        *outer, width = x.shape
        first, second = ops.chunk(ops.reshape(x, (*outer, width // 2, 2)), 2, -1)
        return ops.squeeze(first, -1), ops.squeeze(second, -1)
