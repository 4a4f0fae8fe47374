"""Sums that a layer keeps from its forward passes in training until the optimizer step is over.

Auxiliary losses of routing: their gradient joins the scores', so that no caller has to add them to its loss.

Each is a mean over the tokens of the optimizer step, so its strength depends neither on the layout nor on how the batch
is cut into micro-batches. With E experts, share f_e of the choices that went to expert e, and p_te the probability of
expert e for token t, the balance losses are E * sum_e f_e * mean_t p_te, which is 1 when all is even (Switch,
arXiv 2101.03961); no gradient goes through f. They differ in the tokens that f counts.
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


class Tally:
    """Counts of one layer on this rank since they were last taken.

    Attributes:
        counts: int64 `[num_experts]`, choices of each expert, dropped ones too; None: no token was routed.
        dropped: int64 `[1]`, choices beyond the capacity; None: there is no capacity.
        losses: float32 `[4]`, sums over tokens of the auxiliary losses by `LOSSES`, without coefficients; None: none.
        sent_bytes: bytes that left this rank for experts and back, in forward.
    """

    def __init__(self, platform: Platform, num_experts: int) -> None:
        self.platform = platform
        self.num_experts = num_experts
        self.counts: Tensor | None = None
        self.dropped: Tensor | None = None
        self.losses: Tensor | None = None
        self.sent_bytes = 0

    def add(self, name: str, value: Tensor) -> None:
        """Add a tensor to the sum of this name."""
        present = getattr(self, name)
        setattr(self, name, value if present is None else self.platform.ops.add(present, value))

    def take_losses(self) -> Tensor:
        """Return and forget the sums of the auxiliary losses, float32 `[4]`."""
        losses, self.losses = self.losses, None
        return self.platform.zeros((len(LOSSES),), self.platform.dtype("float32")) if losses is None else losses

    def take(self) -> Tensor:
        """Return and forget all counts, as int64 `[num_experts + 2]`: choices, dropped choices, bytes sent."""
        platform, ops = self.platform, self.platform.ops
        int64 = platform.dtype("int64")
        counts = platform.zeros((self.num_experts,), int64) if self.counts is None else self.counts
        dropped = platform.zeros((1,), int64) if self.dropped is None else self.dropped
        device = platform.device_of(counts)
        sent = platform.from_numpy(numpy.array([self.sent_bytes], numpy.int64), device)
        self.counts, self.dropped, self.sent_bytes = None, None, 0
        return ops.cat([counts, dropped, sent], 0)


def is_trained(module: nn.Module) -> bool:
    """Tell a forward pass in training from one that only evaluates, which draws no noise and counts nothing."""
    return module.training and (module.platform.is_grad_enabled() or is_checkpointed())


@dataclass(frozen=True)
class AuxLosses:
    """Coefficients of a layer's auxiliary losses; 0 leaves one out.

    Attributes:
        micro_batch: balance within the micro-batch of all ranks (Switch, arXiv 2101.03961).
        sequence: balance within each sequence, that of its whole length wherever it is cut (DeepSeek-V3,
            arXiv 2412.19437).
        global_batch: balance over the optimizer step (arXiv 2501.11873). The shares are those of the step before, which
            are known exactly, whereas those of the present one are not before its last micro-batch; the first step
            goes without.
        z: mean square of the logits' logsumexp (ST-MoE, arXiv 2202.08906).

    Raises:
        MoEConfigError: a coefficient is below 0 or no number.

    Example:
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
        tally: gets the sums over this rank's tokens.
        token_group: ranks that route different tokens; None: this rank routes them all.
        step_tokens: tokens of the optimizer step; None: a step is one micro-batch.
        loss_scale: factor on the gradients, as on that of the caller's loss.
        last_shares: float32 `[experts]`, each expert's share of the choices of the step before.
        num_sequences: sequences of the input.
        sequences: returns the sequence of each of this rank's tokens, int64 `[tokens]`.
        sequence_sums: sums over ranks that have other tokens of the same sequences.
        is_counted: gradients of other ranks with the same tokens do not count these losses too.
    """

    platform: Platform
    coefficients: AuxLosses
    tally: Tally
    token_group: ProcessGroup | None
    step_tokens: int | None
    loss_scale: float
    last_shares: Tensor | None
    num_sequences: int
    sequences: Callable[[], Tensor]
    sequence_sums: Sequence[Callable[[Tensor], Tensor]]
    is_counted: bool

    def __call__(self, logits: Tensor, probabilities: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
        """Return the sum over this rank's tokens of all losses with their coefficients, over the step's tokens."""
        ops = self.platform.ops
        # Each rank's numbers; the same calls in the same order on all of them.
        everywhere = saved_value(lambda: self._over_ranks(counts) if self._needs_all_counts else counts)
        # Zero, but in the graph: the sum of losses then gets a gradient whichever of them there are.
        nothing = ops.sum(ops.mul(logits, 0.0))
        sums, total = [], nothing
        for name in LOSSES:
            coefficient = getattr(self.coefficients, name)
            loss = self._sum_over_tokens(name, logits, probabilities, experts, everywhere) if coefficient else None
            sums.append(nothing if loss is None else loss)
            if loss is not None:
                total = ops.add(total, ops.mul(loss, coefficient))
        saved_value(lambda: self.tally.add("losses", self.platform.detach(ops.stack(sums, 0))))
        total = ops.mul(total, self.loss_scale if self.is_counted else 0.0)
        if self.step_tokens is not None:
            return ops.div(total, float(self.step_tokens))
        tokens = ops.div(ops.sum(ops.cast(everywhere, logits.dtype)), float(experts.shape[1]))
        return ops.div(total, ops.clamp(tokens, min=1.0))

    @property
    def _needs_all_counts(self) -> bool:
        return bool(self.coefficients.micro_batch) or self.step_tokens is None

    def _sum_over_tokens(
        self, name: str, logits: Tensor, probabilities: Tensor, experts: Tensor, everywhere: Tensor
    ) -> Tensor:
        ops = self.platform.ops
        if name == "z":
            return ops.sum(ops.square(ops.logsumexp(logits, 1)))
        if name == "global_batch":
            shares = ops.unsqueeze(self.last_shares, 0)
        elif name == "micro_batch":
            shares = shares_of(ops, ops.unsqueeze(everywhere, 0), logits.dtype)
        else:
            shares = saved_value(lambda: self._shares_of_sequences(experts, logits.dtype))
        return ops.mul(ops.sum(ops.mul(probabilities, shares)), float(probabilities.shape[1]))

    def _shares_of_sequences(self, experts: Tensor, dtype: Any) -> Tensor:
        """Return each expert's share of the choices of each token's sequence: `[tokens, experts]`."""
        ops, num_experts = self.platform.ops, self.tally.num_experts
        of_tokens = self.sequences()
        keys = ops.add(ops.unsqueeze(ops.mul(of_tokens, num_experts), 1), experts)
        counts = count_keys(self.platform, keys, self.num_sequences * num_experts)
        for sum_over_ranks in self.sequence_sums:
            counts = sum_over_ranks(counts)
        shares = shares_of(ops, ops.reshape(counts, (self.num_sequences, num_experts)), dtype)
        if of_tokens.shape[0] == 0:
            return self.platform.zeros((0, num_experts), dtype)
        return ops.index_select(shares, 0, of_tokens)

    def _over_ranks(self, counts: Tensor) -> Tensor:
        return counts if self.token_group is None else all_reduce_data(counts, self.token_group)


def shares_of(ops: Any, counts: Tensor, dtype: Any) -> Tensor:
    """Return each row of counts as shares of its sum: `[rows, experts]`; zeros for a row of zeros."""
    counts = ops.cast(counts, dtype)
    return ops.div(counts, ops.clamp(ops.sum(counts, 1, keepdim=True), min=1.0))


def attach_loss(platform: Platform, x: Tensor, loss: Tensor) -> Tensor:
    """Return `x`; in backward, `loss`, a 0-d tensor, gets a gradient of one beside the gradient of `x`."""
    ops, like = platform.ops, platform.detach(loss)
    return platform.custom_function(lambda x, loss: ops.clone(x), lambda grad: (grad, ops.ones_like(like)), x, loss)
