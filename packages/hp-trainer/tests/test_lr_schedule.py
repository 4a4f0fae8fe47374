"""The learning rate is a pure function of the step."""

from __future__ import annotations

import pytest

from hp_trainer.config import LrScheduleConfig
from hp_trainer.training.optimizer import learning_rate_factor


def factors(total: int, **options: object) -> list[float]:
    schedule = LrScheduleConfig(**options)
    return [learning_rate_factor(schedule, step, total) for step in range(total)]


def test_warm_up_rises_linearly_to_the_peak() -> None:
    assert factors(6, kind="constant", warmup_steps=3) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_cosine_falls_from_the_peak_to_the_final_fraction() -> None:
    assert factors(5, kind="cosine", final_fraction=0.2) == pytest.approx(
        [1, 0.2 + 0.8 * (1 + 0.5**0.5) / 2, 0.6, 0.2 + 0.8 * (1 - 0.5**0.5) / 2, 0.2]
    )


def test_cosine_begins_after_warm_up() -> None:
    assert factors(5, kind="cosine", warmup_steps=2, final_fraction=0) == pytest.approx([1 / 3, 2 / 3, 1, 0.5, 0])


def test_wsd_stays_at_the_peak_and_falls_linearly_at_the_end() -> None:
    assert factors(7, kind="wsd", decay_steps=4, final_fraction=0) == pytest.approx([1, 1, 1, 0.75, 0.5, 0.25, 0])


def test_wsd_decays_over_a_tenth_by_default() -> None:
    found = factors(100, kind="wsd", final_fraction=0)
    assert found[:90] == [1.0] * 90
    assert found[89:] == pytest.approx([1 - i / 10 for i in range(11)])


def test_linear_falls_from_the_peak_to_the_final_fraction() -> None:
    assert factors(6, kind="linear", warmup_steps=1, final_fraction=0.2) == pytest.approx([0.5, 1, 0.8, 0.6, 0.4, 0.2])


def test_inverse_sqrt_goes_on_from_warm_up_and_halves_at_four_times_the_step() -> None:
    found = factors(400, kind="inverse_sqrt", warmup_steps=9, final_fraction=0.2)
    assert found[9] == 1
    assert found[39] == pytest.approx(0.5)
    assert found[399] == 0.2
    assert found == sorted(found[:9]) + sorted(found[9:], reverse=True)


@pytest.mark.parametrize("kind", ["cosine", "wsd", "linear", "constant", "inverse_sqrt"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5, 50])
@pytest.mark.parametrize("total", [1, 2, 7])
def test_no_step_leaves_the_range(kind: str, warmup_steps: int, total: int) -> None:
    found = factors(total, kind=kind, warmup_steps=warmup_steps, decay_steps=20)
    assert all(0 < factor <= 1 for factor in found)
