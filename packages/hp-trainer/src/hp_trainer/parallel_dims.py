"""All parallel degrees of a job: inferred, validated and turned into a device mesh before anything is built.

Everything here is arithmetic on degrees and strides, so it costs the same for 8 and for 1,048,576 ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import World, current_world
from hp_trainer._divisors import join_choices, nearest_divisors
from hp_trainer.exceptions import ParallelDimsError, Problem, raise_if_any

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform

ExpertMesh = Literal["folded", "peer"]

FOLDED_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
PEER_ORDER = ("dp_replicate", "dp_shard", "ep", "cp", "tp", "pp")

# What each alias spans, in the order of the mesh. `fsdp` of the folded mesh shards over cp as well: context
# parallel ranks hold the same weights, so they can share them.
_ALIASES = {
    "folded": {
        "fsdp": ("dp_shard", "cp"),
        "dp": ("dp_replicate", "dp_shard"),
        "batch": ("dp_replicate", "dp_shard"),
        "loss": ("dp_replicate", "dp_shard", "cp"),
    },
    "peer": {
        "fsdp": ("dp_shard",),
        "dp": ("dp_replicate", "dp_shard"),
        "batch": ("dp_replicate", "dp_shard"),
        "loss": ("dp_replicate", "dp_shard", "cp"),
    },
}


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The degrees of every kind of parallelism, checked against each other when created.

    `expert_mesh` says where experts live:

    - `"folded"`: `dp_replicate*dp_shard*cp*tp*pp == world_size`, and experts re-use the dense ranks:
      `dp_shard*cp*tp == efsdp*ep*etp`, with `efsdp` inferred; `dp_replicate` and `pp` stay outside.
    - `"peer"`: `ep` is an axis of its own: `dp_replicate*dp_shard*ep*cp*tp*pp == world_size`.

    Attributes:
        dp_replicate: replicas of the sharded model (HSDP's outer axis).
        dp_shard: data-parallel ranks that share one copy of the weights; -1 takes what is left.
        cp: context parallel ranks, which share a sequence.
        tp: tensor parallel ranks.
        pp: pipeline stages.
        ep: expert parallel ranks.
        etp: tensor parallel ranks within an expert, 1 or `tp`.
        ulysses_degree: how many of the `cp` ranks exchange heads; None: all of them.
        world_size: ranks of the job.

    Raises:
        ParallelDimsError: listing every problem with the nearest legal values.
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
    expert_mesh: ExpertMesh = "folded"

    def __post_init__(self) -> None:
        raise_if_any(find_problems(self), ParallelDimsError, "parallel degrees")
        if self.dp_shard == -1:
            object.__setattr__(self, "dp_shard", self.world_size // _product(self, _filled_around(self)))

    @classmethod
    def from_config(cls, config: Any, world_size: int) -> ParallelDims:
        """Read the degrees from any object that has some of the fields as attributes (None: not set).

        `etp` defaults to `tp`, and an older `dp` is read as `dp_shard` where that is not set.

        Raises:
            ParallelDimsError: listing every problem.
        """
        return cls(**degrees_from_config(config), world_size=world_size)

    # Sizes -----------------------------------------------------------------------------------------------

    @property
    def dp_size(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def non_dp_size(self) -> int:
        """Ranks that share one sample."""
        return self.world_size // self.dp_size

    @property
    def fsdp_size(self) -> int:
        """Ranks that share one copy of the dense weights."""
        return _product(self, _ALIASES[self.expert_mesh]["fsdp"])

    @property
    def efsdp_size(self) -> int:
        """Ranks that share one copy of an expert's weights."""
        if self.expert_mesh == "peer":
            return self.fsdp_size
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)

    @property
    def ulysses_size(self) -> int:
        """Ranks that exchange heads for sequence in context parallel attention."""
        return self.cp if self.ulysses_degree is None else self.ulysses_degree

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
    def fsdp_enabled(self) -> bool:
        return self.fsdp_size > 1

    def summary(self) -> str:
        """One line with every degree."""
        names = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp")
        degrees = " ".join(f"{name}={getattr(self, name)}" for name in names)
        return (
            f"{degrees} efsdp={self.efsdp_size} ulysses={self.ulysses_size} "
            f"expert_mesh={self.expert_mesh} dp={self.dp_size} world={self.world_size}"
        )

    # Mesh ------------------------------------------------------------------------------------------------

    def dense_sizes(self) -> dict[str, int]:
        """The size of every axis of the dense mesh, outermost first, those of size 1 included."""
        order = FOLDED_ORDER if self.expert_mesh == "folded" else PEER_ORDER
        return {name: getattr(self, name) for name in order}

    def sparse_sizes(self) -> dict[str, int]:
        """The size of every axis of the experts' view of the folded mesh, outermost first."""
        sizes = {"pp": self.pp, "dp_replicate": self.dp_replicate}
        return sizes | {"efsdp": self.efsdp_size, "ep": self.ep, "etp": self.etp}

    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Names for several axes of the dense mesh taken together."""
        return dict(_ALIASES[self.expert_mesh])

    def build_mesh(
        self, device_type: str = "cpu", *, world: World | None = None, platform: Platform | None = None
    ) -> DeviceMesh:
        """The dense mesh, with every other name reachable as `mesh[name]`.

        Its axes are those of degree above 1 (all ones: `dp_shard` alone). Besides them there are the names
        of the degrees that are 1, `fsdp`, `dp`, `batch`, `loss`, and for experts `efsdp`, `ep` and `etp`
        over the same ranks; an axis that nothing is split over has size 1 rather than being absent.

        Args:
            device_type: `cpu`, `cuda`, `npu`.
            world: default the current world of `platform`.

        Raises:
            ParallelDimsError: the world has another size.
        """
        world = world if world is not None else current_world(platform)
        raise_if_any(self._world_problems(world), ParallelDimsError, "device mesh")
        root = DeviceMesh(device_type, (self.world_size,), mesh_dim_names=("world",), world=world)
        sizes = self.dense_sizes()
        used = {name: size for name, size in sizes.items() if size > 1} or {"dp_shard": 1}
        mesh = root.unflatten("world", tuple(used.values()), tuple(used))
        for name, parts in ({name: (name,) for name in sizes} | self.aliases()).items():
            if name not in used:
                mesh.flatten(name, [part for part in parts if part in used])
        self._name_expert_axes(root, mesh)
        return mesh

    def _name_expert_axes(self, root: DeviceMesh, mesh: DeviceMesh) -> None:
        if self.expert_mesh == "peer":
            mesh.flatten("efsdp", ["fsdp"])
            mesh.flatten("etp", ["tp"] if self.etp == self.tp else [])
            return
        sizes = self.sparse_sizes()
        # Views of one root share their aliases: what is named on the sparse view is found on the dense one.
        sparse = root.unflatten("world", tuple(sizes.values()), tuple(f"sparse_{name}" for name in sizes))
        for name in ("efsdp", "ep", "etp"):
            sparse.flatten(name, [f"sparse_{name}"])

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
        """Where `rank` stands on each axis of the dense mesh."""
        coordinate = {}
        for name, size in reversed(self.dense_sizes().items()):
            rank, coordinate[name] = divmod(rank, size)
        return coordinate

    def batch_rank(self, rank: int) -> int:
        """Which of the `dp_size` slices of a global batch `rank` reads."""
        coordinate = self.coordinate(rank)
        return coordinate["dp_replicate"] * self.dp_shard + coordinate["dp_shard"]

    # Model -----------------------------------------------------------------------------------------------

    def model_problems(self, model: Any, seq_len: int | None = None) -> Iterator[Problem]:
        """What of `model.config` (or of a `model` that has no `config`) these degrees do not divide."""
        return find_model_problems(self, model, seq_len)

    def validate_against_model(self, model: Any, seq_len: int | None = None) -> None:
        """Check heads, key-value heads, experts and sequence length; fields the model lacks are skipped.

        Args:
            model: anything with a `config` (or such a configuration itself).
            seq_len: tokens per sample.

        Raises:
            ParallelDimsError: listing every problem with the legal degrees.
        """
        raise_if_any(self.model_problems(model, seq_len), ParallelDimsError, "parallel degrees do not fit the model")


DEGREES = tuple(field.name for field in fields(ParallelDims) if field.name not in ("world_size", "expert_mesh"))


def degrees_from_config(config: Any) -> dict[str, Any]:
    """The fields of `ParallelDims` (but `world_size`) that `config` sets, with `from_config`'s defaults."""
    names = (*DEGREES, "expert_mesh")
    found = {name: getattr(config, name, None) for name in names}
    if found["dp_shard"] is None:
        found["dp_shard"] = getattr(config, "dp", None)
    if found["etp"] is None:
        found["etp"] = found["tp"]
    return {name: value for name, value in found.items() if value is not None}


def find_problems(dims: Any) -> Iterator[Problem]:
    """Everything wrong with the degrees of an object that has the fields of `ParallelDims`."""
    malformed = list(_malformed(dims))
    yield from malformed
    if malformed:
        return
    shard = dims.dp_shard
    if shard == -1:
        filled, rest = divmod(dims.world_size, _product(dims, _filled_around(dims)))
        shard = None if rest else filled
        if rest:
            yield _unfillable(dims)
    elif _product(dims, _base(dims)) != dims.world_size:
        yield _wrong_product(dims)
    yield from _expert_problems(dims, shard)
    yield from _ulysses_problems(dims)


def find_model_problems(dims: Any, model: Any, seq_len: int | None = None) -> Iterator[Problem]:
    """`ParallelDims.model_problems` for degrees that may not fit each other."""
    config = getattr(model, "config", model)
    for field, degree in (("num_attention_heads", "tp"), ("num_key_value_heads", "tp"), ("num_experts", "ep")):
        yield from _divides(field, getattr(config, field, None), degree, getattr(dims, degree))
    if seq_len is not None and seq_len % (dims.cp * dims.tp):
        yield _sequence_problem(seq_len, dims.cp, dims.tp)


def _malformed(dims: Any) -> Iterator[Problem]:
    for name in (*DEGREES, "world_size"):
        value = getattr(dims, name)
        if name == "ulysses_degree" and value is None:
            continue
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or (value < 1 and not (name == "dp_shard" and value == -1)):
            expected = "-1 or a whole number >= 1" if name == "dp_shard" else "a whole number >= 1"
            yield Problem(path=name, what="impossible degree", expected=expected, got=repr(value), hint=f"{name}=1")
    if dims.expert_mesh not in get_args(ExpertMesh):
        yield Problem(
            path="expert_mesh",
            what="unknown way to place experts",
            expected="'folded' or 'peer'",
            got=repr(dims.expert_mesh),
        )


def _base(dims: Any) -> tuple[str, ...]:
    """The degrees whose product is the world size, in the order of the equation."""
    return ("dp_replicate", "dp_shard", "cp", "tp", "pp") + (("ep",) if dims.expert_mesh == "peer" else ())


def _filled_around(dims: Any) -> tuple[str, ...]:
    return tuple(name for name in _base(dims) if name != "dp_shard")


def _unfillable(dims: Any) -> Problem:
    names = _filled_around(dims)
    return Problem(
        path="dp_shard",
        what=(
            f"-1 cannot be filled: world_size / ({'*'.join(names)}) = {dims.world_size} / "
            f"({_spelt(dims, names)}) = {dims.world_size}/{_product(dims, names)} is no whole number"
        ),
        expected=f"{'*'.join(names)} to divide {dims.world_size}",
        got=str(_product(dims, names)),
        hint=_nearest_products(dims, names, divides=True),
    )


def _wrong_product(dims: Any) -> Problem:
    names = _base(dims)
    product = _product(dims, names)
    return Problem(
        path="dp_shard",
        what=f"{'*'.join(names)} = {_spelt(dims, names)} = {product} is not world_size = {dims.world_size}",
        expected=f"a product of {dims.world_size}",
        got=str(product),
        hint=_nearest_products(dims, names, divides=False),
    )


def _nearest_products(dims: Any, names: tuple[str, ...], *, divides: bool) -> str:
    """For each degree alone the nearest values that mend the equation, and the world size that would."""
    product = _product(dims, names)
    choices = []
    for name in names:
        degree = getattr(dims, name)
        share, rest = divmod(dims.world_size, product // degree)
        if rest == 0:
            values = nearest_divisors(share, degree) if divides else [share]
            choices.append(f"{name}={join_choices(values)}")
    if not choices:
        choices = [", ".join(_nearest_degrees(dims, names))]
    nearest = max(1, round(dims.world_size / product)) * product if divides else product
    return ", or ".join([choice for choice in choices if choice] + [f"world_size={nearest}"])


def _nearest_degrees(dims: Any, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if dims.world_size % getattr(dims, name):
            yield f"{name}={join_choices(nearest_divisors(dims.world_size, getattr(dims, name)))}"


def _expert_problems(dims: Any, shard: int | None) -> Iterator[Problem]:
    etp_matters = dims.expert_mesh == "folded" or dims.ep > 1
    etp_fits = dims.etp in (1, dims.tp)
    if etp_matters and not etp_fits:
        legal = join_choices(sorted({1, dims.tp}))
        yield Problem(
            path="etp",
            what="experts are tensor parallel over all of tp or not at all",
            expected=f"1 or tp (= {dims.tp})",
            got=str(dims.etp),
            hint=f"etp={legal}",
        )
    if dims.expert_mesh == "peer" or shard is None or not etp_fits:
        return
    dense, used = shard * dims.cp * dims.tp, dims.ep * dims.etp
    if dense % used:
        nearest = nearest_divisors(dense // dims.etp, dims.ep)
        yield Problem(
            path="ep",
            what=(
                f"dp_shard*cp*tp = {shard}*{dims.cp}*{dims.tp} = {dense} ranks cannot be split into "
                f"efsdp*ep*etp = efsdp*{dims.ep}*{dims.etp}"
            ),
            expected=f"ep to divide {dense // dims.etp}",
            got=str(dims.ep),
            hint=f"ep={join_choices(nearest)}",
        )


def _ulysses_problems(dims: Any) -> Iterator[Problem]:
    degree = dims.ulysses_degree
    if dims.cp > 1 and degree is not None and dims.cp % degree:
        yield Problem(
            path="ulysses_degree",
            what="must divide cp",
            expected=f"a divisor of cp = {dims.cp}",
            got=str(degree),
            hint=f"ulysses_degree={join_choices(nearest_divisors(dims.cp, degree))}",
        )


def _divides(field: str, value: int | None, degree: str, size: int) -> Iterator[Problem]:
    if value is not None and value % size:
        yield Problem(
            path=degree,
            what=f"{field} = {value} cannot be split over {degree} = {size}",
            expected=f"a divisor of {value}",
            got=str(size),
            hint=f"{degree}={join_choices(nearest_divisors(value, size))}",
        )


def _sequence_problem(seq_len: int, cp: int, tp: int) -> Problem:
    shares = cp * tp
    nearest = sorted({max(1, seq_len // shares) * shares, -(-seq_len // shares) * shares})
    return Problem(
        path="tp" if cp == 1 else "cp",
        what=f"seq_len = {seq_len} cannot be split over cp*tp = {cp}*{tp} = {shares}",
        expected=f"cp*tp to divide {seq_len}",
        got=str(shares),
        hint=f"seq_len={join_choices(nearest)}, or cp*tp={join_choices(nearest_divisors(seq_len, shares))}",
    )


def _product(dims: Any, names: tuple[str, ...]) -> int:
    return math.prod(getattr(dims, name) for name in names)


def _spelt(dims: Any, names: tuple[str, ...]) -> str:
    return "*".join(str(getattr(dims, name)) for name in names)
