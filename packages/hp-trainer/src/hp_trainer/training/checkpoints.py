"""Saving and loading of the training state: model, optimizer and position in the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hp_trainer.checkpoint import Checkpoint, PendingSave, Storage, find_latest
from hp_trainer.config import to_plain
from hp_trainer.exceptions import CheckpointError
from hp_trainer.run import check_model
from hp_trainer.training.health import LossGuard
from hp_trainer.training.setup import RankSetup
from hp_trainer.training.state import load_state, state_parts


@dataclass(frozen=True)
class Progress:
    """Position of a run: number of optimizer steps done, and number of samples read in the global order."""

    step: int = 0
    samples: int = 0


class TrainingCheckpoints:
    """Saves and loads everything that training changes, independent of layout, number of ranks and platform.

    Args:
        may_write: see `PendingSave`.

    Attributes:
        guard: the loss guard, whose state is part of a checkpoint.
    """

    def __init__(self, setup: RankSetup, storage: Storage, may_write: Callable[[], None] = lambda: None) -> None:
        self._setup, self._storage, self._may_write = setup, storage, may_write
        self.guard = LossGuard(setup.config.training.guard)

    def newest(self) -> str | None:
        """Return the folder name of the newest valid checkpoint; None: there is none."""
        found = find_latest(self._storage).checkpoint
        return None if found is None else found.folder

    def start(self, progress: Progress, extra_state: Mapping[str, Any], *, background: bool) -> PendingSave:
        """Start a checkpoint on all ranks; it is complete after `publish`.

        Args:
            extra_state: further values of its state, such as the loss, for lists of checkpoints.
            background: write it in a thread; see `PendingSave`.

        Raises:
            CheckpointError: on every rank if it cannot be started.
        """
        setup, elsewhere = self._setup, set()
        if setup.pipeline is not None:
            # This rank's copies of tied weights, which another stage writes.
            tied, parameters = setup.pipeline.tied, setup.platform.named_parameters(setup.model)
            elsewhere = {name for name, parameter in parameters if tied.is_copy(parameter)}
        return PendingSave(
            self._storage,
            state_parts(setup.platform, setup.model, setup.optimizer, setup.stage_mesh, elsewhere, setup.average),
            step=progress.step,
            model=to_plain(setup.config.model),
            state=self._state(progress) | dict(extra_state),
            group=setup.mesh.world.all,
            keep=setup.config.checkpoint.keep,
            keep_best=setup.config.checkpoint.keep_best,
            may_write=self._may_write,
            background=background,
        )

    def load(self, folder: str) -> Progress:
        """Load model, optimizer and loss scaling from a checkpoint, and return its position.

        Raises:
            CheckpointError: it is of another model or of other data, or damaged.
        """
        setup = self._setup
        checkpoint = Checkpoint(self._storage, folder)
        # Cheap comparisons of the index come first: they read no tensor.
        check_model(checkpoint, setup.config)
        saved, found = checkpoint.state.get("dataset", {}), self._setup.dataset.fingerprint
        differ = [name for name in {**saved, **found} if saved.get(name) != found.get(name)]
        if differ:
            what = ", ".join(f"{name} is {saved.get(name)!r} there and {found.get(name)!r} here" for name in differ)
            raise CheckpointError(f"{checkpoint.folder} was trained on other data than this run's: {what}")
        # Read before anything is changed, so that a damaged checkpoint leaves the run unchanged.
        optimizer_steps, samples = _counter(checkpoint, "optimizer_steps"), _counter(checkpoint, "samples")
        all_gather_object = None if setup.pipeline is None else setup.pipeline.all_gather_object
        load_state(setup.platform, setup.model, setup.optimizer, checkpoint, all_gather_object, setup.average)
        # May be smaller than the run's step: discarded and overflowed steps do not count for bias correction.
        setup.optimizer.num_steps = optimizer_steps
        # Empty without loss scaling; then the scale starts from its configured value.
        if checkpoint.state.get("loss_scaling"):
            setup.scaler.load_state_dict(checkpoint.state["loss_scaling"])
        if checkpoint.state.get("guard"):
            self.guard.load_state(checkpoint.state["guard"])
        return Progress(checkpoint.step, samples)

    def _state(self, progress: Progress) -> dict[str, Any]:
        setup = self._setup
        return {
            "samples": progress.samples,
            "optimizer_steps": setup.optimizer.num_steps,
            "loss_scaling": setup.scaler.state_dict(),
            "guard": self.guard.state(),
            "dataset": dict(setup.dataset.fingerprint),
            "platform": setup.platform.name,
            "parallel": setup.dims.summary(),
        }


def _counter(checkpoint: Checkpoint, name: str) -> int:
    """Return a non-negative integer of the trainer's state.

    Raises:
        CheckpointError: it is missing or invalid.
    """
    value = checkpoint.state.get(name)
    # In Python, bool is a subclass of int.
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        where = checkpoint.storage.describe(checkpoint.folder, "index.json")
        raise CheckpointError(f"{where} is damaged: state.{name}: expected an integer >= 0, got {value!r}")
    return value
