"""The notebook-like scripts of `examples/notebooks` run on every platform, one for each component package."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.py"))


def test_every_component_has_one():
    assert [path.stem for path in NOTEBOOKS] == ["dtensor_alone", "fsdp_alone", "moe_alone", "trainer_alone"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, hp_platform, capsys):
    runpy.run_path(str(path))
    assert capsys.readouterr().out.strip()
