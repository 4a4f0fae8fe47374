"""Cutting the inputs of a step into micro-batches, and putting the outputs together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.trees import flattened
from hp_trainer.exceptions import PipelineError, join_choices
from hp_trainer.parallel.divisors import nearest_divisors

Tensor = Any


@dataclass(frozen=True, slots=True)
class TensorChunkSpec:
    """The dimension along which a tensor is cut into micro-batches; torch's name.

    Example:
        >>> from hp_trainer.pipeline import TensorChunkSpec
        >>> TensorChunkSpec(0).split_dim
        0
    """

    split_dim: int


def split_inputs(
    platform: Platform, tree: Any, num_microbatches: int, specs: Any = None, what: str = "argument"
) -> list[Any]:
    """Return one tree like `tree` for each micro-batch; what is no tensor goes to all of them.

    Args:
        tree: nested tuples, lists and mappings of tensors and other values.
        specs: a tree of the same structure with a `TensorChunkSpec` for each tensor, or None to give it whole to every
            micro-batch; None for the whole tree: every tensor is cut along dimension 0.

    Raises:
        PipelineError: a dimension cannot be cut into equal parts; names the argument, its shape and what would work.
    """
    leaves, rebuild = flattened(tree)
    dims: list[int | None] = [0] * len(leaves)
    if specs is not None:
        dims = [None if spec is None else spec.split_dim for spec in flattened(specs)[0]]
        if len(dims) != len(leaves):
            raise PipelineError(
                f"{what}s: expected one TensorChunkSpec (or None) for each of {len(leaves)} values, got {len(dims)}"
            )
    parts = [
        _cut(platform, leaf, num_microbatches, dim, f"{what} {index}")
        for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True))
    ]
    return [rebuild([part[index] for part in parts]) for index in range(num_microbatches)]


def _cut(platform: Platform, leaf: Any, num_microbatches: int, dim: int | None, what: str) -> Sequence[Any]:
    if dim is None or not isinstance(leaf, platform.Tensor) or num_microbatches == 1:
        return [leaf] * num_microbatches
    shape = tuple(leaf.shape)
    size = shape[dim] if -len(shape) <= dim < len(shape) else 0
    if not size or size % num_microbatches:
        legal = nearest_divisors(size, num_microbatches) if size else []
        raise PipelineError(
            f"{what} of shape {list(shape)} cannot be cut along dimension {dim} into {num_microbatches} equal "
            "micro-batches, which the neighbours' buffers need; "
            + (f"use {join_choices(legal)} micro-batches, or other batches" if legal else "it has no such dimension")
        )
    parts: Sequence[Any] = platform.ops.split(leaf, [size // num_microbatches] * num_microbatches, dim)
    return parts


def merge_outputs(platform: Platform, outputs: Sequence[Any], spec: Any = None) -> Any:
    """Return the outputs of all micro-batches as those of one batch: tensors are concatenated.

    Args:
        spec: a tree like one output with a `TensorChunkSpec` for each tensor; None: dimension 0.
    """
    rebuild = flattened(outputs[0])[1]
    columns = list(zip(*(flattened(output)[0] for output in outputs), strict=True))
    specs = [None] * len(columns) if spec is None else flattened(spec)[0]
    return rebuild([_merged(platform, column, each) for column, each in zip(columns, specs, strict=True)])


def _merged(platform: Platform, column: Sequence[Any], spec: TensorChunkSpec | None) -> Any:
    if not isinstance(column[0], platform.Tensor):
        return column[0]
    if not column[0].shape:
        return platform.ops.stack(list(column), 0)
    return platform.ops.cat(list(column), 0 if spec is None else spec.split_dim)


def split_all(
    platform: Platform,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_microbatches: int,
    args_spec: Any = None,
    kwargs_spec: Any = None,
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """Return the positional and the named arguments of each micro-batch; see `split_inputs`."""
    positional = split_inputs(platform, tuple(args), num_microbatches, args_spec, "argument")
    if kwargs_spec is not None:
        kwargs_spec = {name: kwargs_spec.get(name, TensorChunkSpec(0)) for name in kwargs}
    return positional, split_inputs(platform, dict(kwargs), num_microbatches, kwargs_spec, "keyword argument")
