"""The mixture-of-experts layer.

Routing is local: each rank routes the plain rows of a `LocalRegion`. On the mesh of a distributed input, or of experts
with a sharded hidden dimension, an axis is one of:

- sharded: every rank routes its own tokens, and results have the placements of the input;
- varying (the experts' hidden dimension is sharded over this axis): every rank routes all tokens and computes a partial
  sum of each result;
- split (ranks are given the same tokens): every rank routes its share of the tokens and gets the results of all.

Gradients follow the rows: those of sharded rows are sharded, those of varying rows are partial sums.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_reduce_data, gather_data, slice_data
from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import saved_value
from hp_dtensor.spec.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.redistribution import vary
from hp_dtensor.tensor.saved_shards import pass_on, reshard_after_forward
from hp_moe.dispatch import LocalDispatcher, ReplicatingDispatcher
from hp_moe.exceptions import ExpertParallelError, MoEConfigError
from hp_moe.experts import (
    Activation,
    FeedForward,
    GroupedExperts,
    ScorePosition,
    dispatcher_of,
    partial_mesh_of,
    run_experts,
)
from hp_moe.losses import LOSSES, AuxLosses, LossTerms, StepTotals, is_trained
from hp_moe.router import AuxiliaryLoss, GroupScore, ScoreFunction, Selection, TokenChoiceTopKRouter, plain
from hp_moe.routing import Capacity, Choices, Routing, check_ids, choices_within_capacity, reported_faults

Tensor = Any


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """The local tensor that a layer computes with, and how its results become the layer's output.

    Attributes:
        rows: the plain tensor to compute with, `[..., dim]`.
        mesh: the mesh of input and output; None if they are plain and belong to this rank alone.
        local_placements: placements of the local results on `mesh`.
        output_placements: placements of the output; None for a plain, unsharded output.
        shape: global shape of the output.
        outer: the region that this one was entered from, or None.
    """

    rows: Tensor
    mesh: DeviceMesh | None = None
    local_placements: tuple[Placement, ...] = ()
    output_placements: tuple[Placement, ...] | None = None
    shape: tuple[int, ...] = ()
    outer: LocalRegion | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that route tokens of this input, the same or different ones."""
        mine = 1 if self.mesh is None else self.mesh.size()
        return mine * (1 if self.outer is None else self.outer.num_ranks)

    def shard_like_rows(self, x: Tensor) -> Tensor:
        """Return this rank's shard of a number for each token of the input, plain or distributed, without gradients."""
        if self.outer is not None:
            x = self.outer.shard_like_rows(x)
        if self.mesh is None:
            return x
        if not isinstance(x, DTensor):
            # A plain tensor is the same on all ranks, so it is wrapped as replicated without communication.
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, shape=tuple(x.shape))
        return x.redistribute(
            # Where results are partial sums, every rank routes all tokens.
            placements=[Replicate() if p.is_partial() else p for p in self.local_placements]
        ).to_local()

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over ranks that route different tokens of the same input, without gradients."""
        if self.mesh is not None and not any(p.is_partial() for p in self.local_placements):
            # One all-reduce for each axis: together they sum over all ranks of the mesh.
            for dim in range(self.mesh.ndim):
                x = all_reduce_data(x, self.mesh.group_along(dim))
        return x if self.outer is None else self.outer.sum_over_ranks(x)

    @property
    def num_token_ranks(self) -> int:
        """Number of ranks that route different tokens of the same input."""
        is_unsharded = self.mesh is None or any(p.is_partial() for p in self.local_placements)
        mine = 1 if is_unsharded or self.mesh is None else self.mesh.size()
        return mine * (1 if self.outer is None else self.outer.num_token_ranks)

    def over_sequences(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return a function of full sequences `[..., length, width]` for this rank's values, without gradients."""
        outer = function if self.outer is None else functools.partial(self.outer.over_sequences, function)
        # Where results are partial sums, this rank has the rows of all.
        if self.mesh is None or any(p.is_partial() for p in self.local_placements):
            return outer(x)
        shape, sequence = (*self.shape[:-1], int(x.shape[-1])), max(0, len(self.shape) - 2)
        full = [Replicate() if p.is_shard(sequence) else p for p in self.local_placements]
        local = DTensor.from_local(x, self.mesh, self.local_placements, shape=shape)
        result = DTensor.from_local(outer(local.redistribute(placements=full).to_local()), self.mesh, full, shape=shape)
        return result.redistribute(placements=self.local_placements).to_local()

    def leave(self, y: Tensor) -> Tensor:
        """Convert local results `y`, shaped like `rows`, into a tensor placed like the input."""
        if self.mesh is not None:
            # Where ranks compute partial sums of every result, `local_placements` are partial, and the redistribution
            # below is the layer's only reduction.
            output = DTensor.from_local(y, self.mesh, self.local_placements, shape=self.shape)
            y = (
                output.full_tensor()
                if self.output_placements is None
                else output.redistribute(placements=self.output_placements)
            )
        return y if self.outer is None else self.outer.leave(y)


def enter_region(
    x: Tensor, partial_mesh: DeviceMesh | None = None, split_mesh: DeviceMesh | None = None, *, reshards: bool = False
) -> LocalRegion:
    """Return the region in which this rank routes its tokens of `x` `[..., dim]`.

    Args:
        x: plain (each rank's own, but the same on all ranks of the two meshes) or distributed.
        partial_mesh: 1-D mesh over which the experts' hidden dimension is sharded, or None.
        split_mesh: 1-D mesh of ranks that are given the same `x`, or None.
        reshards: let the region's first uses save the shard of a gathered input; see `MoE.reshard_after_forward`.

    Raises:
        ExpertParallelError: `x` is distributed over other ranks than the experts' hidden dimension, or over ranks that
            are to be given the same tokens.
    """
    region = _enter(x, partial_mesh, reshards)
    if split_mesh is None:
        return region
    if isinstance(x, DTensor) and len({*x.device_mesh.ranks()} & {*split_mesh.ranks()}) > 1:
        raise ExpertParallelError(
            f"the input is distributed over {x.device_mesh.describe()}, which shares ranks with the mesh "
            f"{split_mesh.describe()} of ranks that are given the same tokens; distribute it over other axes, or apply "
            "the parallel style without split_tokens"
        )
    # The rows are the same on all ranks of `split_mesh`, so they can be wrapped as a replicated tensor and sharded.
    split = _sharded_region(_replicated(region.rows, split_mesh))
    return replace(split, output_placements=None, outer=region)


def _enter(x: Tensor, partial_mesh: DeviceMesh | None, reshards: bool) -> LocalRegion:
    if not isinstance(x, DTensor):
        if partial_mesh is None:
            return LocalRegion(x)
        return _varying_region(_replicated(x, partial_mesh), output_placements=None)
    if partial_mesh is not None:
        if x.device_mesh.ranks() != partial_mesh.ranks():
            raise ExpertParallelError(
                f"the input is distributed over {x.device_mesh.describe()}, the experts' hidden dimension is sharded "
                f"over {partial_mesh.describe()}; both must be the same ranks"
            )
        return _varying_region(x, output_placements=x.placements, reshards=reshards)
    return _sharded_region(x)


def _replicated(x: Tensor, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(x, mesh, [Replicate()], shape=tuple(x.shape))


def _varying_region(x: Any, output_placements: tuple[Placement, ...] | None, *, reshards: bool = False) -> LocalRegion:
    ndim = x.device_mesh.ndim
    gathered = x.redistribute(placements=[Replicate()] * ndim)
    if reshards and gathered is not x:
        reshard_after_forward(x, gathered)
    # In backward, a varying view of the gathered tensor needs a single reduce-scatter.
    rows = vary(gathered, tuple(range(ndim)))
    return LocalRegion(rows, x.device_mesh, (Partial(),) * ndim, output_placements, tuple(x.shape))


def _sharded_region(x: Any) -> LocalRegion:
    ndim = len(x.shape)
    # All dimensions but the last are tokens. Axes that shard none of them shard the sequence, so that no two ranks
    # route the same token.
    fallback = Shard(max(0, ndim - 2))
    placements = tuple(p if p.is_shard() and not p.is_shard(ndim - 1) else fallback for p in x.placements)
    rows = x.redistribute(placements=placements).to_local()
    return LocalRegion(rows, x.device_mesh, placements, x.placements, tuple(x.shape))


class MoE(nn.Module):
    """Mixture of routed experts, with optional shared experts that process every token.

    Args:
        dim: width of a token.
        hidden_dim: hidden width of one routed expert.
        num_experts: number of routed experts.
        top_k: experts per token.
        num_shared_experts: width of the shared feed-forward network in multiples of `hidden_dim`; 0 for none.
        score_before_experts: scale the experts' inputs by their scores instead of their outputs.
        load_balance_coeff: step size of the expert bias that balances loads without a loss (arXiv 2408.15664); None
            for no bias. `update_expert_bias` makes the steps.
        score_func, num_expert_groups, num_limited_groups, route_norm, route_scale, gate_bias, group_score, jitter,
            jitter_seed, force_uniform, hash_vocab_size, selection: as in `TokenChoiceTopKRouter`. `sinkhorn` and
            `expert_choice` balance loads, and exclude other ways to do so. Sequences are along the last dimension but
            one of the input. `expert_choice` needs no capacity: each expert has equally many tokens.
        capacity: bound on the tokens of an expert; choices beyond it are dropped. None drops nothing.
        aux_losses: coefficients of auxiliary losses. Their gradients are added automatically; the caller does not add
            the losses to its own.
        activation, bias, score_position: as in `GroupedExperts`; shared experts use the same activation.
        shared_hidden_dim: hidden width of the shared network, instead of `num_shared_experts`.
        shared_gate: scale the output of the shared network by `sigmoid(linear(token))` (Qwen2-MoE).

    Attributes:
        name: the layer's name in error messages; `moe_layers` sets it.
        experts: `GroupedExperts`, or any module called as `experts(rows, num_tokens_per_expert)` with rows in
            expert-major order. Replace it before applying a parallel style.
        expert_bias: float32 `[num_experts]` buffer, or None.
        split_mesh: 1-D mesh of ranks that are given the same tokens and each route a share of them; None if each rank
            routes all tokens that it is given.
        reshard_after_forward: where experts with a sharded hidden dimension gather a sharded input, save its shard and
            gather it again in backward, instead of saving the gathered rows.
        token_mesh: 1-D mesh of all ranks that route different tokens; loads are summed over it. None if this rank
            routes all tokens.
        sequence_mesh: 1-D mesh over which plain inputs shard the same sequences; None if sequences are unsharded or
            inputs are distributed tensors. Plain shards do not carry a token's position in the sequence, so jitter
            and the choices that a capacity drops then differ from those on one rank.
        step_tokens: tokens of the optimizer step over all ranks and micro-batches, by which auxiliary losses are
            divided; None if a step is one micro-batch.
        allow_nonfinite: let infinite and NaN scores through instead of raising an error.
        loss_scale: factor by which the caller multiplies its loss (`GradScaler.get_scale()`) and later divides the
            gradients; auxiliary losses are multiplied by it too.

    Raises:
        MoEConfigError: sizes or options do not fit together. Problems of the router are reported all at once.

    Examples:
        >>> with nn.building(platform):
        ...     layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1)
        >>> tuple(layer(platform.ops.ones((2, 3, 4), platform.dtype("float32"))).shape)
        (2, 3, 4)
    """

    # Set by parallel styles and by the caller; these are the values of one rank.
    split_mesh: DeviceMesh | None = None
    reshard_after_forward: bool = False
    token_mesh: DeviceMesh | None = None
    sequence_mesh: DeviceMesh | None = None
    step_tokens: int | None = None
    allow_nonfinite: bool = False
    loss_scale: float = 1.0

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        num_shared_experts: int = 0,
        score_before_experts: bool = False,
        load_balance_coeff: float | None = None,
        score_func: ScoreFunction = "softmax",
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        route_norm: bool = False,
        route_scale: float = 1.0,
        *,
        gate_bias: bool = False,
        group_score: GroupScore = "top2_sum",
        activation: str | Activation = "swiglu",
        bias: bool = False,
        score_position: ScorePosition | None = None,
        shared_hidden_dim: int | None = None,
        shared_gate: bool = False,
        jitter: float = 0.0,
        jitter_seed: int = 0,
        force_uniform: bool = False,
        hash_vocab_size: int | None = None,
        selection: Selection = "top_k",
        capacity: Capacity | None = None,
        aux_losses: AuxLosses | None = None,
    ) -> None:
        super().__init__()
        _check_balance(selection, load_balance_coeff, capacity, aux_losses)
        self.name = ""
        self.dim = dim
        self.num_experts = num_experts
        self.load_balance_coeff = load_balance_coeff
        self.capacity = capacity
        self.aux_losses = aux_losses or AuxLosses()
        self.router = TokenChoiceTopKRouter(
            dim,
            num_experts,
            top_k,
            score_func,
            num_expert_groups,
            num_limited_groups,
            route_norm,
            route_scale,
            gate_bias=gate_bias,
            group_score=group_score,
            jitter=jitter,
            jitter_seed=jitter_seed,
            force_uniform=force_uniform,
            hash_vocab_size=hash_vocab_size,
            selection=selection,
        )
        self.experts = GroupedExperts(
            dim,
            hidden_dim,
            num_experts,
            score_before_experts,
            activation=activation,
            bias=bias,
            score_position=score_position,
        )
        shared_dim = _shared_dim(hidden_dim, num_shared_experts, shared_hidden_dim, shared_gate)
        self.shared_experts = FeedForward(dim, shared_dim, activation) if shared_dim else None
        self.shared_gate = nn.Linear(dim, 1) if shared_gate else None
        # Buffers, so that checkpoints save them.
        is_used = {"expert_bias": load_balance_coeff is not None, "last_shares": self.aux_losses.global_batch}
        for buffer, used in is_used.items():
            zeros = self.platform.zeros((num_experts,), self.platform.dtype("float32")) if used else None
            self.register_buffer(buffer, zeros)
        self.totals = StepTotals(self.platform, num_experts)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply `fn` as torch's `.to(dtype)` does, but keep `expert_bias` and `last_shares` in float32."""
        # They accumulate small steps, which 16 bits would round away.
        names = [name for name in ("expert_bias", "last_shares") if getattr(self, name) is not None]
        before = [getattr(self, name) for name in names]
        # Defined by the framework's module class, which mypy does not see as a base.
        super()._apply(fn, *args, **kwargs)  # type: ignore[misc]
        for name, old in zip(names, before, strict=True):
            new = getattr(self, name)
            if new.dtype != old.dtype:
                setattr(self, name, self._on_device_of(new, old))
        return self

    def _on_device_of(self, new: Tensor, old: Tensor) -> Tensor:
        """Return `old`, with its values and dtype, on the device of `new`."""
        if isinstance(old, DTensor) or self.platform.is_meta(old) or self.platform.is_meta(new):
            return self.ops.cast(new, old.dtype)
        # `new` has been rounded by the conversion, so the values are those of `old`.
        return self.platform.from_numpy(self.platform.to_numpy(old), self.platform.device_of(new))

    def _hp_check_state(self) -> None:
        """Raise if weights would be saved or loaded while experts are moved; see `hp_dtensor.parallel`."""
        dispatcher = dispatcher_of(self.experts, self.platform)
        if isinstance(dispatcher, ReplicatingDispatcher) and not dispatcher.is_initial_placement:
            moved = sum(expert != position for expert, position in enumerate(dispatcher.expert_placement))
            raise ExpertParallelError(
                f"{self.name or 'MoE'}: {moved} of its {self.num_experts} experts are moved (move_experts), so rows "
                "of weights and optimizer states are not in expert order; call hp_moe.return_experts(model, states) "
                "before saving, loading or exporting them"
            )

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Apply the layer to every token: `[..., dim]` -> `[..., dim]`, placed like the input.

        Args:
            ids: token ids, an integer tensor `[...]`, for hash routing.

        Raises:
            ExpertParallelError: inputs, routing or meshes do not fit; the message names the layer and this rank.
        """
        try:
            return self._forward(x, ids)
        except ExpertParallelError as error:
            rank = current_world(self.platform).rank
            message = f"{self.name or 'MoE'}, rank {rank}: {error}"
            raise ExpertParallelError(message, only_nonfinite=error.only_nonfinite) from error

    def _forward(self, x: Tensor, ids: Tensor | None) -> Tensor:
        if not x.shape or x.shape[-1] != self.dim:
            raise ExpertParallelError(f"expected an input [..., {self.dim}], got shape {list(x.shape)}")
        shape = tuple(x.shape)
        partial_mesh, reshards = partial_mesh_of(self.experts), self.reshard_after_forward
        region = enter_region(x, partial_mesh, self.split_mesh, reshards=reshards)
        self._check_gate(region.num_ranks)
        # Tokens of all leading dimensions in one: the router and the experts work on `[tokens, dim]`.
        rows = self.ops.reshape(region.rows, (math.prod(region.rows.shape[:-1]), self.dim))
        rows = pass_on(region.rows, rows)  # the gate and fused experts then save the shard, see `reshard_after_forward`
        dispatcher = dispatcher_of(self.experts, self.platform)
        with reported_faults(dispatcher, self.platform, x):
            valid_ids, fault = self._validated_ids(None if ids is None else self._per_row(ids, region), rows)
            # Losses and jitter are passed as functions: most calls need neither, and both communicate.
            scores, experts, counts = self.router(
                rows,
                self.expert_bias,
                ids=valid_ids,
                auxiliary=self._auxiliary_loss(region, shape),
                token_numbers=lambda: self._token_numbers(region, shape),
                over_sequences=functools.partial(self._over_sequences, region),
            )
        routing = self._routing(experts, counts, scores, region, shape)
        # Raised only now: the router and the capacity run collectives, in which this rank had to take part.
        with reported_faults(dispatcher, self.platform, x):
            if fault is not None:
                raise fault
        shared: list[Tensor] = []
        if not isinstance(self.experts, GroupedExperts):
            results = run_experts(self.experts, self.platform, rows, routing)
        # Without communication there is nothing to overlap, and the shared experts run last.
        elif type(self.experts.dispatcher) is LocalDispatcher or self.shared_experts is None:
            results = self.experts(rows, routing)
        else:
            results = self.experts(rows, routing, overlap_with=lambda: shared.append(self._shared(x)))
        # Recomputation in backward must not count the same tokens again.
        saved_value(lambda: self._count(counts))
        routed = region.leave(self.ops.reshape(results, tuple(region.rows.shape)))
        if self.shared_experts is None:
            return routed
        return self.ops.add(routed, shared[0] if shared else self._shared(x))

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared_experts is not None
        shared = self.shared_experts(x)
        return shared if self.shared_gate is None else self.ops.mul(self.ops.sigmoid(self.shared_gate(x)), shared)

    def _per_row(self, x: Tensor, region: LocalRegion) -> Tensor:
        """Return the numbers of the tokens that this rank routes, `[tokens]`, given one for each token of the input."""
        local = region.shard_like_rows(x)
        return self.ops.reshape(local, (math.prod(local.shape),))

    def _validated_ids(self, ids: Tensor | None, rows: Tensor) -> tuple[Tensor | None, ExpertParallelError | None]:
        """Return ids that are safe to look up, and the error of the given ones, to raise after the collectives."""
        num_tokens, vocab_size = int(rows.shape[0]), self.router.hash_vocab_size
        if vocab_size is None or not self.router.takes_ids:
            return ids, None
        try:
            check_ids(self.platform, ids, num_tokens, vocab_size)
        except ExpertParallelError as fault:
            zeros = numpy.zeros(num_tokens, numpy.int64)
            return self.platform.from_numpy(zeros, self.platform.device_of(rows)), fault
        return ids, None

    def _routing(
        self, experts: Tensor, counts: Tensor, scores: Tensor, region: LocalRegion, shape: tuple[int, ...]
    ) -> Routing:
        if self.capacity is None:
            # Experts that have not selected a token are marked as dropped choices are.
            has_dropped = self.router.selection == "expert_choice"
            return Routing(experts, counts, scores, has_dropped=has_dropped, allow_nonfinite=self.allow_nonfinite)
        # Saved: recomputation must neither gather the choices again nor drop other ones.
        experts, counts = saved_value(lambda: self._within_capacity(experts, scores, region, shape))
        return Routing(experts, counts, scores, has_dropped=True, allow_nonfinite=self.allow_nonfinite)

    def _within_capacity(
        self, experts: Tensor, scores: Tensor, region: LocalRegion, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return (experts, token counts per expert), with `num_experts` in place of each dropped choice."""
        assert self.capacity is not None
        platform, device = self.platform, self.platform.device_of(experts)
        # On the host: a sort by several keys of the choices of all ranks. This waits for the device.
        mine = Choices(platform.to_numpy(experts), platform.to_numpy(scores), self._positions(region, shape))
        group = None if self.token_mesh is None else self.token_mesh.group_along()
        within = choices_within_capacity(mine, self.capacity, self.num_experts, group, region.num_token_ranks)
        remaining = numpy.where(within, mine.experts, self.num_experts)
        # Dropped choices are counted as expert `num_experts`, which is left out of the counts.
        counts = numpy.bincount(remaining.reshape(-1), minlength=self.num_experts + 1)[:-1]
        if is_trained(self):
            self.totals.add("dropped", platform.from_numpy(numpy.array([(~within).sum()]), device))
        return platform.from_numpy(remaining, device), platform.from_numpy(counts, device)

    def _positions(self, region: LocalRegion, shape: tuple[int, ...]) -> numpy.ndarray:
        """Return the position in the input of each token that this rank routes, int64 `[tokens]`, on the host."""
        positions = numpy.arange(math.prod(shape[:-1])).reshape(shape[:-1])
        # Positions are sharded as the tokens are, so each rank gets those of its own tokens in any layout.
        of_input = self.platform.from_numpy(positions, self.platform.device_of(region.rows))
        return self.platform.to_numpy(self._per_row(of_input, region))

    def _token_numbers(self, region: LocalRegion, shape: tuple[int, ...]) -> numpy.ndarray:
        """Return the global number of each token, by rank and position; it gathers the lengths of all ranks."""
        positions = self._positions(region, shape)
        if self.token_mesh is None:
            return positions
        group = self.token_mesh.group_along()
        lengths = [int(each) for each in group.all_gather_bytes(str(len(positions)).encode())]
        # Ranks that share one input are consecutive in the group.
        first_of_input = group.rank - group.rank % region.num_token_ranks
        return positions + sum(lengths[:first_of_input])

    def _over_sequences(self, region: LocalRegion, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a function of full sequences to values of this rank's tokens; see `TokenChoiceTopKRouter.forward`."""
        shape = (*region.rows.shape[:-1], x.shape[1])
        result = region.over_sequences(functools.partial(self._over_input, function), self.ops.reshape(x, shape))
        return self.ops.reshape(result, tuple(x.shape))

    def _over_input(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Apply a function of full sequences to values of the tokens of an input, `[..., length, num_experts]`."""
        shape = tuple(int(size) for size in x.shape)
        length = shape[-2] if len(shape) > 1 else 1
        batched = self.ops.reshape(x, (math.prod(shape[:-2]), length, shape[-1]))
        if self.sequence_mesh is None:
            return self.ops.reshape(function(batched), shape)
        group = self.sequence_mesh.group_along()
        lengths = [int(each) for each in group.all_gather_bytes(str(length).encode())]
        result = function(gather_data(batched, group, 1, lengths))
        return self.ops.reshape(slice_data(result, group, 1, lengths), shape)

    def _auxiliary_loss(self, region: LocalRegion, shape: tuple[int, ...]) -> AuxiliaryLoss | None:
        if not (self.aux_losses and is_trained(self)):
            return None
        partial = partial_mesh_of(self.experts)
        # A sequence may be sharded by a distributed input, by plain inputs over `sequence_mesh`, or by both.
        sums: list[Callable[[Tensor], Tensor]] = [region.sum_over_ranks]
        if self.sequence_mesh is not None:
            sequence_group = self.sequence_mesh.group_along()
            sums.append(lambda counts: all_reduce_data(counts, sequence_group))
        return LossTerms(
            self.platform,
            self.aux_losses,
            self.totals,
            token_group=None if self.token_mesh is None else self.token_mesh.group_along(),
            step_tokens=self.step_tokens,
            loss_scale=self.loss_scale,
            last_shares=plain(self.last_shares),
            num_sequences=math.prod(shape[:-2]),
            sequences=lambda: self._sequences(region, shape),
            sequence_sums=sums,
            # Ranks that shard the experts' hidden dimension route the same tokens and their gate gradients are summed:
            # only one of them may count the losses.
            is_counted=partial is None or partial.get_local_rank() == 0,
        )

    def _sequences(self, region: LocalRegion, shape: tuple[int, ...]) -> Tensor:
        """Return the sequence index of each token that this rank routes, int64 `[tokens]`."""
        numbers = numpy.arange(math.prod(shape[:-2])).repeat(shape[-2] if len(shape) > 1 else 1)
        of_input = self.platform.from_numpy(numbers.reshape(shape[:-1]), self.platform.device_of(region.rows))
        return self._per_row(of_input, region)

    def _count(self, counts: Tensor) -> None:
        # Experts modules other than GroupedExperts do not count bytes.
        sent_bytes = self.experts.take_sent_bytes() if isinstance(self.experts, GroupedExperts) else 0
        if is_trained(self):
            self.totals.add("counts", counts)
            self.totals.sent_bytes += sent_bytes

    def _check_gate(self, num_ranks: int) -> None:
        """Raise if the gate's gradient would miss the tokens of other ranks that share this input."""
        # The gate's gradient is a partial sum on each rank (`plain`). Only a DTensor gate on the same ranks sums it.
        weight = self.router.gate.weight
        # A plain gate gets the gradient of the tokens of this rank alone.
        gate_ranks = weight.device_mesh.size() if isinstance(weight, DTensor) else 1
        if gate_ranks != num_ranks:
            raise ExpertParallelError(
                f"the input of this MoE is shared by {num_ranks} ranks, but router.gate.weight is on a mesh of "
                f"{gate_ranks}; distribute the router over the same ranks (Replicate)"
            )


def _check_balance(
    selection: str, load_balance_coeff: float | None, capacity: Capacity | None, aux_losses: AuxLosses | None
) -> None:
    """Raise if the coefficient is not positive, or if a selection that balances is combined with others that do."""
    if load_balance_coeff is not None and not load_balance_coeff > 0:
        raise MoEConfigError(f"load_balance_coeff must be above 0 or None, got {load_balance_coeff}")
    losses = [name for name in LOSSES if name != "z" and aux_losses is not None and getattr(aux_losses, name)]
    given = {
        "load_balance_coeff": load_balance_coeff is not None,
        f"aux_losses of {', '.join(losses)}": bool(losses),
        "capacity": capacity is not None and selection == "expert_choice",
    }
    excluded = [name for name, is_given in given.items() if is_given]
    if selection != "top_k" and excluded:
        raise MoEConfigError(f"selection {selection!r} cannot be combined with {', '.join(excluded)}: omit them")


def _shared_dim(hidden_dim: int, num_shared_experts: int, shared_hidden_dim: int | None, shared_gate: bool) -> int:
    if num_shared_experts and shared_hidden_dim is not None:
        raise MoEConfigError("num_shared_experts and shared_hidden_dim both set the shared network's width; give one")
    shared_dim = hidden_dim * num_shared_experts if shared_hidden_dim is None else shared_hidden_dim
    if shared_dim < 0:
        raise MoEConfigError(f"the shared network's width must be at least 0, got {shared_dim}")
    if shared_gate and not shared_dim:
        raise MoEConfigError("shared_gate scales shared experts; give num_shared_experts or shared_hidden_dim too")
    return shared_dim
