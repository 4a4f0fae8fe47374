"""None of thousands of broken configurations reaches the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_configurations import broken_configurations, slips


def test_no_broken_configuration_reaches_the_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch):
    # Values such as `2.5` are good names of folders, which trials leave where they are started.
    monkeypatch.chdir(folder)
    every = list(broken_configurations())
    assert len(every) > 3000
    found = {f"--{path}={value}": slip for path, value in every if (slip := slips(folder, path, value)) is not None}
    assert found == {}
