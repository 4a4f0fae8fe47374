"""Canonical names and arguments of calls of MindSpore's primitives."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from mindspore import Tensor, mint, ops
from mindspore.ops import tensor_method

from hp_platform_mindspore.ops.argument_adapters import Arguments
from hp_platform_mindspore.ops.primitive_names import ADAPTED, ATTRIBUTES, SAME_ARGUMENTS, SECOND_OPERAND, WRITING


def primitives_of(name: str) -> list[str]:
    """Return the primitives that are taken for an operation, as MindSpore's messages and profiles name them."""
    same = [primitive for primitive, known in SAME_ARGUMENTS.items() if known == name]
    adapted = [primitive for primitive, (known, _) in (ADAPTED | WRITING).items() if known == name]
    return sorted({*same, *adapted})


def canonical(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[str, Arguments]:
    """Return torch's name and arguments of a primitive's call; an unknown primitive keeps its own."""
    given, named = tuple(args), dict(kwargs or {})
    if is_older_kind(args):
        given = (*args[2], *(getattr(args[0], attribute) for attribute in ATTRIBUTES.get(name, ())))
    if len(given) == 1 and (second := SECOND_OPERAND & named.keys()):
        given = (*given, *(named.pop(key) for key in second))
    if name in WRITING:
        known, adapt = WRITING[name]
        return known, adapt(given, named)
    if name.startswith("Inplace"):
        known, arguments = canonical(name.removeprefix("Inplace"), given, named)
        return f"{known}_", arguments
    if name in ADAPTED:
        known, adapt = ADAPTED[name]
        return known, adapt(given, named)
    return SAME_ARGUMENTS.get(name, name), (given, named)


@functools.cache
def older_method(name: str) -> Callable[..., Any] | None:
    """Return MindSpore's function for the older signature of a method (`x.mean(axis=1)`), written in terms of others.

    None: `name` is no such method, or one that `ADAPTED` knows.
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    if name in ADAPTED or not words.startswith("deprecated_"):
        return None
    return getattr(tensor_method, words.replace("deprecated_", "deprecated_tensor_", 1), None)


def caller(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """Make `func` callable with the arguments that `canonical` gives, for an operation with the same arguments."""
    if not is_older_kind(args):
        return func
    primitive, name, _ = args
    return lambda *given: func(primitive, name, given)


def is_older_kind(args: tuple[Any, ...]) -> bool:
    """Return True for the arguments of a primitive of the older kind: (primitive, name, arguments)."""
    return len(args) == 3 and isinstance(args[1], str)


NOT_ON_DTENSORS = frozenset(
    """
    mint.einsum ops.bernoulli ops.multinomial ops.scatter_add ops.bincount ops.count_nonzero ops.threshold
    ops.diag_embed ops.unique ops.max_pool3d ops.adaptive_max_pool3d
    """.split()
)
"""Functions that have an operation's name and refuse DTensors, mean something else, or make plain tensors."""


def names_of(name: str, function: Callable[..., Any]) -> list[str]:
    """Return the paths by which users find an operation: of its function, else of all that have its name."""
    places = (("mint", mint), ("mint.nn.functional", mint.nn.functional), ("ops", ops), ("Tensor", Tensor))
    having = [
        (f"mindspore.{path}.{name}", getattr(owner, name))
        for path, owner in places
        if hasattr(owner, name) and f"{path}.{name}" not in NOT_ON_DTENSORS
    ]
    return [path for path, found in having if found is function] or [path for path, _ in having]
