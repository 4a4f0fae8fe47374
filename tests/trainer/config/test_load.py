"""None of three hundred broken configurations reaches the ranks; proof_broken_configurations.py has thousands."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from broken_configurations import broken_configurations, slips


def test_no_broken_configuration_reaches_the_ranks(folder: Path, hp_platform, monkeypatch: pytest.MonkeyPatch):
    # Values such as `2.5` are good names of folders, which trials leave where they are started.
    monkeypatch.chdir(folder)
    if hp_platform.name != "torch":
        pytest.skip("what is checked is the same on every platform")
    every = list(broken_configurations())
    chosen = random.Random(15).sample(every, 300)
    found = {f"--{path}={value}": slip for path, value in chosen if (slip := slips(folder, path, value)) is not None}
    assert found == {}
