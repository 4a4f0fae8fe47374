"""The experts of one layer, as grouped matrix products.

Whole experts in kernels of the platform's own, where it has them.

Hooks that put a parallel style around any experts module: rows in expert-major order and counts in, results out.

`GroupedExperts` takes a `Routing` and its dispatcher itself. Someone else's experts, or a style that overrides the
dispatch, get these hooks: before forward tokens are dispatched and weights become this rank's plain parts, after it
both are undone. What one half leaves for the other is kept per call, so a style object may serve many layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.saved_tensors import reached
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import saved_value
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Partial
from hp_dtensor.tensor.dtensor import DTensor
from hp_moe.dispatch import ChunkedDispatcher, Dispatched, LocalDispatcher, TokenDispatcher
from hp_moe.dispatch.base import TokenPermutation
from hp_moe.exceptions import ExpertParallelError, MoEConfigError
from hp_moe.feed_forward import SWIGLU, Activation, find_activation
from hp_moe.grouped_gemm import GroupSizes, grouped_bias, grouped_matmul
from hp_moe.plugins import plugin_manager
from hp_moe.routing import Routing, check_inputs, check_values, reported_faults

Tensor = Any
ScorePosition = Literal["before", "inside", "after"]


class ExpertWeights(NamedTuple):
    """The weights of this rank's experts, plain; None for those that the experts do not have.

    Example:
        >>> up = platform.zeros((2, 6, 4), platform.dtype("float32"))  # two experts, hidden 6, dim 4
        >>> down = platform.zeros((2, 4, 6), platform.dtype("float32"))
        >>> ExpertWeights(up, down).w3 is None  # no gate
        True
    """

    w1: Tensor
    w2: Tensor
    w3: Tensor | None = None
    b1: Tensor | None = None
    b2: Tensor | None = None
    b3: Tensor | None = None


class GroupedExperts(nn.Module):
    """`num_experts` feed-forward networks; a parallel style lays their weights and the way to them over a mesh.

    Weights are `w1`, `w3` `[num_experts, hidden_dim, dim]` and `w2` `[num_experts, dim, hidden_dim]`, biases `b1`, `b3`
    `[num_experts, hidden_dim]` and `b2` `[num_experts, dim]`: `w2(activation(w1(row) + b1, w3(row) + b3)) + b2`. For an
    activation without a gate `w3` is None; biases are None unless asked for.

    A subclass computes something else by overriding `_hidden` or `_results`.

    Args:
        score_before_experts: short for `score_position="before"`.
        activation: a name (`swiglu`, `geglu`, `geglu_tanh`, `reglu`, `relu_squared`, `gelu`, `clamped_swiglu`) or an
            `Activation`.
        bias: the experts have biases.
        score_position: the token's score weighs an expert's input (`before`), its hidden row and `b2` (`inside`), or
            its result (`after`). The last two are the same but for rounding; inside is less work where `hidden_dim` is
            below `dim`.

    Attributes:
        dispatcher: takes rows to their experts; a style that spreads the experts replaces it.
        partial_mesh: 1-D mesh over which each expert's hidden dimension is cut: every rank then takes the
            same rows and returns a part of the sum, which `MoE` (or the caller) reduces; None: not cut.

    Raises:
        MoEConfigError: no such activation or position.

    Example:
        >>> with nn.building(platform):
        ...     experts = GroupedExperts(dim=4, hidden_dim=8, num_experts=2)
        >>> rows = platform.ops.ones((3, 4), platform.dtype("float32"))
        >>> tuple(experts(rows, platform.from_numpy(np.array([2, 1]))).shape)  # 2 rows for expert 0, 1 for expert 1
        (3, 4)
    """

    dispatcher: TokenDispatcher
    partial_mesh: DeviceMesh | None

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        score_before_experts: bool = False,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        score_position: ScorePosition | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.score_position = _score_position(score_before_experts, score_position)
        self.activation = find_activation(activation)
        is_gated = self.activation.is_gated
        self.w1 = self.parameter((num_experts, hidden_dim, dim))
        self.w2 = self.parameter((num_experts, dim, hidden_dim))
        self.w3 = self.parameter((num_experts, hidden_dim, dim)) if is_gated else None
        self.b1 = self.parameter((num_experts, hidden_dim)) if bias else None
        self.b2 = self.parameter((num_experts, dim)) if bias else None
        self.b3 = self.parameter((num_experts, hidden_dim)) if bias and is_gated else None
        self.dispatcher = LocalDispatcher(self.platform)
        self.partial_mesh = None
        self._sent_bytes = 0

    @property
    def score_before_experts(self) -> bool:
        """The token's score weighs an expert's input."""
        return self.score_position == "before"

    def forward(
        self,
        x: Tensor,
        routing: Routing | Tensor | None = None,
        *,
        num_tokens_per_expert: Tensor | None = None,
        overlap_with: Callable[[], None] | None = None,
    ) -> Tensor:
        """Run rows through their experts.

        Args:
            x: plain `[tokens, dim]`, or `[rows, dim]` in expert-major order where counts are given.
            routing: the experts of each token, or the counts.
            num_tokens_per_expert: the counts by name: integers `[num_experts]` that add up to `rows`.
            overlap_with: called once the first tokens are under way, where they travel in chunks; else not.

        Returns:
            `[tokens, dim]`, the (weighted) sum over each token's experts; one result per row, in the same
            order, when counts were given. With `partial_mesh`, this rank's part of it.

        Raises:
            ExpertParallelError: the counts do not describe the rows, or are given twice or not at all; experts out of
                range, scores that are no finite numbers, shapes or dtypes that do not fit. Ranks that exchange tokens
                raise together, after the exchange of sizes. Values on an accelerator are not looked at by a rank that
                has all experts.
        """
        with reported_faults(self.dispatcher, self.platform, x):
            routing = self._routing(x, routing, num_tokens_per_expert)
            held = {name: each for name in ExpertWeights._fields if (each := getattr(self, name)) is not None}
            check_inputs(self.platform, x, held, routing, int(self.w1.shape[0]))
        dispatcher = self.dispatcher.resolve(x, routing)
        if isinstance(dispatcher, ChunkedDispatcher) and dispatcher.num_chunks > 1:
            return self._forward_in_chunks(dispatcher, x, routing, overlap_with)
        sent = dispatcher.dispatch(x, routing)
        saved_value(lambda: self._count_bytes(sent))
        return dispatcher.combine(self._run_experts(sent, self._local_weights()), sent)

    def _forward_in_chunks(
        self, dispatcher: ChunkedDispatcher, x: Tensor, routing: Routing, overlap_with: Callable[[], None] | None
    ) -> Tensor:
        """Work on one chunk of the tokens while others travel.

        The order of these steps is also that of backward, from the last to the first: gradients of all results are sent
        at once, those of a chunk's rows return while the next chunk is worked on, and what was done `overlap_with` is
        differentiated before the rows' gradients are waited for.
        """
        begun = dispatcher.start_dispatch(x, routing)
        # Copies of experts travel after the sizes, which tell of faults: a rank that raises sends no weights.
        weights = self._local_weights()
        if overlap_with is not None:
            overlap_with()
        returning = []
        for chunk in begun:
            sent = dispatcher.finish_dispatch(chunk)
            saved_value(functools.partial(self._count_bytes, sent))
            returning.append(dispatcher.start_combine(self._run_experts(sent, weights), sent))
        return self.ops.cat([dispatcher.finish_combine(each) for each in returning], 0)

    def _run_experts(self, sent: Dispatched, weights: ExpertWeights) -> Tensor:
        results = self._fused(sent, weights)
        results = self._one_step_at_a_time(sent, weights) if results is None else results
        # A subclass's steps may save nothing for a rank without rows.
        return reached(self.platform, results)

    def take_sent_bytes(self) -> int:
        """Return and forget the bytes that have left this rank for experts and back, in forward."""
        taken, self._sent_bytes = self._sent_bytes, 0
        return taken

    def _count_bytes(self, sent: Dispatched) -> None:
        self._sent_bytes += sent.sent_bytes

    def _routing(self, x: Tensor, routing: Routing | Tensor | None, counts: Tensor | None) -> Routing:
        if isinstance(routing, Routing) and counts is None:
            return routing
        if (routing is None) == (counts is None):
            raise ExpertParallelError("GroupedExperts takes a Routing, or the number of rows of each expert; give one")
        counts = routing if counts is None else counts
        # Of the weights: within a style's own dispatch they are this rank's experts alone.
        return Routing.expert_major(self.platform, counts, int(x.shape[0]), int(self.w1.shape[0]))

    def _local_weights(self) -> ExpertWeights:
        own = local_weights(self.platform, self, self.partial_mesh)
        return ExpertWeights(**{name: self.dispatcher.with_copies(weight) for name, weight in own.items()})

    def _fused(self, sent: Dispatched, weights: ExpertWeights) -> Tensor | None:
        """Return the results by the platform's own kernels, or None where these experts are not what those compute."""
        own, plain = type(self), GroupedExperts
        is_changed = (own._hidden, own._results, own._weigh) != (plain._hidden, plain._results, plain._weigh)
        if is_changed or self.activation is not SWIGLU or weights.b1 is not None:
            return None
        return fused_experts(sent, (weights.w1, weights.w2, weights.w3), self.score_before_experts)

    def _one_step_at_a_time(self, sent: Dispatched, weights: ExpertWeights) -> Tensor:
        """Each step an operation of its own: for all platforms, and the oracle of fused experts."""
        permutation, rows, scores = sent.permutation, sent.rows, sent.scores
        if permutation is not None:
            rows = permutation.permute(rows)
            scores = None if scores is None else permutation.permute_scores(scores)
        at = {self.score_position: scores}
        hidden = self._hidden(self._weigh(rows, at.get("before")), weights, sent.sizes)
        results = self._results(self._weigh(hidden, at.get("inside")), weights, sent.sizes, at.get("inside"))
        results = self._weigh(results, at.get("after"))
        return results if permutation is None else permutation.unpermute(results)

    def _hidden(self, x: Tensor, weights: ExpertWeights, sizes: GroupSizes) -> Tensor:
        """Return the hidden rows `[rows, hidden_dim]` of `x` `[rows, dim]`, in expert-major order."""
        gate = self._product(x, weights.w1, weights.b1, sizes)
        up = None if weights.w3 is None else self._product(x, weights.w3, weights.b3, sizes)
        return self.activation.apply(self.ops, gate, up)

    def _results(self, hidden: Tensor, weights: ExpertWeights, sizes: GroupSizes, scores: Tensor | None) -> Tensor:
        """Return the results `[rows, dim]` of hidden rows; their biases are weighted with `scores` if there are any."""
        return self._product(hidden, weights.w2, weights.b2, sizes, scores)

    def _product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, sizes: GroupSizes, scores: Tensor | None = None
    ) -> Tensor:
        product = grouped_matmul(x, weight, sizes)
        if bias is None:
            return product
        return self.ops.add(product, grouped_bias(bias, sizes, int(x.shape[0]), scores))

    def _weigh(self, rows: Tensor, scores: Tensor | None) -> Tensor:
        return rows if scores is None else weighted(self.platform, rows, scores)


def _score_position(score_before_experts: bool, position: ScorePosition | None) -> ScorePosition:
    if position not in (None, "before", "inside", "after"):
        raise MoEConfigError(f"score_position must be 'before', 'inside' or 'after', got {position!r}")
    if score_before_experts and position not in (None, "before"):
        raise MoEConfigError(f"score_before_experts contradicts score_position = {position!r}; give one of them")
    return "before" if score_before_experts else position or "after"


class FusedExperts(Protocol):
    """A platform's whole experts, as the hook `hp_fused_experts` returns them."""

    def __call__(
        self,
        x: Tensor,
        permutation: TokenPermutation,
        sizes: GroupSizes,
        scores: Tensor | None,
        weights: tuple[Tensor, ...],
        score_before_experts: bool,
    ) -> Tensor | None: ...


def fused_experts(sent: Dispatched, weights: tuple[Tensor, ...], score_before_experts: bool) -> Tensor | None:
    """Run dispatched rows through their SwiGLU experts in the platform's own kernels; differentiable.

    Args:
        weights: `w1`, `w2`, `w3` as in `GroupedExperts`, this rank's own.

    Returns:
        `[rows, dim]`, for each of `sent.rows` the (weighted) sum of its experts' results; None where the platform
        has no kernels for this, or the rows came in expert-major order.
    """
    if sent.permutation is None:
        return None
    fused = _implementation(sent.sizes.platform)
    if fused is None:
        return None
    return fused(sent.rows, sent.permutation, sent.sizes, sent.scores, weights, score_before_experts)


def has_fused_experts(platform: Platform) -> bool:
    """Return whether an installed plugin computes SwiGLU experts of this platform in its own kernels."""
    return _implementation(platform) is not None


@functools.cache
def _implementation(platform: Platform) -> FusedExperts | None:
    found: FusedExperts | None = plugin_manager().hook.hp_fused_experts(platform=platform)
    return found


Module = Any

_STATE = "_hp_expert_hooks"
WEIGHTS = ("w1", "w2", "w3", "b1", "b2", "b3")


@dataclass(frozen=True)
class Call:
    """One call of an experts module, from before its forward to after it.

    Attributes:
        dispatched: what the dispatcher needs back.
        scores: float32 `[rows, 1]` to weight results with; None: they are not weighted, or were before the experts.
    """

    dispatched: Dispatched
    scores: Tensor | None


class ExpertHooks:
    """The dispatch around one experts module.

    Args:
        module: has weights by some of the names `WEIGHTS`, whose first dimension is the experts of all ranks.
        dispatcher: the tokens' way to other ranks; None: all experts are on every rank.
        partial_mesh: 1-D mesh over which the experts' hidden dimension is cut; None: it is not.
    """

    def __init__(
        self,
        module: Module,
        platform: Platform,
        dispatcher: TokenDispatcher | None,
        partial_mesh: DeviceMesh | None = None,
    ) -> None:
        self.platform = platform
        self.partial_mesh = partial_mesh
        self.module = module
        self.dispatcher = dispatcher or LocalDispatcher(platform)
        self.calls: list[Call] = []
        self.weights: list[dict[str, Tensor]] = []

    @property
    def num_experts(self) -> int:
        """Number of experts of all ranks."""
        return int(self.module.w1.shape[0])

    def dispatch(self, module: Module, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return the rows of this rank's experts in expert-major order, and the number of rows of each.

        Args:
            inputs: tokens and their `Routing`, or rows in expert-major order and their counts, of all experts.

        Raises:
            ExpertParallelError: the counts do not describe the rows.
        """
        x, routing = inputs
        with reported_faults(self.dispatcher, self.platform, x):
            if not isinstance(routing, Routing):
                routing = Routing.expert_major(self.platform, routing, int(x.shape[0]), self.num_experts)
            check_values(self.platform, routing, self.num_experts)
        sent = self.dispatcher.dispatch(x, routing)
        rows, scores = sent.rows, sent.scores
        if sent.permutation is not None:
            rows = sent.permutation.permute(rows)
            scores = None if scores is None else sent.permutation.permute_scores(scores)
        if scores is not None and getattr(module, "score_before_experts", False):
            rows, scores = weighted(self.platform, rows, scores), None
        self.calls.append(Call(sent, scores))
        return rows, sent.sizes.tensor

    def combine(self, results: Tensor) -> Tensor:
        """Return the results of the rows, or the sums of the tokens, that the last `dispatch` was given."""
        call = self.calls[-1]
        if call.scores is not None:
            results = weighted(self.platform, results, call.scores)
        if call.dispatched.permutation is not None:
            results = call.dispatched.permutation.unpermute(results)
        # Experts of someone else's may save nothing for a rank without rows.
        return self.dispatcher.combine(reached(self.platform, results), call.dispatched)

    def use_local_weights(self, module: Module) -> None:
        """Let `module.w1` and the others be this rank's plain parts until `restore_weights`."""
        held = {name: getattr(module, name) for name in WEIGHTS if getattr(module, name, None) is not None}
        local = local_weights(self.platform, module, self.partial_mesh)
        self.weights.append(held)
        for name in held:
            self.platform.set_parameter(module, name, self.dispatcher.with_copies(local[name]))

    def restore_weights(self, module: Module) -> None:
        """Give `module` the weights back that it had before."""
        for name, weight in self.weights.pop().items():
            self.platform.set_parameter(module, name, weight)


def hooks_of(module: Module) -> ExpertHooks:
    """Return the hooks that a style has put around `module`."""
    found: ExpertHooks = vars(module)[_STATE]
    return found


def partial_mesh_of(module: Module) -> DeviceMesh | None:
    """Return the 1-D mesh over which experts' hidden dimension is cut, ours or someone else's; None: it is not."""
    own: DeviceMesh | None = getattr(module, "partial_mesh", None)
    hooks: ExpertHooks | None = vars(module).get(_STATE)
    return own if hooks is None else hooks.partial_mesh


def dispatcher_of(module: Module, platform: Platform) -> TokenDispatcher:
    """Return what takes tokens to experts, ours or someone else's."""
    hooks: ExpertHooks | None = vars(module).get(_STATE)
    own: TokenDispatcher | None = getattr(module, "dispatcher", None) if hooks is None else hooks.dispatcher
    return own or LocalDispatcher(platform)


def run_experts(module: Module, platform: Platform, x: Tensor, routing: Routing) -> Tensor:
    """Return the sums `[tokens, dim]` of someone else's experts, which take rows in expert-major order and counts.

    A style has put the dispatch around them; without one, all experts are on this rank.
    """
    if _STATE in vars(module):
        results: Tensor = module(x, routing)
        return results
    hooks = ExpertHooks(module, platform, None)
    return hooks.combine(module(*hooks.dispatch(module, (x, routing))))


def install(
    module: Module,
    hooks: ExpertHooks,
    dispatch: Callable[[tuple[Any, ...]], tuple[Any, ...]],
    combine: Callable[[Any], Any],
) -> None:
    """Call `dispatch` before every forward of `module` and `combine` after it.

    Args:
        dispatch: from the arguments of the call to those of the forward.
        combine: from the output of the forward to that of the call.
    """
    platform = hooks.platform
    object.__setattr__(module, _STATE, hooks)

    def before(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Counts may come by the name that they have in the interface.
        counts = [kwargs.pop(name) for name in ("num_tokens_per_expert", "routing") if name in kwargs]
        depth = len(hooks.calls)
        args = dispatch((*args, *counts))
        if len(hooks.calls) == depth:
            # A dispatch of the user's own keeps what it needs itself.
            hooks.calls.append(Call(None, None))  # type: ignore[arg-type]
        hooks.use_local_weights(module)
        return args, kwargs

    def after(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not hooks.weights:
            # The dispatch itself raised, before anything was changed.
            return None
        hooks.restore_weights(module)
        try:
            # No output: the forward raised.
            return None if output is None else combine(output)
        finally:
            hooks.calls.pop()

    platform.add_forward_pre_hook(module, before)
    platform.add_forward_hook(module, after, always_call=True)


def local_weights(platform: Platform, module: Module, partial_mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Return the plain weights of this rank's experts by name, those of `WEIGHTS` that `module` has.

    Where ranks hold the same part of a weight, each adds its own tokens' gradient. Ranks that cut the hidden dimension
    return parts of a sum, in which the bias `b2` must be once: all but the first get zeros for it.
    """
    found = {name: getattr(module, name, None) for name in WEIGHTS}
    local = {name: _local_weight(weight) for name, weight in found.items() if weight is not None}
    if "b2" in local and partial_mesh is not None and partial_mesh.get_local_rank() != 0:
        local["b2"] = platform.ops.mul(local["b2"], 0.0)
    return local


def _local_weight(weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return weight
    grads = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
    return weight.to_local(grad_placements=grads)


def weighted(platform: Platform, rows: Tensor, scores: Tensor) -> Tensor:
    """Return rows `[rows, dim]` times their scores `[rows, 1]`, multiplied in the dtype of the scores, in their own."""
    ops = platform.ops
    return ops.cast(ops.mul(ops.cast(rows, scores.dtype), scores), rows.dtype)
