"""Collectives that run as late as allowed: in `wait`."""

from __future__ import annotations

import functools

import numpy
import pytest
from fsdp_training import Case, build, full_grads, mesh_of, micro_loss, train_reference

from hp_dtensor.comm.world import current_world
from hp_dtensor.spec.placements import Shard
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import Communication, ShardPlacementResult, fully_shard

# float32: sums of a few hundred products in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def assert_grads(platform, model, expected):
    for name, grad in full_grads(platform, model).items():
        if expected[name] is not None:
            numpy.testing.assert_allclose(grad, expected[name], **CLOSE, err_msg=name)


class Late(Communication):
    """Runs every collective in `wait`."""

    def all_gather(self, output, shard, group):
        return _AtWait(functools.partial(super().all_gather, output, shard, group))

    def reduce_scatter(self, output, gradients, group):
        return _AtWait(functools.partial(super().reduce_scatter, output, gradients, group))

    def all_reduce(self, shard, group):
        return _AtWait(functools.partial(super().all_reduce, shard, group))


class _AtWait:
    def __init__(self, collective):
        self.collective = collective

    def wait(self):
        collective, self.collective = self.collective, None
        if collective is not None:
            collective().wait()


@pytest.mark.parametrize("stage", [2, 3])
def test_no_buffer_is_reused_while_a_collective_runs(hp_platform, stage):
    """pytorch#140044, #180900: the all-reduce of HSDP read a buffer that the next reduce-scatter wrote."""
    case = Case((2, 2), num_blocks=4, steps=1)
    expected = train_reference(case).grads

    def rank():
        model = build(hp_platform, case)
        mesh = mesh_of(hp_platform, 2, 2)
        for each in (*model.blocks, model):
            fully_shard(each, mesh, zero_stage=stage, communication=Late(hp_platform))
        hp_platform.backward(micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 0, 0))
        assert_grads(hp_platform, model, expected)

    run_ranks(rank, 4, hp_platform)


def test_a_mesh_for_one_parameter_goes_with_a_communication_of_ones_own(hp_platform):
    """torch refuses custom collectives if shard_placement_fn returns meshes."""
    case = Case((4,), num_blocks=1, steps=1)
    expected = train_reference(case).grads

    def rank():
        pairs = mesh_of(hp_platform, 2, 2)
        model = build(hp_platform, case)

        def choose(parameter):
            return ShardPlacementResult(Shard(0), pairs) if parameter.shape[0] == 11 else None

        fully_shard(model, pairs.flatten("all"), shard_placement_fn=choose, communication=Late(hp_platform))
        hp_platform.backward(micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 0, 0))
        assert_grads(hp_platform, model, expected)

    run_ranks(rank, 4, hp_platform)
