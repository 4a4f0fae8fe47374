"""None of thousands of broken configurations reaches the ranks."""

from __future__ import annotations

from pathlib import Path

from broken_configurations import broken_configurations, slips


def test_no_broken_configuration_reaches_the_ranks(folder: Path):
    every = list(broken_configurations())
    assert len(every) > 3000
    found = {f"--{path}={value}": slip for path, value in every if (slip := slips(folder, path, value)) is not None}
    assert found == {}
