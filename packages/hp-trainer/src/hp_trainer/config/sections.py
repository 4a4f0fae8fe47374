"""Declaring settings: the decorator `section`, and types of settings for its fields.

A section is a frozen pydantic dataclass. Each field is a setting: its annotation is the type, and `pydantic.Field` has
the default, the help (`description`) and the bounds. Nothing is coerced, except integers to floats. Numbers are finite;
unless `le` is given, integers are below 2**31 and floats at most 1e12.
"""

from __future__ import annotations

import contextlib
import functools
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, core_schema

from hp_dtensor.exceptions import RegistryError
from hp_dtensor.platform.registry import Registry
from hp_trainer.exceptions import Problem
from hp_trainer.registries import Registries, is_python_name, register_python_name

T = TypeVar("T")

# Default upper bounds of numbers: a larger size or count is a typing error.
_LARGEST = {"int": 2**31 - 1, "float": 1e12}
# About the smallest normal number of float32. Below it, values such as `eps` would become subnormal or zero.
SMALLEST_FLOAT = 1e-37


class Text(str):
    """A string of a configuration file, with the folder to which it is relative if it is a path."""

    __slots__ = ("folder",)

    def __new__(cls, text: str, folder: Path) -> Text:
        made = super().__new__(cls, text)
        made.folder = folder
        return made

    folder: Path

    def __getnewargs__(self) -> tuple[str, Path]:  # type: ignore[override]
        return str(self), self.folder


def _absolute(value: Any) -> Any:
    is_relative = isinstance(value, Text) and value
    return str((value.folder / Path(value).expanduser()).absolute()) if is_relative else value


def _path(value: Any) -> Any:
    if value == "":
        report(iter([Problem(path="", what="empty", expected="a path")]))
    return _absolute(value)


# A path. A relative path is relative to the YAML file's folder, or on the command line to the working directory.
FilePath = Annotated[str, BeforeValidator(_path)]

# A list of sections, which may be null in the file. An entry that is a string sets the `path` of its section.
Sections = Annotated[
    tuple[Annotated[T, BeforeValidator(lambda value: fail("dataclass_type") if value is None else value)], ...],
    BeforeValidator(lambda value: () if value is None else value),
]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def section(cls: type[T]) -> type[T]:
    """Declare a class as a section of settings, a frozen dataclass with keyword arguments that pydantic validates.

    A method `check()` may yield a `Problem` for each contradiction between settings, with paths relative to the
    section. It is called when a configuration is loaded and each setting is valid, not when Python code creates the
    section.

    Raises:
        TypeError: a field has a type that no setting can have.
        pydantic.ValidationError: on creation, with every invalid setting.

    Examples:
        >>> @section
        ... class WindowConfig:
        ...     size: int = Field(128, ge=2, description="number of previous losses")
        >>> WindowConfig(size=4)
        WindowConfig(size=4)
    """
    with _named_fields(cls, TypeError):
        made: Any = pydantic.dataclasses.dataclass(_strict(cls), kw_only=True, frozen=True)
    made.__new__ = staticmethod(_new)
    return made  # type: ignore[no-any-return]


def _new(cls: type, *_: Any, **__: Any) -> Any:
    # dataclasses would take pydantic's `Field(...)` for the default of each inherited setting.
    if "__dataclass_fields__" in vars(cls) and "__pydantic_validator__" not in vars(cls):
        raise TypeError(f"{cls.__qualname__} derives from a section: declare it by @section, not by @dataclass")
    return object.__new__(cls)


@functools.cache
def adapter(schema: type) -> TypeAdapter[Any]:
    """Return the validator of a section, or of a plain dataclass, which is validated as strictly."""
    with _named_fields(schema, RegistryError):
        made = TypeAdapter(schema if hasattr(schema, "__pydantic_config__") else _strict(schema))
        if not made.pydantic_complete:
            # pydantic would report names that it does not know at the first use only.
            made.rebuild()
        return made


@contextlib.contextmanager
def _named_fields(schema: type, kind: type[Exception]) -> Iterator[None]:
    """Convert pydantic's error about the types of a section to one that names the fields."""
    try:
        yield
    except (PydanticUserError, NameError) as error:
        fields = [f"{name}: {hint}" for name, hint in vars(schema).get("__annotations__", {}).items() if _is_bad(hint)]
        raise kind(
            f"{schema.__module__}.{schema.__qualname__}: expected fields that a setting can have (bool, int, float, "
            f"str, Literal, tuple, dict, None, or another section), got {', '.join(fields) or error}"
        ) from error


def _is_bad(hint: Any) -> bool:
    # A text, as after `from __future__ import annotations`, cannot be tried alone.
    if isinstance(hint, str):
        return True
    try:
        TypeAdapter(hint)
    except (PydanticUserError, NameError):
        return True
    return False


def _classes(hint: Any) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    for each in typing.get_args(hint):
        yield from _classes(each)


def _strict(cls: Any) -> Any:
    # Set before the classes of its fields: one of them may be this class.
    cls.__pydantic_config__ = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    cls.__get_pydantic_core_schema__ = classmethod(_core_schema)
    # Plain dataclasses within a plugin's plain dataclass are sections of the file too.
    for each in {one for hint in typing.get_type_hints(cls).values() for one in _classes(hint)}:
        if is_dataclass(each) and not hasattr(each, "__pydantic_config__") and each is not Component:
            _strict(each)
    return cls


def _core_schema(cls: type, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
    inner: Any = handler.resolve_ref_schema(handler(source))
    # In strict mode pydantic accepts a dataclass as an instance only. The fields remain strict.
    inner["strict"] = False
    _bound(inner["schema"])
    mapping = core_schema.no_info_before_validator_function(functools.partial(_as_mapping, cls), inner)
    return core_schema.with_info_after_validator_function(_checked, mapping)


def _bound(schema: Any) -> None:
    """Add the default bounds to the numbers of a core schema that have none."""
    if isinstance(schema, list):
        for each in schema:
            _bound(each)
    elif isinstance(schema, dict):
        if schema.get("type") in _LARGEST and "lt" not in schema:
            schema.setdefault("le", _LARGEST[schema["type"]])
        if schema.get("type") == "list":
            # A file's lists arrive as tuples.
            schema["strict"] = False
        for each in schema.values():
            _bound(each)


def _as_mapping(cls: Any, value: Any) -> Any:
    if isinstance(value, str) and "path" in cls.__dataclass_fields__:
        return {"path": value}
    # `section:` without a value is null in YAML, and counts as an empty section.
    return {} if value is None else value


def _checked(made: Any, info: core_schema.ValidationInfo) -> Any:
    if info.context is None:
        return made
    tiny = [
        InitErrorDetails(
            type=PydanticCustomError("too_small", "too_small"),
            loc=(name, i) if isinstance(value, tuple) else (name,),
            input=number,
        )
        for name, value in vars(made).items()
        for i, number in enumerate(value if isinstance(value, tuple) else (value,))
        if isinstance(number, float) and 0 < abs(number) < SMALLEST_FLOAT
    ]
    if tiny:
        raise ValidationError.from_exception_data("", tiny)
    report(made.check() if hasattr(made, "check") else ())
    return made


def fail(kind: str, loc: tuple[str | int, ...] = (), *, value: Any = None, **context: Any) -> NoReturn:
    """Fail the validation of the value at `loc` with an error of the given kind."""
    error = PydanticCustomError(kind, kind, context)
    raise ValidationError.from_exception_data("", [InitErrorDetails(type=error, loc=loc, input=value)])


def report(problems: Iterator[Problem] | tuple[()], *loc: str) -> None:
    """Fail the validation with every problem; paths are relative to `loc`."""
    errors = [PydanticCustomError("problem", "{problem}", {"problem": problem}) for problem in problems]
    if errors:
        details = [InitErrorDetails(type=error, loc=loc, input=None) for error in errors]
        raise ValidationError.from_exception_data("", details)


@dataclass(frozen=True)
class Component:
    """A section that chooses a registered component by name, with the options of that component.

    Attributes:
        name: name in the registry.
        options: an instance of the component's options dataclass.
        source: directory of a pretrained model (`from`), whose weights are loaded first; None: no directory.
    """

    name: str
    options: Any
    source: str | None = None


@dataclass(frozen=True)
class Registered:
    """Annotation of a `Component`: it is one of a registry, and its options are validated by their own schema.

    Attributes:
        kind: field of `hp_trainer.registries.Registries`.
        default: name if the section has none.
    """

    kind: str
    default: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[..., Any]) -> core_schema.CoreSchema:
        return core_schema.with_info_plain_validator_function(self._validate)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[..., Any]) -> dict[str, Any]:
        # Replaced by the schemas of the registry's components.
        return {"registry": self.kind, "default_name": self.default}

    def _validate(self, value: Any, info: core_schema.ValidationInfo) -> Component:
        if isinstance(value, Component):
            return value
        if not isinstance(info.context, Registries):
            fail("component_type", expected="a Component")
        registry: Registry = getattr(info.context, self.kind)
        if value is None and self.default is not None:
            value = {}
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, dict):
            fail("component_type", expected=f"the name of {registry.a_kind}, or a section with it")
        given = dict(given)
        name = self._name(registry, given.pop("name", self.default))
        schema: Any = registry.options(name)
        source: str | None = None
        defaults: dict[str, Any] = {}
        if hasattr(schema, "read_directory"):
            source, defaults = _read_directory(schema, given)
        try:
            validator = adapter(schema)
        except RegistryError as error:
            report(iter([Problem(path="", what=str(error))]), "name")
        options = validator.validate_python(defaults | given, context=info.context)
        return Component(name, options, source)

    def _name(self, registry: Registry, name: Any) -> str:
        """Return the name of a registered component; that of one in a user's Python file becomes absolute."""
        if name is None and self.default is None:
            report(iter([Problem(path="", what="missing", expected=f"the name of {registry.a_kind}")]), "name")
        if not isinstance(name, str):
            fail("string_type", ("name",))
        if name not in registry.names() and isinstance(name, Text) and is_python_name(name):
            try:
                return register_python_name(registry, name, name.folder)
            except RegistryError as error:
                report(iter([Problem(path="", what=str(error))]), "name")
        if name not in registry.names():
            known = ", ".join(registry.names()) or "none is registered; install a package that brings one"
            what, hint = f"unknown {registry.kind}", registry.suggest(name)
            report(iter([Problem(path="", what=what, expected=known, got=repr(str(name)), hint=hint)]), "name")
        return str(name)


def _read_directory(schema: Any, given: dict[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Remove `from` from the options of a model; return it and the options read from there, unless all are given."""
    directory = given.pop("from", None)
    if directory is None:
        return None, {}
    if not isinstance(directory, str):
        fail("string_type", ("from",))
    source = _absolute(directory)
    if all(field.name in given for field in fields(schema)):
        return source, {}
    defaults, problems = schema.read_directory(Path(source))
    report(iter(problems), "from")
    return source, defaults


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns, in which `*` matches any text. Case matters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
