"""The examples in hp-dtensor's README run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

README = Path(__file__).resolve().parents[2] / "packages" / "hp-dtensor" / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
EXAMPLES = [block for block in BLOCKS if "run_ranks(" in block]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda block: re.findall(r"def (\w+)", block)[0])
def test_example(example: str) -> None:
    exec(compile(example, str(README), "exec"), {"__name__": "example"})
