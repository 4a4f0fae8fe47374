"""One norm over every kind of layout in one model, and over stages that hold different modules."""

from __future__ import annotations

import math

import numpy
import pytest
from fsdp_training import Case, build, full_value, micro_loss, shard

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import LaunchError, RankMismatchError
from hp_dtensor.optim import clip_grad_norm_
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.distribute_module import place_parameter
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_dtensor.spec.placements import Shard
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import fully_shard


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = self.parameter((5, 3))

    def forward(self, x):
        return self.ops.mul(self.weight.to_local(), x)


def _norm(values, norm_type):
    return float(numpy.linalg.norm(numpy.concatenate([x.ravel() for x in values]).astype(numpy.float64), norm_type))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_fsdp_tensor_and_expert_parallel_replicated_frozen_and_unused_parameters(hp_platform, norm_type):
    """Each rank clips by the norm of the full gradients, each element counted once."""
    case = Case((2,), tp=2, num_blocks=1, frozen=("norm",), branch="beside")

    def rank():
        me = current_world(hp_platform).rank
        world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"), platform=hp_platform)
        model = build(hp_platform, case)
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel(use_local_output=True)}
        parallelize_module(model, world["tp"], plan)
        held = [model.blocks[0].out.weight, model.blocks[0].scale]
        fully_shard(model.blocks[0], world["shard"], replicate_params=held)
        fully_shard(model, world["shard"], ignored_params=[model.head.weight])
        with nn.building(hp_platform):
            experts = Experts()
        place_parameter(experts, "weight", world["tp"], [Shard(0)])  # the tp ranks as ep
        fully_shard(experts, world["shard"])
        loss = micro_loss(hp_platform, model, case, 0, 0, 0)  # the same data: the ignored weight has one gradient
        x = hp_platform.from_numpy(numpy.full((1, 3), 1.0 + me // 2, numpy.float32))
        hp_platform.backward(hp_platform.ops.add(loss, hp_platform.ops.sum(experts(x))))
        parameters = [p for module in (model, experts) for _, p in hp_platform.named_parameters(module)]
        grads = [hp_platform.get_grad(p) for p in parameters]
        before = [full_value(hp_platform, grad) for grad in grads if grad is not None]
        assert len(before) < len(grads)  # unused, or frozen
        with record_collectives() as log:
            norm = float(hp_platform.to_numpy(clip_grad_norm_(parameters, 0.25, norm_type)))
        assert [record.name for record in log.records] == ["all_reduce"]
        assert norm == pytest.approx(_norm(before, norm_type), rel=1e-5)
        after = [full_value(hp_platform, grad) for p in parameters if (grad := hp_platform.get_grad(p)) is not None]
        for old, new in zip(before, after, strict=True):
            numpy.testing.assert_allclose(new, old * min(1, 0.25 / norm), rtol=1e-4, atol=1e-7)

    run_ranks(rank, 4, hp_platform)


def test_gradients_of_several_dtypes_have_one_norm(hp_platform):
    def rank():
        with nn.building(hp_platform):
            model = nn.Module()
            for index, dtype in enumerate(("float64", "float32", "float16")):
                values = numpy.arange(5 + index).astype(dtype)
                setattr(model, dtype, hp_platform.Parameter(hp_platform.from_numpy(values)))
        fully_shard(model, init_device_mesh("cpu", (2,), platform=hp_platform))
        parameters = [p for _, p in hp_platform.named_parameters(model)]
        for parameter in parameters:
            hp_platform.set_grad(parameter, hp_platform.detach(parameter))
        before = [full_value(hp_platform, hp_platform.get_grad(p)) for p in parameters]
        norm = float(hp_platform.to_numpy(clip_grad_norm_(parameters, 1.0)))
        assert norm == pytest.approx(_norm(before, 2.0), rel=1e-6)
        for old, parameter in zip(before, parameters, strict=True):
            clipped = full_value(hp_platform, hp_platform.get_grad(parameter))
            assert clipped.dtype == old.dtype
            numpy.testing.assert_allclose(clipped, old / norm, rtol=1e-3)

    run_ranks(rank, 2, hp_platform)


def _stage(platform, sizes):
    """Return a linear map with gradients, sharded over the ranks of this stage, and its mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"), platform=platform)
    stage = mesh.get_local_rank("pp")
    with nn.building(platform):
        model = nn.Linear(3, sizes[stage], bias=True)
    fully_shard(model, mesh["shard"])
    platform.backward(platform.ops.sum(model(platform.from_numpy(numpy.full((1, 3), stage + 1.0, numpy.float32)))))
    return [p for _, p in platform.named_parameters(model)], mesh["shard"]


@pytest.mark.parametrize("sizes", [(5, 2), (4, 4)])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_stages_that_hold_different_modules(hp_platform, sizes, norm_type):
    expected = [numpy.full(3 * size, stage + 1.0) for stage, size in enumerate(sizes)] + [numpy.ones(sum(sizes))]

    def rank():
        parameters, stage = _stage(hp_platform, sizes)
        norm = clip_grad_norm_(parameters, 1.0, norm_type, copies_over=stage)
        assert float(hp_platform.to_numpy(norm)) == pytest.approx(_norm(expected, norm_type), rel=1e-6)

    run_ranks(rank, 4, hp_platform)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_different_modules_are_not_taken_for_copies(hp_platform, norm_type):
    def rank():
        parameters, _ = _stage(hp_platform, (5, 2))
        clip_grad_norm_(parameters, 1.0, norm_type)

    with pytest.raises(LaunchError, match="pass the mesh of the ranks with the same ones as copies_over") as caught:
        run_ranks(rank, 4, hp_platform)
    assert isinstance(caught.value.__cause__, RankMismatchError)


def test_without_gradients_the_norm_is_zero(hp_platform):
    def rank():
        with nn.building(hp_platform):
            model = nn.Linear(3, 2)
        parameters = [parameter for _, parameter in hp_platform.named_parameters(model)]
        return float(hp_platform.to_numpy(clip_grad_norm_(parameters, 1.0, platform=hp_platform)))

    assert run_ranks(rank, 2, hp_platform) == [0.0, 0.0]


def test_copies_on_meshes_beside_count_once(hp_platform):
    """Tensor parallel on two of four ranks; the other two hold the same parameters."""
    case = Case((1,), num_blocks=1)

    def rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=hp_platform)
        model = shard(build(hp_platform, case), mesh["tp"], case)
        hp_platform.backward(micro_loss(hp_platform, model, case, 0, 0, 0))
        parameters = [p for _, p in hp_platform.named_parameters(model)]
        grads = [hp_platform.get_grad(p) for p in parameters]
        expected = _norm([full_value(hp_platform, grad) for grad in grads if grad is not None], 2)
        assert float(hp_platform.to_numpy(clip_grad_norm_(parameters, 1.0))) == pytest.approx(expected, rel=1e-5)

    run_ranks(rank, 4, hp_platform)
