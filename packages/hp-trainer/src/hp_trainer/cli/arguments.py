"""Command lines: a command's own arguments, and settings as overrides."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NoReturn

from hp_dtensor.exceptions import HPError

Overrides = list[tuple[str, str]]


class UsageError(HPError, ValueError):
    """A command line that makes no sense."""


class Parser(argparse.ArgumentParser):
    """A parser of one command's own arguments whose errors are told as all others."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(parser: Parser, given: list[str]) -> tuple[argparse.Namespace, Overrides]:
    """Split a command line into the command's own arguments and settings, `--section.setting=value`.

    Raises:
        UsageError: an option without a value, or arguments that the command does not take.
    """
    known = {name for action in parser._actions for name in action.option_strings}
    switches = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    own: list[str] = []
    overrides: Overrides = []
    rest = iter(given)
    for word in rest:
        if not word.startswith("--"):
            own.append(word)
            continue
        if word in switches:
            own.append(word)
            continue
        name, equals, value = word.partition("=")
        if not equals:
            value = _following(name, rest)
        if name in known:
            own.append(f"{name}={value}")
        else:
            overrides.append((name.removeprefix("--"), value))
    return parser.parse_args(own), overrides


def _following(name: str, rest: Iterator[str]) -> str:
    """Return the value of an option that stands in the next word."""
    value = next(rest, None)
    if value is None:
        raise UsageError(f"{name} needs a value: {name}=...")
    return value
