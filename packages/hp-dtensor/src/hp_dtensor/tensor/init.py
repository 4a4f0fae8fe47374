"""Initial values that depend on a seed, a parameter's name and an element's index, and on nothing else.

Every element has its own counter, so a rank generates its shard alone and any layout, on any platform,
starts from the same numbers: Philox 4x64 (Salmon et al., SC 2011) keyed by seed and name, one 64-bit word per
element.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hp_dtensor.exceptions import MetaTensorError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import platform_of
from hp_dtensor.tensor.dtensor import DTensor

Array = numpy.ndarray
_BLOCK_WORDS = 1 << 20


class Distribution(ABC):
    """A distribution of one parameter's elements, each drawn from one random 64-bit word."""

    @abstractmethod
    def values(self, words: Array) -> Array:
        """Return values (float64) for `words` (uint64), element by element."""


@dataclass(frozen=True)
class Constant(Distribution):
    """The same value everywhere."""

    value: float

    def values(self, words: Array) -> Array:
        return numpy.full(words.shape, self.value)


@dataclass(frozen=True)
class Uniform(Distribution):
    """Uniform in [low, high)."""

    low: float
    high: float

    def values(self, words: Array) -> Array:
        return self.low + (self.high - self.low) * (words >> numpy.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Normal(Distribution):
    """Normal with the given mean and standard deviation, by Box-Muller; at most 6.7 deviations off."""

    std: float
    mean: float = 0.0

    def values(self, words: Array) -> Array:
        # The half-open steps keep the logarithm's argument off zero.
        radius = ((words >> numpy.uint64(32)) + 0.5) * 2.0**-32
        angle = (words & numpy.uint64(0xFFFFFFFF)) * (2.0 * math.pi * 2.0**-32)
        normal: Array = numpy.sqrt(-2.0 * numpy.log(radius)) * numpy.cos(angle)
        return self.mean + self.std * normal


Initializer = Callable[[str, tuple[int, ...]], Distribution]


def init_parameters(
    module: Any,
    initializer: Initializer,
    seed: int,
    platform: Platform | str | None = None,
    *,
    skip: Container[str] = (),
) -> None:
    """Give every parameter of `module` its initial values, in place.

    A parameter that is a DTensor gets this rank's shard of the values that the whole tensor would get. One
    that goes by several names is drawn under the first.

    Args:
        module: a module of the platform, its parameters plain or distributed.
        initializer: (dotted name, global shape) -> how to draw it.
        seed: any integer; the same seed gives the same values everywhere.
        platform: default: the module's own where it is a `hp_dtensor.parallel.nn.Module`, else the selected one.
        skip: names of parameters that keep the values they have.

    Raises:
        MetaTensorError: parameters without data, all of them listed.

    Example:
        >>> from hp_dtensor.tensor.init import Constant, Normal
        >>> with nn.building(platform):
        ...     model = nn.Linear(4, 4)
        >>> init_parameters(model, lambda name, shape: Normal(0.02) if len(shape) > 1 else Constant(0.0), seed=0)
    """
    chosen = platform_of(module, platform)
    without_data = [name for name, parameter in chosen.named_parameters(module) if chosen.is_meta(parameter)]
    if without_data:
        raise MetaTensorError(f"parameters have no data: {', '.join(without_data)}; call materialize(module) first")
    with chosen.no_grad():
        for name, parameter in chosen.named_parameters(module):
            if name not in skip:
                _fill(chosen, parameter, initializer(name, tuple(parameter.shape)), stream_key(seed, name))


def _fill(platform: Platform, parameter: Any, distribution: Distribution, key: tuple[int, int]) -> None:
    shape = tuple(parameter.shape)
    offset, extent = (0,) * len(shape), shape
    local = parameter
    if isinstance(parameter, DTensor):
        local, (offset, extent) = platform.unwrap(parameter), parameter.spec.box()
    if math.prod(extent):
        values = draw(distribution, key, shape, offset, extent)
        platform.copy_(local, platform.from_numpy(values, platform.device_of(local)))


def stream_key(seed: int, name: str) -> tuple[int, int]:
    """Return the 128-bit Philox key of one parameter."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def draw(
    distribution: Distribution,
    key: tuple[int, int],
    shape: Sequence[int],
    offset: Sequence[int],
    extent: Sequence[int],
) -> Array:
    """Return the float32 values of the box at `offset` with shape `extent` of a tensor of `shape`.

    Args:
        key: from `stream_key`.
    """
    result = numpy.empty(tuple(extent), numpy.float32)
    for rows, words in _words(key, tuple(shape), tuple(offset), tuple(extent)):
        result[rows] = distribution.values(words)
    return result


def _words(
    key: tuple[int, int], shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]
) -> Iterator[tuple[Any, Array]]:
    """Yield indices of the box and the words of its elements there, in blocks of bounded size.

    Runs of whole rows are generated at once; where inner dimensions are cut, a row's words are generated up
    to the end of the box and sliced, at most the row's size.
    """
    if not shape:
        yield (), _run(key, 0, 1)[0]
        return
    row = math.prod(shape[1:])
    if extent[1:] == shape[1:]:
        rows = max(1, _BLOCK_WORDS // max(row, 1))
        for start in range(0, extent[0], rows):
            count = min(rows, extent[0] - start)
            words = _run(key, (offset[0] + start) * row, count * row)
            yield slice(start, start + count), words.reshape(count, *shape[1:])
        return
    inner = tuple(slice(o, o + e) for o, e in zip(offset[1:], extent[1:], strict=True))
    first, last = offset[1], offset[1] + extent[1]
    line = math.prod(shape[2:])
    for index in range(extent[0]):
        words = _run(key, (offset[0] + index) * row + first * line, (last - first) * line)
        yield index, words.reshape(last - first, *shape[2:])[(slice(None), *inner[1:])]


def _run(key: tuple[int, int], start: int, count: int) -> Array:
    """Return words start .. start+count of the key's stream (Philox makes four per counter)."""
    generator = numpy.random.Philox(
        key=numpy.array(key, numpy.uint64), counter=numpy.array([start // 4, 0, 0, 0], numpy.uint64)
    )
    return generator.random_raw(start % 4 + count)[start % 4 :]
