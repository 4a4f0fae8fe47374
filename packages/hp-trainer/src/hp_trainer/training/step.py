"""The computation of one optimizer step on a rank: gradients, agreement between ranks, clipping, update."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hp_dtensor.optim import clip_grad_norm_, total_norm
from hp_dtensor.parallel.attention import use_sequence_sharding
from hp_moe import AutoDispatcher, moe_layers
from hp_trainer.data import Batch
from hp_trainer.training.recording import StepRecorder
from hp_trainer.training.setup import RankSetup
from hp_trainer.training.speed import RankTimes

Tensor = Any
_NO_VALUES = np.empty(0, np.float32)


class OptimizerStep:
    """The numerical part of a step, without records, hooks and checkpoints."""

    def __init__(self, setup: RankSetup) -> None:
        self.config, self.platform, self.mesh = setup.config, setup.platform, setup.mesh
        self.model, self.optimizer, self.scaler = setup.model, setup.optimizer, setup.scaler
        self.sharder = setup.sequence_sharder()
        self.pipeline, self.stage_mesh = setup.pipeline, setup.stage_mesh
        self.average = setup.average
        self.times = RankTimes(setup.mesh.world, setup.config.metrics.straggler_factor, setup.ranks_by_stage())
        for stage in () if self.pipeline is None else self.pipeline.stages:
            stage.measure = self.times.forward
        # Set by the trainer while steps are recorded, else None.
        self.recorder: StepRecorder | None = None
        self._experts = list(moe_layers(self.model).values())
        for layer in self._experts:
            # Routers normally raise for scores that are not finite. With a guard that skips steps, and with float16
            # overflows, the forward must complete so that the loss can be judged.
            layer.allow_nonfinite = self.config.training.guard.on_nonfinite != "stop" or self.scaler.is_enabled()

    def dispatch_reasons(self) -> list[str]:
        """Return the reasons of the cost model for its choices of token dispatchers, each once."""
        dispatchers = [getattr(layer.experts, "dispatcher", None) for layer in self._experts]
        reasons = [each.reason for each in dispatchers if isinstance(each, AutoDispatcher)]
        return list(dict.fromkeys(reasons))

    def seed_random_numbers(self, step: int) -> None:
        """Seed the random generators of this rank by run and step, so that a resumed run draws the same numbers."""
        drawn = np.random.SeedSequence((self.config.training.seed, step)).generate_state(1, np.uint64)
        self.platform.manual_seed(int(drawn[0]))

    def accumulate_gradients(self, batch: Batch) -> Tensor:
        """Run forward and backward of every micro-batch; return this rank's summand of the mean loss per target.

        Gradients are reduced over the ranks only in the last backward. With `parallel.reduce_gradients: micro_batch`
        they are reduce-scattered in each backward, and all-reduced over replicas in the last one.
        """
        ops, total = self.platform.ops, None
        for layer in self._experts:
            # Gradients of the auxiliary losses are added in backward and need the scale of the main loss.
            layer.loss_scale = self.scaler.get_scale()
        # Divided once by the targets of the global batch, so that every layout sums the same terms.
        targets = max(1, batch.global_targets)
        if self.pipeline is not None:
            loss_sum = self.pipeline.accumulate_gradients(batch, lambda loss: self.scaler.scale(ops.div(loss, targets)))
            return ops.div(loss_sum, targets)
        micro_batches = batch.micro_batches(self.config.training.micro_batch_size)
        reduces_each = self.config.parallel.reduce_gradients == "micro_batch"
        for index, micro in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            # Without synchronization gradients accumulate unsharded, which saves communication and costs memory.
            self.model.set_requires_gradient_sync(is_last or reduces_each)
            if reduces_each:
                self.model.set_requires_all_reduce(is_last)
            with self.times.forward():
                loss = ops.div(self.loss_sum(micro), targets)
            self.platform.backward(self.scaler.scale(loss))
            # Detached, or the sum would hold the graphs of all micro-batches.
            loss = self.platform.detach(loss)
            total = loss if total is None else ops.add(total, loss)
        return total

    def loss_sum_of_all(self, batch: Batch) -> Tensor:
        """Return the cross entropy summed over all micro-batches of this rank, in nats, for evaluation."""
        if self.pipeline is not None:
            return self.pipeline.loss_sum(batch)
        total = None
        for micro in batch.micro_batches(self.config.training.micro_batch_size):
            part = self.loss_sum(micro)
            total = part if total is None else self.platform.ops.add(total, part)
        return total

    def loss_sum(self, batch: Batch) -> Tensor:
        """Return the cross entropy summed over this rank's targets, in nats."""
        batch = batch if self.sharder is None else self.sharder.shard(batch)
        if self.recorder is not None:
            self.recorder.set_rows(batch.rows, batch.sharding)
        # Models that draw random numbers per sample need the global row indices.
        rows = {"rows": batch.rows} if getattr(self.model, "takes_rows", False) else {}
        with use_sequence_sharding(batch.sharding):
            return self.model(*map(self.platform.from_numpy, batch.arrays()), **rows)

    def agree(
        self, loss: Tensor, *flags: bool, values: np.ndarray = _NO_VALUES
    ) -> tuple[float, list[int], list[float]]:
        """Return the loss of the global batch, the number of ranks that set each flag, and the sums of `values`.

        They are summed by one all-reduce.

        Ranks with the same tokens, such as tensor parallel ones, contribute an equal fraction of their loss. In a
        pipeline the ranks of the last stage do; the others contribute zero.
        """
        world, ops = self.mesh.world, self.platform.ops
        # The ranks of the world outside mesh["loss"] and mesh["pp"] have the same loss.
        fraction = self.mesh["loss"].size() * self.mesh["pp"].size() / world.size
        # Flags and values share the all-reduce of the loss, so that they cost none of their own.
        votes = self.platform.from_numpy(np.concatenate([np.array(flags, np.float32), values]))
        joined = ops.cat([ops.reshape(ops.mul(loss, fraction), (1,)), votes], 0)
        world.all.all_reduce(joined)
        total, *rest = self.platform.to_numpy(joined).tolist()
        return float(total), [round(count) for count in rest[: len(flags)]], rest[len(flags) :]

    def clip(self) -> float:
        """Unscale and clip the gradients; return their norm before clipping, infinite where float16 overflowed."""
        self.scaler.unscale_(parameter for _, parameter in self.platform.named_parameters(self.model))
        if self.recorder is not None:
            self.recorder.gradients()
        return math.inf if self.scaler.found_inf else self._clip()

    @property
    def overflowed(self) -> bool:
        """True if float16 overflowed on any rank, so that `update` will change nothing."""
        return bool(self.scaler.found_inf)

    def update(self, learning_rate: float) -> bool:
        """Update with clipped gradients, drop these; return False, with no update, if float16 overflowed on a rank."""
        # Read before `update`, which resets it.
        overflowed = self.overflowed
        self.scaler.step(self.optimizer, learning_rate)
        self.scaler.update()
        if overflowed:
            self.discard()
        else:
            if self.recorder is not None:
                self.recorder.states()
            self.optimizer.zero_grad()
            if self.average is not None:
                # After the optimizer step, so that the average includes the new weights.
                self.average.update(self.optimizer.num_steps)
        return not overflowed

    def discard(self) -> None:
        """Drop the gradients and the expert loads of a step without updating anything."""
        self.optimizer.zero_grad()
        for layer in self._experts:
            # Taking resets the totals, which the next step would otherwise add to.
            layer.totals.take()
            layer.totals.take_losses()

    def _clip(self) -> float:
        parameters = [parameter for _, parameter in self.platform.named_parameters(self.model)]
        limit = self.config.training.clip_norm
        # Gradients of tied weights are the same on all their stages, and must count once in the norm.
        tied = None if self.pipeline is None else self.pipeline.tied
        copies = [p for p in parameters if tied is not None and tied.is_copy(p)]
        if limit is None:
            counted = [p for p in parameters if tied is None or not tied.is_copy(p)]
            grads = [grad for p in counted if (grad := self.platform.get_grad(p)) is not None]
            norm = total_norm(grads, 2.0, self.platform, self.stage_mesh)
        else:
            norm = clip_grad_norm_(
                parameters,
                limit,
                platform=self.platform,
                copies_over=self.stage_mesh,
                not_counted=copies,
            )
        return float(self.platform.to_numpy(norm))
