"""Configurations made of several files: `include:` takes others in, whose settings the file's own override."""

from __future__ import annotations

from pathlib import Path

from hp_trainer._files import read_plain_text
from hp_trainer.config._tree import Items, Scalar, Section, Tree, parse_yaml
from hp_trainer.exceptions import ConfigError, Problem

_KEY = "include"
_MOST_BYTES = 16 << 20


def read_text(path: Path) -> str:
    """Return the text of a YAML file.

    Raises:
        ConfigError: it cannot be read, is no plain file, is far too large, or is not UTF-8.
    """
    try:
        return read_plain_text(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError([_unreadable(str(path), error.strerror or str(error))], str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError([_unreadable(str(path), "not UTF-8 text")], str(path)) from error


def parse_file(
    text: str, source: str, folder: Path, including: tuple[Path, ...] = ()
) -> tuple[Section | None, list[Problem]]:
    """Return the tree of a file's text, what it includes merged in, and every problem.

    Sections are merged setting by setting, later files over earlier ones and the file itself over all; a list
    replaces a list, and a section that names another component replaces the whole section. Relative paths count
    from the folder of the file in which they stand.

    Args:
        source: name of the file in problems.
        folder: the folder of the file.
        including: the files that led to this one.
    """
    tree, problems = parse_yaml(text, source, folder=folder)
    if tree is not None and not isinstance(tree, Section):
        problems.append(Problem(path="", what="not a section", expected="key: value lines", source=source))
    if not isinstance(tree, Section):
        return None, problems
    tree.source = source
    names = _included(tree, problems)
    merged = Section(source)
    for name in names:
        inner = _parse_included(name, including, problems)
        if inner is not None:
            _merge(merged, inner)
    _merge(merged, tree)
    return merged, problems


def _included(tree: Section, problems: list[Problem]) -> list[Scalar]:
    """Take `include` out of a file's tree and return the names in it."""
    value = tree.items.pop(_KEY, None)
    source = tree.sources.pop(_KEY, tree.source)
    items = value.items if isinstance(value, Items) else [value] if value is not None else []
    names = [item for item in items if isinstance(item, Scalar) and item.tag == "str" and item.text]
    if len(names) != len(items):
        problems.append(
            Problem(path=_KEY, what="wrong type", expected="a YAML file, or a list of them", got="", source=source)
        )
    return names


def _parse_included(name: Scalar, including: tuple[Path, ...], problems: list[Problem]) -> Section | None:
    path = name.folder / Path(name.text).expanduser()
    if path.resolve() in including:
        problems.append(Problem(path=_KEY, what="includes itself", got=str(path), source=name.source))
        return None
    try:
        text = read_text(path)
    except ConfigError as error:
        problems += [Problem(path=_KEY, what=f"{path} cannot be read", got=error.problems[0].got, source=name.source)]
        return None
    tree, found = parse_file(text, str(path), path.parent, (*including, path.resolve()))
    problems += found
    return tree


def _merge(base: Section, over: Section) -> None:
    """Put every setting of `over` into `base`."""
    for key, value in over.items.items():
        before = base.items.get(key)
        if isinstance(before, Section) and isinstance(value, Section) and not _names_another(before, value):
            _merge(before, value)
        else:
            base.items[key] = value
        base.sources[key] = over.sources[key]


def _names_another(before: Section, value: Section) -> bool:
    """Return whether a section chooses another component, to which the options of the one before do not belong."""
    return "name" in value.items and _text(before.items.get("name")) != _text(value.items["name"])


def _text(tree: Tree | None) -> str | None:
    return tree.text if isinstance(tree, Scalar) else None


def _unreadable(path: str, reason: str) -> Problem:
    return Problem(path=path, what="cannot be read", expected="a YAML file", got=reason)
