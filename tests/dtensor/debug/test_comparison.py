"""Comparison of recordings that are made of digests: replicas, values that are not finite, and what is not compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_dtensor.debug import Comparison, Event, Recording, compare, measure_growth
from hp_dtensor.debug.digest import Digester, Part, Region, combine
from hp_dtensor.exceptions import RecordingError
from hp_dtensor.platform.interface import Platform

SHAPE = (32, 16)
rng = np.random.default_rng(0)
W, G, OTHER = (rng.normal(size=SHAPE).astype(np.float32) for _ in range(3))
ROUNDED = G * np.float32(1 + 2.0**-23)
LOW, HIGH = slice(0, 16), slice(16, 32)
Make = Callable[..., Recording]


@pytest.fixture(scope="module")
def recorded(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A recording of one weight and one gradient, from the rows of each rank, as a file has it."""
    digester, path = Digester(platform), tmp_path_factory.mktemp("recorded") / "digests.gz"

    def combined(parts: list[tuple[np.ndarray, slice]]) -> Any:
        found = []
        for rank, (values, rows) in enumerate(parts):
            region = Region.of(SHAPE, [np.arange(SHAPE[0])[rows], np.arange(SHAPE[1])])
            local = platform.from_numpy(np.ascontiguousarray(values[rows], np.float32))
            numbers = platform.to_numpy(digester.local(local, region)).astype(np.float64)
            found.append(Part(rank, region.key, region.numel, 0, numbers))
        return combine(SHAPE, found)

    def make(*gradient: Any, after: Any = (W - 1e-3 * G,), growth: float | None = None, **about: Any) -> Recording:
        def event(pass_: str, parts: Any, growth: float | None = growth) -> Event:
            placed = [each if isinstance(each, tuple) else (each, slice(None)) for each in parts]
            return Event(pass_, "w", "float32", combined(placed), growth)

        gradients = [event("gradient", gradient)] if gradient else []
        facts = {"world_size": len(gradient), "dtypes": ["float32"], **about}
        made = Recording(facts, {0: [event("weights", (W,), None)], 1: [*gradients, event("weights", after)]})
        made.save(path)
        return Recording.load(path)

    return make


def both(a: Recording, b: Recording) -> Comparison:
    """Compare A with B, and B with A, which must have the same verdict."""
    found = compare(a, b)
    assert compare(b, a).verdict == found.verdict
    return found


def test_a_differing_replica_of_either_side_is_found(recorded: Make) -> None:
    alone, broken = recorded(G, growth=1e-7), recorded(G, OTHER)
    assert compare(alone, recorded(G)).verdict == "equal"
    for found, side in ((both(alone, broken), "B"), (compare(broken, alone), "A")):
        assert found.verdict == "different"
        assert found.kind is not None
        assert found.kind.name == "replicas differ"
        assert f"rank 1 of {side}" in found.kind.cause
        assert f"ranks 1 of {side}" in found.kind.where
    # Not finite on one replica only.
    assert both(alone, recorded(G, G, G * np.float32(np.nan))).verdict == "different"


def test_replicas_of_shards_are_compared_part_by_part(recorded: Make) -> None:
    alone = recorded(G, growth=1e-7)
    rounded = recorded((G, LOW), (G, HIGH), (ROUNDED, LOW), (G, HIGH))
    assert both(alone, rounded).verdict == "within rounding"
    assert both(alone, recorded((G, LOW), (G, HIGH), (OTHER, LOW), (G, HIGH))).verdict == "different"


def test_replicas_of_an_update_are_updates(recorded: Make) -> None:
    alone, after = recorded(G, growth=1e-7), W - 1e-3 * G
    rounded = after.astype(np.float32)
    rounded[0, 0] = np.nextafter(rounded[0, 0], np.float32(9))
    assert both(alone, recorded(G, after=(after, rounded))).verdict == "within rounding"
    found = both(alone, recorded(G, after=(after, W)))
    assert found.verdict == "different"
    assert found.first is not None
    assert found.first.pass_ == "update"
    assert found.first.relative == pytest.approx(1, rel=0.5)


def test_growth_is_of_rounding_only(recorded: Make) -> None:
    with pytest.raises(RecordingError, match="step 1, gradient of w has other values on ranks 1"):
        measure_growth(recorded(G, OTHER), recorded(ROUNDED, OTHER))
    nan = G.copy()
    nan[0, 0] = np.nan
    measured = measure_growth(recorded(G), recorded(nan))
    assert measured.steps[1][0].growth is None
    found = both(measured, recorded(-G))
    assert found.verdict == "different"
    assert "growth of rounding is not known of 1 tensors" in str(found)


def test_tolerances_that_explain_everything_check_nothing(recorded: Make) -> None:
    found = both(recorded(G, growth=0.05), recorded(0 * G))
    assert [each.pass_ for each in found.not_checked] == ["gradient"]
    assert "within rounding: 2 tensors of 1 steps, 1 not checked" in str(found)


def test_two_sides_that_are_not_finite_are_not_comparable(recorded: Make) -> None:
    found = both(recorded(G * np.float32(np.nan), growth=1e-7), recorded(G * np.float32(np.inf)))
    assert found.verdict == "not comparable"
    assert "not comparable: A and B are not finite from step 1, gradient of w on" in str(found)


def test_what_is_not_compared_is_told(recorded: Make) -> None:
    alone = recorded(G, growth=1e-7)
    lost = both(alone, recorded())
    assert lost.kind is not None
    assert (lost.verdict, lost.kind.cause) == ("different", "B has no gradient of this weight")
    # Frameworks differ in the gradient of a weight that was not used.
    assert both(recorded(0 * G, growth=1e-7), recorded()).verdict == "equal"
    found = both(alone, recorded(G, unplaced=["pool"]))
    assert found.verdict == "equal where compared"
    assert "equal where compared: 3 of 4 tensors" in str(found)
    assert "B has not recorded 1 outputs" in str(found)


def test_squares_that_underflow_are_not_the_norm(recorded: Make) -> None:
    a, b = recorded(G * np.float32(1e-24), growth=1e-7), recorded(3 * G * np.float32(1e-24))
    for side in (a, b):
        # As sums of float32 have it.
        side.steps[1][0].digest.values[5] = 0
    assert both(a, b).verdict == "different"
