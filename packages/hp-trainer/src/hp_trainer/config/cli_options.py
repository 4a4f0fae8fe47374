"""Every setting as a command-line option, generated from the dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from hp_trainer.config._annotations import describe, field_types, is_required
from hp_trainer.config._setting import Component
from hp_trainer.config.dump import to_plain
from hp_trainer.config.schema import TrainerConfig
from hp_trainer.registries import Registries


@dataclass(frozen=True)
class Option:
    """One setting: `--path=value`.

    Attributes:
        path: dotted path; that of an option within an entry of a list ends with its name after `[]`, and is given as
            part of the list alone.
        takes: what it takes, in words.
        default: the default as YAML; None: it must be given.
        help: one line.
        when: the choice that it belongs to (`model.name=decoder`); empty: always there.
    """

    path: str
    takes: str
    default: str | None
    help: str
    when: str = ""


def list_options(registered: Registries, schema: type = TrainerConfig) -> list[Option]:
    """Every option in the order of the schema, those of all registered components included."""
    return list(_options(registered, schema, ""))


def _options(registered: Registries, schema: type, path: str, when: str = "") -> Iterator[Option]:
    for field in dataclasses.fields(schema):
        annotation = field_types(schema)[field.name]
        inner = f"{path}.{field.name}" if path else field.name
        if "registry" in field.metadata:
            yield from _component_options(registered, field, annotation, inner)
        elif dataclasses.is_dataclass(annotation):
            yield from _options(registered, annotation, inner, when)  # type: ignore[arg-type]
        elif "sections" in field.metadata:
            schema_of_one = field.metadata["sections"]
            yield Option(inner, "a list of sections, or of paths", "[]", field.metadata["help"], when)
            yield from _options(registered, schema_of_one, f"{inner}[]", when)
        else:
            default = None if is_required(field) else _yaml(field.default)
            yield Option(inner, describe(annotation), default, field.metadata.get("help", ""), when)


def _component_options(
    registered: Registries, field: dataclasses.Field[Any], annotation: Any, path: str
) -> Iterator[Option]:
    registry = getattr(registered, field.metadata["registry"])
    names = ", ".join(registry.names()) or "none registered"
    text = f"{field.metadata['help']}: {names}"
    if annotation is not Component:
        takes = "a list of names, or of {name: ..., option: ...}"
        yield Option(path, takes, _yaml(field.metadata["default_name"]), text)
        for name in registry.names():
            yield from _options(registered, registry.options(name), f"{path}[]", f"name: {name} in {path}")
        return
    yield Option(f"{path}.name", f"the name of {registry.a_kind}", field.metadata["default_name"], text)
    if any(hasattr(registry.options(name), "read_directory") for name in registry.names()):
        directory = "directory of a Hugging Face model to begin with: its options, as defaults, and its weights"
        yield Option(f"{path}.from", "text or null", "null", directory)
    for name in registry.names():
        yield from _options(registered, registry.options(name), path, f"{path}.name={name}")


def _yaml(value: Any) -> str:
    text: str = yaml.safe_dump(to_plain(value), default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("...").strip()
