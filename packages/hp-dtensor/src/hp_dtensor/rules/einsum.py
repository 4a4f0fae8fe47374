"""Einstein summation: the equation is the rule."""

from __future__ import annotations

from hp_dtensor.rules.factors import Dims, Factorization
from hp_dtensor.rules.registry import OpCall, RuleRegistry


def register(registry: RuleRegistry) -> None:
    registry.register("einsum", "equation *operands", _einsum)


def _einsum(call: OpCall) -> Factorization:
    """Letters are factors; those the output lacks are summed. `...` and repeated letters are refused."""
    equation = call["equation"].replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if "." in equation or any(len(set(term)) != len(term) for term in (*terms, right)):
        raise call.refuse("an equation with ... or with a letter repeated in one operand has no rule")
    if not arrow:
        right = "".join(sorted(letter for letter in set(left) if letter.isalpha() and left.count(letter) == 1))
    if len(terms) != len(call.tensors) or any(len(t) != s.ndim for t, s in zip(terms, call.tensors, strict=True)):
        raise call.refuse(f"equation {equation!r} does not fit its operands")
    sizes: dict[str, int] = {}
    for term, spec in zip(terms, call.tensors, strict=True):
        for letter, size in zip(term, spec.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise call.refuse(f"{letter!r} has sizes {sizes[letter]} and {size}")
    summed = {letter: "sum" for letter in sizes if letter not in right}
    inputs = tuple(_dims(term) for term in terms)
    return Factorization(inputs, (_dims(right),), sizes, reduced=summed, terms=(frozenset(range(len(terms))),))


def _dims(letters: str) -> Dims:
    return tuple((letter,) for letter in letters)
