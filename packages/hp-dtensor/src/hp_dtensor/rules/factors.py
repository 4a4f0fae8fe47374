"""Factors: what a sharding rule returns, and the search for all ways to shard an operation on one mesh axis.

A rule maps each tensor dimension to named factors, as Shardy and GSPMD do (arXiv 2105.04663). A factor that all outputs
have is parallel. One that outputs lack is reduced, and the outputs are partial. One marked `fixed` is never sharded.
`terms` lists the groups of inputs in which the operation is linear, so that they may be partial.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard
from hp_dtensor.spec.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


Dim = tuple[str, ...]
Dims = tuple[Dim, ...]
Part = tuple[int, int]
"""(start, length) of a part of a dimension or factor."""
_Kept = Callable[[Placement, int], Placement]
REPLICATE = Replicate()
SUM = Partial("sum")


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Limits to cutting the factors of a call.

    Attributes:
        fixed: factors that must not be cut.
        nonempty: factors that may be cut only if every rank gets some of them.
        known: factors of which every rank must know every part; several axes may cut them in chunk order only.
        kept: factor -> the positions of it that outputs have; cut, each rank keeps those in its part.
    """

    fixed: frozenset[str] = frozenset()
    nonempty: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    kept: Mapping[str, range] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PartialResults:
    """Making the result from results of parts, and inputs that may be partial themselves.

    Attributes:
        reduced: for factors that outputs lack, the reduction that makes their results whole. A factor
            that outputs lack and that is neither here nor in `complete` must not be cut.
        complete: factors whose local function leaves outputs complete (replicated), not partial.
        terms: the output as a sum of products of inputs, by input index; None: not linear in any.
    """

    reduced: Mapping[str, str] = field(default_factory=dict)
    complete: frozenset[str] = frozenset()
    terms: tuple[frozenset[int], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """Work of a rank where it differs from the operation on the rank's own data.

    Attributes:
        by_factor: factor -> `function(call: LocalCall) -> outputs`, called in place of the operation where that is cut.
        of_part: called in place of the operation wherever outputs are cut, in whatever way: it asks only how
            these are placed.
        localize: static arguments to use on this rank, from the local shapes of the outputs and, of each factor that is
            cut, the (start, length) of this rank's part.
    """

    by_factor: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    of_part: Callable[..., Any] | None = None
    localize: Callable[[Sequence[tuple[int, ...]], Mapping[str, Part]], Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Inputs (by index) that are more, or less, than data to read.

    Attributes:
        ignored: only their dtype and device count; they stay as they are.
        written: the operation writes them besides giving its outputs; they must stay as they are.
    """

    ignored: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()


LINEAR = PartialResults(terms=(frozenset({0}),))
"""An operation that is linear in its first tensor."""


def uncut(names: Iterable[str]) -> Cuts:
    """Return the cuts of a call of which these factors must be whole."""
    return Cuts(fixed=frozenset(names))


@dataclass(frozen=True)
class Factorization:
    """One call of an operation, as factors.

    Attributes:
        inputs, outputs: per tensor, per dimension, the factors it consists of, outermost first.
        sizes: elements per factor.
        cuts: how factors may be cut; without it, all may be that all outputs have.
        partial: how results of parts become the result, and which inputs may be partial.
        work: work of a rank where it is not the operation on its own data.
        operands: inputs that are more, or less, than data to read.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    cuts: Cuts = field(default_factory=Cuts, kw_only=True)
    partial: PartialResults = field(default_factory=PartialResults, kw_only=True)
    work: LocalWork = field(default_factory=LocalWork, kw_only=True)
    operands: Operands = field(default_factory=Operands, kw_only=True)

    def output_shape(self, output: int) -> tuple[int, ...]:
        return tuple(math.prod(self._output_size(f) for f in dim) for dim in self.outputs[output])

    def _output_size(self, factor: str) -> int:
        return len(self.cuts.kept[factor]) if factor in self.cuts.kept else self.sizes[factor]

    def dim_of(self, dims: Dims, factor: str) -> int | None:
        """The dimension that cutting `factor` cuts, or None where a tensor does not have it."""
        for index, dim in enumerate(dims):
            if factor in dim:
                return index
        return None

    def splittable(self, factor: str) -> bool:
        """Tell if `factor` may be cut at all: it is outermost wherever it is merged."""
        if factor in self.cuts.fixed or self._lost(factor):
            return False
        # Row-major: chunks of a merged dimension are chunks of its outermost factor. A cut of an inner one would leave
        # each rank a strided part, which no placement in chunk order says.
        return all(dim[0] == factor for dim in self._merged(factor))

    def splits_in_chunks(self, factor: str, parts: float) -> bool:
        """Tell if a splittable factor may be cut in chunk order into `parts`: evenly where it is merged."""
        size = self.sizes[factor]
        # The last of `parts` chunks of ceil(size / parts) is empty.
        if factor in self.cuts.nonempty and -(-size // parts) * (parts - 1) >= size:
            return False
        return not self.merges(factor) or size % parts == 0

    def merges(self, factor: str) -> bool:
        """Tell if some dimension consists of this factor and others."""
        return bool(self._merged(factor))

    def elements_inside(self, dim: Dim, factor: str) -> int:
        """Elements of a dimension per element of its outermost factor."""
        return math.prod(self.sizes[other] for other in dim if other != factor)

    def _merged(self, factor: str) -> list[Dim]:
        return [dim for dims in (*self.inputs, *self.outputs) for dim in dims if factor in dim and len(dim) > 1]

    def _lost(self, factor: str) -> bool:
        kept = all(self.dim_of(dims, factor) is not None for dims in self.outputs)
        return not kept and factor not in self.partial.reduced and factor not in self.partial.complete


@dataclass(frozen=True, slots=True)
class Strategy:
    """The part of one mesh axis in an operation: the placements that inputs must have and outputs get.

    `kind` says how it cuts `factor`, as a placement of dimension 0; `whole` that every rank does the same, whatever
    the placements of inputs that do not count.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str | None = None
    kind: Placement | None = None
    whole: bool = False

    def keeping(self, ignored: frozenset[int], current: Sequence[Placement]) -> Strategy:
        """The same with the ignored inputs as they are."""
        if not ignored:
            return self
        inputs = tuple(current[i] if i in ignored else placement for i, placement in enumerate(self.inputs))
        return Strategy(inputs, self.outputs, self.factor, self.kind, self.is_replicated)

    @property
    def is_replicated(self) -> bool:
        return self.whole or all(placement.is_replicate() for placement in (*self.inputs, *self.outputs))


def strategies(
    rule: Factorization,
    current: Sequence[Placement],
    ranks: int,
    cut_already: Mapping[str, float],
    untouched: Sequence[bool],
    part_of: Callable[[str], Part],
) -> list[Strategy]:
    """Every way for an axis to take part, given what its inputs are now.

    Args:
        ranks: of this axis.
        cut_already: factor -> number of parts that earlier axes cut it into, infinite where these are ragged.
        untouched: per input whether earlier axes leave it cut as it is; only then may it stay ragged here.
        part_of: what earlier axes leave to this rank of a factor.
    """
    found = [_replicated(rule)]
    for factor in rule.sizes:
        # To cut one element is legal, and idles all ranks but one; what is cut so already stays.
        worth_it = rule.sizes[factor] > 1 or _is_cut(rule, factor, current)
        if worth_it and rule.splittable(factor):
            kinds: list[Placement] = []
            if rule.splits_in_chunks(factor, ranks * cut_already.get(factor, 1)):
                kinds.append(Shard(0))
            # An input that an earlier axis moves is no longer ragged as it was when this axis comes to it.
            usable = [p if same else REPLICATE for p, same in zip(current, untouched, strict=True)]
            kinds += _ragged_kinds(rule, factor, usable, ranks, nested=factor in cut_already)
            found += _cut(rule, factor, kinds, current, _keeping(rule, factor, ranks, cut_already, part_of))
    # Last: of strategies that cost the same the first is taken, and a result that is whole is worth more than a sum
    # still to be made.
    found += _partial_inputs(rule)
    return found


def _keeping(
    rule: Factorization, factor: str, ranks: int, cut_already: Mapping[str, float], part_of: Callable[[str], Part]
) -> _Kept:
    return lambda kind, dim: _kept_in_parts(
        rule.cuts.kept[factor], ranks, part_of(factor), factor in cut_already, kind, dim
    )


def _is_cut(rule: Factorization, factor: str, current: Sequence[Placement]) -> bool:
    """Tell if some input has the factor cut now: then it may stay so, even with one element or none."""
    return any(
        isinstance(placement, (Shard, RaggedShard)) and placement.dim == rule.dim_of(dims, factor)
        for dims, placement in zip(rule.inputs, current, strict=True)
    )


def _replicated(rule: Factorization) -> Strategy:
    return Strategy((REPLICATE,) * len(rule.inputs), (REPLICATE,) * len(rule.outputs))


def _ragged_kinds(
    rule: Factorization, factor: str, current: Sequence[Placement], ranks: int, nested: bool
) -> list[Placement]:
    """The ragged ways in which some input has a factor cut already, in elements of the factor.

    Uneven chunks of a dimension are ragged ones of another into which it is merged.

    Where earlier axes cut the factor too (`nested`), units differ between ranks, and no choice may depend on them.
    """
    kinds: list[Placement] = []
    for dims, placement in zip(rule.inputs, current, strict=True):
        dim = rule.dim_of(dims, factor)
        if not isinstance(placement, (Shard, RaggedShard)) or dim is None or dim != placement.dim:
            continue
        inside = rule.elements_inside(dims[dim], factor)
        in_chunks = isinstance(placement, Shard)
        # Decisions must be the same on every rank. Under a nested cut a rank knows the units of its own line only, so
        # it may keep them as they are but not convert or judge them.
        if inside == 0 or (nested and (in_chunks or inside > 1 or factor in rule.cuts.nonempty | rule.cuts.known)):
            continue
        units = placement.units if isinstance(placement, RaggedShard) else _chunks(rule.sizes[factor] * inside, ranks)
        empty = factor in rule.cuts.nonempty and 0 in units
        if not empty and all(unit % inside == 0 for unit in units):
            kinds.append(RaggedShard(0, tuple(unit // inside for unit in units)))
    return kinds


def _chunks(size: int, ranks: int) -> tuple[int, ...]:
    return tuple(Shard(0).interval(size, ranks, rank)[1] for rank in range(ranks))


def _cut(
    rule: Factorization,
    factor: str,
    kinds: Sequence[Placement],
    current: Sequence[Placement],
    kept: _Kept,
) -> list[Strategy]:
    """Cut a factor in each of the given ways; `kept` places a dimension of which outputs have some positions only."""
    return [
        Strategy(
            _cut_inputs(rule, factor, kind, current),
            tuple(_cut_output(rule, factor, kind, dims, kept) for dims in rule.outputs),
            factor,
            kind,
        )
        for kind in dict.fromkeys(kinds)
    ]


def _cut_inputs(
    rule: Factorization, factor: str, kind: Placement, current: Sequence[Placement]
) -> tuple[Placement, ...]:
    placements = [_on_dim(rule, kind, factor, dims, now) for dims, now in zip(rule.inputs, current, strict=True)]
    if factor not in rule.partial.reduced or rule.partial.reduced[factor] != "sum" or factor in rule.partial.complete:
        return tuple(placements)
    # Cutting a summed factor makes partial sums of a product; an addend must enter them once, so it becomes partial
    # (the whole on one rank, zeros on the others), or each rank would add all of it.
    for term in rule.partial.terms or ():
        if all(placements[i].is_replicate() for i in term):
            placements[min(term)] = SUM
    return tuple(placements)


def _cut_output(rule: Factorization, factor: str, kind: Placement, dims: Dims, kept: _Kept) -> Placement:
    dim = rule.dim_of(dims, factor)
    if dim is None:
        return REPLICATE if factor in rule.partial.complete else Partial(rule.partial.reduced[factor])
    return kept(kind, dim) if factor in rule.cuts.kept else _on_dim(rule, kind, factor, dims)


def parts_of(kind: Shard | RaggedShard, part: Part, ranks: int) -> list[Part]:
    """Return the part of each rank of an axis, of a part that the axis cuts."""
    start, length = part
    if isinstance(kind, RaggedShard):
        starts = itertools.accumulate(kind.units, initial=start)
        return list(zip(starts, kind.units, strict=False))
    cuts = (kind.interval(length, ranks, rank) for rank in range(ranks))
    return [(start + offset, count) for offset, count in cuts]


def positions_within(kept: range, part: Part) -> Part:
    """(number of the first, how many) of the positions that lie in a part."""
    low, high = (min(len(kept), max(0, -(-(edge - kept.start) // kept.step))) for edge in (part[0], part[0] + part[1]))
    return low, high - low


def _kept_in_parts(positions: range, ranks: int, part: Part, nested: bool, kind: Any, dim: int) -> Placement:
    """The placement of a dimension of which each rank keeps what it has of `positions`.

    Where earlier axes cut it too (`nested`) units differ between ranks, so it is ragged by name everywhere.
    """
    units = tuple(positions_within(positions, each)[1] for each in parts_of(kind, part, ranks))
    # The name must be the same on all ranks, and under a nested cut each sees its own line's units only.
    return Shard(dim) if not nested and units == _chunks(len(positions), ranks) else RaggedShard(dim, units)


def _on_dim(rule: Factorization, kind: Placement, factor: str, dims: Dims, now: Placement | None = None) -> Placement:
    """The placement of one tensor, which is placed as `now`, when a factor is cut."""
    dim = rule.dim_of(dims, factor)
    if dim is None:
        return REPLICATE
    if not isinstance(kind, RaggedShard):
        return Shard(dim)
    inside = rule.elements_inside(dims[dim], factor)
    units = tuple(unit * inside for unit in kind.units)
    ragged = RaggedShard(dim, units)
    in_chunks = rule.merges(factor) and units == _chunks(sum(units), len(units))
    # Chunks by either name lie alike, and the plain name is what other operations and checkpoints know; an input that
    # has the ragged name keeps it, or its plan would redistribute nothing at a cost.
    return Shard(dim) if in_chunks and now != ragged else ragged


def _partial_inputs(rule: Factorization) -> list[Strategy]:
    """One partial input in every term makes every output partial."""
    if rule.partial.terms is None or any(not term for term in rule.partial.terms):
        return []
    # Of a sum of products f(a b + c) with partial results: sum_r (a_r b + c_r) needs exactly one partial factor in
    # each product, since partial times partial has cross terms that no rank computes.
    choices: list[tuple[int, ...]] = [()]
    for term in rule.partial.terms:
        choices = [(*chosen, index) for chosen in choices for index in sorted(term)]
    outputs = (SUM,) * len(rule.outputs)
    return [
        Strategy(tuple(SUM if i in chosen else REPLICATE for i in range(len(rule.inputs))), outputs)
        for chosen in choices
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """Call of an operation on this rank, as given to a rule's own local function, which runs in place of the operation.

    Attributes:
        name: the operation.
        arguments: by parameter name, tensors local and plain.
        spans: cut factor -> (start, length) of this rank's part.
        lengths: cut factor -> per group, the lengths of its ranks' parts.
        groups: cut factor -> the groups over which it is cut, outermost first.
        parts: cut factor that the rule wants `known` -> the group of all ranks over which it is cut, and the (start,
            length) of each one's part.
        sizes: factor -> its global size.
        output: how the first output is placed, of no dtype.
        on: `on(x, **static)` runs the operation itself with its first argument replaced by the plain tensor `x`,
            and static ones by name.
    """

    platform: Platform
    name: str
    arguments: Mapping[str, Any]
    spans: Mapping[str, tuple[int, int]]
    lengths: Mapping[str, tuple[tuple[int, ...], ...]]
    groups: Mapping[str, tuple[ProcessGroup, ...]]
    parts: Mapping[str, tuple[ProcessGroup, tuple[Part, ...]]]
    sizes: Mapping[str, int]
    output: TensorSpec
    on: Callable[..., Any]
