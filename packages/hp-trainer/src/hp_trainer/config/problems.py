"""Problems of a configuration: pydantic's errors with path, source, expected and given value, and a suggestion."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic_core import ErrorDetails

from hp_dtensor.exceptions import RegistryError
from hp_trainer.config.json_schema import Schema, alternatives, describe, section_schema
from hp_trainer.config.schema import TrainerConfig
from hp_trainer.config.sections import SMALLEST_FLOAT
from hp_trainer.config.yaml_tree import Items, Scalar, Section, Tree, nodes_on, parse_yaml, scalar_value
from hp_trainer.exceptions import Problem
from hp_trainer.registries import Registries, is_python_name, register_python_name

_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number", "too_small")
# Bounds from here on are there to find typing errors, and only stated where they are violated.
_LARGEST = 2**31 - 1
_MAX_SHOWN = 60


def problems_of(errors: Iterable[ErrorDetails], tree: Section, registered: Registries) -> list[Problem]:
    """Return the problems that pydantic's errors report, each once, the unknown keys of a section first."""
    found: dict[tuple[Any, ...], Problem] = {}
    for error in errors:
        loc = _known_location(error, tree, registered)
        problem = _problem(error, loc, tree, registered)
        if error["type"] != "unexpected_keyword_argument":
            found.setdefault((loc, problem.what, problem.path), problem)
            continue
        # pydantic reports unknown keys after the problems of the section's other keys.
        parent, before = loc[:-1], list(found.items())
        first = next((i for i, (each, _) in enumerate(before) if _belongs(each, parent)), len(before))
        found = dict([*before[:first], ((loc, "unknown", parent), problem), *before[first:]])
    return list(found.values())


def _belongs(key: tuple[Any, ...], section: tuple[Any, ...]) -> bool:
    """Return whether a problem belongs to a section, and is not one of its unknown keys."""
    loc, what, parent = key
    return loc[: len(section)] == section and not (what == "unknown" and parent == section)


def _known_location(error: ErrorDetails, tree: Section, registered: Registries) -> tuple[str | int, ...]:
    """Return the location of an error without the member of a union and the missing item of a list."""
    loc = error["loc"]
    if error["type"] == "unexpected_keyword_argument":
        return loc
    # An entry of a list of components is named by its index.
    is_entry = error["type"] == "component_type"
    while loc and not is_entry and schema_at(loc, tree, registered) is None and loc[-1] not in ("name", "from"):
        loc = loc[:-1]
    return loc[:-1] if error["type"] == "missing" and isinstance(loc[-1], int) else loc


def _problem(error: ErrorDetails, loc: tuple[str | int, ...], tree: Section, registered: Registries) -> Problem:
    kind, context, path = error["type"], error.get("ctx", {}), join_path(loc)
    nodes = nodes_on(tree, loc)
    value, source = nodes[-1] if len(nodes) > len(loc) else None, nodes[-1].source
    if kind == "problem":
        problem: Problem = context["problem"].within(path) if path else context["problem"]
        nearest = nodes_on(tree, [*loc, *context["problem"].path.split(".")])[-1]
        return dataclasses.replace(problem, source=nearest.source)
    schema = schema_at(loc, tree, registered) or {}
    if kind == "unexpected_keyword_argument":
        return _unknown_key(loc, tree, registered)
    if kind == "missing" and value is None:
        expected = f"{describe(schema)}: {schema.get('description', '')}".rstrip(": ")
        return Problem(path=path, what="missing", expected=expected, hint=f"--{path}=...", source=source)
    got = "null" if value is None else describe_value(value)
    if kind in _RANGES:
        got = shortened(value.text) if isinstance(value, Scalar) else str(error["input"])
        expected = _describe_range(schema, error["input"])
        return Problem(path=path, what="out of range", expected=expected, got=got, source=source)
    if kind in ("missing", "too_short", "too_long"):
        return Problem(path=path, what="wrong length", expected=describe(schema), got=got, source=source)
    names = [str(name) for one in alternatives(schema) for name in one.get("enum", ())]
    if names and isinstance(value, Scalar):
        near = next(iter(difflib.get_close_matches(value.text, names, n=1)), "")
        what = "unknown value"
        return Problem(path=path, what=what, expected=describe(schema), got=got, hint=near, source=source)
    if not kind.endswith("_type"):
        return Problem(path=path, what=error["msg"], got=got, source=source)
    expected = context.get("expected") or (describe(schema) if schema else "text")
    if loc and isinstance(loc[-1], int) and "path" in schema.get("properties", ()):
        expected += ", or a path"
    hint = _quotes(schema, value) if "expected" not in context else ""
    return Problem(path=path, what="wrong type", expected=expected, got=got, hint=hint, source=source)


def _unknown_key(loc: tuple[str | int, ...], tree: Section, registered: Registries) -> Problem:
    parent, key = loc[:-1], str(loc[-1])
    section = nodes_on(tree, parent)[-1]
    source = section.sources.get(key, section.source) if isinstance(section, Section) else tree.source
    names = sorted((schema_at(parent, tree, registered) or {}).get("properties", ()))
    near = difflib.get_close_matches(key, names, n=1)
    # Most unknown keys are typing errors, or valid in another section.
    hint = join_path((*parent, near[0])) if near else _elsewhere(key, tree, registered)
    expected = f"one of {', '.join(names)}" if names else "no options"
    return Problem(path=join_path(loc), what="unknown key", expected=expected, hint=hint, source=source)


def _elsewhere(key: str, tree: Section, registered: Registries) -> str:
    """Return the path of a setting of this name in another section, or an empty text."""
    for name in section_schema(TrainerConfig)["properties"]:
        schema = schema_at((name,), Section(tree.source), registered) or {}
        if key in schema.get("properties", ()):
            return f"{name}.{key}"
    return ""


def _describe_range(schema: Schema, value: float) -> str:
    """Return the type and bounds of a number; default bounds only if `value` exceeds them."""
    one = next((one for one in alternatives(schema) if one.get("type") in ("integer", "number")), {})
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [(sign, one[key]) for key, sign in signs.items() if key in one]
    parts = [f"{sign} {bound:g}" for sign, bound in bounds if bound < _LARGEST]
    if not math.isfinite(value):
        parts.insert(0, "finite")
    elif 0 < abs(value) < SMALLEST_FLOAT:
        parts.append(f"not below {SMALLEST_FLOAT:g}")
    elif value > one.get("maximum", math.inf) >= _LARGEST:
        largest = one["maximum"]
        parts.append(f"<= {largest:g}" if one["type"] == "number" else f"<= {largest}")
    return f"{describe(one)} {' and '.join(parts)}"


def _quotes(schema: Schema, value: Tree | None) -> str:
    """Return a suggestion where adding or removing quotes gives the right type; else an empty text."""
    if not isinstance(value, Scalar):
        return ""
    types = [one.get("type") for one in alternatives(schema)] if schema else ["string"]
    if "string" in types:
        return f'"{value.text}" in quotes' if value.tag != "null" else ""
    # Parsed as if it had no quotes.
    plain, _ = parse_yaml(value.text, "", numbered=False)
    kinds = {bool: "boolean", int: "integer", float: "number", type(None): "null"}
    is_plain = value.tag == "str" and isinstance(plain, Scalar) and kinds.get(type(scalar_value(plain))) in types
    return f"{value.text} without quotes" if is_plain else ""


def shortened(text: str) -> str:
    """Return a text for a message, truncated with dots where it is too long."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def describe_value(value: Tree) -> str:
    """Return a value in words for a message: `'3' (integer)`, `a list of 2`."""
    if isinstance(value, Scalar):
        found = scalar_value(value)
        kinds = {bool: "true or false", int: "integer", float: "number", str: "text"}
        return "null" if found is None else f"{shortened(value.text)!r} ({kinds[type(found)]})"
    return f"a list of {len(value.items)}" if isinstance(value, Items) else "a section"


def join_path(loc: Iterable[str | int]) -> str:
    """Return the dotted path of a location: `model.layers[2].name`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in loc).removeprefix(".")


def schema_at(loc: Sequence[str | int], tree: Section, registered: Registries) -> Schema | None:
    """Return the schema of a setting, or None if there is no such setting. Components are those that the tree names."""
    schema: Schema | None = section_schema(TrainerConfig)
    nodes: list[Tree | None] = [*nodes_on(tree, loc)]
    for depth, key in enumerate(loc, start=1):
        schema = next((inner for one in alternatives(schema or {}) if (inner := _entry(one, key)) is not None), None)
        if schema is not None and "registry" in schema:
            schema = _chosen(schema, nodes[depth] if depth < len(nodes) else None, registered)
    return schema


def _entry(schema: Schema, key: str | int) -> Schema | None:
    if isinstance(key, str):
        others = schema.get("additionalProperties")
        found: Schema | None = schema.get("properties", {}).get(key, others if isinstance(others, dict) else None)
        return found
    items = schema.get("prefixItems", ())
    return items[key] if key < len(items) else schema.get("items")


def _chosen(schema: Schema, node: Tree | None, registered: Registries) -> Schema | None:
    """Return the schema of the options of the component that a node names."""
    registry = getattr(registered, schema["registry"])
    named = node.items.get("name") if isinstance(node, Section) else node
    name = named.text if isinstance(named, Scalar) and named.tag == "str" else schema["default_name"]
    try:
        if name is not None and is_python_name(name) and isinstance(named, Scalar):
            name = register_python_name(registry, name, named.folder)
        return section_schema(registry.options(name)) if name in registry.names() else None
    # Reported where the component is chosen.
    except RegistryError:
        return None
