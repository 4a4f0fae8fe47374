"""Every parallel layout of a number of ranks, and the problems of those that cannot be used."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from hp_trainer.exceptions import Problem
from hp_trainer.parallel.axes import LAYOUT_COLUMNS, ExpertMesh, divisors
from hp_trainer.parallel.dims import ParallelDims

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
    expert_meshes: Sequence[ExpertMesh] = get_args(ExpertMesh),
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
