"""Recording of a run's digests, for `hp-train diff`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from hp_dtensor.debug import Recorder, Rows
from hp_dtensor.debug.recording import append
from hp_dtensor.parallel.attention import SequenceSharding
from hp_moe import LoadMetrics
from hp_trainer.run import RunFolder
from hp_trainer.training.setup import RankSetup


class StepRecorder:
    """Records the first steps of a run on this rank (`training.record_steps`). Rank 0 writes them."""

    def __init__(self, setup: RankSetup, run: RunFolder, step: int) -> None:
        self._setup, self._run = setup, run
        self._is_writer = setup.mesh.world.rank == 0
        self._cp_rank = setup.mesh["cp"].get_local_rank() if setup.dims.cp_enabled else 0
        self._first_row = 0
        self._recorder = Recorder(
            setup.model,
            setup.platform,
            select=_is_in_order,
            # A router's tokens are local to a rank, and so are the parts of their gradients.
            select_gradients=lambda name: "router" not in name.split("."),
            buffers=True,
            about=_about(setup),
            first_step=step,
        )
        if self._is_writer:
            recording = self._recorder.recording
            # A resumed run adds to the file.
            if step == 0 or not run.digests_file.exists():
                run.digests_file.unlink(missing_ok=True)
                append(run.digests_file, recording.about, None)
                append(run.digests_file, recording.steps[step], step)

    @contextmanager
    def step(self, number: int, first_row: int) -> Iterator[None]:
        """Record a step.

        Args:
            first_row: index in the run of the first sample of this step.
        """
        self._first_row = first_row
        # With float16 gradients still have the loss scale when they are recorded, and runs may have different scales.
        self._recorder.gradient_factor = 1 / self._setup.scaler.get_scale()
        about = dict(self._recorder.recording.about)
        with self._recorder.step(number):
            yield
        steps = self._recorder.recording.steps
        if self._is_writer:
            append(self._run.digests_file, steps[number], number)
            if self._recorder.recording.about != about:
                append(self._run.digests_file, self._recorder.recording.about, None)
        # The weights before a step are needed for its updates only.
        for old in [each for each in steps if each < number]:
            del steps[old]

    def set_rows(self, rows: np.ndarray | None, sharding: SequenceSharding | None) -> None:
        """Set the samples and positions of the next forward.

        Args:
            rows: int64 `[batch]`, the index of each sample in the run.
            sharding: of the sequence over context parallel ranks; None: unsharded.
        """
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
        """Record the mean loss of the global batch, and the auxiliary losses and token counts of layers with experts.

        Args:
            experts: of this step, by the layer's name, over all ranks.
        """
        values: dict[str, float | tuple[int, ...]] = {"mean loss": loss}
        for layer, metrics in experts.items():
            values[f"token counts of {layer}"] = metrics.loads
            values |= {f"{name} loss of {layer}": value for name, value in metrics.aux_losses.items()}
        self._recorder.losses(values)


def _is_in_order(name: str) -> bool:
    """Return whether the rows of a module's output are those of the batch: routed experts have rows in their order.

    The model's own output is that of its head.
    """
    return bool(name) and "experts" not in name.split(".")


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
