"""Temporary full parameters, and one after the other."""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import VOCABULARY, Case, build, full_value, micro_loss, shard, shard_last_dim

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    FSDPStateError,
    MixedPrecisionPolicy,
    fully_shard,
    summon_full_params,
)


def _sharded(platform, size=2, **options):
    case = Case((size,), num_blocks=1, tied=True, **options)
    mesh = init_device_mesh(platform.device_types[0], (size,), mesh_dim_names=("shard",), platform=platform)
    return shard(build(platform, case), mesh, case)


def _host(platform, x):
    """A copy of a plain tensor, or of a DTensor's shard."""
    return platform.to_numpy(platform.ops.clone(platform.detach(x))).copy()


def _everything(platform, model):
    return {name: full_value(platform, x) for name, x in platform.named_parameters(model)}


@pytest.mark.parametrize("options", [{}, {"zero_stage": 1, "threshold": 0.1}, {"shard_placement_fn": shard_last_dim}])
@pytest.mark.parametrize("size", [1, 3])
def test_whole_parameters_are_shown_and_what_is_written_counts(hp_platform, size, options):
    def rank():
        model = _sharded(hp_platform, size, policy={"param_dtype": "float16"}, options=options)
        before = _everything(hp_platform, model)
        objects = dict(hp_platform.named_parameters(model))
        with summon_full_params(model):
            shown = dict(hp_platform.named_parameters(model))
            assert shown.keys() == before.keys()
            assert model.head.weight is model.embed.weight
            for name, x in shown.items():
                assert not isinstance(x, DTensor)
                numpy.testing.assert_array_equal(_host(hp_platform, x), before[name])
                hp_platform.copy_(x, hp_platform.ops.add(hp_platform.detach(x), 1.0))
        assert all(x is objects[name] for name, x in hp_platform.named_parameters(model))
        for name, value in _everything(hp_platform, model).items():
            numpy.testing.assert_array_equal(value, before[name] + numpy.float32(1))
        with summon_full_params(model.blocks[0], writeback=False):
            hp_platform.copy_(model.blocks[0].scale, hp_platform.zeros((1,), hp_platform.dtype("float32")))
        numpy.testing.assert_array_equal(full_value(hp_platform, model.blocks[0].scale), before["blocks.0.scale"] + 1)
        assert numpy.isfinite(float(hp_platform.to_numpy(micro_loss(hp_platform, model, Case((size,)), 0, 0, 0))))

    run_ranks(rank, size, hp_platform)


def _write_and_fail(platform, model):
    with summon_full_params(model):
        platform.copy_(model.embed.weight, platform.zeros((VOCABULARY, 5), platform.dtype("float32")))
        with summon_full_params(model.blocks[0]):
            pass
        assert not isinstance(model.blocks[0].scale, DTensor)
        raise ArithmeticError("on purpose")


def test_blocks_nest_and_an_exception_leaves_the_shards_as_they_were(hp_platform):
    def rank():
        model = _sharded(hp_platform)
        before = _everything(hp_platform, model)
        with pytest.raises(ArithmeticError):
            _write_and_fail(hp_platform, model)
        for name, value in _everything(hp_platform, model).items():
            numpy.testing.assert_array_equal(value, before[name])
        with summon_full_params(model, recurse=False):
            assert isinstance(model.blocks[0].scale, DTensor)
            with summon_full_params(model):
                hp_platform.copy_(model.blocks[0].scale, hp_platform.ops.full((1,), 3.0, hp_platform.dtype("float32")))
            assert isinstance(model.blocks[0].scale, DTensor)
            assert not isinstance(model.embed.weight, DTensor)
        numpy.testing.assert_array_equal(full_value(hp_platform, model.blocks[0].scale), 3.0)

    run_ranks(rank, 2, hp_platform)


def test_parameters_kept_unsharded_follow_what_is_written(hp_platform):
    def rank():
        model = _sharded(hp_platform, reshard_after_forward=False)
        micro_loss(hp_platform, model, Case((2,)), 0, 0, 0)
        with summon_full_params(model):
            hp_platform.copy_(model.blocks[0].scale, hp_platform.ops.full((1,), 3.0, hp_platform.dtype("float32")))
        model.blocks[0].unshard()
        assert _host(hp_platform, model.blocks[0].scale) == 3.0
        model.blocks[0].reshard()

    run_ranks(rank, 2, hp_platform)


def test_use_inside_and_use_of_groups_in_use_are_refused(hp_platform):
    def rank():
        model = _sharded(hp_platform)
        with summon_full_params(model):
            for forbidden in (model.unshard, lambda: micro_loss(hp_platform, model, Case((2,)), 0, 0, 0)):
                with pytest.raises(FSDPStateError, match="refused inside summon_full_params"):
                    forbidden()
            with pytest.raises(FSDPStateError, match="inside summon_full_params"):
                model.load_state_dict({})
        model.blocks[0].unshard()
        with (
            pytest.raises(FSDPStateError, match=r"groups blocks.0 \(Block\) hold unsharded"),
            summon_full_params(model),
        ):
            pass
        model.blocks[0].reshard()
        mine = model if current_world(hp_platform).rank else model.blocks[0]
        with pytest.raises(FSDPStateError, match="ranks pass different arguments"), summon_full_params(mine):
            pass

    run_ranks(rank, 2, hp_platform)


def test_a_rank_that_stays_away_is_found_out(hp_platform):
    def rank():
        model = _sharded(hp_platform)
        if current_world(hp_platform).rank == 0:
            with summon_full_params(model):
                pass

    with pytest.raises((LaunchError, ValueError), match="rank"):
        run_ranks(rank, 2, hp_platform)


def test_a_tensor_parallel_parameter_is_whole_on_its_data_parallel_axes(hp_platform):
    def rank():
        case = Case((2,), num_blocks=1)
        mesh = init_device_mesh(
            hp_platform.device_types[0], (2, 2), mesh_dim_names=("shard", "tp"), platform=hp_platform
        )
        model = build(hp_platform, case)
        parallelize_module(model, mesh["tp"], {"blocks.*.up": ColwiseParallel()})
        model = shard(model, mesh["shard"], case)
        expected = full_value(hp_platform, model.blocks[0].up.weight)
        with summon_full_params(model):
            weight = model.blocks[0].up.weight
            assert weight.device_mesh.mesh_dim_names == ("tp",)
            numpy.testing.assert_array_equal(full_value(hp_platform, weight), expected)

    run_ranks(rank, 4, hp_platform)


def test_mixed_precision_shows_the_parameters_own_dtype(hp_platform):
    def rank():
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
        model = build(hp_platform, Case((2,), num_blocks=1))
        fully_shard(model, mesh, mp_policy=MixedPrecisionPolicy(param_dtype="float16"))
        with summon_full_params(model):
            assert model.embed.weight.dtype == hp_platform.dtype("float32")

    run_ranks(rank, 2, hp_platform)
