"""Runs whose model is split into pipeline stages, and the runs of one rank that they are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_runs import Lab, events, losses, newest, tensors

# float32 sums in another order, carried through AdamW steps.
CLOSE = {"rtol": 3e-5, "atol": 0}

# A pairwise sample of schedules, other axes and settings.
CASES = {
    "1f1b": ({"pp": 2}, {}),
    "gpipe, tied": ({"pp": 2}, {"schedule": "gpipe", "tied": True, "micro": 4}),
    "interleaved, sharded, tied": ({"pp": 2, "dp_shard": 2}, {"schedule": "interleaved_1f1b", "tied": True}),
    "h1, tensor parallel": ({"pp": 2, "tp": 2}, {"schedule": "zero_bubble_h1", "recompute": True}),
    "v, experts": ({"pp": 2, "dp_shard": 2, "ep": 2}, {"schedule": "zero_bubble_v", "tied": True, "experts": 4}),
    "dualpipe, dense": ({"pp": 2, "dp_replicate": 2}, {"schedule": "dualpipe_v", "clip": None}),
    "interleaved zero bubble, recomputed": (
        {"pp": 2, "dp_shard": 2},
        {"schedule": "interleaved_zero_bubble", "recompute": True, "experts": 4},
    ),
    "four stages, listed": ({"pp": 4}, {"layers": "[1,0,2,1]", "micro": 2, "tied": True, "experts": 4}),
    "everything": (
        {"pp": 2, "dp_replicate": 2, "tp": 2, "ep": 2, "etp": 1},
        {"experts": 4, "schedule": "interleaved_1f1b"},
    ),
    "context parallel": ({"pp": 2, "cp": 2, "dp_shard": 1}, {"schedule": "zero_bubble_h1", "tied": True}),
    "gathered for each use": (
        {"pp": 2, "dp_shard": 2, "reshard_after_forward": True},
        {"schedule": "interleaved_1f1b", "tied": True, "experts": 4},
    ),
    "gathered and reduced for each use": (
        {"pp": 2, "dp_shard": 2, "dp_replicate": 2, "reduce_gradients": "micro_batch"},
        {"tied": True, "recompute": True},
    ),
    "reduced for each use, left unsharded after forward": (
        {"pp": 2, "dp_shard": 2, "reshard_after_forward": False, "reduce_gradients": "micro_batch"},
        {"schedule": "gpipe", "experts": 4},
    ),
    "peer experts": ({"pp": 2, "ep": 2, "tp": 2, "dp_shard": 1, "expert_mesh": "peer"}, {"experts": 4, "tied": True}),
}


def settings_of(
    *,
    tied: bool = False,
    experts: int | None = None,
    recompute: bool = False,
    clip: float | None = 0.5,
    micro: int = 2,
    steps: int = 4,
    layers_in_all: int = 4,
    **pipeline: Any,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a run of one rank, and those of the same run in stages."""
    model: dict[str, Any] = {
        "model__num_hidden_layers": layers_in_all,
        "model__tie_word_embeddings": tied,
        "model__num_experts": experts,
        "training__recompute": "full" if recompute else "none",
        "training__clip_norm": clip,
        "training__steps": steps,
        "training__eval_interval": steps,
        "checkpoint__interval": steps,
    }
    if experts is None:
        model |= {"model__num_dense_layers": layers_in_all, "model__num_shared_experts": 0}
    staged = {f"pipeline__{name}": value for name, value in pipeline.items()}
    return model, {**model, "training__micro_batch_size": micro, **staged}


def num_ranks(degrees: dict[str, Any]) -> int:
    names = {"pp", "dp_shard", "dp_replicate", "cp", "tp"} | ({"ep"} if "expert_mesh" in degrees else set())
    return int(np.prod([value for name, value in degrees.items() if name in names]))


def check(lab: Lab, degrees: dict[str, Any], case: dict[str, Any]) -> None:
    """Compare losses, evaluation, norms, weights, metrics and the names in checkpoints with one rank's."""
    plain, staged = settings_of(**case)
    expected = lab.run("one", **plain)
    run = lab.run("staged", degrees, num_ranks(degrees), **staged)
    np.testing.assert_allclose(losses(run), losses(expected), **CLOSE)
    for kind, value in (("evaluation", "loss"), ("step", "gradient_norm")):
        got, wanted = ([event[value] for event in events(r, kind)] for r in (run, expected))
        np.testing.assert_allclose(got, wanted, rtol=2e-4)
    found = tensors(run, ["model."])
    for key, value in tensors(expected, ["model."]).items():
        np.testing.assert_allclose(found[key], value, rtol=2e-3, atol=2e-5, err_msg=key)
    first, reference = (next(iter(events(r, "start"))) for r in (run, expected))
    assert first["num_parameters"] == reference["num_parameters"]
    assert newest(run).index.tensors.keys() == newest(expected).index.tensors.keys()
    if case.get("experts"):
        got, wanted = ([event["metrics"] for event in events(r, "step")] for r in (run, expected))
        # One rank sends nothing.
        got[0]["expert_bytes_sent"] = wanted[0]["expert_bytes_sent"]
        assert got[0] == pytest.approx(wanted[0])
