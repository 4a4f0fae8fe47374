"""Names of a function's inputs, by which a sharding plan may give their placements."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class InputNames:
    """Names of a function's inputs.

    Attributes:
        positional: those that may be given by position, in order.
        rest: the name of `*args`, or None.
        keyword_only: those that can be given by keyword only.
        keywords: the name of `**kwargs`, or None.
    """

    positional: tuple[str, ...] = ()
    rest: str | None = None
    keyword_only: tuple[str, ...] = ()
    keywords: str | None = None

    def at(self, index: int) -> str | None:
        """Return the name of the input at a position; those after the named ones are `*args`."""
        return self.positional[index] if index < len(self.positional) else self.rest


def input_names(function: Callable[..., Any]) -> InputNames:
    """Return the names of a function's inputs; a builtin without a signature has any number of unnamed ones."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return InputNames(rest="args")
    named: dict[Any, list[str]] = {}
    for parameter in parameters:
        named.setdefault(parameter.kind, []).append(parameter.name)
    kind = inspect.Parameter
    return InputNames(
        (*named.get(kind.POSITIONAL_ONLY, ()), *named.get(kind.POSITIONAL_OR_KEYWORD, ())),
        next(iter(named.get(kind.VAR_POSITIONAL, ())), None),
        tuple(named.get(kind.KEYWORD_ONLY, ())),
        next(iter(named.get(kind.VAR_KEYWORD, ())), None),
    )


def input_problems(label: str, inputs: Any, names: InputNames) -> list[str]:
    """Return a sentence for each specification of an input that a function with these inputs does not have.

    Args:
        inputs: a list by position, a dict by name, or None.
    """
    if inputs is None:
        return []
    if isinstance(inputs, dict):
        known = [*names.positional, *filter(None, (names.rest, *names.keyword_only))]
        unknown = [name for name in inputs if name not in known and names.keywords is None]
        return [f"{label}: {describe_unknown('input', name, dict.fromkeys(known))}" for name in unknown]
    if len(inputs) > len(names.positional) and names.rest is None:
        has = f"the {len(names.positional)} inputs {', '.join(names.positional)}"
        return [f"{label}: {len(inputs)} specifications for {has}"]
    return []


def describe_unknown(kind: str, name: str, known: Mapping[str, Any]) -> str:
    """Return a sentence that there is no `name`, with the closest known names or the first of them."""
    close = difflib.get_close_matches(name, [key for key in known if key], n=3)
    hint = f"; closest: {', '.join(close)}" if close else f"; there are: {', '.join(sorted(filter(None, known))[:10])}"
    return f"there is no {kind} {name!r}{hint}"
