"""All combinations of parallel axes up to eight simulated ranks train as one rank does, bit by bit the same each time.

Losses of 20 steps and weights after five are compared with one rank's: float32 sums in other orders, carried through
AdamW steps. Begin with `-k pairs`: a sample in which every two settings meet.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from training_runs import losses, newest, tensors

from hp_trainer.exceptions import ConfigError, ParallelDimsError
from hp_trainer.pipeline import schedule_names

CLOSE_LOSSES = {"rtol": 2e-4, "atol": 0}
CLOSE_WEIGHTS = {"rtol": 5e-3, "atol": 5e-5}
SAMPLES = 12

FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "replicas": {"1": {}, "2": {"dp_replicate": 2}},
    "shards": {"1": {"dp_shard": 1}, "2": {"dp_shard": 2}},
    "sequence": {
        "whole": {},
        "ring": {"cp": 2, "cp_method": "ring"},
        "gathered": {"cp": 2, "cp_method": "all_gather"},
        "heads": {"cp": 2, "cp_method": "ulysses"},
        "both": {"cp": 4, "ulysses_degree": 2, "cp_method": "ring"},
    },
    "tensor": {"1": {}, "2": {"tp": 2}},
    "stages": {"none": {}, **{name: {"pp": 2, "schedule": name} for name in sorted(schedule_names())}},
    "model": {
        "dense": {},
        "experts": {"experts": 4},
        "experts folded": {"experts": 4, "ep": 2, "etp": 1},
        "experts peer": {"experts": 4, "ep": 2, "expert_mesh": "peer"},
    },
    "accumulation": {"1": {"parts": 1}, "3": {"parts": 3}},
}
Choice = tuple[str, ...]


def settings_of(choice: Choice) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for values, name in zip(FACTORS.values(), choice, strict=True):
        found |= values[name]
    return found


def num_ranks(settings: dict[str, Any]) -> int:
    axes = ["dp_replicate", "dp_shard", "cp", "tp", "pp", *(["ep"] if "expert_mesh" in settings else [])]
    return math.prod(settings.get(axis, 1) for axis in axes)


def legal() -> list[Choice]:
    """Return the combinations of at most eight ranks; experts are folded into ranks that hold data or parts of it."""
    found = []
    for choice in itertools.product(*FACTORS.values()):
        settings = settings_of(choice)
        folded = settings.get("ep", 1) if "expert_mesh" not in settings else 1
        holders = settings.get("dp_shard", 1) * settings.get("cp", 1) * settings.get("tp", 1)
        if 1 < num_ranks(settings) <= 8 and holders % folded == 0:
            found.append(choice)
    return found


def pairs_of(choice: Choice) -> set[tuple[int, str, int, str]]:
    return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(choice), 2)}


def pairwise_sample(choices: list[Choice]) -> Iterator[Choice]:
    """Yield few of the combinations, such that two settings which meet in any of them meet in one of these."""
    shuffled = random.Random(0).sample(choices, len(choices))
    missing = set().union(*map(pairs_of, shuffled))
    while missing:
        best = max(shuffled, key=lambda choice: len(pairs_of(choice) & missing))
        missing -= pairs_of(best)
        yield best


ALL = legal()
PAIRS = list(pairwise_sample(ALL))
_expected: dict[tuple[str, bool, int], tuple[list[float], dict[str, np.ndarray]]] = {}


def ids_of(choice: Choice) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(FACTORS, choice, strict=True))


def outcome(lab, name: str, settings: dict[str, Any], steps: int = 20) -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the losses of all steps and the weights after the fifth."""
    degrees = dict(settings)
    experts, parts, schedule = degrees.pop("experts", None), degrees.pop("parts"), degrees.pop("schedule", None)
    share = SAMPLES // (degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1))
    options: dict[str, Any] = {
        "model__num_hidden_layers": 4,
        "model__num_attention_heads": 4,
        "model__num_experts": experts,
        "training__global_batch_size": SAMPLES,
        "training__micro_batch_size": share // parts,
        "training__steps": steps,
        "lr_schedule__kind": "constant",
        "checkpoint__interval": 5,
    }
    if experts is None:
        options |= {"model__num_dense_layers": 4, "model__num_shared_experts": 0}
    if schedule is not None:
        options["pipeline__schedule"] = schedule
    run = lab.run(name, degrees, num_ranks(degrees), **options)
    if steps == 20:
        for folder in run.checkpoints.iterdir():
            if folder.name != "step-00000005":
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()
    assert newest(run).folder.endswith("step-00000005")
    return losses(run), tensors(run, ["model."])


def check(lab, choice: Choice, repeats: bool = False) -> None:
    settings = settings_of(choice)
    key = (lab.platform.name, "experts" in settings, settings["parts"])
    if key not in _expected:
        one = {name: settings[name] for name in ("experts", "parts") if name in settings}
        _expected[key] = outcome(lab, "one", one | {"dp_shard": 1})
    try:
        found = outcome(lab, "shared", settings)
    except (ConfigError, ParallelDimsError) as refused:
        pytest.skip(str(refused))
    np.testing.assert_allclose(found[0], _expected[key][0], **CLOSE_LOSSES)
    for name, value in _expected[key][1].items():
        np.testing.assert_allclose(found[1][name], value, **CLOSE_WEIGHTS, err_msg=name)
    if repeats:
        again = outcome(lab, "again", settings, steps=5)
        assert again[0] == found[0][:5]
        for name, value in found[1].items():
            np.testing.assert_array_equal(again[1][name], value, err_msg=name)


@pytest.mark.parametrize("choice", PAIRS, ids=ids_of)
def test_pairs(lab, choice):
    check(lab, choice, repeats=True)


@pytest.mark.parametrize("choice", ALL, ids=ids_of)
def test_all(lab, choice):
    check(lab, choice)
