"""Ten thousand steps and a thousand checkpoints: memory, descriptors, threads and disk stay as they were."""

from __future__ import annotations

import pytest
from long_runs import assert_constant, train


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("background", [False, True])
def test_a_long_run_holds_no_more_at_its_end(lab, plugged, background):
    found = train(lab, plugged, checkpoints=1000, steps_each=10, background=background)
    print(found[0], found[len(found) // 2], found[-1], sep="\n")
    assert_constant(found, memory=16 << 20)
