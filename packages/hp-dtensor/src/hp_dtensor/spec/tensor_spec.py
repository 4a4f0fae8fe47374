"""TensorSpec: mesh, placements, global shape and dtype of a DTensor, interned."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.exceptions import GradientPathError, PlacementError, ShardShapeError
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard

Ranges = tuple[tuple[int, int], ...]
"""Ascending disjoint (start, stop) ranges of one dimension."""


class TensorSpec:
    """Mesh, placements, global shape and dtype of a DTensor.

    Immutable and interned: equal specs are the same object, so they compare and hash by identity.

    Attributes:
        mesh: the device mesh.
        placements: one per mesh axis. Several shardings of one tensor dimension nest in the order of the mesh axes,
            the earlier axis outermost.
        shape: the global shape.
        dtype: a dtype of the platform.
        local_shape: the shape of this rank's shard.
        is_partial: whether it is partial on some mesh axis.

    Examples:
        >>> with fake_world(4):
        ...     spec = TensorSpec(DeviceMesh("cpu", (4,)), [Shard(0)], (10, 3), None)
        ...     spec.local_shape
        (3, 3)
    """

    __slots__ = ("__weakref__", "dtype", "is_partial", "local_shape", "mesh", "placements", "shape")

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    dtype: Any
    local_shape: tuple[int, ...]
    is_partial: bool

    def __new__(cls, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: Any) -> TensorSpec:
        # Interning makes equality an identity test, which keeps the lookup of cached plans for every operation cheap.
        key = (mesh, tuple(placements), tuple(shape), dtype)
        found = _interned.get(key)
        return found if found is not None else _intern(key)

    @property
    def ndim(self) -> int:
        """Return the number of dimensions of the tensor."""
        return len(self.shape)

    def with_placements(self, placements: Sequence[Placement]) -> TensorSpec:
        """Return the spec of the same tensor with other placements."""
        return TensorSpec(self.mesh, placements, self.shape, self.dtype)

    def with_dtype(self, dtype: Any) -> TensorSpec:
        """Return the spec of a tensor of another dtype with the same shape and placements."""
        return self if self.dtype is dtype else TensorSpec(self.mesh, self.placements, self.shape, dtype)

    def is_replicated(self) -> bool:
        """Return whether every rank of the mesh holds the full tensor."""
        return all(placement.is_replicate() for placement in self.placements)

    def box(self, coordinate: Sequence[int] | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (offset, shape), in the global tensor, of the shard at a mesh coordinate (default: this rank's).

        The box of a rank outside the mesh is empty.

        Raises:
            PlacementError: a strided shard is not contiguous; use `ranges`.
        """
        where = self.mesh.get_coordinate() if coordinate is None else coordinate
        if where is None:
            return (0,) * self.ndim, (0,) * self.ndim
        if any(isinstance(placement, StridedShard) for placement in self.placements):
            held = self.ranges(where)
            if any(len(ranges) > 1 for ranges in held):
                raise PlacementError(
                    f"the shard at {tuple(where)} of {self!r} is not contiguous; TensorSpec.ranges returns its ranges"
                )
            boxes = [ranges[0] if ranges else (0, 0) for ranges in held]
            return tuple(start for start, _ in boxes), tuple(stop - start for start, stop in boxes)
        offset, shape = [0] * self.ndim, list(self.shape)
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, (Shard, RaggedShard)):
                # Earlier axes are outermost: a later one splits what they left of the dimension.
                start, length = placement.interval(shape[placement.dim], self.mesh.shape[axis], where[axis])
                offset[placement.dim] += start
                shape[placement.dim] = length
        return tuple(offset), tuple(shape)

    def ranges(self, coordinate: Sequence[int] | None = None) -> tuple[Ranges, ...]:
        """Return the ascending (start, stop) ranges of the shard for each dimension; none outside of the mesh."""
        where = self.mesh.get_coordinate() if coordinate is None else coordinate
        if where is None:
            return ((),) * self.ndim
        held: list[Ranges] = [((0, size),) for size in self.shape]
        for axis, placement in enumerate(self.placements):
            if isinstance(placement, (Shard, RaggedShard, StridedShard)):
                dim = placement.dim
                held[dim] = split_ranges(held[dim], placement, self.mesh.shape[axis])[where[axis]]
        return tuple(held)

    def strides(self, local: Sequence[int]) -> tuple[int, ...]:
        """Return the global strides (in elements) of a tensor whose shard on this rank has the strides `local`."""
        # Row-major strides, for shards whose own strides say nothing.
        packed = [math.prod(self.shape[dim + 1 :]) for dim in range(self.ndim)]
        result = list(local)
        grown, shrunk = 1, 1  # global and local number of elements of the dimensions with smaller strides
        # From the fastest dimension to the slowest. A dimension's stride grows by the ratio of global to local size of
        # all faster dimensions.
        for dim in sorted(range(self.ndim), key=lambda dim: (local[dim], -dim)):
            # An empty shard has no memory order, and for a view of a larger tensor the strides may not be integers.
            if not shrunk or local[dim] * grown % shrunk:
                return tuple(packed)
            result[dim] = local[dim] * grown // shrunk
            if local[dim]:
                grown, shrunk = grown * self.shape[dim], shrunk * self.local_shape[dim]
        return tuple(result) if shrunk else tuple(packed)

    def num_replicas(self) -> int:
        """Return the number of ranks of the mesh that hold the same shard."""
        return math.prod(
            size for size, placement in zip(self.mesh.shape, self.placements, strict=True) if placement.is_replicate()
        )

    def __repr__(self) -> str:
        return (
            f"TensorSpec({list(self.shape)}, {self.dtype}, {self.describe_placements()}, mesh {self.mesh.describe()})"
        )

    def describe_placements(self) -> str:
        """Return a short form, such as `(dp:S(0), tp:R)`."""
        named = zip(self.mesh.mesh_dim_names, self.placements, strict=True)
        return "(" + ", ".join(f"{name}:{describe(placement)}" for name, placement in named) + ")"

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickling interns, so the copy in another process is again the one object of its value.
        return TensorSpec, (self.mesh, self.placements, self.shape, self.dtype)


# Weak: a spec holds its mesh and so the world of a job, which must be freed with the last tensor.
_interned: weakref.WeakValueDictionary[tuple[Any, ...], TensorSpec] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _intern(key: tuple[Any, ...]) -> Any:
    """Return the spec of the normalized (mesh, placements, shape, dtype), creating it if there is none."""
    mesh, placements, shape, dtype = key
    # Normalized only on a miss, to keep the lookup fast. `Shard(-1)` and `Shard(1)` are the same spec, so the normal
    # form is looked up again.
    placements = normalize_placements(mesh, placements, len(shape))
    if any(size < 0 for size in shape):
        raise ShardShapeError(f"a tensor has sizes of at least 0, got {list(shape)}")
    key = (mesh, placements, shape, dtype)
    # Simulated ranks are threads of one process.
    with _lock:
        found = _interned.get(key)
        if found is not None:
            return found
        spec = object.__new__(TensorSpec)
        spec.mesh, spec.placements, spec.shape, spec.dtype = mesh, placements, shape, dtype
        # Computed once, because every operation reads them.
        if any(isinstance(placement, StridedShard) for placement in placements):
            # A strided shard may consist of several ranges and then has no box.
            spec.local_shape = tuple(sum(stop - start for start, stop in ranges) for ranges in spec.ranges())
        else:
            spec.local_shape = spec.box()[1]
        spec.is_partial = any(placement.is_partial() for placement in placements)
        _interned[key] = spec
        return spec


Result = TypeVar("Result")
_caches: list[functools._lru_cache_wrapper[Any]] = []


def cached_by_spec(maxsize: int) -> Callable[[Callable[..., Result]], functools._lru_cache_wrapper[Result]]:
    """`functools.lru_cache` for a function of specs or meshes, whose entries `forget_specs` drops."""

    def cached(function: Callable[..., Result]) -> functools._lru_cache_wrapper[Result]:
        found = functools.lru_cache(maxsize)(function)
        _caches.append(found)
        return found

    return cached


def forget_specs() -> None:
    """Drop the entries of all caches of `cached_by_spec`: they refer to meshes, and so to the world of a job."""
    for cache in _caches:
        cache.cache_clear()


@cached_by_spec(maxsize=4096)
def grad_spec(spec: TensorSpec) -> TensorSpec:
    """Return the spec of a value's gradient: R -> R, S -> S, P -> R.

    Every contribution to a sum has the gradient of the sum, so the gradient of a partial value is replicated. Cached:
    often nothing else refers to the spec of a partial loss's gradient, which each backward would create again.
    """
    return spec.with_placements([Replicate() if p.is_partial() else p for p in spec.placements])


@cached_by_spec(maxsize=4096)
def has_gradient(spec: TensorSpec) -> bool:
    """Return whether placements can describe the gradient of a value: not if it is partial, but not a sum."""
    # On an axis of one rank, every reduction is that rank's own value, whatever the operation.
    return not spec.is_partial or all(
        size == 1 or not placement.is_partial() or placement == Partial()
        for size, placement in zip(spec.mesh.shape, spec.placements, strict=True)
    )


@cached_by_spec(maxsize=4096)
def visible_grad_spec(spec: TensorSpec) -> TensorSpec:
    """Return `grad_spec` of a value, or raise a GradientPathError if no placements can describe its gradient."""
    if not has_gradient(spec):
        raise GradientPathError(
            f"the gradient of {spec!r}: each rank has that of its own contribution, which no placement describes. "
            "Redistribute the value to Replicate() or Shard, and ask for the gradient of that"
        )
    return grad_spec(spec)


def split_ranges(ranges: Ranges, placement: Placement, ranks: int) -> list[Ranges]:
    """Return each rank's shard of ascending disjoint (start, stop) ranges, which are split as if concatenated."""
    size = sum(stop - start for start, stop in ranges)
    return [
        join_ranges([taken for start, stop in shard for taken in _take(ranges, start, stop)])
        for shard in placement.shard_ranges(size, ranks)
    ]


def join_ranges(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return ascending ranges without empty ones and with adjacent ones joined."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def _take(ranges: Ranges, begin: int, end: int) -> list[tuple[int, int]]:
    """Slice concatenated ranges: return the ranges of their elements from number `begin` to `end`."""
    # `passed` elements precede the current range.
    result, passed = [], 0
    for start, stop in ranges:
        low, high = max(begin - passed, 0), min(end - passed, stop - start)
        if low < high:
            result.append((start + low, start + high))
        passed += stop - start
    return result


def require_placements(what: str, mesh: DeviceMesh, placements: Any) -> tuple[Placement, ...]:
    """Return `placements` as a tuple. Anything but a sequence raises a PlacementError that starts with `what`."""
    if not isinstance(placements, Sequence) or isinstance(placements, str):
        raise PlacementError(
            f"{what}: placements must be a tuple with one placement for each of the axes {mesh.describe()}, "
            f"got {placements!r}"
        )
    return tuple(placements)


def normalize_placements(mesh: DeviceMesh, placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Return placements with non-negative dimensions. A PlacementError lists all that do not fit mesh and tensor."""
    problems = []
    if (count := wrong_count(mesh, placements)) is not None:
        problems.append(count)
    result = []
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Placement):
            kind = type(placement)
            given = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
            problems.append(f"placement {axis} is a {given}, expected Shard, Replicate, Partial, ... of hp_dtensor")
        elif isinstance(placement, (Shard, RaggedShard, StridedShard)) and not -ndim <= placement.dim < ndim:
            problems.append(
                f"placement {axis}: {placement} shards dimension {placement.dim} of a {ndim}-dimensional tensor"
            )
        else:
            # One form of each placement, so that equal specs are one interned object.
            if isinstance(placement, (Shard, RaggedShard, StridedShard)) and placement.dim < 0:
                placement = replace(placement, dim=placement.dim + ndim)
            result.append(placement)
    if problems:
        raise PlacementError("; ".join(problems))
    return tuple(result)


def wrong_count(mesh: DeviceMesh, placements: Sequence[Placement]) -> str | None:
    """Return the problem if there is not one placement per mesh axis, else None."""
    if len(placements) == mesh.ndim:
        return None
    return f"expected {mesh.ndim} placements for mesh {mesh.describe()}, got {len(placements)}"


def describe(placement: Placement) -> str:
    """Return a short form: `R`, `S(0)`, `P(sum)`, `Ragged(0; 3,1)`."""
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    if isinstance(placement, StridedShard):
        return f"Strided({placement.dim}; {placement.split_factor})"
    if isinstance(placement, RaggedShard):
        return f"Ragged({placement.dim}; {','.join(map(str, placement.units))})"
    return repr(placement)
