"""Products of row groups with one matrix per group: the platform's own, and the loop that is its oracle."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy

from hp_dtensor.comm.kept_tensors import Kept
from hp_dtensor.platform.interface import Platform
from hp_moe.plugins import plugin_manager

Tensor = Any


class GroupSizes:
    """How many rows each group has, on the device and on the host.

    Args:
        tensor: int64 `[groups]`, on the device.
        host: the same numbers; None: they are read from the device when first asked for, which waits for it.
    """

    def __init__(self, platform: Platform, tensor: Tensor, host: tuple[int, ...] | None = None) -> None:
        self.platform = platform
        self.tensor = tensor
        if host is not None:
            self.host = host

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    @functools.cached_property
    def host(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.platform.to_numpy(self.tensor))

    @functools.cached_property
    def offsets(self) -> Tensor:
        """int32 `[groups]`: where each group ends."""
        ops = self.platform.ops
        return ops.cast(ops.cumsum(self.tensor, 0), self.platform.dtype("int32"))


class GroupedMatmul(Protocol):
    """What `hp_grouped_matmul` returns."""

    def __call__(self, x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor: ...


def grouped_matmul(x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """`x[rows of group e] @ weight[e].T` for every group: `[rows, in]`, `[groups, out, in]` -> `[rows, out]`."""
    return _implementation(sizes.platform)(x, weight, sizes)


@functools.cache
def _implementation(platform: Platform) -> GroupedMatmul:
    return plugin_manager().hook.hp_grouped_matmul(platform=platform) or loop_grouped_matmul


def loop_grouped_matmul(x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """`grouped_matmul` as one product per group that has rows; works on every platform and dtype."""
    ops = sizes.platform.ops
    bounds = _bounds(sizes.host)
    kept = Kept(sizes.platform, x, weight)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        products = [
            ops.matmul(_rows(ops, x, bound), ops.transpose(_matrix(ops, weight, group), 0, 1))
            for group, bound in bounds
        ]
        return _cat(sizes.platform, products, (0, weight.shape[1]), x.dtype)

    def backward(grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = kept.tensors
        to_x = [ops.matmul(_rows(ops, grad, bound), _matrix(ops, weight, group)) for group, bound in bounds]
        to_weight = [ops.zeros(tuple(weight.shape[1:]), weight.dtype)] * len(sizes.host)
        for group, bound in bounds:
            to_weight[group] = ops.matmul(ops.transpose(_rows(ops, grad, bound), 0, 1), _rows(ops, x, bound))
        matrices = [ops.unsqueeze(matrix, 0) for matrix in to_weight]
        return (
            _cat(sizes.platform, to_x, tuple(x.shape), x.dtype),
            _cat(sizes.platform, matrices, tuple(weight.shape), weight.dtype),
        )

    return sizes.platform.custom_function(forward, backward, x, weight)


def _bounds(host: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
    """(group, (first row, rows)) of every group that has rows."""
    starts = numpy.cumsum((0, *host))
    return [(group, (int(starts[group]), size)) for group, size in enumerate(host) if size]


def _rows(ops: Any, x: Tensor, bound: tuple[int, int]) -> Tensor:
    return ops.narrow(x, 0, *bound)


def _matrix(ops: Any, weight: Tensor, group: int) -> Tensor:
    return ops.squeeze(ops.narrow(weight, 0, group, 1), 0)


def _cat(platform: Platform, tensors: list[Tensor], empty_shape: tuple[int, ...], dtype: Any) -> Tensor:
    return platform.ops.cat(tensors, 0) if tensors else platform.zeros(empty_shape, dtype)
