"""Settings as dataclass fields: their help, their limits, or the registry that gives their schema."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

# The largest whole number where a setting states no other: a size or a count above it is a slip.
LARGEST = 2**31 - 1
LARGEST_FRACTION = 1e12
# About the smallest number that float32 has with all its digits.
SMALLEST_FRACTION = 1e-37


@dataclass(frozen=True)
class Limits:
    """Bounds of a number; None: none but what every number has.

    That is: it is finite, whole ones are below 2**31, and others at most 1e12, and 0 or at least 1e-37.
    """

    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None

    def allows(self, value: float) -> bool:
        """Return whether a number, or each number of a list, may have this value."""
        return (
            math.isfinite(value)
            and not 0 < abs(value) < SMALLEST_FRACTION
            and (self.maximum is not None or value <= _largest(value))
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )

    def __str__(self) -> str:
        stated = self.maximum if self.maximum is None or self.maximum < LARGEST else None
        bounds = ((">=", self.minimum), (">", self.above), ("<=", stated))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    def describe(self, value: float) -> str:
        """Tell the bounds that `value` breaks."""
        if not math.isfinite(value):
            return " and ".join(part for part in ("finite", str(self)) if part)
        if 0 < abs(value) < SMALLEST_FRACTION:
            return " and ".join(part for part in (str(self), f"not below {SMALLEST_FRACTION:g}") if part)
        largest = _largest(value) if self.maximum is None else self.maximum
        if value > largest >= LARGEST:
            shown = f"{largest:g}" if isinstance(value, float) else str(largest)
            return " and ".join(part for part in (str(self), f"<= {shown}") if part)
        return str(self)


def _largest(value: float) -> float:
    return LARGEST if isinstance(value, int) else LARGEST_FRACTION


@dataclass(frozen=True)
class Component:
    """A registered thing chosen by name, with its own options: one section of the configuration.

    Attributes:
        source: directory that it was read from (`from`), whose weights it begins with; None: it begins from nothing.
    """

    name: str
    options: Any
    source: str | None = None


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    is_path: bool = False,
) -> Any:
    """A dataclass field that is a setting; without a default it must be given.

    Args:
        help: one line for `--help`, with the unit.
        minimum, above, maximum: bounds of a number, or of each number of a list.
        is_path: the value is a path: a relative one in the YAML file counts from the file's folder, one on the
            command line from the working directory; it becomes absolute.
    """
    metadata = {"help": help, "limits": Limits(minimum, above, maximum), "is_path": is_path}
    return dataclasses.field(default=default, metadata=metadata)


def section(schema: type | None = None, *, help: str) -> Any:
    """A dataclass field that holds another dataclass.

    Args:
        schema: made where Python code gives no value; None: it must. The loader always makes it.
    """
    if schema is None:
        return dataclasses.field(metadata={"help": help})
    return dataclasses.field(default_factory=schema, metadata={"help": help})


def sections(schema: type, *, help: str) -> Any:
    """A dataclass field that holds any number of another dataclass, as a tuple; none by default.

    An entry that is mere text is the setting `path` of one.
    """
    return dataclasses.field(default=(), metadata={"help": help, "sections": schema})


def component(registry: str, default: str | tuple[str, ...], *, help: str) -> Any:
    """A dataclass field of type `Component` (or `tuple[Component, ...]`) whose schema comes from a registry.

    Args:
        registry: field of `hp_trainer.plugins.Registries`.
        default: name (or names) taken where the configuration gives none.
    """
    return dataclasses.field(metadata={"help": help, "registry": registry, "default_name": default})
