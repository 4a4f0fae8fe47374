"""Sharding rules as lines: a name for each dimension of each tensor."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence

from hp_dtensor.comm.world import REDUCE_OPS
from hp_dtensor.rules.engine.factors import Cuts, Dims, Factorization, PartialResults
from hp_dtensor.rules.engine.registry import OpCall, Rule
from hp_dtensor.spec.placements import RaggedShard

REST = "..."
Size = Callable[[Mapping[str, int]], int]


def line(text: str, *, reduced: Mapping[str, str] | None = None, linear: bool = False, **new: Size) -> Rule:
    """Return the rule that a line says; see `Notation`.

    A call with tensors of other numbers of dimensions is computed whole.
    """
    return Notation(text, reduced, linear=linear, new=new).rule


class Notation:
    """A line such as `"m k, k n -> m n"`, read and checked.

    Args:
        text: per tensor a name for each dimension, then `->`, then the outputs; `...` is any number of parallel
            dimensions, broadcast from the last. `n!` marks a dimension that must be whole.
        reduced: names that outputs lack -> how results of parts are put together.
        whole: names that must be whole, as those marked with `!`.
        linear: the outputs are products of all inputs.
        new: names that only outputs have -> their sizes, from those of the inputs' names; they are whole.

    Raises:
        ValueError: the line cannot be read.
    """

    def __init__(
        self,
        text: str,
        reduced: Mapping[str, str] | None = None,
        whole: frozenset[str] = frozenset(),
        linear: bool = False,
        new: Mapping[str, Callable[[Mapping[str, int]], int]] | None = None,
    ) -> None:
        reduced, self.new = dict(reduced or {}), new or {}
        whole |= frozenset(re.findall(r"([^\s,]+)!", text)) | {*self.new}
        self.text, self.reduced, self.whole, self.linear = text, reduced, whole, linear
        self.identity = text, tuple(sorted(reduced.items())), whole, linear
        left, arrow, right = text.replace("!", "").partition("->")
        self.inputs, self.outputs = ([tuple(part.split()) for part in side.split(",")] for side in (left, right))
        known = set(itertools.chain(*self.inputs)) - {REST}
        results = set(itertools.chain(*self.outputs)) - {REST}
        problems = [] if arrow and "->" not in right else ["it needs one '->'"]
        problems += [f"{name!r} is no name" for name in sorted(known | results) if not name.isidentifier()]
        problems += [f"outputs have {name!r}, inputs have not" for name in sorted(results - known - {*self.new})]
        problems += [f"there is no {name!r}" for name in sorted({*reduced, *whole} - known - {*self.new})]
        problems += [f"{name!r} is reduced, but an output has it" for name in sorted({*reduced} & results)]
        problems += [f"{op!r} is none of {', '.join(REDUCE_OPS)}" for op in reduced.values() if op not in REDUCE_OPS]
        twice = [" ".join(part) for part in (*self.inputs, *self.outputs) if len({*part}) < len(part)]
        problems += [f"{part!r} has a name twice" for part in twice]
        if problems:
            raise ValueError(f"sharding_rule({text!r}): {'; '.join(problems)}")

    def rule(self, call: OpCall) -> Factorization:
        """The factors of a call."""
        shapes = [spec.shape for spec in call.tensors]
        if len(shapes) != len(self.inputs):
            raise call.refuse(f"its rule {self.text!r} is of {len(self.inputs)} tensors, got {len(shapes)}")
        sizes: dict[str, int] = {}
        named = [self._named(call, part, shape) for part, shape in zip(self.inputs, shapes, strict=True)]
        for names, shape in zip(named, shapes, strict=True):
            self._add_sizes(call, names, shape, sizes)
        sizes |= {name: size(sizes) for name, size in self.new.items()}
        inputs = tuple(_dims(names, shape, sizes) for names, shape in zip(named, shapes, strict=True))
        rest = sorted((name for name in sizes if name[0] == "."), key=lambda name: -int(name[1:]))
        outputs = tuple(
            tuple((name,) for each in part for name in (rest if each == REST else [each])) for part in self.outputs
        )
        lost = {name for name in sizes if name not in self.reduced and not all((name,) in output for output in outputs)}
        terms = (frozenset(range(len(inputs))),) if self.linear else None
        fixed = self.whole | lost | self._unequal(call, sizes)
        nonempty = frozenset(name for name, op in self.reduced.items() if op in ("avg", "max", "min"))
        return Factorization(
            inputs=inputs,
            outputs=outputs,
            sizes=sizes,
            cuts=Cuts(fixed=fixed, nonempty=nonempty),
            partial=PartialResults(reduced=dict(self.reduced), terms=terms),
        )

    def _unequal(self, call: OpCall, sizes: Mapping[str, int]) -> set[str]:
        """Averaged names whose parts may be of several lengths: the average of theirs is not that of the whole."""
        ragged = any(isinstance(p, RaggedShard) for spec in call.tensors for p in spec.placements)
        ranks = math.prod(call.tensors[0].mesh.shape)
        return {name for name, op in self.reduced.items() if op == "avg" and (ragged or sizes[name] % ranks)}

    def _named(self, call: OpCall, part: tuple[str, ...], shape: Sequence[int]) -> list[str]:
        """A name per dimension; those that `...` stands for are counted from the last."""
        more = len(shape) - len(part) + (REST in part)
        if more < 0 or (REST not in part and more):
            raise call.refuse(f"its rule {self.text!r} calls the dimensions {' '.join(part)!r}, got {list(shape)}")
        rest = [f".{index}" for index in range(more, 0, -1)]
        return [name for each in part for name in (rest if each == REST else [each])]

    def _add_sizes(self, call: OpCall, names: Sequence[str], shape: Sequence[int], sizes: dict[str, int]) -> None:
        for name, size in zip(names, shape, strict=True):
            known = sizes.setdefault(name, size)
            if name[0] == "." and known == 1:
                sizes[name] = size
            elif size != known and not (name[0] == "." and size == 1):
                raise call.refuse(f"{name!r} of its rule {self.text!r} has sizes {known} and {size}")


def _dims(names: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int]) -> Dims:
    """A broadcast dimension has no factor."""
    return tuple(() if size == 1 != sizes[name] else (name,) for name, size in zip(names, shape, strict=True))
