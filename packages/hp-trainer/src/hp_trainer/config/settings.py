"""Settings as dataclass fields: their help, their limits, or the registry that gives their schema.

Annotations of settings: their types, and how to say in words what they take.

Patterns of names, as settings have them.
"""

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

# The largest whole number where a setting states no other: a size or a count above it is a slip.
LARGEST = 2**31 - 1
LARGEST_FRACTION = 1e12
# About the smallest number that float32 has with all its digits.
SMALLEST_FRACTION = 1e-37


@dataclass(frozen=True)
class Limits:
    """Bounds of a number; None: none but what every number has.

    That is: it is finite, whole ones are below 2**31, and others at most 1e12, and 0 or at least 1e-37.
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None

    def allows(self, value: float) -> bool:
        """Return whether a number, or each number of a list, may have this value."""
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
        """Tell the bounds that `value` breaks."""
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
    """A registered thing chosen by name, with its own options: one section of the configuration.

    Attributes:
        source: directory that it was read from (`from`), whose weights it begins with; None: it begins from nothing.
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
    """A dataclass field that is a setting; without a default it must be given.

    Args:
        help: one line for `--help`, with the unit.
        minimum, above, maximum: bounds of a number, or of each number of a list.
        is_path: the value is a path: a relative one in the YAML file counts from the file's folder, one on the
            command line from the working directory; it becomes absolute.
    """
    metadata = {"help": help, "limits": Limits(minimum, above, maximum), "is_path": is_path}
    return dataclasses.field(default=default, metadata=metadata)


def section(schema: type | None = None, *, help: str) -> Any:
    """A dataclass field that holds another dataclass.

    Args:
        schema: made where Python code gives no value; None: it must. The loader always makes it.
    """
    if schema is None:
        return dataclasses.field(metadata={"help": help})
    return dataclasses.field(default_factory=schema, metadata={"help": help})


def sections(schema: type, *, help: str) -> Any:
    """A dataclass field that holds any number of another dataclass, as a tuple; none by default.

    An entry that is mere text is the setting `path` of one.
    """
    return dataclasses.field(default=(), metadata={"help": help, "sections": schema})


def component(registry: str, default: str | tuple[str, ...], *, help: str) -> Any:
    """A dataclass field of type `Component` (or `tuple[Component, ...]`) whose schema comes from a registry.

    Args:
        registry: field of `hp_trainer.registries.Registries`.
        default: name (or names) taken where the configuration gives none.
    """
    return dataclasses.field(metadata={"help": help, "registry": registry, "default_name": default})


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """Return the resolved annotation of every field of a dataclass."""
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


def describe(annotation: Any) -> str:
    """Tell in words what a setting takes: `a whole number or null`."""
    return join_choices([_describe_one(one) for one in alternatives(annotation)])


def _describe_one(annotation: Any) -> str:
    words = {
        int: "a whole number",
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
    """Return whether a name matches one of the patterns, whose `*` stands for anything; upper case counts."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
