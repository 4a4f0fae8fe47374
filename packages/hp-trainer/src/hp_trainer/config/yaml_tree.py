"""Reading of YAML: plain values of any file, and a configuration's tree in which each value has its file and line.

Environment variables (`${env:NAME}`, `${env:NAME:-default}`) are substituted while a text is parsed, included files
(`include:`) are merged below the file that includes them, and overrides of the command line are inserted last.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from hp_trainer._files import read_plain_text
from hp_trainer.config.sections import Text
from hp_trainer.exceptions import ConfigError, Problem

_REFERENCE = re.compile(r"(?P<literal>\$?)\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


class UnsetVariableError(ValueError):
    """An environment variable is not set and its reference has no default; `hint` is a suggestion for the user."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the environment variable {name} is not set")
        self.hint = f"export {name}=..., or a default: ${{env:{name}:-value}}"


def substitute(text: str) -> str:
    """Return `text` with references to environment variables replaced; `$${env:NAME}` is a literal `${env:NAME}`."""
    # One pass: the value of a variable is not searched for further references.
    return _REFERENCE.sub(_value, text)


def escape(text: str) -> str:
    """Return a text that `substitute` turns back into `text`."""
    return _REFERENCE.sub(lambda found: "$" + found[0], text)


def _value(found: re.Match[str]) -> str:
    if found["literal"]:
        return found[0].removeprefix("$")
    value = os.environ.get(found["name"], found["default"])
    if value is None:
        raise UnsetVariableError(found["name"])
    return value


# Nodes within each other in a YAML text, far above those of any real file.
_MOST_LEVELS = 50


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with a limit on the depth, because it takes quadratic time for nested brackets."""

    def fetch_more_tokens(self) -> None:
        """Scan the next token. A RecursionError says that the text is nested too deeply."""
        if self.flow_level + len(self.indents) > _MOST_LEVELS:
            raise RecursionError(f"nested more than {_MOST_LEVELS} levels deep")
        super().fetch_more_tokens()


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file, read by `read_plain_text`; a ValueError says why it is none."""
    text = read_plain_text(path)
    try:
        return yaml.load(text, Loader)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    # PyYAML's constructors convert texts such as `2001-99-99` and `!!timestamp x` without checking them first.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


_TAG = "tag:yaml.org,2002:"
_TYPED = ("null", "bool", "int", "float")
_TEXT = ("str", "timestamp", "binary", "value", "merge")
# Far above any real configuration. Without limits, nested YAML aliases ("billion laughs") would expand a short text
# into millions of values.
_LONGEST_TEXT, _MOST_VALUES = 2**20, 20_000
_SURROGATE = re.compile("[\ud800-\udfff]")
_resolver: Any = yaml.resolver.Resolver()
_SAFE = yaml.SafeLoader("")
_CONSTRUCT: dict[str, Callable[[yaml.ScalarNode], bool | int | float]] = {
    "bool": _SAFE.construct_yaml_bool,
    "int": _SAFE.construct_yaml_int,
    "float": _SAFE.construct_yaml_float,
}
# Larger integers overflow a float even in hexadecimal, and Python needs quadratic time to parse them.
_MAX_DIGITS = 250


@dataclass
class Scalar:
    """A leaf: its text, its YAML tag (`null`, `bool`, `int`, `float` or `str`), its source and its file's folder.

    A relative path is relative to that folder, or without a file to the working directory. The text of an override on
    the command line is a string until it is parsed as YAML.
    """

    text: str
    tag: str
    source: str
    folder: Path = Path()
    is_override: bool = False


@dataclass
class Items:
    """A list."""

    items: list[Tree]
    source: str


@dataclass
class Section:
    """A mapping; `sources` has the place of each key, such as `run.yaml:4`."""

    source: str
    items: dict[str, Tree] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


Tree = Scalar | Items | Section


def plain(tree: Tree) -> Any:
    """Return the Python value of a tree: dicts, tuples and scalars."""
    if isinstance(tree, Section):
        return {key: plain(value) for key, value in tree.items.items()}
    if isinstance(tree, Items):
        return tuple(plain(value) for value in tree.items)
    value = scalar_value(tree)
    return Text(value, tree.folder) if isinstance(value, str) else value


def scalar_value(scalar: Scalar) -> bool | int | float | str | None:
    """Return the Python value of a leaf, or its text where it does not match its tag (`!!int x`, `0x_`)."""
    if scalar.tag == "null":
        return None
    # Python refuses to convert longer texts, since it takes quadratic time.
    if scalar.tag == "int" and len(scalar.text) > _MAX_DIGITS:
        return math.inf
    # YAML 1.1 reads 12:30 as a sexagesimal number.
    construct = None if scalar.tag in ("int", "float") and ":" in scalar.text else _CONSTRUCT.get(scalar.tag)
    try:
        return scalar.text if construct is None else construct(yaml.ScalarNode(_TAG + scalar.tag, scalar.text))
    except (ValueError, KeyError):
        return scalar.text


def nodes_on(tree: Tree, loc: Iterable[str | int]) -> list[Tree]:
    """Return the nodes from the root towards a location, down to the last one that the file has."""
    nodes = [tree]
    for key in loc:
        if isinstance(tree, Section) and key in tree.items:
            tree = tree.items[str(key)]
        elif isinstance(tree, Items) and isinstance(key, int) and key < len(tree.items):
            tree = tree.items[key]
        else:
            break
        nodes.append(tree)
    return nodes


def parse_yaml(
    text: str, source: str, *, numbered: bool = True, folder: Path = Path()
) -> tuple[Tree | None, list[Problem]]:
    """Return the tree of a YAML text (None: it cannot be parsed) and its problems, `numbered` by line in `source`."""
    if len(text) > _LONGEST_TEXT:
        what = f"longer than {_LONGEST_TEXT:,} characters"
        return None, [Problem(path="", what=what, expected="a configuration", got=f"{len(text):,}", source=source)]
    try:
        # Nodes instead of values, because they have line numbers and the original text.
        node = yaml.compose(text, Loader=Loader)
    except RecursionError as error:
        return None, [Problem(path="", what=str(error), source=source)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark and numbered else source
        return None, [Problem(path="", what=f"not YAML: {error.problem or error.context}", source=where)]
    except yaml.YAMLError as error:
        return None, [Problem(path="", what=f"not YAML: {error}", source=source)]
    if node is None:
        return Section(source), []
    builder = _Builder(source, numbered, folder)
    try:
        return builder.build(node, ""), builder.problems
    except _TooLargeError as error:
        return None, [Problem(path="", what=str(error), source=source)]


class _TooLargeError(ValueError):
    """A text that exceeds the limits on depth or on the number of values."""


class _Builder:
    """Builds the tree of one YAML text from the nodes of PyYAML."""

    def __init__(self, source: str, numbered: bool, folder: Path) -> None:
        self.source = source
        self.numbered = numbered
        self.folder = folder
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        self._num_values = 0

    def build(self, node: Any, path: str) -> Tree:
        where = self._where(node)
        # An alias to an enclosing node is a cycle; PyYAML composes it without an error.
        if id(node) in self._open:
            self.problems.append(Problem(path=path, what="contains itself", source=where))
            return Scalar("", "null", where)
        # Aliased nodes are built and counted at each use.
        self._num_values += 1
        if len(self._open) >= _MOST_LEVELS:
            raise _TooLargeError(f"nested more than {_MOST_LEVELS} levels deep")
        if self._num_values > _MOST_VALUES:
            raise _TooLargeError(f"more than {_MOST_VALUES:,} values, counting each use of an alias (*name)")
        self._open.add(id(node))
        try:
            return self._build(node, path, where)
        finally:
            self._open.remove(id(node))

    def _build(self, node: Any, path: str, where: str) -> Tree:
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._section(node, path, where)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            items = [self.build(item, f"{path}[{i}]") for i, item in enumerate(node.value)]
            return Items(items, where)
        if isinstance(node, yaml.ScalarNode) and node.tag.removeprefix(_TAG) in (*_TYPED, *_TEXT):
            return self._scalar(node, path, where)
        self.problems.append(Problem(path=path, what="tags are not supported", got=str(node.tag), source=where))
        return Scalar("", "null", where)

    def _scalar(self, node: Any, path: str, where: str) -> Scalar:
        try:
            value = substitute(node.value)
        except UnsetVariableError as error:
            self.problems.append(Problem(path=path, what=str(error), hint=error.hint, source=where))
            value = node.value
        if "\0" in value or _SURROGATE.search(value):
            # Only escapes in quotes ("\0", "\ud800") can write these. No file name may have them.
            what = "contains a zero character or half of a surrogate pair"
            self.problems.append(Problem(path=path, what=what, got=ascii(value)[:60], source=where))
            return Scalar("", "str", where, self.folder)
        if value != node.value:
            # The value of a variable is typed as if it were written in the file, unless quotes make it text.
            tag = _resolve(value) if node.style is None else f"{_TAG}str"
            node = yaml.ScalarNode(tag, value, style=node.style)
        tag = node.tag.removeprefix(_TAG)
        return Scalar(value, tag if tag in _TYPED else _text_tag(node), where, self.folder)

    def _section(self, node: Any, path: str, where: str) -> Section:
        section = Section(where)
        for key_node, value_node in node.value:
            key, key_where = str(key_node.value), self._where(key_node)
            inner = f"{path}.{key}" if path else key
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(Problem(path=path, what="a key must be a word", source=key_where))
            # PyYAML would silently use the last one.
            elif key in section.items:
                places = f"{section.sources[key]} and {key_where}"
                self.problems.append(Problem(path=inner, what="given twice", got=places, source=key_where))
            else:
                section.items[key] = self.build(value_node, inner)
                section.sources[key] = key_where
        return section

    def _where(self, node: Any) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self.numbered else self.source


def _resolve(text: str) -> str:
    """Return the tag that YAML resolves for an unquoted scalar."""
    # (True, False): resolve as an unquoted scalar.
    tag: str = _resolver.resolve(yaml.ScalarNode, text, (True, False))
    return tag


def _text_tag(node: Any) -> str:
    """Return `float` for numbers such as `1e-3`, which YAML 1.1 resolves as strings, else `str`."""
    return "float" if node.style is None and is_number(node.value) else "str"


def is_number(text: str) -> bool:
    """Return whether a text is a number with an exponent, such as `1e-3`, that YAML 1.1 resolves as a string."""
    if "e" not in text.lower():
        return False
    try:
        float(text)
    except ValueError:
        return False
    return True


def apply_overrides(tree: Tree, overrides: Iterable[tuple[str, str]]) -> list[Problem]:
    """Insert `(dotted path, text)` pairs into the tree, the last of a path winning, and return the problems."""
    problems = []
    for path, text in overrides:
        value = Scalar(text, "null" if text in ("null", "~") else "str", f"--{path}", is_override=True)
        problem = _apply(tree, path.split("."), value)
        if problem is not None:
            problems.append(problem)
    return problems


def _apply(tree: Tree, keys: Sequence[str], value: Scalar) -> Problem | None:
    path = ".".join(keys)
    if not all(keys):
        return Problem(path=path, what="not a dotted path", hint="--section.key=value", source=value.source)
    for depth, key in enumerate(keys):
        if not isinstance(tree, Section):
            return Problem(
                path=path,
                what=f"{'.'.join(keys[:depth])} is a value, not a section",
                got=f"a value at {tree.source}",
                source=value.source,
            )
        if depth == len(keys) - 1:
            # Replaces a value of the file, also a section.
            tree.items[key] = value
            tree.sources[key] = value.source
            return None
        inner = tree.items.get(key)
        # `section:` without a value is null in YAML, and counts as an empty section.
        if inner is None or (isinstance(inner, Scalar) and inner.tag == "null"):
            tree.items[key] = Section(value.source)
            tree.sources[key] = value.source
        tree = tree.items[key]
    return None


def parse_override(tree: Section, loc: Iterable[str | int]) -> list[Problem]:
    """Parse the text of the override at or above a location as YAML, and return the problems."""
    *_, outer, value = nodes_on(tree, loc)
    # An override is the value of a key. Two errors may be due to the same one.
    if not (isinstance(outer, Section) and isinstance(value, Scalar) and value.is_override):
        return []
    path = value.source.removeprefix("--")
    parsed, problems = parse_yaml(value.text, value.source, numbered=False)
    value.is_override = False
    if parsed is not None:
        outer.items[path.rpartition(".")[2]] = parsed if value.text else Scalar("", "null", value.source)
    return [replace(problem, path=path) for problem in problems]


_KEY = "include"
_MOST_BYTES = 16 << 20


def read_text(path: Path) -> str:
    """Return the text of a YAML file."""
    try:
        return read_plain_text(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError([_unreadable(str(path), error.strerror or str(error))], str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError([_unreadable(str(path), "not UTF-8 text")], str(path)) from error


def parse_file(
    text: str, source: str, folder: Path, including: tuple[Path, ...] = ()
) -> tuple[Section | None, list[Problem]]:
    """Return the tree of a file's text with its included files merged in, and every problem.

    Sections are merged setting by setting: later includes override earlier ones, and the file overrides its includes.
    A list replaces a list, and a section that names another component replaces the section. Relative paths are
    relative to the file they are written in.

    Args:
        source: name of the file in problems.
        folder: folder of the file.
        including: the chain of files that include this one, to detect cycles.
    """
    tree, problems = parse_yaml(text, source, folder=folder)
    if tree is not None and not isinstance(tree, Section):
        problems.append(Problem(path="", what="not a section", expected="key: value lines", source=source))
    if not isinstance(tree, Section):
        return None, problems
    tree.source = source
    names = _included(tree, problems)
    # A new section: the trees of included files are merged below this file's own settings.
    merged = Section(source)
    for name in names:
        inner = _parse_included(name, including, problems)
        if inner is not None:
            _merge(merged, inner)
    _merge(merged, tree)
    return merged, problems


def _included(tree: Section, problems: list[Problem]) -> list[Scalar]:
    """Remove `include` from a file's tree and return the file names in it."""
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
    # Resolved, so that a cycle through symbolic links is found.
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
    """Merge the settings of `over` into `base`, overriding them."""
    for key, value in over.items.items():
        before = base.items.get(key)
        if isinstance(before, Section) and isinstance(value, Section) and not _names_another(before, value):
            _merge(before, value)
        else:
            base.items[key] = value
        # A problem then names the file whose value is used.
        base.sources[key] = over.sources[key]


def _names_another(before: Section, value: Section) -> bool:
    """Return whether `value` chooses another component than `before`, whose options then do not apply."""
    return "name" in value.items and _text(before.items.get("name")) != _text(value.items["name"])


def _text(tree: Tree | None) -> str | None:
    return tree.text if isinstance(tree, Scalar) else None


def _unreadable(path: str, reason: str) -> Problem:
    return Problem(path=path, what="cannot be read", expected="a YAML file", got=reason)
