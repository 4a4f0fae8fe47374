"""Pipelines of up to eight simulated ranks: every schedule beside every other axis, dense and expert models."""

from __future__ import annotations

import itertools

import pytest
from pipeline_runs import CASES, check

from hp_trainer.pipeline import schedule_names

BESIDE = [
    {"pp": 2},
    {"pp": 4, "dp_shard": 1},
    {"pp": 2, "dp_shard": 2},
    {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
    {"pp": 2, "tp": 2, "dp_shard": 1},
    {"pp": 2, "tp": 2, "dp_shard": 2},
    {"pp": 4, "tp": 2, "dp_shard": 1},
]
EXPERTS = [
    {"pp": 2, "dp_shard": 4, "ep": 2},
    {"pp": 2, "tp": 2, "dp_shard": 2, "ep": 2, "etp": 1},
    {"pp": 2, "tp": 2, "dp_shard": 2, "ep": 2, "etp": 2},
    {"pp": 2, "dp_shard": 2, "ep": 2, "expert_mesh": "peer"},
]
BUILT_IN = schedule_names()


@pytest.mark.parametrize("name", CASES)
def test_the_pairwise_sample(lab, name):
    check(lab, *CASES[name])


@pytest.mark.parametrize(("schedule", "degrees"), list(itertools.product(BUILT_IN, BESIDE)), ids=str)
@pytest.mark.parametrize("micro", [8, 2, 1])
def test_dense_models(lab, schedule, degrees, micro):
    share = 8 // (degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1))
    check(lab, degrees, {"schedule": schedule, "micro": min(micro, share), "tied": micro == 2, "layers_in_all": 8})


@pytest.mark.parametrize(("schedule", "degrees"), list(itertools.product(BUILT_IN, EXPERTS)), ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_expert_models(lab, schedule, degrees, recompute):
    check(lab, degrees, {"schedule": schedule, "micro": 1, "experts": 4, "recompute": recompute, "layers_in_all": 8})
