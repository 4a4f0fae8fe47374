"""The differentiable collectives: values, duals and the types of gradients, exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hp_dtensor.testing.conformance import dual_programs as programs
from hp_dtensor.testing.conformance.ranks import Ranks


@pytest.mark.parametrize(
    "check",
    [
        programs.check_gather_and_slice,
        programs.check_reduce_and_vary,
        programs.check_average,
        programs.check_selections,
        programs.check_all_to_all,
        programs.check_rows,
        programs.check_composition,
    ],
)
def test_duals(ranks: Ranks, check: Callable[..., Any]) -> None:
    ranks.run(check)
