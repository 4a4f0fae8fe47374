"""Atomic writes: files that are whole or absent."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` in one step; after a crash it holds the old text or the new one."""
    temporary = path.with_name(f"{path.name}.incomplete-{secrets.token_hex(4)}")
    try:
        with temporary.open("w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
