"""Canonical names of torch's functions, methods and operators: the names that sharding rules are registered under."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# Operator methods whose names differ from those of the functions.
_OPERATORS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pos": "positive",
    "invert": "bitwise_not",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}

_SYNONYMS = {
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "fix": "trunc",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "concatenate": "cat",
    "concat": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "split_with_sizes": "split",
    "special_expit": "sigmoid",
    **{f"arc{name}": f"a{name}" for name in ("cos", "cosh", "sin", "sinh", "tan", "tanh", "tan2")},
    "_threshold": "threshold",
}

# Functions that share their name with another operation (`Tensor.unfold`).
_RENAMED = {F.unfold: "im2col", F.fold: "col2im"}

_PROPERTIES = {"T": "t", "mT": "mT"}

_REFLECTED = frozenset(
    f"__r{name}__"
    for name in (
        "add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "matmul",
        "and", "or", "xor", "lshift", "rshift",
    )
)  # fmt: skip
_IN_PLACE = frozenset(f"__i{name[3:]}" for name in _REFLECTED)


def property_of(func: Callable[..., Any]) -> str | None:
    """Return the name of the tensor property that `func` gets, sets or deletes; None if it is no accessor."""
    if getattr(func, "__name__", "") not in ("__get__", "__set__", "__delete__"):
        return None
    return getattr(func.__self__, "__name__", None)  # type: ignore[attr-defined]


def canonical_name(func: Callable[..., Any]) -> tuple[str, bool]:
    """Return (name, reflected): `Tensor.__iadd__` is `add_`, and `__rsub__` is `sub` with reversed operands."""
    # By the function object, before its name: the name alone is ambiguous.
    if func in _RENAMED:
        return _RENAMED[func], False
    accessed = property_of(func)
    # Accessors of properties are all called `__get__`.
    if accessed is not None:
        return _PROPERTIES.get(accessed, accessed), False
    name = getattr(func, "__name__", repr(func))
    reflected, in_place = name in _REFLECTED, name in _IN_PLACE
    if name.startswith("__") and name.endswith("__"):
        name = name[3:-2] if reflected or in_place else name[2:-2]
        name = _OPERATORS.get(name, name)
    in_place = in_place or (name.endswith("_") and not name.startswith("_"))
    # Synonyms are written without the suffix of in-place methods.
    stem = name.rstrip("_")
    return _SYNONYMS.get(stem, stem) + ("_" if in_place else ""), reflected


def names_of(name: str) -> list[str]:
    """Return the functions, methods and properties of torch with a canonical name, for documentation."""
    return sorted(_names().get(name, ())) or [
        f"{path}.{name}"
        for path, owner in (
            ("torch.Tensor", torch.Tensor),
            ("torch.nn.functional", F),
            ("torch.nn.init", torch.nn.init),
        )
        if hasattr(owner, name)
    ]


@functools.cache
def _names() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for functions in torch.overrides.get_overridable_functions().values():
        for func in functions:
            shown = torch.overrides.resolve_name(func)
            if shown is not None:
                found.setdefault(canonical_name(func)[0], set()).add(shown.removesuffix(".__get__"))
    return found


def function_named(name: str) -> Callable[..., Any] | None:
    """Return torch's function with a canonical name, or else the method or property; None if there is none."""
    renamed = next((func for func, other in _RENAMED.items() if other == name), None)
    if renamed is not None or name == "unfold":  # torch.nn.functional's is another operation
        return renamed or torch.Tensor.unfold
    for owner in (F, torch, torch.Tensor, torch.nn.init, torch.linalg):
        found = getattr(owner, name.removeprefix("linalg_") if owner is torch.linalg else name, None)
        if callable(found):
            return found
    accessed = {"numpy_T": "T"}.get(name, name)
    is_property = hasattr(getattr(torch.Tensor, accessed, None), "__get__")
    return (lambda x: getattr(x, accessed)) if is_property else None
