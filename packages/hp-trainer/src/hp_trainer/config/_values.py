"""Values of settings: leaves and lists of the tree as Python values of an annotated type."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Callable
from typing import Any, Literal

import yaml

from hp_trainer.config._annotations import alternatives, describe
from hp_trainer.config._setting import Limits
from hp_trainer.config._tree import Items, Override, Scalar, Section, Tree, parse_yaml
from hp_trainer.exceptions import Problem, join_choices

INVALID = object()
_SAFE = yaml.SafeLoader("")
_CONSTRUCT: dict[str, Callable[[yaml.ScalarNode], bool | int | float]] = {
    "bool": _SAFE.construct_yaml_bool,
    "int": _SAFE.construct_yaml_int,
    "float": _SAFE.construct_yaml_float,
}
# No float holds a whole number of more digits, even hexadecimal ones; Python takes long to read those.
_MAX_DIGITS = 250
_MAX_SHOWN = 60


class Problems(list[Problem]):
    """The problems found so far."""

    def add(self, path: str, what: str, source: str, expected: str = "", got: str = "", hint: str = "") -> None:
        """Note one more."""
        self.append(Problem(path=path, what=what, expected=expected, got=got, hint=hint, source=source))

    def wrong_type(self, value: Tree, path: str, expected: str, hint: str = "") -> Any:
        """Note a value of the wrong type; returns INVALID."""
        self.add(path, "wrong type", value.source, expected, describe_value(value), hint)
        return INVALID


class ValueConverter:
    """Converts values against annotations; what is wrong goes into `problems`."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def convert(self, annotation: Any, value: Tree, path: str, limits: Limits) -> Any:
        """Return the value as one of the annotation's types, or INVALID."""
        options = alternatives(annotation)
        if isinstance(value, Override) and str in options and value.text not in ("null", "~"):
            return value.text
        parsed = self.parsed(value, path)
        if parsed is None:
            return INVALID
        for option in options:
            made = self._try(option, parsed, path, limits)
            if made is not None or (option is type(None) and is_null(parsed)):
                return made
        return self._mismatch(options, parsed, path)

    def _try(self, annotation: Any, value: Tree, path: str, limits: Limits) -> Any:
        """Return the value as this type; None when it is of another kind."""
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (tuple, list) and isinstance(value, Items):
            return self._items(annotation, args, value, path, limits)
        if origin is dict and isinstance(value, Section):
            made = {key: self.convert(args[1], item, f"{path}.{key}", limits) for key, item in value.items.items()}
            return INVALID if any(one is INVALID for one in made.values()) else made
        if not isinstance(value, Scalar):
            return None
        found = scalar_value(value)
        if origin is Literal:
            return found if any(found == arg and type(found) is type(arg) for arg in args) else None
        if annotation is float and type(found) is int:
            found = float(found)
        if type(found) is not annotation:
            return None
        if isinstance(found, (int, float)) and annotation is not bool and not limits.allows(found):
            self.problems.add(
                path,
                "out of range",
                value.source,
                f"{describe(annotation)} {limits.describe(found)}",
                shortened(value.text),
            )
            return INVALID
        return found

    def _items(self, annotation: Any, args: Any, value: Items, path: str, limits: Limits) -> Any:
        fixed = annotation is not None and typing.get_origin(annotation) is tuple and args[-1] is not Ellipsis
        if fixed and len(value.items) != len(args):
            got = f"a list of {len(value.items)}"
            self.problems.add(path, "wrong length", value.source, describe(annotation), got)
            return INVALID
        inner = args if fixed else [args[0]] * len(value.items)
        pairs = enumerate(zip(inner, value.items, strict=True))
        made = [self.convert(one, item, f"{path}[{i}]", limits) for i, (one, item) in pairs]
        if any(one is INVALID for one in made):
            return INVALID
        return list(made) if typing.get_origin(annotation) is list else tuple(made)

    def _mismatch(self, options: tuple[Any, ...], value: Tree, path: str) -> Any:
        literals = [arg for one in options if typing.get_origin(one) is Literal for arg in typing.get_args(one)]
        expected = join_choices([describe(one) for one in options])
        if literals and isinstance(value, Scalar):
            names = [str(name) for name in literals]
            near = next(iter(difflib.get_close_matches(value.text, names, n=1)), "")
            self.problems.add(path, "unknown value", value.source, expected, describe_value(value), near)
            return INVALID
        return self.problems.wrong_type(value, path, expected, _unquoted(options, value))

    def parsed(self, value: Tree | None, path: str) -> Tree | None:
        """Return the value with the text of an override read as YAML; None when that fails or there is none."""
        if not isinstance(value, Override):
            return value
        if not value.text:
            return Scalar("", "null", value.source)
        tree, problems = parse_yaml(value.text, value.source, numbered=False)
        self.problems += [dataclasses.replace(problem, path=path) for problem in problems]
        return tree


def scalar_value(scalar: Scalar) -> bool | int | float | str | None:
    """Return the Python value of a leaf; the text itself where it is none of what its tag says (`!!int x`, `0x_`)."""
    if scalar.tag == "null":
        return None
    if scalar.tag == "int" and len(scalar.text) > _MAX_DIGITS:
        return math.inf
    # YAML 1.1 would read 12:30 as a number to the base 60.
    construct = None if scalar.tag in ("int", "float") and ":" in scalar.text else _CONSTRUCT.get(scalar.tag)
    if construct is None:
        return scalar.text
    try:
        return construct(yaml.ScalarNode(f"tag:yaml.org,2002:{scalar.tag}", scalar.text))
    except (ValueError, KeyError):
        return scalar.text


def shortened(text: str) -> str:
    """Return a text for a message, with dots in place of what is too long."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def describe_value(value: Tree) -> str:
    """Tell in words what came: `'3' (whole number)`, `a list of 2`."""
    if isinstance(value, Scalar):
        found = scalar_value(value)
        kinds = {bool: "true or false", int: "whole number", float: "number", str: "text"}
        return "null" if found is None else f"{shortened(value.text)!r} ({kinds[type(found)]})"
    if isinstance(value, Items):
        return f"a list of {len(value.items)}"
    return "a section" if isinstance(value, Section) else repr(value.text)


def _unquoted(options: tuple[Any, ...], value: Tree) -> str:
    """Return what to write instead, where quotes make the difference."""
    if not isinstance(value, Scalar):
        return ""
    if str in options:
        return f'"{value.text}" in quotes' if value.tag != "null" else ""
    plain, _ = parse_yaml(value.text, "", numbered=False)
    if value.tag == "str" and isinstance(plain, Scalar) and type(scalar_value(plain)) in options:
        return f"{value.text} without quotes"
    return ""


def is_null(value: Tree) -> bool:
    """Return whether the value is YAML's null."""
    return isinstance(value, Scalar) and value.tag == "null"
