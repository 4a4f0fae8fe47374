from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _process_as_before(platform, monkeypatch):
    """`value_and_grad` leaves recording off, and rewriting cells leaves folders of MindSpore on the path."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = platform.rank_state()
    yield
    platform.set_rank_state(before)
