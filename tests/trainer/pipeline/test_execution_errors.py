"""Steps that cannot work are refused by name, and the next step works again."""

from __future__ import annotations

import numpy as np
import pytest

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.parallel import nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.simulated import SimulatedGroup
from hp_fsdp import fully_shard
from hp_fsdp.memory import memory_use
from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline import Action, Kind, Pipeline, PipelineStage, TensorChunkSpec
from hp_trainer.pipeline.execution import merge_outputs, split_all


class Odd(nn.Module):
    """Hands on what `made` makes of its input and the number of the call."""

    def __init__(self, made) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.made, self.calls = made, 0

    def forward(self, x):
        self.calls += 1
        return self.made(self.linear(x), self.calls)


def pipeline_of(platform, made, num_microbatches=2, **options):
    mesh = init_device_mesh("cpu", (2,), ("pp",), platform=platform)
    with nn.building(platform):
        module = Odd(made if mesh.get_rank() == 0 else lambda y, call: y)
    init_parameters(module, lambda name, shape: Normal(0.5), seed=0)
    stage = PipelineStage(module, mesh.get_rank(), 2)
    return Pipeline(
        [stage],
        "1f1b",
        mesh["pp"],
        lambda y, _: platform.ops.sum(y),
        num_microbatches=num_microbatches,
        **options,
    )


def batch(platform, rows=4):
    return platform.from_numpy(np.ones((rows, 2), np.float32))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda y, call: y if call == 1 else y[:1],
            "stage 0 returned .* for micro-batch 1 and .* for the step's first",
        ),
        (lambda y, call: (y, object()), "stage 0 returns a object, which cannot be sent to the next stage"),
    ],
)
def test_outputs_that_cannot_travel(hp_platform, made, message):
    with pytest.raises(LaunchError, match=message):
        run_ranks(lambda: pipeline_of(hp_platform, made).step(batch(hp_platform)), 2, hp_platform)


def test_batches_that_make_no_equal_micro_batches(hp_platform):
    def program():
        pipeline = pipeline_of(hp_platform, lambda y, call: y)
        if pipeline.has_first_stage:
            with pytest.raises(PipelineError, match=r"shape \[3, 2\] cannot be split along dimension 0 into 2 equal"):
                pipeline.step(batch(hp_platform, rows=3))
        with pytest.raises(PipelineError, match=r"the schedule has 2 micro-batches, got 1 targets"):
            pipeline.run_microbatches([(batch(hp_platform),)] * 2, targets=[None])
        with hp_platform.no_grad(), pytest.raises(PipelineError, match="nothing is recorded here"):
            pipeline.step(batch(hp_platform))
        losses = []
        pipeline.step(batch(hp_platform), losses=losses)
        return len(losses), pipeline.eval(batch(hp_platform, rows=8)) is not None

    assert run_ranks(program, 2, hp_platform) == [(0, False), (2, True)]


def test_losses_that_cannot_be_given_are_refused_on_every_rank(hp_platform):
    """Before anything is sent: the ranks before the last one would wait for it in their next collective."""

    def program():
        pipeline = pipeline_of(hp_platform, lambda y, call: y)
        for run in (pipeline.step, pipeline.eval):
            with record_collectives() as log, pytest.raises(PipelineError, match=r"expected a list, .* got tuple"):
                run(batch(hp_platform), losses=())
        pipeline.loss_fn = None
        for run in (pipeline.step, pipeline.eval):
            with record_collectives() as log, pytest.raises(PipelineError, match="the pipeline has no loss_fn"):
                run(batch(hp_platform), losses=[])
        with pytest.raises(PipelineError, match="a backward needs a loss"):
            pipeline.run_microbatches([(batch(hp_platform),)] * 2)
        return len(log.records)

    assert run_ranks(program, 2, hp_platform) == [0, 0]


def test_specs_of_arguments_and_outputs(hp_platform):
    """One that names no argument of the step is refused where another is not named; None leaves a value as it is."""
    x, shared = batch(hp_platform), batch(hp_platform, rows=2)
    with pytest.raises(PipelineError, match=r"names \['msak'\], which this step does not get, and not \['mask'\]"):
        split_all(hp_platform, (), {"mask": x}, 2, kwargs_spec={"msak": None})
    # Of another rank's stage, or left out.
    _, named = split_all(hp_platform, (), {"mask": x}, 2, kwargs_spec={"mask": None, "shift": TensorChunkSpec(0)})
    assert all(each["mask"] is x for each in named)
    rows, same = merge_outputs(hp_platform, [(x, shared), (x, shared)], (TensorChunkSpec(0), None))
    assert tuple(rows.shape) == (8, 2)
    assert same is shared


def test_fixed_shapes_are_sent_once(hp_platform):
    """Later steps send micro-batches alone; an evaluation may have other shapes, and another step may not."""

    def program():
        pipeline, sends = pipeline_of(hp_platform, lambda y, call: y, fixed_shapes=True), []
        for run in (pipeline.step, pipeline.step, lambda x: pipeline.eval(batch(hp_platform, rows=8)), pipeline.step):
            with record_collectives() as log:
                run(batch(hp_platform))
            sends.append(log.count("send"))
        if pipeline.has_first_stage:
            with pytest.raises(
                PipelineError, match=r"and float32\[2, 2\] for those of earlier steps.*shapes are fixed"
            ):
                pipeline.step(batch(hp_platform, rows=8))
        return sends

    assert run_ranks(program, 2, hp_platform) == [[3, 2, 3, 2], [2, 2, 0, 2]]


def test_buffers_are_ready_before_the_first_send(hp_platform):
    """A rank posts the receives of four messages of each neighbour as a step starts, when shapes are fixed."""

    def program():
        pipeline = pipeline_of(hp_platform, lambda y, call: y, num_microbatches=6, fixed_shapes=True)
        pipeline.step(batch(hp_platform, rows=12))
        with record_collectives() as log:
            pipeline.step(batch(hp_platform, rows=12))
        return [record.name for record in log.records][:5]

    assert run_ranks(program, 2, hp_platform) == [["receive"] * 4 + ["send"], ["receive"] * 5]


def test_the_receive_of_shapes_is_posted_before_the_first_computation(hp_platform):
    """With those of later messages after it: their shapes are known by then."""

    def program():
        calls = []
        pipeline = pipeline_of(hp_platform, lambda y, call: calls.append(len(log.records)) or y, num_microbatches=6)
        with record_collectives() as log:
            pipeline.step(batch(hp_platform, rows=12))
        names = [record.name for record in log.records if record.name != "broadcast"]
        return names[:6] if pipeline.has_last_stage else calls[0]

    # Rank 0 has only connected in both directions: it receives gradients, whose shapes it does not know yet.
    assert run_ranks(program, 2, hp_platform) == [2, ["receive"] * 6]


def test_a_rank_that_has_ended_is_named(hp_platform, monkeypatch):
    """Errors of communication name the rank that this one waited for, and for what."""

    class Closed:
        def wait(self):
            raise RuntimeError("Connection closed by peer")

    def post(self, x, source, async_op):
        posted.append(async_op)
        return Closed()

    posted = []
    monkeypatch.setattr(SimulatedGroup, "_receive", post)

    def program():
        pipeline = pipeline_of(hp_platform, lambda y, call: y)
        pipeline._transfers.start_step()
        if pipeline.has_last_stage:
            assert posted == [True]
            pipeline._transfers.receive_forward(Action(1, Kind.FORWARD, 0))

    with pytest.raises(LaunchError, match=r"receiving the inputs of 1F0: rank 0, which has stages 0, has ended"):
        run_ranks(program, 2, hp_platform)


@pytest.mark.parametrize(
    "options",
    [{}, {"gathers_for_step": False}, {"gathers_for_step": False, "reduces_once": False}],
    ids=["gathered for the step", "gathered for each use", "reduced each time"],
)
def test_a_step_after_one_that_failed_has_its_own_gradients(hp_platform, options):
    """Gradients of the micro-batches before the error are freed, and weights are sharded again."""

    def program():
        calls = []

        def loss(y, fails):
            calls.append(None)
            if fails is not None and len(calls) == 3:
                raise ArithmeticError("the third micro-batch")
            return hp_platform.ops.sum(y)

        with nn.building(hp_platform):
            module = nn.Linear(2, 2)
        init_parameters(module, lambda name, shape: Normal(0.5), seed=0)
        fully_shard(module, init_device_mesh("cpu", (1,), platform=hp_platform))
        pipeline = Pipeline([PipelineStage(module, 0, 1)], "1f1b", None, loss, num_microbatches=4, **options)
        with pytest.raises(ArithmeticError):
            pipeline.step(batch(hp_platform), target=batch(hp_platform))
        assert memory_use(module).full == 0
        hp_platform.set_grad(module.weight, None)
        pipeline.step(batch(hp_platform))
        return hp_platform.to_numpy(hp_platform.get_grad(module.weight).to_local()).tolist()

    assert run_ranks(program, 1, hp_platform) == [[[4.0, 4.0], [4.0, 4.0]]]
