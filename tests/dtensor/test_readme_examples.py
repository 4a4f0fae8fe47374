"""The examples in the packages' READMEs run as they are, on the platform that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
NAMES = ("hp-dtensor", "hp-fsdp", "hp-platform-torch", "hp-platform-mindspore")


def _examples() -> list[tuple[Path, str]]:
    readmes = [PACKAGES / name / "README.md" for name in NAMES]
    blocks = [
        (readme, block)
        for readme in readmes
        for block in re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    ]
    return [(readme, block) for readme, block in blocks if "run_ranks(" in block]


EXAMPLES = _examples()


def test_there_are_examples() -> None:
    assert {readme.parent.name for readme, _ in EXAMPLES} == set(NAMES)
    assert len(EXAMPLES) >= 6


@pytest.mark.parametrize(
    ("readme", "example"), EXAMPLES, ids=[f"{readme.parent.name}-{i}" for i, (readme, _) in enumerate(EXAMPLES)]
)
def test_example(readme: Path, example: str) -> None:
    pytest.importorskip("mindspore" if '"mindspore"' in example else "torch")
    pytest.importorskip("hp_platform_mindspore" if '"mindspore"' in example else "hp_platform_torch")
    exec(compile(example, str(readme), "exec"), {"__name__": "example"})
