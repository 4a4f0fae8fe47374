"""`register_sharding`: listed placements come before a rule, the cheapest that fits is taken, gradients are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hp_dtensor import DeviceMesh, Replicate, Shard, distribute_tensor, record_collectives, register_sharding
from hp_dtensor.dispatch import operation
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(autouse=True)
def _forget_registered() -> Iterator[None]:
    before = dict(operation._sharding_functions)
    yield
    operation._sharding_functions.clear()
    operation._sharding_functions.update(before)


def by_columns(x: Any, *rest: Any) -> list[Any]:
    assert (x.ndim, tuple(x.shape)) == (2, ROWS.shape)
    return [([R], [R, R]), ([S1], [S1, S0])]


def test_the_listed_placements_come_before_the_rule(hp_platform: Platform) -> None:
    """By its rule a product keeps cut rows; by the list it takes cut columns or whole tensors."""
    register_sharding("mul")(by_columns)

    def program() -> tuple[Any, ...]:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(ROWS.copy()), mesh, [S0])
        w = distribute_tensor(hp_platform.from_numpy(np.array([1, 2, 3], np.float32)), mesh, [R])
        for each in (x, w):
            hp_platform.set_requires_grad(each, True)
        with record_collectives() as log:
            y = hp_platform.ops.mul(x, w)
        hp_platform.backward(hp_platform.ops.sum(y))
        grads = [hp_platform.to_numpy(hp_platform.get_grad(each).full_tensor()) for each in (x, w)]
        return y.placements, log.count("all_gather"), hp_platform.to_numpy(y.full_tensor()), *grads

    for placements, gathers, y, grad, grad_w in run_ranks(program, 2, hp_platform):
        assert placements == (S1,)  # an all-to-all of half the rows is cheaper than gathering them
        assert gathers == 0
        np.testing.assert_array_equal(y, ROWS * [1, 2, 3])
        np.testing.assert_array_equal(grad, np.tile(np.array([1, 2, 3], np.float32), (4, 1)))
        np.testing.assert_array_equal(grad_w, ROWS.sum(0))


WRONG: dict[str, tuple[Any, str]] = {
    "nothing fits": ([([S0], [Shard(2), R])], "none of the 1 registered shardings fits"),
    "no argument": ([([S0], [S0])], "has no placement for argument 1"),
    "no output": ([([], [S0, R])], "has no placement for the output"),
}


@pytest.mark.parametrize(("listed", "message"), WRONG.values(), ids=WRONG)
def test_lists_that_do_not_fit_are_refused(hp_platform: Platform, listed: Any, message: str) -> None:
    register_sharding(["mul"])(lambda *args: listed)

    def program() -> None:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(ROWS.copy()), mesh, [S0])
        with pytest.raises(ShardingRuleError, match=message):
            hp_platform.ops.mul(x, x)

    run_ranks(program, 2, hp_platform)
