"""Auxiliary losses of routing, and the totals that a layer accumulates over an optimizer step.

The gradient of an auxiliary loss is added to the gradient of the scores in backward, so that the caller does not add
the loss to its own. Each loss is a mean over the tokens of the optimizer step: its strength depends neither on the
layout nor on the number of micro-batches.

With E experts, the fraction f_e of choices of expert e, and the probability p_te of expert e for token t, the balance
losses are E * sum_e f_e * mean_t p_te (Switch, arXiv 2101.03961), which is 1 for even loads. No gradient flows through
f. The balance losses differ in the tokens over which f is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_reduce_data
from hp_dtensor.comm.process_group import ProcessGroup
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import is_checkpointed, saved_value
from hp_dtensor.platform.interface import Platform
from hp_moe.exceptions import MoEConfigError
from hp_moe.routing import count_keys

Tensor = Any
LOSSES = ("micro_batch", "sequence", "global_batch", "z")


class StepTotals:
    """Token counts, losses and bytes of one layer on this rank since they were last taken.

    Attributes:
        counts: int64 `[num_experts]`, token count of each expert including dropped choices; None before any call.
        dropped: int64 `[1]`, choices beyond the capacity; None without a capacity.
        losses: float32 `[5]`, sums over tokens of the losses in `LOSSES`, without coefficients, and the number of
            tokens; None without losses.
        sent_bytes: bytes that this rank sent for dispatch and combine in forward.
    """

    def __init__(self, platform: Platform, num_experts: int) -> None:
        self.platform = platform
        self.num_experts = num_experts
        self.counts: Tensor | None = None
        self.dropped: Tensor | None = None
        self.losses: Tensor | None = None
        self.sent_bytes = 0

    def add(self, name: str, value: Tensor) -> None:
        """Add a tensor to the total of this name."""
        total = getattr(self, name)
        setattr(self, name, value if total is None else self.platform.ops.add(total, value))

    def take_losses(self) -> Tensor:
        """Return and reset the sums of the auxiliary losses and the number of tokens, float32 `[5]`."""
        # The number of tensors and their sizes must be the same on all ranks, also on one that has counted nothing.
        losses, self.losses = self.losses, None
        return self.platform.zeros((len(LOSSES) + 1,), self.platform.dtype("float32")) if losses is None else losses

    def take(self) -> Tensor:
        """Return and reset the counts as one int64 tensor `[num_experts + 2]`: token counts, dropped, bytes sent."""
        # One tensor, so that the totals of all layers need one all-reduce.
        platform, ops = self.platform, self.platform.ops
        int64 = platform.dtype("int64")
        counts = platform.zeros((self.num_experts,), int64) if self.counts is None else self.counts
        dropped = platform.zeros((1,), int64) if self.dropped is None else self.dropped
        device = platform.device_of(counts)
        sent = platform.from_numpy(numpy.array([self.sent_bytes], numpy.int64), device)
        self.counts, self.dropped, self.sent_bytes = None, None, 0
        return ops.cat([counts, dropped, sent], 0)


def is_trained(module: nn.Module) -> bool:
    """Return whether this forward pass trains; evaluation adds no noise and counts no tokens."""
    # The first forward of a checkpointed region runs without gradients, but belongs to training.
    return module.training and (module.platform.is_grad_enabled() or is_checkpointed())


@dataclass(frozen=True)
class AuxLosses:
    """Coefficients of a layer's auxiliary losses; 0 disables one.

    Attributes:
        micro_batch: balance within the micro-batch of all ranks (Switch, arXiv 2101.03961).
        sequence: balance within each full sequence, also if it is sharded (DeepSeek-V3, arXiv 2412.19437).
        global_batch: balance over the optimizer step (arXiv 2501.11873). It uses the loads of the previous step, since
            those of the current one are unknown before its last micro-batch; it is zero in the first step.
        z: mean square of the logits' logsumexp (ST-MoE, arXiv 2202.08906).

    Raises:
        MoEConfigError: a coefficient is negative or NaN.

    Examples:
        >>> with nn.building(platform):
        ...     layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2, aux_losses=AuxLosses(sequence=1e-4, z=1e-3))
        >>> layer.aux_losses.z
        0.001
    """

    micro_batch: float = 0.0
    sequence: float = 0.0
    global_batch: float = 0.0
    z: float = 0.0

    def __post_init__(self) -> None:
        below = [f"{each.name} = {value}" for each in fields(self) if not (value := getattr(self, each.name)) >= 0]
        if below:
            raise MoEConfigError(f"aux_losses: coefficients must be at least 0, got {', '.join(below)}")

    def __bool__(self) -> bool:
        return any(getattr(self, each.name) for each in fields(self))


@dataclass(frozen=True)
class LossTerms:
    """The auxiliary losses of one call of a layer.

    Attributes:
        totals: accumulates the sums over this rank's tokens.
        token_group: ranks that route different tokens; None if this rank routes all tokens.
        step_tokens: tokens of the optimizer step; None if a step is one micro-batch.
        loss_scale: factor on the gradients, the same as on the caller's loss.
        last_shares: float32 `[experts]`, fraction of choices of each expert in the previous step.
        num_sequences: number of sequences in the input.
        sequences: returns the sequence index of each of this rank's tokens, int64 `[tokens]`.
        sequence_sums: functions that sum counts over ranks with other tokens of the same sequences.
        is_counted: whether this rank counts the losses of its tokens; False where another rank with the same tokens
            does and the gradients of both are summed.
    """

    platform: Platform
    coefficients: AuxLosses
    totals: StepTotals
    token_group: ProcessGroup | None
    step_tokens: int | None
    loss_scale: float
    last_shares: Tensor | None
    num_sequences: int
    sequences: Callable[[], Tensor]
    sequence_sums: Sequence[Callable[[Tensor], Tensor]]
    is_counted: bool

    def __call__(self, logits: Tensor, probabilities: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
        """Return the weighted sum of all losses over this rank's tokens, divided by the tokens of the step."""
        ops = self.platform.ops
        own_tokens = self.platform.from_numpy(numpy.array([logits.shape[0]]), self.platform.device_of(counts))
        # One all-reduce for the counts and the number of tokens.
        own = ops.cat([counts, own_tokens], 0)
        every = saved_value(lambda: self._sum_over_ranks(own) if self._needs_global_counts else own)
        global_counts, tokens = ops.split(every, [int(counts.shape[0]), 1], 0)
        # Zero, but part of the graph: the total has a gradient whichever losses are enabled.
        zero = ops.sum(ops.mul(logits, 0.0))
        sums, total = [], zero
        for name in LOSSES:
            coefficient = getattr(self.coefficients, name)
            loss = self._sum_over_tokens(name, logits, probabilities, experts, global_counts) if coefficient else None
            sums.append(zero if loss is None else loss)
            if loss is not None:
                total = ops.add(total, ops.mul(loss, coefficient))
        totals = ops.cat([ops.stack(sums, 0), ops.cast(own_tokens, logits.dtype)], 0)
        saved_value(lambda: self.totals.add("losses", self.platform.detach(totals)))
        total = ops.mul(total, self.loss_scale if self.is_counted else 0.0)
        if self.step_tokens is not None:
            return ops.div(total, float(self.step_tokens))
        # At least 1, since a micro-batch may be empty.
        return ops.div(total, ops.clamp(ops.sum(ops.cast(tokens, logits.dtype)), min=1.0))

    @property
    def _needs_global_counts(self) -> bool:
        return bool(self.coefficients.micro_batch) or self.step_tokens is None

    def _sum_over_tokens(
        self, name: str, logits: Tensor, probabilities: Tensor, experts: Tensor, global_counts: Tensor
    ) -> Tensor:
        ops = self.platform.ops
        if name == "z":
            return ops.sum(ops.square(ops.logsumexp(logits, 1)))
        if name == "global_batch":
            # f of the previous step is the same for all tokens: `[1, experts]`.
            shares = ops.unsqueeze(self.last_shares, 0)
        elif name == "micro_batch":
            shares = shares_of(ops, ops.unsqueeze(global_counts, 0), logits.dtype)
        else:
            shares = saved_value(lambda: self._shares_of_sequences(experts, logits.dtype))
        # E * sum over tokens and experts of f_e * p_te; the mean over tokens is taken by the caller.
        return ops.mul(ops.sum(ops.mul(probabilities, shares)), float(probabilities.shape[1]))

    def _shares_of_sequences(self, experts: Tensor, dtype: Any) -> Tensor:
        """Return for each token the fractions of choices of each expert in its sequence: `[tokens, experts]`."""
        ops, num_experts = self.platform.ops, self.totals.num_experts
        sequence_of_token = self.sequences()
        # One bincount for all sequences: the key combines sequence and expert.
        keys = ops.add(ops.unsqueeze(ops.mul(sequence_of_token, num_experts), 1), experts)
        counts = count_keys(self.platform, keys, self.num_sequences * num_experts)
        for sum_over_ranks in self.sequence_sums:
            counts = sum_over_ranks(counts)
        shares = shares_of(ops, ops.reshape(counts, (self.num_sequences, num_experts)), dtype)
        # After the all-reduces above, which a rank without tokens takes part in.
        if sequence_of_token.shape[0] == 0:
            return self.platform.zeros((0, num_experts), dtype)
        return ops.index_select(shares, 0, sequence_of_token)

    def _sum_over_ranks(self, counts: Tensor) -> Tensor:
        return counts if self.token_group is None else all_reduce_data(counts, self.token_group)


def shares_of(ops: Any, counts: Tensor, dtype: Any) -> Tensor:
    """Divide each row of counts `[rows, experts]` by its sum; a row of zeros stays zero."""
    # At least 1, so that an empty row is divided by one and stays zero.
    counts = ops.cast(counts, dtype)
    return ops.div(counts, ops.clamp(ops.sum(counts, 1, keepdim=True), min=1.0))


def attach_loss(platform: Platform, x: Tensor, loss: Tensor) -> Tensor:
    """Return `x`. In backward, the 0-d tensor `loss` gets a gradient of one, in addition to the gradient of `x`."""
    # Like adding the loss to the objective: d objective / d loss = 1, whatever the gradient of `x` is.
    ops, like = platform.ops, platform.detach(loss)
    return platform.custom_function(lambda x, loss: ops.clone(x), lambda grad: (grad, ops.ones_like(like)), x, loss)
