"""Sharding rules written as one line: a name for each dimension of each tensor, as in einsum."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.process_group import REDUCE_OPS
from hp_dtensor.rules.factors import Cuts, Dims, Factorization, PartialResults
from hp_dtensor.rules.registry import NeedsReplicatedError, OpCall, Rule
from hp_dtensor.spec.placements import RaggedShard

REST = "..."
ADDEND = "*"
Sizes = Mapping[str, int]
Size = int | str | Callable[[Sizes], int]
"""A number, the name of the argument that gives it, or a function of the inputs' sizes."""
SUM_OF_K: Mapping[str, str] = {"k": "sum"}


def line(
    text: str,
    *,
    reduced: Mapping[str, str] | None = None,
    linear: bool | str = False,
    at: str = "dim",
    nonempty: bool = False,
    **new: Size,
) -> Rule:
    """Return the rule that a line says; see `Notation`.

    A call of other tensors (in number, or in numbers of dimensions) is computed whole.
    """
    return Notation(text, reduced, linear=linear, at=at, new=new, nonempty=nonempty, other_forms_whole=True).rule


def first_of(*rules: Rule) -> Rule:
    """Return the rule of the first line that a call's tensors fit, by their numbers and numbers of dimensions."""

    def rule(call: OpCall) -> Factorization:
        for each in rules[:-1]:
            try:
                return each(call)
            except NeedsReplicatedError:
                continue
        return rules[-1](call)

    return rule


def by_argument(name: str, rules: Mapping[Any, Rule]) -> Rule:
    """Return the rule that has a line per value of an argument; with another value a call is computed whole."""

    def rule(call: OpCall) -> Factorization:
        if call[name] not in rules:
            raise call.whole(f"its rule is of {name}={' or '.join(map(repr, rules))}")
        return rules[call[name]](call)

    return rule


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a line: names of dimensions, and if any number of such tensors may stand here."""

    names: tuple[str, ...]
    repeated: bool

    @classmethod
    def parse(cls, text: str) -> _Tensor:
        return cls(tuple(text.strip("[] ").split()), text.strip().startswith("["))


class Notation:
    """A line such as `"m k, k n -> m n"`, read and checked.

    Per tensor a name for each dimension, then `->`, then the outputs.

    - `...` is any number of parallel dimensions, broadcast from the last. With a name between two of them, as in
      `"... d! ... -> ... d ..."`, that name is the dimension that the argument `at` says.
    - `n!` marks a dimension that must be whole, `...!` all that `...` stands for.
    - `[c]` is any number of tensors of that form, also none.
    - `*` is a tensor that broadcasts to the first output.

    Args:
        text: the line.
        reduced: names that outputs lack -> how results of parts are put together.
        whole: names that must be whole, as those marked with `!`.
        linear: the outputs are products of all inputs. A text says of which, by their numbers: `"0 1 + 2"` is the
            product of the first two plus something linear in the third.
        at: the argument that says where the name between two `...` stands; None: `...` stands once.
        new: names that only outputs have -> their sizes; they are whole.
        nonempty: cut names only where every rank gets some of them, for operations that mistake empty tensors.
        other_forms_whole: compute a call whole whose tensors have other numbers of dimensions; otherwise refuse it.

    Raises:
        ValueError: the line cannot be read.
    """

    def __init__(
        self,
        text: str,
        reduced: Mapping[str, str] | None = None,
        whole: frozenset[str] = frozenset(),
        linear: bool | str = False,
        at: str | None = None,
        new: Mapping[str, Size] | None = None,
        nonempty: bool = False,
        other_forms_whole: bool = False,
    ) -> None:
        self.text, self.reduced, self.linear, self.at = text, dict(reduced or {}), linear, at
        self.new, self.nonempty, self.other_forms_whole = dict(new or {}), nonempty, other_forms_whole
        marked = {word.strip("[],!") for word in text.split() if word.strip("[],").endswith("!")}
        self.whole = whole | marked | {*self.new}
        self.identity = text, tuple(sorted(self.reduced.items())), self.whole, linear
        left, arrow, right = text.replace("!", "").partition("->")
        self.inputs, self.outputs = ([_Tensor.parse(part) for part in side.split(",")] for side in (left, right))
        self._check(bool(arrow) and "->" not in right)

    def _check(self, has_arrow: bool) -> None:
        inputs, outputs = ([t.names for t in side] for side in (self.inputs, self.outputs))
        known = set(itertools.chain(*inputs)) - {REST, ADDEND}
        results = set(itertools.chain(*outputs)) - {REST}
        problems = [] if has_arrow else ["it needs one '->'"]
        problems += [f"{name!r} is no name" for name in sorted(known | results) if not name.isidentifier()]
        problems += [f"outputs have {name!r}, inputs have not" for name in sorted(results - known - {*self.new})]
        used = {*self.reduced, *self.whole} - known - {REST} - {*self.new}
        problems += [f"there is no {name!r}" for name in sorted(used)]
        problems += [f"{name!r} is reduced, but an output has it" for name in sorted({*self.reduced} & results)]
        ops = self.reduced.values()
        problems += [f"{op!r} is none of {', '.join(REDUCE_OPS)}" for op in ops if op not in REDUCE_OPS]
        rests = 2 if self.at else 1
        twice = [names for names in (*inputs, *outputs) if _has_twice(names, self.whole, rests)]
        problems += [f"{' '.join(names)!r} has a name twice" for names in twice]
        if problems:
            raise ValueError(f"sharding_rule({self.text!r}): {'; '.join(problems)}")

    def rule(self, call: OpCall) -> Factorization:
        """Return the factors of a call."""
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
            self._added(call, shape, outputs[0], sizes) if names is None else _dims(names, shape, sizes)
            for names, shape in zip(named, shapes, strict=True)
        )
        lost = {name for name in sizes if name not in self.reduced and not all((name,) in output for output in outputs)}
        fixed = self.whole - {REST} | lost | self._unequal(call, sizes) | {*(rest if REST in self.whole else ())}
        # The neutral element of a maximum or mean of nothing is not that of the whole, and kernels refuse empty input:
        # every rank must have some.
        filled = (name for name, op in self.reduced.items() if op in ("avg", "max", "min"))
        nonempty = frozenset(sizes if self.nonempty else filled)
        return Factorization(
            inputs,
            outputs,
            sizes,
            cuts=Cuts(fixed=fixed, nonempty=nonempty),
            partial=PartialResults(reduced=self.reduced, terms=self._terms(len(inputs))),
        )

    def _tensors_of(self, call: OpCall) -> list[_Tensor]:
        """Return one tensor of the line per tensor of the call."""
        more = len(call.tensors) - len(self.inputs)
        repeats = any(t.repeated for t in self.inputs)
        if more < -repeats or (more > 0 and not repeats):
            raise self._misfit(call, f"is of {len(self.inputs)} tensors, got {len(call.tensors)}")
        return list(itertools.chain(*([t] * (1 + more if t.repeated else 1) for t in self.inputs)))

    def _misfit(self, call: OpCall, why: str) -> Exception:
        return (call.whole if self.other_forms_whole else call.refuse)(f"its rule {self.text!r} {why}")

    def _new_size(self, call: OpCall, size: Size, sizes: Sizes) -> int:
        found = size if isinstance(size, int) else call[size] if isinstance(size, str) else size(sizes)
        if type(found) is not int or found < 0:
            raise call.whole(f"its rule {self.text!r} takes no {size} = {found}")
        return found

    def _terms(self, count: int) -> tuple[frozenset[int], ...] | None:
        if isinstance(self.linear, str):
            return tuple(frozenset(map(int, term.split())) for term in self.linear.split("+"))
        return (frozenset(range(count)),) if self.linear else None

    def _unequal(self, call: OpCall, sizes: Sizes) -> set[str]:
        """Return averaged names whose parts may be of several lengths: the average of theirs is not that of all."""
        ragged = any(isinstance(p, RaggedShard) for spec in call.tensors for p in spec.placements)
        ranks = math.prod(call.tensors[0].mesh.shape)
        return {name for name, op in self.reduced.items() if op == "avg" and (ragged or sizes[name] % ranks)}

    def _named(self, call: OpCall, names: tuple[str, ...], shape: Sequence[int]) -> list[str] | None:
        """Return a name per dimension, where those of `...` count from the last; None for an addend, which has none."""
        if names == (ADDEND,):
            return None
        more = len(shape) - sum(name != REST for name in names)
        if more < 0 or (REST not in names and more):
            raise self._misfit(call, f"calls the dimensions {' '.join(names)!r}, got {list(shape)}")
        return self._filled(call, names, [f".{index}" for index in range(more, 0, -1)])

    def _filled(self, call: OpCall, names: tuple[str, ...], rest: Sequence[str]) -> list[str]:
        """Return `names` with `rest` for `...`: up to the argument `at`, and from there, where there are two."""
        before, after = rest, rest
        if self.at and names.count(REST) > 1:
            if not isinstance(call[self.at], int):
                raise call.whole(f"its rule is along one dimension, got {self.at}={call[self.at]!r}")
            where = call.dim(call[self.at])
            if len(rest) != call.tensors[0].ndim - 1:
                raise self._misfit(call, "is of tensors of as many dimensions as the first")
            before, after = rest[:where], rest[where:]
        first = names.index(REST) if REST in names else 0
        filled = ((before if i == first else after) if name == REST else [name] for i, name in enumerate(names))
        return list(itertools.chain(*filled))

    def _add_sizes(self, call: OpCall, names: Sequence[str], shape: Sequence[int], sizes: dict[str, int]) -> None:
        for name, size in zip(names, shape, strict=True):
            known = sizes.setdefault(name, size)
            # A broadcast dimension has the size of the operand that is not of one element, whichever comes first.
            if name[0] == "." and known == 1:
                sizes[name] = size
            elif size != known and not (name[0] == "." and size == 1):
                raise call.refuse(f"{name!r} of its rule {self.text!r} has sizes {known} and {size}")

    def _added(self, call: OpCall, shape: Sequence[int], output: Dims, sizes: Sizes) -> Dims:
        """Return the dimensions of an addend, which broadcasts to the output."""
        aligned = output[len(output) - len(shape) :]
        wanted = [sizes[name] for (name,) in aligned]
        if len(shape) > len(output) or any(n not in (1, size) for n, size in zip(shape, wanted, strict=True)):
            whole = [sizes[name] for (name,) in output]
            raise call.refuse(f"{list(shape)} does not broadcast to the result, which is {whole}")
        return _dims([name for (name,) in aligned], shape, sizes)


def _has_twice(names: Sequence[str], whole: frozenset[str], rests: int) -> bool:
    """Tell if a name that may be cut stands twice, or `...` more often than `rests`."""
    single = [name for name in names if name not in whole | {REST}]
    return len({*single}) < len(single) or names.count(REST) > rests


def _dims(names: Sequence[str], shape: Sequence[int], sizes: Sizes) -> Dims:
    """Return the factors of a tensor's dimensions; a broadcast dimension has none."""
    return tuple(() if size == 1 != sizes[name] else (name,) for name, size in zip(names, shape, strict=True))
