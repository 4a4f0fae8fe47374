"""A run whose model is cut into pipeline stages has the losses and weights of one rank, whatever runs beside."""

from __future__ import annotations

import numpy as np
import pytest
from training_runs import events, losses, newest, tensors

CLOSE = {"rtol": 3e-5, "atol": 0}

# A pairwise sample of schedules, other axes and settings; four layers unless a case says otherwise.
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
    "peer experts": ({"pp": 2, "ep": 2, "tp": 2, "dp_shard": 1, "expert_mesh": "peer"}, {"experts": 4, "tied": True}),
}


def settings_of(*, tied=False, experts=None, recompute=False, clip=0.5, micro=2, **pipeline):
    model = {
        "model__num_hidden_layers": 4,
        "model__tie_word_embeddings": tied,
        "model__num_experts": experts,
        "training__activation_checkpointing": recompute,
        "training__clip_norm": clip,
        "training__eval_interval": 3,
    }
    if experts is None:
        model |= {"model__num_dense_layers": 4, "model__num_shared_experts": 0}
    staged = {f"pipeline__{name}": value for name, value in pipeline.items()}
    return model, {**model, "training__micro_batch_size": micro, **staged}


@pytest.mark.parametrize("name", CASES)
def test_stages_train_as_one_rank(lab, name):
    degrees, case = CASES[name]
    plain, staged = settings_of(**case)
    size = int(np.prod([value for key, value in degrees.items() if key in ("pp", "dp_shard", "dp_replicate", "tp")]))
    size *= degrees["ep"] if "expert_mesh" in degrees else 1
    expected = lab.run("one", **plain)
    run = lab.run("staged", degrees, size, **staged)
    np.testing.assert_allclose(losses(run), losses(expected), **CLOSE)
    for kind, value in (("evaluation", "loss"), ("step", "gradient_norm")):
        got, wanted = ([event[value] for event in events(r, kind)] for r in (run, expected))
        np.testing.assert_allclose(got, wanted, rtol=2e-4)
    for key, value in tensors(expected, ["model."]).items():
        np.testing.assert_allclose(tensors(run, ["model."])[key], value, rtol=2e-3, atol=2e-5, err_msg=key)
    first, reference = (next(iter(events(r, "start"))) for r in (run, expected))
    assert first["num_parameters"] == reference["num_parameters"]
    assert newest(run).index.tensors.keys() == newest(expected).index.tensors.keys()
    if case.get("experts"):
        got, wanted = ([event["metrics"] for event in events(r, "step")] for r in (run, expected))
        assert got[0] == pytest.approx(wanted[0])
