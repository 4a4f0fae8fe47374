"""Writing a configuration so that it reads back equal."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml

from hp_trainer.config._environment import escape
from hp_trainer.config._setting import Component
from hp_trainer.config._tree import is_number


def to_plain(value: Any) -> Any:
    """Return dataclasses as mappings, components as mappings with a `name`, tuples as lists."""
    if isinstance(value, Component):
        source = {} if value.source is None else {"from": value.source}
        return {"name": value.name, **source} | to_plain(value.options)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def dump_config(config: Any) -> str:
    """Return the YAML text of a configuration, every setting included."""
    text: str = yaml.dump(_escaped(to_plain(config)), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


class _Dumper(yaml.SafeDumper):
    """Writes what the reader of configurations reads back equal."""


def _write_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # YAML 1.1 calls `1e30` a text and needs no quotes for it; our reader calls it a number.
    style = "'" if is_number(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def settings_by_path(config: Any) -> dict[str, Any]:
    """Return every setting of a configuration by its dotted path; lists are values."""
    return _leaves(to_plain(config), "")


def _leaves(tree: Any, path: str) -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    inner = {name: f"{path}.{name}" if path else name for name in tree}
    return {leaf: value for name in tree for leaf, value in _leaves(tree[name], inner[name]).items()}


def _escaped(tree: Any) -> Any:
    """Return a tree whose texts are read back as they are: a variable of the environment was replaced before."""
    if isinstance(tree, dict):
        return {name: _escaped(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_escaped(value) for value in tree]
    return escape(tree) if isinstance(tree, str) else tree
