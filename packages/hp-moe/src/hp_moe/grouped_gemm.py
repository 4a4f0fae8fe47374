"""Grouped matrix products (grouped GEMM): each group of rows times its own matrix."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import numpy

from hp_dtensor.comm.saved_tensors import PRODUCTS, SavedTensors, saved_result
from hp_dtensor.platform.interface import Platform
from hp_moe.plugins import plugin_manager

Tensor = Any


class GroupSizes:
    """Number of rows of each group, on the device and on the host.

    Args:
        tensor: int64 `[groups]`, on the device.
        host: the same numbers on the host; None to read them from the device on first use, which waits for it.

    Examples:
        >>> sizes = GroupSizes(platform, platform.from_numpy(np.array([2, 0, 1])))
        >>> sizes.host, platform.to_numpy(sizes.offsets).tolist()
        ((2, 0, 1), [2, 2, 3])
    """

    def __init__(self, platform: Platform, tensor: Tensor, host: tuple[int, ...] | None = None) -> None:
        self.platform = platform
        self.tensor = tensor
        # An instance attribute hides the cached property, so that known sizes are never read from the device.
        if host is not None:
            self.host = host

    def __len__(self) -> int:
        return int(self.tensor.shape[0])

    @functools.cached_property
    def host(self) -> tuple[int, ...]:
        """The sizes as Python integers; reading them for the first time waits for the device."""
        return tuple(int(size) for size in self.platform.to_numpy(self.tensor))

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Row number at which each group ends: int32 `[groups]`, on the device."""
        ops = self.platform.ops
        return ops.cast(ops.cumsum(self.tensor, 0), self.platform.dtype("int32"))


class GroupedMatmul(Protocol):
    """A platform's grouped matrix product, as returned by the hook `hp_grouped_matmul`."""

    def __call__(self, x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor: ...


def grouped_matmul(x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """Multiply each group of rows by its matrix, `x[rows of group e] @ weight[e].T`. Differentiable.

    Args:
        x: `[rows, in]` in group-major order.
        weight: `[groups, out, in]`.
        sizes: rows of each group; they add up to `rows`.

    Returns:
        `[rows, out]`. A group without rows gets a weight gradient of exactly zero.

    Examples:
        >>> sizes = GroupSizes(platform, platform.from_numpy(np.array([2, 1])))
        >>> x = platform.ops.ones((3, 4), platform.dtype("float32"))
        >>> weight = platform.ops.ones((2, 5, 4), platform.dtype("float32"))
        >>> tuple(grouped_matmul(x, weight, sizes).shape)
        (3, 5)
    """
    return _implementation(sizes.platform)(x, weight, sizes)


def grouped_bias(bias: Tensor, sizes: GroupSizes, num_rows: int, scores: Tensor | None = None) -> Tensor:
    """Return the bias of each row's group, multiplied by the row's score. Differentiable in both.

    It is computed as a grouped product with a column of scores (or ones), so that its gradient is summed in a fixed
    order and exactly zero for a group without rows.

    Args:
        bias: `[groups, out]`.
        num_rows: number of rows of all groups.
        scores: `[rows, 1]`; None: ones.

    Returns:
        `[rows, out]`, in the dtype of `bias`.

    Examples:
        >>> sizes = GroupSizes(platform, platform.from_numpy(np.array([2, 1])))
        >>> bias = platform.from_numpy(np.array([[1.0], [5.0]], np.float32))
        >>> platform.to_numpy(grouped_bias(bias, sizes, 3)).tolist()
        [[1.0], [1.0], [5.0]]
    """
    ops, (groups, out) = sizes.platform.ops, bias.shape
    column = ops.ones((num_rows, 1), bias.dtype) if scores is None else ops.cast(scores, bias.dtype)
    # Padded with zeros to rows of 16 bytes, the alignment that kernels of grouped products require.
    fill = 16 // sizes.platform.itemsize(bias.dtype) - 1
    column = ops.cat([column, ops.zeros((num_rows, fill), bias.dtype)], 1)
    matrix = ops.cat([ops.unsqueeze(bias, 2), ops.zeros((groups, out, fill), bias.dtype)], 2)
    return grouped_matmul(column, matrix, sizes)


@functools.cache
def _implementation(platform: Platform) -> GroupedMatmul:
    return plugin_manager().hook.hp_grouped_matmul(platform=platform) or loop_grouped_matmul


def loop_grouped_matmul(x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """`grouped_matmul` as a loop with one product per non-empty group.

    It works on every platform and dtype, and is the reference for faster implementations.

    Examples:
        >>> sizes = GroupSizes(platform, platform.from_numpy(np.array([2, 1])))
        >>> x = platform.ops.ones((3, 4), platform.dtype("float32"))
        >>> weight = platform.ops.ones((2, 5, 4), platform.dtype("float32"))
        >>> tuple(loop_grouped_matmul(x, weight, sizes).shape)
        (3, 5)
    """
    ops = sizes.platform.ops
    starts = numpy.cumsum((0, *sizes.host))
    # (group, (first row, number of rows)) of every group that has rows.
    slices = [(group, (int(starts[group]), size)) for group, size in enumerate(sizes.host) if size]
    # Saved for backward through the framework, so that recomputation and its version checks apply.
    saved = SavedTensors(sizes.platform, x, weight)

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return saved_result(PRODUCTS, lambda: products(x, weight))

    def products(x: Tensor, weight: Tensor) -> Tensor:
        each = [
            ops.matmul(_rows(ops, x, rows), ops.transpose(_matrix(ops, weight, group), 0, 1)) for group, rows in slices
        ]
        return _cat(sizes.platform, each, (0, weight.shape[1]), x.dtype)

    def backward(grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = saved.tensors
        to_x = [ops.matmul(_rows(ops, grad, rows), _matrix(ops, weight, group)) for group, rows in slices]
        # All groups share one tensor of zeros; groups with rows replace their entry.
        to_weight = [ops.zeros(tuple(weight.shape[1:]), weight.dtype)] * len(sizes.host)
        for group, rows in slices:
            to_weight[group] = ops.matmul(ops.transpose(_rows(ops, grad, rows), 0, 1), _rows(ops, x, rows))
        matrices = [ops.unsqueeze(matrix, 0) for matrix in to_weight]
        return (
            _cat(sizes.platform, to_x, tuple(x.shape), x.dtype),
            _cat(sizes.platform, matrices, tuple(weight.shape), weight.dtype),
        )

    return sizes.platform.custom_function(forward, backward, x, weight)


def _rows(ops: Any, x: Tensor, rows: tuple[int, int]) -> Tensor:
    """Return (first row, number of rows) of `x` as a view."""
    return ops.narrow(x, 0, *rows)


def _matrix(ops: Any, weight: Tensor, group: int) -> Tensor:
    return ops.squeeze(ops.narrow(weight, 0, group, 1), 0)


def _cat(platform: Platform, tensors: list[Tensor], empty_shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Concatenate along dimension 0; no tensors give an empty result of this shape."""
    return platform.ops.cat(tensors, 0) if tensors else platform.zeros(empty_shape, dtype)
