"""Profiles of chosen steps: a trace and tables of each rank, the numbers of the run as without."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from training_runs import losses

from hp_trainer.config import parse_config
from hp_trainer.exceptions import ConfigError
from hp_trainer.plugins import registries

SETTINGS = {"training__steps": 3, "checkpoint__interval": None}


def test_the_chosen_steps_are_profiled(lab) -> None:
    plain = lab.run("plain", **SETTINGS)
    run = lab.run("profiled", profile__first=2, profile__last=3, **SETTINGS)
    assert losses(run) == losses(plain)
    assert not plain.profile.exists()
    events = read_trace(run.profile)
    names = {str(event.get("name")).lower() for event in events}
    assert any("matmul" in name or "linear" in name or "mm" in name for name in names)
    tables = [path for path in run.profile.rglob("*") if path.is_file() and "trace" not in path.name]
    assert tables
    assert not list(run.profile.glob("rank0-*/*incomplete*"))


def read_trace(folder: Path) -> list[dict]:
    (trace,) = folder.glob("rank0-trace.json*")
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    found = json.loads(text)
    return found["traceEvents"] if isinstance(found, dict) else found


def test_a_run_that_ends_within_the_steps_keeps_their_profile(lab) -> None:
    run = lab.run("profiled", profile__first=3, profile__last=9, **SETTINGS)
    assert read_trace(run.profile)


@pytest.mark.parametrize("text", ["{last: 3}", "{first: 3, last: 2}", "{first: 0}"])
def test_steps_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"profile\.(last|first)"):
        parse_config(f"training: {{steps: 4}}\nprofile: {text}\n", registered=registries())
