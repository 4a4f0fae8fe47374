"""The first twenty losses of every architecture: on both frameworks, on 1, 2 and 4 ranks, in different layouts."""

from __future__ import annotations

import pytest
from architecture_losses import ARCHITECTURES, LAYOUTS, assert_as_on_one_rank_of_torch
from training_runs import Lab


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_first_losses(lab: Lab, name, layout):
    if lab.platform.name != "torch" and layout.startswith("4"):
        pytest.skip("simulated ranks are slow there: 1 and 2")
    assert_as_on_one_rank_of_torch(lab, name, layout, steps=20)
