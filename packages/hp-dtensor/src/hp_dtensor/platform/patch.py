"""`Patch`: the replacement of a function of a framework. Each platform lists its patches in a table."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """A replacement of a function of a framework, in effect for the process.

    Attributes:
        name: the full name, such as `torch.nn.init.eye_`.
        why: what the framework would do to a DTensor without the patch.
        dtensors: what the patched function does with DTensors.
        replacement: a function that returns the new function, given the framework's.
    """

    name: str
    why: str
    dtensors: str
    replacement: Callable[[Any], Any]

    def exists(self) -> bool:
        """Return whether this version of the framework has the function."""
        try:
            # Resolved by name at installation, so that the table imports none of the modules that it names.
            owner, attribute = self.place()
        except (ImportError, AttributeError):
            return False
        return hasattr(owner, attribute)

    def install(self) -> Any:
        """Install the replacement and return the framework's function."""
        owner, attribute = self.place()
        # Static lookup: a class method must not be bound to the class that defines it.
        own = inspect.getattr_static(owner, attribute)
        # A static method is stored in a wrapper: the replacement gets the function inside.
        setattr(owner, attribute, self.replacement(own.__func__ if isinstance(own, staticmethod) else own))
        return own

    def place(self) -> tuple[Any, str]:
        """Return the module, class or object that holds the function, and its name there."""
        owner, _, attribute = self.name.rpartition(".")
        return pkgutil.resolve_name(owner), attribute
