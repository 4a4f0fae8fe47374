"""Functions sent to other processes by name: `module:qualified.name`, or `/path/to/script.py:name`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hp_dtensor.exceptions import LaunchError

_SCRIPT_MODULE = "__hp_main__"


def target_name(target: str | Callable[..., Any]) -> str:
    """Return the name by which another process finds `target`.

    Raises:
        LaunchError: it is a lambda, a local function or a method, or belongs to an interactive session.
    """
    if isinstance(target, str):
        if ":" not in target:
            raise LaunchError(f"target {target!r}: expected 'module:function'")
        return target
    name = getattr(target, "__qualname__", "")
    if _find(sys.modules.get(getattr(target, "__module__", "")), name) is not target:
        raise LaunchError(
            f"ranks get functions by name, and {target!r} has none that another process could import; "
            "define it at the top level of a module"
        )
    return f"{_module_of(target)}:{name}"


def _find(module: ModuleType | None, name: str) -> Any:
    try:
        return operator.attrgetter(name)(module)
    except AttributeError:
        return None


def _module_of(target: Callable[..., Any]) -> str:
    if target.__module__ != "__main__":
        return target.__module__
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    path = getattr(main, "__file__", None)
    if path is None:
        raise LaunchError(f"{target!r} was defined interactively; ranks can only import it from a file")
    # Results of the script's own classes come back as members of the module that the ranks load.
    sys.modules[_SCRIPT_MODULE] = main
    return str(Path(path).resolve())


def load_target(name: str) -> Callable[..., Any]:
    """Return the function of a name that `target_name` gave in another process."""
    module_name, _, attribute = name.rpartition(":")
    module = _load_script(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
    found: Callable[..., Any] = operator.attrgetter(attribute)(module)
    return found


@functools.cache
def _load_script(path: str) -> ModuleType:
    """Run a script under another name than `__main__`, so that its guarded part does not run."""
    spec = importlib.util.spec_from_file_location(_SCRIPT_MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Classes that the script defines are pickled as members of `__main__`.
    sys.modules[_SCRIPT_MODULE] = sys.modules["__main__"] = module
    spec.loader.exec_module(module)
    return module
