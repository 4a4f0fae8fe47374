"""The training loop, run by every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.optim.clip import clip_grad_norm_, total_norm
from hp_dtensor.platform.interface import Platform
from hp_dtensor.tensor.init import init_parameters
from hp_fsdp import GradScaler
from hp_trainer._exchange import all_ranks
from hp_trainer.checkpoint import Checkpoint, Storage, save_checkpoint
from hp_trainer.config import TrainerConfig, to_plain
from hp_trainer.data import Batch, BatchReader, Dataset
from hp_trainer.exceptions import CheckpointError, TrainingError
from hp_trainer.launching import storage_of
from hp_trainer.lr_schedule import learning_rate_factor
from hp_trainer.metrics import Tracker
from hp_trainer.optimizers import Optimizer
from hp_trainer.parallel_dims import ParallelDims
from hp_trainer.plugins import LifeCycle, life_cycle, registries
from hp_trainer.records import CheckpointRecord, ErrorRecord, EvaluationRecord, RunRecord, StepRecord
from hp_trainer.run_folder import RunFolder
from hp_trainer.signals import StopRequest, stop_requests
from hp_trainer.state import load_state, num_parameters, state_parts

Tensor = Any


def train(run: RunFolder, config: TrainerConfig, platform: Platform, checkpoint: str | None) -> int | None:
    """Train until the last step, or until a rank is asked to stop; there is a checkpoint of where it ended.

    Args:
        run: the run's folder; its data are prepared.
        platform: its world is the job.
        checkpoint: folder in the run's storage to go on from; None: from the beginning.

    Returns:
        The signal that ended the run before its last step, the same on every rank; None: it is done.

    Raises:
        TrainingError: the loss or the norm of its gradient is no finite number.
        CheckpointError: the checkpoint is of another model or of other data, or damaged.
    """
    trainer = Trainer(run, config, platform)
    if checkpoint is not None:
        trainer.resume(checkpoint)
    return trainer.run()


@dataclass
class Progress:
    """How far a run is: optimizer steps done, and samples read (of the global order)."""

    step: int = 0
    samples: int = 0


class Trainer:
    """One rank's model, optimizer and data, and what is done with them."""

    def __init__(self, run: RunFolder, config: TrainerConfig, platform: Platform) -> None:
        self.run_folder, self.config, self.platform = run, config, platform
        self.dims = ParallelDims.from_config(config.parallel, current_world(platform).size)
        self.mesh = self.dims.build_mesh(platform.device_types[0], platform=platform)
        self.dataset = open_dataset(run, config)
        self.model = build_model(config, platform, self.dims, self.mesh)
        self.optimizer = build_optimizer(config, platform, self.model)
        self.scaler = build_scaler(config, platform)
        self.storage: Storage = storage_of(run, config)
        self.progress = Progress()
        self._last = StepRecord(step=0, learning_rate=0.0, tokens=0, samples=0)
        self.hooks: LifeCycle = life_cycle()
        self.trackers = self._make_trackers()
        self._readers = {
            "train": self._reader(self.dataset.train),
            "evaluation": self._reader(self.dataset.evaluation),
        }

    # The run -------------------------------------------------------------------------------------------------

    def run(self) -> int | None:
        """Every step from here to the last, with evaluations and checkpoints in between; returns as `train`."""
        record = self._run_record()
        with ExitStack() as stack:
            stop = stack.enter_context(stop_requests())
            for tracker in self.trackers:
                stack.callback(tracker.finish)
                tracker.start(record)
            try:
                self.hooks.before_run(record)
                ended_by = self._steps(stop)
                self.hooks.after_run(record)
            except Exception as error:
                self.hooks.on_error(ErrorRecord(during="training", step=self.progress.step, error=error))
                raise
        return ended_by

    def _steps(self, stop: StopRequest) -> int | None:
        config, stopping = self.config, False
        saved_at = self.progress.step if self.progress.step else None
        while self.progress.step < config.training.steps and not stopping:
            stopping = self.train_step(stop)
            step = self.progress.step
            if _is_due(step, config.training.eval_interval):
                self.evaluate()
            if stopping or _is_due(step, config.checkpoint.interval):
                self.save()
                saved_at = step
        if saved_at != self.progress.step:
            self.save()
        return self._signal(stop) if self.progress.step < config.training.steps else None

    def train_step(self, stop: StopRequest) -> bool:
        """One optimizer step; returns whether any rank was asked to stop."""
        started, step = time.perf_counter(), self.progress.step + 1
        rate = self.learning_rate(step)
        batch = self._readers["train"].read(self.progress.samples)
        samples = self.progress.samples + self.config.training.global_batch_size
        before = StepRecord(step=step, learning_rate=rate, tokens=batch.global_tokens, samples=samples)
        self.hooks.before_step(before)
        loss, stopping = self._agree(self._accumulate_gradients(batch), stop)
        _check_finite("loss", loss, step)
        norm = self._update(step, rate)
        metrics = dict(self.model.after_optimizer_step())
        if self.scaler.is_enabled():
            metrics["loss_scale"] = self.scaler.get_scale()
        self.progress = Progress(step, samples)
        seconds = time.perf_counter() - started
        self._report_step(replace(before, loss=loss, gradient_norm=norm, seconds=seconds, metrics=metrics))
        return stopping

    def learning_rate(self, step: int) -> float:
        """The learning rate of optimizer step `step` (from 1)."""
        factor = learning_rate_factor(self.config.lr_schedule, step - 1, self.config.training.steps)
        return float(self.config.optimizer.options.lr) * factor

    def evaluate(self) -> float:
        """The mean loss per token over the evaluation batches, the same ones every time."""
        started, training = time.perf_counter(), self.config.training
        self.hooks.before_evaluation(self._last)
        total, tokens = None, 0
        with self.platform.no_grad():
            for index in range(training.eval_batches):
                batch = self._readers["evaluation"].read(index * training.global_batch_size)
                tokens += batch.global_tokens
                for micro in batch.micro_batches(training.micro_batch_size):
                    part = self._loss_sum(micro)
                    total = part if total is None else self.platform.ops.add(total, part)
            assert total is not None
            loss, _ = self._agree(self.platform.ops.div(total, tokens), StopRequest())
        seconds = time.perf_counter() - started
        record = EvaluationRecord(step=self.progress.step, loss=loss, tokens=tokens, seconds=seconds)
        for tracker in self.trackers:
            tracker.evaluation(record)
        self.hooks.after_evaluation(record)
        return loss

    # One step ------------------------------------------------------------------------------------------------

    def _update(self, step: int, rate: float) -> float:
        """Clip and take the optimizer's step; returns the norm, infinite where float16 overflowed: no step then."""
        self.scaler.unscale_(parameter for _, parameter in self.platform.named_parameters(self.model))
        norm = math.inf if self.scaler.found_inf else self._clip()
        if not self.scaler.found_inf:
            _check_finite("norm of the gradient", norm, step)
        self.scaler.step(self.optimizer, rate)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm

    def _accumulate_gradients(self, batch: Batch) -> Tensor:
        """Forward and backward of every micro-batch; returns this rank's part of the global mean loss."""
        ops, total = self.platform.ops, None
        parts = batch.micro_batches(self.config.training.micro_batch_size)
        for index, micro in enumerate(parts):
            self.model.set_requires_gradient_sync(index == len(parts) - 1)
            loss = ops.div(self._loss_sum(micro), batch.global_tokens)
            self.platform.backward(self.scaler.scale(loss))
            loss = self.platform.detach(loss)
            total = loss if total is None else ops.add(total, loss)
        return total

    def _loss_sum(self, batch: Batch) -> Tensor:
        """Cross entropy summed over this rank's tokens."""
        inputs, targets = (self.platform.from_numpy(np.ascontiguousarray(x)) for x in (batch.inputs, batch.targets))
        return self.model(inputs, targets)

    def _agree(self, loss: Tensor, stop: StopRequest) -> tuple[float, bool]:
        """(sum of the loss over all tokens, whether any rank wants to stop), in one all-reduce over the world.

        Ranks that hold the same tokens each contribute their fraction of the loss.
        """
        world, ops = self.mesh.world, self.platform.ops
        share = self.mesh["loss"].size() / world.size
        flag = self.platform.from_numpy(np.array([float(stop.is_made)], np.float32))
        both = ops.cat([ops.reshape(ops.mul(loss, share), (1,)), flag], 0)
        world.all.all_reduce(both)
        total, votes = self.platform.to_numpy(both).tolist()
        return float(total), votes > 0

    def _signal(self, stop: StopRequest) -> int:
        """The signal that some rank received."""
        numbers = all_ranks(self.mesh.world.all, "stopping", lambda: int(stop.signal or 0), TrainingError)
        return int(max(numbers))

    def _clip(self) -> float:
        """The norm of the gradient before clipping."""
        parameters = [parameter for _, parameter in self.platform.named_parameters(self.model)]
        limit = self.config.training.clip_norm
        if limit is None:
            grads = [grad for p in parameters if (grad := self.platform.get_grad(p)) is not None]
            norm = total_norm(grads, 2.0, self.platform)
        else:
            norm = clip_grad_norm_(parameters, limit, platform=self.platform)
        return float(self.platform.to_numpy(norm))

    # Checkpoints ---------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of now; complete when this returns."""
        started, step = time.perf_counter(), self.progress.step
        self.hooks.before_checkpoint(CheckpointRecord(step=step))
        folder = save_checkpoint(
            self.storage,
            state_parts(self.platform, self.model, self.optimizer),
            step=step,
            model=to_plain(self.config.model),
            state=self._state(),
            group=self.mesh.world.all,
            keep=self.config.checkpoint.keep,
        )
        record = CheckpointRecord(step=step, folder=folder, seconds=time.perf_counter() - started)
        for tracker in self.trackers:
            tracker.checkpoint(record)
        self.hooks.after_checkpoint(record)

    def resume(self, folder: str) -> None:
        """Go on from a checkpoint, whatever layout, number of ranks or platform wrote it."""
        checkpoint = Checkpoint(self.storage, folder)
        checkpoint.check_model(to_plain(self.config.model))
        self._check_data(checkpoint)
        load_state(self.platform, self.model, self.optimizer, checkpoint)
        self.optimizer.num_steps = int(checkpoint.state["optimizer_steps"])
        if checkpoint.state.get("loss_scaling"):
            self.scaler.load_state_dict(checkpoint.state["loss_scaling"])
        self.progress = Progress(checkpoint.step, int(checkpoint.state["samples"]))

    def _check_data(self, checkpoint: Checkpoint) -> None:
        saved, found = checkpoint.state.get("dataset", {}), self.dataset.fingerprint
        differ = [name for name in {**saved, **found} if saved.get(name) != found.get(name)]
        if differ:
            told = ", ".join(f"{name} is {saved.get(name)!r} there and {found.get(name)!r} here" for name in differ)
            raise CheckpointError(f"{checkpoint.folder} was trained on other data than {self.run_folder.data}: {told}")

    def _state(self) -> dict[str, Any]:
        return {
            "samples": self.progress.samples,
            "optimizer_steps": self.optimizer.num_steps,
            "loss_scaling": self.scaler.state_dict(),
            "dataset": dict(self.dataset.fingerprint),
            "platform": self.platform.name,
            "parallel": self.dims.summary(),
        }

    # Records -------------------------------------------------------------------------------------------------

    def _report_step(self, record: StepRecord) -> None:
        self._last = record
        for tracker in self.trackers:
            tracker.step(record)
        self.hooks.after_step(record)

    def _run_record(self) -> RunRecord:
        return RunRecord(
            folder=self.run_folder.path,
            config=self.config,
            platform=self.platform.name,
            rank=self.mesh.world.rank,
            world_size=self.mesh.world.size,
            first_step=self.progress.step,
            num_parameters=num_parameters(self.platform, self.model),
        )

    def _make_trackers(self) -> list[Tracker]:
        if self.mesh.world.rank != 0:
            return []
        known = registries().trackers
        components: Sequence[Any] = self.config.metrics.trackers
        return [known.get(one.name).build(one.options, self.run_folder) for one in components]

    def _reader(self, samples: Any) -> BatchReader:
        training, world = self.config.training, self.mesh.world
        return BatchReader(
            samples,
            global_batch_size=training.global_batch_size,
            seed=training.seed,
            num_shares=self.dims.dp_size,
            share=self.dims.batch_rank(world.rank),
        )


def open_dataset(run: RunFolder, config: TrainerConfig) -> Dataset:
    """The run's prepared data."""
    source = registries().datasets.get(config.data.name).build(config.data.options)
    dataset: Dataset = source.open(run.data, config.training.sequence_length)
    return dataset


def build_model(config: TrainerConfig, platform: Platform, dims: ParallelDims, mesh: DeviceMesh) -> Any:
    """The model, laid out, with the initial weights of the run's seed."""
    model = registries().models.get(config.model.name, platform.name).build(config.model.options, platform)
    reshard = config.parallel.reshard_after_forward
    model.parallelize(dims, mesh, config.training, reshard_after_forward=None if reshard else False)
    init_parameters(model, model.initializer, seed=config.training.seed)
    return model


def build_optimizer(config: TrainerConfig, platform: Platform, model: Any) -> Optimizer:
    """The optimizer over the model's trainable parameters."""
    entry = registries().optimizers.get(config.optimizer.name, platform.name)
    named = [(name, p) for name, p in platform.named_parameters(model) if platform.requires_grad(p)]
    optimizer: Optimizer = entry.build(named, config.optimizer.options, platform)
    return optimizer


def build_scaler(config: TrainerConfig, platform: Platform) -> GradScaler:
    """The loss scaling of float16; disabled for other dtypes."""
    scaling = config.training.loss_scaling
    return GradScaler(
        scaling.init_scale,
        scaling.growth_factor,
        scaling.backoff_factor,
        scaling.growth_interval,
        enabled=scaling.enabled and config.training.dtype == "float16",
        platform=platform,
    )


def _check_finite(what: str, value: float, step: int) -> None:
    if not math.isfinite(value):
        raise TrainingError(
            f"the {what} of step {step} is {value}; this step changed nothing. Go on from the last checkpoint with a "
            "lower optimizer.lr or training.clip_norm, or with training.dtype=float32 if it is another"
        )


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
