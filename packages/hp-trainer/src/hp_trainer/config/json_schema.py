"""The JSON Schema of configurations, for editors and for other programs, and the list of all settings.

pydantic derives the schema of each section. Here the sections are joined with those of registered components.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic.json_schema import GenerateJsonSchema

from hp_trainer.config.schema import TrainerConfig
from hp_trainer.config.sections import adapter
from hp_trainer.exceptions import join_choices
from hp_trainer.registries import Registries

Schema = dict[str, Any]
_URL = "https://json-schema.org/draft/2020-12/schema"
_WORDS = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "text", "null": "null"}


class _Generator(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # `Global Batch Size` says no more than `global_batch_size`


@functools.cache
def section_schema(section: type) -> Schema:
    """Return the JSON Schema of a section without references. A component names its registry instead."""
    schema = adapter(section).json_schema(schema_generator=_Generator)
    inlined: Schema = _inlined(schema, schema.pop("$defs", {}))
    return inlined


def _inlined(schema: Any, definitions: Schema) -> Any:
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    name = schema.get("$ref", "").rpartition("/")[2]
    # Next to a reference are the description and the default of the field, which replace those of the section.
    joined = definitions.get(name, {}) | {key: value for key, value in schema.items() if key != "$ref"}
    return {key: _inlined(value, definitions) for key, value in joined.items()}


def default_values(section: type) -> dict[str, Any]:
    """Return the defaults of a section's settings as plain values, without required settings."""
    return _default_values(section_schema(section))


def _default_values(schema: Schema) -> dict[str, Any]:
    settings = schema["properties"].items()
    inner = {name: _default_values(each) for name, each in settings if "properties" in each}
    # In the order of the schema.
    return {name: inner.get(name, each.get("default")) for name, each in settings if name in inner or "default" in each}


def alternatives(schema: Schema) -> list[Schema]:
    """Return the members of a union, or the schema itself."""
    members: list[Schema] = schema.get("anyOf", [schema])
    return members


def describe(schema: Schema) -> str:
    """Return the type of a setting in words: `an integer or null`."""
    return join_choices([_describe_one(one) for one in alternatives(schema)])


def _describe_one(schema: Schema) -> str:
    if "registry" in schema:
        return "a name with options"
    if "enum" in schema or "const" in schema:
        return join_choices(schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        each = ", ".join(describe(item) for item in schema["prefixItems"])
        return f"a list of {len(schema['prefixItems'])}: {each}"
    if "items" in schema:
        item = schema["items"]
        if "registry" in item:
            return "a list of names, or of {name: ..., option: ...}"
        paths = ", or of paths" if "path" in item.get("properties", ()) else ""
        return f"a list of sections{paths}" if "properties" in item else f"a list of: {describe(item)}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"a section of names, each with {describe(schema['additionalProperties'])}"
    return _WORDS.get(schema.get("type", ""), "a section")


def choices_of(schema: Schema) -> tuple[str, ...]:
    """Return the values of a type that can be listed, as text: those of enumerations and booleans."""
    found: list[str] = []
    for one in alternatives(schema):
        found += ["true", "false"] if one.get("type") == "boolean" else map(str, one.get("enum", ()))
    return (*found, "null") if found and {"type": "null"} in alternatives(schema) else tuple(found)


@dataclass(frozen=True)
class Option:
    """A setting as a command-line option: `--path=value`.

    Attributes:
        path: dotted path. An option within the entries of a list is written `list[].name`, and can only be given as
            part of the list.
        takes: type of the value, in words.
        default: the default as YAML; None: the setting is required.
        help: one line.
        when: the choice that it belongs to (`model.name=decoder`); empty: it always exists.
        choices: the values of an enumeration or of a boolean, which shells complete; empty: any value of the type.
    """

    path: str
    takes: str
    default: str | None
    help: str
    when: str = ""
    choices: tuple[str, ...] = ()


def list_options(registered: Registries) -> list[Option]:
    """Return every option in the order of the schema, including those of all registered components."""
    return list(_options(registered, section_schema(TrainerConfig), ""))


def _options(registered: Registries, section: Schema, path: str, when: str = "") -> Iterator[Option]:
    for name, schema in section.get("properties", {}).items():
        inner = f"{path}.{name}" if path else name
        if "properties" in schema:
            yield from _options(registered, schema, inner, when)
        elif "registry" in schema:
            yield from _component_options(registered, schema, inner)
        else:
            default = None if name in section.get("required", ()) else _yaml(schema.get("default"))
            text, item = schema.get("description", ""), schema.get("items", {})
            names = getattr(registered, item["registry"]).names() if "registry" in item else []
            text = f"{text}: {', '.join(names)}" if names else text
            yield Option(inner, describe(schema), default, text, when, choices_of(schema))
            if "properties" in item:
                yield from _options(registered, item, f"{inner}[]", when)
            for each in names:
                options = section_schema(getattr(registered, item["registry"]).options(each))
                yield from _options(registered, options, f"{inner}[]", f"name: {each} in {inner}")


def _component_options(registered: Registries, schema: Schema, path: str) -> Iterator[Option]:
    registry = getattr(registered, schema["registry"])
    text = f"{schema['description']}: {', '.join(registry.names()) or 'none registered'}"
    takes, choices = f"the name of {registry.a_kind}", tuple(registry.names())
    yield Option(f"{path}.name", takes, schema["default_name"], text, choices=choices)
    if any(hasattr(registry.options(name), "read_directory") for name in registry.names()):
        yield Option(f"{path}.from", "text or null", "null", _FROM)
    for name in registry.names():
        yield from _options(registered, section_schema(registry.options(name)), path, f"{path}.name={name}")


_FROM = "directory of a Hugging Face model: its weights, and its sizes as defaults"


def _yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("...").strip()


def json_schema(registered: Registries) -> Schema:
    """Return the JSON Schema (draft 2020-12) of configuration files, with the options of all registered components.

    It states the keys, types and ranges that `load_config` accepts in a file. Missing settings, which another file or
    the command line may give, and contradictions between settings are found only by loading.
    """
    root = _published(registered, section_schema(TrainerConfig))
    files = {
        "type": ["string", "array"],
        "items": {"type": "string"},
        "description": "YAML files to merge below this one",
    }
    root |= {"type": "object", "properties": {"include": files} | root["properties"]}
    head = {"$schema": _URL, "title": "Configuration of hp-train"}
    return {**head, **root, "$defs": {"variable": {"type": "string", "pattern": r"\$\{env:"}}}


def _published(registered: Registries, schema: Schema, *, is_entry: bool = False) -> Schema:
    """Return the schema of what may be written in a file: null for a section, a variable for a number."""
    notes: Schema = {key: schema[key] for key in ("description", "default") if key in schema}
    if "registry" in schema:
        return _published_component(registered, schema, notes)
    if "properties" in schema:
        inner = {name: _published(registered, each) for name, each in schema["properties"].items()}
        # The defaults of a section are those of its settings.
        notes.pop("default", None)
        made = {**notes, "type": ["object", "null"], "properties": inner, "additionalProperties": False}
        if is_entry:
            made |= {"type": ["object", "string"], "required": schema.get("required", [])}
        return made
    if "anyOf" in schema:
        return schema | {"anyOf": [_published(registered, each) for each in schema["anyOf"]]}
    made = dict(schema)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            made[key] = _published(registered, schema[key], is_entry=key == "items")
    if "properties" in schema.get("items", {}):
        # `Sections`: without a value, as `sources:`, the list is empty.
        made["type"] = ["array", "null"]
    if "prefixItems" in schema:
        made["prefixItems"] = [_published(registered, each) for each in schema["prefixItems"]]
    if schema.get("type") in ("integer", "number", "boolean") or "enum" in schema:
        rest = {key: value for key, value in schema.items() if key not in notes}
        return {**notes, "anyOf": [rest, {"$ref": "#/$defs/variable"}]}
    return made


def _published_component(registered: Registries, schema: Schema, notes: Schema) -> Schema:
    registry, default = getattr(registered, schema["registry"]), schema["default_name"]
    # A component may also be a function in a Python file, whose options are known only once the file is imported.
    name = {"anyOf": [{"enum": registry.names()}, {"type": "string", "pattern": r"\.py:[A-Za-z_]\w*$|\$\{env:"}]}
    name |= {"description": f"the name of {registry.a_kind}"} | ({"default": default} if default else {})
    choices = [{"if": {"type": "string"}, "then": name}]
    for each in registry.names():
        options = _published(registered, section_schema(registry.options(each)))
        settings = {"name": name, **options["properties"]}
        if hasattr(registry.options(each), "read_directory"):
            settings["from"] = {"type": ["string", "null"], "description": _FROM}
        # Without a name, the default applies: a condition on a missing property holds.
        required = {} if each == default else {"required": ["name"]}
        condition = {"type": "object", "properties": {"name": {"const": each}}, **required}
        choices.append({"if": condition, "then": options | {"properties": settings}})
    required = {} if default else {"required": ["name"]}
    notes.pop("default", None)
    types = ["object", "string", "null"] if default else ["object", "string"]
    return {**notes, "type": types, "properties": {"name": name}, **required, "allOf": choices}
