"""Declaring settings: dataclass fields with help, limits or a registry, and their types in words."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Union

from hp_trainer.exceptions import join_choices

# Default upper bounds of integers and of floats: a larger size or count is a typing error.
LARGEST = 2**31 - 1
LARGEST_FRACTION = 1e12
# About the smallest normal number of float32. Below it, values such as `eps` would become subnormal or zero.
SMALLEST_FRACTION = 1e-37


@dataclass(frozen=True)
class Limits:
    """Bounds of a number; None: no bound.

    Every number must be finite. Unless `maximum` is given, integers must be below 2**31 and floats at most 1e12.
    Floats are 0 or at least 1e-37 in magnitude.
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None

    def allows(self, value: float) -> bool:
        """Return whether `value` is within the bounds."""
        return (
            math.isfinite(value)
            and not 0 < abs(value) < SMALLEST_FRACTION
            and (self.maximum is not None or value <= _largest(value))
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )

    def __str__(self) -> str:
        stated = self.maximum if self.maximum is None or self.maximum < LARGEST else None
        bounds = ((">=", self.minimum), (">", self.above), ("<=", stated))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    def describe(self, value: float) -> str:
        """Return the bounds that `value` violates, in words."""
        if not math.isfinite(value):
            return " and ".join(part for part in ("finite", str(self)) if part)
        if 0 < abs(value) < SMALLEST_FRACTION:
            return " and ".join(part for part in (str(self), f"not below {SMALLEST_FRACTION:g}") if part)
        largest = _largest(value) if self.maximum is None else self.maximum
        if value > largest >= LARGEST:
            shown = f"{largest:g}" if isinstance(value, float) else str(largest)
            return " and ".join(part for part in (str(self), f"<= {shown}") if part)
        return str(self)


def _largest(value: float) -> float:
    return LARGEST if isinstance(value, int) else LARGEST_FRACTION


@dataclass(frozen=True)
class Component:
    """A section that chooses a registered component by name, with the options of that component.

    Attributes:
        name: name in the registry.
        options: an instance of the component's options dataclass.
        source: directory of a pretrained model (`from`), whose weights are loaded first; None: no directory.
    """

    name: str
    options: Any
    source: str | None = None


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    is_path: bool = False,
) -> Any:
    """Declare a dataclass field that is a setting. A setting without a default is required.

    Args:
        help: one line for the command line's help, with the unit.
        minimum, above, maximum: bounds of a number, or of each number of a list.
        is_path: the value is a path and becomes absolute. A relative path is relative to the YAML file's folder, or on
            the command line to the working directory.
    """
    metadata = {"help": help, "limits": Limits(minimum, above, maximum), "is_path": is_path}
    # In the metadata, so that the schema remains plain dataclasses that Python code can create directly.
    return dataclasses.field(default=default, metadata=metadata)


def section(schema: type | None = None, *, help: str) -> Any:
    """Declare a dataclass field that holds another dataclass.

    Args:
        schema: default factory of the field; None: Python code must pass a value. The loader always creates it.
    """
    if schema is None:
        return dataclasses.field(metadata={"help": help})
    return dataclasses.field(default_factory=schema, metadata={"help": help})


def sections(schema: type, *, help: str) -> Any:
    """Declare a dataclass field that holds a tuple of dataclasses, empty by default.

    In YAML, an entry that is a plain string sets the `path` of its dataclass.
    """
    return dataclasses.field(default=(), metadata={"help": help, "sections": schema})


def component(registry: str, default: str | tuple[str, ...], *, help: str) -> Any:
    """Declare a dataclass field of type `Component` or `tuple[Component, ...]`, whose schema comes from a registry.

    Args:
        registry: field of `hp_trainer.registries.Registries`.
        default: name (or names) used when the configuration gives none.
    """
    return dataclasses.field(metadata={"help": help, "registry": registry, "default_name": default})


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """Return the resolved annotation of every field of a dataclass."""
    # Annotations are text because of `from __future__ import annotations`. Resolving them is slow, so it is cached.
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field has no default."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values of a type that can be listed, as text: those of enumerations and booleans."""
    found: list[str] = []
    for one in alternatives(annotation):
        if one is bool:
            found += ["true", "false"]
        elif typing.get_origin(one) is Literal:
            found += map(str, typing.get_args(one))
    return (*found, "null") if found and type(None) in alternatives(annotation) else tuple(found)


def describe(annotation: Any) -> str:
    """Return the type of a setting in words: `an integer or null`."""
    return join_choices([_describe_one(one) for one in alternatives(annotation)])


def _describe_one(annotation: Any) -> str:
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "null",
        Component: "a name with options",
    }
    if annotation in words:
        return words[annotation]
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return join_choices(args)
    if origin is tuple and args[-1] is not Ellipsis:
        return f"a list of {len(args)}: {', '.join(describe(arg) for arg in args)}"
    if origin is dict:
        return f"a section of names, each with {describe(args[1])}"
    if origin in (tuple, list):
        return f"a list of: {describe(args[0])}"
    return "a section" if dataclasses.is_dataclass(annotation) else str(annotation)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns, in which `*` matches any text. Case matters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
