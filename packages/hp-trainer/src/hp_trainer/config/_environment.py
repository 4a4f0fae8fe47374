"""Environment variables in a configuration: `${env:NAME}`, or `${env:NAME:-default}`; nothing else is replaced."""

from __future__ import annotations

import os
import re

_REFERENCE = re.compile(r"(?P<literal>\$?)\$\{env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\}")


class UnsetVariableError(ValueError):
    """A variable without a default that is not set; `hint` says what to do."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the environment variable {name} is not set")
        self.hint = f"export {name}=..., or a default: ${{env:{name}:-value}}"


def substitute(text: str) -> str:
    """Return a text with its references replaced; `$${env:NAME}` stands for a literal `${env:NAME}`.

    Raises:
        UnsetVariableError: a variable is not set and the reference has no default.
    """
    return _REFERENCE.sub(_value, text)


def escape(text: str) -> str:
    """Return a text that `substitute` turns into `text`."""
    return _REFERENCE.sub(lambda found: "$" + found[0], text)


def _value(found: re.Match[str]) -> str:
    if found["literal"]:
        return found[0].removeprefix("$")
    value = os.environ.get(found["name"], found["default"])
    if value is None:
        raise UnsetVariableError(found["name"])
    return value
