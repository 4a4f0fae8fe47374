"""Ranks that share sequences train, evaluate and write texts as one rank does."""

from __future__ import annotations

import numpy as np
import pytest
from test_trainer import PartlyTaken, assert_same_losses
from training_runs import events, skip_unless_torch_or

from hp_dtensor.testing import run_ranks
from hp_trainer.data import Rows, documents
from hp_trainer.evaluation import Sampler
from hp_trainer.training import Trainer


class Packed(PartlyTaken):
    """Samples of several documents each, whose lengths follow from the sample's index."""

    def read(self, indices):
        rows = super().read(indices)
        length = rows.ids.shape[1]
        positions = np.arange(length) % (indices[:, None] % 7 + 3)
        return Rows(rows.ids, rows.targets, positions)


# Evaluation, and lengths that ranks do not share evenly; the matrix of `test_trainer_combinations.py` has the layouts.
CASES = {
    "uneven, packed, few targets": ({"dp_shard": 2, "cp": 2, "cp_method": "ring", "ep": 2}, 15, Packed),
    "method chosen by length": ({"dp_replicate": 2, "cp": 2}, 14, None),
    "in stages": ({"pp": 2, "cp": 2, "cp_method": "ring", "dp_shard": 1}, 14, Packed),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_and_evaluates_as_one_rank(lab, monkeypatch, name):
    skip_unless_torch_or(lab.platform, name == "uneven, packed, few targets")
    degrees, length, samples = CASES[name]
    if samples is not None:
        monkeypatch.setattr(documents, "TokenSamples", samples)
    settings = {"training__steps": 3, "training__eval_interval": 3, "training__sequence_length": length}
    expected = lab.run("one", **settings)
    run = lab.run("shared", degrees, 4, training__micro_batch_size=2, **settings)
    assert_same_losses(run, expected)
    for kind, value in (("evaluation", "loss"), ("step", "gradient_norm")):
        got, wanted = ([event[value] for event in events(r, kind)] for r in (run, expected))
        np.testing.assert_allclose(got, wanted, rtol=1e-4)
    assert [event["tokens"] for event in events(run, "evaluation")] == [
        event["tokens"] for event in events(expected, "evaluation")
    ]


def test_ranks_that_share_sequences_write_the_same_text(lab):
    """Each of them sees the full text: positions are not given, so it is not sharded."""

    def write(run):
        trainer = Trainer(run, run.load_config().config, lab.platform)
        sampler = Sampler(trainer.config.generate, window=12)
        with lab.platform.no_grad():
            return sampler.extend(lab.platform, trainer.setup.model, [[1, 2, 3], [4]])

    settings = {"generate__temperature": 0, "generate__max_new_tokens": 5}
    (expected,) = run_ranks(write, 1, lab.platform, lab.start("one", **settings))
    found = run_ranks(write, 2, lab.platform, lab.start("two", {"cp": 2, "cp_method": "ring"}, **settings))
    assert found == [expected, expected]
