"""The classes of torch.distributed.pipelining: outputs, losses and accumulated gradients are torch's."""

from __future__ import annotations

import numpy as np
import pytest

from hp_trainer.exceptions import PipelineError, ScheduleError
from hp_trainer.pipeline import PipelineStage, Schedule1F1B, get_schedule_class

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
