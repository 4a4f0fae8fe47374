"""Settings as dataclass fields: their help, their limits, or the registry that gives their schema."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Bounds of a number; None: none."""

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None

    def allows(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )

    def __str__(self) -> str:
        bounds = ((">=", self.minimum), (">", self.above), ("<=", self.maximum))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)


@dataclass(frozen=True)
class Component:
    """A registered thing chosen by name, with its own options: one section of the configuration."""

    name: str
    options: Any


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field that is a setting; without a default it must be given.

    Args:
        help: one line for `--help`, with the unit.
        minimum, above, maximum: bounds of a number, or of each number of a list.
    """
    metadata = {"help": help, "limits": Limits(minimum, above, maximum)}
    return dataclasses.field(default=default, metadata=metadata)


def section(schema: type | None = None, *, help: str) -> Any:
    """A dataclass field that holds another dataclass.

    Args:
        schema: made where Python code gives no value; None: it must. The loader always makes it.
    """
    if schema is None:
        return dataclasses.field(metadata={"help": help})
    return dataclasses.field(default_factory=schema, metadata={"help": help})


def component(registry: str, default: str | tuple[str, ...], *, help: str) -> Any:
    """A dataclass field of type `Component` (or `tuple[Component, ...]`) whose schema comes from a registry.

    Args:
        registry: field of `hp_trainer.plugins.Registries`.
        default: name (or names) taken where the configuration gives none.
    """
    return dataclasses.field(metadata={"help": help, "registry": registry, "default_name": default})
