"""Feed-forward networks: dense, and the routed experts of a layer with hooks that shard other experts modules.

A gated activation maps two products, `gate = w1 @ row` and `up = w3 @ row`, to the hidden row. One without a gate maps
the first alone, and its network has no `w3`.

`GroupedExperts` calls its dispatcher itself and computes grouped matrix products, or the platform's fused experts.
Other experts modules, and styles that override the dispatch, get `ExpertHooks`: a forward pre-hook dispatches tokens
and replaces the weights by this rank's plain local tensors, and a forward hook undoes both. State between the two is
stored per call, so that one style object can serve many layers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.saved_tensors import mark_reached
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.recompute import saved_value
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Partial
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.saved_shards import saving_shard
from hp_moe.dispatch import ChunkedDispatcher, Dispatched, LocalDispatcher, TokenDispatcher
from hp_moe.dispatch.permutation import TokenPermutation
from hp_moe.exceptions import ExpertParallelError, MoEConfigError
from hp_moe.grouped_gemm import GroupSizes, grouped_bias, grouped_matmul
from hp_moe.plugins import plugin_manager
from hp_moe.routing import Routing, check_inputs, check_values, reported_faults

Tensor = Any
Ops = Any


@dataclass(frozen=True)
class Activation:
    """An activation of feed-forward networks.

    Args:
        name: name in messages.
        apply: differentiable element-wise function of (ops, gate, up) that returns the hidden row. `gate` and `up` are
            `[..., hidden_dim]`; `up` is None without a gate. `ops` are the platform's operations.
        is_gated: whether `up` is used, so that the network has a weight `w3`.

    Examples:
        >>> cubed = Activation("cubed", lambda ops, gate, up: ops.pow(gate, 3.0), is_gated=False)
        >>> with nn.building(platform):
        ...     layer = FeedForward(dim=4, hidden_dim=8, activation=cubed)
        >>> layer.w3 is None
        True
    """

    name: str
    apply: Callable[[Ops, Tensor, Tensor | None], Tensor]
    is_gated: bool = True


def clamped_swiglu(limit: float = 7.0, alpha: float = 1.702, up_offset: float = 1.0) -> Activation:
    """Return gpt-oss' activation: `min(gate, limit) * sigmoid(alpha * gate) * (clamp(up, -limit, limit) + up_offset)`.

    The gate within the sigmoid is clamped too. Source: the model card of gpt-oss (arXiv 2508.10925) and its public
    implementation.

    Raises:
        MoEConfigError: `limit` is not above 0.

    Examples:
        >>> gate = platform.from_numpy(np.array([100.0], np.float32))
        >>> hidden = clamped_swiglu().apply(platform.ops, gate, gate)  # 7 * sigmoid(1.702 * 7) * (7 + 1)
        >>> round(float(platform.to_numpy(hidden)[0]), 2)
        56.0
    """
    if not limit > 0:
        raise MoEConfigError(f"clamped_swiglu: limit must be above 0, got {limit}")

    def apply(ops: Ops, gate: Tensor, up: Tensor | None) -> Tensor:
        gate = ops.clamp(gate, max=limit)
        gate = ops.mul(gate, ops.sigmoid(ops.mul(gate, alpha)))
        return ops.mul(gate, ops.add(ops.clamp(up, min=-limit, max=limit), up_offset))

    return Activation(f"clamped_swiglu({limit}, {alpha}, {up_offset})", apply)


def _gelu_tanh(ops: Ops, x: Tensor) -> Tensor:
    cubic = ops.add(x, ops.mul(ops.mul(ops.mul(x, x), x), 0.044715))
    # (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel.
    return ops.mul(x, ops.sigmoid(ops.mul(cubic, 2 * math.sqrt(2 / math.pi))))


def _gated(function: Callable[[Ops, Tensor], Tensor]) -> Callable[[Ops, Tensor, Tensor | None], Tensor]:
    return lambda ops, gate, up: ops.mul(function(ops, gate), up)


SWIGLU = Activation("swiglu", _gated(lambda ops, gate: ops.silu(gate)))

_BY_NAME = {
    activation.name: activation
    for activation in (
        SWIGLU,
        # arXiv 2002.05202; the second with the approximation that Gemma uses.
        Activation("geglu", _gated(lambda ops, gate: ops.gelu(gate))),
        Activation("geglu_tanh", _gated(_gelu_tanh)),
        Activation("reglu", _gated(lambda ops, gate: ops.relu(gate))),
        # arXiv 2109.08668.
        Activation("relu_squared", lambda ops, gate, up: ops.square(ops.relu(gate)), is_gated=False),
        Activation("gelu", lambda ops, gate, up: ops.gelu(gate), is_gated=False),
    )
}


@functools.cache
def find_activation(activation: str | Activation) -> Activation:
    """Return the activation of this name, or `activation` itself."""
    if isinstance(activation, Activation):
        return activation
    if activation == "clamped_swiglu":
        return clamped_swiglu()
    if activation not in _BY_NAME:
        known = ", ".join(sorted([*_BY_NAME, "clamped_swiglu"]))
        raise MoEConfigError(f"activation must be one of {known}, or an Activation, got {activation!r}")
    return _BY_NAME[activation]


class FeedForward(nn.Module):
    """Feed-forward network `w2(activation(w1(x), w3(x)))`, by default with SwiGLU (arXiv 2002.05202).

    Args:
        activation: a name (`swiglu`, `geglu`, `geglu_tanh`, `reglu`, `relu_squared`, `gelu`, `clamped_swiglu`) or an
            `Activation`; `w3` is None for one without a gate.
        bias: give the three linear layers biases.

    Raises:
        MoEConfigError: no activation has this name.

    Examples:
        >>> with nn.building(platform):
        ...     layer = FeedForward(dim=4, hidden_dim=8)
        >>> tuple(layer(platform.ops.ones((2, 3, 4), platform.dtype("float32"))).shape)
        (2, 3, 4)
    """

    def __init__(
        self, dim: int, hidden_dim: int, activation: str | Activation = "swiglu", *, bias: bool = False
    ) -> None:
        super().__init__()
        self.activation = find_activation(activation)
        self.w1 = nn.Linear(dim, hidden_dim, bias)
        self.w2 = nn.Linear(hidden_dim, dim, bias)
        self.w3 = nn.Linear(dim, hidden_dim, bias) if self.activation.is_gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to every token: `[..., dim]` -> `[..., dim]`."""
        up = None if self.w3 is None else self.w3(x)
        return self.w2(self.activation.apply(self.ops, self.w1(x), up))


ScorePosition = Literal["before", "inside", "after"]


class ExpertWeights(NamedTuple):
    """The plain local weights of this rank's experts; None for weights that the experts do not have.

    Examples:
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
    """`num_experts` feed-forward networks, each applied to the tokens routed to it.

    Weights are `w1`, `w3` `[num_experts, hidden_dim, dim]` and `w2` `[num_experts, dim, hidden_dim]`, biases `b1`, `b3`
    `[num_experts, hidden_dim]` and `b2` `[num_experts, dim]`: `w2(activation(w1(row) + b1, w3(row) + b3)) + b2`. For an
    activation without a gate `w3` is None; biases are None unless `bias` is set. A parallel style shards the weights
    and sets the dispatcher.

    Override `_hidden` or `_results` in a subclass to compute something else.

    Args:
        score_before_experts: shorthand for `score_position="before"`.
        activation: a name (`swiglu`, `geglu`, `geglu_tanh`, `reglu`, `relu_squared`, `gelu`, `clamped_swiglu`) or an
            `Activation`.
        bias: give the experts biases.
        score_position: multiply the score with an expert's input (`before`), its hidden row and `b2` (`inside`), or its
            result (`after`). The last two differ only by rounding; `inside` is cheaper if `hidden_dim` is below `dim`.

    Attributes:
        dispatcher: sends rows to their experts; set by parallel styles.
        partial_mesh: 1-D mesh over which each expert's hidden dimension is sharded, or None. Every rank of it then
            takes the same rows and returns a partial sum, which `MoE` (or the caller) reduces.

    Raises:
        MoEConfigError: `activation` or `score_position` is unknown.

    Examples:
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
        """True if the input of an expert is multiplied by the score."""
        return self.score_position == "before"

    def forward(
        self,
        x: Tensor,
        routing: Routing | Tensor | None = None,
        *,
        num_tokens_per_expert: Tensor | None = None,
        overlap_with: Callable[[], None] | None = None,
    ) -> Tensor:
        """Apply the experts to their tokens.

        Args:
            x: plain `[tokens, dim]`, or `[rows, dim]` in expert-major order if counts are given.
            routing: the experts of each token, or the counts.
            num_tokens_per_expert: the counts as keyword argument: integers `[num_experts]` that add up to `rows`.
            overlap_with: function called while the first chunk of tokens is sent; not called if tokens are not sent in
                chunks.

        Returns:
            `[tokens, dim]`, the (weighted) sum over each token's experts, or one result per row in the same order if
            counts are given. With `partial_mesh`, the partial sum of this rank.

        Raises:
            ExpertParallelError: the counts do not describe the rows, or are given twice or not at all; experts are out
                of range, scores are not finite, or shapes or dtypes do not fit. Ranks that exchange tokens raise
                together, after the exchange of sizes. Without an exchange, values on an accelerator are not checked.
        """
        with reported_faults(self.dispatcher, self.platform, x):
            routing = self._routing(x, routing, num_tokens_per_expert)
            # Before anything is sent: a rank with invalid inputs reports them in the first exchange.
            weights = {name: each for name in ExpertWeights._fields if (each := getattr(self, name)) is not None}
            check_inputs(self.platform, x, weights, routing, int(self.w1.shape[0]))
        # Only after the checks: the choice of `AutoDispatcher` is a collective, in which faults are reported too.
        dispatcher = self.dispatcher.resolve(x, routing)
        if isinstance(dispatcher, ChunkedDispatcher) and dispatcher.num_chunks > 1:
            return self._forward_in_chunks(dispatcher, x, routing, overlap_with)
        sent = dispatcher.dispatch(x, routing)
        # Recomputation in backward does not count the bytes again.
        saved_value(lambda: self._count_bytes(sent))
        return dispatcher.combine(self._run_experts(sent, self._local_weights()), sent)

    def _forward_in_chunks(
        self, dispatcher: ChunkedDispatcher, x: Tensor, routing: Routing, overlap_with: Callable[[], None] | None
    ) -> Tensor:
        """Compute one chunk of the tokens while others are sent.

        Backward runs these steps in reverse order: the gradients of all results are sent at once, the gradients of a
        chunk's rows are sent back while the next chunk is computed, and the backward of `overlap_with` runs before the
        gradients of rows are waited for.
        """
        pending = dispatcher.start_dispatch(x, routing)
        # After the exchange of sizes, which reports faults: a rank that raises there must not send copies of weights.
        weights = self._local_weights()
        if overlap_with is not None:
            overlap_with()
        returning = []
        # The exchange of a chunk is waited for just before it is computed, and its results are sent right after that.
        for chunk in pending:
            sent = dispatcher.finish_dispatch(chunk)
            saved_value(functools.partial(self._count_bytes, sent))
            returning.append(dispatcher.start_combine(self._run_experts(sent, weights), sent))
        return self.ops.cat([dispatcher.finish_combine(each) for each in returning], 0)

    def _run_experts(self, sent: Dispatched, weights: ExpertWeights) -> Tensor:
        results = self._fused(sent, weights)
        results = self._one_step_at_a_time(sent, weights) if results is None else results
        # On a rank without rows, a subclass may save no tensor for backward; recomputation must still reach this point.
        return mark_reached(self.platform, results)

    def take_sent_bytes(self) -> int:
        """Return and reset the bytes that this rank sent for dispatch and combine in forward."""
        taken, self._sent_bytes = self._sent_bytes, 0
        return taken

    def _count_bytes(self, sent: Dispatched) -> None:
        self._sent_bytes += sent.sent_bytes

    def _routing(self, x: Tensor, routing: Routing | Tensor | None, counts: Tensor | None) -> Routing:
        if isinstance(routing, Routing) and counts is None:
            return routing
        if (routing is None) == (counts is None):
            raise ExpertParallelError("GroupedExperts takes a Routing or the number of rows of each expert; give one")
        counts = routing if counts is None else counts
        # From the weights, which within a custom dispatch are those of this rank's experts only.
        return Routing.expert_major(self.platform, counts, int(x.shape[0]), int(self.w1.shape[0]))

    def _local_weights(self) -> ExpertWeights:
        # Replicating dispatchers append the weights of copies, which are received here.
        own = local_weights(self.platform, self, self.partial_mesh)
        return ExpertWeights(**{name: self.dispatcher.with_copies(weight) for name, weight in own.items()})

    def _fused(self, sent: Dispatched, weights: ExpertWeights) -> Tensor | None:
        """Return the results of the platform's fused experts, or None if they do not compute these experts."""
        # Fused kernels compute exactly the three products of a SwiGLU expert: a subclass or option that changes any
        # step needs the separate operations.
        own, plain = type(self), GroupedExperts
        is_overridden = (own._hidden, own._results, own._weigh) != (plain._hidden, plain._results, plain._weigh)
        if is_overridden or self.activation is not SWIGLU or weights.b1 is not None:
            return None
        return fused_experts(sent, (weights.w1, weights.w2, weights.w3), self.score_before_experts)

    def _one_step_at_a_time(self, sent: Dispatched, weights: ExpertWeights) -> Tensor:
        """Compute the results by separate operations, on all platforms; the reference for fused experts."""
        # Without a permutation the rows are in expert-major order already.
        permutation, rows, scores = sent.permutation, sent.rows, sent.scores
        if permutation is not None:
            rows = permutation.permute(rows)
            scores = None if scores is None else permutation.permute_scores(scores)
        # The scores are applied at exactly one of the three positions; `get` returns None at the others.
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
        """Return the results `[rows, dim]` of hidden rows; the bias is multiplied by `scores` if given."""
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
    """A platform's fused experts, as returned by the hook `hp_fused_experts`."""

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
    """Apply SwiGLU experts to dispatched rows, summed per row, by the platform's kernels; None: it has none."""
    if sent.permutation is None:
        return None
    fused = _implementation(sent.sizes.platform)
    if fused is None:
        return None
    # The rows are the layer's own input if no tokens are sent.
    return saving_shard(fused)(sent.rows, sent.permutation, sent.sizes, sent.scores, weights, score_before_experts)


def has_fused_experts(platform: Platform) -> bool:
    """Return whether an installed plugin computes SwiGLU experts of this platform in its own kernels.

    Examples:
        >>> isinstance(has_fused_experts(platform), bool)
        True
    """
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
    """State of one call of an experts module, from its forward pre-hook to its forward hook."""

    dispatched: Dispatched
    scores: Tensor | None


class ExpertHooks:
    """The dispatch around one experts module, whose weights may be sharded over `partial_mesh`."""

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
        # Stacks, with one entry for each running call: the forward of a module may call the module itself.
        self.calls: list[Call] = []
        self.weights: list[dict[str, Tensor]] = []

    @property
    def num_experts(self) -> int:
        """Number of experts of all ranks."""
        return int(self.module.w1.shape[0])

    def dispatch(self, module: Module, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Return the rows of this rank's experts in expert-major order, and their counts, of tokens or of such rows."""
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
            # The experts are given weighted inputs, so their results are not weighted again.
            rows, scores = weighted(self.platform, rows, scores), None
        self.calls.append(Call(sent, scores))
        return rows, sent.sizes.tensor

    def combine(self, results: Tensor) -> Tensor:
        """Return the results for the rows or tokens that were given to the last `dispatch`."""
        call = self.calls[-1]
        if call.scores is not None:
            results = weighted(self.platform, results, call.scores)
        if call.dispatched.permutation is not None:
            results = call.dispatched.permutation.unpermute(results)
        # As in GroupedExperts: other modules may save no tensor for a rank without rows.
        return self.dispatcher.combine(mark_reached(self.platform, results), call.dispatched)

    def use_local_weights(self, module: Module) -> None:
        """Replace the weights of `module` by this rank's plain local tensors until `restore_weights`."""
        original = {name: getattr(module, name) for name in WEIGHTS if getattr(module, name, None) is not None}
        local = local_weights(self.platform, module, self.partial_mesh)
        self.weights.append(original)
        for name in original:
            self.platform.set_parameter(module, name, self.dispatcher.with_copies(local[name]))

    def restore_weights(self, module: Module) -> None:
        """Restore the weights that `use_local_weights` replaced."""
        for name, weight in self.weights.pop().items():
            self.platform.set_parameter(module, name, weight)


def hooks_of(module: Module) -> ExpertHooks:
    """Return the hooks that a style installed on `module`."""
    found: ExpertHooks = vars(module)[_STATE]
    return found


def partial_mesh_of(module: Module) -> DeviceMesh | None:
    """Return the 1-D mesh over which the hidden dimension of any experts module is sharded, or None."""
    own: DeviceMesh | None = getattr(module, "partial_mesh", None)
    hooks: ExpertHooks | None = vars(module).get(_STATE)
    return own if hooks is None else hooks.partial_mesh


def dispatcher_of(module: Module, platform: Platform) -> TokenDispatcher:
    """Return the dispatcher of any experts module."""
    hooks: ExpertHooks | None = vars(module).get(_STATE)
    own: TokenDispatcher | None = getattr(module, "dispatcher", None) if hooks is None else hooks.dispatcher
    return own or LocalDispatcher(platform)


def run_experts(module: Module, platform: Platform, x: Tensor, routing: Routing) -> Tensor:
    """Apply an experts module that takes rows and counts, whose hooks dispatch tokens; returns `[tokens, dim]`."""
    if _STATE in vars(module):
        results: Tensor = module(x, routing)
        return results
    # No style was applied: the same steps with a local dispatcher, and the weights as they are.
    hooks = ExpertHooks(module, platform, None)
    return hooks.combine(module(*hooks.dispatch(module, (x, routing))))


def install(
    module: Module,
    hooks: ExpertHooks,
    dispatch: Callable[[tuple[Any, ...]], tuple[Any, ...]],
    combine: Callable[[Any], Any],
) -> None:
    """Map the arguments of every forward of `module` by `dispatch`, and its output by `combine`."""
    platform = hooks.platform
    # Frameworks override the attribute assignment of modules, which must not see the hooks.
    object.__setattr__(module, _STATE, hooks)

    def before(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Counts may also be passed as keyword arguments.
        counts = [kwargs.pop(name) for name in ("num_tokens_per_expert", "routing") if name in kwargs]
        depth = len(hooks.calls)
        args = dispatch((*args, *counts))
        if len(hooks.calls) == depth:
            # A dispatch overridden by the user stores its state itself; the entry keeps both lists in step.
            hooks.calls.append(Call(None, None))  # type: ignore[arg-type]
        hooks.use_local_weights(module)
        return args, kwargs

    def after(module: Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if not hooks.weights:
            # The dispatch raised before weights were replaced.
            return None
        hooks.restore_weights(module)
        try:
            # The output is None if the forward raised.
            return None if output is None else combine(output)
        finally:
            hooks.calls.pop()

    platform.add_forward_pre_hook(module, before)
    platform.add_forward_hook(module, after, always_call=True)


def local_weights(platform: Platform, module: Module, partial_mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Return the plain weights of this rank's experts; over `partial_mesh` the first rank alone has a `b2`."""
    found = {name: getattr(module, name, None) for name in WEIGHTS}
    local = {}
    for name, weight in found.items():
        if isinstance(weight, DTensor):
            # The dual placements of the forward: replicated weights have partial gradients, shards have shards.
            grads = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
            local[name] = weight.to_local(grad_placements=grads)
        elif weight is not None:
            local[name] = weight
    if "b2" in local and partial_mesh is not None and partial_mesh.get_local_rank() != 0:
        # Multiplied instead of replaced: the bias stays in the graph, and its gradient is zero on these ranks.
        local["b2"] = platform.ops.mul(local["b2"], 0.0)
    return local


def weighted(platform: Platform, rows: Tensor, scores: Tensor) -> Tensor:
    """Multiply rows `[rows, dim]` by scores `[rows, 1]` in the dtype of the scores; returns the dtype of the rows."""
    ops = platform.ops
    # Rounded once, after the product in float32.
    return ops.cast(ops.mul(ops.cast(rows, scores.dtype), scores), rows.dtype)
