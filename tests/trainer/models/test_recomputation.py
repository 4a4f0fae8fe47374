"""Activation checkpointing changes what is saved, and nothing that is computed."""

from __future__ import annotations

import numpy as np
import pytest
from training_runs import FOUR_RANKS, events, losses, skip_unless_torch_or, tensors, train_rank

from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.parallel import offload
from hp_dtensor.testing import run_ranks

MEASURED = ("seconds", "tokens_per_second", "peak_memory_gib", "model_flops_per_second", "utilization")
SETTINGS = {"training__steps": 2, "checkpoint__interval": None, "model__num_experts_per_tok": 2}
# Backward in two parts, in which a block is computed again in the first one; attention and router draw numbers.
STAGES_THAT_DRAW = {
    "pipeline__schedule": "zero_bubble_h1",
    "training__micro_batch_size": 2,
    "model__attention_dropout": 0.3,
    "model__router_jitter": 0.2,
}


@pytest.mark.parametrize(
    ("degrees", "world_size", "more"),
    [
        ({}, 1, {"training__micro_batch_size": 4, "training__eval_interval": 2}),
        (FOUR_RANKS["folded"], 4, {"training__micro_batch_size": 2, "training__dtype": "float16"}),
        (FOUR_RANKS["experts sharded"] | {"reshard_after_forward": False}, 4, {}),
        ({"pp": 2, "cp": 2, "cp_method": "ring", "ep": 2}, 4, STAGES_THAT_DRAW),
    ],
)
def test_every_number_of_a_run_is_the_same(lab, degrees, world_size, more):
    skip_unless_torch_or(lab.platform, world_size == 1 or more is STAGES_THAT_DRAW)

    def numbers(name, flag):
        run = lab.run(name, degrees, world_size, training__recompute="full" if flag else "none", **SETTINGS, **more)
        message = [{k: v for k, v in event.items() if k not in MEASURED} for event in events(run, "step")]
        return message, [event["loss"] for event in events(run, "evaluation")]

    # Loads of the experts, counted once, are among the numbers.
    retained, again = numbers("saved", False), numbers("again", True)
    assert again == retained
    assert retained[0][-1]["metrics"]["max_load_violation"] > 0


def test_routing_is_not_agreed_on_again(lab):
    def all_to_alls(flag):
        run = lab.start(f"{flag}", {"dp_shard": 2, "ep": 2}, training__recompute="full" if flag else "none", **SETTINGS)

        def rank():
            with record_collectives() as log:
                train_rank(run, lab.platform)
            return log.count("all_to_all")

        return run_ranks(rank, 2, lab.platform)[0]

    # Forward asks for sizes and sends rows, choices and results; backward sends three back; forward again asks nothing.
    assert all_to_alls(True) * (4 + 3) == all_to_alls(False) * (4 + 3 + 3) > 0


OFFLOAD_SETTINGS = {"training__steps": 3, "model__num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("degrees", "world_size", "more"),
    [
        ({"dp_shard": 2}, 2, {"training__micro_batch_size": 2}),
        (FOUR_RANKS["folded"], 4, {"training__recompute": "selective"}),
        ({"pp": 2}, 2, {"training__micro_batch_size": 2, "training__recompute": "full"}),
    ],
)
def test_losses_and_weights_are_bitwise_the_same(lab, monkeypatch, degrees, world_size, more):
    skip_unless_torch_or(lab.platform, "pp" in degrees)
    moved = []
    fetch = offload._OffloadedStorage.fetch
    monkeypatch.setattr(offload._OffloadedStorage, "fetch", lambda self: (moved.append(self), fetch(self)))

    def numbers(flag):
        run = lab.run(
            f"{flag}", degrees, world_size, training__offload_activations=str(flag).lower(), **OFFLOAD_SETTINGS, **more
        )
        return losses(run), tensors(run)

    retained_losses, retained = numbers(False)
    assert not moved
    losses_here, here = numbers(True)
    assert moved
    assert losses_here == retained_losses
    assert here.keys() == retained.keys()
    assert all(np.array_equal(here[name], retained[name]) for name in retained)
