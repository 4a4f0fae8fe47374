"""Dtypes of computation and reduction; accumulation, factors and freezing of gradients."""

from __future__ import annotations

import math

import numpy
import pytest
from fsdp_training import (
    Case,
    build,
    full_grads,
    full_value,
    held_bytes,
    loss_of,
    mesh_of,
    micro_loss,
    shard,
    sharded,
    step,
)

from hp_dtensor.comm.mesh import DeviceMesh, init_device_mesh
from hp_dtensor.comm.process_group import ProcessGroup, record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import LaunchError, RankMismatchError
from hp_dtensor.optim import clip_grad_norm_
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.distribute_module import place_parameter
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_dtensor.spec.placements import Shard
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    FSDPModule,
    FullyShardError,
    MixedPrecisionPolicy,
    PlannedParameter,
    fully_shard,
    memory_use,
    plan_group,
)

# Mixed precision ------------------------------------------------------------------------------------------


def low_precision(platform):
    """Return a 16-bit dtype: MindSpore computes in bfloat16 on Ascend only."""
    return "bfloat16" if platform.name == "torch" else "float16"


def test_mixed_precision(hp_platform, monkeypatch):
    low = low_precision(hp_platform)
    case = Case((2,), policy={"param_dtype": low, "reduce_dtype": "float32", "output_dtype": "float32"})
    reduced = []
    scatter = ProcessGroup.reduce_scatter_into

    def watched(self, output, x, op="sum", async_op=False):
        reduced.append(x.dtype)
        return scatter(self, output, x, op, async_op)

    monkeypatch.setattr(ProcessGroup, "reduce_scatter_into", watched)

    def rank():
        model, plain = sharded(hp_platform, case), build(hp_platform, case)
        inside = []
        hp_platform.add_forward_hook(
            model.blocks[1].up, lambda m, args, kwargs, y: inside.extend([m.weight, args[0], y])
        )
        loss = step(hp_platform, model, case)
        assert {x.dtype for x in inside} == {hp_platform.dtype(low)}
        for name, parameter in hp_platform.named_parameters(model):
            assert parameter.dtype == hp_platform.dtype("float32")
            if "unused" not in name:
                assert hp_platform.get_grad(parameter).dtype == hp_platform.dtype("float32")
        expected = micro_loss(hp_platform, plain, case, current_world(hp_platform).rank, 0, 0)
        # bfloat16 has 8 bits.
        numpy.testing.assert_allclose(hp_platform.to_numpy(loss), hp_platform.to_numpy(expected), rtol=2e-2)
        both = [micro_loss(hp_platform, plain, case, other, 0, 0) for other in range(2)]
        hp_platform.backward(hp_platform.ops.div(hp_platform.ops.add(*both), 2))
        wanted, found = full_grads(hp_platform, plain), full_grads(hp_platform, model)
        for name in ("blocks.0.up.weight", "head.weight"):
            scale = numpy.abs(wanted[name]).max()
            assert numpy.abs(found[name] - wanted[name]).max() < 0.1 * scale, name

    run_ranks(rank, 2, hp_platform)
    assert set(reduced) == {hp_platform.dtype("float32")}


def test_the_unscaled_sum_of_low_precision_gradients_does_not_overflow(hp_platform):
    """The mean of two gradients of 60000 is a float16 number; their sum is not."""

    def rank():
        with nn.building(hp_platform):
            model = nn.Linear(1, 2)
        fully_shard(model, mesh_of(hp_platform, 2), mp_policy=MixedPrecisionPolicy(reduce_dtype="float16"))
        x = hp_platform.from_numpy(numpy.full((1, 1), 60000.0, numpy.float32))
        hp_platform.backward(hp_platform.ops.sum(model(x)))
        numpy.testing.assert_array_equal(full_value(hp_platform, hp_platform.get_grad(model.weight)), 60000.0)

    run_ranks(rank, 2, hp_platform)


def test_mindspore_refuses_bfloat16_on_cpu(hp_platform):
    if hp_platform.name != "mindspore":
        pytest.skip("torch computes in bfloat16 on CPU")
    with nn.building(hp_platform):
        model = nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match="float16"):
        fully_shard(model, mesh_of(hp_platform, 1), mp_policy=MixedPrecisionPolicy("bfloat16"))
    assert not isinstance(model, FSDPModule)


# Gradients ------------------------------------------------------------------------------------------------


def test_divide_factor_and_sum(hp_platform):
    def rank():
        with nn.building(hp_platform):
            model = nn.Linear(3, 1)
        fully_shard(model, mesh_of(hp_platform, 2, 2))
        me = current_world(hp_platform).rank
        x = hp_platform.from_numpy(numpy.full((1, 3), me + 1.0, numpy.float32))

        def grad():
            hp_platform.set_grad(model.weight, None)
            hp_platform.backward(hp_platform.ops.sum(model(x)))
            return full_value(hp_platform, hp_platform.get_grad(model.weight)).tolist()

        assert grad() == [[2.5] * 3]
        model.set_gradient_divide_factor(5.0)
        assert grad() == [[2.0] * 3]
        model.set_reduce_op_type("sum")
        assert grad() == [[10.0] * 3]

        model.set_gradient_scaling_factor(0.5)
        assert grad() == [[5.0] * 3]
        model.set_reduce_op_type("avg")
        assert grad() == [[1.25] * 3]
        for wrong in (0, -1.0, "2", True, float("inf")):
            with pytest.raises(FullyShardError, match="expected a positive finite number"):
                model.set_gradient_scaling_factor(wrong)

    run_ranks(rank, 4, hp_platform)


def test_freezing_and_thawing_between_steps(hp_platform):
    """A parameter that is frozen for a step has no gradient, also if the complete group is; the others are correct."""
    case = Case((2,), num_blocks=2)

    def rank():
        model, plain = sharded(hp_platform, case), build(hp_platform, case)
        for frozen in (("blocks.0.up", "head"), ("blocks.1", "norm"), ()):
            for each in (model, plain):
                for name, parameter in hp_platform.named_parameters(each):
                    hp_platform.set_grad(parameter, None)
                    hp_platform.set_requires_grad(parameter, not name.startswith(frozen))
            step(hp_platform, model, case)
            losses = [micro_loss(hp_platform, plain, case, other, 0, 0) for other in range(2)]
            hp_platform.backward(hp_platform.ops.div(hp_platform.ops.add(*losses), 2))
            expected, found = full_grads(hp_platform, plain), full_grads(hp_platform, model)
            for name in ("embed.weight", "blocks.0.up.weight", "blocks.1.out.bias", "head.weight"):
                if name.startswith(frozen):
                    assert found[name] is None
                else:
                    numpy.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=2e-6)
            assert held_bytes(model) == [0] * 3

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("frozen", [("blocks.0.up", "head"), ("blocks.0",), ("embed", "blocks")])
def test_what_is_frozen_between_micro_batches_keeps_its_gradient(torch_or, hp_platform, stage, frozen):
    """Also if a complete group is frozen in the micro-batch that reduces, or all but one parameter is."""
    torch_or(stage == 3 or (stage == 1 and frozen == ("blocks.0",)))
    case = Case((2,), num_blocks=2, options={"zero_stage": stage})

    def freeze(model):
        for name, parameter in hp_platform.named_parameters(model):
            hp_platform.set_requires_grad(parameter, not name.startswith(frozen))

    def rank():
        model, plain = sharded(hp_platform, case), build(hp_platform, case)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            step(hp_platform, model, case, micro)
            losses = [micro_loss(hp_platform, plain, case, other, micro, 0) for other in range(2)]
            hp_platform.backward(hp_platform.ops.div(hp_platform.ops.add(*losses), 2))
            freeze(model)
            freeze(plain)
        found = full_grads(hp_platform, model)
        for name, expected in full_grads(hp_platform, plain).items():
            if expected is not None:
                numpy.testing.assert_allclose(found[name], expected, rtol=2e-5, atol=2e-6, err_msg=name)

    run_ranks(rank, 2, hp_platform)


def test_what_is_frozen_before_the_backward_gets_no_gradient(hp_platform):
    """One parameter or a complete group, which were trainable in the forward."""
    case = Case((2,), num_blocks=2)
    frozen = "blocks.0.", "embed"

    def rank():
        model = sharded(hp_platform, case)
        loss = loss_of(hp_platform, model, case)
        named = dict(hp_platform.named_parameters(model))
        for name, parameter in named.items():
            hp_platform.set_requires_grad(parameter, not name.startswith(frozen))
        hp_platform.backward(loss)
        assert [hp_platform.get_grad(x) is None for x in named.values()] == [
            name.startswith(frozen) or "unused" in name for name in named
        ]

    run_ranks(rank, 2, hp_platform)


@pytest.mark.parametrize("frozen", ["", "blocks.0"])
def test_what_is_frozen_keeps_what_waits_for_the_replicas(hp_platform, frozen):
    case = Case((2, 2), num_blocks=1)

    def rank():
        model, plain = sharded(hp_platform, case), build(hp_platform, case)
        model.set_requires_all_reduce(False)
        step(hp_platform, model, case)
        for name, parameter in hp_platform.named_parameters(model):
            hp_platform.set_requires_grad(parameter, not frozen or not name.startswith(frozen))
        model.set_requires_all_reduce(True)
        step(hp_platform, model, case)
        for other in range(4):
            loss = micro_loss(hp_platform, plain, case, other, 0, 0)
            hp_platform.backward(hp_platform.ops.div(loss, 4))
        once = full_grads(hp_platform, plain)["blocks.0.up.weight"]
        found = full_grads(hp_platform, model)["blocks.0.up.weight"]
        numpy.testing.assert_allclose(found, once * (1 if frozen else 2), rtol=2e-5, atol=2e-6)

    run_ranks(rank, 4, hp_platform)


def test_gradients_wider_than_their_parameters(hp_platform):
    """Two bfloat16 gradients whose sum bfloat16 rounds: 256 + 1."""
    policy = MixedPrecisionPolicy(reduce_dtype="float32", grad_dtype="float32")
    low = low_precision(hp_platform)

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = self.parameter((2, 1), dtype=low)

        def forward(self, x):
            return self.ops.mul(self.weight, x)

    def rank():
        with nn.building(hp_platform):
            model = Scale()
        if hp_platform.name != "torch":
            with pytest.raises(NotImplementedError, match="grad_dtype: on mindspore a gradient has its parameter's"):
                fully_shard(model, mesh_of(hp_platform, 2), mp_policy=policy)
            assert not isinstance(model, FSDPModule)
            return
        fully_shard(model, mesh_of(hp_platform, 2), mp_policy=policy).set_reduce_op_type("sum")
        value = 256.0 if current_world(hp_platform).rank == 0 else 1.0
        x = hp_platform.ops.cast(
            hp_platform.from_numpy(numpy.full((1, 1), value, numpy.float32)), hp_platform.dtype(low)
        )
        for count in (1, 2):
            hp_platform.backward(hp_platform.ops.sum(model(x)))
            grad = hp_platform.get_grad(model.weight)
            assert grad.dtype == hp_platform.dtype("float32")
            numpy.testing.assert_array_equal(full_value(hp_platform, grad), 257.0 * count)
        assert model.weight.dtype == hp_platform.dtype(low)
        weight = PlannedParameter("weight", (2, 1), itemsize=2)
        (planned,) = plan_group([weight], 2, reduce_itemsize=4, grad_itemsize=4)
        # Padding included: float32 gradients of bfloat16 shards.
        assert planned.gradient == 2 * planned.shard == 2 * memory_use(model).shards

    run_ranks(rank, 2, hp_platform)


def test_accumulating_without_reduction_communicates_only_to_gather(hp_platform):
    case = Case((2,), num_blocks=2)

    def rank():
        model = sharded(hp_platform, case)
        model.set_requires_gradient_sync(False)
        with record_collectives() as log:
            step(hp_platform, model, case)
        assert log.count("reduce_scatter") == 0
        assert all(hp_platform.get_grad(p) is None for _, p in hp_platform.named_parameters(model))
        model.set_reshard_after_backward(False)
        step(hp_platform, model, case, 1)
        with record_collectives() as log:
            step(hp_platform, model, case, 2)
        # All groups were left unsharded, and the inner ones are freed in forward only.
        assert log.count("all_gather") == 2

    run_ranks(rank, 2, hp_platform)


def test_several_forwards_before_their_backwards(hp_platform):
    case = Case((2,), num_blocks=2)

    def rank():
        model, plain = sharded(hp_platform, case), build(hp_platform, case)
        me = current_world(hp_platform).rank
        losses = [micro_loss(hp_platform, model, case, me, 0, micro) for micro in range(3)]
        for loss in losses:
            hp_platform.backward(loss)
        assert held_bytes(model) == [0] * 3
        total = None
        for other in range(2):
            for micro in range(3):
                loss = hp_platform.ops.div(micro_loss(hp_platform, plain, case, other, 0, micro), 2)
                total = loss if total is None else hp_platform.ops.add(total, loss)
        hp_platform.backward(total)
        expected = full_grads(hp_platform, plain)
        for name, grad in full_grads(hp_platform, model).items():
            if expected[name] is not None:
                numpy.testing.assert_allclose(grad, expected[name], rtol=2e-5, atol=2e-6)

    run_ranks(rank, 2, hp_platform)


class Stack(nn.Module):
    """Linear maps one after another, for inputs that require gradients."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList([nn.Linear(3, 3, bias=True) for _ in range(3)])

    def forward(self, x):
        for each in self.maps:
            x = self.ops.silu(each(x))
        return x


@pytest.mark.parametrize("frozen", ["none", "maps.1", "maps.2"])
def test_gradients_of_inputs_leave_those_of_parameters(hp_platform, frozen):
    """None stays None, existing gradients are not changed, pending ones stay pending; a backward may follow."""
    platform = hp_platform

    def build():
        with nn.building(platform):
            model = Stack()
        init_parameters(model, lambda name, shape: Normal(0.5), seed=1)
        for name, parameter in platform.named_parameters(model):
            platform.set_requires_grad(parameter, not name.startswith(frozen))
        return model

    def loss(model, x):
        return platform.ops.sum(platform.ops.mul(model(x), model(x)))

    def rank():
        plain, model = build(), build()
        mesh = mesh_of(platform, 2)
        for each in (*model.maps, model):
            fully_shard(each, mesh)
        for index, sync in enumerate((False, True, True)):
            model.set_requires_gradient_sync(sync)
            x = platform.from_numpy(numpy.full((2, 3), 1.0 + index, numpy.float32))
            platform.set_requires_grad(x, True)
            before = full_grads(platform, model)
            with record_collectives() as log:
                (found,) = platform.grad([loss(model, x)], [x])
            assert log.count("reduce_scatter") == 0
            (expected,) = platform.grad([loss(plain, x)], [x])
            numpy.testing.assert_allclose(platform.to_numpy(found), platform.to_numpy(expected), rtol=1e-5)
            for name, grad in full_grads(platform, model).items():
                numpy.testing.assert_equal(grad, before[name])
            for each in (plain, model):
                platform.backward(loss(each, x))
        found = full_grads(platform, model)
        for name, grad in full_grads(platform, plain).items():
            assert (grad is None) == (found[name] is None) == name.startswith(frozen)
            if grad is not None:
                numpy.testing.assert_allclose(found[name], grad, rtol=1e-5, err_msg=name)
        assert held_bytes(model) == [0] * 4

    run_ranks(rank, 2, platform)


@pytest.mark.parametrize("axes", [("a",), ("b", "a")], ids=["one axis", "the axes in the other order"])
@pytest.mark.parametrize("user", range(4))
def test_what_one_rank_uses_is_known_on_all_beside_parameters_of_another_mesh(hp_platform, axes, user):
    """The ranks that replicate some parameters shard others, as experts over the ranks of a replicate axis."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.dense, self.branch, self.expert = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x, use_branch):
            y = self.expert(self.dense(x))
            beside = self.branch(x)
            return self.ops.add(y, beside) if use_branch else y

    def rank():
        mesh = init_device_mesh(hp_platform.device_types[0], (2, 2), mesh_dim_names=("a", "b"), platform=hp_platform)
        turned = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("b", "a"), platform=hp_platform)
        with nn.building(hp_platform):
            model = Model()
        fully_shard(model.expert, turned[axes])
        for module in (model.dense, model.branch, model):
            fully_shard(module, mesh)
        for index in range(2):
            uses = index == 0 and current_world(hp_platform).rank == user
            x = hp_platform.ops.ones((3, 4), hp_platform.dtype("float32"))
            hp_platform.backward(hp_platform.ops.sum(model(x, uses)))
            given = {name for name, p in hp_platform.named_parameters(model) if hp_platform.get_grad(p) is not None}
            assert given == {"dense.weight", "expert.weight", "branch.weight"} - ({"branch.weight"} if index else set())
            for _, parameter in hp_platform.named_parameters(model):
                hp_platform.set_grad(parameter, None)

    run_ranks(rank, 4, hp_platform)


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
        world = init_device_mesh(
            hp_platform.device_types[0], (2, 2), mesh_dim_names=("shard", "tp"), platform=hp_platform
        )
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
        fully_shard(model, init_device_mesh(hp_platform.device_types[0], (2,), platform=hp_platform))
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
    mesh = init_device_mesh(platform.device_types[0], (2, 2), mesh_dim_names=("pp", "shard"), platform=platform)
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
        mesh = init_device_mesh(hp_platform.device_types[0], (2, 2), mesh_dim_names=("dp", "tp"), platform=hp_platform)
        model = shard(build(hp_platform, case), mesh["tp"], case)
        hp_platform.backward(micro_loss(hp_platform, model, case, 0, 0, 0))
        parameters = [p for _, p in hp_platform.named_parameters(model)]
        grads = [hp_platform.get_grad(p) for p in parameters]
        expected = _norm([full_value(hp_platform, grad) for grad in grads if grad is not None], 2)
        assert float(hp_platform.to_numpy(clip_grad_norm_(parameters, 1.0))) == pytest.approx(expected, rel=1e-5)

    run_ranks(rank, 4, hp_platform)
