"""The likely kind of a difference, by hypotheses that the digests of both sides can test.

Constants of the hypotheses are chosen, not derived, and proven by injected faults only. They decide the kind that is
named, never if the sides differ: that is `Pair.relative` against the tolerance of `comparison`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hp_dtensor.debug.digest import BUCKETS, PROJECTIONS, SQUARES, SUM, Digest, Part, norm_of
from hp_dtensor.debug.recording import Event

# A hypothesis fits if it leaves this share of the difference.
_FIT = 0.02
# Other constants change a tensor by less than this share, mostly along itself.
_SMALL, _ALONG = 0.05, 0.6
_DIMS = ("first", "second", "last")
# The dtype of a gradient that a side has not.
MISSING = "none"


@dataclass(frozen=True)
class Kind:
    """The kind of a difference.

    Attributes:
        name: such as `factor`, `missing reduction`, `stale`, `permutation`, `dtype`.
        cause: the likely cause in words.
        where: the elements and ranks in which the sides differ, in words.
    """

    name: str
    cause: str
    where: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """One tensor of both sides to compare.

    Attributes:
        a, b: the tensor on either side.
        before_a, before_b: the same in the step before.
        unit: the unit of rounding of its dtype.
        weights_a, weights_b: for an update, the weights that it is added to.
    """

    a: Event
    b: Event
    before_a: Event | None = None
    before_b: Event | None = None
    unit: float = 2.0**-24
    weights_a: Event | None = None
    weights_b: Event | None = None

    @property
    def is_comparable(self) -> bool:
        """False if both sides have NaN or infinite values, whose difference says nothing."""
        return self.a.digest.is_finite or self.b.digest.is_finite

    def relative(self, *, replicas: bool = True) -> float:
        """Return the norm of B - A, or of the largest difference of `replicas`, relative to the larger norm of both."""
        a, b = self.a.digest, self.b.digest
        if a.count != b.count or not (a.is_finite and b.is_finite):
            return math.inf
        changes = [norm_of(b.values - a.values, b.num_bucketed)]
        if replicas:
            changes += [norm_of(change, 0) for side in (a, b) for _, change in side.changes()]
        # A replica that is not finite makes its change NaN.
        change, scale = math.inf if not np.isfinite(changes).all() else max(changes), max(a.norm, b.norm)
        return change / scale if scale else math.inf if change else 0.0

    def differing_replicas(self, digest: Digest) -> list[Part]:
        """Return the copies of a side that differ from others by more than rounding."""
        limit = 32 * self.unit * digest.norm
        # In this form NaN differs.
        return [part for part, change in digest.changes() if not norm_of(change, 0) <= limit]


def kind_of(pair: Pair, about_a: Mapping[str, Any], about_b: Mapping[str, Any], step: int) -> Kind:
    """Return the kind of a difference that rounding does not explain."""
    name, cause = next(_hypotheses(pair, about_a, about_b, step))
    return Kind(name, cause, tuple(_where(pair)))


def _hypotheses(
    pair: Pair, about_a: Mapping[str, Any], about_b: Mapping[str, Any], step: int
) -> Iterator[tuple[str, str]]:
    """Yield (name, cause) of the kinds that fit, the most likely one first; the last one fits always."""
    # From specific to general: the first hypothesis that fits is the answer, and later ones would fit as well.
    yield from _of_missing_values(pair)
    if step == 0 and not _is_permuted(pair):
        yield "initial weights", "the sides do not start from the same weights: another seed, source or initialization"
    # Before the factor: the sum of equal summands is a multiple of each, but the cause is the missing all-reduce.
    yield from _of_replicas(pair)
    yield from _of_factor(pair, about_a, about_b)
    yield from _of_previous_step(pair)
    yield from _of_some_elements(pair)
    if _is_permuted(pair):
        yield (
            "permutation",
            "the same values in other places: exchanged shards, experts or rows, or another order of ranks",
        )
    relative, along = _change(pair)
    if relative < _SMALL and along > _ALONG:
        yield "formula", "small and along the tensor itself: another constant, such as an epsilon, or another formula"
    yield from _of_rounding(pair, relative)
    if about_a.get("random") or about_b.get("random"):
        yield "random numbers", "nothing else fits, and the model draws random numbers: another seed or order of draws"
    if about_b.get("world_size", 1) > 1 and _is_part_of_sum(pair):
        yield (
            "missing reduction",
            "B has a part of the sum: gradients of some ranks, samples or micro-batches are missing",
        )
    if relative < _SMALL:
        yield "formula", "small: another constant, such as an epsilon, or another formula"
    yield "values", "no simple relation: another input, mask, weight or formula at this place"


def _of_missing_values(pair: Pair) -> Iterator[tuple[str, str]]:
    a, b = pair.a.digest, pair.b.digest
    for side, event in (("A", pair.a), ("B", pair.b)):
        if event.dtype == MISSING:
            yield "lost", f"{side} has no gradient of this weight"
    if a.count != b.count:
        yield "count", f"A computed it {a.count:g} times in the step, B {b.count:g} times"
    if not pair.is_comparable:
        yield "not finite", "both sides have NaN or infinite values from here on, which cannot be compared"
    if not (a.is_finite and b.is_finite):
        side = "B" if a.is_finite else "A"
        yield "not finite", f"{side} has NaN or infinite values here, and the other side has not"


def _change(pair: Pair) -> tuple[float, float]:
    """Return the relative size of the difference, and its cosine with the tensor, which is near 0 for rounding."""
    a, b = pair.a.digest, pair.b.digest
    vectors = _vector(a.values), _vector(b.values)
    relative = norm_of(b.values - a.values, b.num_bucketed) / max(a.norm, b.norm)
    return relative, abs(_cosine(vectors[0], vectors[1] - vectors[0]))


def _of_rounding(pair: Pair, relative: float) -> Iterator[tuple[str, str]]:
    # Not in all rows: those of an embedding or an expert that were not used are zero.
    is_spread = any(len(chosen) > _filled(pair, dim) // 2 for dim, chosen in enumerate(_differing(pair)))
    # A value is rounded by at most 2^-8 or 2^-11 of it, and by about half of that in the mean. Sums cancel a part,
    # and several roundings in a row add up, so a range around it is accepted.
    for dtype, unit in (("bfloat16", 2.0**-9), ("float16", 2.0**-12)):
        if unit > pair.unit and unit / 8 < relative < unit * 4 and is_spread:
            yield "dtype", f"as large as rounding to {dtype} makes it: a product, cast or reduction in {dtype}"


def _is_part_of_sum(pair: Pair) -> bool:
    """Return True if B's gradient is shorter than A's and points roughly the same way, as a part of a sum does."""
    a, b = pair.a.digest, pair.b.digest
    is_shorter = pair.a.pass_ == "gradient" and b.norm < 0.98 * a.norm
    return is_shorter and _cosine(_vector(a.values), _vector(b.values)) > 0.15


def _of_replicas(pair: Pair) -> Iterator[tuple[str, str]]:
    for side, mine, other, before in (("B", pair.b, pair.a, pair.before_b), ("A", pair.a, pair.b, pair.before_a)):
        replicas = pair.differing_replicas(mine.digest)
        if not replicas:
            continue
        ranks, limit = ", ".join(str(part.rank) for part in replicas), _FIT * other.digest.norm
        if len(mine.digest.parts) == 1:
            yield from _of_summands(mine.digest, replicas, other.digest, side)
            old = None if before is None else before.digest.projections
            if old is not None and all(np.abs(part.values[:PROJECTIONS] - old).max() < limit for part in replicas):
                yield "stale", f"rank {ranks} of {side} still has the values of the step before"
        if np.abs(mine.digest.projections - other.digest.projections).max() < limit:
            yield "replicas differ", f"rank {ranks} of {side} has other values than the ranks with the same elements"
        yield "replicas differ", f"ranks of {side} that should have the same values have not: {ranks}"


def _of_summands(mine: Digest, replicas: list[Part], other: Digest, side: str) -> Iterator[tuple[str, str]]:
    """Test if the differing replicas of a side are summands of the other side's tensor."""
    projections = [part.values[:PROJECTIONS] for part in (*mine.parts, *replicas)]
    if any(np.abs(each - other.projections).max() < _FIT * other.norm for each in projections):
        # One copy is right, and the others may be zero.
        return
    for what, value in (("sum", np.sum(projections, 0)), ("mean", np.mean(projections, 0))):
        if np.abs(value - other.projections).max() < _FIT * other.norm:
            reduced = "A" if side == "B" else "B"
            yield (
                "missing reduction",
                f"each rank of {side} has its own summand, and their {what} is {reduced}: the all-reduce is missing",
            )


def _of_factor(pair: Pair, about_a: Mapping[str, Any], about_b: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    a, b = _vector(pair.a.digest.values), _vector(pair.b.digest.values)
    if not np.any(b):
        yield "lost", "it is zero in B"
    if not np.any(a):
        yield "lost", "it is zero in A"
        return
    # The least-squares factor, so that no single projection decides.
    factor = float(a @ b) / float(a @ a)
    left = float(np.linalg.norm(b - factor * a))
    if left > _FIT * float(np.linalg.norm(b - a)):
        return
    worlds = [about.get("world_size", 1) for about in (about_a, about_b)]
    degrees = [n for about in (about_a, about_b) for n in about.get("degrees", {}).values()]
    for n in dict.fromkeys([*worlds, *degrees, 2]):
        if n > 1 and math.isclose(factor, n, rel_tol=1e-3):
            yield "factor", f"B is {n} times A: summed over {n} ranks once too often, or not divided by them"
        if n > 1 and math.isclose(factor, 1 / n, rel_tol=1e-3):
            yield "factor", f"B is 1/{n} of A: divided by {n} ranks once too often, or a reduction over them is missing"
    if abs(factor) < 1e-6:
        yield "lost", "it is almost zero in B"
    if math.isclose(factor, -1, rel_tol=1e-3):
        yield "factor", "B is -A: the sign is wrong"
    yield "factor", f"B is {factor:.4g} times A: a wrong divisor or scale, such as the number of tokens"


def _of_previous_step(pair: Pair) -> Iterator[tuple[str, str]]:
    for side, now, before in (("B", pair.b, pair.before_b), ("A", pair.a, pair.before_a)):
        if before is not None:
            change = norm_of(now.digest.values - before.digest.values, now.digest.num_bucketed)
            if change < _FIT * norm_of(pair.b.digest.values - pair.a.digest.values, now.digest.num_bucketed):
                yield "stale", f"{side} has the values of the step before"


def _of_some_elements(pair: Pair) -> Iterator[tuple[str, str]]:
    """Test hypotheses on the eighths of a dimension that differ, where others do not."""
    a, b = pair.a.digest.buckets(), pair.b.digest.buckets()
    some = [0 < len(chosen) < _filled(pair, dim) for dim, chosen in enumerate(_differing(pair))]
    for dim, chosen in enumerate(_differing(pair)):
        if not 0 < len(chosen) < _filled(pair, dim):
            continue
        of_a, of_b, where = a[dim][chosen], b[dim][chosen], _elements(pair, dim, chosen)
        change = float(np.linalg.norm(of_b - of_a))
        if pair.before_b is not None:
            old = pair.before_b.digest.buckets()[dim][chosen]
            if np.linalg.norm(of_b - old) < _FIT * change:
                yield "stale", f"{where} have the values of the step before in B"
        if np.linalg.norm(of_b) < _FIT * change:
            yield "lost", f"{where} are zero in B"
        factor = float(of_a @ of_b) / (float(of_a @ of_a) or 1.0)
        if len(chosen) > 1 and np.linalg.norm(of_b - factor * of_a) < _FIT * change:
            yield "factor", f"{where} are {factor:.4g} times those of A"
        # Activations are [samples, tokens, ...], which neither weights nor gradients of weights are.
        if dim == 1 and some[0] and pair.a.pass_ in ("forward", "backward"):
            yield "tokens", "only some tokens of some samples differ: other experts were chosen, or a token was masked"
        elif dim == 1 and pair.a.pass_ in ("forward", "backward"):
            yield "border", f"only {where} differ: a mask or an exchange at a border of shards of the sequence"


def _is_permuted(pair: Pair) -> bool:
    """Return whether sum and sum of squares are equal, which exchanged elements do not change."""
    # An update says nothing of exchanged weights: the weights do.
    a, b = (pair.weights_a or pair.a).digest, (pair.weights_b or pair.b).digest
    change, scale = norm_of(b.values - a.values, b.num_bucketed), max(a.norm, b.norm)
    is_sum = abs(b.values[SUM] - a.values[SUM]) < _FIT * change
    # |b|^2 - |a|^2 = (b - a)(b + a), so a change of the elements themselves is of the order of change * scale.
    return is_sum and bool(abs(b.values[SQUARES] - a.values[SQUARES]) < _FIT * change * scale)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b) / (float(np.linalg.norm(a) * np.linalg.norm(b)) or 1.0)


def _vector(values: np.ndarray) -> np.ndarray:
    # Without the sum of squares, which is not linear in the tensor.
    return np.concatenate([values[: PROJECTIONS + 1], values[SQUARES + 1 :]])


def _differing(pair: Pair) -> list[np.ndarray]:
    """Return for each bucketed dimension the eighths that differ."""
    a, b = pair.a.digest.buckets(), pair.b.digest.buckets()
    # Most of the difference: what is left of rounding elsewhere does not count.
    return [np.flatnonzero(np.abs(of_b - of_a) > 1e-3 * np.abs(b - a).max()) for of_a, of_b in zip(a, b, strict=True)]


def _filled(pair: Pair, dim: int) -> int:
    # A dimension with fewer indices than buckets leaves some of them empty.
    return min(BUCKETS, _size(pair, dim))


def _size(pair: Pair, dim: int) -> int:
    shape = pair.a.digest.shape or (1,)
    # The last bucketed dimension is the tensor's last one, also if dimensions between are not bucketed.
    return shape[-1] if dim == pair.a.digest.num_bucketed - 1 else shape[dim]


def _elements(pair: Pair, dim: int, chosen: np.ndarray) -> str:
    size, title = _size(pair, dim), "last" if dim == pair.a.digest.num_bucketed - 1 else _DIMS[dim]
    # Rounded up: the first index whose bucket, index * BUCKETS // size, is the chosen one.
    first = -(-int(chosen[0]) * size // BUCKETS)
    last = -(-(int(chosen[-1]) + 1) * size // BUCKETS) - 1
    return f"indices {first} to {last} of {size} of the {title} dimension"


def _where(pair: Pair) -> Iterator[str]:
    shape = list(pair.a.digest.shape)
    if math.prod(shape) == 1:
        yield f"{pair.a.digest.values[SUM]:.8g} in A, {pair.b.digest.values[SUM]:.8g} in B"
    found = [
        _elements(pair, dim, chosen)
        for dim, chosen in enumerate(_differing(pair))
        if 0 < len(chosen) < _filled(pair, dim)
    ]
    yield f"{'; '.join(found) or 'all elements'}, of {shape}"
    for side, event in (("A", pair.a), ("B", pair.b)):
        replicas = pair.differing_replicas(event.digest)
        if replicas:
            yield f"ranks {', '.join(str(part.rank) for part in replicas)} of {side}"
