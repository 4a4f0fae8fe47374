"""The training loop, run by every rank."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_trainer._coordination import StopRequest, all_ranks, coordinator, report, stop_requests
from hp_trainer.checkpoint import PendingSave
from hp_trainer.config import TrainerConfig
from hp_trainer.data import Batch
from hp_trainer.exceptions import HangError, TrainingError, describe_exit
from hp_trainer.metrics import Tracker
from hp_trainer.plugins import plugin_manager, registries
from hp_trainer.records import CheckpointRecord, ErrorRecord, EvaluationRecord, RunRecord, StepRecord
from hp_trainer.run import RunFolder, checkpoint_storage
from hp_trainer.training.checkpoints import Choice, Progress, TrainingCheckpoints
from hp_trainer.training.expert_moves import ExpertMoves
from hp_trainer.training.health import GO_ON, CorruptionChecks, Verdict, nonfinite_scores
from hp_trainer.training.optimizer import learning_rate_factor
from hp_trainer.training.recording import StepRecorder
from hp_trainer.training.recovery import Sources, StateCopies
from hp_trainer.training.setup import RankSetup
from hp_trainer.training.speed import ModelSpeed, StepProfile, out_of_memory
from hp_trainer.training.stalls import StallWatch
from hp_trainer.training.step import OptimizerStep


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that is being written since `started`, for which training has waited so far."""

    save: PendingSave
    step: int
    started: float
    waited: float


class Trainer:
    """The training loop of one rank: steps, evaluations and checkpoints, reported to trackers and hooks.

    Args:
        run: the run folder, with prepared data.
        config: the configuration of the run.
        platform: the platform, whose current world is the job.
        initial_weights: initialize the weights; False: `resume` or `restore` will load them.
        copies: copies of the state in memory, for `restore`; None: none are made.
        lost_replicas: number of data-parallel replicas that the job has lost; `config` is that of the remaining ones.

    Attributes:
        setup: model, optimizer and data.
        progress: position of the run.
    """

    def __init__(
        self,
        run: RunFolder,
        config: TrainerConfig,
        platform: Platform,
        *,
        initial_weights: bool = True,
        copies: StateCopies | None = None,
        lost_replicas: int = 0,
    ) -> None:
        self.run_folder, self.config, self._lost_replicas = run, config, lost_replicas
        self.setup = RankSetup.build(run, config, platform, weights=initial_weights)
        self.progress = Progress()
        # Step of the newest checkpoint of this run; None: there is none.
        self._saved_at: int | None = None
        self._copies = copies
        self._step = OptimizerStep(self.setup)
        self._is_recorded = False
        self._speed = ModelSpeed(self.setup)
        self._profile = StepProfile(config.profile, run.profile, platform, self.setup.mesh.world.rank)
        storage = checkpoint_storage(run, config)
        self._checkpoints = TrainingCheckpoints(self.setup, storage, run.check_owner, run.copies())
        self._train_batches = self.setup.batch_reader(self.setup.dataset.train)
        once = config.training.eval_batches is None
        self._evaluation_batches = self.setup.batch_reader(self.setup.dataset.evaluation, once=once)
        self._hooks = plugin_manager().hook
        self._trackers: list[Tracker] = []
        # On rank 0 only: metrics are the same on every rank.
        if self.setup.mesh.world.rank == 0:
            known, components = registries().trackers, list(config.metrics.trackers)
            self._trackers = [known.get(one.name).build(one.options, run) for one in components]
        self._guard, self._rolls_back = self._checkpoints.guard, False
        self._last = StepRecord(step=0, learning_rate=0.0, tokens=0, samples=0)
        self._corruption = CorruptionChecks(self.setup, self._step)
        self._expert_moves = ExpertMoves(self.setup)
        # Only the last evaluation, by its step: a checkpoint records the loss only if it was evaluated at the same
        # step.
        self._evaluation_losses: dict[int, float] = {}
        self._pending: _Pending | None = None
        self._watch = StallWatch(
            run.stalls, self.setup.mesh.world, config.launch.timeout_seconds, self.setup.module_names
        )

    def resume(self, checkpoint: str, choice: Choice = "newest that fits") -> None:
        """Load a checkpoint by its folder name, from any layout, number of ranks and platform.

        Raises:
            CheckpointError: it is damaged, or neither it nor (by `choice`) an earlier one fits the run.
        """
        # Checkpoints have the experts in their original order, so this model must have it before it is filled.
        self._expert_moves.reset()
        self.progress = self._checkpoints.load(checkpoint, choice)
        self._saved_at = self.progress.step

    def restore(self, sources: Sources) -> None:
        """Restore the state of a step from the copies in memory. A collective call."""
        assert self._copies is not None
        values = self._copies.restore(self.setup, sources, self.config.launch.timeout_seconds)
        self._checkpoints.load_values(values)
        self.progress = Progress(values["step"], values["samples"])
        # A checkpoint of a later step is damaged: a sound one would have been chosen instead of the copies.
        find = functools.partial(self._checkpoints.newest_step, self.progress.step)
        self._saved_at = coordinator(self.setup.mesh.world.all, "looking for checkpoints", find, TrainingError)

    def run(self, *, only_save: bool = False) -> int | None:
        """Train until the last step, or until a rank is asked to stop, and write a checkpoint at the end.

        Args:
            only_save: write the checkpoint of the present state, without a step.

        Returns:
            The signal that ended the run before its last step, the same on every rank; None: it is done.

        Raises:
            TrainingError: the loss or the gradient norm is not finite, or code called `sys.exit`.
            HangError: a collective timed out because other ranks did not take part.
        """
        record = self._run_record()
        with ExitStack() as stack:
            # Left in reverse order: the watch, entered first, also observes trackers while they finish.
            stack.enter_context(self._watch)
            stack.enter_context(self._profile)
            stop = stack.enter_context(stop_requests())
            for tracker in self._trackers:
                # Registered before `start`, so that a tracker that fails there is finished as well.
                stack.callback(tracker.finish)
                tracker.start(record)
            try:
                self._hooks.hp_before_run(record=record)
                ended_by = self._run_steps(stop, stopping=only_save)
                self._hooks.hp_after_run(record=record)
            except Exception as error:
                if self._pending is not None:
                    self._pending.save.abandon()
                # Before anything else, since `explain` waits for the reports of other ranks.
                self._hooks.hp_on_error(record=ErrorRecord(during="training", step=self.progress.step, error=error))
                step = self.progress.step + 1
                clearer = out_of_memory(error, self.setup, step) or nonfinite_scores(error, step)
                if clearer is not None:
                    raise clearer from error
                # None unless a collective failed because other ranks did not take part.
                explanation = self._watch.explain(error)
                if explanation is not None:
                    raise HangError(explanation) from error
                raise
            except SystemExit as leaving:
                # An error of this rank, or the others would only report that it is missing.
                what = describe_exit(leaving, f"in step {self.progress.step + 1}")
                raise TrainingError(f"rank {self.setup.mesh.world.rank} has {what}") from leaving
        return ended_by

    def train_step(self, stop: StopRequest) -> bool:
        """Do one optimizer step on the next global batch; return whether any rank was asked to stop.

        Raises:
            TrainingError: the loss or the gradient norm is not finite; nothing was updated.
            SilentCorruptionError: a check for silent corruption found a difference.
        """
        started, step = time.perf_counter(), self.progress.step + 1
        self._watch.start_phase("step", step)
        if self._copies is not None:
            self._copies.step = step
        learning_rate = self.learning_rate(step)
        times = self._step.times
        with times.measure("data"):
            batch = self._train_batches.read(self.progress.samples)
            # The position in the data counts samples, not steps, so that it is valid for another batch size after a
            # resume.
            samples = self.progress.samples + self.config.training.global_batch_size
            before = StepRecord(step=step, learning_rate=learning_rate, tokens=batch.global_tokens, samples=samples)
            self._hooks.hp_before_step(record=before)
        with self._recorded(step):
            # Forwards measure themselves.
            with times.measure("backward"):
                local_loss = self._accumulate_gradients(step, batch)
            # Copies the loss to the host, which waits for the device to finish the backward.
            stopping, loss = self._agree(local_loss, stop)
            with times.measure("update"):
                verdict, norm, updated = self._update(step, loss, learning_rate)
            metrics = self._after_update(step, loss, updated)
        if self.setup.scaler.is_enabled():
            metrics["loss_scale"] = self.setup.scaler.get_scale()
        if verdict is not GO_ON:
            metrics["discarded"] = 1.0
        self.progress = Progress(step, samples)
        seconds = time.perf_counter() - started
        self._report_step(
            replace(
                before,
                loss=loss,
                gradient_norm=norm,
                seconds=seconds,
                metrics=metrics,
                peak_memory_gib=self.setup.platform.peak_memory() / 2**30,
                model_flops_per_second=self._speed.flops_per_second(seconds),
                utilization=self._speed.utilization(seconds),
                stragglers=times.stragglers,
                rank_seconds=times.seconds,
            )
        )
        return stopping

    def _accumulate_gradients(self, step: int, batch: Batch) -> Any:
        """Run forward and backward of a global batch, twice if they are to be compared; return this rank's loss."""
        if _is_due(step, self.config.training.replay_interval):
            return self._corruption.accumulate_gradients_twice(batch, step)
        self._step.seed_random_numbers(step)
        return self._step.accumulate_gradients(batch)

    def _after_update(self, step: int, loss: float, updated: bool) -> dict[str, float]:
        """Compare replicas if that is due, update expert biases and placement, and return the model's metrics."""
        if _is_due(step, self.config.training.replica_check_interval):
            self._corruption.compare_replicas(step)
        # Expert biases are part of the update: a discarded step must not change them.
        metrics = dict((self.setup.pipeline or self.setup.model).after_optimizer_step()) if updated else {}
        loads = getattr(self.setup.model, "expert_loads", {}) if updated else {}
        if self._step.recorder is not None:
            self._step.recorder.losses(loss, loads)
        if updated:
            self._expert_moves.after_step(step, loads)
        return metrics

    def _agree(self, local_loss: Any, stop: StopRequest) -> tuple[bool, float]:
        """Return whether any rank was asked to stop, and the loss of the global batch."""
        step, times, flags = self.progress.step + 1, self._step.times, [stop.is_made]
        if self._copies is not None:
            flags.append(self._copies.is_complete)
        loss, (stops, *copied), summed = self._step.agree(local_loss, *flags, values=times.exchanged(step))
        if self._copies is not None:
            self._copies.agree(everywhere=copied[0] == self.setup.mesh.world.size)
        times.compare(step, summed)
        return stops > 0, loss

    def _copy_state(self) -> None:
        """Copy the state of this step to memory if that is due."""
        # Not while a checkpoint is written: if a death interrupts that, ranks repeat its step and write it again.
        if self._copies is not None and self._pending is None and self._copies.is_due(self.progress.step):
            self._copies.take(self.setup, self.progress.step, self._checkpoints.values(self.progress))

    @contextmanager
    def _recorded(self, step: int) -> Iterator[None]:
        """Record the step in the block, if the settings ask for it."""
        training = self.config.training
        is_wanted = training.compare_with is not None or step <= (training.record_steps or 0)
        if is_wanted and self._step.recorder is None and not self._is_recorded:
            self._step.recorder = StepRecorder(self.setup, self.run_folder, step - 1)
            for stage in self.setup.pipeline.stages if self.setup.pipeline is not None else ():
                stage.before_call = self._step.recorder.set_rows
        if self._step.recorder is None or not self._step.recorder.records(step):
            # The recorder is not needed again, nor is its memory.
            self._step.recorder, self._is_recorded = None, True
            yield
            return
        with self._step.recorder.step(step, self.progress.samples):
            yield

    def _update(self, step: int, loss: float, learning_rate: float) -> tuple[Verdict, float | None, bool]:
        """Update the weights, unless the step is discarded; return verdict, gradient norm, and whether it was."""
        verdict, norm, updated = self._guard.judge_loss(loss, step), None, False
        if verdict is GO_ON:
            norm = self._step.clip()
            # An overflow is normal with loss scaling: `update` shrinks the scale and changes no weight.
            verdict = GO_ON if self._step.overflowed else self._guard.judge_norm(norm, step)
        if verdict is GO_ON:
            updated = self._step.update(learning_rate)
            # Only losses of accepted steps enter the window, or a spike would raise the mean it is compared with.
            self._guard.accept(loss)
        else:
            self._step.discard()
            if self.setup.mesh.world.rank == 0:
                report(str(verdict))
        self._rolls_back = verdict.action == "rollback"
        return verdict, norm, updated

    def _roll_back(self) -> None:
        """Load the last checkpoint, and continue from its step with the data after those read so far."""
        self.finish_save()
        # `resume` overwrites both with those of the checkpoint.
        samples, interventions = self.progress.samples, self._guard.interventions
        # All ranks use the checkpoint that rank 0 finds: other ranks may see a shared file system with a delay.
        found = all_ranks(self.setup.mesh.world.all, "going back", self._checkpoints.newest, TrainingError)[0]
        if found is None:
            raise TrainingError(
                "training.guard needs a checkpoint to go back to, and there is none yet; this step changed nothing. "
                "Set checkpoint.interval, or let training.guard skip steps"
            )
        self.resume(found)
        # Loading restored an older count, with which max_interventions would never be reached.
        self._guard.interventions = interventions
        # The step of the checkpoint, but the current position in the data: the batch that caused this is not repeated.
        self.progress = Progress(self.progress.step, samples)
        record = self._run_record()
        for tracker in self._trackers:
            tracker.finish()
            tracker.start(record)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 1."""
        factor = learning_rate_factor(self.config.lr_schedule, step - 1, self.config.training.steps)
        return float(self.config.optimizer.options.lr) * factor

    def evaluate(self) -> float:
        """Return the mean loss per target over the evaluation batches, in nats. The batches are always the same."""
        started = time.perf_counter()
        self._watch.start_phase("evaluation", self.progress.step)
        self._hooks.hp_before_evaluation(record=self._last)
        average = self.setup.average if self.config.training.ema.evaluate else None
        # The weights are swapped with their averages in place, so evaluation needs no second model.
        with self.setup.platform.no_grad(), nullcontext() if average is None else average.in_place():
            loss, targets = self._evaluation_loss()
        seconds = time.perf_counter() - started
        record = EvaluationRecord(step=self.progress.step, loss=loss, tokens=targets, seconds=seconds)
        self._evaluation_losses = {self.progress.step: loss}
        for tracker in self._trackers:
            tracker.evaluation(record)
        self._hooks.hp_after_evaluation(record=record)
        return loss

    def save(self, *, background: bool = False) -> None:
        """Write a checkpoint of the current state, after completing an earlier one.

        Args:
            background: return as soon as the state is copied to host memory; `finish_save` completes the checkpoint.
                Otherwise it is complete when this returns.

        Raises:
            CheckpointError: on every rank if it failed on any, or if a weight is not finite; earlier checkpoints are
                unchanged.
            SilentCorruptionError: `training.replica_check_interval` is set, and replicas differ; nothing is written.
        """
        self.finish_save()
        started, step = time.perf_counter(), self.progress.step
        self._watch.start_phase("checkpoint", step)
        self._hooks.hp_before_checkpoint(record=CheckpointRecord(step=step))
        losses = {"loss": self._last.loss, "evaluation_loss": self._evaluation_losses.get(step)}
        # Experts have their original placement until their state is copied or written.
        with self._expert_moves.original_placement():
            # Otherwise a run that fails at the next comparison would continue from a checkpoint of a wrong replica.
            if self.config.training.replica_check_interval is not None:
                self._corruption.compare_saved(step)
            pending = self._checkpoints.start(self.progress, losses, background=background)
            self._pending = _Pending(pending, step, started, time.perf_counter() - started)
            self._saved_at = step
            if not background:
                self.finish_save()

    def finish_save(self, *, wait: bool = True) -> None:
        """Complete the checkpoint that is being written, if there is one.

        Args:
            wait: wait for ranks that still write; False: do nothing unless all ranks have written.

        Raises:
            CheckpointError: on every rank if it failed on any; earlier checkpoints are unchanged.
        """
        pending, now = self._pending, time.perf_counter()
        if pending is None or not (wait or pending.save.is_written()):
            return
        # Cleared first, so that a checkpoint that cannot be published is not tried again at the end of the run.
        self._pending = None
        folder = pending.save.publish()
        ended = time.perf_counter()
        record = CheckpointRecord(
            step=pending.step,
            folder=folder,
            seconds=ended - pending.started,
            waited_seconds=pending.waited + ended - now,
        )
        for tracker in self._trackers:
            tracker.checkpoint(record)
        self._hooks.hp_after_checkpoint(record=record)

    def _run_steps(self, stop: StopRequest, *, stopping: bool = False) -> int | None:
        config = self.config
        last = config.training.steps
        if config.training.record_only:
            last = min(last, config.training.record_steps or last)
        self._copy_state()
        while self.progress.step < last and not stopping:
            self._profile.before_step(self.progress.step + 1)
            stopping = self.train_step(stop)
            if self._rolls_back:
                self._roll_back()
            step = self.progress.step
            self._profile.after_step(step)
            if _is_due(step, config.training.eval_interval):
                self.evaluate()
            if stopping or (_is_due(step, config.checkpoint.interval) and self._is_unsaved()):
                self.save(background=config.checkpoint.background)
            else:
                self.finish_save(wait=False)
            self._copy_state()
        if self._is_unsaved() and not config.training.record_only:
            self.save()
        self.finish_save()
        if self.progress.step >= last:
            return None
        # A signal may have reached only some ranks; the others report 0, and all return that of any rank.
        world = self.setup.mesh.world.all
        return int(max(all_ranks(world, "stopping", lambda: int(stop.signal or 0), TrainingError)))

    def _is_unsaved(self) -> bool:
        """Return whether the newest checkpoint is of an earlier step. After a rollback it is of this one."""
        return self._saved_at is None or self.progress.step > self._saved_at

    def _evaluation_loss(self) -> tuple[float, int]:
        """Return (mean loss, number of targets) of the evaluation batches of all ranks."""
        training, ops = self.config.training, self.setup.platform.ops
        # Sums of losses and of targets, divided once: batches may have different numbers of targets.
        total, targets = None, 0
        all_batches = -(-len(self.setup.dataset.evaluation) // training.global_batch_size)
        for index in range(training.eval_batches or all_batches):
            batch = self._evaluation_batches.read(index * training.global_batch_size)
            targets += batch.global_targets
            loss_sum = self._step.loss_sum_of_all(batch)
            # The sum remains on the device: reading each loss would wait for its forward.
            total = loss_sum if total is None else ops.add(total, loss_sum)
        loss, *_ = self._step.agree(ops.div(total, max(1, targets)))
        return loss, targets

    def _report_step(self, record: StepRecord) -> None:
        if self._last.step == 0 and self.setup.mesh.world.rank == 0:
            for reason in self._step.dispatch_reasons():
                report(f"tokens are dispatched by {reason}")
        self._last = record
        for tracker in self._trackers:
            tracker.step(record)
        self._hooks.hp_after_step(record=record)

    def _run_record(self) -> RunRecord:
        world = self.setup.mesh.world
        return RunRecord(
            folder=self.run_folder.path,
            config=self.config,
            platform=self.setup.platform.name,
            rank=world.rank,
            world_size=world.size,
            first_step=self.progress.step,
            num_parameters=self.setup.num_parameters,
            lost_replicas=self._lost_replicas,
        )


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
