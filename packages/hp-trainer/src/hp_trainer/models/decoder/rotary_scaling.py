"""Rotary frequencies, and the ways to stretch them beyond the length that a model was trained on.

Each kind follows `transformers.modeling_rope_utils`, so that a model that was trained there means the same here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy

from hp_trainer.config import setting
from hp_trainer.exceptions import Problem

Array = numpy.ndarray


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Stretching of rotary angles; the defaults change nothing."""

    kind: Literal["default", "linear", "llama3", "yarn"] = setting(
        "default", help="as they are; all slower; slow ones slower (Llama 3.1); or by frequency (YaRN)"
    )
    factor: float = setting(1.0, help="how many times longer texts become", minimum=1)
    original_max_position_embeddings: int | None = setting(
        None, help="llama3, yarn: tokens of a text when the model was first trained", minimum=1
    )
    low_freq_factor: float = setting(1.0, help="llama3: turns in a text below which an angle is slowed fully", above=0)
    high_freq_factor: float = setting(4.0, help="llama3: turns in a text above which an angle stays", above=0)
    beta_fast: float = setting(32.0, help="yarn: turns in a text above which an angle stays", above=0)
    beta_slow: float = setting(1.0, help="yarn: turns in a text below which an angle is slowed fully", above=0)
    attention_factor: float | None = setting(
        None, help="yarn: factor on rotated queries and keys; null: from factor and mscale", above=0
    )
    mscale: float | None = setting(None, help="yarn: weight of the factor on queries and keys (DeepSeek)", above=0)
    mscale_all_dim: float | None = setting(
        None, help="yarn: the same for all dimensions, which scales attention's scores too (DeepSeek)", above=0
    )
    truncate: bool = setting(True, help="yarn: round the first and last slowed pair to whole ones")

    def check(self) -> Iterator[Problem]:
        if self.kind in ("llama3", "yarn") and self.original_max_position_embeddings is None:
            yield Problem(
                path="original_max_position_embeddings",
                what=f"{self.kind} slows angles by how often they turn in a text of the first training",
                expected="a whole number >= 1",
                got="null",
            )
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            yield Problem(
                path="high_freq_factor",
                what="must be above low_freq_factor",
                expected=f"a number > {self.low_freq_factor}",
                got=str(self.high_freq_factor),
            )


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
