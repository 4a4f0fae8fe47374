"""Annotations of settings: their types, and how to say in words what they take."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, Literal, Union

from hp_trainer.config._setting import Component
from hp_trainer.exceptions import join_choices


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
