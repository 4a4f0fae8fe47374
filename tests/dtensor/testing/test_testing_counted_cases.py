"""The counts of a proof's cases, which tests/conftest.py shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

COUNTING = """
import pytest

@pytest.mark.parametrize("number", [3, 1000])
def test_counting(count_cases, hp_share, number):
    assert (hp_share.number, hp_share.count) == (2, 4)
    count_cases("things", number, 1)
    count_cases("others", 1)
"""


def test_counts_are_summed_by_label(tmp_path):
    shutil.copy(Path(__file__).parents[2] / "conftest.py", tmp_path)
    (tmp_path / "test_counting.py").write_text(COUNTING)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--hp-share", "2/4", "test_counting.py"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert "cases of the proofs, share 2/4" in shown
    assert "things: 1,003 right, 2 refused as declared\n" in shown
    assert "others: 2 right\n" in shown
    assert "test_counting[3] 3 right, 1 refused as declared" in shown
