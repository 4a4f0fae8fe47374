"""Autograd for the platform: linear maps with a dual, functions with a given backward, backward in two parts, autocast.

`split_backward` computes the gradients of given inputs first and those of the parameters later (Zero Bubble, arXiv
2401.10241; torch.distributed.pipelining has it too). It walks the graph between outputs and inputs once. Some of its
nodes have another branch, towards a parameter. The first part also returns the gradients that reach these nodes, and
the second part continues from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hp_platform_torch.tensor.torch_operation import NoGrad, is_intercepting

Map = Callable[[torch.Tensor], torch.Tensor]


def is_for_parameters() -> bool:
    """Return True if the running backward runs all nodes that follow the current one, as without `inputs=`.

    Called by a hook or node of that backward. True too if `inputs=` lists every leaf. A backward with inputs, or one
    nested in it, walks over all nodes that follow.
    """
    node = torch._C._current_autograd_node()
    following = [child for child, _ in node.next_functions if child is not None]
    if Variable._execution_engine.is_checkpoint_valid():
        # Torch says so while it runs a node of a backward without inputs. But hooks on a gradient that is an input run
        # outside of a node: then nothing that follows in the graph is to run.
        return any(map(_will_run, following or [node]))
    # Torch also says no inside of an outer backward to inputs. The running one has inputs if it leaves out a node.
    waiting, seen = list(following), set(following)
    while waiting:
        node = waiting.pop()
        if not _will_run(node):
            return False
        found = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= found
        waiting += found
    return bool(following)


def needs_first_operand() -> bool:
    """Return False if the running node is a matrix product that needs no gradient of its last operand."""
    node = torch._C._current_autograd_node()
    if node is None or node.name() not in ("MmBackward0", "AddmmBackward0"):
        return True
    last, _ = node.next_functions[-1]
    try:
        return last is not None and torch._C._will_engine_execute_node(last)
    except RuntimeError:  # see `_will_run`
        return True


def _will_run(node: Any) -> bool:
    """Return True if the running backward runs a node, which is in its graph."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch cannot tell for a leaf whose gradient `autograd.grad` returns
        return False


def linear_map(x: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
    """Apply `forward`, a linear map whose gradient is its dual `backward`; differentiable any number of times."""
    if not torch.is_grad_enabled():
        return forward(x)
    if x.requires_grad:
        # Inside `LocalOperations` DTensors stand for their shards.
        is_plain = type(x) is torch.Tensor or not is_intercepting()
        is_direct = is_plain and not torch._C._are_functorch_transforms_active()
        return (_apply_linear_map if is_direct else _LinearMap.apply)(x, forward, backward)
    with NoGrad():
        return forward(x)


def _no_view(result: torch.Tensor) -> torch.Tensor:
    """Detach a view from its base: torch refuses in-place writes to views that a custom node returns."""
    return result.detach() if result._is_view() else result


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
        ctx.dual = backward, forward
        # Torch would turn a result that is the input itself into a view that refers to the input. `vary` stores the
        # view on its source, so the two would refer to each other and never be freed.
        result = forward(x)
        return result.detach() if result is x else _no_view(result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        # The backward is a linear map with the roles exchanged, which makes second derivatives (`create_graph=True`)
        # right.
        return linear_map(grad, *ctx.dual), None, None


# The `apply` below that of `Function`, which looks for `torch.func` transforms and refuses DTensors (`patches.py`).
_apply_linear_map = super(torch.autograd.Function, _LinearMap).apply


def custom_function(
    forward: Callable[..., Any], backward: Callable[..., Any], *inputs: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Run `forward(*inputs)` as one node with the given backward; see `Platform.custom_function`."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    # The gradient is not differentiable, but torch must know that it depends on the inputs: otherwise second
    # derivatives would silently be zero. The anchor is an edge to the inputs without their data.
    anchor = _Anchor.apply(*inputs) if recorded else None
    # In a tuple, so that it is no input of the node. As one it would get no gradient, and torch runs nodes without
    # gradients on the thread for the host, those of an accelerator on another. The nodes of the inputs would wait for
    # it, and each rank would run its collectives in an order that depends on the two threads.
    return _CustomFunction.apply(forward, backward, (anchor,), *inputs)


class _CustomFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        anchor: tuple[torch.Tensor | None],
        *inputs: Any,
    ) -> Any:
        ctx.backward_function, (ctx.anchor,) = backward, anchor
        outputs = forward(*inputs)
        # With several outputs, unused ones have gradient None instead of allocated zeros. With a single unused output
        # there is no backward at all. `split_backward` calls nodes itself and cannot read what `set_materialize_grads`
        # was given, so the node stores it.
        ctx.materializes = isinstance(outputs, torch.Tensor)
        ctx.set_materialize_grads(ctx.materializes)
        ctx.mark_non_differentiable(*_not_differentiable(outputs))
        return tuple(outputs) if isinstance(outputs, (list, tuple)) else _no_view(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            result = ctx.backward_function(*grads)
        if not _keeps_graph():
            # Free what the backward refers to, as torch frees the saved tensors of its own nodes: a reference to the
            # loss keeps this node alive. A backward that has raised may be tried again.
            ctx.backward_function = _refuse_again
        grads_of_inputs = (result,) if result is None or isinstance(result, torch.Tensor) else tuple(result)
        expected = len(ctx.needs_input_grad) - 3
        if len(grads_of_inputs) != expected:
            raise ValueError(
                f"custom_function: backward returned {len(grads_of_inputs)} gradients, expected {expected}, "
                "one or None per input"
            )
        if torch.is_grad_enabled():
            depends_on = ctx.anchor, *(grad for grad in grads if grad is not None)
            # As results of a node whose backward raises: their own derivatives were not recorded.
            grads_of_inputs = tuple(g if g is None else _Refusal.apply(g, *depends_on) for g in grads_of_inputs)
        return None, None, None, *grads_of_inputs


_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


def _refuse_again(*grads: Any) -> Any:
    raise RuntimeError(
        "a second backward through a graph whose saved tensors the first one has freed; pass retain_graph=True to the "
        "first one"
    )


class _Anchor(torch.autograd.Function):
    """Empty tensor that depends on tensors in the graph without saving their data."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None,) * len(ctx.needs_input_grad)


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *depends_on: torch.Tensor) -> torch.Tensor:
        return grad.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "no second derivative: the gradient of a custom_function is not recorded. Reductions over ranks by max, "
            "min or product are such functions"
        )


def _not_differentiable(outputs: Any) -> list[torch.Tensor]:
    tensors = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    return [x for x in tensors if isinstance(x, torch.Tensor) and not x.is_floating_point()]


Tensor = torch.Tensor
Node = Any
Sums = dict[GradientEdge, Tensor]


def split_backward(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], Callable[[], None]]:
    """Return the gradients of leaves `inputs`, and a function that accumulates those of all other leaves.

    Nodes written in Python compute all their gradients at once, so the second part runs them again.
    """
    seeds = [torch.ones_like(y) if grad is None else grad for y, grad in zip(outputs, grads, strict=True)]
    roots = [get_gradient_edge(y) for y in outputs]
    graph = _Graph(roots, {get_gradient_edge(x).node for x in inputs})
    apart: Sums = {}
    reaching: list[tuple[Tensor, Tensor]] = []
    for y, root, seed in zip(outputs, roots, seeds, strict=True):
        if root.node in graph.between:
            reaching.append((y, seed))
        else:
            _add(apart, GradientEdge(root.node, root.output_nr), seed)
    if not reaching:
        return [None] * len(inputs), lambda: _finish(apart, [], [], roots)
    forks = graph.forks()
    found = torch.autograd.grad(
        [y for y, _ in reaching],
        # One pass also returns the gradients at the forks, without a Python call for each.
        [*inputs, *(edge for fork in forks for edge in fork.edges)],
        [seed for _, seed in reaching],
        retain_graph=True,
        allow_unused=True,
    )
    at_forks = list(found[len(inputs) :])
    # torch 2.11 frees a node written in Python with the nodes before it in the backward, so the second part holds the
    # roots.
    return list(found[: len(inputs)]), lambda: _finish(apart, forks, at_forks, roots)


@dataclass(slots=True)
class _Fork:
    """A node between outputs and inputs with edges that do not lead to an input.

    Attributes:
        edges: the gradient edges by which gradients reach the node.
        slots: indices of its gradients that belong to `branches`.
        branches: its edges that lead to no input.
        is_alone: no other node has edges to the targets of `branches`.
        is_separate: nor to any node after them, so that a backward from `branches` concerns no other fork.
    """

    node: Node
    edges: list[GradientEdge]
    slots: list[int]
    branches: list[GradientEdge]
    is_alone: bool
    is_separate: bool


class _Graph:
    """The autograd nodes reachable from the outputs.

    Attributes:
        between: nodes from which an input is reachable, including the inputs' own.
    """

    def __init__(self, roots: Sequence[GradientEdge], targets: set[Node]) -> None:
        self._roots, self._targets = roots, targets
        # Torch creates another Python object for a node unless one is alive, so the keys also keep them comparable.
        self._following: dict[Node, tuple[tuple[Node, int], ...]] = {}
        # Predecessors of each node, built in the same pass, because a pipeline does this for each micro-batch.
        self._leading: dict[Node, list[Node]] = {root.node: [] for root in roots}
        self._walk()
        self.between = {target for target in targets if target in self._leading}
        waiting = list(self.between)
        while waiting:
            for node in self._leading[waiting.pop()]:
                if node not in self.between:
                    self.between.add(node)
                    waiting.append(node)

    def _walk(self) -> None:
        following, leading = self._following, self._leading
        waiting = list(leading)
        while waiting:
            node = waiting.pop()
            edges = following[node] = node.next_functions
            for child, _ in edges:
                if child in leading:
                    leading[child].append(node)
                elif child is not None:
                    leading[child] = [node]
                    waiting.append(child)

    def forks(self) -> list[_Fork]:
        """Return the forks in forward order."""
        between, targets = self.between, self._targets
        found = [
            self._fork(node, edges)
            for node, edges in self._following.items()
            if len(edges) > 1 and node in between and node not in targets
        ]
        # Sorted, so that forks that share a parameter add to its gradient in the order of an ordinary backward.
        return sorted((fork for fork in found if fork.branches), key=lambda fork: fork.node._sequence_nr())

    def _fork(self, node: Node, edges: tuple[tuple[Node, int], ...]) -> _Fork:
        between = self.between
        slots = [slot for slot, (child, _) in enumerate(edges) if child is not None and child not in between]
        branches = [GradientEdge(*edges[slot]) for slot in slots]
        is_alone = all(parent is node for edge in branches for parent in self._leading[edge.node])
        is_separate = is_alone and self._is_separate(node, branches)
        return _Fork(node, self._edges_to(node) if branches else [], slots, branches, is_alone, is_separate)

    def _is_separate(self, node: Node, branches: list[GradientEdge]) -> bool:
        """Return True if every path to the nodes below `branches` comes from `node`, and none of them is a root."""
        found = {edge.node for edge in branches}
        waiting = list(found)
        while waiting:
            children = {child for child, _ in self._following[waiting.pop()] if child is not None} - found
            found |= children
            waiting += children
        # The backward from roots outside of `between`, which comes last, must find its nodes unfreed.
        if any(root.node in found for root in self._roots):
            return False
        return all(parent is node or parent in found for each in found for parent in self._leading[each])

    def _edges_to(self, node: Node) -> list[GradientEdge]:
        places = {place for each in self._leading[node] for child, place in self._following[each] if child is node}
        places |= {root.output_nr for root in self._roots if root.node is node}
        return [GradientEdge(node, place) for place in sorted(places)]


def _finish(apart: Sums, forks: list[_Fork], at_forks: list[Tensor | None], graph: Sequence[GradientEdge]) -> None:
    """Run backwards from the gradients of the forks' branches and from `apart`; `graph` keeps nodes alive."""
    # From the end of both lists, so that each gradient at a fork is freed after its use.
    while forks:
        fork = forks.pop()
        own = [at_forks.pop() for _ in fork.edges][::-1]
        # Of its own where possible: the gradient is added while it is in the cache, and the next one takes its memory.
        sums: Sums = {} if fork.is_separate else apart
        for edge, grad in _branch_gradients(fork, own):
            _add(sums, edge, grad)
        if fork.is_separate and sums:
            _run(list(sums), list(sums.values()))
    if apart:
        _run(list(apart), list(apart.values()))


def _branch_gradients(fork: _Fork, grads: Sequence[Tensor | None]) -> list[tuple[GradientEdge, Tensor]]:
    given = [(edge, grad) for edge, grad in zip(fork.edges, grads, strict=True) if grad is not None]
    if not given:
        return []
    if not fork.is_alone:
        return _by_the_node(fork, given)
    branches = list(dict.fromkeys(fork.branches))
    found = _run([edge for edge, _ in given], [grad for _, grad in given], branches)
    return [(edge, grad) for edge, grad in zip(branches, found, strict=True) if grad is not None]


def _run(edges: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[GradientEdge] = ()) -> Any:
    """Return the gradients of `inputs` as `torch.autograd.grad` does, or without inputs accumulate as `backward` does.

    Those functions check the shape of each gradient in Python, which takes as long as the backward of a small weight.
    Here the gradients come from autograd itself, for the same edges.
    """
    return torch.autograd._engine_run_backward(
        tuple(edges), tuple(grads), False, False, tuple(inputs), True, accumulate_grad=not inputs
    )


def _by_the_node(fork: _Fork, given: Sequence[tuple[GradientEdge, Tensor]]) -> list[tuple[GradientEdge, Tensor]]:
    """Compute the gradients of a fork's branches by calling its node directly; those of its other edges are dropped.

    Needed where something on a branch is used elsewhere too: a backward would also follow the other use.
    """
    grads: list[Tensor | None] = [None] * len(fork.node._input_metadata)
    for edge, grad in given:
        grads[edge.output_nr] = grad
    with torch.no_grad():
        results = _of_python(fork.node, grads) if isinstance(fork.node, BackwardCFunction) else fork.node(*grads)
    results = results if isinstance(results, tuple) else (results,)
    pairs = zip(fork.branches, (results[slot] for slot in fork.slots), strict=True)
    return [(edge, _reduced(grad, edge)) for edge, grad in pairs if grad is not None]


def _of_python(node: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Return the gradients for all edges of a `torch.autograd.Function`'s node, as autograd gets them.

    Its backward returns a value for every argument of forward, but only tensors have edges. Unused outputs get zeros,
    torch's default: whether another author's function called `set_materialize_grads(False)` cannot be read.
    """
    if getattr(node, "materializes", True):
        metas = zip(grads, node._input_metadata, strict=True)
        grads = [torch.zeros(m.shape, dtype=m.dtype, device=m.device) if grad is None else grad for grad, m in metas]
    results = node.apply(*grads)
    results = results if isinstance(results, tuple) else (results,)
    needed = iter(grad for grad, is_needed in zip(results, node.needs_input_grad, strict=True) if is_needed)
    return tuple(None if child is None else next(needed) for child, _ in node.next_functions)


def _reduced(grad: Tensor, edge: GradientEdge) -> Tensor:
    """Sum a gradient over expanded dimensions and cast it, as autograd does between two nodes."""
    meta = edge.node._input_metadata[edge.output_nr]
    return grad.sum_to_size(meta.shape).to(meta.dtype)


def _add(sums: Sums, edge: GradientEdge, grad: Tensor) -> None:
    sums[edge] = sums[edge] + grad if edge in sums else grad


def automatic_precision_of(kinds: Collection[str]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function whose context manager restores the current autocast state, on these device types.

    Examples:
        >>> import torch
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     again = automatic_precision_of(["cpu"])
        >>> with again():
        ...     torch.ones(2, 2).mm(torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    here = _state(kinds)

    def block() -> AbstractContextManager[Any]:
        if not any(is_enabled for _, is_enabled, _ in (*here, *_state(kinds))):
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        for kind, is_enabled, dtype in here:
            # Without the cache of casts: a weight's cast that was cached under no_grad would later hide its gradient.
            stack.enter_context(torch.autocast(kind, dtype, is_enabled, cache_enabled=False))
        return stack

    return block


def _state(kinds: Collection[str]) -> list[tuple[str, bool, torch.dtype]]:
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
