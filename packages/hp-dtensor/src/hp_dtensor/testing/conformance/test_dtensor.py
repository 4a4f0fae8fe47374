"""DTensors: local shards with a spec, on simulated and on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hp_dtensor.testing.conformance import dtensor_programs as programs
from hp_dtensor.testing.conformance.ranks import Ranks


@pytest.mark.parametrize(
    "check",
    [
        programs.check_wrapping,
        programs.check_shared_memory,
        programs.check_parameters,
        programs.check_gradient_placements,
        programs.check_operations,
        programs.check_round_trips,
        programs.check_two_axes,
        programs.check_local_gradients,
        programs.check_wrong_shards,
    ],
)
def test_dtensors(ranks: Ranks, check: Callable[..., Any]) -> None:
    ranks.run(check)
