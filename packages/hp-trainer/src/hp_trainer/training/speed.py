"""Speed of a run against what its model and its devices would allow."""

from __future__ import annotations

from hp_trainer.training.setup import RankSetup


class ModelSpeed:
    """Model FLOP/s of a job and their part of the devices' peak rate; both are None where nobody tells them.

    A model tells its operations by `training_flops_per_token(sequence_length)`, forward and backward, without what is
    computed again.
    """

    def __init__(self, setup: RankSetup) -> None:
        training, world_size = setup.config.training, setup.mesh.world.size
        per_token = getattr(setup.model, "training_flops_per_token", None)
        tokens = training.global_batch_size * training.sequence_length
        self._step = None if per_token is None else tokens * float(per_token(training.sequence_length))
        rate = setup.platform.peak_flops(training.dtype)
        self._peak = None if rate is None else rate * world_size

    def flops_per_second(self, seconds: float) -> float | None:
        """Return the model FLOP/s of a step that took so long."""
        return None if self._step is None else self._step / seconds

    def utilization(self, seconds: float) -> float | None:
        """Return the fraction of the devices' peak rate that such a step has used."""
        return None if self._step is None or self._peak is None else self._step / seconds / self._peak
