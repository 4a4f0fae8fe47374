"""`shard_placement_fn`: any dimension, any sizes, a mesh for one parameter."""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import Case, build, full_grads, full_value, mesh_of, micro_loss, train_reference

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.distribute_module import place_parameter
from hp_dtensor.spec.placements import RaggedShard, Replicate, Shard
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import FullyShardError, ShardPlacementResult, fully_shard, summon_full_params

SHAPE = (2, 3, 5)


class One(nn.Module):
    def __init__(self, shape=SHAPE):
        super().__init__()
        self.weight = self.parameter(shape)

    def forward(self, x):
        return self.ops.mul(self.weight, x)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_values_and_gradients_of_any_dimension(hp_platform, dim, num_ranks):
    """Sizes that are not divisible by the number of ranks, and ranks with empty shards."""
    values = numpy.arange(numpy.prod(SHAPE), dtype=numpy.float32).reshape(SHAPE)

    def rank():
        me = current_world(hp_platform).rank
        with nn.building(hp_platform):
            model = One()
        hp_platform.copy_(model.weight, hp_platform.from_numpy(values))
        fully_shard(model, mesh_of(hp_platform, num_ranks), shard_placement_fn=lambda p: Shard(dim))
        ragged = model.weight.placements[-1]
        assert isinstance(ragged, RaggedShard)
        assert ragged.dim == dim % 3
        assert sum(ragged.units) == SHAPE[dim]
        numpy.testing.assert_array_equal(full_value(hp_platform, model.weight), values)
        x = hp_platform.from_numpy(values * (me + 1))
        for count in (1, 2):
            hp_platform.backward(hp_platform.ops.sum(model(x)))
            expected = values * numpy.mean(range(1, num_ranks + 1)) * count
            numpy.testing.assert_array_equal(full_value(hp_platform, hp_platform.get_grad(model.weight)), expected)
        with summon_full_params(model):
            numpy.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.detach(model.weight)), values)
        local = hp_platform.unwrap(model.weight)
        hp_platform.copy_(local, hp_platform.from_numpy(hp_platform.to_numpy(local) * numpy.float32(2)))
        numpy.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.detach(model(x))), 2 * values**2 * (me + 1))

    run_ranks(rank, num_ranks, hp_platform)


def test_a_dimension_that_tensor_parallelism_has_sharded_already(hp_platform):
    values = numpy.arange(7 * 5, dtype=numpy.float32).reshape(5, 7)

    def rank():
        mesh = init_device_mesh(hp_platform.device_types[0], (2, 2), mesh_dim_names=("dp", "tp"), platform=hp_platform)
        with nn.building(hp_platform):
            model = One((5, 7))
        hp_platform.copy_(model.weight, hp_platform.from_numpy(values))
        place_parameter(model, "weight", mesh["tp"], [Shard(1)])
        fully_shard(model, mesh["dp"], shard_placement_fn=lambda p: Shard(1))
        assert [p.dim for p in model.weight.placements] == [1, 1]
        numpy.testing.assert_array_equal(full_value(hp_platform, model.weight), values)

    run_ranks(rank, 4, hp_platform)


def test_shards_of_a_later_dimension_are_gathered_without_a_copy(hp_platform, monkeypatch):
    """The parameter in computation is a view of the gathered buffer itself, the shard in the buffer that is sent."""
    seen = {}
    gather = ProcessGroup.all_gather_into

    def watched(self, output, x, async_op=False):
        seen[self.rank] = hp_platform.unwrap(x).data_ptr(), hp_platform.unwrap(output).data_ptr()
        return gather(self, output, x, async_op)

    monkeypatch.setattr(ProcessGroup, "all_gather_into", watched)

    def rank():
        with nn.building(hp_platform):
            model = One((6, 8))
        fully_shard(model, mesh_of(hp_platform, 2), shard_placement_fn=lambda p: Shard(1))
        shard = hp_platform.unwrap(model.weight).data_ptr()
        model.unshard()
        full = model.weight.data_ptr()
        assert seen[current_world(hp_platform).rank] == (shard, full)
        assert tuple(model.weight.stride()) == (1, 6)
        model.reshard()

    run_ranks(rank, 2, hp_platform)


def test_a_mesh_for_one_parameter(hp_platform):
    """Some weights are sharded over pairs and replicated across them, the others over all four ranks."""
    case = Case((4,), steps=1, num_blocks=1)
    expected = train_reference(case).grads

    def rank():
        pairs = mesh_of(hp_platform, 2, 2)
        everybody = pairs.flatten("all")

        def choose(parameter):
            if len(parameter.shape) < 2:
                return None
            return ShardPlacementResult(Shard(1), pairs) if parameter.shape[0] == 11 else ShardPlacementResult()

        model = build(hp_platform, case)
        fully_shard(model, everybody, shard_placement_fn=choose)
        assert model.blocks[0].up.weight.placements[0] == Replicate()
        assert model.blocks[0].up.weight.device_mesh is pairs
        assert model.head.weight.device_mesh is everybody
        loss = micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 0, 0)
        hp_platform.backward(loss)
        for name, grad in full_grads(hp_platform, model).items():
            if expected[name] is not None:
                numpy.testing.assert_allclose(grad, expected[name], rtol=2e-5, atol=2e-6, err_msg=name)

    run_ranks(rank, 4, hp_platform)


class Experts(nn.Module):
    """The experts of a layer on this rank, and a weight that all ranks share."""

    def __init__(self, numbers):
        super().__init__()
        self.shared = self.parameter((4,))
        for number in numbers:
            setattr(self, f"expert{number}", self.parameter((4,)))
        self.numbers = numbers

    def forward(self, x):
        for number in self.numbers:
            x = self.ops.add(x, getattr(self, f"expert{number}"))
        return self.ops.mul(self.shared, x)


def test_ranks_beyond_the_mesh_of_a_parameter_may_have_others(hp_platform):
    """Here other experts, and more of them."""

    def rank():
        both = init_device_mesh(hp_platform.device_types[0], (2, 2), mesh_dim_names=("ep", "edp"), platform=hp_platform)
        with nn.building(hp_platform):
            model = Experts([0] if both.get_local_rank("ep") == 0 else [1, 2])
        for _, parameter in hp_platform.named_parameters(model):
            hp_platform.copy_(parameter, hp_platform.ops.ones((4,), hp_platform.dtype("float32")))
        place = {id(parameter): both["edp"] for name, parameter in hp_platform.named_parameters(model) if "exp" in name}
        fully_shard(
            model, both.flatten("all"), shard_placement_fn=lambda p: ShardPlacementResult(mesh=place.get(id(p)))
        )
        x = hp_platform.ops.ones((4,), hp_platform.dtype("float32"))
        hp_platform.backward(hp_platform.ops.sum(model(x)))
        grads = full_grads(hp_platform, model)
        for number in model.numbers:
            numpy.testing.assert_array_equal(grads[f"expert{number}"], numpy.ones(4))
        numpy.testing.assert_array_equal(grads["shared"], numpy.full(4, (2 + 2 + 3 + 3) / 4))

    run_ranks(rank, 4, hp_platform)


@pytest.mark.parametrize("rank_differs", ["edp", "all"])
def test_ranks_that_share_a_parameter_must_have_it_alike(hp_platform, rank_differs):
    def rank():
        both = init_device_mesh(hp_platform.device_types[0], (2, 2), mesh_dim_names=("ep", "edp"), platform=hp_platform)
        with nn.building(hp_platform):
            model = One((4 + (current_world(hp_platform).rank == 1), 2))
        own = both["edp"] if rank_differs == "edp" else None
        fully_shard(model, both.flatten("all"), shard_placement_fn=lambda p: ShardPlacementResult(mesh=own))

    with pytest.raises(LaunchError, match=r"RankMismatchError: fully_shard\(One\): ranks differ: .*weight \[5, 2\]"):
        run_ranks(rank, 4, hp_platform)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (Replicate(), r"weight: shard_placement_fn: expected Shard\(dim\), a ShardPlacementResult or None, got"),
        (Shard(3), r"weight: shard_placement_fn: Shard\(.*3\) shards a dimension that a parameter \[2, 3, 5\] lacks"),
        (ShardPlacementResult(mesh="cpu"), "weight: shard_placement_fn: mesh: expected a DeviceMesh, got str"),
    ],
)
def test_placements_that_are_none(hp_platform, chosen, message):
    with nn.building(hp_platform):
        model = One()
    with pytest.raises(FullyShardError, match=message):
        fully_shard(model, mesh_of(hp_platform, 1), shard_placement_fn=lambda p: chosen)
