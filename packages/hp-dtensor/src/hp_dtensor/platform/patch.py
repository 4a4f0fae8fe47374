"""One function of a framework that a platform replaces; each platform has a table of them."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """One entry point of a framework that is replaced for everybody in this process.

    Attributes:
        name: the full name, such as `torch.nn.init.eye_`.
        why: what the framework would do to a DTensor by itself.
        dtensors: what happens to DTensors instead.
        replacement: makes of the framework's function the one that takes its place.
    """

    name: str
    why: str
    dtensors: str
    replacement: Callable[[Any], Any]

    def is_there(self) -> bool:
        """Return True if this version of the framework has the function."""
        try:
            # By name, when it is installed: the table itself imports none of the modules that it names.
            owner, attribute = self.place()
        except (ImportError, AttributeError):
            return False
        return hasattr(owner, attribute)

    def install(self) -> Any:
        """Put the replacement in its place, and return the framework's own function."""
        owner, attribute = self.place()
        # Static: a class method as it is, not bound to the class that defines it.
        own = inspect.getattr_static(owner, attribute)
        setattr(owner, attribute, self.replacement(own.__func__ if isinstance(own, staticmethod) else own))
        return own

    def place(self) -> tuple[Any, str]:
        """Return the module, class or object that holds the function, and its name there."""
        owner, _, attribute = self.name.rpartition(".")
        return pkgutil.resolve_name(owner), attribute
