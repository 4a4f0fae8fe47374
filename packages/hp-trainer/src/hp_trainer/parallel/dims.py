"""Parallel degrees of a job: inferred, validated and turned into a device mesh; and every layout of a number of ranks.

Everything here is arithmetic on degrees and strides, so its cost does not depend on the number of ranks."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import World, current_world, joined_world
from hp_trainer.exceptions import ParallelDimsError, Problem, raise_if_any
from hp_trainer.parallel.axes import (
    ALIASES,
    DEGREES,
    DENSE_AXES,
    EXPERT_MESHES,
    LAYOUT_COLUMNS,
    CpMethod,
    ExpertMesh,
    build_mesh,
    degrees_without_dp_shard,
    divisors,
    product,
)
from hp_trainer.parallel.context import context_problems
from hp_trainer.parallel.problems import chosen_expert_mesh, find_model_problems, find_problems

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


@dataclass(frozen=True)
class ParallelDims:
    """The degrees of every kind of parallelism, checked against each other on creation.

    `expert_mesh` states how experts are placed:

    - `"folded"`: `dp_replicate*dp_shard*cp*tp*pp == world_size`, and experts reuse the dense ranks within a replica and
      a stage: `dp_shard*cp*tp == efsdp*ep*etp`, with `efsdp` inferred.
    - `"peer"`: `ep` is an axis of its own: `dp_replicate*dp_shard*ep*cp*tp*pp == world_size`.
    - `None`: the one whose equation holds; folded if `ep` is 1. With `dp_shard=-1` and `ep` above 1 both equations can
      hold, with different layouts, so `expert_mesh` must be stated.

    Attributes:
        dp_replicate: replicas of the sharded model (HSDP's outer axis).
        dp_shard: data-parallel ranks that shard one copy of the weights; -1: all remaining ranks.
        cp: context parallel ranks, which share a sequence.
        tp: tensor parallel ranks.
        pp: pipeline stages.
        ep: expert parallel ranks.
        etp: tensor parallel ranks within an expert, 1 or `tp`.
        ulysses_degree: how many of the `cp` ranks exchange heads; None: all of them, unless `cp_method` differs.
        cp_method: how groups of `ulysses_degree` ranks exchange keys and values: `"ring"` or `"all_gather"` (with
            `ulysses_degree` None, all ranks do). `"ulysses"`: all ranks exchange heads. `"auto"`: the cheapest by the
            cost model. None: as `ulysses_degree` states, and `"ring"` for the rest.
        world_size: ranks of the job.
        ep_dispatcher: how tokens are sent to experts; None: `all_to_all`.
        ep_chunks: chunks in which they are sent; None: 1, or with `auto` the cost model's choice.
        ep_copies: most copies of busy experts on a rank.
        ep_move_interval: steps between moves of busy experts to other ranks; None: they are not moved.
        ep_node_size: ranks of a node, for `two_level` and `auto`.
        tp_reshard_after_forward: save the shards of sequences that `tp` ranks gather, and gather them again in
            backward.

    Raises:
        ParallelDimsError: listing every problem with the nearest legal values.

    Examples:
        >>> dims = ParallelDims(dp_shard=-1, tp=2, world_size=8)
        >>> dims.dp_shard
        4
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    ulysses_degree: int | None = None
    world_size: int = 1
    _: KW_ONLY  # the fields before this one are in HyperParallel's order
    cp_method: CpMethod | None = None
    expert_mesh: ExpertMesh | None = None
    ep_dispatcher: str | None = None
    ep_chunks: int | None = None
    ep_copies: int = 0
    ep_move_interval: int | None = None
    ep_node_size: int | None = None
    tp_reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        raise_if_any(find_problems(self), ParallelDimsError, "parallel degrees")
        # Frozen, so inferred fields are set past the dataclass.
        object.__setattr__(self, "expert_mesh", chosen_expert_mesh(self))
        if self.dp_shard == -1:
            object.__setattr__(
                self, "dp_shard", self.world_size // product(self, degrees_without_dp_shard(self._experts))
            )

    @property
    def _experts(self) -> ExpertMesh:
        """`expert_mesh`, which is never None once the degrees are checked."""
        assert self.expert_mesh is not None
        return self.expert_mesh

    @classmethod
    def from_config(cls, config: Any, world_size: int, num_experts: int | None = None) -> ParallelDims:
        """Read the degrees from any object that has some of the fields as attributes (None: not set).

        `etp` defaults to `tp`, and an older `dp` is read as `dp_shard` if that is not set. `ep` of -1 becomes the
        largest degree that divides both the number of ranks available to experts and `num_experts` (None: no experts).

        Raises:
            ParallelDimsError: listing every problem.
        """
        return cls(**degrees_from_config(config, world_size, num_experts), world_size=world_size)

    # Sizes -----------------------------------------------------------------------------------------------

    @property
    def dp_size(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def non_dp_size(self) -> int:
        """Ranks that share one sample."""
        return self.world_size // self.dp_size

    @functools.cached_property
    def fsdp_size(self) -> int:
        """Ranks that shard one copy of the dense weights."""
        return product(self, ALIASES[self._experts]["fsdp"])

    @functools.cached_property
    def efsdp_size(self) -> int:
        """Ranks that shard one copy of an expert's weights."""
        if self.expert_mesh == "peer":
            return self.fsdp_size
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def ulysses_size(self) -> int:
        """Ranks that exchange heads in context parallel attention."""
        if self.ulysses_degree is not None:
            return self.ulysses_degree
        return 1 if self.cp_method in ("ring", "all_gather") else self.cp

    @property
    def tp_enabled(self) -> bool:
        return self.tp > 1

    @property
    def cp_enabled(self) -> bool:
        return self.cp > 1

    @property
    def ep_enabled(self) -> bool:
        return self.ep > 1

    @property
    def pp_enabled(self) -> bool:
        return self.pp > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """True if the model has replicas. They shard nothing, so this alone does not enable `fsdp`."""
        return self.dp_replicate > 1

    @property
    def fsdp_enabled(self) -> bool:
        """True if dense weights are sharded: over `dp_shard` and, folded, over `cp`.

        As in torchtitan, replicas do not shard: with `dp_replicate=2` alone it is False.
        """
        return self.fsdp_size > 1

    def summary(self) -> str:
        """Return all degrees in one line."""
        names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
        degrees = " ".join(f"{name}={getattr(self, name)}" for name in names)
        is_chosen_later = self.cp_method == "auto" and self.ulysses_degree is None and self.cp > 1
        ulysses = "auto" if is_chosen_later else self.ulysses_size
        return (
            f"{degrees} efsdp={self.efsdp_size} ulysses={ulysses} "
            f"expert_mesh={self.expert_mesh} dp={self.dp_size} world={self.world_size}"
        )

    # Mesh ------------------------------------------------------------------------------------------------

    def dense_sizes(self) -> dict[str, int]:
        """Return the size of every axis of the dense mesh, outermost first, including axes of size 1."""
        return {name: getattr(self, name) for name in DENSE_AXES[self._experts]}

    def sparse_sizes(self) -> dict[str, int]:
        """Return the size of every axis of the experts' view of the folded mesh, outermost first."""
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate}
        return sizes | {"efsdp": self.efsdp_size, "ep": self.ep, "etp": self.etp}

    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Return the aliases: names of several axes of the dense mesh together."""
        return dict(ALIASES[self._experts])

    def build_mesh(
        self, device_type: str = "cpu", *, world: World | None = None, platform: Platform | None = None
    ) -> DeviceMesh:
        """Build the dense mesh, with every other name available as `mesh[name]`.

        Its axes are the degrees above 1 (`dp_shard` if all are 1). `mesh[name]` also knows the degrees that are 1, the
        aliases `fsdp`, `dp`, `batch` and `loss`, and for experts `efsdp`, `ep` and `etp` over the same ranks. An axis
        that nothing is sharded over has size 1 rather than being absent, so the same code runs on one device.

        Args:
            device_type: `cpu`, `cuda`, `npu`.
            world: default: the current world of `platform`.

        Raises:
            ParallelDimsError: the world has another size.
        """
        if world is None:
            world = current_world() if platform is None else joined_world(platform)
        raise_if_any(self._world_problems(world), ParallelDimsError, "device mesh")
        aliases, sparse = self.aliases(), None
        if self.expert_mesh == "folded":
            sparse = self.sparse_sizes()
        else:
            aliases |= {"efsdp": aliases["fsdp"], "etp": ("tp",) if self.etp == self.tp else ()}
        return build_mesh(device_type, world, self.dense_sizes(), aliases, sparse)

    def _world_problems(self, world: World) -> Iterator[Problem]:
        if world.size != self.world_size:
            yield Problem(
                path="world_size",
                what="the world has another size",
                expected=str(self.world_size),
                got=f"a world of {world.size} ranks",
                hint=f"start {self.world_size} ranks, or world_size={world.size}",
            )

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` on each axis of the dense mesh."""
        coordinate = {}
        for name, size in reversed(self.dense_sizes().items()):
            # Row-major numbering: the last axis varies fastest.
            rank, coordinate[name] = divmod(rank, size)
        return coordinate

    def batch_rank(self, rank: int) -> int:
        """Return the index of the slice of a global batch, of `dp_size` slices, that `rank` reads."""
        coordinate = self.coordinate(rank)
        return coordinate["dp_replicate"] * self.dp_shard + coordinate["dp_shard"]

    # Model -----------------------------------------------------------------------------------------------

    def model_problems(self, model: Any, seq_len: int | None = None) -> Iterator[Problem]:
        """Yield the sizes of `model.config`, or of the configuration `model`, that these degrees do not divide."""
        yield from find_model_problems(self, model, seq_len)
        yield from context_problems(self, getattr(model, "config", model), seq_len)

    def validate_against_model(self, model: Any, seq_len: int | None = None) -> None:
        """Check that the degrees divide heads, key-value heads, experts and sequence length, as far as they are known.

        Args:
            model: an object with a `config`, or a configuration.
            seq_len: tokens per sample.

        Raises:
            ParallelDimsError: listing every problem with the legal degrees.
        """
        raise_if_any(self.model_problems(model, seq_len), ParallelDimsError, "parallel degrees do not fit the model")


def dims_of(config: Any, world_size: int) -> ParallelDims:
    """Return the degrees of a trainer's configuration on a number of ranks."""
    return ParallelDims.from_config(config.parallel, world_size, getattr(config.model.options, "num_experts", None))


_DISPATCH = ("ep_dispatcher", "ep_chunks", "ep_copies", "ep_move_interval", "ep_node_size")


def degrees_from_config(config: Any, world_size: int, num_experts: int | None = None) -> dict[str, Any]:
    """Return the fields of `ParallelDims` that `config` sets, with `from_config`'s defaults, without `world_size`."""
    names = (*DEGREES, "expert_mesh", "cp_method", *_DISPATCH, "tp_reshard_after_forward")
    found = {name: getattr(config, name, None) for name in names}
    # `dp` is the older name of the setting.
    if found["dp_shard"] is None:
        found["dp_shard"] = getattr(config, "dp", None)
    # Tensor parallel experts by default: `etp` of 1 is a choice that must be stated.
    if found["etp"] is None:
        found["etp"] = found["tp"]
    degrees = {name: value for name, value in found.items() if value is not None}
    if degrees.get("ep") == -1:
        # The largest `ep` of the folded mesh, where `dp_shard*cp*tp == efsdp*ep*etp`.
        shard, outside = degrees.get("dp_shard", 1), degrees.get("dp_replicate", 1) * degrees.get("pp", 1)
        inside = degrees.get("cp", 1) * degrees.get("tp", 1)
        dense = world_size // outside if shard == -1 else shard * inside
        degrees["ep"] = math.gcd(num_experts or 1, max(1, dense // degrees.get("etp", 1)))
    return degrees


Check = Callable[[ParallelDims], Iterable[Problem]]


@dataclass(frozen=True)
class Layout:
    """Degrees that fit the number of ranks, and their other problems (none: legal).

    Examples:
        >>> from hp_trainer import list_layouts
        >>> layout = next(iter(list_layouts(2)))
        >>> layout.dims.world_size
        2
    """

    dims: ParallelDims
    problems: tuple[Problem, ...]

    @property
    def legal(self) -> bool:
        return not self.problems


def list_layouts(
    world_size: int,
    *,
    model: Any = None,
    seq_len: int | None = None,
    has_experts: bool | None = None,
    expert_meshes: Sequence[ExpertMesh] = EXPERT_MESHES,
    checks: Sequence[Check] = (),
) -> Iterator[Layout]:
    """Yield every layout whose degrees multiply to `world_size`.

    The number of layouts grows with the number of divisors, not with the number of ranks.

    Args:
        world_size: ranks of the job.
        model: as in `ParallelDims.validate_against_model`.
        seq_len: tokens per sample.
        has_experts: False: only layouts with `ep` 1; default: whether the model has experts, True without a model.
        expert_meshes: ways to place experts to list; with `ep` 1 they are the same layout, which is listed once.
        checks: functions that return further problems of a layout.

    Examples:
        >>> usable = [layout for layout in list_layouts(4, has_experts=False) if not layout.problems]
        >>> len(usable) > 1
        True
    """
    if has_experts is None:
        has_experts = model is None or bool(getattr(getattr(model, "config", model), "num_experts", None))
    for degrees in list_degrees(world_size, expert_meshes, has_experts=has_experts):
        dims = ParallelDims(**degrees, world_size=world_size)
        problems = [*(dims.model_problems(model, seq_len) if model is not None else ())]
        for check in checks:
            problems += check(dims)
        yield Layout(dims, tuple(problems))


def describe_layouts(layouts: Iterable[Layout], world_size: int) -> str:
    """Return a table of the legal layouts, followed by each problem with the number of layouts it rules out."""
    layouts = list(layouts)
    legal = [layout.dims for layout in layouts if layout.legal]
    reasons = Counter(f"{p.path}: {p.what}" for layout in layouts for p in layout.problems)
    lines = [f"{_counted(len(legal), 'legal layout')} of {world_size} ranks:", "  " + "  ".join(LAYOUT_COLUMNS)]
    for dims in legal:
        cells = (str(getattr(dims, name)).rjust(len(name)) for name in LAYOUT_COLUMNS)
        lines.append("  " + "  ".join(cells))
    lines.append(f"every degree must be one of: {', '.join(map(str, divisors(world_size)))}")
    if reasons:
        lines.append(f"{_counted(len(layouts) - len(legal), 'layout')} cannot be used:")
        lines += [f"  {reason} ({_counted(count, 'layout')})" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def list_degrees(
    world_size: int, expert_meshes: Sequence[ExpertMesh], *, has_experts: bool
) -> Iterator[dict[str, Any]]:
    """Yield the degrees of every layout of so many ranks, as keywords of `ParallelDims`."""
    for ep, expert_mesh in itertools.product(divisors(world_size) if has_experts else [1], expert_meshes):
        # Without expert parallelism the meshes are the same layout.
        if ep == 1 and expert_mesh != expert_meshes[0]:
            continue
        # The peer mesh has `ep` as an axis of its own, so the other degrees share what is left.
        around = ep if expert_mesh == "peer" else 1
        for pp, dp_replicate, dp_shard, cp, tp in _factorizations(world_size // around, 5):
            # `etp` is 1 or `tp`. Without expert parallelism only the default is listed.
            for etp in sorted({1, tp}) if ep > 1 else [tp]:
                # The folded mesh needs dp_shard*cp*tp == efsdp*ep*etp.
                if expert_mesh == "peer" or dp_shard * cp * tp % (ep * etp) == 0:
                    yield {
                        "dp_replicate": dp_replicate,
                        "dp_shard": dp_shard,
                        "cp": cp,
                        "tp": tp,
                        "pp": pp,
                        "ep": ep,
                        "etp": etp,
                        "expert_mesh": expert_mesh,
                    }


def _factorizations(n: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered ways to write `n` as a product of `count` factors."""
    if count == 1:
        yield (n,)
        return
    for first in divisors(n):
        # Few even for many ranks: 2**20 has 10,626 such products of five factors.
        for rest in _factorizations(n // first, count - 1):
            yield (first, *rest)
