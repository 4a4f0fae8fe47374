"""Operations along a dimension that is cut: what they send, and how their results are placed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    explicit_redistribution,
)
from hp_dtensor.platform import Platform
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.rule_proof import Operations
from hp_dtensor.world import record_collectives

ROWS = np.arange(40.0, dtype=np.float32).reshape(10, 4) % 17
FLAT = ROWS.reshape(40)
ITEMSIZE = 4


def _called(
    platform: Platform,
    array: np.ndarray,
    placements: Sequence[Any],
    shape: tuple[int, ...],
    call: Callable[[Any, Any], Any],
) -> tuple[Any, float, list[str], np.ndarray]:
    """Placements of a call's result, bytes and collectives of the call on this rank, and the whole result."""
    mesh = DeviceMesh("cpu", shape, platform=platform)
    x = distribute_tensor(platform.from_numpy(array), mesh, placements)
    with record_collectives() as log, explicit_redistribution():
        result = call(Operations(platform), x)
    return result.placements, log.wire_bytes(), [r.name for r in log.records], platform.to_numpy(result.full_tensor())


def on_ranks(
    platform: Platform,
    array: np.ndarray,
    placements: Sequence[Any],
    call: Callable[[Any, Any], Any],
    shape: tuple[int, ...] = (4,),
) -> list[Any]:
    return run_ranks(_called, int(np.prod(shape)), platform, platform, array, placements, shape, call)


SLICES: dict[str, tuple[Callable[[Any, Any], Any], Any, np.ndarray]] = {
    "a slice": (lambda ops, x: x[2:9], RaggedShard(0, (1, 3, 3, 0)), ROWS[2:9]),
    "a slice of even parts": (lambda ops, x: x[1:9:2], RaggedShard(0, (1, 2, 1, 0)), ROWS[1:9:2]),
    "nothing": (lambda ops, x: x[4:4], Shard(0), ROWS[4:4]),
    "narrow": (lambda ops, x: ops.narrow(x, 0, 0, 8), RaggedShard(0, (3, 3, 2, 0)), ROWS[:8]),
    "a position": (lambda ops, x: x[-2], Partial(), ROWS[-2]),
    "select": (lambda ops, x: ops.select(x, 0, 5), Partial(), ROWS[5]),
    "a slice that is cut evenly": (lambda ops, x: x[:9], Shard(0), ROWS[:9]),
}


@pytest.mark.parametrize("name", SLICES)
def test_what_an_index_picks_stays_where_it_is(hp_platform: Platform, name: str) -> None:
    call, placed, expected = SLICES[name]
    for placements, sent, _, whole in on_ranks(hp_platform, ROWS, (Shard(0),), call):
        assert (placements, sent) == ((placed,), 0)
        np.testing.assert_array_equal(whole, expected)


def test_a_slice_of_a_dimension_cut_twice_stays_where_it_is(hp_platform: Platform) -> None:
    results = on_ranks(hp_platform, ROWS, (Shard(0), Shard(0)), lambda ops, x: x[1:8][1:], shape=(2, 2))
    assert [placements[1] for placements, *_ in results[::2]] == [RaggedShard(0, (1, 2)), RaggedShard(0, (3, 0))]
    for placements, sent, _, whole in results:
        assert placements[0] == Shard(0)
        assert sent == 0
        np.testing.assert_array_equal(whole, ROWS[2:8])


def test_rolling_sends_the_rows_that_change_their_rank(hp_platform: Platform) -> None:
    array = np.arange(24.0, dtype=np.float32).reshape(12, 2)
    for placements, sent, names, whole in on_ranks(hp_platform, array, (Shard(0),), lambda ops, x: ops.roll(x, -1, 0)):
        assert placements == (Shard(0),)
        assert (names, sent) == (["exchange"], 2 * ITEMSIZE)
        np.testing.assert_array_equal(whole, np.roll(array, -1, 0))


def test_flipping_sends_each_part_to_its_mirror(hp_platform: Platform) -> None:
    array = np.arange(12.0, dtype=np.float32)
    for placements, sent, names, whole in on_ranks(hp_platform, array, (Shard(0),), lambda ops, x: ops.flip(x, (0,))):
        assert placements == (Shard(0),)
        assert (names, sent) == (["exchange"], 3 * ITEMSIZE)
        np.testing.assert_array_equal(whole, array[::-1])


def test_rolling_by_whole_turns_sends_nothing(hp_platform: Platform) -> None:
    for _, sent, names, whole in on_ranks(hp_platform, FLAT, (Shard(0),), lambda ops, x: ops.roll(x, 80, 0)):
        assert (sent, names) == (0, [])
        np.testing.assert_array_equal(whole, FLAT)


# Positions that are not there -----------------------------------------------------------------------------------

MISSING: dict[str, Callable[[Any, Any], Any]] = {
    "x[7]": lambda ops, x: x[10],
    "x[-8]": lambda ops, x: x[-11],
    "x[1:, 4]": lambda ops, x: x[1:, 4],
    "select": lambda ops, x: ops.select(x, 0, 10),
    "narrow": lambda ops, x: ops.narrow(x, 0, 8, 3),
    "narrow before the first": lambda ops, x: ops.narrow(x, 0, -11, 1),
}


def _refused(platform: Platform, placements: Sequence[Any], call: Callable[[Any, Any], Any]) -> tuple[str, int]:
    x = distribute_tensor(platform.from_numpy(ROWS), DeviceMesh("cpu", (4,), platform=platform), placements)
    with record_collectives() as log, pytest.raises(IndexError) as refusal:
        call(Operations(platform), x)
    return str(refusal.value), log.count()


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
@pytest.mark.parametrize("name", MISSING)
def test_a_position_that_is_not_there_is_an_index_error_on_every_rank(
    hp_platform: Platform, name: str, placement: Any
) -> None:
    for message, sent in run_ranks(_refused, 4, hp_platform, hp_platform, (placement,), MISSING[name]):
        assert sent == 0
        assert "out of bounds for dimension" in message
        assert "[10, 4]" in message, "the global shape"


def test_the_message_of_a_missing_position(hp_platform: Platform) -> None:
    (message, _), *_ = run_ranks(_refused, 4, hp_platform, hp_platform, (Shard(0),), lambda ops, x: x[2:, 4])
    assert message.startswith("getitem: index 4 is out of bounds for dimension 1 with size 4 of TensorSpec([10, 4]")
