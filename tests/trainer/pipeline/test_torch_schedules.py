"""The classes of torch.distributed.pipelining: outputs, losses and accumulated gradients are torch's."""

from __future__ import annotations

import numpy as np
import pytest

from hp_trainer.exceptions import PipelineError, ScheduleError
from hp_trainer.pipeline import (
    Action,
    ActionSeconds,
    Kind,
    PipelineStage,
    Schedule,
    Schedule1F1B,
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
    from hp_dtensor.parallel import nn

    with nn.building(hp_platform):
        module = nn.Linear(2, 2)
    with pytest.raises(PipelineError, match=r"stage_index 2: expected a number from 0, below num_stages = 2"):
        PipelineStage(module, 2, 2)
    with pytest.raises(PipelineError, match=r"expected stages \[0\] of 1, got 1 of 2"):
        Schedule1F1B(PipelineStage(module, 1, 2), 2)
