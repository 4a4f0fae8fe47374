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

_POOLS = "pool rows and columns with the 1-d and 2-d pools"
NOT_COMPOSED: dict[str, str] = {
    "conv3d": "apply conv2d to slices and add",
    **{f"conv_transpose{n}d": "resize with interpolate and apply conv1d or conv2d" for n in (1, 2, 3)},
    **{f"{kind}_pool3d": _POOLS for kind in ("max", "avg", "adaptive_avg", "adaptive_max")},
    **{f"adaptive_max_pool{n}d": f"use max_pool{n}d with the kernel size that gives the wanted size" for n in (1, 2)},
    **dict.fromkeys(("im2col", "col2im"), "index the windows and use matmul"),
}
"""Operations with a sharding rule that MindSpore's CPU lacks and that are not composed; what to use instead."""


def check_composed(name: str) -> None:
    """Refuse an operation that has neither a kernel of MindSpore on CPU nor one here.

    Raises:
        CapabilityError: it is in `NOT_COMPOSED`.
    """
    if name in NOT_COMPOSED:
        raise CapabilityError(
            f"{name} of DTensors does not work on MindSpore's CPU, which lacks kernels for it; it works on Ascend and "
            f"on the torch platform. On this CPU, {NOT_COMPOSED[name]}"
        )
