"""Loading and dumping of configurations, and their problems: path, source, expected and given value, suggestion."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hp_dtensor.exceptions import RegistryError
from hp_trainer.config.json_schema import Schema, alternatives, describe, section_schema
from hp_trainer.config.schema import TrainerConfig
from hp_trainer.config.sections import SMALLEST_FLOAT, Component, adapter
from hp_trainer.config.yaml_tree import (
    Items,
    Scalar,
    Section,
    Tree,
    apply_overrides,
    escape,
    is_number,
    nodes_on,
    parse_file,
    parse_override,
    parse_yaml,
    plain,
    read_text,
    scalar_value,
)
from hp_trainer.exceptions import ConfigError, Problem, raise_if_any
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


Override = tuple[str, str]


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and the source of each of its values.

    Attributes:
        config: the resolved configuration.
        sources: `file:line` or `--option` by dotted path, for every value that was given.
    """

    config: TrainerConfig
    sources: dict[str, str]

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return the problems with the source of their path, or of the nearest enclosing section that was given."""
        return [dataclasses.replace(problem, source=self._source(problem.path)) for problem in problems]

    def _source(self, path: str) -> str:
        while path and path not in self.sources:
            path = path.rpartition(".")[0]
        return self.sources.get(path, "")


def load_config(
    path: str | Path, overrides: Sequence[Override] = (), *, registered: Registries, resolved: bool = False
) -> LoadedConfig:
    """Load a YAML file.

    Args:
        path: the file.
        overrides: `(dotted path, text)` pairs that override the file. The text is parsed as YAML unless the setting
            is a string.
        registered: the components that the file may name; `hp_trainer.plugins.registries()` has the installed ones.
        resolved: the file has every setting, written by `dump_config`. Where an override names another component, the
            settings that only the former one has are left out.

    Raises:
        ConfigError: listing every problem.
    """
    text, folder = read_text(Path(path)), Path(path).parent
    return parse_config(text, overrides, source=str(path), registered=registered, folder=folder, resolved=resolved)


def parse_config(
    text: str,
    overrides: Sequence[Override] = (),
    *,
    registered: Registries,
    source: str = "configuration",
    folder: Path = Path(),
    resolved: bool = False,
) -> LoadedConfig:
    """Load YAML text. `source` names it in problems, its relative paths are relative to `folder`; see `load_config`.

    Raises:
        ConfigError: listing every problem.
    """
    tree, problems = parse_file(text, source, folder, ((folder / Path(source).name).resolve(),))
    if tree is None:
        raise ConfigError(problems, source)
    if resolved:
        _leave_out_replaced(tree, overrides, registered)
    problems += apply_overrides(tree, overrides)
    config, errors = _validate(tree, registered)
    misread = [error["loc"] for error in errors if _is_misread(error, tree)]
    if misread:
        problems += [problem for loc in misread for problem in parse_override(tree, loc)]
        config, errors = _validate(tree, registered)
    # Problems of parsing and of validation together.
    unparsed = {problem.path for problem in problems}
    problems += [each for each in problems_of(errors, tree, registered) if each.path not in unparsed]
    raise_if_any(problems, ConfigError, source)
    assert config is not None, "an invalid configuration without a problem"
    return LoadedConfig(config, dict(_sources(tree)))


def _leave_out_replaced(tree: Section, overrides: Sequence[Override], registered: Registries) -> None:
    """Remove the settings of optimizer and storage that the component named by an override does not have."""
    for path, registry in (
        ("optimizer", registered.optimizers),
        ("checkpoint.storage", registered.checkpoint_storages),
    ):
        section: Tree | None = tree
        for key in path.split("."):
            section = section.items.get(key) if isinstance(section, Section) else None
        name = dict(overrides).get(f"{path}.name")
        if isinstance(section, Section) and name in registry.names():
            known = {"name", *(field.name for field in dataclasses.fields(registry.options(name)))}
            section.items = {key: value for key, value in section.items.items() if key in known}


def _validate(tree: Section, registered: Registries) -> tuple[TrainerConfig | None, list[ErrorDetails]]:
    try:
        return adapter(TrainerConfig).validate_python(plain(tree), context=registered), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _is_misread(error: ErrorDetails, tree: Section) -> bool:
    """Return whether the text of an override is not that of a string, and has to be parsed as YAML."""
    *outer, node = nodes_on(tree, error["loc"])
    is_text = isinstance(node, Scalar) and node.is_override
    # A string that is no valid value, such as the name of a component, is a problem as it is.
    return is_text and (error["type"] != "problem" or len(error["loc"]) > len(outer))


def _sources(tree: Tree, *loc: str | int) -> Iterator[tuple[str, str]]:
    # The root has no path of its own.
    if loc:
        yield join_path(loc), tree.source
    inner: Iterable[tuple[str | int, Tree]] = ()
    if isinstance(tree, (Section, Items)):
        inner = tree.items.items() if isinstance(tree, Section) else enumerate(tree.items)
    for key, each in inner:
        yield from _sources(each, *loc, key)


def to_plain(value: Any) -> Any:
    """Return a configuration as plain values: dataclasses and components become dicts, tuples become lists."""
    # Before the general case: a component is a dataclass too, but its options are written next to its name.
    if isinstance(value, Component):
        source = {} if value.source is None else {"from": value.source}
        return {"name": value.name, **source} | to_plain(value.options)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def dump_config(config: Any) -> str:
    """Return a configuration as YAML text with every setting, which loads back to an equal configuration."""
    # In the order of the schema, which is how the documentation lists the settings.
    text: str = yaml.dump(_escaped(to_plain(config)), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


class _Dumper(yaml.SafeDumper):
    """Quotes strings that the loader would read as numbers."""


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # YAML 1.1 resolves `1e30` as a string and does not quote it, but the loader reads it as a number.
    style = "'" if is_number(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def settings_by_path(config: Any) -> dict[str, Any]:
    """Return every setting of a configuration by dotted path. A list is one value."""
    return _leaves(to_plain(config), "")


def _leaves(tree: Any, path: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    inner = {name: f"{path}.{name}" if path else name for name in tree}
    return {leaf: value for name in tree for leaf, value in _leaves(tree[name], inner[name]).items()}


def _escaped(tree: Any) -> Any:
    """Return a tree whose strings load unchanged, with `${env:...}` escaped."""
    if isinstance(tree, dict):
        return {name: _escaped(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_escaped(value) for value in tree]
    return escape(tree) if isinstance(tree, str) else tree
