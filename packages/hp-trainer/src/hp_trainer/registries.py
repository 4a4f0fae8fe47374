"""Registries of components by name, and components of a user's own Python file, named as `my_file.py:build`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
import typing
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from hp_dtensor.exceptions import RegistryError
from hp_dtensor.platform.registry import NoOptions, Registry, fill_registry


@dataclass(frozen=True)
class Registries:
    """One registry per kind of component; the hook `hp_<field>` fills it."""

    models: Registry
    datasets: Registry
    optimizers: Registry
    trackers: Registry
    checkpoint_storages: Registry
    checkpoint_formats: Registry


def fill_registries(manager: pluggy.PluginManager) -> Registries:
    """Return new registries, filled by every plugin of `manager`."""
    found = {}
    for name in [field.name for field in fields(Registries)]:
        registry = Registry(name.removesuffix("s").replace("_", " "), "hp_trainer")
        found[name] = fill_registry(registry, manager, f"hp_{name}")
    return Registries(**found)


_NAME = re.compile(r"(?P<file>.+\.py):(?P<attribute>[A-Za-z_]\w*)")


def is_python_name(name: str) -> bool:
    """Return whether a name has the form `my_file.py:build`."""
    return _NAME.fullmatch(name) is not None


def register_python_name(registry: Registry, name: str, folder: Path) -> str:
    """Import the file of `my_file.py:build`, register the function or class, and return its name with an absolute path.

    The builder is called with as many of the registry's arguments as it has positional parameters. The annotation of
    its first parameter, a dataclass, is the schema of its options; a builder without parameters has no options.

    Args:
        folder: folder to which a relative path is relative.
    """
    found = _NAME.fullmatch(name)
    assert found is not None
    file = (folder / Path(found["file"]).expanduser()).absolute()
    full_name = f"{file}:{found['attribute']}"
    if full_name not in registry.names():
        target = getattr(_load(file), found["attribute"], None)
        if not callable(target):
            raise RegistryError(f"{file} has no function or class {found['attribute']!r}")
        with registry.registering(str(file), str(file)):
            taken = len(_parameters(target))
            options = _options_of(target, full_name)
            registry.add(full_name, lambda *arguments: target(*arguments[:taken]), options=options)
    return full_name


def _load(file: Path) -> ModuleType:
    """Import a file once per process, under a unique module name, with its folder appended to the import path."""
    # By the resolved path: two settings may spell the path of one file differently.
    name = f"hp_user_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise RegistryError(
            f"there is no file {file}; if it has moved, give its new path, such as --model.name=FILE.py:NAME"
        )
    found = _import(name, file, file.stat().st_mtime_ns)
    if isinstance(found, str):
        raise RegistryError(found)
    return sys.modules.setdefault(name, found)


@functools.cache
def _import(name: str, file: Path, modified: int) -> ModuleType | str:
    """Import a file as a module, once per modification since it may take long; return a message if that fails."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before the code runs: dataclasses look their module up there.
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        # Appended, not prepended: files of the folder must not shadow installed packages.
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f"line {lines[-1]}: " if lines else ""
        return f"{file} cannot be imported: {where}{error!r}"
    return module


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each for each in inspect.signature(target).parameters.values() if each.kind in kinds]


def _options_of(target: Callable[..., Any], name: str) -> type:
    parameters = _parameters(target)
    if not parameters:
        return NoOptions
    try:
        hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    # An annotation may be any text.
    except Exception as error:
        raise RegistryError(f"{name}: its annotations cannot be evaluated: {error!r}") from error
    schema = hints.get(parameters[0].name, NoOptions)
    if not (isinstance(schema, type) and dataclasses.is_dataclass(schema)):
        raise RegistryError(
            f"{name}: the first parameter, {parameters[0].name!r}, takes the options of the configuration; annotate it "
            f"with a dataclass, got {schema!r}"
        )
    return schema
