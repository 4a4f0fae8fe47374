"""One optimizer step as every rank takes it: gradients, agreement, clipping, update."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hp_dtensor.optim import clip_grad_norm_, total_norm
from hp_dtensor.parallel.attention import use_sequence_sharding
from hp_moe import AutoDispatcher, moe_layers
from hp_trainer.data import Batch
from hp_trainer.training.setup import RankSetup

Tensor = Any


class OptimizerStep:
    """The numerical part of a step; it knows nothing of records, hooks or checkpoints."""

    def __init__(self, setup: RankSetup) -> None:
        self.config, self.platform, self.mesh = setup.config, setup.platform, setup.mesh
        self.model, self.optimizer, self.scaler = setup.model, setup.optimizer, setup.scaler
        self.shares = setup.sequence_shares()
        self.pipeline, self.stage_mesh = setup.pipeline, setup.stage_mesh
        self.average = setup.average
        self._experts = list(moe_layers(self.model).values())
        for layer in self._experts:
            # Steps that are given up, and those whose float16 overflows, need a loss to be judged by.
            layer.allow_nonfinite = self.config.training.guard.on_nonfinite != "stop" or self.scaler.is_enabled()

    def dispatch_reasons(self) -> list[str]:
        """Return the reasons for which the cost model has chosen the tokens' ways to experts, each once."""
        dispatchers = [getattr(layer.experts, "dispatcher", None) for layer in self._experts]
        reasons = [each.reason for each in dispatchers if isinstance(each, AutoDispatcher)]
        return list(dict.fromkeys(reasons))

    def seed_random_numbers(self, step: int) -> None:
        """Bring the generators of every rank to the state that belongs to a step, and so repeat its random numbers.

        What a model draws, such as the dropout of a plain module, then depends on the run's seed and the step alone:
        a run that was resumed, and a step that is computed again, draw the same.
        """
        drawn = np.random.SeedSequence((self.config.training.seed, step)).generate_state(1, np.uint64)
        self.platform.manual_seed(int(drawn[0]))

    def accumulate_gradients(self, batch: Batch) -> Tensor:
        """Run forward and backward of every micro-batch; return this rank's part of the mean loss per target.

        Gradients are summed over the ranks in the backward of the last micro-batch alone, unless
        `parallel.reduce_gradients` asks for shards of them after each: then those of replicas wait for the last.
        """
        ops, total = self.platform.ops, None
        for layer in self._experts:
            layer.loss_scale = self.scaler.get_scale()
        # One division by the targets of the whole global batch: every layout sums the same terms.
        targets = max(1, batch.global_targets)
        if self.pipeline is not None:
            loss_sum = self.pipeline.accumulate_gradients(batch, lambda loss: self.scaler.scale(ops.div(loss, targets)))
            return ops.div(loss_sum, targets)
        parts = batch.micro_batches(self.config.training.micro_batch_size)
        reduces_often = self.config.parallel.reduce_gradients == "micro_batch"
        for index, micro in enumerate(parts):
            is_last = index == len(parts) - 1
            self.model.set_requires_gradient_sync(is_last or reduces_often)
            if reduces_often:
                self.model.set_requires_all_reduce(is_last)
            loss = ops.div(self.loss_sum(micro), targets)
            self.platform.backward(self.scaler.scale(loss))
            loss = self.platform.detach(loss)
            total = loss if total is None else ops.add(total, loss)
        return total

    def loss_sum_of_all(self, batch: Batch) -> Tensor:
        """Return the cross entropy summed over all micro-batches of this rank, in nats, recording nothing."""
        if self.pipeline is not None:
            return self.pipeline.loss_sum(batch)
        total = None
        for micro in batch.micro_batches(self.config.training.micro_batch_size):
            part = self.loss_sum(micro)
            total = part if total is None else self.platform.ops.add(total, part)
        return total

    def loss_sum(self, batch: Batch) -> Tensor:
        """Return the cross entropy summed over this rank's targets, in nats."""
        batch = batch if self.shares is None else self.shares.own(batch)
        rows = {"rows": batch.rows} if getattr(self.model, "takes_rows", False) else {}
        with use_sequence_sharding(batch.cut):
            return self.model(*map(self.platform.from_numpy, batch.arrays()), **rows)

    def agree(self, loss: Tensor, stop: bool) -> tuple[float, bool]:
        """Return the loss of the global batch and whether any rank wants to stop, by one all-reduce over the world.

        Ranks that hold the same tokens (tensor parallel ones) each contribute their fraction of the loss. In a pipeline
        those of the last stage do; the others give zero.
        """
        world, ops = self.mesh.world, self.platform.ops
        share = self.mesh["loss"].size() * self.mesh["pp"].size() / world.size
        flag = self.platform.from_numpy(np.array([float(stop)], np.float32))
        both = ops.cat([ops.reshape(ops.mul(loss, share), (1,)), flag], 0)
        world.all.all_reduce(both)
        total, votes = self.platform.to_numpy(both).tolist()
        return float(total), votes > 0

    def clip(self) -> float:
        """Unscale and clip the gradients; return their norm before clipping, infinite where float16 overflowed."""
        self.scaler.unscale_(parameter for _, parameter in self.platform.named_parameters(self.model))
        return math.inf if self.scaler.found_inf else self._clip()

    @property
    def overflowed(self) -> bool:
        """True where float16 overflowed on any rank, so that `update` will change nothing."""
        return bool(self.scaler.found_inf)

    def update(self, learning_rate: float) -> bool:
        """Update the weights with the clipped gradients, and forget these; return whether the weights have changed.

        Where float16 overflowed on any rank, no rank updates, and the loss scale shrinks.
        """
        overflowed = self.overflowed
        self.scaler.step(self.optimizer, learning_rate)
        self.scaler.update()
        if overflowed:
            self.discard()
        else:
            self.optimizer.zero_grad()
            if self.average is not None:
                self.average.update(self.optimizer.num_steps)
        return not overflowed

    def discard(self) -> None:
        """Forget the gradients and the loads of experts; nothing has changed."""
        self.optimizer.zero_grad()
        for layer in self._experts:
            layer.totals.take()
            layer.totals.take_losses()

    def _clip(self) -> float:
        parameters = [parameter for _, parameter in self.platform.named_parameters(self.model)]
        limit = self.config.training.clip_norm
        # Gradients of tied weights are the same on all their stages, and count once.
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
