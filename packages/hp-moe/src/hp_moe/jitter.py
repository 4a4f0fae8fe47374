"""Noise that depends on a token's number alone, so that a token sees the same wherever it is routed."""

from __future__ import annotations

import numpy

_GOLDEN = numpy.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def uniform_noise(numbers: numpy.ndarray, width: int, seed: int, call: int) -> numpy.ndarray:
    """Return numbers uniform in [0, 1), float32 `[tokens, width]`, that depend on each token's number, seed and call.

    Element i of token n is the (n * width + i)-th output of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), which may be
    computed in any order, from a state that `seed` and `call` give.

    Args:
        numbers: of the tokens, int64 `[tokens]`, at least 0.

    Example:
        >>> both, second = (uniform_noise(np.array(numbers), 3, seed=0, call=5) for numbers in ([7, 8], [8]))
        >>> (both[1] == second[0]).all()
        np.True_
    """
    (start,) = numpy.random.SeedSequence([seed, call]).generate_state(1, numpy.uint64)
    index = numbers.astype(numpy.uint64)[:, None] * numpy.uint64(width) + numpy.arange(1, width + 1, dtype=numpy.uint64)
    # Unsigned arithmetic of arrays wraps around, as the generator wants.
    mixed = index * _GOLDEN + start
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> numpy.uint64(shift))) * numpy.uint64(factor)
    mixed ^= mixed >> numpy.uint64(31)
    noise: numpy.ndarray = (mixed >> numpy.uint64(40)).astype(numpy.float32) * numpy.float32(2.0**-24)
    return noise
