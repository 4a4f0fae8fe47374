"""Context parallelism of a model: the method by which ranks share a sequence, its cost, and problems with it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hp_dtensor.comm.links import BANDWIDTH, Links
from hp_dtensor.parallel.attention import (
    AttentionShape,
    ContextChoice,
    ContextCost,
    ContextParallel,
    choose_context_parallel,
)
from hp_trainer.exceptions import Problem, join_choices
from hp_trainer.parallel.axes import divisors

if TYPE_CHECKING:
    from hp_trainer.config import TrainingConfig

# Operations per second by which methods are compared. Bytes per second are those of the default `Links`.
_FLOPS = 1e14
# Least number of tokens in a rank's head or tail chunk for which costs are counted. With fewer, the diagonal of a
# causal mask is too large a share of the products (with two tokens they take an eighth more).
_HALF_TOKENS = 32


def context_style(dims: Any, config: Any, training: TrainingConfig | None = None) -> ContextParallel:
    """Return the parallel style of attention modules under these degrees; the same on every rank.

    Args:
        dims: a `ParallelDims`.
        config: the model's options, from which heads are read if it has any.
        training: length and batch, for which the cheapest method is chosen if none is set; None: a long sequence.
    """
    method, degree = _method(dims, config, training)
    length = None if training is None else training.sequence_length
    # Always balanced (head and tail chunks): layers may have different masks, but tokens have one order.
    return ContextParallel(
        method=method, ulysses_degree=degree, balanced=True, length=length, replicated_without_positions=True
    )


def context_cost(
    dims: Any, config: Any, training: TrainingConfig, *, window: int | None = None, batch: int = 1
) -> ContextCost:
    """Return bytes, time and memory of one layer's attention by the method that `context_style` chooses."""
    method, degree = _method(dims, config, training)
    shape = dataclasses.replace(_shape(dims, config, training), window=window, batch=batch)
    return _compare(shape, dims.cp, None if degree == dims.cp else method, degree).best


def describe_context(dims: Any, config: Any, training: TrainingConfig) -> list[str]:
    """Describe how context parallel ranks share a sequence: one line, and a table of costs if these decided."""
    if dims.cp == 1:
        return []
    method, degree = _method(dims, config, training)
    name = "ulysses" if degree == dims.cp else method if degree == 1 else f"{method}, with ulysses over {degree}"
    if dims.cp_method != "auto" or _heads(dims, config) is None:
        return [f"{dims.cp} ranks share each by {name}"]
    choice = _compare(_shape(dims, config, training), dims.cp, None, dims.ulysses_degree)
    return [f"{dims.cp} ranks share each by {name}, which costs least in a layer:", *str(choice).splitlines()]


@functools.lru_cache(maxsize=4096)
def _compare(shape: AttentionShape, ranks: int, method: str | None, degree: int | None) -> ContextChoice:
    """Return the costs of the methods to share a sequence: of all, or of those with this method and Ulysses degree.

    Costs are counted for a sequence that is shorter by a factor and has as many equal chunks. Rates are divided by that
    factor for bytes, and by its square for products of queries and keys. The seconds are the same, and found much
    faster.
    """
    # Head and tail chunks need an even number of chunks per rank, and a window does not scale with the length.
    factor = 1
    if shape.length % (2 * ranks) == 0 and shape.window is None:
        half = shape.length // (2 * ranks)
        factor = max((each for each in divisors(half) if half // each >= _HALF_TOKENS), default=1)
    shorter = dataclasses.replace(shape, length=shape.length // factor)
    # Bytes are linear in the length and products quadratic, so these rates give the same seconds.
    rates = Links(bandwidth=BANDWIDTH / factor)
    found = choose_context_parallel(
        shorter, ranks, method=method, ulysses_degree=degree, links=rates, flops=_FLOPS / factor**2
    )
    return ContextChoice(ranks, tuple(_times(cost, factor) for cost in found.costs))


def _times(cost: ContextCost, factor: int) -> ContextCost:
    """Return a cost with its bytes multiplied by a factor."""
    return dataclasses.replace(
        cost,
        forward_bytes=cost.forward_bytes * factor,
        backward_bytes=cost.backward_bytes * factor,
        heads_bytes=cost.heads_bytes * factor,
        extra_bytes=cost.extra_bytes * factor,
    )


def context_problems(dims: Any, config: Any, length: int | None = None) -> Iterator[Problem]:
    """Yield problems of sharing this model's sequences over context parallel ranks.

    Args:
        dims: an object with the fields of `ParallelDims`.
        config: the model's options; missing ones are not checked.
        length: tokens per sample.
    """
    if dims.cp == 1:
        return
    heads = _heads(dims, config)
    if dims.cp_method == "ulysses" and dims.ulysses_degree not in (None, dims.cp):
        yield Problem(
            path="cp_method",
            what=f"ulysses exchanges heads among all {dims.cp} ranks, not among ulysses_degree = {dims.ulysses_degree}",
            expected="ring or all_gather for the others",
            got="ulysses",
            hint="cp_method=ring, or ulysses_degree=null",
        )
    elif heads is not None and (named := _named_degree(dims)) is not None and named > heads:
        legal = [degree for degree in divisors(dims.cp) if degree <= heads]
        what = f"there are only num_attention_heads / tp = {heads} heads to exchange among {named} ranks"
        hint = f"ulysses_degree={join_choices(legal[-2:])} and cp_method=ring"
        yield Problem(path="ulysses_degree", what=what, expected=f"at most {heads}", got=str(named), hint=hint)
    if getattr(config, "capacity_factor", None) is not None and getattr(config, "drop_policy", None) == "position":
        yield Problem(
            path="cp",
            what="the last tokens, which model.drop_policy=position drops, are not those of the last rank",
            expected="1, or choices dropped by their scores",
            got=str(dims.cp),
            hint="cp=1, or model.drop_policy=probability",
        )
    if length is not None and length < dims.cp * dims.tp:
        yield Problem(
            path="cp",
            what=f"sequences of {length} tokens leave some of cp*tp = {dims.cp}*{dims.tp} ranks without any",
            expected=f"cp*tp of at most {length}",
            got=str(dims.cp * dims.tp),
            hint=f"cp={max(1, length // dims.tp)}",
        )


def _method(dims: Any, config: Any, training: TrainingConfig | None) -> tuple[Any, int]:
    """Return the method for the outer ranks, and the number of inner ranks that exchange heads (Ulysses)."""
    # The named method is for all ranks unless Ulysses is given a degree of its own.
    if dims.cp_method in ("ring", "all_gather"):
        return dims.cp_method, dims.ulysses_degree or 1
    if dims.cp_method != "auto" or _heads(dims, config) is None:
        return "ring", dims.ulysses_size
    best = _compare(_shape(dims, config, training), dims.cp, None, dims.ulysses_degree).best
    return best.method, best.ulysses_degree


def _shape(dims: Any, config: Any, training: TrainingConfig | None) -> AttentionShape:
    heads = _heads(dims, config)
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    # Latent attention has keys and values for every head once they are expanded.
    if getattr(config, "attention", None) == "latent":
        kv_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Without training settings: one long sequence in 16 bits.
    batch, length, itemsize = 1, 1 << 15, 2
    if training is not None:
        batch = training.micro_batch_size or max(1, training.global_batch_size // dims.dp_size)
        length, itemsize = training.sequence_length, 4 if training.dtype == "float32" else 2
    return AttentionShape(
        batch=batch,
        length=length,
        heads=heads or 1,
        kv_heads=max(1, kv_heads // dims.tp),
        head_dim=head_dim,
        window=_common_window(config),
        itemsize=itemsize,
    )


def _common_window(config: Any) -> int | None:
    """Return the widest window of the layers; None if a layer attends to everything."""
    if not hasattr(config, "window_of"):
        return None
    windows = []
    for layer in range(config.num_hidden_layers):
        # The widest window costs most, so its layers decide.
        if (window := config.window_of(layer)) is None:
            return None
        windows.append(window)
    return max(windows, default=None)


def _heads(dims: Any, config: Any) -> int | None:
    heads = getattr(config, "num_attention_heads", None)
    return None if heads is None else max(1, heads // dims.tp)


def _named_degree(dims: Any) -> int | None:
    """Return the configured number of ranks that exchange heads; None if it is chosen, or none do."""
    if dims.ulysses_degree is not None:
        return int(dims.ulysses_degree)
    return int(dims.cp) if dims.cp_method in ("ulysses", None) else None
