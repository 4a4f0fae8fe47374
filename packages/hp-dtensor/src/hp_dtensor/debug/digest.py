"""Digests: random projections of a tensor that its shards, summands and replicas determine without being gathered.

The projection k of X is the sum over all elements of `X[i0, i1, ...] * a(k, 0, i0) * a(k, 1, i1) * ...`, where `a` is a
hash of its arguments. It is linear, and a shard needs the factors at its global indices only, so the projections of
shards, of summands and of micro-batches add up to those of the full tensor, whatever the sharding.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_dtensor.platform.attention import mix, stream_offsets
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.tensor_spec import TensorSpec

Tensor = Any

PROJECTIONS = 4
BUCKETS = 8
# The first, the second and the last dimension have buckets: samples, positions and features of an activation.
BUCKETED_DIMS = 3
# Layout of a digest: projections, sum, sum of squares, and the buckets of each bucketed dimension.
SUM, SQUARES = PROJECTIONS, PROJECTIONS + 1
LENGTH = PROJECTIONS + 2 + BUCKETED_DIMS * BUCKETS
# Elements that are converted to the wide dtype at once, which bounds the memory that a digest needs: on the CPU as many
# as its caches hold, on a device enough to fill it.
_CHUNK = {"cpu": 1 << 16}
_CHUNK_OF_DEVICES = 1 << 22
# Sums of squares in this range are exact in float32 too.
_SQUARES = (1e-30, 1e37)


@dataclass(frozen=True, eq=False)
class Region:
    """The elements of a global tensor that a local tensor has: the product of one list of indices per dimension.

    Attributes:
        shape: the global shape.
        indices: for each dimension the global indices of the local rows, int64, in local order.
        key: a number that is equal for equal regions, and differs (up to a collision of 62 bits) otherwise.
    """

    shape: tuple[int, ...]
    indices: tuple[np.ndarray, ...]
    key: int

    @classmethod
    def of(cls, shape: Sequence[int], indices: Sequence[np.ndarray]) -> Region:
        """Return the region of these indices in a tensor of this shape.

        Examples:
            >>> Region.of((4, 2), [np.array([1, 3]), np.arange(2)]).numel
            4
        """
        found = hashlib.blake2b(repr(tuple(shape)).encode(), digest_size=8)
        for each in indices:
            found.update(len(each).to_bytes(8, "little") + np.ascontiguousarray(each, np.int64).tobytes())
        return cls(tuple(shape), tuple(indices), int.from_bytes(found.digest(), "little") >> 2)

    @property
    def numel(self) -> int:
        """Number of elements of the region."""
        return math.prod(len(each) for each in self.indices)


def region_of_spec(spec: TensorSpec, outer: Sequence[tuple[np.ndarray, int]] | None = None) -> Region:
    """Return the region of this rank's shard of a DTensor with rows at `outer` indices of a larger tensor."""
    held = [np.concatenate([np.arange(*each) for each in ranges] or [np.arange(0)]) for ranges in spec.ranges()]
    if outer is None:
        return Region.of(spec.shape, held)
    return Region.of([size for _, size in outer], [rows[mine] for (rows, _), mine in zip(outer, held, strict=True)])


def summand_of_spec(spec: TensorSpec) -> int:
    """Return which summand of a partial DTensor this rank has; 0 if it is not partial."""
    coordinate, number = spec.mesh.get_coordinate(), 0
    for at, size, placement in zip(coordinate or (), spec.mesh.shape, spec.placements, strict=False):
        if placement.is_partial():
            number = number * size + at
    return number


class _HostOps:
    """The operations of a digest on arrays. Those of a framework can take milliseconds on a CPU, as MindSpore's do."""

    add, mul, matmul, square, sum = np.add, np.multiply, np.matmul, np.square, np.sum
    reshape, cat = staticmethod(np.reshape), staticmethod(np.concatenate)

    @staticmethod
    def cast(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return x.astype(dtype)

    @staticmethod
    def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        result: np.ndarray = x @ weight.T
        return result

    @staticmethod
    def narrow(x: np.ndarray, dim: int, start: int, length: int) -> np.ndarray:
        return x[(slice(None),) * dim + (slice(start, start + length),)]


class Digester:
    """Computes digests of local tensors by NumPy (`on_host`; None: on a CPU) or on the tensor's device."""

    def __init__(self, platform: Platform, on_host: bool | None = None) -> None:
        self._platform = platform
        self._is_host = platform.device_types[0] == "cpu" if on_host is None else on_host
        self._ops: Any = _HostOps if self._is_host else platform.ops
        # float64 where the device has fast enough units for it; elsewhere errors of float32 sums are part of a digest.
        wide = "float64" if platform.device_types[0] in ("cpu", "cuda") else "float32"
        self.host_dtype = np.dtype(wide)
        self._dtype = self.host_dtype if self._is_host else platform.dtype(wide)
        self._chunk = _CHUNK.get(platform.device_types[0], _CHUNK_OF_DEVICES)
        self._vectors: dict[Hashable, tuple[Any, ...]] = {}

    def local(self, x: Tensor, region: Region) -> Tensor:
        """Return the digest, `LENGTH` numbers on its device, of a floating-point tensor with the region's elements."""
        platform = self._platform
        device = platform.device_of(x)
        lengths = [len(each) for each in region.indices]
        rows, columns = (math.prod(lengths[:-1]), lengths[-1]) if lengths else (1, 1)
        with platform.no_grad():
            if not rows * columns:
                found = self._zeros(LENGTH, device)
            else:
                sums = self._sums(self._plain(x), rows, columns, self._of_region(region, device))
                found = self._arranged(sums, len(region.shape), device)
            return platform.from_numpy(found, device) if self._is_host else found

    def _plain(self, x: Tensor) -> Any:
        """Return what the operations of a digest take: the tensor without its history, or an array."""
        platform = self._platform
        x = platform.detach(x)
        if not self._is_host:
            return x
        # NumPy has no bfloat16.
        is_float = platform.dtype_name(x.dtype) in ("float32", "float64")
        return platform.to_numpy(x if is_float else platform.ops.cast(x, platform.dtype("float32")))

    def _sums(self, x: Any, rows: int, columns: int, vectors: tuple[Any, ...]) -> Any:
        """Return the sums of a digest in a row: those by the groups of rows, by the last dimension, and of squares."""
        ops = self._ops
        x = ops.reshape(x, (rows, columns))
        factors, groups, of_columns, group_columns, first = vectors
        step = max(1, self._chunk // columns)
        total = None
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            wide = ops.cast(ops.narrow(x, 0, start, part.stop - start), self._dtype)
            one = rows <= step
            chosen = factors if one else ops.narrow(factors, 0, start, part.stop - start)
            grouped = groups if one else ops.narrow(groups, 1, start, part.stop - start)
            # [1 + buckets of leading dimensions, projections + 1]
            sums = ops.matmul(grouped, ops.mul(ops.linear(wide, of_columns), chosen))
            lead = first if one else ops.narrow(first, 1, start, part.stop - start)
            last = ops.matmul(ops.matmul(lead, wide), group_columns)
            squares = ops.reshape(ops.sum(ops.square(wide)), (1,))
            found = ops.cat([ops.reshape(sums, (-1,)), ops.reshape(last, (-1,)), squares], 0)
            total = found if total is None else ops.add(total, found)
        return total

    def _zeros(self, length: int, device: Any) -> Any:
        return np.zeros(length, self._dtype) if self._is_host else self._platform.zeros((length,), self._dtype, device)

    def _arranged(self, found: Any, ndim: int, device: Any) -> Any:
        """Return the sums of `_sums` in the layout of a digest."""
        ops, width = self._ops, PROJECTIONS + 1
        leading = max(0, min(ndim - 1, BUCKETED_DIMS - 1)) * BUCKETS
        size = (1 + leading) * width
        sums = ops.reshape(ops.narrow(found, 0, 0, size), (1 + leading, width))
        totals = ops.reshape(ops.narrow(sums, 0, 0, 1), (width,))
        buckets = ops.reshape(ops.narrow(ops.narrow(sums, 0, 1, leading), 1, 0, 1), (leading,))
        last = ops.narrow(found, 0, size, BUCKETS)
        squares = ops.narrow(found, 0, size + BUCKETS, 1)
        unused = self._zeros(LENGTH - PROJECTIONS - 2 - leading - BUCKETS, device)
        return ops.cat([totals, squares, buckets, last, unused], 0)

    def _of_region(self, region: Region, device: Any) -> tuple[Any, ...]:
        key = (region.key, str(device))
        if key not in self._vectors:
            if len(self._vectors) > 256:
                # Packed documents have another region in every batch.
                self._vectors.clear()
            arrays = [np.ascontiguousarray(each, self.host_dtype) for each in _vectors(region)]
            self._vectors[key] = tuple(x if self._is_host else self._platform.from_numpy(x, device) for x in arrays)
        return self._vectors[key]


def _vectors(region: Region) -> tuple[np.ndarray, ...]:
    """Return the vectors of a region.

    These are the factors of rows `[rows, projections + 1]`, the bucket indicators of rows `[1 + buckets, rows]`, the
    factors of columns `[projections + 1, columns]`, and for the buckets of the last dimension its indicators times the
    factors `[columns, buckets]`, and the factors of rows for the first projection `[1, rows]`.
    """
    indices, shape = region.indices or (np.zeros(1, np.int64),), region.shape or (1,)
    of_dims = [factors(dim, shape[dim])[each] for dim, each in enumerate(indices)]
    rows = np.ones((1, PROJECTIONS + 1))
    groups: list[np.ndarray] = []
    leading = [len(each) for each in indices[:-1]]
    for of_dim in of_dims[:-1]:
        rows = (rows[:, None] * of_dim[None]).reshape(-1, PROJECTIONS + 1)
    for dim in range(min(len(leading), BUCKETED_DIMS - 1)):
        # The bucket of every row, by its index in this dimension.
        at = np.arange(math.prod(leading)) // math.prod(leading[dim + 1 :]) % max(1, leading[dim])
        groups.append(_indicators(indices[dim], shape[dim])[at].T)
    ones = np.ones((1, math.prod(leading)))
    columns = of_dims[-1]
    last = _indicators(indices[-1], shape[-1]) * columns[:, :1]
    return rows, np.concatenate([ones, *groups]), columns.T, last, rows[:, :1].T


def _indicators(indices: np.ndarray, size: int) -> np.ndarray:
    of_bucket: np.ndarray = (indices * BUCKETS // max(1, size))[:, None] == np.arange(BUCKETS)
    return of_bucket.astype(np.float64)


@functools.lru_cache(maxsize=128)
def factors(dim: int, size: int) -> np.ndarray:
    """Return the factors of a dimension of a global tensor: float64 `[size, projections + 1]`; the last column is 1.

    They have random signs, variance 1 and absolute values between 0.48 and 1.44. So every element is seen, and
    exchanged rows change the projections.
    """
    counter: np.ndarray = np.arange(size, dtype=np.uint64)[:, None] * np.uint64(PROJECTIONS)
    counter = counter + np.arange(PROJECTIONS, dtype=np.uint64) + np.uint64((dim + 1) << 48)
    # SplitMix64 (Steele et al., 2014, doi 10.1145/2714064.2660195).
    bits = mix(stream_offsets(counter))
    magnitude = (bits >> np.uint64(12)).astype(np.float64) / 2.0**52 + 0.5
    sign = np.where(bits & np.uint64(1), 1.0, -1.0)
    result: np.ndarray = np.ones((size, PROJECTIONS + 1))
    result[:, :PROJECTIONS] = sign * magnitude / math.sqrt(13 / 12)
    return result


@dataclass(frozen=True)
class Part:
    """Digest of one rank's elements of a tensor; `region` is the sum of the keys of its regions, modulo 2**62."""

    rank: int
    region: int
    numel: int
    summand: int
    values: np.ndarray


@dataclass(frozen=True)
class Digest:
    """The digest of a full tensor, combined from its parts.

    Attributes:
        shape: the global shape.
        values: projections, sum, sum of squares and buckets, float64 `[LENGTH]`. The sum of squares is NaN for partial
            tensors, whose summands do not determine it.
        replicas: ranks whose values differ from other copies of the same elements, with their digests.
        count: elements that were digested, in multiples of the tensor's; 1 unless it occurs several times in a step.
        parts: the different parts, replicas left out.
    """

    shape: tuple[int, ...]
    values: np.ndarray
    replicas: tuple[Part, ...] = ()
    count: float = 1.0
    parts: tuple[Part, ...] = ()

    @property
    def projections(self) -> np.ndarray:
        return self.values[:PROJECTIONS]

    @property
    def num_bucketed(self) -> int:
        """Number of dimensions that have buckets."""
        return min(max(1, len(self.shape)), BUCKETED_DIMS)

    def buckets(self) -> np.ndarray:
        """Return the first projection of each eighth of the bucketed dimensions: `[dims, BUCKETS]`."""
        return self.values[SQUARES + 1 :].reshape(BUCKETED_DIMS, BUCKETS)[: self.num_bucketed]

    @property
    def norm(self) -> float:
        """The 2-norm, exact where the sum of squares is known, else estimated from the projections.

        Squares of very small and of very large values are zero and infinite in float32: second moments of Adam are.
        """
        squares = self.values[SQUARES]
        return math.sqrt(squares) if _SQUARES[0] < squares < _SQUARES[1] else norm_of(self.values, self.num_bucketed)

    @property
    def is_finite(self) -> bool:
        """True if the tensor has neither NaN nor infinite values."""
        return bool(np.isfinite(self.values[:SQUARES]).all())

    def changes(self) -> list[tuple[Part, np.ndarray]]:
        """Return the differing replicas, each with its difference from the other copies of the same elements."""
        common = {(part.region, part.summand): part for part in self.parts}
        return [(part, part.values - common[part.region, part.summand].values) for part in self.replicas]


def norm_of(values: np.ndarray, num_bucketed: int) -> float:
    """Return an estimate of the 2-norm of a tensor, such as a difference of two, from the values of its digest.

    The square of every projection is an estimate of the squared norm, and so is the sum of the squares of the buckets
    of one dimension, whose projections are of disjoint elements.
    """
    projections = values[:PROJECTIONS]
    buckets = values[SQUARES + 1 :].reshape(BUCKETED_DIMS, BUCKETS)[:num_bucketed]
    estimates = [*(projections**2), *(buckets**2).sum(1)]
    return math.sqrt(float(np.mean(estimates)))


def subtract(after: Digest, before: Digest) -> Digest:
    """Return the digest of a difference of two tensors with the same parts, such as the update of a weight.

    A replica differs in it if its own values have changed by another amount than the other copies.
    """
    values = after.values - before.values
    values[SQUARES] = math.nan
    old = {(part.region, part.summand): part.values for part in _parts(before, after)}
    own = [{(p.rank, p.region, p.summand): p.values for p in side.replicas} for side in (after, before)]
    parts, replicas = [], []
    for part in _parts(after, before):
        key = (part.region, part.summand)
        of_old = old.get(key, np.full(LENGTH, math.nan))
        parts.append(replace(part, values=part.values - of_old))
        for rank in sorted({one[0] for side in own for one in side if one[1:] == key}):
            change = own[0].get((rank, *key), part.values) - own[1].get((rank, *key), of_old)
            if not np.array_equal(change[:SUM], parts[-1].values[:SUM]):
                replicas.append(replace(part, rank=rank, values=change))
    return Digest(after.shape, values, tuple(replicas), after.count, tuple(parts))


def _parts(digest: Digest, other: Digest) -> tuple[Part, ...]:
    """Return the parts of a digest; a file lacks them where one part is the full tensor on all ranks."""
    if digest.parts or len(other.parts) != 1:
        return digest.parts
    return (replace(other.parts[0], values=digest.values),)


def combine(shape: Sequence[int], parts: Iterable[Part]) -> Digest:
    """Combine the parts of all ranks: sum over shards and summands, and compare replicas.

    Ranks with the same elements and the same summand are replicas. Of differing replicas the most frequent value is
    used, of equally frequent ones that of the lowest rank.

    Examples:
        >>> one = np.ones(LENGTH)
        >>> found = combine((4,), [Part(0, 7, 2, 0, one), Part(1, 7, 2, 0, one), Part(2, 8, 2, 0, one)])
        >>> found.values[0], found.count, found.replicas
        (2.0, 1.0, ())
    """
    copies: dict[tuple[int, int], list[Part]] = {}
    for part in sorted(parts, key=lambda part: part.rank):
        copies.setdefault((part.region, part.summand), []).append(part)
    total, chosen, differing = np.zeros(LENGTH), [], []
    for same in copies.values():
        counts: dict[bytes, int] = {}
        for part in same:
            counts[part.values.tobytes()] = counts.get(part.values.tobytes(), 0) + 1
        common = max(same, key=lambda part: counts[part.values.tobytes()])
        differing += [part for part in same if part.values.tobytes() != common.values.tobytes()]
        chosen.append(common)
        total = total + common.values
    numel = sum({part.region: part.numel for part in chosen}.values())
    if any(part.summand for part in chosen):
        total[SQUARES] = math.nan
    full = math.prod(shape)
    return Digest(tuple(shape), total, tuple(differing), numel / full if full else 1.0, tuple(chosen))
