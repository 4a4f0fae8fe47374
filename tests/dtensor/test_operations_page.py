"""docs/operations.md says what the sharding rules say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_of_operations_is_current() -> None:
    check = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "operations_page.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (check.returncode, check.stdout + check.stderr) == (0, "")
