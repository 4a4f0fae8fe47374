"""Uses of a tensor at a prompt: values on the host, comparison, iteration, printing, copies."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    SkipDTensorDispatch,
    distribute_tensor,
    from_local,
)
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

WHOLE = np.arange(6, dtype=np.float32).reshape(3, 2) - 2


def _mesh(platform: Platform) -> DeviceMesh:
    return DeviceMesh("cpu", (2,), mesh_dim_names=("dp",), platform=platform)


def _sharded(platform: Platform, whole: np.ndarray = WHOLE) -> Any:
    return distribute_tensor(platform.from_numpy(whole.copy()), _mesh(platform), (Shard(0),))


def _on_the_host(platform: Platform) -> list[Any]:
    x, ops = _sharded(platform), platform.ops
    total = ops.sum(x)
    assert total.placements == (Partial(),)
    one = from_local(platform.from_numpy(np.float32([[7.0]])), _mesh(platform), (Replicate(),))
    return [total.item(), float(total), bool(total), int(total), one.item(), x.tolist(), np.asarray(x).tolist()]


def test_values_on_the_host_are_the_whole_ones(hp_platform: Platform) -> None:
    expected = [3.0, 3.0, True, 3, 7.0, WHOLE.tolist(), WHOLE.tolist()]
    assert run_ranks(_on_the_host, 2, hp_platform, hp_platform) == [expected] * 2


def _compared(platform: Platform) -> list[Any]:
    x, y = _sharded(platform), _sharded(platform, WHOLE * np.float32([1, -1]))
    same = x == y
    assert isinstance(same, DTensor)
    assert same.placements == (Shard(0),)
    return [same.tolist(), (x > y).tolist(), (x <= 0.0).tolist()]


def test_comparison_is_element_by_element(hp_platform: Platform) -> None:
    other = WHOLE * np.float32([1, -1])
    expected = [np.equal(WHOLE, other).tolist(), np.greater(WHOLE, other).tolist(), np.less_equal(WHOLE, 0).tolist()]
    assert run_ranks(_compared, 2, hp_platform, hp_platform) == [expected] * 2


def _rows(platform: Platform) -> tuple[int, list[Any]]:
    x = _sharded(platform)
    return len(x), [row.tolist() for row in x]


def test_length_and_iteration_are_over_the_whole(hp_platform: Platform) -> None:
    assert run_ranks(_rows, 2, hp_platform, hp_platform) == [(3, WHOLE.tolist())] * 2


def test_length_is_that_of_the_shape_where_operations_are_local_too(hp_platform: Platform) -> None:
    def rank() -> None:
        x = _sharded(hp_platform)
        with SkipDTensorDispatch(hp_platform):
            assert len(x) == x.shape[0]

    run_ranks(rank, 2, hp_platform)


def test_a_scalar_has_no_length(hp_platform: Platform) -> None:
    def length() -> None:
        with pytest.raises(TypeError, match="0-d"):
            len(hp_platform.ops.sum(_sharded(hp_platform)))

    run_ranks(length, 2, hp_platform)


def _printed(platform: Platform) -> tuple[str, str]:
    mesh = _mesh(platform)
    many = from_local(platform.from_numpy(np.zeros((500, 40), np.float32)), mesh, (Shard(0),))
    return repr(_sharded(platform)), repr(many)


def test_printing_shows_layout_and_a_part_of_the_local_values(hp_platform: Platform) -> None:
    printed = run_ranks(_printed, 2, hp_platform, hp_platform)
    for (small, many), value in zip(printed, ("-1.", "2."), strict=True):
        assert small.startswith("DTensor([3, 2], ")
        assert "(dp:S(0)) on mesh (dp=2), local=" in small
        assert value in small
        assert many.startswith("DTensor([1000, 40], ")
        assert len(many) < 1500


def _copied(platform: Platform) -> tuple[list[Any], list[Any], bool]:
    x = _sharded(platform)
    twin = copy.deepcopy({"a": x, "b": [x]})
    with platform.no_grad():
        platform.copy_(twin["a"], platform.ops.zeros(platform.local_shape(x), x.dtype))
    return x.tolist(), twin["b"][0].tolist(), twin["a"].spec is x.spec


def test_deep_copies_have_data_of_their_own(hp_platform: Platform) -> None:
    assert run_ranks(_copied, 2, hp_platform, hp_platform) == [(WHOLE.tolist(), np.zeros((3, 2)).tolist(), True)] * 2
