"""Steps whose parameters are gathered once: the gradients of plain accumulation, one gather and one reduction each."""

from __future__ import annotations

import numpy
import pytest
from fsdp_training import Case, held_bytes, loss_of, micro_loss, sharded

from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import FSDPStateError

NUM_MICROBATCHES = 3
CASES = [
    Case(mesh=(3,)),
    Case(mesh=(2, 2), tied=True, twice=True),
    Case(mesh=(2,), frozen=("head", "up"), gradient_sum=True),
    Case(mesh=(2,), reshard_after_forward=False, group_list=True),
    Case(mesh=(2, 1), options={"zero_stage": 1}),
]


def local_gradients(platform, model):
    return {
        name: None if (grad := platform.get_grad(p)) is None else platform.to_numpy(grad.to_local()).copy()
        for name, p in platform.named_parameters(model)
    }


def accumulated(platform, case):
    """Return the gradients of a step with consecutive micro-batches, reduced in the last."""
    model, rank = sharded(platform, case), current_world(platform).rank
    for index in range(NUM_MICROBATCHES):
        model.set_requires_gradient_sync(index == NUM_MICROBATCHES - 1)
        platform.backward(micro_loss(platform, model, case, rank, 0, index))
    return local_gradients(platform, model)


def interleaved(platform, case):
    """Return the gradients and collectives of a step in which all forwards run before the first backward."""
    model, rank = sharded(platform, case), current_world(platform).rank
    with record_collectives() as log:
        step = model.gather_for_step()
        losses = [micro_loss(platform, model, case, rank, 0, index) for index in range(NUM_MICROBATCHES)]
        for loss in losses:
            platform.backward(loss)
            step.collect_gradients()
        step.reduce()
    held = sum(held_bytes(model))
    return local_gradients(platform, model), (log.count("all_gather"), log.count("reduce_scatter")), held


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.mesh}{case.options or ''}{case.frozen or ''}")
def test_the_gradients_are_those_of_accumulation(torch_or, hp_platform, case):
    torch_or(case.frozen)
    expected = run_ranks(accumulated, case.size, hp_platform, hp_platform, case)
    found = run_ranks(interleaved, case.size, hp_platform, hp_platform, case)
    for (grads, (gathers, reductions), held), reference in zip(found, expected, strict=True):
        assert {name for name, grad in grads.items() if grad is None} == {n for n, g in reference.items() if g is None}
        for name, grad in reference.items():
            if grad is not None:
                numpy.testing.assert_array_equal(grads[name], grad, err_msg=name)
        if not case.options:
            num_groups = 2 if case.group_list else 3
            assert gathers == num_groups * (2 if case.frozen else 1)  # frozen parameters have their own buffer
            assert reductions == num_groups
            assert held == 0


def test_gradients_accumulate_in_the_dtype_of_the_reduction(hp_platform):
    """Sums of float16 micro-batches are accumulated in float32: adding 1 to 2048 would be lost."""
    policy = {"param_dtype": "float16", "reduce_dtype": "float32"}
    case = Case(mesh=(2,), policy=policy)
    expected = run_ranks(accumulated, 2, hp_platform, hp_platform, case)
    for (grads, *_), reference in zip(run_ranks(interleaved, 2, hp_platform, hp_platform, case), expected, strict=True):
        for name, grad in reference.items():
            if grad is not None:
                numpy.testing.assert_array_equal(grads[name], grad, err_msg=name)


@pytest.mark.usefixtures("torch_suffices")
def test_steps_do_not_nest_and_end_once(hp_platform):
    def rank():
        case = Case(mesh=(2,))
        model = sharded(hp_platform, case)
        step = model.gather_for_step()
        with pytest.raises(FSDPStateError, match="is in a forward, a backward, or a step that is gathered already"):
            model.gather_for_step()
        step.release()
        with pytest.raises(FSDPStateError, match=r"release\(\): this step has been reduced or released before"):
            step.release()
        # The usual forward and backward work again, and so does a step after an error.
        hp_platform.backward(loss_of(hp_platform, model, case))
        step = model.gather_for_step()
        hp_platform.backward(loss_of(hp_platform, model, case))
        step.drop()
        assert sum(held_bytes(model)) == 0
        model.gather_for_step().reduce()

    run_ranks(rank, 2, hp_platform)


def test_written_parameters_are_gathered_anew(hp_platform):
    def rank():
        case = Case(mesh=(2,))
        model = sharded(hp_platform, case)
        losses = []
        for _ in range(2):
            step = model.gather_for_step()
            losses.append(float(hp_platform.to_numpy(hp_platform.detach(loss_of(hp_platform, model, case)))))
            step.release()
            with hp_platform.no_grad():
                for _, p in hp_platform.named_parameters(model):
                    local = p.to_local()
                    hp_platform.copy_(local, hp_platform.ops.mul(local, 0.5))
        return losses

    for first, second in run_ranks(rank, 2, hp_platform):
        assert first != second


def test_on_real_ranks(hp_platform, rank_pool):
    case = CASES[0]
    expected = run_ranks(accumulated, case.size, hp_platform, hp_platform, case)
    found = rank_pool(case.size).run("test_gathered_step:real_rank", hp_platform.name)
    for grads, reference in zip(found, expected, strict=True):
        for name, grad in reference.items():
            if grad is not None:
                numpy.testing.assert_allclose(grads[name], grad, rtol=2e-6, atol=1e-6, err_msg=name)


def real_rank(name):
    from hp_dtensor.platform.selection import get_platform

    return interleaved(get_platform(name), CASES[0])[0]
