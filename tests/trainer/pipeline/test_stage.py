"""Stages with frozen parts, odd messages, weights used twice, inputs without gradients; steps between evaluations.

Each runs under a full and under split backwards; gradients equal those of one device that accumulates.
"""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline import Pipeline, PipelineStage, TensorChunkSpec, TiedWeights, build_schedule, simulate
from hp_trainer.pipeline.transfers import layout_of

WIDTH, MICROBATCHES = 4, 4
SCHEDULES = ["1f1b", "zero_bubble_h1", "zero_bubble_v"]


class Twice(nn.Module):
    """One linear layer with a bias, used twice, on what a message of `form` brings."""

    def __init__(self, form: str, index: int) -> None:
        super().__init__()
        self.linear, self.form, self.index = nn.Linear(WIDTH, WIDTH, bias=True), form, index

    def forward(self, x, *others):
        x = x["x"] if isinstance(x, dict) else x
        y = self.linear(self.ops.silu(self.linear(x)))
        if self.form == "dict":
            return {"x": y, "index": self.index, "nothing": None}
        if self.form == "none":
            return y, None
        # Not contiguous, and a part of what was computed.
        return self.ops.narrow(self.ops.cat([y, y], 1), 1, 0, WIDTH) if self.form == "view" else y


def model_of(platform, form, num_stages, frozen):
    with nn.building(platform):
        modules = [Twice(form, index) for index in range(num_stages)]
    for index, module in enumerate(modules):
        init_parameters(module, lambda name, shape: Normal(0.5), seed=index)
        for name, parameter in platform.named_parameters(module):
            if index in frozen or name in frozen:
                platform.set_requires_grad(parameter, False)
    return modules


def loss_of(platform):
    def loss(output, target):
        y = output["x"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
        return platform.ops.sum(platform.ops.square(platform.ops.sub(y, target)))

    return loss


def batch(platform, rows=MICROBATCHES):
    random = np.random.default_rng(0)
    return [platform.from_numpy(random.standard_normal((rows, WIDTH)).astype(np.float32)) for _ in range(2)]


def gradients(platform, modules):
    found = {}
    for module in modules:
        for name, parameter in platform.named_parameters(module):
            grad = platform.get_grad(parameter)
            found[f"{module.index}.{name}"] = None if grad is None else platform.to_numpy(grad).copy()
    return found


def on_one_device(platform, form, num_stages, frozen):
    modules = model_of(platform, form, num_stages, frozen)
    x, target = batch(platform)
    with platform.enable_grad():
        for index in range(MICROBATCHES):
            value, goal = (platform.ops.narrow(each, 0, index, 1) for each in (x, target))
            for module in modules:
                value = module(*value) if isinstance(value, tuple) else module(value)
            platform.backward(loss_of(platform)(value, goal))
    return gradients(platform, modules)


def pipeline_of(platform, schedule_name, form="plain", frozen=(), **options):
    mesh = init_device_mesh("cpu", (2,), ("pp",), platform=platform)
    schedule = build_schedule(schedule_name, num_ranks=2, num_microbatches=MICROBATCHES)
    modules = model_of(platform, form, schedule.num_stages, frozen)
    mine = [stage for stage, owner in enumerate(schedule.rank_of_stage) if owner == mesh.get_rank()]
    stages = [PipelineStage(modules[stage], stage, schedule.num_stages) for stage in mine]
    return Pipeline(stages, schedule, mesh["pp"], loss_of(platform), **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("form", "frozen"),
    [
        ("dict", ()),
        ("none", ()),
        ("view", ()),
        ("plain", ("linear.weight",)),
        ("plain", (0,)),  # the next stage's input requires no gradient
        ("plain", (1,)),  # a stage between others without anything to train
    ],
)
def test_odd_stages_have_the_gradients_of_one_device(hp_platform, schedule, form, frozen):
    def program():
        pipeline = pipeline_of(hp_platform, schedule, form, frozen)
        x, target = batch(hp_platform)
        pipeline.step(x, target=target)
        return gradients(hp_platform, [stage.submod for stage in pipeline.stages.values()])

    found = {name: grad for part in run_ranks(program, 2, hp_platform) for name, grad in part.items()}
    expected = on_one_device(hp_platform, form, 4 if schedule == "zero_bubble_v" else 2, frozen)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] is None) == (grad is None), name
        if grad is not None:
            np.testing.assert_allclose(found[name], grad, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "gpipe", "dualpipe_v", "interleaved_zero_bubble"])
def test_ranks_keep_as_many_micro_batches_as_the_simulation_says_and_nothing_afterwards(hp_platform, schedule):
    def program():
        pipeline = pipeline_of(hp_platform, schedule)
        peak, made = [0], []
        for stage in pipeline.stages.values():

            def call(args, kwargs, stage=stage, called=stage.call):
                output = called(args, kwargs)
                made.append(weakref.ref(output))
                # The one that is being computed is noted only afterwards.
                peak.append(1 + sum(each.num_in_flight for each in pipeline.stages.values()))
                return output

            stage.call = call
        x, target = batch(hp_platform)
        pipeline.step(x, target=target, return_outputs=False)
        alive = sum(ref() is not None for ref in made)
        return max(peak), simulate(pipeline.schedule).peak_activations[pipeline.rank], alive

    for peak, simulated, alive in run_ranks(program, 2, hp_platform):
        assert peak == simulated
        assert alive == 0


def test_evaluation_before_and_between_steps_changes_no_gradient(hp_platform):
    def program():
        found = []
        for evaluates in (False, True):
            pipeline = pipeline_of(hp_platform, "zero_bubble_v", fixed_shapes=True)
            x, target = batch(hp_platform)
            for rows in (2 * MICROBATCHES, MICROBATCHES):
                if evaluates:
                    x_eval, target_eval = batch(hp_platform, rows)
                    pipeline.eval(x_eval, target=target_eval)
                # Not cleared: two batches accumulate, and nothing is made again between them.
                pipeline.step(x, target=target)
            found.append(gradients(hp_platform, [stage.submod for stage in pipeline.stages.values()]))
        return found

    for without, with_evaluation in run_ranks(program, 2, hp_platform):
        for name, grad in without.items():
            np.testing.assert_array_equal(with_evaluation[name], grad, err_msg=name)


def test_all_ranks_may_be_told_how_the_first_stage_cuts_its_arguments(hp_platform):
    """The others do not look at arguments, so that there is nothing for them to split."""

    def program():
        pipeline = pipeline_of(hp_platform, "1f1b", args_chunk_spec=(TensorChunkSpec(0),))
        x, target = batch(hp_platform)
        losses = []
        pipeline.step(x, target=target, losses=losses)
        return len(losses)

    assert run_ranks(program, 2, hp_platform) == [0, MICROBATCHES]


def test_stages_of_a_loop_are_refused_where_the_schedule_is_a_v(hp_platform):
    def program():
        mesh = init_device_mesh("cpu", (2,), ("pp",), platform=hp_platform)
        mine = [mesh.get_rank(), mesh.get_rank() + 2]
        modules = model_of(hp_platform, "plain", 4, ())
        stages = [PipelineStage(modules[stage], stage, 4) for stage in mine]
        Pipeline(stages, "zero_bubble_v", mesh["pp"], num_microbatches=2)

    with pytest.raises(LaunchError, match=r"expected stages \[0, 3\] of 4, got 0 of 4, 2 of 4"):
        run_ranks(program, 2, hp_platform)


def test_inputs_are_freed_before_a_deferred_weight_gradient(platform):
    """An unsplit backward needs them no more; the micro-batch remains until its weight gradient."""
    ones = platform.ops.ones((2, WIDTH), platform.dtype("float32"))
    (module,) = model_of(platform, "plain", 1, ())
    inputs = []

    class Stage(PipelineStage):
        def call(self, args, kwargs):
            inputs.append(weakref.ref(args[0]))
            return super().call(args, kwargs)

    sent = platform.detach(ones)
    platform.set_requires_grad(sent, True)
    layout, tensors = layout_of(platform, sent, "a test")
    stage = Stage(module, 1, 2, dw_builder=lambda: lambda: inputs.append(inputs[0]()), platform=platform)
    stage.outputs(0, stage.forward(0, layout, tensors, {}, None))
    (gradient,) = stage.input_grad(0, [ones])
    assert stage.num_in_flight == 1
    stage.weight_grad(0)
    assert inputs[1] is None
    platform.backward(module(sent), ones)
    np.testing.assert_array_equal(platform.to_numpy(gradient), platform.to_numpy(platform.get_grad(sent)))


def test_modules_in_place_of_stages_are_refused(hp_platform):
    modules = model_of(hp_platform, "plain", 1, ())
    with pytest.raises(PipelineError, match=r"expected .*PipelineStage\(module, .* got .*Twice"):
        Pipeline(modules, "1f1b", num_microbatches=2)


def test_frozen_tied_weights_get_no_gradient_and_are_frozen_on_all_stages(platform):
    def program(frozen):
        mesh = init_device_mesh("cpu", (2,), ("pp",))
        ones = platform.ops.ones((2,), platform.dtype("float32"))
        weight = platform.Parameter(ones, requires_grad=mesh.get_rank() not in frozen)
        tied = TiedWeights([("embedding", weight)], mesh["pp"])
        tied.sum_gradients()
        return platform.get_grad(weight) is None

    assert run_ranks(program, 2, platform, {0, 1}) == [True, True]
    with pytest.raises(LaunchError, match=r"got embedding: float32\[2\] frozen and float32\[2\]\. "):
        run_ranks(program, 2, platform, {0})
