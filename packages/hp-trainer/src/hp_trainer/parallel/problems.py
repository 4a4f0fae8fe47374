"""Problems of parallel degrees, each with the nearest legal values: among themselves, and with a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hp_moe.dispatch import dispatchers
from hp_moe.expert_parallel import CHUNKED, COPYING
from hp_trainer.exceptions import Problem, join_choices
from hp_trainer.parallel.axes import (
    CP_METHODS,
    DEGREES,
    EXPERT_MESHES,
    ExpertMesh,
    degrees_without_dp_shard,
    dense_degrees,
    nearest_divisors,
    product,
)


def find_problems(dims: Any) -> Iterator[Problem]:
    """Yield every problem of the degrees of an object that has the fields of `ParallelDims`."""
    malformed = list(_malformed(dims))
    yield from malformed
    if malformed:
        return
    if dims.expert_mesh is None and dims.dp_shard == -1 and dims.ep > 1:
        yield _ambiguous(dims)
        return
    expert_mesh, shard = chosen_expert_mesh(dims), dims.dp_shard
    if shard == -1:
        filled, rest = divmod(dims.world_size, product(dims, degrees_without_dp_shard(expert_mesh)))
        shard = None if rest else filled
        if rest:
            yield _unfillable(dims, degrees_without_dp_shard(expert_mesh))
    elif product(dims, dense_degrees(expert_mesh)) != dims.world_size:
        yield _wrong_product(dims, dense_degrees(expert_mesh))
    yield from _expert_problems(dims, expert_mesh, shard)
    yield from _ulysses_problems(dims)
    yield from _dispatcher_problems(dims)


def chosen_expert_mesh(dims: Any) -> ExpertMesh:
    """Return `dims.expert_mesh`, or if it is None the one whose equation holds (folded if neither does)."""
    if dims.expert_mesh is not None:
        given: ExpertMesh = dims.expert_mesh
        return given
    peer = dims.ep > 1 and product(dims, dense_degrees("peer")) == dims.world_size
    return "peer" if peer else "folded"


def _ambiguous(dims: Any) -> Problem:
    """Return the problem of `dp_shard=-1` with expert parallelism, with both possible values."""
    fills = {kind: dims.world_size / product(dims, degrees_without_dp_shard(kind)) for kind in EXPERT_MESHES}
    return Problem(
        path="dp_shard",
        what=f"-1 with ep = {dims.ep} is ambiguous: dp_shard would be {fills['folded']:g} if experts reuse the dense "
        f"ranks (folded), {fills['peer']:g} if ep is an axis of its own (peer)",
        expected="expert_mesh, or dp_shard itself",
        got="-1",
        hint="expert_mesh='folded' or 'peer'",
    )


def find_model_problems(dims: Any, model: Any, seq_len: int | None = None) -> Iterator[Problem]:
    """Yield every size of a model that the degrees do not divide; missing sizes are skipped.

    Args:
        dims: an object with the fields of `ParallelDims`, which need not be consistent.
        model: an object with a `config`, or a configuration.
        seq_len: tokens per sample.
    """
    config = getattr(model, "config", model)
    for field, degree in (("num_attention_heads", "tp"), ("num_key_value_heads", "tp"), ("num_experts", "ep")):
        yield from _divides(field, getattr(config, field, None), degree, getattr(dims, degree))
    layers = getattr(config, "num_hidden_layers", None)
    if layers is not None and dims.pp > layers:
        what = f"num_hidden_layers = {layers} cannot be split into stages for pp = {dims.pp} ranks"
        yield Problem(path="pp", what=what, expected=f"at most {layers}", got=str(dims.pp), hint=f"pp={layers}")
    if dims.pp > 1 and getattr(config, "routing", None) == "hash":
        what = "routing = hash chooses experts by token ids, which only the first stage has"
        yield Problem(path="pp", what=what, expected="1, or another routing", got=str(dims.pp), hint="pp=1")
    if getattr(getattr(config, "lora", None), "rank", None) is not None:
        for field, none in (("ep_copies", "0"), ("ep_move_interval", "null")):
            if value := getattr(dims, field, None):
                what = "has no effect with adapters, which freeze routers: the loads of experts are not recorded then"
                yield Problem(path=field, what=what, expected=none, got=str(value), hint=f"{field}={none}")
    if seq_len is not None and seq_len % (dims.cp * dims.tp):
        yield _sequence_problem(seq_len, dims.cp, dims.tp)


def _malformed(dims: Any) -> Iterator[Problem]:
    for name in (*DEGREES, "world_size"):
        value = getattr(dims, name)
        if name == "ulysses_degree" and value is None:
            continue
        # In Python, bool is a subclass of int.
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or (value < 1 and not (name == "dp_shard" and value == -1)):
            expected = "-1 or an integer >= 1" if name == "dp_shard" else "an integer >= 1"
            yield Problem(path=name, what="impossible degree", expected=expected, got=repr(value), hint=f"{name}=1")
    if dims.expert_mesh not in (None, *EXPERT_MESHES):
        what = "unknown placement of experts"
        yield Problem(path="expert_mesh", what=what, expected="'folded' or 'peer'", got=repr(dims.expert_mesh))
    if dims.cp_method not in (None, *CP_METHODS):
        what = "unknown method of context parallelism"
        yield Problem(path="cp_method", what=what, expected=join_choices(CP_METHODS), got=repr(dims.cp_method))


def _dispatcher_problems(dims: Any) -> Iterator[Problem]:
    name, chunks, node = (getattr(dims, field, None) for field in ("ep_dispatcher", "ep_chunks", "ep_node_size"))
    if name is not None and name not in (known := [*dispatchers().names(), "two_level"]):
        yield Problem(path="ep_dispatcher", what="unknown dispatcher", expected=join_choices(known), got=repr(name))
    if chunks is not None and name not in (None, *CHUNKED):
        what = f"{name} does not send tokens in chunks"
        yield Problem(path="ep_chunks", what=what, expected=join_choices(CHUNKED), got=str(chunks))
    if getattr(dims, "ep_copies", 0) and name not in (None, *COPYING):
        yield Problem(
            path="ep_copies",
            what=f"{name} does not support copies of experts",
            expected=f"0, or ep_dispatcher {join_choices(COPYING)}",
            got=str(dims.ep_copies),
            hint="ep_copies=0",
        )
    interval = getattr(dims, "ep_move_interval", None)
    if interval is not None and (interval < 1 or name not in (None, *COPYING)):
        yield Problem(
            path="ep_move_interval",
            what="out of range" if interval < 1 else f"{name} does not support moving experts",
            expected=f"null, or an integer >= 1 and ep_dispatcher {join_choices(COPYING)}",
            got=str(interval),
            hint="ep_move_interval=null",
        )
    if node is None and name == "two_level":
        what = "two_level needs the ranks of a node"
        yield Problem(path="ep_node_size", what=what, got="null", hint="ep_node_size=8")
    if node is not None and name not in ("two_level", "auto"):
        what = "is used by ep_dispatcher two_level and auto only"
        yield Problem(path="ep_node_size", what=what, expected="null", got=str(node))
    elif node is not None and (node < 1 or dims.ep % node):
        what = f"the {dims.ep} expert parallel ranks must fill nodes"
        yield Problem(path="ep_node_size", what=what, expected=f"a divisor of {dims.ep}", got=str(node))


def _unfillable(dims: Any, names: tuple[str, ...]) -> Problem:
    return Problem(
        path="dp_shard",
        what=(
            f"-1 cannot be filled: world_size / ({'*'.join(names)}) = {dims.world_size} / "
            f"({_spelt(dims, names)}) = {dims.world_size}/{product(dims, names)} is not an integer"
        ),
        expected=f"{'*'.join(names)} to divide {dims.world_size}",
        got=str(product(dims, names)),
        hint=_nearest_products(dims, names, divides=True),
    )


def _wrong_product(dims: Any, names: tuple[str, ...]) -> Problem:
    total = product(dims, names)
    what = f"{'*'.join(names)} = {_spelt(dims, names)} = {total} is not world_size = {dims.world_size}"
    hint = _nearest_products(dims, names, divides=False)
    return Problem(path="dp_shard", what=what, expected=f"a product of {dims.world_size}", got=str(total), hint=hint)


def _nearest_products(dims: Any, names: tuple[str, ...], *, divides: bool) -> str:
    """Return a hint: values of each single degree, and a world size, with which the product divides or equals it."""
    total = product(dims, names)
    choices = []
    for name in names:
        degree = getattr(dims, name)
        # What this degree would be if all others stayed.
        share, rest = divmod(dims.world_size, total // degree)
        if rest == 0:
            values = nearest_divisors(share, degree) if divides else [share]
            choices.append(f"{name}={join_choices(values)}")
    # No single degree can satisfy the equation, so name the degrees that do not divide the world size.
    if not choices:
        choices = [", ".join(_nearest_degrees(dims, names))]
    # With -1 any multiple of the product is legal, without it the product itself.
    nearest = max(1, round(dims.world_size / total)) * total if divides else total
    return ", or ".join([choice for choice in choices if choice] + [f"world_size={nearest}"])


def _nearest_degrees(dims: Any, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if dims.world_size % getattr(dims, name):
            yield f"{name}={join_choices(nearest_divisors(dims.world_size, getattr(dims, name)))}"


def _expert_problems(dims: Any, expert_mesh: ExpertMesh, shard: int | None) -> Iterator[Problem]:
    # A peer mesh without expert parallelism ignores `etp`.
    etp_matters = expert_mesh == "folded" or dims.ep > 1
    etp_fits = dims.etp in (1, dims.tp)
    if etp_matters and not etp_fits:
        legal = join_choices(sorted({1, dims.tp}))
        what = "experts are tensor parallel over all tp ranks or not at all"
        yield Problem(path="etp", what=what, expected=f"1 or tp (= {dims.tp})", got=str(dims.etp), hint=f"etp={legal}")
    # `ep` is an axis of its own there; and without `dp_shard` the number of dense ranks is unknown.
    if expert_mesh == "peer" or shard is None or not etp_fits:
        return
    # Experts reuse the dense ranks of one replica and stage; `efsdp` is the quotient.
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
        what = f"{field} = {value} cannot be split over {degree} = {size}"
        hint = f"{degree}={join_choices(nearest_divisors(value, size))}"
        yield Problem(path=degree, what=what, expected=f"a divisor of {value}", got=str(size), hint=hint)


def _sequence_problem(seq_len: int, cp: int, tp: int) -> Problem:
    shares = cp * tp
    # The multiples of cp * tp on either side of the length.
    nearest = sorted({max(1, seq_len // shares) * shares, -(-seq_len // shares) * shares})
    return Problem(
        path="tp" if cp == 1 else "cp",
        what=f"seq_len = {seq_len} cannot be split over cp*tp = {cp}*{tp} = {shares}",
        expected=f"cp*tp to divide {seq_len}",
        got=str(shares),
        hint=f"seq_len={join_choices(nearest)}, or cp*tp={join_choices(nearest_divisors(seq_len, shares))}",
    )


def _spelt(dims: Any, names: tuple[str, ...]) -> str:
    return "*".join(str(getattr(dims, name)) for name in names)
