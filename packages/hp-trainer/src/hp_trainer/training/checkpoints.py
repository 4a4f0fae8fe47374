"""Saving and loading of the training state: model, optimizer and position in the data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hp_trainer._coordination import all_ranks, coordinator, report
from hp_trainer.checkpoint import Checkpoint, PendingSave, Storage, find_latest, list_checkpoints, set_aside_newer
from hp_trainer.checkpoint.index import step_of
from hp_trainer.config import to_plain
from hp_trainer.exceptions import CheckpointError, UnfitCheckpointError
from hp_trainer.run import check_model
from hp_trainer.training.health import LossGuard
from hp_trainer.training.setup import RankSetup
from hp_trainer.training.state import check_fit, load_state, state_parts

# How a checkpoint is loaded: it or the newest earlier one that fits, it alone, or it without its optimizer states.
Choice = Literal["newest that fits", "exactly", "without optimizer"]


@dataclass(frozen=True)
class Progress:
    """Position of a run: number of optimizer steps done, and number of samples read in the global order."""

    step: int = 0
    samples: int = 0


class TrainingCheckpoints:
    """Saves and loads all that training changes in any layout, with copies of the run's small files by name."""

    def __init__(
        self,
        setup: RankSetup,
        storage: Storage,
        may_write: Callable[[], None] = lambda: None,
        copies: Mapping[str, str] | None = None,
    ) -> None:
        self._setup, self._storage, self._may_write, self._copies = setup, storage, may_write, dict(copies or {})
        self.guard = LossGuard(setup.config.training.guard)

    def newest(self, before: str | None = None, *, content: bool = True) -> str | None:
        """Return the newest sound checkpoint (before another one); without `content`, by sizes and headers alone."""
        found = find_latest(self._storage, content=content, before=before).checkpoint
        return None if found is None else found.folder

    def newest_step(self, most: int) -> int | None:
        """Return the step of the newest checkpoint by its name, at most `most`; None: there is none."""
        return next((step for name in list_checkpoints(self._storage) if (step := step_of(name)) <= most), None)

    def start(self, progress: Progress, extra_state: Mapping[str, Any], *, background: bool) -> PendingSave:
        """Start a checkpoint with `extra_state` on all ranks, or raise on all; it is complete after `publish`."""
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
            state=self.values(progress) | {"run_files": self._copies} | dict(extra_state),
            group=setup.mesh.world.all,
            keep=setup.config.checkpoint.keep,
            keep_best=setup.config.checkpoint.keep_best,
            may_write=self._may_write,
            background=background,
        )

    def load(self, folder: str, choice: Choice = "newest that fits") -> Progress:
        """Load all from a checkpoint, and return its position; newer ones are set aside. A collective call."""
        setup, read = self._setup, self._open(folder)

        def aside() -> list[str]:
            self._may_write()
            return set_aside_newer(self._storage, read.folder)

        reset = choice == "without optimizer"
        try:
            self._check(read, reset)
        except UnfitCheckpointError as unfit:
            # Raised from the index, which all ranks have read: all of them take this branch, and nothing has changed.
            earlier = self._earlier(folder) if choice == "newest that fits" else None
            if earlier is None:
                raise
            self._report(f"skipped a checkpoint: {unfit}")
            read = earlier
        optimizer, average = (None, None) if reset else (setup.optimizer, setup.average)
        load_state(setup.platform, setup.model, optimizer, read, setup.pipeline_group, average)
        if reset and setup.average is not None:
            setup.average.restart()
        self.load_values(read.state, reset=reset)
        # An error of rank 0 is raised on all ranks, which would otherwise wait for it in the first step.
        for name in coordinator(setup.mesh.world.all, "setting checkpoints aside", aside, CheckpointError):
            self._report(f"moved {self._storage.describe(name)} aside; delete it when it is no longer needed")
        return Progress(read.step, _counter(read, "samples"))

    def _check(self, checkpoint: Checkpoint, reset: bool) -> None:
        """Raise if a checkpoint cannot be loaded, from its index alone and before anything is changed."""
        setup, state = self._setup, checkpoint.state
        check_model(checkpoint, setup.config)
        saved, found = state.get("dataset", {}), setup.dataset.fingerprint
        differ = [name for name in {**saved, **found} if saved.get(name) != found.get(name)]
        if differ:
            what = ", ".join(f"{name} is {saved.get(name)!r} there and {found.get(name)!r} here" for name in differ)
            raise UnfitCheckpointError(f"{checkpoint.folder} was trained on other data than this run's: {what}")
        for name in ("samples", "optimizer_steps"):
            _counter(checkpoint, name)
        if state.get("guard"):
            LossGuard(setup.config.training.guard).load_state(state["guard"])
        optimizer, average = (None, None) if reset else (setup.optimizer, setup.average)
        check_fit(setup.platform, setup.model, optimizer, checkpoint, setup.pipeline_group, average)

    def _earlier(self, folder: str) -> Checkpoint | None:
        """Return the newest sound checkpoint before `folder` that fits, the same on all ranks."""
        group, name = self._setup.mesh.world.all, folder
        while True:
            older = functools.partial(self.newest, name, content=False)
            name = coordinator(group, "looking for a checkpoint", older, CheckpointError)
            if name is None:
                return None
            checkpoint = self._open(name)
            try:
                self._check(checkpoint, reset=False)
            except CheckpointError:
                continue
            # Contents are read only once the index fits, by rank 0.
            verify = functools.partial(_is_sound, checkpoint)
            if not coordinator(group, "verifying a checkpoint", verify, CheckpointError):
                continue
            return checkpoint

    def _open(self, folder: str) -> Checkpoint:
        """Open a checkpoint on every rank; an error of one is raised on all."""
        opened: list[Checkpoint] = []

        def open_here() -> None:
            opened.append(Checkpoint(self._storage, folder))

        all_ranks(self._setup.mesh.world.all, "opening a checkpoint", open_here, CheckpointError)
        return opened[0]

    def _report(self, line: str) -> None:
        if self._setup.mesh.world.rank == 0:
            report(line)

    def values(self, progress: Progress) -> dict[str, Any]:
        """Return the state that is not tensors, as JSON values."""
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

    def load_values(self, state: Mapping[str, Any], *, reset: bool = False) -> None:
        """Load the result of `values`; with `reset` all but the optimizer's number of updates."""
        if not reset:
            # May be smaller than the run's step: discarded and overflowed steps do not count for bias correction.
            self._setup.optimizer.num_steps = state["optimizer_steps"]
        # Empty without loss scaling; then the scale starts from its configured value.
        if state.get("loss_scaling"):
            self._setup.scaler.load_state_dict(state["loss_scaling"])
        if state.get("guard"):
            self.guard.load_state(state["guard"])


def _is_sound(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has no damage. Failing to read it is not damage: such errors are raised."""
    try:
        checkpoint.verify()
    except CheckpointError:
        return False
    return True


def _counter(checkpoint: Checkpoint, name: str) -> int:
    """Return a non-negative integer of the trainer's state."""
    value = checkpoint.state.get(name)
    # In Python, bool is a subclass of int.
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        where = checkpoint.storage.describe(checkpoint.folder, "index.json")
        raise UnfitCheckpointError(f"{where} is damaged: state.{name}: expected an integer >= 0, got {value!r}")
    return value
