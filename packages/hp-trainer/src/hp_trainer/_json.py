"""JSON that every reader takes: RFC 8259 has no NaN and no infinity, which Python's `json` writes as bare words."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_value(value: Any) -> Any:
    """Return a JSON value with text in place of numbers that are not finite: `nan`, `inf` or `-inf`.

    `float` reads the text back.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {key: strict_value(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_value(each) for each in value]
    return value


def strict_json(value: Any, indent: int | None = None) -> str:
    """Return the text of a JSON value, see `strict_value`."""
    return json.dumps(strict_value(value), indent=indent, allow_nan=False)
