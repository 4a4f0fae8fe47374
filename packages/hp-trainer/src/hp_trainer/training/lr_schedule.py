"""Learning rate schedules: the factor on the peak learning rate in each step."""

from __future__ import annotations

import math

from hp_trainer.config import LrScheduleConfig


def learning_rate_factor(schedule: LrScheduleConfig, step: int, total_steps: int) -> float:
    """Return the factor on the peak learning rate, a pure function of the step.

    After `warmup_steps` steps of linear warm-up: `cosine` falls to `final_fraction` at the last step
    (Loshchilov and Hutter, 2017, "SGDR"); `wsd` stays at 1 and falls linearly during the last `decay_steps`
    (Hu et al., 2024, "MiniCPM"); `linear` falls linearly to `final_fraction` at the last step; `constant` stays at 1;
    `inverse_sqrt` falls with the root of the step, from 1 at the end of warm-up, and not below `final_fraction`
    (Vaswani et al., 2017, "Attention is all you need").

    Args:
        step: the next step; the first step is 0.
        total_steps: number of steps of the run; the last step is `total_steps - 1`.
    """
    if step < schedule.warmup_steps:
        # Never 0, so that the first step already changes the weights; the peak is reached right after warm-up.
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse_sqrt":
        # Counted from 1, so that the curve continues the last step of warm-up.
        return max(schedule.final_fraction, math.sqrt((schedule.warmup_steps + 1) / (step + 1)))
    start, end = schedule.warmup_steps, total_steps - 1
    if schedule.kind == "wsd":
        # The last step at the peak. The decay takes a tenth of the run by default (Hu et al., 2024), rounded up.
        decay = schedule.decay_steps if schedule.decay_steps is not None else -(-total_steps // 10)
        start = max(start, end - decay)
    # A run continued beyond its schedule stays at the final value.
    done = 0.0 if step <= start else min(1.0, (step - start) / (end - start)) if end > start else 1.0
    shape = (1 + math.cos(math.pi * done)) / 2 if schedule.kind == "cosine" else 1 - done
    return schedule.final_fraction + (1 - schedule.final_fraction) * shape
