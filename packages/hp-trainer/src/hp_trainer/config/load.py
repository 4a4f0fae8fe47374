"""Loading and dumping of configurations.

Loading is strict and reports all problems at once, each with its path, line, expected and given value, and suggestion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hp_trainer.config.problems import join_path, problems_of
from hp_trainer.config.schema import TrainerConfig
from hp_trainer.config.sections import Component, adapter
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
    plain,
    read_text,
)
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
