"""`Layout`: HyperParallel's record of a mesh with named axes and of a tensor's placements on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.spec.placements import (
    NOT_SHARDED,
    AliasMap,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    check_alias,
    is_aliases,
    is_placements,
    placements_of_aliases,
)
from hp_dtensor.spec.tensor_spec import TensorSpec


class Layout:
    """A mesh with named axes. Calling it with a specification adds the placements of a tensor.

    A specification is a tuple of placements, one per mesh axis, or a tuple of alias names, one per tensor
    dimension: `layout("dp", "tp")`, `layout(("dp", "tp"), "None")` (two axes on one dimension, outermost
    first), `layout((Shard(0), Replicate()))`.

    Args:
        mesh_shape: sizes of the mesh axes.
        alias_name: one name per axis.
        rank_list: global ranks in row-major order; default 0, 1, 2, ...

    Raises:
        TypeError, ValueError: names, sizes or ranks of the wrong type or number. The message lists all problems.

    Examples:
        >>> layout = Layout((2, 2), ("dp", "tp"))
        >>> layout("dp", "None").placements
        (Shard(0), Replicate())
    """

    __slots__ = ("_alias_map", "_partial", "_placements", "alias_name", "mesh_shape", "rank_list")

    def __init__(
        self, mesh_shape: Sequence[int], alias_name: Sequence[str], rank_list: Sequence[int] | None = None
    ) -> None:
        _check_types(mesh_shape, alias_name, rank_list)
        self.mesh_shape = tuple(mesh_shape)
        self.alias_name = tuple(alias_name)
        self.rank_list = tuple(rank_list) if rank_list is not None else tuple(range(math.prod(self.mesh_shape)))
        _check_aliases(self.mesh_shape, self.alias_name, self.rank_list)
        self._placements: tuple[Placement, ...] | None = None
        self._alias_map: AliasMap | None = None
        # Apart from the placements, since HyperParallel sets and resets pending reductions by axis after the layout is
        # made.
        self._partial: dict[str, str] = {}

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> Layout:
        """Return the layout of a mesh's axes and ranks, without placements.

        Raises:
            TypeError: `device_mesh` is not a `DeviceMesh`.
        """
        if not isinstance(device_mesh, DeviceMesh):
            raise TypeError(f"from_device_mesh takes a DeviceMesh, got {device_mesh!r}")
        return cls(device_mesh.shape, device_mesh.mesh_dim_names, device_mesh.ranks())

    @classmethod
    def from_spec(cls, spec: TensorSpec) -> Layout:
        """Return the layout of a tensor, with an alias or `"None"` for each of its dimensions.

        On MindSpore it is `x.layout`; PyTorch's tensors have a `layout` of their own.
        """
        layout = cls.from_device_mesh(spec.mesh)(tuple(spec.placements))
        known = layout.alias_tensor_map
        layout._alias_map = known + (NOT_SHARDED,) * (len(spec.shape) - len(known))
        return layout

    def __call__(self, *specification: Any) -> Layout:
        """Return a new layout that carries `specification`.

        Raises:
            TypeError: it is neither placements nor alias names.
            ValueError: a wrong number of placements, an unknown alias, or one that shards two dimensions.
        """
        items = specification[0] if len(specification) == 1 and isinstance(specification[0], tuple) else specification
        if is_placements(items):
            return self._with_placements(tuple(items))
        if is_aliases(items):
            result = self._copy()
            result._placements = placements_of_aliases(self.mesh_shape, self.alias_name, items)
            result._alias_map = tuple(NOT_SHARDED if item is None else item for item in items)
            return result
        raise TypeError(
            f"a layout takes placements, one per mesh axis, or alias names, one per tensor dimension; got {items!r}"
        )

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis.

        Raises:
            ValueError: the layout carries none yet.
        """
        if self._placements is None:
            raise ValueError("this layout carries no map yet; call it with placements or alias names")
        return tuple(
            Partial(self._partial[name]) if name in self._partial else placement
            for name, placement in zip(self.alias_name, self._placements, strict=True)
        )

    @property
    def alias_tensor_map(self) -> AliasMap:
        """The alias of the axis that shards each tensor dimension, a tuple for several, `"None"` for none.

        A layout made from placements does not know the number of dimensions, so its map ends with the last sharded one.

        Raises:
            ValueError: a placement has a negative dimension, and the number of dimensions is not known.
        """
        if self._alias_map is not None:
            return self._alias_map
        # A negative dimension is counted from an end that is not known here.
        if any(getattr(placement, "dim", 0) < 0 for placement in self.placements):
            raise ValueError(f"{self}: name dimensions from the front, for a map by tensor dimension")
        dims: dict[int, list[str]] = {}
        sizes = dict(zip(self.alias_name, self.mesh_shape, strict=True))
        # Innermost axis first: each axis is inserted before those that split its shards further.
        for name, placement in reversed([*zip(self.alias_name, self.placements, strict=True)]):
            if isinstance(placement, (Shard, StridedShard, RaggedShard)):
                before, axes = 0, dims.setdefault(placement.dim, [])
                while math.prod(sizes[one] for one in axes[:before]) < getattr(placement, "split_factor", 1):
                    before += 1  # a strided axis splits the shards of these axes
                axes.insert(before, name)
        # HyperParallel's form: a name alone for one axis, a tuple only for several.
        found = (tuple(dims.get(dim, [NOT_SHARDED])) for dim in range(max(dims, default=-1) + 1))
        return tuple(names[0] if len(names) == 1 else names for names in found)

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """The mesh axis that shards each tensor dimension, counted from the right; -1 for none, a tuple for several."""

        # HyperParallel counts device axes from the right, as MindSpore's `Layout` does.
        def number(alias: str) -> int:
            return -1 if alias == NOT_SHARDED else len(self.alias_name) - 1 - self.alias_name.index(alias)

        return tuple(
            tuple(map(number, item)) if isinstance(item, tuple) else number(item) for item in self.alias_tensor_map
        )

    def get_global_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the global shape of a tensor whose shard has `local_shape` on every rank.

        Raises:
            ValueError: the layout belongs to a tensor with another number of dimensions.
        """
        shape, placements = list(local_shape), self.placements
        if self._alias_map is not None and len(self._alias_map) != len(shape):
            raise ValueError(f"{len(self._alias_map)} alias names {self._alias_map} for a shard {shape}")
        # Assumes equal shards: the sizes of other ranks are not known without a message.
        for size, placement in zip(self.mesh_shape, placements, strict=True):
            dim = getattr(placement, "dim", 0)
            if placement.is_shard() and not -len(shape) <= dim < len(shape):
                raise ValueError(f"{placement} shards dimension {dim}, but a shard has the shape {shape}")
            # Units state every rank's size, so this rank's own need not be multiplied.
            if isinstance(placement, RaggedShard):
                shape[placement.dim] = sum(placement.units)
            elif isinstance(placement, (Shard, StridedShard)):
                shape[placement.dim] *= size
        return tuple(shape)

    def repeat_num(self) -> int:
        """Return the number of ranks that hold the same elements, as replicas or as summands of them."""
        return math.prod(
            size for size, placement in zip(self.mesh_shape, self.placements, strict=True) if not placement.is_shard()
        )

    def device_mesh(self, device_type: str = "cpu", **options: Any) -> DeviceMesh:
        """Return the mesh of this layout's ranks; `options` are those of `DeviceMesh`."""
        return DeviceMesh(device_type, self.mesh_shape, mesh_dim_names=self.alias_name, ranks=self.rank_list, **options)

    def placements_on(self, device_mesh: DeviceMesh) -> tuple[Placement, ...]:
        """Return the placements after checking the mesh. Called by `hp_dtensor.spec.placements.placements_for`.

        Raises:
            ValueError: the axes of `device_mesh` have other sizes or names, or the layout carries no placements.
        """
        # Axes are compared and not ranks, so that one layout serves several meshes of the same form.
        if self.mesh_shape != device_mesh.shape or self.alias_name != device_mesh.mesh_dim_names:
            raise ValueError(f"{self} was made for another mesh than {device_mesh.describe()}")
        return self.placements

    def set_partial_by_dev_axis(self, alias: str, op: str = "sum") -> None:
        """Mark the tensor as partial over the axis `alias`: a reduction by `op` is pending.

        Raises:
            ValueError: the axis is unknown, or shards a dimension of the tensor.
        """
        check_alias(alias, self.alias_name)
        # Constructed to check the operation.
        placement = Partial(op)
        if self._placements is not None and self._placements[self.alias_name.index(alias)].is_shard():
            raise ValueError(f"axis {alias!r} shards a dimension of the tensor and cannot be partial too")
        self._partial[alias] = placement.reduce_op

    def get_partial_by_dev_id(self, alias: str) -> str | None:
        """Return the reduction that is pending over the axis `alias`, or None.

        Raises:
            ValueError: the axis is unknown.
        """
        check_alias(alias, self.alias_name)
        return self._partial.get(alias)

    def reset_partial(self) -> None:
        """Remove all pending reductions from the layout."""
        self._partial.clear()

    def is_partial(self) -> bool:
        """Return whether a reduction is pending over some axis."""
        return bool(self._partial)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as plain lists, strings and numbers, fit for JSON."""
        # Lists, because JSON has no tuples: what is read back equals what was written.
        tensor_map = [list(x) if isinstance(x, tuple) else x for x in self.tensor_map] if self._placements else None
        return {
            "mesh_shape": list(self.mesh_shape),
            "alias_name": list(self.alias_name),
            "rank_list": list(self.rank_list),
            "tensor_map": tensor_map,
            "partial": dict(self._partial),
        }

    def _value(self) -> tuple[Any, ...]:
        """Return the value by which layouts are compared and hashed."""
        partial = tuple(sorted(self._partial.items()))
        # Without the alias map: the same placements may be given by names or directly, and the two layouts are equal.
        return self.mesh_shape, self.alias_name, self.rank_list, self._placements, partial

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._value() == other._value()

    def __hash__(self) -> int:
        return hash(self._value())

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.alias_name, self.mesh_shape, strict=True))
        carried = "" if self._placements is None else f", {list(self.placements)}"
        return f"Layout({axes}{carried})"

    def _copy(self) -> Layout:
        return Layout(self.mesh_shape, self.alias_name, self.rank_list)

    def _with_placements(self, placements: tuple[Placement, ...]) -> Layout:
        if len(placements) != len(self.mesh_shape):
            raise ValueError(f"expected {len(self.mesh_shape)} placements for axes {self.alias_name}, got {placements}")
        result = self._copy()
        # Pending reductions are stored by alias, because `reset_partial` removes them and leaves the axis replicated.
        result._placements = tuple(Replicate() if isinstance(p, Partial) else p for p in placements)
        result._partial = {
            name: p.reduce_op for name, p in zip(self.alias_name, placements, strict=True) if isinstance(p, Partial)
        }
        return result


def _check_types(mesh_shape: Any, alias_name: Any, rank_list: Any) -> None:
    for name, value, kind in (("mesh_shape", mesh_shape, int), ("alias_name", alias_name, str)):
        if not isinstance(value, (tuple, list)) or not all(isinstance(item, kind) for item in value):
            raise TypeError(f"{name} must be a tuple of {kind.__name__}, got {value!r}")
    if rank_list is not None and not (
        isinstance(rank_list, (tuple, list)) and all(isinstance(item, int) for item in rank_list)
    ):
        raise TypeError(f"rank_list must be a tuple of int, got {rank_list!r}")


def _check_aliases(mesh_shape: tuple[int, ...], alias_name: tuple[str, ...], rank_list: tuple[int, ...]) -> None:
    """Raise a ValueError that lists every problem of a mesh with named axes."""
    problems = []
    if len(mesh_shape) != len(alias_name):
        problems.append(f"{len(mesh_shape)} mesh axes need as many names, got {list(alias_name)}")
    problems += [f"alias {index} is empty" for index, name in enumerate(alias_name) if not name]
    problems += [f"alias {name!r} repeats" for name in sorted({n for n in alias_name if alias_name.count(n) > 1})]
    if NOT_SHARDED in alias_name:
        problems.append("'None' means not sharded and cannot be an alias")
    problems += [
        f"axis {name!r} has size {size}" for name, size in zip(alias_name, mesh_shape, strict=False) if size < 1
    ]
    # Quadratic, so only checked for moderate numbers of ranks.
    repeated = sorted({rank for rank in rank_list if rank_list.count(rank) > 1}) if len(rank_list) < 4096 else []
    if repeated:
        problems.append(f"ranks {repeated} repeat in rank_list")
    if len(rank_list) != math.prod(mesh_shape):
        problems.append(f"a mesh of {math.prod(mesh_shape)} ranks got a rank_list of {len(rank_list)}")
    if problems:
        raise ValueError("; ".join(problems))
