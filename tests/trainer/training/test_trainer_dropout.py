"""Training with dropout in attention is that of one rank in every layout, and goes on as if it had not stopped."""

from __future__ import annotations

import numpy as np
import pytest
from test_trainer import assert_same_losses
from training_runs import losses, tensors

from hp_trainer.exceptions import TrainingError

DROPOUT = {"model__attention_dropout": 0.3, "model__num_attention_heads": 4}
LAYOUTS = {
    "ring, sharded": ({"dp_shard": 2, "cp": 2, "cp_method": "ring", "ep": 2}, 4, {}),
    "heads and tensor parallel, recomputed": (
        {"cp": 2, "cp_method": "ulysses", "tp": 2, "etp": 1, "ep": 2},
        4,
        {"training__recompute": "full"},
    ),
    "stages, replicated": ({"pp": 2, "dp_replicate": 2}, 4, {"pipeline__schedule": "zero_bubble_h1"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_drops_what_one_rank_drops(lab, name):
    degrees, ranks, others = LAYOUTS[name]
    if lab.platform.name != "torch":
        if "ring" not in name:
            pytest.skip("all layouts on torch, one elsewhere")
        degrees, ranks = {"cp": 2, "cp_method": "ring", "dp_shard": 1}, 2
    settings = {"training__steps": 2} | DROPOUT
    expected = lab.reference("one", **settings)
    run = lab.run("shared", degrees, ranks, training__micro_batch_size=2, **settings, **others)
    assert_same_losses(run, expected)


def test_a_resumed_run_drops_as_one_that_did_not_stop(lab):
    if lab.platform.name != "torch":
        pytest.skip("numbers of rows are arithmetic on the host")
    settings = {"training__steps": 4, "checkpoint__interval": 2} | DROPOUT
    full_value = lab.run("full", **settings)
    part = lab.resume(lab.interrupted_copy(full_value, "part", step=2), **settings)
    assert losses(part) == losses(full_value)
    for key, value in tensors(full_value, ["model."]).items():
        np.testing.assert_array_equal(tensors(part, ["model."])[key], value)
    settings["model__attention_dropout"] = 0
    assert losses(lab.run("without", **settings))[0] != losses(full_value)[0]


def test_rows_without_numbers_are_refused(lab):
    from hp_trainer.models.decoder import DecoderConfig, build_decoder

    model = build_decoder(DecoderConfig(num_hidden_layers=1, attention_dropout=0.5), lab.platform)
    ids = lab.platform.from_numpy(np.zeros((1, 4), np.int64))
    with pytest.raises(TrainingError, match=r"attention_dropout = 0.5: expected rows, the index of each row"):
        model(ids)
    with lab.platform.no_grad():
        assert tuple(model(ids).shape) == (1, 4, 256)
