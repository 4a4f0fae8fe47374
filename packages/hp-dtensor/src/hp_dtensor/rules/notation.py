"""Sharding rules written as one line: a name for each dimension of each tensor, as in einsum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hp_dtensor.comm.process_group import REDUCE_OPS
from hp_dtensor.rules.factors import Dims, Factorization, PartialResults, ShardingLimits
from hp_dtensor.rules.registry import NeedsReplicatedError, OpCall, Rule
from hp_dtensor.spec.placements import RaggedShard

REST = "..."
ADDEND = "*"
Sizes = Mapping[str, int]
Size = int | str | Callable[[Sizes], int]
"""A number, the name of the argument that holds it, or a function of the inputs' sizes."""
SUM_OF_K: Mapping[str, str] = {"k": "sum"}


def line(
    text: str,
    *,
    reduced: Mapping[str, str] | None = None,
    linear: bool | str = False,
    at: str = "dim",
    **new: Size,
) -> Rule:
    """Return the rule that `Notation` describes with these options. Misfitting calls run on replicated operands."""
    return Notation(text, reduced, linear=linear, at=at, new=new, replicates_others=True).rule


def first_of(*rules: Rule) -> Rule:
    """Return a rule that applies the first of `rules` that fits the call's number of tensors and dimensions."""

    def rule(call: OpCall) -> Factorization:
        for each in rules[:-1]:
            try:
                return each(call)
            except NeedsReplicatedError:
                continue
        return rules[-1](call)

    return rule


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a line: names of its dimensions, and whether it stands for any number of such tensors."""

    names: tuple[str, ...]
    repeated: bool

    @classmethod
    def parse(cls, text: str) -> _Tensor:
        return cls(tuple(text.strip("[] ").split()), text.strip().startswith("["))


class Notation:
    """A sharding rule parsed from a line such as `"m k, k n -> m n"`.

    The line names each dimension of each input, then, after `->`, of each output.

    - `...` stands for any number of parallel dimensions, broadcast from the last one. A name between two of them, as in
      `"... d! ... -> ... d ..."`, is the dimension that the argument `at` selects.
    - `n!` marks a dimension that must not be sharded, `...!` all dimensions of `...`.
    - `[c]` stands for any number of tensors of that form, including none.
    - `*` stands for a tensor that broadcasts to the first output.

    Args:
        text: the line.
        reduced: name that outputs lack, or `...`, -> the reduction that combines the local results.
        replicated: names that must not be sharded, in addition to those marked with `!`.
        linear: whether the outputs are products of all inputs. A string lists the products by input index: `"0 1 + 2"`
            is the product of the first two inputs plus a term that is linear in the third.
        at: the argument that selects the dimension between two `...`. None: `...` occurs once.
        new: name that only outputs have -> its size. It is not sharded.
        broadcasts: whether dimensions of size 1 are broadcast, as those of `...` always are.
        replicates_others: whether a call with other numbers of dimensions runs on replicated operands. Otherwise it is
            refused.
    """

    def __init__(
        self,
        text: str,
        reduced: Mapping[str, str] | None = None,
        replicated: frozenset[str] = frozenset(),
        linear: bool | str = False,
        at: str | None = None,
        new: Mapping[str, Size] | None = None,
        broadcasts: bool = False,
        replicates_others: bool = False,
    ) -> None:
        self.text, self.reduced, self.linear, self.at = text, dict(reduced or {}), linear, at
        self.new, self.broadcasts, self.replicates_others = dict(new or {}), broadcasts, replicates_others
        marked = {word.strip("[],!") for word in text.split() if word.strip("[],").endswith("!")}
        self.replicated = replicated | marked | {*self.new}
        # Two registrations of a user's function with the same identity are one rule (`RuleRegistry.add`).
        self.identity = text, tuple(sorted(self.reduced.items())), self.replicated, linear
        left, arrow, right = text.replace("!", "").partition("->")
        self.inputs, self.outputs = ([_Tensor.parse(part) for part in side.split(",")] for side in (left, right))
        self._check(bool(arrow) and "->" not in right)

    def _check(self, has_arrow: bool) -> None:
        inputs, outputs = ([t.names for t in side] for side in (self.inputs, self.outputs))
        known = set(itertools.chain(*inputs)) - {REST, ADDEND}
        results = set(itertools.chain(*outputs)) - {REST}
        problems = [] if has_arrow else ["expected one '->'"]
        problems += [f"{name!r} is not a name" for name in sorted(known | results) if not name.isidentifier()]
        problems += [f"{name!r} is in an output but in no input" for name in sorted(results - known - {*self.new})]
        used = {*self.reduced, *self.replicated} - known - {REST} - {*self.new}
        problems += [f"no input has {name!r}" for name in sorted(used)]
        problems += [f"{name!r} is reduced, but an output has it" for name in sorted({*self.reduced} & results)]
        ops = self.reduced.values()
        problems += [f"expected one of {', '.join(REDUCE_OPS)}, got {op!r}" for op in ops if op not in REDUCE_OPS]
        # A name that occurs twice in one tensor has no meaning if it is sharded, as the diagonal of a sharded matrix.
        for names in (*inputs, *outputs):
            single = [name for name in names if name not in self.replicated | {REST}]
            if len({*single}) < len(single) or names.count(REST) > (2 if self.at else 1):
                problems.append(f"{' '.join(names)!r} has a name twice")
        if problems:
            raise ValueError(f"sharding_rule({self.text!r}): {'; '.join(problems)}")

    def rule(self, call: OpCall) -> Factorization:
        """Return the factorization of a call."""
        shapes = [spec.shape for spec in call.tensors]
        tensors = self._tensors_of(call)
        sizes: dict[str, int] = {}
        named = [self._named(call, t.names, shape) for t, shape in zip(tensors, shapes, strict=True)]
        for names, shape in zip(named, shapes, strict=True):
            self._add_sizes(call, names or (), shape if names is not None else (), sizes)
        rest = sorted((name for name in sizes if name[0] == "."), key=lambda name: -int(name[1:]))
        sizes |= {name: self._new_size(call, size, sizes) for name, size in self.new.items()}
        outputs = tuple(tuple((name,) for name in self._filled(call, t.names, rest)) for t in self.outputs)
        inputs = tuple(
            call.broadcast_factors("the shape", shape, [sizes[name] for (name,) in outputs[0]], outputs[0])
            if names is None  # an addend, which broadcasts to the output
            else _dims(names, shape, sizes)
            for names, shape in zip(named, shapes, strict=True)
        )
        reduced = {name: op for key, op in self.reduced.items() for name in (rest if key == REST else (key,))}
        # A name that some output lacks must be reduced. One of several outputs may have it: then no reduction helps.
        lost = {name for name in sizes if name not in reduced and not all((name,) in output for output in outputs)}
        fixed = self.replicated - {REST} | lost | _unequal(call, sizes, reduced)
        fixed |= {*(rest if REST in self.replicated else ())}
        # Kernels refuse the maximum of an empty tensor, and its mean is NaN, which would spoil the reduced result.
        nonempty = frozenset(name for name, op in reduced.items() if op in ("avg", "max", "min"))
        return Factorization(
            inputs,
            outputs,
            sizes,
            limits=ShardingLimits(fixed=fixed, nonempty=nonempty),
            partial=PartialResults(reduced=reduced, terms=self._terms(len(inputs))),
        )

    def _tensors_of(self, call: OpCall) -> list[_Tensor]:
        """Return, for each tensor of the call, the tensor of the line that describes it."""
        more = len(call.tensors) - len(self.inputs)
        # All tensors beyond those of the line are repetitions of the one in brackets, which may also be missing.
        repeats = any(t.repeated for t in self.inputs)
        if more < -repeats or (more > 0 and not repeats):
            raise self._misfit(call, f"needs {len(self.inputs)} tensors, got {len(call.tensors)}")
        return list(itertools.chain(*([t] * (1 + more if t.repeated else 1) for t in self.inputs)))

    def _misfit(self, call: OpCall, why: str) -> Exception:
        """Return the error of a call with another number of tensors or dimensions than the line."""
        return (call.needs_replicated if self.replicates_others else call.refuse)(f"its rule {self.text!r} {why}")

    def _new_size(self, call: OpCall, size: Size, sizes: Sizes) -> int:
        """Return the size of a dimension that only outputs have."""
        found = size if isinstance(size, int) else call[size] if isinstance(size, str) else size(sizes)
        if type(found) is not int or found < 0:
            raise call.needs_replicated(f"its rule {self.text!r} needs an integer {size} >= 0, got {found}")
        return found

    def _terms(self, count: int) -> tuple[frozenset[int], ...] | None:
        """Return `PartialResults.terms` for a call with `count` tensors."""
        if isinstance(self.linear, str):
            return tuple(frozenset(map(int, term.split())) for term in self.linear.split("+"))
        return (frozenset(range(count)),) if self.linear else None

    def _named(self, call: OpCall, names: tuple[str, ...], shape: Sequence[int]) -> list[str] | None:
        """Return a name per dimension (`.1` is the last one of `...`), or None for an addend, which has no names."""
        if names == (ADDEND,):
            return None
        more = len(shape) - sum(name != REST for name in names)
        if more < 0 or (REST not in names and more):
            raise self._misfit(call, f"needs the dimensions {' '.join(names)!r}, got the shape {list(shape)}")
        return self._filled(call, names, [f".{index}" for index in range(more, 0, -1)])

    def _filled(self, call: OpCall, names: tuple[str, ...], rest: Sequence[str]) -> list[str]:
        """Return `names` with `rest` in place of `...`. If `...` occurs twice, `rest` is split at the argument `at`."""
        before, after = rest, rest
        if self.at and names.count(REST) > 1:
            if not isinstance(call[self.at], int):
                raise call.needs_replicated(f"its rule needs one dimension, got {self.at}={call[self.at]!r}")
            where = call.dim(call[self.at])
            if len(rest) != call.tensors[0].ndim - 1:
                raise self._misfit(call, "needs tensors with as many dimensions as the first one")
            before, after = rest[:where], rest[where:]
        first = names.index(REST) if REST in names else 0
        filled = ((before if i == first else after) if name == REST else [name] for i, name in enumerate(names))
        return list(itertools.chain(*filled))

    def _add_sizes(self, call: OpCall, names: Sequence[str], shape: Sequence[int], sizes: dict[str, int]) -> None:
        """Add the sizes of one tensor's names to `sizes`, and check that names have one size in all tensors."""
        for name, size in zip(names, shape, strict=True):
            known, is_broadcast = sizes.setdefault(name, size), self.broadcasts or name[0] == "."
            # A broadcast dimension has the size of the operand in which it is not 1, whichever operand comes first.
            if is_broadcast and known == 1:
                sizes[name] = size
            elif size != known and not (is_broadcast and size == 1):
                raise call.refuse(f"{name!r} in its rule {self.text!r} has sizes {known} and {size}")


def _dims(names: Sequence[str], shape: Sequence[int], sizes: Sizes) -> Dims:
    """Return the factors of a tensor's dimensions. A broadcast dimension has none."""
    return tuple(() if size == 1 != sizes[name] else (name,) for name, size in zip(names, shape, strict=True))


def _unequal(call: OpCall, sizes: Sizes, reduced: Mapping[str, str]) -> set[str]:
    """Return the averaged names that may be sharded unevenly: the mean of uneven shards' means is not the mean."""
    # Ranks must decide alike, so a ragged shard of any tensor counts, also one whose units happen to be equal.
    ragged = any(isinstance(p, RaggedShard) for spec in call.tensors for p in spec.placements)
    ranks = math.prod(call.tensors[0].mesh.shape)
    return {name for name, op in reduced.items() if op == "avg" and (ragged or sizes[name] % ranks)}
