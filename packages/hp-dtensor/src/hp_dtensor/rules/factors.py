"""`Factorization`, the value that a sharding rule returns, and `strategies`: all ways to shard a call on one mesh axis.

A rule maps each tensor dimension to named factors, as Shardy and GSPMD do (arXiv 2105.04663). A factor that all outputs
have is parallel. One that outputs lack is reduced, and the outputs are partial. One marked `fixed` is never sharded.
`terms` lists the groups of inputs in which the operation is linear, so that they may be partial.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.spec.placements import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hp_dtensor.spec.tensor_spec import TensorSpec

if TYPE_CHECKING:
    from hp_dtensor.platform.interface import Platform


Dim = tuple[str, ...]
"""The factors of one dimension, outermost first."""
Dims = tuple[Dim, ...]
Span = tuple[int, int]
"""(start, length) of an interval of a dimension or factor."""
REPLICATE = Replicate()
SUM = Partial("sum")
_PlacePicked = Callable[[Placement, int], Placement]
"""(sharding of a factor, output dimension that has only some of its positions) -> placement of that dimension."""


@dataclass(frozen=True, kw_only=True)
class ShardingLimits:
    """Restrictions on sharding the factors of a call.

    Attributes:
        fixed: factors that must not be sharded.
        nonempty: factors that may be sharded only if every rank gets at least one element.
        picked: factor -> the positions of it that outputs have, for slices. Each rank keeps those inside its span.
        strided: whether a factor may be sharded that is not the outermost of a dimension, which gives a strided shard:
            for reshapes, whose local function is the same reshape of the shard.
    """

    fixed: frozenset[str] = frozenset()
    nonempty: frozenset[str] = frozenset()
    picked: Mapping[str, range] = field(default_factory=dict)
    strided: bool = False


@dataclass(frozen=True, kw_only=True)
class PartialResults:
    """The reductions of local results to global ones, and the inputs that may be partial.

    Attributes:
        reduced: factor that outputs lack -> the reduction that combines the local results. A factor that outputs
            lack and that is neither here nor in `complete` is never sharded.
        complete: factors whose local function returns replicated outputs, not partial ones.
        terms: the output as a sum of products of inputs, by input index. None: it is not linear in any input.
    """

    reduced: Mapping[str, str] = field(default_factory=dict)
    complete: frozenset[str] = frozenset()
    terms: tuple[frozenset[int], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """The local computation, where it differs from the operation on local data.

    Attributes:
        by_factor: factor -> `function(call: LocalCall) -> outputs`, called instead of the operation where that factor
            is sharded.
        any_order: factors of which that function takes any elements, in any order: it reads their groups, not spans.
        on_shards: `function(call: LocalCall) -> outputs`, called instead of the operation where any output is sharded.
        localize: `function(shapes, spans) -> arguments` with the static arguments for this rank. `shapes` are the local
            shapes of the outputs, `spans` the span of this rank in each sharded factor.
    """

    by_factor: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    any_order: frozenset[str] = frozenset()
    on_shards: Callable[..., Any] | None = None
    localize: Callable[[Sequence[tuple[int, ...]], Mapping[str, Span]], Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Operands:
    """Inputs, by index, that the operation does not simply read.

    Attributes:
        ignored: inputs of which only dtype and device matter. They keep their placement.
        written: inputs that the operation writes in addition to its outputs. They must keep their placement.
    """

    ignored: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()


LINEAR = PartialResults(terms=(frozenset({0}),))
"""An operation that is linear in its first tensor."""


def unsharded(names: Iterable[str]) -> ShardingLimits:
    """Return the limits of a call in which these factors must not be sharded."""
    return ShardingLimits(fixed=frozenset(names))


@dataclass(frozen=True)
class Factorization:
    """The factors of one call of an operation.

    Attributes:
        inputs, outputs: per tensor and dimension, the factors of that dimension, outermost first.
        sizes: elements per factor.
        limits: restrictions on sharding. By default, every factor that all outputs have may be sharded.
        partial: how partial results are reduced, and which inputs may be partial.
        work: the local computation, where it differs from the operation on local data.
        operands: inputs that are ignored or written.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    limits: ShardingLimits = field(default_factory=ShardingLimits, kw_only=True)
    partial: PartialResults = field(default_factory=PartialResults, kw_only=True)
    work: LocalWork = field(default_factory=LocalWork, kw_only=True)
    operands: Operands = field(default_factory=Operands, kw_only=True)

    def output_shape(self, output: int) -> tuple[int, ...]:
        """Return the global shape of an output."""
        picked = self.limits.picked
        return tuple(
            math.prod(len(picked[f]) if f in picked else self.sizes[f] for f in dim) for dim in self.outputs[output]
        )

    def dim_of(self, dims: Dims, factor: str) -> int | None:
        """Return the dimension of a tensor with factors `dims` that contains `factor`; None if there is none."""
        for index, dim in enumerate(dims):
            if factor in dim:
                return index
        return None

    def can_shard(self, factor: str) -> bool:
        """Return whether `factor` may be sharded: not fixed, in all outputs or reduced, not inside of others."""
        in_all = all(self.dim_of(dims, factor) is not None for dims in self.outputs)
        # An output without the factor would differ between ranks, and no placement says by what they must be combined.
        is_lost = not in_all and factor not in self.partial.reduced and factor not in self.partial.complete
        if factor in self.limits.fixed or is_lost:
            return False
        # Dimensions are row-major: chunks of a merged dimension are chunks of its outermost factor. Sharding an inner
        # one gives each rank a strided part of the dimension.
        return self.limits.strided or not self.is_inner(factor)

    def can_shard_in_chunks(self, factor: str, num_chunks: float) -> bool:
        """Return whether a factor that can be sharded may be split into `num_chunks` chunks of `Shard`."""
        size = self.sizes[factor]
        # Chunks have ceil(size / num_chunks) elements, so the last one is empty if the others cover everything.
        if factor in self.limits.nonempty and -(-size // num_chunks) * (num_chunks - 1) >= size:
            return False
        # In a dimension with further factors inside, uneven chunks of the factor would not be those of the dimension.
        return all(dim[-1] == factor for dim in self._merged_dims(factor)) or size % num_chunks == 0

    def is_inner(self, factor: str) -> bool:
        """Return whether some dimension has another factor outside of this one."""
        return any(dim[0] != factor for dim in self._merged_dims(factor))

    def can_be_in_any_order(self, factor: str) -> bool:
        """Return whether a rank may have any of the factor's elements, in any order, if it has them in all tensors."""
        limits, work = self.limits, self.work
        replaced = work.by_factor and factor not in work.any_order
        special = limits.picked or replaced or work.localize
        return not special and factor not in limits.nonempty and not self.is_merged(factor)

    def neighbors(self, factor: str) -> set[str]:
        """Return the factors that share a dimension with this one."""
        return {other for dim in self._merged_dims(factor) for other in dim} - {factor}

    def is_merged(self, factor: str) -> bool:
        """Return whether some dimension consists of this factor and others."""
        return bool(self._merged_dims(factor))

    def inner_size(self, dim: Dim, factor: str) -> int:
        """Return the number of elements of a dimension per element of its outermost factor."""
        return math.prod(self.sizes[other] for other in dim if other != factor)

    def _merged_dims(self, factor: str) -> list[Dim]:
        return [dim for dims in (*self.inputs, *self.outputs) for dim in dims if factor in dim and len(dim) > 1]


def linear_rule(
    source: Dims,
    outputs: tuple[Dims, ...],
    sizes: Mapping[str, int],
    fixed: Iterable[str] = (),
    strided: bool = False,
    **options: Any,
) -> Factorization:
    """Return the rule of an operation that is linear in its only tensor, such as a view. `fixed` is never sharded."""
    # Linear: op(sum_r x_r) = sum_r op(x_r), so a partial input need not be reduced first.
    limits = ShardingLimits(fixed=frozenset(fixed), strided=strided)
    return Factorization((source,), outputs, sizes, limits=limits, partial=LINEAR, **options)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to compute an operation on one mesh axis: the placements that inputs need and outputs get.

    Attributes:
        factor: the sharded factor, if any.
        kind: how `factor` is sharded, as a placement of dimension 0.
        same_on_all_ranks: every rank computes the same, whatever the placements of ignored inputs are.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: str | None = None
    kind: Placement | None = None
    same_on_all_ranks: bool = False

    def with_ignored(self, ignored: frozenset[int], current: Sequence[Placement]) -> Strategy:
        """Return the strategy with the ignored inputs at their current placements."""
        if not ignored:
            return self
        inputs = tuple(current[i] if i in ignored else placement for i, placement in enumerate(self.inputs))
        # Decided here, since the current placement of an ignored input says nothing about what ranks compute.
        return Strategy(inputs, self.outputs, self.factor, self.kind, self.is_replicated)

    @property
    def is_replicated(self) -> bool:
        """True if every rank computes the same."""
        return self.same_on_all_ranks or all(placement.is_replicate() for placement in (*self.inputs, *self.outputs))


def strategies(
    rule: Factorization,
    current: Sequence[Placement],
    ranks: int,
    sharded_already: Mapping[str, float],
    untouched: Sequence[bool],
    span_of: Callable[[str], Span],
) -> list[Strategy]:
    """Return every strategy of one mesh axis, given the strategies of earlier axes.

    Axes are decided one after the other: with f factors and n axes that is about n f strategies and not f^n.

    Args:
        current: placements of the inputs on this axis.
        ranks: size of this axis.
        sharded_already: factor -> number of chunks that earlier axes split it into, infinite if these are ragged or
            strided.
        untouched: per input, whether earlier axes keep its placement. Only then may it stay ragged on this axis.
        span_of: returns the span of a factor that earlier axes leave to this rank.
    """
    found = [Strategy((REPLICATE,) * len(rule.inputs), (REPLICATE,) * len(rule.outputs))]
    for factor in rule.sizes:
        stays = any(
            isinstance(placement, (Shard, RaggedShard, StridedShard)) and placement.dim == rule.dim_of(dims, factor)
            for dims, placement in zip(rule.inputs, current, strict=True)
        )
        # Sharding a factor of one element is valid but idles all ranks but one. An input that is sharded so may stay.
        if (rule.sizes[factor] > 1 or stays) and rule.can_shard(factor):
            place_picked = _place_picked(rule, factor, ranks, factor in sharded_already, span_of)
            on_dim = functools.partial(_on_dim, rule, factor, sharded_already)
            for kind in _kinds(rule, factor, current, ranks, sharded_already, untouched):
                inputs = _input_placements(rule, factor, kind, current, on_dim)
                outputs = tuple(
                    _output_placement(rule, factor, kind, dims, place_picked, on_dim) for dims in rule.outputs
                )
                found.append(Strategy(inputs, outputs, factor, kind))
    # Last, because the first of equally cheap strategies is chosen, and a complete result is worth more than a partial
    # one that still has to be reduced.
    found += _partial_inputs(rule)
    return found


def _kinds(
    rule: Factorization,
    factor: str,
    current: Sequence[Placement],
    ranks: int,
    sharded_already: Mapping[str, float],
    untouched: Sequence[bool],
) -> Iterable[Placement]:
    """Return the ways to shard a factor on one mesh axis, as placements of dimension 0; see `strategies`."""
    beside = [sharded_already[other] for other in rule.neighbors(factor) if other in sharded_already]
    # Ragged units leave different numbers of chunks of a strided shard to the ranks.
    if rule.is_inner(factor) and math.inf in beside:
        return ()
    in_chunks = rule.can_shard_in_chunks(factor, ranks * sharded_already.get(factor, 1))
    kinds: list[Placement] = [Shard(0)] if in_chunks else []
    if not rule.is_inner(factor) and not beside:
        # An input that an earlier axis redistributes does not have its current ragged units on this axis.
        usable = [p if same else REPLICATE for p, same in zip(current, untouched, strict=True)]
        kinds += _ragged_kinds(rule, factor, usable, ranks, factor in sharded_already)
    return dict.fromkeys([*kinds, *_strided_kinds(rule, factor, current)])


def _place_picked(
    rule: Factorization, factor: str, ranks: int, nested: bool, span_of: Callable[[str], Span]
) -> _PlacePicked:
    """Return the function that places a dimension of which each rank keeps the picked positions inside its span."""

    def place(kind: Any, dim: int) -> Placement:
        positions = rule.limits.picked[factor]
        spans = spans_of_ranks(kind, span_of(factor), ranks)
        units = tuple(positions_in_span(positions, span)[1] for span in spans)
        # All ranks must choose the same placement. If earlier axes shard the factor too, each rank sees the units of
        # its own line of ranks only, so the choice must not depend on them: then it is ragged everywhere.
        return Shard(dim) if not nested and units == _chunks(len(positions), ranks) else RaggedShard(dim, units)

    return place


def _ragged_kinds(
    rule: Factorization, factor: str, current: Sequence[Placement], ranks: int, nested: bool
) -> list[Placement]:
    """Return the ragged shardings of a factor that inputs have now, and those of merged uneven chunks."""
    kinds: list[Placement] = []
    for dims, placement in zip(rule.inputs, current, strict=True):
        dim = rule.dim_of(dims, factor)
        if not isinstance(placement, (Shard, RaggedShard)) or dim is None or dim != placement.dim:
            continue
        inner = rule.inner_size(dims[dim], factor)
        in_chunks = isinstance(placement, Shard)
        # All ranks must decide alike. If earlier axes shard the factor too (`nested`), a rank knows only the units of
        # its own line of ranks, so it may keep them but neither convert nor check them.
        needs_units = in_chunks or inner > 1 or factor in rule.limits.nonempty
        if inner == 0 or (nested and needs_units):
            continue
        units = placement.units if isinstance(placement, RaggedShard) else _chunks(rule.sizes[factor] * inner, ranks)
        empty = factor in rule.limits.nonempty and 0 in units
        if not empty and all(unit % inner == 0 for unit in units):
            kinds.append(RaggedShard(0, tuple(unit // inner for unit in units)))
    return kinds


def _strided_kinds(rule: Factorization, factor: str, current: Sequence[Placement]) -> list[Placement]:
    """Return the strided shardings of a factor that inputs have now, if the order of its elements means nothing."""
    if not rule.can_be_in_any_order(factor):
        return []
    return [
        StridedShard(0, placement.split_factor)
        for dims, placement in zip(rule.inputs, current, strict=True)
        if isinstance(placement, StridedShard) and placement.dim == rule.dim_of(dims, factor)
    ]


def _chunks(size: int, ranks: int) -> tuple[int, ...]:
    return tuple(Shard(0).interval(size, ranks, rank)[1] for rank in range(ranks))


def _input_placements(
    rule: Factorization, factor: str, kind: Placement, current: Sequence[Placement], on_dim: Callable[..., Placement]
) -> tuple[Placement, ...]:
    """Return the placements that the inputs need if `factor` is sharded as `kind`."""
    placements = [on_dim(kind, dims, now) for dims, now in zip(rule.inputs, current, strict=True)]
    if factor not in rule.partial.reduced or rule.partial.reduced[factor] != "sum" or factor in rule.partial.complete:
        return tuple(placements)
    # Sharding a summed factor gives partial sums of a product. An addend must enter the sum over ranks once, so it
    # becomes partial (its value on one rank, zeros on the others). Otherwise every rank would add it.
    for term in rule.partial.terms or ():
        if all(placements[i].is_replicate() for i in term):
            placements[min(term)] = SUM
    return tuple(placements)


def _output_placement(
    rule: Factorization,
    factor: str,
    kind: Placement,
    dims: Dims,
    place_picked: _PlacePicked,
    on_dim: Callable[..., Placement],
) -> Placement:
    """Return the placement of an output with factors `dims` if `factor` is sharded as `kind`."""
    dim = rule.dim_of(dims, factor)
    if dim is None:
        return REPLICATE if factor in rule.partial.complete else Partial(rule.partial.reduced[factor])
    return place_picked(kind, dim) if factor in rule.limits.picked else on_dim(kind, dims)


def spans_of_ranks(kind: Shard | RaggedShard, span: Span, ranks: int) -> list[Span]:
    """Return the span of each rank of a mesh axis that shards `span`."""
    start, length = span
    if isinstance(kind, RaggedShard):
        starts = itertools.accumulate(kind.units, initial=start)
        return list(zip(starts, kind.units, strict=False))
    chunks = (kind.interval(length, ranks, rank) for rank in range(ranks))
    return [(start + offset, count) for offset, count in chunks]


def positions_in_span(positions: range, span: Span) -> Span:
    """Return (index of the first, number) of the `positions` that are inside `span`."""
    # Position number i is start + i step, so the first one at or after an edge is number ceil((edge - start) / step).
    low, high = (
        min(len(positions), max(0, -(-(edge - positions.start) // positions.step)))
        for edge in (span[0], span[0] + span[1])
    )
    return low, high - low


def _on_dim(
    rule: Factorization,
    factor: str,
    sharded_already: Mapping[str, float],
    kind: Placement,
    dims: Dims,
    now: Placement | None = None,
) -> Placement:
    """Return the placement of a tensor with factors `dims`, now placed as `now`, if `factor` is sharded as `kind`."""
    dim = rule.dim_of(dims, factor)
    if dim is None:
        return REPLICATE
    if isinstance(kind, StridedShard):
        return StridedShard(dim, kind.split_factor)
    if not isinstance(kind, RaggedShard):
        # Each element of the factors outside of this one, as far as earlier axes leave it, is a chunk to split.
        outside = dims[dim][: dims[dim].index(factor)]
        num_chunks = math.prod(rule.sizes[other] // int(sharded_already.get(other, 1)) for other in outside)
        return Shard(dim) if num_chunks == 1 else StridedShard(dim, num_chunks)
    inner = rule.inner_size(dims[dim], factor)
    units = tuple(unit * inner for unit in kind.units)
    ragged = RaggedShard(dim, units)
    in_chunks = rule.is_merged(factor) and units == _chunks(sum(units), len(units))
    # `Shard` and `RaggedShard` of chunk sizes place data alike, and `Shard` is what other operations and checkpoints
    # know. An input that is `RaggedShard` stays so: changing the name would cost a redistribution that moves nothing.
    return Shard(dim) if in_chunks and now != ragged else ragged


def _partial_inputs(rule: Factorization) -> list[Strategy]:
    """Return the strategies in which one input of every term is partial, which makes every output partial."""
    if rule.partial.terms is None or any(not term for term in rule.partial.terms):
        return []
    # For a b + c, sum_r (a_r b + c_r) equals the result if exactly one factor of each product is partial. A product of
    # two partial factors has cross terms that no rank computes.
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
    """A call of an operation on this rank, the argument of a rule's local functions (`LocalWork`).

    It is defined here and not with the dispatcher that creates it, so that rules never import the dispatcher.

    Attributes:
        name: the operation.
        arguments: by parameter name. Tensors are local and plain.
        spans: sharded factor -> span of this rank; without factors in strided shards.
        lengths: sharded factor -> per group, the lengths of its ranks' spans; without factors in strided shards.
        groups: sharded factor -> the groups over which it is sharded, outermost first.
        sizes: factor -> its global size.
        output: spec of the first output, without a dtype.
        on: `on(x, **static)` runs the operation itself with the plain tensor `x` as its first argument and the given
            static arguments replaced.
    """

    platform: Platform
    name: str
    arguments: Mapping[str, Any]
    spans: Mapping[str, Span]
    lengths: Mapping[str, tuple[tuple[int, ...], ...]]
    groups: Mapping[str, tuple[ProcessGroup, ...]]
    sizes: Mapping[str, int]
    output: TensorSpec
    on: Callable[..., Any]

    def to_float32(self, x: Any) -> Any:
        """Return `x` as float32 if it is of half precision, which can hold neither large sums nor their terms."""
        wide = self.platform.itemsize(x.dtype) >= 4
        return x if wide else self.platform.ops.cast(x, self.platform.dtype("float32"))
