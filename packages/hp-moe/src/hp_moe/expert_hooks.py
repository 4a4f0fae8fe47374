"""Hooks that put a parallel style around any experts module: rows in expert-major order and counts in, results out.

`GroupedExperts` takes a `Routing` and its dispatcher itself. Someone else's experts, or a style that overrides the
dispatch, get these hooks: before forward tokens are dispatched and weights become this rank's plain parts, after it
both are undone. What one half leaves for the other is kept per call, so a style object may serve many layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hp_dtensor.comm.mesh import DeviceMesh
from hp_dtensor.comm.recompute_record import reached
from hp_dtensor.platform.interface import Platform
from hp_dtensor.spec.placements import Partial
from hp_dtensor.tensor.dtensor import DTensor
from hp_moe.dispatch import Dispatched, LocalDispatcher, TokenDispatcher
from hp_moe.routing import Routing
from hp_moe.routing_checks import check_values, reported_faults

Tensor = Any
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
