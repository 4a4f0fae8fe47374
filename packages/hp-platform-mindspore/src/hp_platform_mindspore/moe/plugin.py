"""The plugin for hp-moe, loaded through the entry-point group `hp_moe`: grouped matrix products on Ascend.

Importing this module imports no framework: MindSpore is imported when a product is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hp_dtensor.platform.interface import Platform
from hp_moe.plugins import hookimpl

if TYPE_CHECKING:
    from hp_moe import GroupedMatmul, GroupSizes

Tensor = Any

_DTYPES = ("float16", "bfloat16", "float32")
_MOST_GROUPS = 1024


@hookimpl
def hp_grouped_matmul(platform: Platform) -> GroupedMatmul | None:
    """Return CANN's grouped product; None for other platforms, and on the CPU, which has no such kernel."""
    if platform.name != "mindspore" or platform.device_types[0] != "npu":
        return None
    return ascend_grouped_matmul


def ascend_grouped_matmul(x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """Apply `grouped_matmul_v4`, or a loop for inputs that it does not support (no rows, other dtypes)."""
    from mindspore.ops import auto_generate

    from hp_moe import loop_grouped_matmul

    platform, ops = sizes.platform, sizes.platform.ops
    fits = platform.dtype_name(x.dtype) in _DTYPES and x.dtype == weight.dtype
    if not (fits and 0 < len(sizes) <= _MOST_GROUPS and x.size > 0 and weight.size > 0):
        return loop_grouped_matmul(x, weight, sizes)
    matrices = ops.transpose(weight, 1, 2)
    if platform.requires_grad(matrices):
        # The documentation of the kernel does not say that groups without rows have gradients of zero.
        is_empty = ops.reshape(sizes.tensor == 0, (len(sizes), 1, 1))
        matrices.register_hook(lambda grad: ops.masked_fill(grad, is_empty, 0.0))
    # A single tensor with rows of all groups (split_item 3, group_type 0), and the sizes themselves as the list
    # (group_list_type 1). Only this form has gradients.
    return auto_generate.grouped_matmul_v4(
        [x], [matrices], group_list=sizes.tensor, split_item=3, group_type=0, group_list_type=1
    )[0]
