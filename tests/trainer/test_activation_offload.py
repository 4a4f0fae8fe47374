"""Offload of activations changes where they wait, and nothing that is computed."""

from __future__ import annotations

import numpy as np
import pytest
from training_runs import FOUR_RANKS, losses, tensors

from hp_dtensor.parallel import offload

SETTINGS = {"training__steps": 3, "model__num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("degrees", "world_size", "more"),
    [
        ({"dp_shard": 2}, 2, {"training__micro_batch_size": 2}),
        (FOUR_RANKS["folded"], 4, {"training__recompute": "selective"}),
        ({"pp": 2}, 2, {"training__micro_batch_size": 2, "training__recompute": "full"}),
    ],
)
def test_losses_and_weights_are_bitwise_the_same(lab, monkeypatch, degrees, world_size, more):
    moved = []
    fetch = offload._OffloadedStorage.fetch
    monkeypatch.setattr(offload._OffloadedStorage, "fetch", lambda self: (moved.append(self), fetch(self)))

    def numbers(flag):
        run = lab.run(
            f"{flag}", degrees, world_size, training__offload_activations=str(flag).lower(), **SETTINGS, **more
        )
        return losses(run), tensors(run)

    losses_kept, kept = numbers(False)
    assert not moved
    losses_here, here = numbers(True)
    assert moved
    assert losses_here == losses_kept
    assert here.keys() == kept.keys()
    assert all(np.array_equal(here[name], kept[name]) for name in kept)
