"""From a tree to the dataclasses of the schema, collecting every problem."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from typing import Any, Literal, Union

import yaml

from hp_trainer._divisors import join_choices
from hp_trainer.config._setting import Component, Limits
from hp_trainer.config._tree import Items, Override, Scalar, Section, Tree, parse_yaml
from hp_trainer.exceptions import Problem
from hp_trainer.plugins import Registries
from hp_trainer.registry import Registry

INVALID = object()
_SAFE = yaml.SafeLoader("")


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """The resolved annotation of every field of a dataclass."""
    hints = typing.get_type_hints(schema)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def describe(annotation: Any) -> str:
    """What a setting takes, in words."""
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
    if origin in (tuple, list):
        return f"a list of: {describe(args[0])}"
    return "a section" if dataclasses.is_dataclass(annotation) else str(annotation)


class Converter:
    """Converts trees against schemas; `problems` holds what was wrong."""

    def __init__(self, registries: Registries, root: type) -> None:
        self.problems: list[Problem] = []
        self._registries = registries
        self._root = root

    def section(self, schema: type, tree: Section, path: str, *, ignore: str | None = None) -> Any:
        """An instance of the dataclass `schema`, or INVALID; `ignore` is a key that is someone else's."""
        fields = {field.name: field for field in dataclasses.fields(schema)}
        for key in tree.items:
            if key not in fields and key != ignore:
                self._unknown_key(schema, tree, path, key)
        values = {name: self._field(schema, field, tree, path) for name, field in fields.items()}
        given = {name: value for name, value in values.items() if value is not dataclasses.MISSING}
        if any(value is INVALID for value in given.values()):
            return INVALID
        return self._checked(schema(**given), tree, path)

    def _checked(self, made: Any, tree: Section, path: str) -> Any:
        found = list(made.check()) if hasattr(made, "check") else []
        for problem in found:
            source = tree.sources.get(problem.path, tree.source)
            self.problems.append(dataclasses.replace(problem.within(path), source=source))
        return INVALID if found else made

    def _field(self, schema: type, field: dataclasses.Field[Any], tree: Section, path: str) -> Any:
        annotation = field_types(schema)[field.name]
        inner = _join(path, field.name)
        value = tree.items.get(field.name)
        if "registry" in field.metadata:
            return self._components(field, annotation, value, inner, tree.source)
        if dataclasses.is_dataclass(annotation):
            return self._inner_section(annotation, value, inner, tree.source)
        if value is not None:
            return self._value(annotation, value, inner, field.metadata.get("limits", Limits()))
        if not is_required(field):
            return dataclasses.MISSING
        expected = f"{describe(annotation)}: {field.metadata.get('help', '')}".rstrip(": ")
        self._add(inner, "missing", tree.source, expected=expected, hint=f"--{inner}=...")
        return INVALID

    def _inner_section(self, schema: Any, value: Tree | None, path: str, source: str) -> Any:
        value = self._parsed(value, path)
        if value is None or _is_null(value):
            value = Section(source if value is None else value.source)
        if not isinstance(value, Section):
            return self._wrong(value, path, "a section")
        return self.section(schema, value, path)

    # Components ------------------------------------------------------------------------------------------

    def _components(self, field: Any, annotation: Any, value: Tree | None, path: str, source: str) -> Any:
        registry = getattr(self._registries, field.metadata["registry"])
        default = field.metadata["default_name"]
        value = self._parsed(value, path)
        if annotation is Component:
            if value is None or _is_null(value):
                value = Section(source if value is None else value.source)
            return self._component(registry, value, path, default)
        if value is None:
            value = Items([Scalar(name, "str", source) for name in default], source)
        if not isinstance(value, Items):
            return self._wrong(value, path, "a list of names, or of sections with a name")
        made = [self._component(registry, item, f"{path}[{i}]") for i, item in enumerate(value.items)]
        return INVALID if any(one is INVALID for one in made) else tuple(made)

    def _component(self, registry: Registry, value: Tree, path: str, default: str | None = None) -> Any:
        if isinstance(value, Scalar) and value.tag == "str":
            value = Section(value.source, {"name": value}, {"name": value.source})
        if not isinstance(value, Section):
            return self._wrong(value, path, f"the name of {registry.a_kind}, or a section with it")
        name = self._component_name(registry, value, path, default)
        if name is INVALID:
            return INVALID
        options = self.section(registry.options(name), value, path, ignore="name")
        return INVALID if options is INVALID else Component(name, options)

    def _component_name(self, registry: Registry, tree: Section, path: str, default: str | None) -> Any:
        value, path = tree.items.get("name"), _join(path, "name")
        if value is None and default is None:
            self._add(path, "missing", tree.source, expected=f"the name of {registry.a_kind}")
            return INVALID
        name = default if value is None else self._value(str, value, path, Limits())
        if name is INVALID or name in registry.names():
            return name
        source = tree.source if value is None else value.source
        known = ", ".join(registry.names()) or "none is registered; install a package that brings one"
        self._add(path, f"unknown {registry.kind}", source, known, repr(name), registry.suggest(str(name)))
        return INVALID

    # Values ----------------------------------------------------------------------------------------------

    def _value(self, annotation: Any, value: Tree, path: str, limits: Limits) -> Any:
        options = alternatives(annotation)
        if isinstance(value, Override) and str in options and value.text not in ("null", "~"):
            return value.text
        parsed = self._parsed(value, path)
        if parsed is None:
            return INVALID
        for option in options:
            made = self._try(option, parsed, path, limits)
            if made is not None or (option is type(None) and _is_null(parsed)):
                return made
        return self._mismatch(options, parsed, path)

    def _try(self, annotation: Any, value: Tree, path: str, limits: Limits) -> Any:
        """The value as this type; None when it is of another kind."""
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (tuple, list) and isinstance(value, Items):
            return self._items(annotation, args, value, path, limits)
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
            self._add(path, "out of range", value.source, f"{describe(annotation)} {limits}", value.text)
            return INVALID
        return found

    def _items(self, annotation: Any, args: Any, value: Items, path: str, limits: Limits) -> Any:
        fixed = annotation is not None and typing.get_origin(annotation) is tuple and args[-1] is not Ellipsis
        if fixed and len(value.items) != len(args):
            got = f"a list of {len(value.items)}"
            self._add(path, "wrong length", value.source, describe(annotation), got)
            return INVALID
        inner = args if fixed else [args[0]] * len(value.items)
        pairs = enumerate(zip(inner, value.items, strict=True))
        made = [self._value(one, item, f"{path}[{i}]", limits) for i, (one, item) in pairs]
        if any(one is INVALID for one in made):
            return INVALID
        return list(made) if typing.get_origin(annotation) is list else tuple(made)

    def _mismatch(self, options: tuple[Any, ...], value: Tree, path: str) -> Any:
        literals = [arg for one in options if typing.get_origin(one) is Literal for arg in typing.get_args(one)]
        expected = join_choices([_describe_one(one) for one in options])
        if literals and isinstance(value, Scalar):
            names = [str(name) for name in literals]
            near = next(iter(difflib.get_close_matches(value.text, names, n=1)), "")
            self._add(path, "unknown value", value.source, expected, describe_value(value), near)
            return INVALID
        return self._wrong(value, path, expected, _unquoted(options, value))

    def _wrong(self, value: Tree, path: str, expected: str, hint: str = "") -> Any:
        self._add(path, "wrong type", value.source, expected, describe_value(value), hint)
        return INVALID

    def _parsed(self, value: Tree | None, path: str) -> Tree | None:
        """The value with the text of an override read as YAML; None when that fails or there is none."""
        if not isinstance(value, Override):
            return value
        if not value.text:
            return Scalar("", "null", value.source)
        tree, problems = parse_yaml(value.text, value.source, numbered=False)
        self.problems += [dataclasses.replace(problem, path=path) for problem in problems]
        return tree

    def _unknown_key(self, schema: type, tree: Section, path: str, key: str) -> None:
        names = list(field_types(schema))
        near = difflib.get_close_matches(key, names, n=1)
        hint = _join(path, near[0]) if near else self._elsewhere(key)
        expected = f"one of {', '.join(sorted(names))}" if names else "no options"
        self._add(_join(path, key), "unknown key", tree.sources[key], expected, "", hint)

    def _elsewhere(self, key: str) -> str:
        """Where in the whole schema a key of this name would be right."""
        for field in dataclasses.fields(self._root):
            schema = self._schema_of(field)
            if schema is not None and key in field_types(schema):
                return f"{field.name}.{key}"
        return ""

    def _schema_of(self, field: dataclasses.Field[Any]) -> Any:
        annotation = field_types(self._root)[field.name]
        if dataclasses.is_dataclass(annotation) and annotation is not Component:
            return annotation
        registry = getattr(self._registries, field.metadata.get("registry", ""), None)
        default = field.metadata.get("default_name")
        return registry.options(default) if registry is not None and default in registry.names() else None

    def _add(self, path: str, what: str, source: str, expected: str = "", got: str = "", hint: str = "") -> None:
        self.problems.append(Problem(path=path, what=what, expected=expected, got=got, hint=hint, source=source))


def scalar_value(scalar: Scalar) -> bool | int | float | str | None:
    """The Python value of a leaf."""
    if scalar.tag == "null":
        return None
    if scalar.tag == "bool":
        return bool(_SAFE.construct_yaml_bool(yaml.ScalarNode("tag:yaml.org,2002:bool", scalar.text)))
    # YAML 1.1 would read 12:30 as a number to the base 60.
    if scalar.tag == "int" and ":" not in scalar.text:
        return int(_SAFE.construct_yaml_int(yaml.ScalarNode("tag:yaml.org,2002:int", scalar.text)))
    if scalar.tag == "float" and ":" not in scalar.text:
        return float(_SAFE.construct_yaml_float(yaml.ScalarNode("tag:yaml.org,2002:float", scalar.text)))
    return scalar.text


def describe_value(value: Tree) -> str:
    """What came, in words."""
    if isinstance(value, Scalar):
        found = scalar_value(value)
        kinds = {bool: "true or false", int: "whole number", float: "number", str: "text"}
        return "null" if found is None else f"{value.text!r} ({kinds[type(found)]})"
    if isinstance(value, Items):
        return f"a list of {len(value.items)}"
    return "a section" if isinstance(value, Section) else repr(value.text)


def _unquoted(options: tuple[Any, ...], value: Tree) -> str:
    """What to write instead, where quotes make the difference."""
    if not isinstance(value, Scalar):
        return ""
    if str in options:
        return f'"{value.text}" in quotes' if value.tag != "null" else ""
    plain, _ = parse_yaml(value.text, "", numbered=False)
    if value.tag == "str" and isinstance(plain, Scalar) and type(scalar_value(plain)) in options:
        return f"{value.text} without quotes"
    return ""


def _is_null(value: Tree) -> bool:
    return isinstance(value, Scalar) and value.tag == "null"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
