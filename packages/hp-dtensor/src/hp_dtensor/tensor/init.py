"""Initialization: models on the meta device, memory for their shards, and initial values that ignore the placements.

    with init_empty_weights(platform):
        model = Decoder(...)                     # shapes only
    shard_module(model, mesh, plan)              # shapes of shards only
    materialize(model)                           # this rank's shards, uninitialised
    init_parameters(model, initializer, seed)    # this rank's shard of every value

An initial value depends only on the seed, the name of the parameter and the index of the element: it is computed from
one 64-bit word of Philox 4x64 (Salmon et al., SC 2011), keyed by seed and name, with the index as counter. So a rank
generates just its own shard, and all placements and platforms start from the same values.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hp_dtensor.exceptions import MetaTensorError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform, platform_of
from hp_dtensor.tensor.dtensor import DTensor

Module = Any
Tensor = Any
MakeBuffer = Callable[[str, tuple[int, ...], Any], Tensor]
"""Function from (dotted name, shape, dtype) to the plain tensor of a buffer."""


@contextlib.contextmanager
def init_on_device(device: Any, platform: Platform | str | None = None) -> Iterator[None]:
    """Create tensors and modules inside the block on `device`. On `"meta"` they have shapes and no data.

    Raises:
        CapabilityError: the platform has no such device. MindSpore has `"meta"` from 2.10 on, for the parameters of
            modules only.

    Examples:
        >>> with init_on_device("meta", platform), nn.building(platform):
        ...     model = nn.Linear(1000, 1000)
        >>> platform.is_meta(model.weight)
        True
    """
    with get_platform(platform).default_device(device):
        yield


def init_empty_weights(platform: Platform | str | None = None) -> contextlib.AbstractContextManager[None]:
    """Create tensors and modules inside the block without data, for a model that is too large for one rank.

    Examples:
        >>> with init_empty_weights(platform), nn.building(platform):
        ...     model = nn.Linear(1000, 1000)
        >>> platform.is_meta(model.weight)
        True
    """
    return init_on_device("meta", platform)


def materialize(
    module: Module, device: Any = None, *, buffers: MakeBuffer | None = None, platform: Platform | str | None = None
) -> Module:
    """Allocate uninitialised memory for every parameter on the meta device, and return the module.

    A DTensor gets memory for this rank's shard. Parameters with data are unchanged. Shared parameters stay shared.

    Args:
        device: default: this rank's.
        buffers: creates the buffers that are on the meta device, whose values `init_parameters` does not set.
        platform: default: the module's own if it is a `hp_dtensor.parallel.nn.Module`, else the selected one.

    Raises:
        MetaTensorError: there are buffers without data and no `buffers`, or `buffers` returns another shape. The module
            is unchanged then.

    Examples:
        >>> with init_empty_weights(platform), nn.building(platform):
        ...     model = nn.Linear(4, 4)
        >>> platform.is_meta(materialize(model, platform=platform).weight)
        False
    """
    chosen = platform_of(module, platform)
    missing = [name for name, buffer in chosen.named_buffers(module) if chosen.is_meta(buffer)]
    if missing and buffers is None:
        raise MetaTensorError(
            f"buffers have no data, and materialize does not know their values: {', '.join(missing)}. Pass "
            "buffers=function(name, shape, dtype), or create them outside of init_empty_weights."
        )
    owners = list(chosen.named_modules(module))
    # All are made before any is set, so that an error leaves the module unchanged.
    new_buffers = [
        each for path, owner in owners if buffers is not None for each in _new_buffers(chosen, owner, path, buffers)
    ]
    made: dict[int, Tensor] = {}
    for _, owner in owners:
        # A list, because parameters are replaced on the way.
        for name, old in list(chosen.named_parameters(owner, recurse=False, remove_duplicate=False)):
            if chosen.is_meta(old):
                # By identity, and under every name: a tied parameter stays one parameter.
                if id(old) not in made:
                    made[id(old)] = _with_memory(chosen, old, device)
                chosen.set_parameter(owner, name, made[id(old)])
    for owner, name, buffer in new_buffers:
        setattr(owner, name, buffer)
    return module


def _with_memory(platform: Platform, old: Tensor, device: Any) -> Tensor:
    """Return an uninitialised parameter with shape, placements and dtype of `old`."""
    with platform.no_grad():
        data = platform.empty(platform.local_shape(old), old.dtype, device)
        if isinstance(old, DTensor):
            data = platform.wrap(data, old.spec)
    return platform.Parameter(data, requires_grad=platform.requires_grad(old))


def _new_buffers(
    platform: Platform, owner: Module, path: str, make: MakeBuffer
) -> Iterator[tuple[Module, str, Tensor]]:
    """Yield (owner, name, new buffer) for each buffer without data that a module with the dotted name `path` owns."""
    for name, old in list(platform.named_buffers(owner)):
        # Buffers of submodules are listed too, but are set at their owners.
        if "." in name or not platform.is_meta(old):
            continue
        full_name = f"{path}.{name}" if path else name
        new = make(full_name, tuple(old.shape), old.dtype)
        if tuple(new.shape) != tuple(old.shape):
            raise MetaTensorError(f"buffer {full_name}: expected shape {list(old.shape)}, got {list(new.shape)}")
        yield owner, name, new


def meta_tensors(module: Module, platform: Platform | str | None = None) -> list[str]:
    """Return the dotted names of the parameters and buffers without data."""
    chosen = platform_of(module, platform)
    named = [*chosen.named_parameters(module), *chosen.named_buffers(module)]
    return [name for name, x in named if chosen.is_meta(x)]


# Initial values -------------------------------------------------------------------------------------------

Array = numpy.ndarray
_BLOCK_WORDS = 1 << 20  # 8 MiB at a time, however large the parameter is


class Distribution(ABC):
    """Distribution of the elements of a parameter. Each element is computed from one random 64-bit word."""

    @abstractmethod
    def values(self, words: Array) -> Array:
        """Return values (float64) for `words` (uint64), element by element."""


@dataclass(frozen=True)
class Constant(Distribution):
    """The same value for every element."""

    value: float

    def values(self, words: Array) -> Array:
        return numpy.full(words.shape, self.value)


@dataclass(frozen=True)
class Uniform(Distribution):
    """Uniform in [low, high)."""

    low: float
    high: float

    def values(self, words: Array) -> Array:
        # The upper 53 bits, because a float64 has no more: the factor is exact and below 1.
        return self.low + (self.high - self.low) * (words >> numpy.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Normal(Distribution):
    """Normal distribution by the Box-Muller method; values are at most 6.8 standard deviations from the mean."""

    std: float
    mean: float = 0.0

    def values(self, words: Array) -> Array:
        # Adding 0.5 keeps the argument of the logarithm above zero.
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
    """Set the initial values of all parameters of `module`, in place.

    A DTensor gets this rank's shard of the values that a plain parameter would get. The values of a shared parameter
    follow from the first of its names.

    Args:
        module: a module of the platform. Its parameters are plain or DTensors.
        initializer: function from (dotted name, global shape) to a `Distribution`.
        seed: any integer. The same seed gives the same values for all placements and platforms.
        platform: default: the module's own if it is a `hp_dtensor.parallel.nn.Module`, else the selected one.
        skip: names of parameters that are left unchanged.

    Raises:
        MetaTensorError: parameters without data, listed by name.

    Examples:
        >>> from hp_dtensor.tensor.init import Constant, Normal
        >>> with nn.building(platform):
        ...     model = nn.Linear(4, 4)
        >>> init_parameters(model, lambda name, shape: Normal(0.02) if len(shape) > 1 else Constant(0.0), seed=0)
    """
    chosen = platform_of(module, platform)
    # Found before anything is set, so that an error leaves the module unchanged.
    without_data = [name for name, parameter in chosen.named_parameters(module) if chosen.is_meta(parameter)]
    if without_data:
        raise MetaTensorError(f"parameters have no data: {', '.join(without_data)}; call materialize(module) first")
    with chosen.no_grad():
        for name, parameter in chosen.named_parameters(module):
            if name not in skip:
                _fill(chosen, parameter, initializer(name, tuple(parameter.shape)), stream_key(seed, name))


def _fill(platform: Platform, parameter: Any, distribution: Distribution, key: tuple[int, int]) -> None:
    """Write the values of this rank's shard into a parameter."""
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
    # No name contains the separator, so seed and name cannot run into each other.
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")


def draw(
    distribution: Distribution,
    key: tuple[int, int],
    shape: Sequence[int],
    offset: Sequence[int],
    extent: Sequence[int],
) -> Array:
    """Return the float32 values of a box (`offset`, `extent`) of a tensor of `shape`.

    Args:
        key: the result of `stream_key`.
    """
    # Distributions compute in float64, and values are rounded once.
    result = numpy.empty(tuple(extent), numpy.float32)
    for rows, words in _words(key, tuple(shape), tuple(offset), tuple(extent)):
        result[rows] = distribution.values(words)
    return result


def _words(
    key: tuple[int, int], shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]
) -> Iterator[tuple[Any, Array]]:
    """Yield (index into the box, words of its elements) in blocks of bounded size.

    Full rows are generated several at once. If an inner dimension is sharded, rows are generated one by one from the
    start to the end of the box in the second dimension, and then sliced.
    """
    if not shape:
        yield (), _run(key, 0, 1)[0]
        return
    # An element's word is that of its index in the row-major order of the full tensor.
    row = math.prod(shape[1:])
    if extent[1:] == shape[1:]:
        rows = max(1, _BLOCK_WORDS // max(row, 1))
        for start in range(0, extent[0], rows):
            count = min(rows, extent[0] - start)
            words = _run(key, (offset[0] + start) * row, count * row)
            yield slice(start, start + count), words.reshape(count, *shape[1:])
        return
    inner = tuple(slice(o, o + e) for o, e in zip(offset[1:], extent[1:], strict=True))
    # Counters are consecutive within a row only. Starting at the box's second dimension bounds the waste by the inner
    # dimensions, which are then sliced.
    first, last = offset[1], offset[1] + extent[1]
    line = math.prod(shape[2:])
    for index in range(extent[0]):
        words = _run(key, (offset[0] + index) * row + first * line, (last - first) * line)
        yield index, words.reshape(last - first, *shape[2:])[(slice(None), *inner[1:])]


def _run(key: tuple[int, int], start: int, count: int) -> Array:
    """Return words start .. start+count of the stream of a key. Philox generates four words per counter."""
    # A counter-based generator starts anywhere in O(1). The four words of the first counter may start before `start`.
    generator = numpy.random.Philox(
        key=numpy.array(key, numpy.uint64), counter=numpy.array([start // 4, 0, 0, 0], numpy.uint64)
    )
    return generator.random_raw(start % 4 + count)[start % 4 :]
