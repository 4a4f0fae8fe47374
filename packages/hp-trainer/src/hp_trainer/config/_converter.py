"""Conversion of the YAML tree to the dataclasses of the schema, collecting every problem.

`ValueConverter` converts leaves and lists to annotated types; `Converter` converts sections and components.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from hp_dtensor.exceptions import RegistryError
from hp_dtensor.platform.registry import Registry
from hp_trainer.config._tree import Items, Override, Scalar, Section, Tree, parse_yaml
from hp_trainer.config.settings import Component, Limits, alternatives, describe, field_types, is_required
from hp_trainer.exceptions import Problem, join_choices
from hp_trainer.registries import Registries, is_python_name, register_python_name

INVALID = object()
_SAFE = yaml.SafeLoader("")
_CONSTRUCT: dict[str, Callable[[yaml.ScalarNode], bool | int | float]] = {
    "bool": _SAFE.construct_yaml_bool,
    "int": _SAFE.construct_yaml_int,
    "float": _SAFE.construct_yaml_float,
}
# Larger integers overflow a float even in hexadecimal, and Python needs quadratic time to parse them.
_MAX_DIGITS = 250
_MAX_SHOWN = 60


class Problems(list[Problem]):
    """A list of the problems found so far."""

    def add(self, path: str, what: str, source: str, expected: str = "", got: str = "", hint: str = "") -> None:
        """Append a problem."""
        self.append(Problem(path=path, what=what, expected=expected, got=got, hint=hint, source=source))

    def wrong_type(self, value: Tree, path: str, expected: str, hint: str = "") -> Any:
        """Append the problem of a value of the wrong type, and return INVALID."""
        self.add(path, "wrong type", value.source, expected, describe_value(value), hint)
        return INVALID


class ValueConverter:
    """Converts leaves and lists to annotated types; appends to `problems`."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def convert(self, annotation: Any, value: Tree, path: str, limits: Limits) -> Any:
        """Return the value converted to one of the annotation's types, or INVALID."""
        options = alternatives(annotation)
        # On the command line a string needs no quotes: `--run.folder=2024` is text.
        if isinstance(value, Override) and str in options and value.text not in ("null", "~"):
            return value.text
        parsed = self.parsed(value, path)
        if parsed is None:
            return INVALID
        # In the order of the annotation: `int | float` reads `1` as an integer.
        for option in options:
            made = self._try(option, parsed, path, limits)
            if made is not None or (option is type(None) and is_null(parsed)):
                return made
        return self._mismatch(options, parsed, path)

    def _try(self, annotation: Any, value: Tree, path: str, limits: Limits) -> Any:
        """Return the value converted to one type; None when it is of another kind."""
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
            # Types are compared too, because in Python `True == 1`.
            return found if any(found == arg and type(found) is type(arg) for arg in args) else None
        # A float may be written as an integer, but not the reverse.
        if annotation is float and type(found) is int:
            found = float(found)
        # Not isinstance: bool is a subclass of int.
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
        # A value from a list can be suggested; for other types only the type is known.
        if literals and isinstance(value, Scalar):
            names = [str(name) for name in literals]
            near = next(iter(difflib.get_close_matches(value.text, names, n=1)), "")
            self.problems.add(path, "unknown value", value.source, expected, describe_value(value), near)
            return INVALID
        return self.problems.wrong_type(value, path, expected, _unquoted(options, value))

    def parsed(self, value: Tree | None, path: str) -> Tree | None:
        """Return the value with the text of an override parsed as YAML; None if it cannot be parsed or is None."""
        if not isinstance(value, Override):
            return value
        if not value.text:
            return Scalar("", "null", value.source)
        tree, problems = parse_yaml(value.text, value.source, numbered=False)
        self.problems += [dataclasses.replace(problem, path=path) for problem in problems]
        return tree


def scalar_value(scalar: Scalar) -> bool | int | float | str | None:
    """Return the Python value of a leaf, or its text where it does not match its tag (`!!int x`, `0x_`)."""
    if scalar.tag == "null":
        return None
    # Python refuses to convert longer texts, since it takes quadratic time.
    if scalar.tag == "int" and len(scalar.text) > _MAX_DIGITS:
        return math.inf
    # YAML 1.1 reads 12:30 as a sexagesimal number.
    construct = None if scalar.tag in ("int", "float") and ":" in scalar.text else _CONSTRUCT.get(scalar.tag)
    if construct is None:
        return scalar.text
    try:
        return construct(yaml.ScalarNode(f"tag:yaml.org,2002:{scalar.tag}", scalar.text))
    except (ValueError, KeyError):
        return scalar.text


def shortened(text: str) -> str:
    """Return a text for a message, truncated with dots where it is too long."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def describe_value(value: Tree) -> str:
    """Return a value in words for a message: `'3' (integer)`, `a list of 2`."""
    if isinstance(value, Scalar):
        found = scalar_value(value)
        kinds = {bool: "true or false", int: "integer", float: "number", str: "text"}
        return "null" if found is None else f"{shortened(value.text)!r} ({kinds[type(found)]})"
    if isinstance(value, Items):
        return f"a list of {len(value.items)}"
    return "a section" if isinstance(value, Section) else repr(value.text)


def _unquoted(options: tuple[Any, ...], value: Tree) -> str:
    """Return a suggestion where adding or removing quotes gives the right type; else an empty text."""
    if not isinstance(value, Scalar):
        return ""
    if str in options:
        return f'"{value.text}" in quotes' if value.tag != "null" else ""
    # Parsed as if it had no quotes.
    plain, _ = parse_yaml(value.text, "", numbered=False)
    if value.tag == "str" and isinstance(plain, Scalar) and type(scalar_value(plain)) in options:
        return f"{value.text} without quotes"
    return ""


def is_null(value: Tree) -> bool:
    """Return whether the value is YAML's null."""
    return isinstance(value, Scalar) and value.tag == "null"


class Converter:
    """Converts sections and components to their dataclasses; appends to `problems`.

    Args:
        registries: the components that a section may name.
        root: the schema of the file, searched for the section in which an unknown key would be valid.
    """

    def __init__(self, registries: Registries, root: type) -> None:
        self.problems = Problems()
        self._values = ValueConverter(self.problems)
        self._registries = registries
        self._root = root

    def section(
        self,
        schema: type,
        tree: Section,
        path: str,
        *,
        ignore: Container[str] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return an instance of the dataclass `schema`, or INVALID.

        Args:
            ignore: keys that are valid but not fields of `schema`.
            defaults: values for settings that the tree does not have; they override the defaults of the schema.
        """
        fields = {field.name: field for field in dataclasses.fields(schema)}
        for key in tree.items:
            if key not in fields and key not in ignore:
                self._unknown_key(schema, tree, path, key)
        # Precedence: the file, then the model's directory, then the schema's default.
        known = {name: value for name, value in (defaults or {}).items() if name not in tree.items}
        values = known | {
            name: self._field(schema, field, tree, path) for name, field in fields.items() if name not in known
        }
        given = {name: value for name, value in values.items() if value is not dataclasses.MISSING}
        # All settings are converted before this, so that each problem is reported.
        if any(value is INVALID for value in given.values()):
            return INVALID
        return self._checked(schema(**given), tree, path)

    def _checked(self, made: Any, tree: Section, path: str) -> Any:
        """Return a section, or INVALID where its own `check()` finds problems across its settings."""
        # Checks across settings run only on a section whose settings are valid one by one.
        found = list(made.check()) if hasattr(made, "check") else []
        for problem in found:
            source = tree.sources.get(problem.path, tree.source)
            self.problems.append(dataclasses.replace(problem.within(path), source=source))
        return INVALID if found else made

    def _field(self, schema: type, field: dataclasses.Field[Any], tree: Section, path: str) -> Any:
        annotation = field_types(schema)[field.name]
        inner = _join(path, field.name)
        value = tree.items.get(field.name)
        # First: the annotation of a component is a dataclass as well.
        if "registry" in field.metadata:
            return self._components(field, annotation, value, inner, tree.source)
        if dataclasses.is_dataclass(annotation):
            return self._inner_section(annotation, value, inner, tree.source)
        if "sections" in field.metadata:
            return self._sections(field.metadata["sections"], value, inner)
        if value is not None:
            made = self._values.convert(annotation, value, inner, field.metadata.get("limits", Limits()))
            return self._path(value, made) if field.metadata.get("is_path") and isinstance(made, str) else made
        if not is_required(field):
            return dataclasses.MISSING
        expected = f"{describe(annotation)}: {field.metadata.get('help', '')}".rstrip(": ")
        self.problems.add(inner, "missing", tree.source, expected=expected, hint=f"--{inner}=...")
        return INVALID

    def _path(self, value: Tree, path: str) -> str:
        """Return the absolute path; an empty path stays empty, and the section's `check` rejects it."""
        base = value.folder if isinstance(value, Scalar) else Path()
        return str((base / Path(path).expanduser()).absolute()) if path else path

    def _inner_section(self, schema: Any, value: Tree | None, path: str, source: str) -> Any:
        value = self._values.parsed(value, path)
        if value is None or is_null(value):
            value = Section(source if value is None else value.source)
        if not isinstance(value, Section):
            return self.problems.wrong_type(value, path, "a section")
        return self.section(schema, value, path)

    def _sections(self, schema: type, value: Tree | None, path: str) -> Any:
        value = self._values.parsed(value, path)
        if value is None or is_null(value):
            return ()
        if not isinstance(value, Items):
            return self.problems.wrong_type(value, path, "a list of sections")
        made = [self._one_section(schema, item, f"{path}[{i}]") for i, item in enumerate(value.items)]
        return INVALID if any(one is INVALID for one in made) else tuple(made)

    def _one_section(self, schema: type, value: Tree, path: str) -> Any:
        if isinstance(value, Scalar) and value.tag == "str":
            value = Section(value.source, {"path": value}, {"path": value.source})
        if not isinstance(value, Section):
            return self.problems.wrong_type(value, path, "a section, or a path")
        return self.section(schema, value, path)

    # Components ------------------------------------------------------------------------------------------

    def _components(self, field: Any, annotation: Any, value: Tree | None, path: str, source: str) -> Any:
        registry = getattr(self._registries, field.metadata["registry"])
        default = field.metadata["default_name"]
        value = self._values.parsed(value, path)
        if annotation is Component:
            if value is None or is_null(value):
                value = Section(source if value is None else value.source)
            return self._component(registry, value, path, default)
        if value is None:
            value = Items([Scalar(name, "str", source) for name in default], source)
        if not isinstance(value, Items):
            return self.problems.wrong_type(value, path, "a list of names, or of sections with a name")
        made = [self._component(registry, item, f"{path}[{i}]") for i, item in enumerate(value.items)]
        return INVALID if any(one is INVALID for one in made) else tuple(made)

    def _component(self, registry: Registry, value: Tree, path: str, default: str | None = None) -> Any:
        if isinstance(value, Scalar) and value.tag == "str":
            value = Section(value.source, {"name": value}, {"name": value.source})
        if not isinstance(value, Section):
            return self.problems.wrong_type(value, path, f"the name of {registry.a_kind}, or a section with it")
        name = self._component_name(registry, value, path, default)
        if name is INVALID:
            return INVALID
        schema = registry.options(name)
        if not hasattr(schema, "read_directory"):
            options = self.section(schema, value, path, ignore=("name",))
            return INVALID if options is INVALID else Component(name, options)
        source, defaults = self._directory(schema, value, path)
        if source is INVALID:
            return INVALID
        options = self.section(schema, value, path, ignore=("name", "from"), defaults=defaults)
        return INVALID if options is INVALID else Component(name, options, source)

    def _directory(self, schema: Any, tree: Section, path: str) -> tuple[Any, dict[str, Any]]:
        """Return the directory of a pretrained model (`from`) and the options read from it.

        The directory is not read when the section has every option, as a run's resolved configuration does: it may
        have been deleted since.
        """
        value, path = tree.items.get("from"), _join(path, "from")
        if value is None or is_null(value):
            return None, {}
        source = self._values.convert(str, value, path, Limits())
        if source is INVALID:
            return INVALID, {}
        source = self._path(value, source)
        if all(field.name in tree.items for field in dataclasses.fields(schema)):
            return source, {}
        defaults, problems = schema.read_directory(Path(source))
        self.problems += [dataclasses.replace(each.within(path), source=value.source) for each in problems]
        return INVALID if problems else source, defaults

    def _component_name(self, registry: Registry, tree: Section, path: str, default: str | None) -> Any:
        value, path = tree.items.get("name"), _join(path, "name")
        if value is None and default is None:
            self.problems.add(path, "missing", tree.source, expected=f"the name of {registry.a_kind}")
            return INVALID
        name = default if value is None else self._values.convert(str, value, path, Limits())
        if name is INVALID or name in registry.names():
            return name
        if value is not None and is_python_name(str(name)):
            return self._python_name(registry, str(name), value, path)
        source = tree.source if value is None else value.source
        known = ", ".join(registry.names()) or "none is registered; install a package that brings one"
        self.problems.add(path, f"unknown {registry.kind}", source, known, repr(name), registry.suggest(str(name)))
        return INVALID

    def _python_name(self, registry: Registry, name: str, value: Tree, path: str) -> Any:
        """Return the absolute name of a component in a user's Python file, or INVALID."""
        try:
            return register_python_name(registry, name, value.folder if isinstance(value, Scalar) else Path())
        except RegistryError as error:
            self.problems.add(path, str(error), value.source)
            return INVALID

    def _unknown_key(self, schema: type, tree: Section, path: str, key: str) -> None:
        names = list(field_types(schema))
        near = difflib.get_close_matches(key, names, n=1)
        # Most unknown keys are typing errors, or valid in another section.
        hint = _join(path, near[0]) if near else self._elsewhere(key)
        expected = f"one of {', '.join(sorted(names))}" if names else "no options"
        self.problems.add(_join(path, key), "unknown key", tree.sources[key], expected, "", hint)

    def _elsewhere(self, key: str) -> str:
        """Return the path of a setting of this name in another section, or an empty text."""
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


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
