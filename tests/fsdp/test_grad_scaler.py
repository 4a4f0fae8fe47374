"""Loss scaling: all ranks decide together, and without overflow no result changes."""

from __future__ import annotations

import json

import numpy
import pytest
from fsdp_training import AdamW, Case, build, full_grads, full_value, micro_loss, shard

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.optim import clip_grad_norm_
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import GradScaler, LossScalingError


class Stepper:
    """An optimizer with `param_groups`, as torch's and MindSpore's experimental ones."""

    def __init__(self, platform, model):
        self.param_groups = [{"params": [p for _, p in platform.named_parameters(model)]}]
        self._take, self._model, self.steps = AdamW(platform), model, 0

    def step(self):
        self.steps += 1
        self._take(self._model)


def _sharded(platform, case):
    names = ("shard",) if len(case.mesh) == 1 else ("replicate", "shard")
    mesh = init_device_mesh(
        platform.device_types[0], (*case.mesh, case.tp), mesh_dim_names=(*names, "tp"), platform=platform
    )
    model = build(platform, case)
    if case.tp > 1:
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel(use_local_output=True)}
        parallelize_module(model, mesh["tp"], plan)
    return shard(model, mesh[names], case)


def _backward(platform, model, case, scaler, index=0):
    rank = current_world(platform).rank // case.tp
    loss = micro_loss(platform, model, case, rank, index, 0)
    platform.backward(scaler.scale(loss))


@pytest.mark.parametrize("gradient_sum", [False, True])
def test_a_power_of_two_changes_no_gradient(hp_platform, gradient_sum):
    """Exact with divide factors and a 2-D mesh; clipping uses the unscaled norm."""
    case = Case((2, 2), num_blocks=1, gradient_sum=gradient_sum)

    def rank(scale):
        model = _sharded(hp_platform, case)
        scaler = GradScaler(scale, enabled=scale != 1, platform=hp_platform)
        optimizer = Stepper(hp_platform, model)
        _backward(hp_platform, model, case, scaler)
        scaler.unscale_(optimizer)
        norm = float(hp_platform.to_numpy(clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)))
        grads = full_grads(hp_platform, model)
        scaler.step(optimizer)
        scaler.update()
        return norm, grads, {name: full_value(hp_platform, p) for name, p in hp_platform.named_parameters(model)}

    plain, scaled = run_ranks(rank, 4, hp_platform, 1.0)[0], run_ranks(rank, 4, hp_platform, 1024.0)[0]
    assert scaled[0] == plain[0] > 0.1
    for name, value in plain[1].items():
        numpy.testing.assert_array_equal(scaled[1][name], value)
    for name, value in plain[2].items():
        numpy.testing.assert_array_equal(scaled[2][name], value)


@pytest.mark.parametrize("case", [Case((3,), num_blocks=1), Case((2,), tp=2, num_blocks=1)], ids=["fsdp", "fsdp x tp"])
@pytest.mark.parametrize("bad", [numpy.inf, numpy.nan])
def test_what_one_rank_finds_stops_all_with_one_reduction(hp_platform, case, bad):
    def rank():
        model = _sharded(hp_platform, case)
        scaler = GradScaler(8.0, growth_interval=2, platform=hp_platform)
        optimizer = Stepper(hp_platform, model)
        before = {name: full_value(hp_platform, p) for name, p in hp_platform.named_parameters(model)}
        _backward(hp_platform, model, case, scaler)
        # `scale` has one element: only one rank of the shard axis holds it, the others have empty shards of it.
        grad = hp_platform.unwrap(hp_platform.get_grad(model.blocks[0].scale))
        assert {0, 1} >= {int(numpy.prod(grad.shape))}
        hp_platform.copy_(grad, hp_platform.from_numpy(numpy.full(tuple(grad.shape), bad, numpy.float32)))
        with record_collectives() as log:
            scaler.step(optimizer)
        assert [record.name for record in log.records] == ["all_reduce"]
        assert scaler.found_inf
        assert optimizer.steps == 0
        scaler.update()
        assert scaler.get_scale() == 4.0
        for name, p in hp_platform.named_parameters(model):
            numpy.testing.assert_array_equal(full_value(hp_platform, p), before[name])
            hp_platform.set_grad(p, None)
        for index in range(2):
            _backward(hp_platform, model, case, scaler, index)
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.steps == 2
        assert scaler.get_scale() == 8.0

    run_ranks(rank, case.size, hp_platform)


def test_float16_gradients_that_would_underflow_are_preserved(hp_platform):
    """A loss a hundred thousand times smaller: its float16 gradients are subnormal or zero, unless it is scaled."""
    policy = {"param_dtype": "float16", "reduce_dtype": "float16"}
    case = Case((2,), num_blocks=1, policy=policy)

    def rank(scale, policy):
        used = Case((2,), num_blocks=1, policy=policy)
        model = _sharded(hp_platform, used)
        scaler = GradScaler(scale, platform=hp_platform)
        loss = micro_loss(hp_platform, model, used, current_world(hp_platform).rank, 0, 0)
        hp_platform.backward(scaler.scale(hp_platform.ops.mul(loss, 1e-5)))
        scaler.unscale_(p for _, p in hp_platform.named_parameters(model))
        assert not scaler.found_inf
        return full_grads(hp_platform, model)["blocks.0.up.weight"]

    exact = run_ranks(rank, 2, hp_platform, 1.0, {})[0]
    scaled = run_ranks(rank, 2, hp_platform, 2.0**17, case.policy)[0]
    lost = run_ranks(rank, 2, hp_platform, 1.0, case.policy)[0]
    # 11 bits, through a few products.
    numpy.testing.assert_allclose(scaled, exact, rtol=0.02, atol=2e-3 * abs(exact).max())
    assert abs(lost - exact).max() > 10 * abs(scaled - exact).max()


class Halver:
    """Subtracts half of each gradient from its parameter."""

    def __init__(self, platform, parameters):
        self.param_groups, self._platform = [{"params": parameters}], platform

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            taken = self._platform.ops.mul(self._platform.get_grad(parameter), 0.5)
            self._platform.copy_(parameter, self._platform.ops.sub(parameter, taken))


def _parameters(platform, *grads):
    """Return parameters of zeros with these gradients."""
    made = [platform.Parameter(platform.zeros((2,), platform.dtype("float32"))) for _ in grads]
    for parameter, grad in zip(made, grads, strict=True):
        platform.set_grad(parameter, platform.from_numpy(numpy.full((2,), grad, numpy.float32)))
    return made


def _values(platform, parameters):
    with platform.no_grad():
        return [float(platform.to_numpy(parameter)[0]) for parameter in parameters]


def test_lists_and_optimizers_of_one_step_divide_each_gradient_once(hp_platform):
    """A list with some parameters of one optimizer, one of them twice, and a second optimizer."""
    first, second = _parameters(hp_platform, 8.0, 16.0), _parameters(hp_platform, 32.0, 64.0)
    scaler = GradScaler(8.0, platform=hp_platform)
    scaler.unscale_([first[0], first[0]])
    with hp_platform.no_grad():
        for parameters in (first, second):
            scaler.step(Halver(hp_platform, parameters))
    scaler.update()
    assert _values(hp_platform, first + second) == [-0.5, -1.0, -2.0, -4.0]


def test_a_gradient_that_came_after_a_step_is_divided_too(hp_platform):
    shared, other = _parameters(hp_platform, 8.0, 8.0)
    scaler = GradScaler(8.0, platform=hp_platform)
    with hp_platform.no_grad():
        alone = Halver(hp_platform, [shared])
        scaler.step(alone)
        hp_platform.set_grad(shared, hp_platform.from_numpy(numpy.full((2,), 16.0, numpy.float32)))
        scaler.step(Halver(hp_platform, [shared, other]))
        with pytest.raises(LossScalingError, match=r"step\(\) has been called for this optimizer"):
            scaler.step(alone)
    assert _values(hp_platform, [shared, other]) == [-1.5, -0.5]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_only_optimizers_of_which_a_gradient_overflowed_are_skipped(hp_platform, bad):
    """The overflow is in a list unscaled before, in the rest of the same optimizer, or in another one."""
    grads = [8.0, 8.0, 8.0]
    grads[bad] = numpy.inf
    *first, other = _parameters(hp_platform, *grads)
    scaler = GradScaler(8.0, platform=hp_platform)
    scaler.unscale_(first[:1])
    with hp_platform.no_grad():
        for parameters in (first, [other]):
            scaler.step(Halver(hp_platform, parameters))
    assert _values(hp_platform, [*first, other]) == ([-0.5, -0.5, 0.0] if bad == 2 else [0.0, 0.0, -0.5])
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_ranks_that_unscaled_other_parts_of_an_optimizer_before_decide_alike(hp_platform):
    """A rank without such parameters passes an empty list, as in a pipeline."""

    def rank():
        first = current_world(hp_platform).rank == 0
        parameters = _parameters(hp_platform, numpy.inf if first else 8.0)
        scaler = GradScaler(8.0, platform=hp_platform)
        scaler.unscale_(parameters if first else [])
        with hp_platform.no_grad():
            scaler.step(Halver(hp_platform, parameters))
        return _values(hp_platform, parameters)

    assert run_ranks(rank, 2, hp_platform) == [[0.0], [0.0]]


def test_a_state_dict_is_json_and_goes_on_exactly(hp_platform):
    def steps(scaler, outcomes):
        scales = []
        for bad in outcomes:
            parameter = hp_platform.Parameter(hp_platform.zeros((2,), hp_platform.dtype("float32")))
            values = numpy.array([1.0, numpy.inf if bad else 2.0], numpy.float32)
            hp_platform.set_grad(parameter, hp_platform.from_numpy(values))
            scaler.unscale_([parameter])
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    outcomes = [False, False, False, True, False, False, False, False]
    uninterrupted = GradScaler(4.0, growth_interval=3, platform=hp_platform)
    expected = steps(uninterrupted, outcomes)
    assert expected == [4.0, 4.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    first = GradScaler(4.0, growth_interval=3, platform=hp_platform)
    scales = steps(first, outcomes[:5])
    second = GradScaler(platform=hp_platform)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert scales + steps(second, outcomes[5:]) == expected
    assert second.state_dict() == uninterrupted.state_dict()


def test_misuse_is_told(hp_platform):
    with pytest.raises(LossScalingError, match=r"scale: .*; growth_factor: .*; backoff_factor: .*; growth_interval"):
        GradScaler(0.0, 0.5, 1.0, 0, platform=hp_platform)
    scaler = GradScaler(platform=hp_platform)
    with pytest.raises(LossScalingError, match=r"update\(\) without"):
        scaler.update()
    with pytest.raises(LossScalingError, match="has no param_groups"):
        scaler.step(object())
    optimizer = Halver(hp_platform, [])
    scaler.unscale_(optimizer)
    with pytest.raises(LossScalingError, match="has been called for this optimizer"):
        scaler.unscale_(optimizer)
    with pytest.raises(LossScalingError, match="missing scale"):
        scaler.load_state_dict({})
    scaler.update(2.0**-24)
    parameter = hp_platform.Parameter(hp_platform.zeros((1,), hp_platform.dtype("float32")))
    hp_platform.set_grad(parameter, hp_platform.from_numpy(numpy.array([numpy.nan], numpy.float32)))
    scaler.unscale_([parameter])
    with pytest.raises(LossScalingError, match="check the model and its input"):
        scaler.update()
    off = GradScaler(enabled=False, platform=hp_platform)
    assert off.scale(3.0) == 3.0
    assert off.get_scale() == 1.0
    assert off.state_dict() == {}
