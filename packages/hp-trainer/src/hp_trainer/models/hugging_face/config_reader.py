"""Reading of a `config.json`: values by key, with every problem noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hp_trainer._files import read_plain_text
from hp_trainer.exceptions import Problem

_MISSING = object()


class ConfigReader:
    """The values of one `config.json`; what is wrong goes into `problems`.

    Args:
        values: the mapping that the file holds.
        where: names the file in messages.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.problems: list[Problem] = []

    @classmethod
    def open(cls, folder: Path) -> ConfigReader:
        """Read `config.json` of a directory; where it cannot be read, the values are empty and there is a problem."""
        file = folder / "config.json"
        reader = cls({}, str(file))
        try:
            found = json.loads(read_plain_text(file))
        except OSError as error:
            reader.add("", f"cannot be read: {error.strerror or error}", expected="a directory of a Hugging Face model")
        except (ValueError, RecursionError) as error:
            reader.add("", f"is no JSON: {error}")
        else:
            if isinstance(found, dict):
                reader.values = found
            else:
                reader.add("", "is not a mapping", expected="{...}", got=type(found).__name__)
        return reader

    def add(self, key: str, what: str, expected: str = "", got: str = "", hint: str = "") -> None:
        """Note a problem with the value of a key."""
        told = f"{self.where}: {f'{key}: ' if key else ''}{what}"
        self.problems.append(Problem(path="", what=told, expected=expected, got=got, hint=hint))

    def take(self, kind: type, *keys: str, default: Any = _MISSING) -> Any:
        """Return the value of the first of the keys that is there and not null, as `kind`.

        Without a default a missing key is a problem; a value of another kind is one always. Then None is returned.
        """
        for key in keys:
            found = self.values.get(key)
            if found is None:
                continue
            if kind is float and type(found) is int:
                return float(found)
            if type(found) is kind:
                return found
            self.add(key, "wrong type", kind.__name__, repr(found))
            return None
        if default is _MISSING:
            self.add(keys[0], "missing", expected=kind.__name__)
            return None
        return default

    def only(self, key: str, *allowed: Any, hint: str = "") -> None:
        """Note a problem unless the key is missing, null, or has one of the values that this model can compute."""
        found = self.values.get(key)
        if found is not None and found not in allowed:
            told = " or ".join(map(json.dumps, allowed)) or "null"
            self.add(key, "is not supported", expected=told, got=json.dumps(found)[:200], hint=hint)
