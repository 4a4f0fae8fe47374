"""Device meshes, placements, DTensor, sharding rules and redistribution, on any platform."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.3.0"


def _sources() -> dict[str, str]:
    """Return the module that defines each public name, from the imports in `__init__.pyi`."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    return {alias.name: str(each.module) for each in imports for alias in each.names}


# Attributes of the package, but not part of `from hp_dtensor import *`: there `nn` would replace the program's own
# `torch.nn` or `mindspore.nn`, and also in code that repeats a program's imports, as MindSpore's `amp` does.
_MODULES = frozenset({"nn"})
_SOURCES = _sources()
__all__ = [name for name in _SOURCES if name not in _MODULES]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that importing the package stays cheap."""
    if name not in _SOURCES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    source = _SOURCES[name]
    value = importlib.import_module(f"{source}.{name}" if name in _MODULES else source)
    if name not in _MODULES:
        value = getattr(value, name)
    globals()[name] = value
    return value
