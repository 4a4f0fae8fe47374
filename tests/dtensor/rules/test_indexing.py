"""Lists, ranges, arrays and truth values as indices of DTensors, read and written, under every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.exceptions import IndexOutOfRangeError, ShardingRuleError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Placement, Replicate, Shard
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.testing.simulated import run_ranks

FULL = np.arange(35, dtype=np.float32).reshape(7, 5)
LAYOUTS = [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(0))]
INDICES: dict[str, Any] = {
    "a list": [0, 2],
    "a list of columns": (slice(None), [1, 0]),
    "an empty list": [],
    "a list and a slice": (slice(1, 6), [1, -1]),
    "two lists": ([0, 6], [1, 2]),
    "lists apart": ([1, 2], None, [0, 3]),
    "a list and a number": (3, [1, 2]),
    "a list behind": (..., [0]),
    "an array of two dimensions": np.array([[0, 1], [5, 2]]),
    "a range": range(2),
    "truth values": [True, False] * 3 + [True],
    "truth values of columns": (slice(None), np.array([True] * 2 + [False] * 3)),
    "a mask": FULL > 7,
    "a NumPy number": np.int64(1),
}


def _mesh(platform: Platform) -> DeviceMesh:
    return DeviceMesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), platform=platform)


def _read(platform: Platform, index: Any) -> list[np.ndarray]:
    mesh = _mesh(platform)
    tensors = [distribute_tensor(platform.from_numpy(FULL.copy()), mesh, placed) for placed in LAYOUTS]
    return [platform.to_numpy(x[index].full_tensor()) for x in tensors]


@pytest.mark.parametrize("name", INDICES)
def test_what_an_index_picks(hp_platform: Platform, name: str) -> None:
    for found in run_ranks(_read, 4, hp_platform, hp_platform, INDICES[name])[0]:
        np.testing.assert_array_equal(found, FULL[INDICES[name]])


def _written(platform: Platform, index: Any, values: list[np.ndarray | float]) -> list[list[np.ndarray]]:
    mesh = _mesh(platform)

    def written(value: np.ndarray | float, placed: tuple[Placement, ...]) -> np.ndarray:
        x = distribute_tensor(platform.from_numpy(FULL.copy()), mesh, placed)
        given: Any = value
        if isinstance(value, np.ndarray):
            sharded = [Shard(0) if value.ndim else Replicate(), Replicate()]
            given = distribute_tensor(platform.from_numpy(np.ascontiguousarray(value)), mesh, sharded)
        x[index] = given
        assert x.placements == placed
        return platform.to_numpy(x.full_tensor())

    return [[written(value, placed) for placed in LAYOUTS] for value in values]


@pytest.mark.parametrize("name", INDICES)
def test_what_is_written_by_an_index(hp_platform: Platform, name: str) -> None:
    """A value of every element, one that is broadcast in front, one that is behind, and a number."""
    index = INDICES[name]
    full = -1 - np.arange(FULL[index].size, dtype=np.float32).reshape(FULL[index].shape)
    values: list[Any] = [full, full[..., :1], full[0] if full.ndim > 1 and full.size else full, 3.0]
    written = run_ranks(_written, 4, hp_platform, hp_platform, index, values)[0]
    for value, of_layouts in zip(values, written, strict=True):
        expected = FULL.copy()
        expected[index] = value
        for found in of_layouts:
            np.testing.assert_array_equal(found, expected)


BY_A_TENSOR = {"behind a slice": (slice(1, 5), 3), "before a slice": (3, slice(1, 4)), "alone": (6,)}


def _written_by_a_tensor(platform: Platform, index: tuple[Any, ...], value: np.ndarray) -> list[np.ndarray]:
    mesh, full_value = _mesh(platform), (Replicate(), Replicate())
    given = tuple(
        distribute_tensor(platform.from_numpy(np.array(item)), mesh, full_value) if isinstance(item, int) else item
        for item in index
    )
    found = []
    for placed in LAYOUTS:
        x = distribute_tensor(platform.from_numpy(FULL.copy()), mesh, placed)
        x[given] = distribute_tensor(platform.from_numpy(value), mesh, full_value)
        found.append(platform.to_numpy(x.full_tensor()))
    return found


@pytest.mark.parametrize("name", BY_A_TENSOR)
def test_what_is_written_by_a_tensor_of_one_position(hp_platform: Platform, name: str) -> None:
    index = BY_A_TENSOR[name]
    for size in (FULL[index].size, 1):
        value = -1 - np.arange(size, dtype=np.float32)
        expected = FULL.copy()
        expected[index] = value
        for found in run_ranks(_written_by_a_tensor, 4, hp_platform, hp_platform, index, value)[0]:
            np.testing.assert_array_equal(found, expected)


def _refused(platform: Platform) -> list[str]:
    x = distribute_tensor(platform.from_numpy(FULL.copy()), _mesh(platform), (Shard(0), Shard(1)))
    messages = []
    for error, index in (
        (IndexOutOfRangeError, [0, 7]),
        (IndexOutOfRangeError, (slice(None), [-6])),
        (IndexOutOfRangeError, [True, False]),
        (ShardingRuleError, [[0, 1], [2, 3]]),
        (ShardingRuleError, [0, 1.5]),
        (ShardingRuleError, np.bool_(True)),
        (ShardingRuleError, (0, np.array(False))),
        (ShardingRuleError, np.array([None])),
        (ShardingRuleError, np.array([0.5])),
        (IndexOutOfRangeError, ([0], [0], [0])),
        (IndexOutOfRangeError, (0, 0, 0)),
    ):
        with pytest.raises(error) as refusal:
            x[index]
        with pytest.raises(error):
            x[index] = 1.0
        messages.append(str(refusal.value))
    return messages


def test_every_rank_refuses_positions_that_are_not_there(hp_platform: Platform) -> None:
    for messages in run_ranks(_refused, 4, hp_platform, hp_platform):
        assert "index 7 is out of bounds for dimension 0 with size 7" in messages[0]
        assert "index -6 is out of bounds for dimension 1 with size 5" in messages[1]
        assert "a mask of shape [2] does not fit" in messages[2]
        assert "a list of lists" in messages[3]
        assert "lists, arrays and DTensors of positions" in messages[4]
        assert "a single boolean as the index" in messages[5]
        assert "a single boolean as the index" in messages[6]
        assert "an array of object as the index" in messages[7]
        assert "an array of float64 as the index" in messages[8]
        assert "3 indices for a 2-dimensional tensor" in messages[9]
        assert "3 indices for a 2-dimensional tensor" in messages[10]


BYTES = np.array([0, 1, 1, 0, 0, 1, 0], np.uint8)


def _by_bytes(platform: Platform) -> list[np.ndarray]:
    mesh = _mesh(platform)
    x = distribute_tensor(platform.from_numpy(FULL.copy()), mesh, (Shard(0), Replicate()))
    read = x[BYTES]
    x[BYTES] = -1.0
    return [platform.to_numpy(each.full_tensor()) for each in (read, x)]


def _refuses_bytes(platform: Platform) -> None:
    mesh = _mesh(platform)
    x = distribute_tensor(platform.from_numpy(FULL.copy()), mesh, (Shard(0), Replicate()))
    for index in (BYTES, distribute_tensor(platform.from_numpy(BYTES), mesh, (Replicate(), Replicate()))):
        with pytest.raises(ShardingRuleError, match="uint8"):
            x[index]
        with pytest.raises(ShardingRuleError, match="uint8"):
            x[index] = -1.0


def test_bytes_are_truth_values_where_the_framework_says_so(hp_platform: Platform) -> None:
    """Elsewhere they are refused: MindSpore takes no such tensor as an index, and NumPy takes them for positions."""
    if not hp_platform.masks_of_bytes:
        run_ranks(_refuses_bytes, 4, hp_platform, hp_platform)
        return
    expected = FULL.copy()
    expected[BYTES > 0] = -1
    for read, written in run_ranks(_by_bytes, 4, hp_platform, hp_platform):
        np.testing.assert_array_equal(read, FULL[BYTES > 0])
        np.testing.assert_array_equal(written, expected)


def test_an_array_of_small_integers_counts_from_the_end_of_a_long_dimension(hp_platform: Platform) -> None:
    def rank() -> list[float]:
        mesh = DeviceMesh("cpu", (2,), platform=hp_platform)
        x = distribute_tensor(hp_platform.from_numpy(np.arange(200, dtype=np.float32)), mesh, [Shard(0)])
        return hp_platform.to_numpy(x[np.array([1, -1], np.int8)].full_tensor()).tolist()

    assert run_ranks(rank, 2, hp_platform) == [[1.0, 199.0]] * 2
