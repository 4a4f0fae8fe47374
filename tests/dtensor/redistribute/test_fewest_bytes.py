"""Redistributions need at most the bytes that torch's plans need: for every pair, and 0.6 of them in sum."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "redistribute_bytes.py"


@pytest.mark.skipif(os.environ.get("HP_PLATFORM") == "mindspore", reason="compares with torch")
def test_bytes_are_never_more_than_those_of_torch_and_of_a_search() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, str(BENCHMARK)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"pairs that need more:\n{done.stdout}{done.stderr}"
    rows = {row.split(" pairs:")[0].strip(): row for row in done.stdout.splitlines() if " pairs:" in row}
    assert [int(label.split()[-1]) for label in rows if label.startswith("mesh")] == [196, 196, 2744], "every pair"
    ratios = {name: float(ratio) for name, ratio in re.findall(r"([a-z ]+) \d+ \(([\d.]+)\)", rows["all"])}
    assert set(ratios) == {" ours", " torch cpu", " torch gpu", " torch gpu flattened", " search"}
    assert max(ratios[" torch cpu"], ratios[" torch gpu"], ratios[" torch gpu flattened"]) <= 0.6
