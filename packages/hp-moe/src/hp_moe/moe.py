"""Local regions: the way from a layer's input to the plain rows that this rank routes, and back.

Routing is local work, each rank routes rows of its own. On the mesh of a distributed input, or of experts whose
hidden dimension is cut, an axis is one of:

- sharded: every rank routes its own tokens, and the results are placed as the input was;
- varying (experts cut over this axis): every rank routes all tokens and returns a part of every result;
- split (ranks that were given the same tokens): every rank routes its share, and all get all results.

Gradients follow: sharded rows give sharded gradients, varying ones partial gradients that are summed.

The mixture-of-experts layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy

from hp_dtensor.comm.collectives import all_reduce_data
from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import saved_value
from hp_dtensor.spec.placements import Partial, Placement, Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.redistribution import vary
from hp_moe.capacity import Capacity, Choices, kept_choices
from hp_moe.dispatch import LocalDispatcher, ReplicatingDispatcher
from hp_moe.exceptions import ExpertParallelError, MoEConfigError
from hp_moe.experts import GroupedExperts, ScorePosition, dispatcher_of, partial_mesh_of, run_experts
from hp_moe.feed_forward import Activation, FeedForward
from hp_moe.losses import AuxLosses, LossTerms, Tally, is_trained
from hp_moe.router import AuxiliaryLoss, GroupScore, ScoreFunction, TokenChoiceTopKRouter, plain
from hp_moe.routing import Routing, check_ids, reported_faults

Tensor = Any


@dataclass(frozen=True, slots=True)
class LocalRegion:
    """A stretch of local work between a layer's input and its output.

    Attributes:
        rows: the plain tensor to work on, `[..., dim]`.
        mesh: the mesh of input and output; None: they are plain and belong to this rank alone.
        inside: placements of the local results on `mesh`.
        outside: placements that the output shall have; None: plain and whole.
        shape: global shape of the output.
        around: the region that this one was entered from.
    """

    rows: Tensor
    mesh: DeviceMesh | None = None
    inside: tuple[Placement, ...] = ()
    outside: tuple[Placement, ...] | None = None
    shape: tuple[int, ...] = ()
    around: LocalRegion | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that work on the tokens of the input, or on parts of them."""
        mine = 1 if self.mesh is None else self.mesh.size()
        return mine * (1 if self.around is None else self.around.num_ranks)

    def follow(self, x: Tensor) -> Tensor:
        """Return this region's part of a tensor that has a number for each token of the input, without gradients.

        Args:
            x: shaped as the input without its last dimension; plain and whole, or distributed.
        """
        if self.around is not None:
            x = self.around.follow(x)
        if self.mesh is None:
            return x
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, shape=tuple(x.shape))
        return x.redistribute(placements=[Replicate() if p.is_partial() else p for p in self.inside]).to_local()

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks that route different tokens of the same input, without gradients."""
        if self.mesh is not None and not any(p.is_partial() for p in self.inside):
            for dim in range(self.mesh.ndim):
                x = all_reduce_data(x, self.mesh.get_group(dim))
        return x if self.around is None else self.around.sum_over_ranks(x)

    @property
    def num_token_ranks(self) -> int:
        """Number of ranks that route different tokens of the same input."""
        is_whole = self.mesh is None or any(p.is_partial() for p in self.inside)
        mine = 1 if is_whole or self.mesh is None else self.mesh.size()
        return mine * (1 if self.around is None else self.around.num_token_ranks)

    def leave(self, y: Tensor) -> Tensor:
        """Turn local results `y`, shaped as `rows`, into the kind of tensor that came in."""
        if self.mesh is not None:
            # Where each rank has a part of every result, `inside` is partial, and this is the one reduction.
            output = DTensor.from_local(y, self.mesh, self.inside, shape=self.shape)
            y = output.full_tensor() if self.outside is None else output.redistribute(placements=self.outside)
        return y if self.around is None else self.around.leave(y)


def enter_region(
    x: Tensor, partial_mesh: DeviceMesh | None = None, split_mesh: DeviceMesh | None = None
) -> LocalRegion:
    """Begin local work on `x` `[..., dim]`.

    Args:
        x: plain (each rank's own, but the same on all ranks of the two meshes) or distributed.
        partial_mesh: 1-D mesh over which the experts' hidden dimension is cut; None: it is not.
        split_mesh: 1-D mesh of ranks that were given the same `x`; None: none were.

    Raises:
        ExpertParallelError: `x` is distributed over other ranks than the experts' hidden dimension, or over ranks that
            are to be given the same tokens.
    """
    region = _enter(x, partial_mesh)
    if split_mesh is None:
        return region
    if isinstance(x, DTensor) and len({*x.device_mesh.ranks()} & {*split_mesh.ranks()}) > 1:
        raise ExpertParallelError(
            f"the input is distributed over {x.device_mesh.describe()}, which shares ranks with the mesh "
            f"{split_mesh.describe()} of ranks that are given the same tokens; distribute it over other axes, or lay "
            "the experts out without split_tokens"
        )
    split = _sharded_region(_replicated(region.rows, split_mesh))
    return replace(split, outside=None, around=region)


def _enter(x: Tensor, partial_mesh: DeviceMesh | None) -> LocalRegion:
    if not isinstance(x, DTensor):
        if partial_mesh is None:
            return LocalRegion(x)
        return _varying_region(_replicated(x, partial_mesh), outside=None)
    if partial_mesh is not None:
        if x.device_mesh.ranks() != partial_mesh.ranks():
            raise ExpertParallelError(
                f"the input is distributed over {x.device_mesh.describe()}, the experts' hidden dimension is cut "
                f"over {partial_mesh.describe()}; both must be the same ranks"
            )
        return _varying_region(x, outside=x.placements)
    return _sharded_region(x)


def _replicated(x: Tensor, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(x, mesh, [Replicate()], shape=tuple(x.shape))


def _varying_region(x: Any, outside: tuple[Placement, ...] | None) -> LocalRegion:
    ndim = x.device_mesh.ndim
    # The varying view of what was just gathered sends its gradient back by one reduce-scatter.
    rows = vary(x.redistribute(placements=[Replicate()] * ndim), tuple(range(ndim)))
    return LocalRegion(rows, x.device_mesh, (Partial(),) * ndim, outside, tuple(x.shape))


def _sharded_region(x: Any) -> LocalRegion:
    # Tokens are along any dimension but the last; where the input does not cut one, cut the sequence.
    fallback = Shard(max(0, len(x.shape) - 2))
    inside = tuple(p if _cuts_tokens(p, len(x.shape)) else fallback for p in x.placements)
    rows = x.redistribute(placements=inside).to_local()
    return LocalRegion(rows, x.device_mesh, inside, x.placements, tuple(x.shape))


def _cuts_tokens(placement: Placement, ndim: int) -> bool:
    return placement.is_shard() and not placement.is_shard(ndim - 1)


class MoE(nn.Module):
    """Routed experts, and shared experts that see every token.

    Args:
        dim: width of a token.
        hidden_dim: hidden width of one routed expert.
        num_experts: routed experts.
        top_k: experts per token.
        num_shared_experts: one feed-forward network of this many times `hidden_dim`; 0: none.
        score_before_experts: weight the experts' inputs instead of their outputs.
        load_balance_coeff: step of the bias that evens the experts' load without a loss (arXiv 2408.15664);
            None: no bias. `update_expert_bias` takes the steps.
        score_func, num_expert_groups, num_limited_groups, route_norm, route_scale, gate_bias, group_score, jitter,
            jitter_seed, force_uniform, hash_vocab_size: as in `TokenChoiceTopKRouter`.
        capacity: bound on the choices of an expert, beyond which they are dropped; None: no choice is.
        aux_losses: coefficients of auxiliary losses; their gradients need no help from the caller.
        activation, bias, score_position: as in `GroupedExperts`; the activation is that of shared experts too.
        shared_hidden_dim: hidden width of the shared experts' network, instead of `num_shared_experts`.
        shared_gate: weigh the shared experts' result with the sigmoid of a product of the token (Qwen2-MoE).

    Attributes:
        name: the layer's name in messages, once `moe_layers` has seen the model.
        experts: `GroupedExperts`, or put in its place, before a style is applied, any module that takes rows in
            expert-major order and the number of rows of each expert, `experts(rows, num_tokens_per_expert)`.
        expert_bias: float32 `[num_experts]` buffer, or None.
        split_mesh: 1-D mesh of ranks that are given the same tokens and each route a share of them; None:
            each rank routes all that it is given.
        token_mesh: 1-D mesh of all ranks that route different tokens, over which loads are summed; None: this
            rank routes them all.
        sequence_mesh: 1-D mesh over which plain inputs are parts of the same sequences; None: they are whole, or
            distributed tensors that tell. Parts do not tell a token's place in the whole, so jitter and what a
            capacity drops are then others than on one rank.
        step_tokens: tokens of the optimizer step, those of all ranks and micro-batches, which auxiliary losses are
            divided by; None: a step is one micro-batch.
        takes_nonfinite: scores that are no finite numbers are let through, and become such a loss; False: they are
            refused, by layer and rank.
        loss_scale: factor that the caller multiplies its loss by (`GradScaler.get_scale()`), and that gradients are
            divided by afterwards; auxiliary losses take it too.

    Raises:
        MoEConfigError: sizes or options that do not fit; all at once for the router.

    Example:
        >>> with nn.building(platform):
        ...     layer = MoE(dim=4, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1)
        >>> tuple(layer(platform.ops.ones((2, 3, 4), platform.dtype("float32"))).shape)
        (2, 3, 4)
    """

    split_mesh: DeviceMesh | None
    token_mesh: DeviceMesh | None
    sequence_mesh: DeviceMesh | None
    step_tokens: int | None
    takes_nonfinite: bool
    loss_scale: float

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
        capacity: Capacity | None = None,
        aux_losses: AuxLosses | None = None,
    ) -> None:
        super().__init__()
        if load_balance_coeff is not None and not load_balance_coeff > 0:
            raise MoEConfigError(f"load_balance_coeff must be above 0 or None, got {load_balance_coeff}")
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
        bias = self.platform.zeros((num_experts,), self.platform.dtype("float32"))
        self.register_buffer("expert_bias", bias if load_balance_coeff is not None else None)
        shares = self.platform.zeros((num_experts,), self.platform.dtype("float32"))
        self.register_buffer("last_shares", shares if self.aux_losses.global_batch else None)
        self.split_mesh = None
        self.token_mesh = None
        self.sequence_mesh = None
        self.step_tokens = None
        self.takes_nonfinite = False
        self.loss_scale = 1.0
        self.tally = Tally(self.platform, num_experts)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep biases and shares in float32 where torch's `.to(dtype)`, which comes here, casts what is floating.

        They are sums of small steps, which 16 bits would round away.
        """
        names = [name for name in ("expert_bias", "last_shares") if getattr(self, name) is not None]
        before = [getattr(self, name) for name in names]
        # Of the framework's module, which mypy does not see as a base.
        super()._apply(fn, *args, **kwargs)  # type: ignore[misc]
        for name, old in zip(names, before, strict=True):
            new = getattr(self, name)
            if new.dtype != old.dtype:
                setattr(self, name, self._moved(old, new))
        return self

    def _moved(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the values of `old` in its dtype, on the device of `new`."""
        if isinstance(old, DTensor) or self.platform.is_meta(old) or self.platform.is_meta(new):
            return self.ops.cast(new, old.dtype)
        return self.platform.from_numpy(self.platform.to_numpy(old), self.platform.device_of(new))

    def _hp_check_state(self) -> None:
        """Refuse to save or load weights while experts are away; see `hp_dtensor.parallel.distribute_module`."""
        dispatcher = dispatcher_of(self.experts, self.platform)
        if isinstance(dispatcher, ReplicatingDispatcher) and not dispatcher.is_home:
            away = sum(expert != place for expert, place in enumerate(dispatcher.homes))
            raise ExpertParallelError(
                f"{self.name or 'MoE'}: {away} of its {self.num_experts} experts live on other ranks (move_experts), "
                "so that rows of weights and optimizer states are not in the order of the experts; call "
                "hp_moe.return_experts(model, states) before they are saved, loaded or given out"
            )

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Apply the layer to every token: `[..., dim]` -> the same, plain or distributed and placed as the input.

        Args:
            ids: the tokens' ids, an integer tensor `[...]`, for hash routing.

        Raises:
            ExpertParallelError: inputs, routing or meshes that do not fit; it names the layer and this rank.
        """
        try:
            return self._forward(x, ids)
        except ExpertParallelError as error:
            rank = current_world(self.platform).rank
            told = f"{self.name or 'MoE'}, rank {rank}: {error}"
            raise ExpertParallelError(told, only_nonfinite=error.only_nonfinite) from error

    def _forward(self, x: Tensor, ids: Tensor | None) -> Tensor:
        if not x.shape or x.shape[-1] != self.dim:
            raise ExpertParallelError(f"expected an input [..., {self.dim}], got shape {list(x.shape)}")
        region = enter_region(x, partial_mesh_of(self.experts), self.split_mesh)
        self._check_gate(region.num_ranks)
        rows = self.ops.reshape(region.rows, (math.prod(region.rows.shape[:-1]), self.dim))
        dispatcher = dispatcher_of(self.experts, self.platform)
        with reported_faults(dispatcher, self.platform, x):
            known_ids, fault = self._known_ids(None if ids is None else self._of_rows(ids, region), rows)
            scores, experts, counts = self.router(
                rows,
                self.expert_bias,
                ids=known_ids,
                auxiliary=self._auxiliary_loss(region, tuple(x.shape)),
                numbers=lambda: self._numbers(region, tuple(x.shape)),
            )
        routing = self._routing(experts, counts, scores, region, tuple(x.shape))
        with reported_faults(dispatcher, self.platform, x):
            if fault is not None:
                raise fault
        shared: list[Tensor] = []
        if not isinstance(self.experts, GroupedExperts):
            results = run_experts(self.experts, self.platform, rows, routing)
        # Where no rows travel there is nothing to wait for, and shared experts come last.
        elif type(self.experts.dispatcher) is LocalDispatcher or self.shared_experts is None:
            results = self.experts(rows, routing)
        else:
            results = self.experts(rows, routing, meanwhile=lambda: shared.append(self._shared(x)))
        # Kept: a recomputation in backward must not count the same tokens again.
        saved_value(lambda: self._count(counts))
        routed = region.leave(self.ops.reshape(results, tuple(region.rows.shape)))
        if self.shared_experts is None:
            return routed
        return self.ops.add(routed, shared[0] if shared else self._shared(x))

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared_experts is not None
        shared = self.shared_experts(x)
        return shared if self.shared_gate is None else self.ops.mul(self.ops.sigmoid(self.shared_gate(x)), shared)

    def _of_rows(self, x: Tensor, region: LocalRegion) -> Tensor:
        """Return the numbers of the tokens that this rank routes: `[tokens]` from one for each token of the input."""
        part = region.follow(x)
        return self.ops.reshape(part, (math.prod(part.shape),))

    def _known_ids(self, ids: Tensor | None, rows: Tensor) -> tuple[Tensor | None, ExpertParallelError | None]:
        """Return ids that experts can be chosen by, and what is wrong with those given.

        Auxiliary losses and capacity ask all ranks before tokens travel: one whose ids are at fault takes part, with
        ids of zero, and raises where all ranks hear of it.
        """
        num_tokens, vocab_size = int(rows.shape[0]), self.router.hash_vocab_size
        if vocab_size is None or not self.router.takes_ids:
            return ids, None
        try:
            check_ids(self.platform, ids, num_tokens, vocab_size)
        except ExpertParallelError as fault:
            zeros = numpy.zeros(num_tokens, numpy.int64)
            return self.platform.from_numpy(zeros, self.platform.device_of(rows)), fault
        return ids, None

    # Capacity ---------------------------------------------------------------------------------------------

    def _routing(
        self, experts: Tensor, counts: Tensor, scores: Tensor, region: LocalRegion, shape: tuple[int, ...]
    ) -> Routing:
        if self.capacity is None:
            return Routing(experts, counts, scores, takes_nonfinite=self.takes_nonfinite)
        experts, counts = saved_value(lambda: self._within_capacity(experts, scores, region, shape))
        return Routing(experts, counts, scores, has_dropped=True, takes_nonfinite=self.takes_nonfinite)

    def _within_capacity(
        self, experts: Tensor, scores: Tensor, region: LocalRegion, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return (experts, choices of each expert) with the number of experts in place of dropped choices."""
        assert self.capacity is not None
        platform, device = self.platform, self.platform.device_of(experts)
        mine = Choices(platform.to_numpy(experts), platform.to_numpy(scores), self._places(region, shape))
        group = None if self.token_mesh is None else self.token_mesh.get_group()
        within = kept_choices(mine, self.capacity, self.num_experts, group, region.num_token_ranks)
        left = numpy.where(within, mine.experts, self.num_experts)
        left_counts = numpy.bincount(left.reshape(-1), minlength=self.num_experts + 1)[:-1]
        if is_trained(self):
            self.tally.add("dropped", platform.from_numpy(numpy.array([(~within).sum()]), device))
        return platform.from_numpy(left, device), platform.from_numpy(left_counts, device)

    def _places(self, region: LocalRegion, shape: tuple[int, ...]) -> numpy.ndarray:
        """Return the place in the input of each token that this rank routes, int64 `[tokens]`, on the host."""
        places = numpy.arange(math.prod(shape[:-1])).reshape(shape[:-1])
        of_input = self.platform.from_numpy(places, self.platform.device_of(region.rows))
        return self.platform.to_numpy(self._of_rows(of_input, region))

    def _numbers(self, region: LocalRegion, shape: tuple[int, ...]) -> numpy.ndarray:
        """Return the number of each token among those of all ranks: by inputs in the order of ranks, then by place.

        The ranks tell each other how many tokens they have, which jitter alone asks for.
        """
        places = self._places(region, shape)
        if self.token_mesh is None:
            return places
        group = self.token_mesh.get_group()
        lengths = [int(each) for each in group.all_gather_bytes(str(len(places)).encode())]
        # Ranks that share one input follow each other.
        first_of_input = group.rank - group.rank % region.num_token_ranks
        return places + sum(lengths[:first_of_input])

    # Auxiliary losses -------------------------------------------------------------------------------------

    def _auxiliary_loss(self, region: LocalRegion, shape: tuple[int, ...]) -> AuxiliaryLoss | None:
        if not (self.aux_losses and is_trained(self)):
            return None
        partial = partial_mesh_of(self.experts)
        sums: list[Callable[[Tensor], Tensor]] = [region.sum_over_ranks]
        if self.sequence_mesh is not None:
            sequence_group = self.sequence_mesh.get_group()
            sums.append(lambda counts: all_reduce_data(counts, sequence_group))
        return LossTerms(
            self.platform,
            self.aux_losses,
            self.tally,
            token_group=None if self.token_mesh is None else self.token_mesh.get_group(),
            step_tokens=self.step_tokens,
            loss_scale=self.loss_scale,
            last_shares=plain(self.last_shares),
            num_sequences=math.prod(shape[:-2]),
            sequences=lambda: self._sequences(region, shape),
            sequence_sums=sums,
            # Ranks that cut the experts' hidden dimension route the same tokens, and their gates' gradients add up.
            is_counted=partial is None or partial.get_local_rank() == 0,
        )

    def _sequences(self, region: LocalRegion, shape: tuple[int, ...]) -> Tensor:
        """Return the number of the sequence of each token that this rank routes, int64 `[tokens]`."""
        numbers = numpy.arange(math.prod(shape[:-2])).repeat(shape[-2] if len(shape) > 1 else 1)
        of_input = self.platform.from_numpy(numbers.reshape(shape[:-1]), self.platform.device_of(region.rows))
        return self._of_rows(of_input, region)

    # Counting ---------------------------------------------------------------------------------------------

    def _count(self, counts: Tensor) -> None:
        # Experts of someone else's count no bytes.
        sent_bytes = self.experts.take_sent_bytes() if isinstance(self.experts, GroupedExperts) else 0
        if is_trained(self):
            self.tally.add("counts", counts)
            self.tally.sent_bytes += sent_bytes

    def _check_gate(self, num_ranks: int) -> None:
        """Refuse a gate whose gradient would miss the tokens of other ranks that share this input."""
        weight = self.router.gate.weight
        spread = weight.device_mesh.size() if isinstance(weight, DTensor) else 1
        if spread != num_ranks:
            raise ExpertParallelError(
                f"the input of this MoE is worked on by {num_ranks} ranks, but router.gate.weight is on a mesh of "
                f"{spread}; distribute the router over the same ranks (Replicate)"
            )


def _shared_dim(hidden_dim: int, num_shared_experts: int, shared_hidden_dim: int | None, shared_gate: bool) -> int:
    if num_shared_experts and shared_hidden_dim is not None:
        raise MoEConfigError("num_shared_experts and shared_hidden_dim both give the shared network's width; give one")
    shared_dim = hidden_dim * num_shared_experts if shared_hidden_dim is None else shared_hidden_dim
    if shared_dim < 0:
        raise MoEConfigError(f"the shared network's width must be at least 0, got {shared_dim}")
    if shared_gate and not shared_dim:
        raise MoEConfigError("shared_gate weighs shared experts; give num_shared_experts or shared_hidden_dim too")
    return shared_dim
