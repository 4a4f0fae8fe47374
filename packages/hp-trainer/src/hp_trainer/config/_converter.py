"""From a tree to the dataclasses of the schema, with every problem: unknown keys (and the nearest name), types."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from hp_dtensor.exceptions import RegistryError
from hp_dtensor.platform.registry import Registry
from hp_trainer.config._annotations import describe, field_types, is_required
from hp_trainer.config._setting import Component, Limits
from hp_trainer.config._tree import Items, Scalar, Section, Tree
from hp_trainer.config._values import INVALID, Problems, ValueConverter, is_null
from hp_trainer.python_files import is_python_name, register_python_name
from hp_trainer.registries import Registries


class Converter:
    """Converts sections and components against schemas; `problems` holds what was wrong.

    Args:
        registries: the components that a section may name.
        root: the schema of the whole file, searched for where an unknown key would be right.
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
            ignore: keys that are someone else's.
            defaults: values taken, before those of the schema, where the tree has none.
        """
        fields = {field.name: field for field in dataclasses.fields(schema)}
        for key in tree.items:
            if key not in fields and key not in ignore:
                self._unknown_key(schema, tree, path, key)
        known = {name: value for name, value in (defaults or {}).items() if name not in tree.items}
        values = known | {
            name: self._field(schema, field, tree, path) for name, field in fields.items() if name not in known
        }
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
        """Return a path as an absolute one; an empty path stays, for the section's own check to refuse."""
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
        """Return the directory that a component is read from (`from`), and the options that it gives.

        Where the section has every option itself, as that of a run has, the directory need not be there any more.
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
        """Return the whole name of what stands in a Python file, or INVALID."""
        try:
            return register_python_name(registry, name, value.folder if isinstance(value, Scalar) else Path())
        except RegistryError as error:
            self.problems.add(path, str(error), value.source)
            return INVALID

    def _unknown_key(self, schema: type, tree: Section, path: str, key: str) -> None:
        names = list(field_types(schema))
        near = difflib.get_close_matches(key, names, n=1)
        hint = _join(path, near[0]) if near else self._elsewhere(key)
        expected = f"one of {', '.join(sorted(names))}" if names else "no options"
        self.problems.add(_join(path, key), "unknown key", tree.sources[key], expected, "", hint)

    def _elsewhere(self, key: str) -> str:
        """Return where in the whole schema a key of this name would be right, or nothing."""
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
