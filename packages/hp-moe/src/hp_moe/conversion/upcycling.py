"""Experts from a dense feed-forward network that has been trained."""

from __future__ import annotations

from collections.abc import Mapping

import numpy

from hp_moe.exceptions import MoEConfigError

Array = numpy.ndarray


def upcycle(
    dense: Mapping[str, Array],
    num_experts: int,
    gate: Array,
    *,
    granularity: int = 1,
    noise: float = 0.0,
    seed: int = 0,
) -> dict[str, Array]:
    """Return the weights of a `MoE` that begins as the dense network: sparse upcycling (arXiv 2212.05055).

    Every expert is a copy of the network. With `granularity` above 1, copies are cut along the hidden dimension into as
    many experts, consecutive ones being the parts of one copy, and the parts of a copy share a row of the gate, so that
    a token takes all of them (arXiv 2410.07524). The layer's scores must add up to one: `route_norm=True` (or
    `softmax_of_top_k`), and `top_k` must be a multiple of `granularity`. Without noise its output then equals the dense
    network's.

    Args:
        dense: `w1.weight`, `w3.weight` `[hidden, dim]`, `w2.weight` `[dim, hidden]`, as in `FeedForward`, with biases
            `w1.bias`, `w2.bias`, `w3.bias` or without; no `w3` where there is no gate.
        num_experts: experts of the layer, each of `hidden / granularity`.
        gate: one row for each copy, `[num_experts / granularity, dim]`, small and random.
        granularity: experts that one copy is cut into.
        noise: standard deviation of what is added to the experts' weights, as a multiple of each weight's own.
        seed: of the noise.

    Raises:
        MoEConfigError: weights are missing, or there are others; sizes that do not divide; a gate of another shape.

    Example:
        >>> dense = {"w1.weight": np.ones((8, 4)), "w2.weight": np.ones((4, 8)), "w3.weight": np.ones((8, 4))}
        >>> weights = upcycle(dense, num_experts=4, gate=np.ones((2, 4)), granularity=2)
        >>> weights["experts.w1"].shape, weights["router.gate.weight"].shape
        ((4, 4, 4), (4, 4))
    """
    _check_names(dense)
    hidden = dense["w1.weight"].shape[0]
    _check(hidden, num_experts, granularity, gate.shape, dense["w1.weight"].shape[1])
    random = numpy.random.default_rng(seed)
    experts = {}
    for name, array in sorted(dense.items()):
        weight, _, kind = name.partition(".")
        parts = _parts(array, weight, kind, granularity)
        copies = numpy.concatenate([parts] * (num_experts // granularity))
        if noise and kind == "weight":
            copies = copies + noise * array.std() * random.standard_normal(copies.shape)
        experts[f"experts.{weight if kind == 'weight' else 'b' + weight[1:]}"] = copies.astype(array.dtype)
    return {"router.gate.weight": numpy.repeat(gate, granularity, axis=0), **experts}


def _parts(array: Array, weight: str, kind: str, granularity: int) -> Array:
    """Cut a dense weight or bias along the hidden dimension: `[granularity, ...]`."""
    if weight == "w2" and kind == "bias":
        # Each part adds the bias, weighted with its share of the copy's score.
        return numpy.stack([array] * granularity)
    if weight == "w2":
        # A part has its share of the copy's score, and a part of the sum.
        return numpy.stack(numpy.split(array * granularity, granularity, axis=1))
    return numpy.stack(numpy.split(array, granularity, axis=0))


def _check_names(dense: Mapping[str, Array]) -> None:
    needed = {"w1.weight", "w2.weight"}
    known = {f"{weight}.{kind}" for weight in ("w1", "w2", "w3") for kind in ("weight", "bias")}
    missing, others = sorted(needed - {*dense}), sorted({*dense} - known)
    if missing or others:
        raise MoEConfigError(
            f"weights of a dense network: missing {', '.join(missing) or 'none'}; not expected "
            f"{', '.join(others) or 'none'}"
        )


def _check(hidden: int, num_experts: int, granularity: int, gate: tuple[int, ...], dim: int) -> None:
    if granularity < 1 or hidden % granularity or num_experts % granularity:
        raise MoEConfigError(
            f"granularity must divide the hidden width {hidden} and num_experts = {num_experts}, got {granularity}"
        )
    expected = (num_experts // granularity, dim)
    if tuple(gate) != expected:
        raise MoEConfigError(f"gate: expected one row for each copy, shape {list(expected)}, got {list(gate)}")
