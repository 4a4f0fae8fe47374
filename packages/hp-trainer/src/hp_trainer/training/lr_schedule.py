"""The learning rate as a pure function of the step, so that a resumed run needs no state for it."""

from __future__ import annotations

import math

from hp_trainer.config import LrScheduleConfig


def learning_rate_factor(schedule: LrScheduleConfig, step: int, total_steps: int) -> float:
    """Return the factor on the peak learning rate.

    After `warmup_steps` steps of linear warm-up: `cosine` falls to `final_fraction` at the last step
    (Loshchilov and Hutter, 2017, "SGDR"); `wsd` stays at 1 and falls linearly during the last `decay_steps`
    (Hu et al., 2024, "MiniCPM"); `linear` falls linearly to `final_fraction` at the last step; `constant` stays at 1;
    `inverse_sqrt` falls with the root of the step, from 1 at the end of warm-up, and not below `final_fraction`
    (Vaswani et al., 2017, "Attention is all you need").

    Args:
        step: the step about to be done; the first one is 0.
        total_steps: steps of the whole run; the last one is `total_steps - 1`.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse_sqrt":
        # Counted from 1, so that the curve goes on from warm-up's last step.
        return max(schedule.final_fraction, math.sqrt((schedule.warmup_steps + 1) / (step + 1)))
    begin = _wsd_begin(schedule, total_steps) if schedule.kind == "wsd" else schedule.warmup_steps
    done = _fraction_done(step, begin, total_steps - 1)
    shape = (1 + math.cos(math.pi * done)) / 2 if schedule.kind == "cosine" else 1 - done
    return schedule.final_fraction + (1 - schedule.final_fraction) * shape


def _wsd_begin(schedule: LrScheduleConfig, total_steps: int) -> int:
    """Return the last step at the peak."""
    decay = schedule.decay_steps if schedule.decay_steps is not None else -(-total_steps // 10)
    return max(schedule.warmup_steps, total_steps - 1 - decay)


def _fraction_done(step: int, begin: int, end: int) -> float:
    if step <= begin:
        return 0.0
    return min(1.0, (step - begin) / (end - begin)) if end > begin else 1.0
