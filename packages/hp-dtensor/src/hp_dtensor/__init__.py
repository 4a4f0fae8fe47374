"""Device meshes, placements, layouts, DTensor, sharding rules and redistribution, on any platform."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"


def _homes() -> dict[str, str]:
    """Return the module that holds each public name, as the imports of `__init__.pyi` say."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    return {alias.name: str(each.module) for each in imports for alias in each.names}


_HOMES = _homes()
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that importing the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    is_module = not hasattr(home, name)
    value = globals()[name] = importlib.import_module(f"{home.__name__}.{name}") if is_module else getattr(home, name)
    return value
