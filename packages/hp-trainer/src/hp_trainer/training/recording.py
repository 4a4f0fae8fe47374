"""Recording of a run's digests, and the comparison of a live run with a recorded one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hp_dtensor.debug import Comparison, Recorder, Recording, Rows, compare
from hp_dtensor.debug.recording import MOST_ELEMENTS, ROOT, append
from hp_dtensor.exceptions import RecordingError
from hp_dtensor.parallel.attention import SequenceSharding
from hp_moe import LoadMetrics
from hp_trainer._coordination import all_ranks, coordinator, report
from hp_trainer.exceptions import TrainingError
from hp_trainer.models.hugging_face.reference import views_of_model
from hp_trainer.run import RunFolder
from hp_trainer.training.setup import RankSetup


class StepRecorder:
    """Records the steps of a run on this rank. Rank 0 writes them, and compares them with those of another run."""

    def __init__(self, setup: RankSetup, run: RunFolder, step: int) -> None:
        self._setup, self._run, training = setup, run, setup.config.training
        self._world = setup.mesh.world
        self._cp_rank = setup.mesh["cp"].get_local_rank() if setup.dims.cp_enabled else 0
        self._first_row = 0
        self._check_operations()
        elements = None
        if training.record_elements is not None:
            pass_, _, name = training.record_elements.partition(" ")
            elements = pass_, name
        self._recorder = Recorder(
            setup.model,
            setup.platform,
            select=_is_in_order,
            # A router's tokens are local to a rank, and so are the parts of their gradients.
            select_gradients=lambda name: "router" not in name.split("."),
            views=views_of_model(setup.config.model.options, setup.platform),
            elements=elements,
            buffers=True,
            about=_about(setup),
            first_step=step,
        )
        # Comparisons end with the reference, or after a difference if `training.on_difference` is to warn.
        self._is_done_comparing, self._last = False, 0
        self._reference: Recording | None = None
        if (path := training.compare_with) is not None:
            what = "reading training.compare_with"
            self._last = coordinator(self._world.all, what, lambda: self._read_reference(path), TrainingError)
        if training.record_steps is not None and self._world.rank == 0:
            recording = self._recorder.recording
            # A resumed run adds to the file.
            if step == 0 or not run.digests_file.exists():
                run.digests_file.unlink(missing_ok=True)
                append(run.digests_file, recording.about, None)
                append(run.digests_file, recording.steps[step], step)

    def records(self, step: int) -> bool:
        """Return whether to record a step. At the first step that the reference lacks, rank 0 prints a warning."""
        training = self._setup.config.training
        if training.compare_with is not None and step > self._last and not self._is_done_comparing:
            self._is_done_comparing = True
            if self._world.rank == 0:
                message = f"{training.compare_with} ends at step {self._last}; steps from {step} on are not compared"
                report(message)
        is_compared = training.compare_with is not None and not self._is_done_comparing
        return is_compared or step <= (training.record_steps or 0)

    def _check_operations(self) -> None:
        chosen = self._setup.config.training.record_operations
        if not chosen:
            return

        def own() -> list[str]:
            return [name or ROOT for name in self._setup.module_names().values()]

        # A rank of a pipeline has the modules of its stages only.
        of_ranks = all_ranks(self._world.all, "reading training.record_operations", own, TrainingError)
        known = list(dict.fromkeys(name for each in of_ranks for name in each))
        problems = [problem for name in chosen if (problem := _operation_problem(name, known)) is not None]
        if problems:
            raise TrainingError("\n".join(f"training.record_operations: {problem}" for problem in problems))

    def _read_reference(self, path: str) -> int:
        """Read the reference, and return its last step."""
        self._reference = read_recording(path)
        if not any(event.growth is not None for events in self._reference.steps.values() for event in events):
            raise RecordingError(
                f"{path} does not know how rounding grows in this model; write the reference with "
                "`hp-train diff CONFIG --record=FILE`"
            )
        return max(self._reference.steps)

    @contextmanager
    def step(self, number: int, first_row: int) -> Iterator[None]:
        """Record a step from the sample `first_row` on; a difference that is not only to warn raises on every rank."""
        self._first_row = first_row
        # With float16 gradients still have the loss scale when they are recorded, and runs may have different scales.
        self._recorder.gradient_factor = 1 / self._setup.scaler.get_scale()
        about = dict(self._recorder.recording.about)
        training = self._setup.config.training
        chosen = training.record_operations if number == training.record_steps else ()
        self._recorder.operations = (
            (lambda name: _is_in_order(name or ROOT) and (name or ROOT) in chosen) if chosen else None
        )
        with self._recorder.step(number):
            yield
        steps = self._recorder.recording.steps
        last = self._setup.config.training.record_steps
        if last is not None and number <= last and self._world.rank == 0:
            append(self._run.digests_file, steps[number], number)
            if self._recorder.recording.about != about:
                append(self._run.digests_file, self._recorder.recording.about, None)
        asked = training.record_elements if number == last and self._world.rank == 0 else None
        if asked is not None and not any(event.elements for event in steps[number]):
            message = f"no tensor {asked!r} of at most {MOST_ELEMENTS} elements was recorded"
            report(f"training.record_elements: {message}")
        if self._setup.config.training.compare_with is not None:
            self._compare(number)
        # The weights before a step are needed for its updates only.
        for old in [each for each in steps if each < number]:
            del steps[old]

    def set_rows(self, rows: np.ndarray | None, sharding: SequenceSharding | None) -> None:
        """Set the index in the run of each sample, and the positions by sharding, of the next forward."""
        training = self._setup.config.training
        assert rows is not None
        length = training.sequence_length
        positions = np.arange(length) if sharding is None else sharding.indices(self._cp_rank)
        self._recorder.rows = Rows(rows - self._first_row, training.global_batch_size, positions, length)

    def gradients(self) -> None:
        """Record the gradients, which are reduced and not clipped yet."""
        self._recorder.gradients()

    def states(self) -> None:
        """Record the optimizer's states after an update."""
        self._recorder.states(self._setup.optimizer.state())

    def losses(self, loss: float, experts: Mapping[str, LoadMetrics]) -> None:
        """Record the mean loss of the global batch, and auxiliary losses and token counts by layer, over all ranks."""
        values: dict[str, float | tuple[int, ...]] = {"mean loss": loss}
        for layer, metrics in experts.items():
            values[f"token counts of {layer}"] = metrics.loads
            values |= {f"{name} loss of {layer}": value for name, value in metrics.aux_losses.items()}
        self._recorder.losses(values)

    def _compare(self, number: int) -> None:
        """Compare a step with the reference on rank 0; all ranks raise, unless `training.on_difference` is to warn."""
        reference = self._reference

        def difference() -> str | None:
            assert reference is not None
            if number not in reference.steps or self._is_done_comparing:
                return None
            # With the step before, by which values that were not updated are recognized.
            steps = {each: reference.steps[each] for each in (number - 1, number) if each in reference.steps}
            found: Comparison = compare(Recording(reference.about, steps), self._recorder.recording)
            return None if found.first is None else str(found)

        # Rank 0 has the digests of all ranks, and all ranks must raise, or none.
        found = coordinator(self._world.all, "comparing with training.compare_with", difference, TrainingError)
        if found is None:
            return
        message = f"step {number} differs from {self._setup.config.training.compare_with} (A):\n{found}"
        if self._setup.config.training.on_difference == "stop":
            raise TrainingError(message)
        self._is_done_comparing = True
        if self._world.rank == 0:
            report(message)


def read_recording(path: str) -> Recording:
    """Read the digests of a run folder, or of a file."""
    found = Path(path).expanduser()
    return Recording.load(RunFolder(found).digests_file if found.is_dir() else found)


def _is_in_order(name: str) -> bool:
    """Return whether the rows of a module's output are those of the batch: routed experts have rows in their order."""
    return bool(name) and "experts" not in name.split(".")


def _operation_problem(name: str, known: Sequence[str]) -> str | None:
    """Return the reason why a module's operations cannot be recorded, given the names that the model has."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:3]
        return f"the model has no module {name!r}; expected names such as {', '.join(near)}"
    if not _is_in_order(name):
        around = name.partition(".experts")[0]
        return (
            f"{name!r} cannot be recorded, since the rows of experts have an order of their own on each rank; expected "
            f"the module around them, {around!r}"
        )
    return None


def _about(setup: RankSetup) -> dict[str, Any]:
    """Return the facts of a run that a comparison reports."""
    config, dims = setup.config, setup.dims
    degrees = {name: size for name, size in dims.dense_sizes().items() if size > 1}
    if dims.ep_enabled:
        degrees["ep"] = dims.ep
    options = config.model.options
    return {
        "platform": setup.platform.name,
        "model": config.model.name,
        "layout": " ".join(f"{name}={size}" for name, size in degrees.items()),
        "degrees": degrees,
        "dtypes": list(dict.fromkeys([config.training.dtype, config.training.reduce_dtype, "float32"])),
        # A model other than the decoder may draw random numbers that no option shows.
        "random": any(getattr(options, name, 0) for name in ("attention_dropout", "router_jitter"))
        or config.model.name != "decoder",
    }
