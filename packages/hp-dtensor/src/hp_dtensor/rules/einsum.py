"""Einstein summation: the equation is the rule."""

from __future__ import annotations

from collections.abc import Sequence

from hp_dtensor.rules.engine.factors import Dims, Factorization, PartialResults, uncut
from hp_dtensor.rules.engine.registry import OpCall, RuleRegistry


def register(registry: RuleRegistry) -> None:
    registry.register("einsum", "equation *operands", _einsum)


def _einsum(call: OpCall) -> Factorization:
    """Letters are factors; those the output lacks are summed, those repeated in one operand must be whole."""
    left, arrow, right = call["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(call.tensors):
        raise call.refuse(f"equation {call['equation']!r} does not fit its {len(call.tensors)} operands")
    if not arrow:
        once = sorted(letter for letter in set(left) if letter.isalpha() and left.count(letter) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    extra = max(spec.ndim - len(term.replace("...", "")) for term, spec in zip(terms, call.tensors, strict=True))
    named = [_names(term, spec.ndim) for term, spec in zip(terms, call.tensors, strict=True)]
    sizes: dict[str, int] = {}
    for names, spec in zip(named, call.tensors, strict=True):
        _add_sizes(call, names, spec.shape, sizes)
    output = _names(right, len(right.replace("...", "")) + (extra if "..." in right else 0))
    inputs = tuple(
        tuple(() if spec.shape[i] == 1 != sizes[name] else (name,) for i, name in enumerate(names))
        for names, spec in zip(named, call.tensors, strict=True)
    )
    summed = {name: "sum" for name in sizes if name not in output}
    repeated = frozenset(name for names in named for name in names if names.count(name) > 1)
    result: Dims = tuple((name,) for name in output)
    return Factorization(
        inputs,
        (result,),
        sizes,
        cuts=uncut(repeated),
        partial=PartialResults(reduced=summed, terms=(frozenset(range(len(terms))),)),
    )


def _names(term: str, ndim: int) -> list[str]:
    """A factor per dimension; those that `...` stands for are named from the last."""
    before, dots, after = term.partition("...")
    between = ndim - len(before) - len(after) if dots else 0
    return [*before, *(f".{i}" for i in range(between, 0, -1)), *after]


def _add_sizes(call: OpCall, names: Sequence[str], shape: Sequence[int], sizes: dict[str, int]) -> None:
    if len(names) != len(shape):
        raise call.refuse(f"equation {call['equation']!r} does not fit its operands")
    for name, size in zip(names, shape, strict=True):
        known = sizes.setdefault(name, size)
        if known == 1 != size:
            sizes[name] = size
        elif size not in (1, known):
            raise call.refuse(f"{name!r} has sizes {known} and {size}")
