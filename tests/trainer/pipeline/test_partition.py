"""Seconds of layers: the more expensive one has more, all ranks have the same, and nothing stays behind."""

from __future__ import annotations

import numpy as np
import pytest

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline import measured_costs, partition


class Pair(nn.Module):
    """Returns what it makes of its input, and integers that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *ids):
        return self.linear(x), *ids


def layers_of(platform, number=3):
    with nn.building(platform):
        layers = [Pair() for _ in range(number)]
    for layer in layers:
        init_parameters(layer, lambda name, shape: Normal(0.5), seed=0)
    return layers


def inputs(platform):
    return platform.from_numpy(np.ones((2, 4), np.float32)), platform.from_numpy(np.arange(2))


def test_the_least_of_some_rounds_after_one_that_warms_up(hp_platform, monkeypatch):
    """A clock of our own: rounds of two layers take 9 and 9, then 3 and 5, then 4 and 2 seconds."""
    ticks = iter(np.cumsum([0, 9, 0, 9, 0, 3, 0, 5, 0, 4, 0, 2]).tolist())
    monkeypatch.setattr(partition.time, "perf_counter", lambda: next(ticks))
    assert measured_costs(layers_of(hp_platform, 2), *inputs(hp_platform), rounds=2) == [3, 2]


def test_gradients_are_left_as_they_were(hp_platform):
    layers = layers_of(hp_platform)
    retained = hp_platform.from_numpy(np.full((4, 4), 7, np.float32))
    hp_platform.set_grad(layers[1].linear.weight, retained)
    assert all(cost > 0 for cost in measured_costs(layers, *inputs(hp_platform), rounds=1))
    assert hp_platform.get_grad(layers[0].linear.weight) is None
    np.testing.assert_array_equal(
        hp_platform.to_numpy(hp_platform.get_grad(layers[1].linear.weight)), np.full((4, 4), 7)
    )


def test_gradients_of_weights_that_layers_share_are_left_too(hp_platform):
    first, second = layers_of(hp_platform, 2)
    second.linear = first.linear
    hp_platform.set_grad(first.linear.weight, hp_platform.from_numpy(np.full((4, 4), 7, np.float32)))
    measured_costs([first, second], *inputs(hp_platform), rounds=1)
    found = hp_platform.get_grad(first.linear.weight)
    assert found is not None
    np.testing.assert_array_equal(hp_platform.to_numpy(found), np.full((4, 4), 7))


def test_a_rank_that_cannot_measure_fails_on_all(hp_platform, monkeypatch):
    """Those that wait for its times would wait for ever."""

    def seconds(*_):
        if current_world(hp_platform).rank == 1:
            raise ValueError("an odd layer")
        return [1.0, 2.0]

    monkeypatch.setattr(partition, "_seconds", seconds)

    def program():
        group = init_device_mesh("cpu", (2,), platform=hp_platform).get_group()
        with pytest.raises(PipelineError, match=r"measuring layers failed; rank 1: ValueError: an odd layer"):
            measured_costs(layers_of(hp_platform, 2), *inputs(hp_platform), group=group)
        return True

    assert run_ranks(program, 2, hp_platform) == [True, True]


def test_ranks_that_measure_other_layers_are_told(hp_platform):
    def program():
        mesh = init_device_mesh("cpu", (2,), platform=hp_platform)
        layers = layers_of(hp_platform, 2 + mesh.get_rank())
        with pytest.raises(PipelineError, match=r"expected the same layers, got \[2, 3\] of them"):
            measured_costs(layers, *inputs(hp_platform), group=mesh.get_group(), rounds=1)
        return True

    assert run_ranks(program, 2, hp_platform) == [True, True]


def test_ranks_that_measure_together_have_the_times_of_the_slowest(hp_platform, monkeypatch):
    own = [[1.0, 5.0], [2.0, 4.0]]
    monkeypatch.setattr(partition, "_seconds", lambda *_: own[current_world(hp_platform).rank])

    def program():
        group = init_device_mesh("cpu", (2,), platform=hp_platform).get_group()
        return measured_costs(layers_of(hp_platform, 2), *inputs(hp_platform), group=group)

    assert run_ranks(program, 2, hp_platform) == [[2.0, 5.0]] * 2


@pytest.mark.parametrize("arguments", [{"rounds": 0}, {"number": 0}])
def test_nothing_to_measure_is_refused(hp_platform, arguments):
    rounds, number = arguments.get("rounds", 1), arguments.get("number", 1)
    with pytest.raises(PipelineError, match=f"expected layers and rounds, got {number} and {rounds}"):
        measured_costs(layers_of(hp_platform, number), *inputs(hp_platform), rounds=rounds)
