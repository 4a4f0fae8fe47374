"""Bits that flip without a sign are found: in a step that is computed twice, and in the weights of replicas."""

from __future__ import annotations

import pytest
from training_runs import FOUR_RANKS, events, losses, tensors

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing import run_ranks
from hp_trainer.exceptions import SilentCorruptionError
from hp_trainer.training import Trainer
from hp_trainer.training.health import odd_ranks

CHECKS = {"training__replay_interval": 2, "training__replica_check_interval": 1, "checkpoint__interval": None}


@pytest.mark.parametrize(("degrees", "size"), [({}, 1), (FOUR_RANKS["folded"], 4)], ids=["1 rank", "4 ranks"])
def test_the_checks_change_nothing(lab, degrees, size):
    plain = lab.run("plain", degrees, size, checkpoint__interval=None, training__steps=4)
    checked = lab.run("checked", degrees, size, **CHECKS, training__steps=4)
    assert losses(checked) == losses(plain)
    loads = [[event["metrics"] for event in events(run, "step")] for run in (plain, checked)]
    assert loads[0] == loads[1]
    first, second = tensors(plain), tensors(checked)
    assert all((first[name] == second[name]).all() for name in first)


def flip(platform, model, name_part: str, factor: float) -> None:
    """Change some bits of one element of a weight, as a fault of the memory does."""
    for name, parameter in platform.named_parameters(model):
        if name_part in name:
            local = platform.unwrap(parameter) if isinstance(parameter, DTensor) else parameter
            values = platform.to_numpy(platform.detach(local)).copy()
            values.reshape(-1)[0] *= factor
            with platform.no_grad():
                platform.copy_(local, platform.from_bits(values, local.dtype, platform.device_of(local)))
            return
    raise AssertionError(name_part)


def train_with_a_fault(run, platform, rank: int, where: str) -> None:
    """Train; on one rank a bit flips in the weights after the second step, or within the fourth."""
    trainer = Trainer(run, run.load_config().config, platform)
    is_faulty = current_world(platform).rank == rank
    accumulate, calls = trainer._step.accumulate_gradients, []

    def faulty(batch):
        calls.append(None)
        # Calls of steps 1, 2, 2 again, 3, 4, 4 again.
        if is_faulty and len(calls) == (4 if where == "weights" else 6):
            flip(platform, trainer.setup.model, "norm", 1 + 2.0**-20 if where == "weights" else 1.5)
        return accumulate(batch)

    trainer._step.accumulate_gradients = faulty
    trainer.run()


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("weights", r"after step 3 the weights of rank 2 differ from its replicas"),
        ("step", r"step 4 computed twice is not the same: .*rank 2 in the loss"),
    ],
)
def test_the_rank_is_named(lab, where, told):
    run = lab.start("run", {"dp_replicate": 4}, **CHECKS, training__steps=6)
    with pytest.raises((LaunchError, SilentCorruptionError), match=told):
        run_ranks(train_with_a_fault, 4, lab.platform, run, lab.platform, 2, where)


def test_of_replicas_the_minority_is_odd():
    assert odd_ranks([{"a": 1}, {"a": 1}, {"a": 2}]) == [2]
    assert odd_ranks([{"a": 1, "b": 5}, {"a": 1, "b": 6}, {"a": 1, "b": 5}, {"c": 9}]) == [1]
    assert odd_ranks([{"a": 1}, {"a": 2}]) == [0, 1]
    assert odd_ranks([{"a": 1}, {"b": 2}]) == []
