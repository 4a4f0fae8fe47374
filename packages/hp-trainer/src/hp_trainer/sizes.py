"""Sizes of memory as people write them: `20GiB`, `512MiB`, `1.5 GB`."""

from __future__ import annotations

import math
import re

UNITS = {
    **{"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
}
_WRITTEN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]+)\s*")
EXPECTED = "a size above 0 with its unit, such as 20GiB, 512MiB or 1.5GB"


def parse_size(text: str) -> int:
    """Return the bytes that a size stands for.

    Examples:
        >>> parse_size("1.5GiB") == 3 * 2**29
        True
    """
    written = _WRITTEN.fullmatch(text)
    unit = None if written is None else UNITS.get(written[2])
    size = 0.0 if unit is None or written is None else float(written[1]) * unit
    # Before `floor`, which fails for the infinity that hundreds of digits are as a float.
    if not 1 <= size < 2**63:
        raise ValueError(f"expected {EXPECTED}, got {text!r}")
    return math.floor(size)


def format_size(num_bytes: float) -> str:
    """Return bytes in the largest unit in which they are at least 1: `1.50 GiB`.

    Examples:
        >>> format_size(3 * 2**29), format_size(512)
        ('1.50 GiB', '512 B')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes >= UNITS[unit]:
            return f"{num_bytes / UNITS[unit]:.2f} {unit}"
    return f"{num_bytes:.0f} B"
