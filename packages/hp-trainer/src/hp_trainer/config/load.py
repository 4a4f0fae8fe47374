"""Loading and dumping of configurations, and the list of all settings.

Loading is strict and reports all problems at once, each with its path, line, expected and given value, and suggestion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hp_trainer.config._converter import INVALID, Converter
from hp_trainer.config._tree import Items, Section, Tree, apply_overrides, escape, is_number, parse_file, read_text
from hp_trainer.config.schema import TrainerConfig
from hp_trainer.config.settings import Component, choices_of, describe, field_types, is_required
from hp_trainer.exceptions import ConfigError, Problem, raise_if_any
from hp_trainer.registries import Registries

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


def load_config(path: str | Path, overrides: Sequence[Override] = (), *, registered: Registries) -> LoadedConfig:
    """Load a YAML file.

    Args:
        path: the file.
        overrides: `(dotted path, text)` pairs that override the file. The text is parsed as YAML unless the setting
            is a string.
        registered: the components that the file may name; `hp_trainer.plugins.registries()` has the installed ones.

    Raises:
        ConfigError: listing every problem.
    """
    text = read_text(Path(path))
    return parse_config(text, overrides, source=str(path), registered=registered, folder=Path(path).parent)


def parse_config(
    text: str,
    overrides: Sequence[Override] = (),
    *,
    registered: Registries,
    source: str = "configuration",
    folder: Path = Path(),
) -> LoadedConfig:
    """Load YAML text. `source` names it in problems, and its relative paths are relative to `folder`.

    Raises:
        ConfigError: listing every problem.
    """
    tree, problems = parse_file(text, source, folder, ((folder / Path(source).name).resolve(),))
    if tree is None:
        raise ConfigError(problems, source)
    problems += apply_overrides(tree, overrides)
    converter = Converter(registered, TrainerConfig)
    config = converter.section(TrainerConfig, tree, "")
    # Problems of parsing and of conversion together.
    raise_if_any([*problems, *converter.problems], ConfigError, source)
    assert config is not INVALID, "an invalid configuration without a problem"
    return LoadedConfig(config, dict(_sources(tree, "")))


def _sources(tree: Tree, path: str) -> Iterator[tuple[str, str]]:
    # The root has no path of its own.
    if path:
        yield path, tree.source
    if isinstance(tree, Section):
        for key, inner in tree.items.items():
            yield from _sources(inner, f"{path}.{key}" if path else key)
    elif isinstance(tree, Items):
        for i, inner in enumerate(tree.items):
            yield from _sources(inner, f"{path}[{i}]")


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


@dataclass(frozen=True)
class Option:
    """A setting as a command-line option: `--path=value`.

    Attributes:
        path: dotted path. An option within the entries of a list is written `list[].name`, and can only be given as
            part of the list.
        takes: type of the value, in words.
        default: the default as YAML; None: the setting is required.
        help: one line.
        when: the choice that it belongs to (`model.name=decoder`); empty: it always exists.
        choices: the values of an enumeration or of a boolean, which shells complete; empty: any value of the type.
    """

    path: str
    takes: str
    default: str | None
    help: str
    when: str = ""
    choices: tuple[str, ...] = ()


def list_options(registered: Registries, schema: type = TrainerConfig) -> list[Option]:
    """Return every option in the order of the schema, including those of all registered components."""
    return list(_options(registered, schema, ""))


def _options(registered: Registries, schema: type, path: str, when: str = "") -> Iterator[Option]:
    for field in dataclasses.fields(schema):
        annotation = field_types(schema)[field.name]
        inner = f"{path}.{field.name}" if path else field.name
        if "registry" in field.metadata:
            yield from _component_options(registered, field, annotation, inner)
        elif dataclasses.is_dataclass(annotation):
            yield from _options(registered, annotation, inner, when)  # type: ignore[arg-type]
        elif "sections" in field.metadata:
            schema_of_one = field.metadata["sections"]
            yield Option(inner, "a list of sections, or of paths", "[]", field.metadata["help"], when)
            yield from _options(registered, schema_of_one, f"{inner}[]", when)
        else:
            # The default as it would be written in the file.
            default = None if is_required(field) else _yaml(field.default)
            yield Option(
                inner, describe(annotation), default, field.metadata.get("help", ""), when, choices_of(annotation)
            )


def _component_options(
    registered: Registries, field: dataclasses.Field[Any], annotation: Any, path: str
) -> Iterator[Option]:
    registry = getattr(registered, field.metadata["registry"])
    names = ", ".join(registry.names()) or "none registered"
    text = f"{field.metadata['help']}: {names}"
    if annotation is not Component:
        takes = "a list of names, or of {name: ..., option: ...}"
        yield Option(path, takes, _yaml(field.metadata["default_name"]), text)
        for name in registry.names():
            yield from _options(registered, registry.options(name), f"{path}[]", f"name: {name} in {path}")
        return
    default = field.metadata["default_name"]
    yield Option(f"{path}.name", f"the name of {registry.a_kind}", default, text, choices=tuple(registry.names()))
    if any(hasattr(registry.options(name), "read_directory") for name in registry.names()):
        directory = "directory of a Hugging Face model: its weights, and its sizes as defaults"
        yield Option(f"{path}.from", "text or null", "null", directory)
    for name in registry.names():
        yield from _options(registered, registry.options(name), path, f"{path}.name={name}")


def _yaml(value: Any) -> str:
    text: str = yaml.safe_dump(to_plain(value), default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("...").strip()
