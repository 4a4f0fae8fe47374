"""All kernels of this folder by canonical (torch) name, and the operations that are deliberately not composed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_dtensor.exceptions import CapabilityError
from hp_platform_mindspore.ops.cpu_kernels import (
    creation,
    nn,
    pointwise,
    products,
    reductions,
    scattering,
    shapes,
)

KERNELS: dict[str, Callable[..., Any]] = {
    **creation.KERNELS,
    **pointwise.KERNELS,
    **shapes.KERNELS,
    **reductions.KERNELS,
    **products.KERNELS,
    **nn.KERNELS,
    **scattering.KERNELS,
}
"""By canonical name, on plain tensors, with torch's order of arguments."""

_POOLS = "pool rows and columns with max_pool1d and max_pool2d, or take the mean of slices"
_SORTED = "sort along the dimension and pick by position"
NOT_COMPOSED: dict[str, str] = {
    "conv3d": "apply conv2d to slices and add",
    **{f"conv_transpose{n}d": "multiply by a matrix of the kernel" for n in (1, 2, 3)},
    "max_pool3d": _POOLS,
    **{f"{kind}_pool{n}d": _POOLS for kind in ("avg", "adaptive_avg") for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": f"use max_pool{n}d with the kernel size that gives the wanted size" for n in (1, 2)},
    "adaptive_max_pool3d": _POOLS,
    "interpolate": "multiply each dimension by a matrix of weights",
    **dict.fromkeys(("im2col", "col2im"), "index the windows and use matmul"),
    **dict.fromkeys(("median", "nanmedian", "mode", "kthvalue", "quantile", "nanquantile"), _SORTED),
    **dict.fromkeys(("cummax", "cummin"), "use amax or amin of slices"),
    **dict.fromkeys(("scatter_reduce", "index_reduce"), "use scatter_add or index_add for sums"),
    "index_copy": "use scatter",
    "index_fill": "use masked_fill",
    "unique_consecutive": "compare neighbours",
}
"""Operations with a sharding rule that MindSpore's CPU lacks and that are not composed; what to use instead."""


def check_composed(name: str) -> None:
    """Refuse an operation that has neither a kernel of MindSpore on CPU nor one here.

    Raises:
        CapabilityError: it is in `NOT_COMPOSED`.
    """
    if name in NOT_COMPOSED:
        raise CapabilityError(
            f"{name} of DTensors is not composed for MindSpore's CPU, which lacks kernels for it. Run it on Ascend, if "
            f"MindSpore has it there, or on the torch platform; here, {NOT_COMPOSED[name]}"
        )
