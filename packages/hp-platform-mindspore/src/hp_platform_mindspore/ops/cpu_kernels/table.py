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

_IMAGES = "index the windows and use matmul, sum or amax"
_SORTED = "sort along the dimension and pick by position"
NOT_COMPOSED: dict[str, str] = {
    **{f"{kind}{n}d": _IMAGES for kind in ("conv", "conv_transpose", "max_pool", "avg_pool") for n in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{n}d": _IMAGES for kind in ("avg", "max") for n in (1, 2, 3)},
    **dict.fromkeys(("im2col", "col2im"), _IMAGES),
    "interpolate": "multiply each dimension by a matrix of weights",
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
