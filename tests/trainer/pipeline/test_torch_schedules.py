"""The classes of torch.distributed.pipelining: outputs, losses and accumulated gradients are torch's."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest

from hp_dtensor import DTensor, Shard, current_world, distribute_tensor, init_device_mesh, nn, record_collectives
from hp_dtensor.exceptions import LaunchError
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_trainer.exceptions import PipelineError, ScheduleError
from hp_trainer.pipeline import (
    Action,
    ActionSeconds,
    Kind,
    PipelineStage,
    Schedule,
    Schedule1F1B,
    TensorChunkSpec,
    build_schedule,
    get_schedule_class,
    simulate,
)
from hp_trainer.pipeline.actions import loop_placement, v_placement

CASES = [("1F1B", 1, False), ("gpipe", 1, False), ("Interleaved1F1B", 2, False), ("ZBVZeroBubble", 2, True)]


@pytest.mark.real_ranks
@pytest.mark.parametrize(("name", "stages", "v_shape"), CASES)
def test_results_are_those_of_torch(hp_platform, rank_pool, name, stages, v_shape):
    if hp_platform.name != "torch":
        pytest.skip("compares with torch.distributed.pipelining")
    for theirs, ours in rank_pool(2).run("torch_comparison:compared", name, stages, v_shape):
        assert (theirs[0] is None) == (ours[0] is None)
        if ours[0] is not None:
            np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
        np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-6)
        assert ours[2].keys() == theirs[2].keys()
        for key, grad in theirs[2].items():
            np.testing.assert_allclose(ours[2][key], grad, rtol=1e-5, atol=1e-7, err_msg=key)


CLASSES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zero_bubble_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


def torch_order(name, ranks, microbatches):
    """Return the order of torch's class, two stages per rank; None where it refuses the numbers."""
    from torch.distributed.pipelining import schedules

    rounds = max(1, microbatches // ranks)
    if (name == "dualpipe_v" and microbatches < 2 * ranks) or (name.startswith("inter") and microbatches % rounds):
        return None
    cls = getattr(schedules, CLASSES[name])
    found = cls.__new__(cls)  # its __init__ needs stages, of which the order takes the numbers alone
    found.pp_group_size, found._n_microbatches, found.n_local_stages = ranks, microbatches, 2
    found.num_stages = 2 * ranks
    found.microbatches_per_round = microbatches // rounds
    orders = [found._calculate_single_rank_operations(rank) for rank in range(ranks)]
    names = {"FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FORWARD": "F"}
    placement = (v_placement if name.endswith("_v") else loop_placement)(ranks, 2)
    actions = ([one for each in order if each for one in each.sub_actions or (each,)] for order in orders)
    made = (
        tuple(Action(x.stage_index, Kind(names[x.computation_type.name]), x.microbatch_index) for x in each)
        for each in actions
    )
    return Schedule(placement, microbatches, tuple(made))


@pytest.mark.parametrize("name", CLASSES)
def test_no_order_is_slower_or_holds_more_than_that_of_torch(name):
    pytest.importorskip("torch")
    ratios = [(1, 1, 0.5), (1, 1, 1), (1, 1.2, 0.8), (1, 1.5, 0.5), (1, 1.8, 0.2), (1, 2, 1), (1, 0.5, 1.5)]
    for ranks, microbatches in ((2, 8), (4, 13), (5, 3), (8, 13), (8, 32)):
        theirs = torch_order(name, ranks, microbatches)
        ours = build_schedule(name, num_ranks=ranks, num_microbatches=microbatches)
        if theirs is None:
            continue
        assert all(
            a <= b for a, b in zip(simulate(ours).peak_activations, simulate(theirs).peak_activations, strict=True)
        )
        for forward, input_grad, weight_grad in ratios:
            for transfer in (0.0, 0.1):
                seconds = ActionSeconds(
                    forward=forward, input_grad=input_grad, weight_grad=weight_grad, transfer=transfer
                )
                # Backwards are merged where that costs less than a hundredth of a step.
                assert simulate(ours, seconds).end <= 1.01 * simulate(theirs, seconds).end


def test_unknown_names_and_stages_are_refused():
    with pytest.raises(ScheduleError, match=r"'2F2B'; expected one of GPipe, 1F1B, Interleaved1F1B"):
        get_schedule_class("2F2B")
    with pytest.raises(PipelineError, match="needs at least one stage on every rank, got none"):
        Schedule1F1B([], 2)


def test_stages_of_another_number_are_refused(hp_platform):
    with nn.building(hp_platform):
        module = nn.Linear(2, 2)
    with pytest.raises(PipelineError, match=r"stage_index 2: expected a number from 0, below num_stages = 2"):
        PipelineStage(module, 2, 2)
    with pytest.raises(PipelineError, match=r"expected stages \[0\] of 1, got 1 of 2"):
        Schedule1F1B(PipelineStage(module, 1, 2), 2)


WIDTH, RANKS, MICROBATCHES = 4, 2, 4


class Deferring(nn.Module):
    """`silu(x @ weight.T)`, whose weight gradients wait in `pending` until `later()` computes the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.pending, self.computed = [], 0

    def forward(self, x):
        ops, weight = self.ops, self.platform.detach(self.linear.weight)
        inputs = self.platform.detach(x)

        def backward(grad):
            self.pending.append((inputs, grad))
            return [ops.matmul(grad, weight)]

        return ops.silu(self.platform.custom_function(lambda y: ops.linear(y, weight, None), backward, x))

    def later(self):
        inputs, grad = self.pending.pop(0)

        def compute():
            self.computed += 1
            with self.platform.no_grad():
                found = self.ops.matmul(self.ops.transpose(grad, 0, 1), inputs)
                before = self.platform.get_grad(self.linear.weight)
                total = found if before is None else self.ops.add(before, found)
            self.platform.set_grad(self.linear.weight, total)

        return compute


class Plain(Deferring):
    def forward(self, x):
        return self.ops.silu(self.linear(x))


def part_of(platform, index, cls=Plain):
    with nn.building(platform):
        part = cls()
    init_parameters(part, lambda name, shape: Normal(0.5), seed=index)
    return part


def batch_of(platform, step):
    random = np.random.default_rng(step)
    x, target = (random.standard_normal((2 * MICROBATCHES, WIDTH)).astype(np.float32) for _ in range(2))
    x = platform.from_numpy(x)
    platform.set_requires_grad(x, True)  # custom functions have a gradient only if an input has
    return x, platform.from_numpy(target)


def loss_of(platform):
    def loss(output, target, factor=1.0):
        return platform.ops.mul(platform.ops.mean(platform.ops.square(platform.ops.sub(output, target))), factor)

    return loss


def trained(platform, parts, step):
    """Run three steps of gradient descent, and return all results and the weights."""
    found = []
    for number in range(3):
        outputs, losses = step(*batch_of(platform, number))
        found.append((outputs if outputs is None else platform.to_numpy(outputs).copy(), losses))
        with platform.no_grad():
            for part in parts:
                weight, grad = part.linear.weight, platform.get_grad(part.linear.weight)
                platform.copy_(weight, platform.ops.sub(weight, platform.ops.mul(grad, 0.5)))
                platform.set_grad(weight, None)
    return found, [platform.to_numpy(platform.detach(part.linear.weight)).copy() for part in parts]


def on_one_device(platform, num_stages, factor):
    parts = [part_of(platform, index) for index in range(num_stages)]

    def step(x, target):
        value, losses = x, []
        for part in parts:
            value = part(value)
        for rows, goals in zip(*(platform.ops.chunk(y, MICROBATCHES, 0) for y in (value, target)), strict=True):
            losses.append(loss_of(platform)(rows, goals, factor))
        platform.backward(functools.reduce(platform.ops.add, [platform.ops.div(x, MICROBATCHES) for x in losses]))
        return platform.detach(value), [float(platform.to_numpy(platform.detach(x))) for x in losses]

    with platform.enable_grad():
        return trained(platform, parts, step)


def on_ranks(platform, cls, stages_per_rank, is_v, factor, part, options):
    rank, num_stages = current_world(platform).rank, RANKS * stages_per_rank
    mesh = init_device_mesh("cpu", (RANKS,), ("pp",), platform=platform)
    mine = [rank, num_stages - 1 - rank][:stages_per_rank] if is_v else list(range(rank, num_stages, RANKS))
    parts = [part_of(platform, index, part) for index in mine]
    stages = [
        PipelineStage(
            each, index, num_stages, "cpu", group=mesh["pp"], dw_builder=each.later if part is Deferring else None
        )
        for index, each in zip(mine, parts, strict=True)
    ]
    given = stages[0] if stages_per_rank == 1 else stages
    schedule = cls(given, n_microbatches=MICROBATCHES, loss_fn=loss_of(platform), **options)

    def step(x, target):
        losses = []
        args = (x,) if 0 in mine else ()
        outputs = schedule.step(*args, target=target, losses=losses, loss_kwargs={"factor": factor})
        return outputs, [float(platform.to_numpy(each)) for each in losses]

    with platform.enable_grad():
        return mine, *trained(platform, parts, step), [each.computed for each in parts]


@pytest.mark.parametrize("part", [Plain, Deferring])
@pytest.mark.parametrize(
    ("name", "stages_per_rank", "is_v", "options"),
    [
        ("gpipe", 1, False, {}),
        ("1F1B", 1, False, {}),
        ("LoopedBFS", 2, False, {}),
        ("Interleaved1F1B", 2, False, {"defer_pp_recv": True}),
        ("InterleavedZeroBubble", 2, False, {}),
        ("ZBVZeroBubble", 2, True, {"defer_pp_recv": True}),
        ("DualPipeV", 2, True, {}),
    ],
)
def test_training_equals_one_device(hp_platform, name, stages_per_rank, is_v, options, part):
    """Outputs, losses with `loss_kwargs`, and weights after steps; weight gradients by autograd and by `dw_builder`."""
    cls = get_schedule_class(name)
    found = run_ranks(on_ranks, RANKS, hp_platform, hp_platform, cls, stages_per_rank, is_v, 3.0, part, options)
    wanted, weights = on_one_device(hp_platform, RANKS * stages_per_rank, 3.0)
    for mine, results, own_weights, computed in found:
        is_last = RANKS * stages_per_rank - 1 in mine
        for (output, losses), (expected, expected_losses) in zip(results, wanted, strict=True):
            if is_last:
                np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
            else:
                assert output is None
                assert losses == []
        for index, weight in zip(mine, own_weights, strict=True):
            np.testing.assert_allclose(weight, weights[index], rtol=1e-5, atol=1e-6)
        assert computed == [3 * MICROBATCHES if part is Deferring else 0] * stages_per_rank


def test_evaluation_takes_the_arguments_of_a_step(hp_platform):
    def program():
        mesh = init_device_mesh("cpu", (RANKS,), ("pp",), platform=hp_platform)
        stage = PipelineStage(part_of(hp_platform, mesh.get_rank()), mesh.get_rank(), RANKS, group=mesh["pp"])
        (x, target), losses, factored = batch_of(hp_platform, 0), ["before"], ["before"]
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_of(hp_platform))
        outputs = schedule.eval(x, target=target, losses=losses)
        nothing = schedule.eval(x, target=target, losses=factored, loss_kwargs={"factor": 2.0}, return_outputs=False)
        return (
            outputs is not None,
            nothing,
            *([float(hp_platform.to_numpy(y)) if y != "before" else y for y in z] for z in (losses, factored)),
        )

    first, last = run_ranks(program, RANKS, hp_platform)
    assert first == (False, None, ["before"], ["before"])
    assert last[:2] == (True, None)
    np.testing.assert_allclose(last[3], [2 * x for x in last[2]], rtol=1e-6)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ({"input_args": (2, WIDTH), "input_grads": (2, WIDTH)}, None),
        ({"output_args": (2, WIDTH), "output_grads": (2, WIDTH)}, None),
        ({"input_args": (2, 3)}, r"stage 1: expected float32\[2, 3\] of each micro-batch, as in input_args, got float"),
        ({"output_args": (5, WIDTH)}, r"as in output_args, got float32\[2, 4\]; change output_args, or leave it out"),
        ({"output_grads": (1,)}, r"as in output_grads"),
        ({"input_grads": (1,)}, r"as in input_grads"),
    ],
)
def test_micro_batches_are_checked_against_examples(hp_platform, examples, message):
    def program():
        mesh = init_device_mesh("cpu", (RANKS,), ("pp",), platform=hp_platform)
        made = {name: hp_platform.zeros(shape, hp_platform.dtype("float32")) for name, shape in examples.items()}
        given = made if mesh.get_rank() == 1 else {}
        stage = PipelineStage(part_of(hp_platform, 0), mesh.get_rank(), RANKS, "cpu", **given, group=mesh["pp"])
        x, target = batch_of(hp_platform, 0)
        Schedule1F1B(stage, MICROBATCHES, loss_of(hp_platform)).step(x, target=target)

    with contextlib.nullcontext() if message is None else pytest.raises(LaunchError, match=message):
        run_ranks(program, RANKS, hp_platform)


def test_a_callback_gives_the_mesh_of_a_received_dtensor(hp_platform):
    """As torch's: of a pipeline over a process group, of which no other mesh is known."""

    class Placed(nn.Module):
        def forward(self, x):
            return x if isinstance(x, DTensor) else distribute_tensor(x, self.mesh, [Shard(1)])

    def program(knows):
        mesh = init_device_mesh("cpu", (2, 2), ("pp", "tp"), platform=hp_platform)
        with nn.building(hp_platform):
            module = Placed()
        module.mesh, asked = mesh["tp"], []

        def get_mesh(names, layout):
            asked.append((names, layout))
            return mesh[names]

        index = mesh["pp"].get_local_rank()
        stage = PipelineStage(module, index, 2, group=mesh["pp"].get_group(), get_mesh=get_mesh if knows else None)
        x, _ = batch_of(hp_platform, 0)
        output = Schedule1F1B(stage, 2).eval(x)
        return asked, None if output is None else np.array_equal(*map(hp_platform.to_numpy, (output.full_tensor(), x)))

    assert run_ranks(program, 4, hp_platform, True) == [([], None)] * 2 + [([(("tp",), None)] * 2, True)] * 2
    with pytest.raises(LaunchError, match=r"stage 1 receives a DTensor; give .* a mesh"):
        run_ranks(program, 4, hp_platform, False)


def test_receives_are_deferred(hp_platform):
    """Without it, receives are posted as a step begins."""

    def program(defers):
        mesh = init_device_mesh("cpu", (RANKS,), ("pp",), platform=hp_platform)
        stages = [
            PipelineStage(part_of(hp_platform, 0), index, 4, group=mesh["pp"])
            for index in (mesh.get_rank(), mesh.get_rank() + 2)
        ]
        schedule = get_schedule_class("LoopedBFS")(stages, 2, loss_of(hp_platform), defer_pp_recv=defers)
        x, target = batch_of(hp_platform, 0)
        schedule.step(x, target=target)
        with record_collectives() as log:
            schedule.step(x, target=target)
        return [record.name for record in log.records]

    early, late = (run_ranks(program, RANKS, hp_platform, defers)[0] for defers in (False, True))
    assert early[:2] == ["receive", "receive"]
    assert late[:2] == ["send", "send"]
    assert sorted(early) == sorted(late)


def test_arguments_that_cannot_be_taken_are_refused(hp_platform):
    stage = PipelineStage(part_of(hp_platform, 0), 0, 1)
    x, target = batch_of(hp_platform, 0)

    def step(message, *, loss_fn=None, options=None, **given):
        with pytest.raises(PipelineError, match=message):
            Schedule1F1B(stage, 2, loss_fn, **(options or {})).step(x, target=target, **given)

    def program():
        with pytest.raises(
            PipelineError, match="backward_requires_autograd=False is for backwards that are registered"
        ):
            get_schedule_class("LoopedBFS")([stage], 2, None, None, True, False)
        with pytest.raises(
            PipelineError, match="expected a tensor or a tuple of tensors as input_args, got tuple, NoneT"
        ):
            PipelineStage(stage.submod, 0, 1, None, ((2, 4), None))
        for given in (stage.submod, [stage.submod]):
            with pytest.raises(PipelineError, match=r"expected hp_trainer.pipeline.PipelineStage\(.*, got .*\.Plain"):
                Schedule1F1B(given, 2)
        step("losses: expected a list, which is filled, got tuple", loss_fn=loss_of(hp_platform), losses=())
        step("losses were asked for, and the pipeline has no loss_fn", losses=[])
        step(
            r"arguments: expected one TensorChunkSpec\(dim\) or None for each of 1 values, got 0",
            options={"args_chunk_spec": (0,)},
        )
        step("kwargs_chunk_spec: expected a dict of argument names", options={"kwargs_chunk_spec": (0,)})
        step(
            "output_merge_spec: expected one .* of 1 values, got 2 of them",
            options={"output_merge_spec": TensorChunkSpec.from_tuple((0, 0))},
        )

    run_ranks(program, 1, hp_platform)
