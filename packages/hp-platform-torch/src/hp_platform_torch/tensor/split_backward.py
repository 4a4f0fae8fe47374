"""A backward in two parts: the gradients of given inputs now, those of the parameters later.

The graph between the outputs and the inputs is walked once. Its nodes that have a further branch, towards a parameter,
keep the gradients that reach them in the first part (Zero Bubble, arXiv 2401.10241; torch.distributed.pipelining does
so too); the second part computes those branches from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Tensor = torch.Tensor
Node = Any
Edge = tuple[Node, int]


def split_backward(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], Callable[[], None]]:
    """Return the gradients of leaves `inputs`, and a function that accumulates those of all other leaves.

    Nodes written in Python compute all their gradients at once, so theirs are computed twice.
    """
    seeds = [torch.ones_like(y) if grad is None else grad for y, grad in zip(outputs, grads, strict=True)]
    roots = [get_gradient_edge(y) for y in outputs]
    targets = {get_gradient_edge(x).node for x in inputs}
    graph = _Graph([root.node for root in roots], targets)
    apart: dict[Edge, Tensor] = {}
    for root, seed in zip(roots, seeds, strict=True):
        if root.node not in graph.between:
            _add(apart, (root.node, root.output_nr), seed)
    reaching = [(y, seed) for y, seed, root in zip(outputs, seeds, roots, strict=True) if root.node in graph.between]
    if not reaching:
        return [None] * len(inputs), lambda: _finish(apart)
    kept: dict[Node, tuple[Tensor | None, ...]] = {}
    hooks = [node.register_prehook(_keeper(kept, node)) for node in graph.branching]
    try:
        found = torch.autograd.grad(
            [y for y, _ in reaching], inputs, [seed for _, seed in reaching], retain_graph=True, allow_unused=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    return list(found), lambda: _finish(apart, kept, graph)


class _Graph:
    """The nodes between outputs and inputs, and which of them have branches to elsewhere.

    Attributes:
        between: nodes from which an input is reached, those of the inputs among them.
        branching: those with an edge to a node from which none is.
        num_parents: of each node at the end of such an edge, how many nodes between lead to it.
    """

    def __init__(self, roots: Sequence[Node], targets: set[Node]) -> None:
        # Python's objects for nodes are made anew unless somebody holds them.
        self._children: dict[Node, tuple[Edge, ...]] = {}
        self.between: set[Node] = set()
        for node in self._in_post_order(roots):
            if node in targets or any(child in self.between for child, _ in self._children[node]):
                self.between.add(node)
        self.branching = [node for node in self.between if node not in targets and self.branches(node)]
        self.num_parents: dict[Node, int] = {}
        for node in self.branching:
            for child in {child for child, _ in self.branches(node)}:
                self.num_parents[child] = self.num_parents.get(child, 0) + 1

    def branches(self, node: Node) -> list[Edge]:
        """Return the edges of a node that lead away from the inputs."""
        return [(child, index) for child, index in self._children[node] if child not in self.between]

    def slots(self, node: Node) -> list[tuple[int, Edge]]:
        """Return the same with their places among the node's gradients."""
        return [
            (slot, (child, index))
            for slot, (child, index) in enumerate(node.next_functions)
            if child is not None and child not in self.between
        ]

    def _in_post_order(self, roots: Sequence[Node]) -> list[Node]:
        ordered: list[Node] = []
        waiting: list[tuple[Node, bool]] = [(root, False) for root in roots]
        while waiting:
            node, is_left = waiting.pop()
            if is_left:
                ordered.append(node)
            elif node not in self._children:
                self._children[node] = tuple(edge for edge in node.next_functions if edge[0] is not None)
                waiting.append((node, True))
                waiting += [(child, False) for child, _ in self._children[node] if child not in self._children]
        return ordered


def _keeper(kept: dict[Node, tuple[Tensor | None, ...]], node: Node) -> Callable[[Any], None]:
    def keep(grads: tuple[Tensor | None, ...]) -> None:
        kept[node] = grads

    return keep


def _finish(
    apart: dict[Edge, Tensor], kept: dict[Node, tuple[Tensor | None, ...]] | None = None, graph: _Graph | None = None
) -> None:
    """Compute what the branches get, then run one backward over all of them."""
    if graph is not None:
        assert kept is not None
        while kept:
            node, grads = kept.popitem()
            for edge, grad in _branch_gradients(node, grads, graph):
                _add(apart, edge, grad)
    if apart:
        edges = [GradientEdge(*edge) for edge in apart]
        torch.autograd.backward(edges, list(apart.values()))


def _branch_gradients(node: Node, grads: tuple[Tensor | None, ...], graph: _Graph) -> list[tuple[Edge, Tensor]]:
    given = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
    edges = list(dict.fromkeys(graph.branches(node)))
    if not given:
        return []
    if any(graph.num_parents[child] > 1 for child, _ in edges):
        # A weight used twice: from here autograd would also come to it by way of the other use.
        with torch.no_grad():
            results = node(*grads)
        results = results if isinstance(results, tuple) else (results,)
        return [(edge, _reduced(results[slot], *edge)) for slot, edge in graph.slots(node) if results[slot] is not None]
    found = torch.autograd.grad(
        [GradientEdge(node, index) for index, _ in given],
        [GradientEdge(*edge) for edge in edges],
        [grad for _, grad in given],
        allow_unused=True,
    )
    return [(edge, grad) for edge, grad in zip(edges, found, strict=True) if grad is not None]


def _reduced(grad: Tensor, child: Node, index: int) -> Tensor:
    """Sum a gradient over what was expanded, and cast it, as autograd does between two nodes."""
    meta = child._input_metadata[index]
    return grad.sum_to_size(meta.shape).to(meta.dtype)


def _add(sums: dict[Edge, Tensor], edge: Edge, grad: Tensor) -> None:
    sums[edge] = sums[edge] + grad if edge in sums else grad
