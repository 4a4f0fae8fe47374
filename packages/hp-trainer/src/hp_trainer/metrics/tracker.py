"""The interface of everything that is told about the steps of a run."""

from __future__ import annotations

from hp_trainer.records import CheckpointRecord, EvaluationRecord, RunRecord, StepRecord


class Tracker:
    """Told of a run's events by rank 0; a tracker overrides what it cares about."""

    def start(self, run: RunRecord) -> None:
        """Before the first step."""

    def step(self, record: StepRecord) -> None:
        """After an optimizer step."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """After an evaluation."""

    def checkpoint(self, record: CheckpointRecord) -> None:
        """After a checkpoint is complete."""

    def finish(self) -> None:
        """After the last event, also when the run failed; called once."""
