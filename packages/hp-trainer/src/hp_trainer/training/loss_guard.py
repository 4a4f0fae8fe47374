"""Rules for losses that are no finite numbers, or spikes; every rank sees the same numbers and decides alike."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Literal

from hp_moe import ExpertParallelError
from hp_trainer.config import GuardConfig
from hp_trainer.exceptions import CheckpointError, TrainingError

Action = Literal["go on", "stop", "skip", "rollback"]

_ADVICE = (
    "; this step changed nothing. Go on from the last checkpoint with a lower optimizer.lr or training.clip_norm, or "
    "with training.dtype=float32 if it is another; if it comes again, from an earlier one: `hp-train checkpoints RUN` "
    "lists them, `hp-train resume RUN --from-step=N` takes one"
)


@dataclass(frozen=True)
class Verdict:
    """Decision about a step before it updates anything.

    Attributes:
        action: to take.
        reason: a clause that names the number; empty where the step goes on.
    """

    action: Action
    reason: str = ""

    def __str__(self) -> str:
        way = "the step is skipped" if self.action == "skip" else "the run goes back to its last checkpoint"
        return f"{self.reason}; {way} (training.guard)"


GO_ON = Verdict("go on")


def nonfinite_scores(error: Exception, step: int) -> TrainingError | None:
    """Return what to tell of scores of experts that are no finite numbers; None: the error is another."""
    if isinstance(error, ExpertParallelError) and error.only_nonfinite:
        return TrainingError(f"step {step}: {error}{_ADVICE}")
    return None


class LossGuard:
    """Judges the loss and the norm of the gradient of each step.

    Args:
        config: the rules.
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._interventions = 0

    def judge_loss(self, loss: float, step: int) -> Verdict:
        """Return the decision about a step with this loss.

        Raises:
            TrainingError: the rule is to stop, or steps in a row have been given up too often.
        """
        if not math.isfinite(loss):
            return self._decide(self._config.on_nonfinite, f"the loss of step {step} is {loss}")
        if self._config.on_spike != "ignore" and len(self._losses) == self._config.spike_window:
            mean, deviation = fmean(self._losses), pstdev(self._losses)
            if loss > mean + self._config.spike_sigmas * deviation:
                return self._decide(
                    self._config.on_spike,
                    f"the loss of step {step} is {loss:.4g}, far above the mean {mean:.4g} of the last "
                    f"{len(self._losses)} steps, whose standard deviation is {deviation:.2g}",
                )
        return GO_ON

    def judge_norm(self, norm: float, step: int) -> Verdict:
        """Return the decision about a step whose gradient has this norm; see `judge_loss`."""
        if math.isfinite(norm):
            return GO_ON
        return self._decide(self._config.on_nonfinite, f"the norm of the gradient of step {step} is {norm}")

    def accept(self, loss: float) -> None:
        """Note the loss of a step that updated the weights."""
        self._interventions = 0
        self._losses.append(loss)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs in order to decide alike, as JSON values."""
        losses = [] if self._config.on_spike == "ignore" else list(self._losses)
        return {"losses": losses, "interventions": self._interventions}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            losses, self._interventions = [float(loss) for loss in state["losses"]], int(state["interventions"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"a checkpoint is damaged: state.guard: {error!r}") from error
        self._losses.clear()
        self._losses.extend(losses)

    def keep_count(self, of: int) -> None:
        """Count on from `of` steps given up in a row: going back must not begin the count anew."""
        self._interventions = of

    @property
    def interventions(self) -> int:
        """Steps in a row that were skipped or gone back on."""
        return self._interventions

    def _decide(self, action: Action, reason: str) -> Verdict:
        if action == "stop":
            raise TrainingError(reason + _ADVICE)
        self._interventions += 1
        if self._interventions > self._config.max_interventions:
            raise TrainingError(
                f"{reason}, after {self._config.max_interventions} steps in a row that were given up "
                f"(training.guard.max_interventions){_ADVICE}"
            )
        return Verdict(action, reason)
