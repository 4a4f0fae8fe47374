"""Operations of expert layers on torch that `plugin` gives to hp-moe: products, fused experts, the wire format fp8."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from hp_moe import FusedExperts, GroupSizes, TokenPermutation, loop_grouped_matmul
from hp_platform_torch.moe.host_experts import host_experts
from hp_platform_torch.ops import ascend

_GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STRIDE_BYTES = 16


class Float8Format:
    """8-bit floating point. A block's scale maps its largest magnitude to that of the format, 448."""

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = blocks.abs().amax(2, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        # A block of zeros has a scale of zero and is divided by one instead.
        codes = (blocks / torch.where(scales > 0, scales, 1.0)).to(torch.float8_e4m3fn)
        # gloo does not support 8-bit floating-point tensors.
        return codes.view(torch.int8), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).to(scales.dtype) * scales


def torch_fused_experts() -> FusedExperts:
    """Return Triton kernels for CUDA (if Triton is installed) and a loop for the CPU."""
    # Importing Triton takes a third of a second, for which a process without CUDA has no use.
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return experts_of_host
    from hp_platform_torch.moe.fused_experts import checked_fused_experts

    def experts_of_device(x: torch.Tensor, *args: Any) -> torch.Tensor | None:
        return checked_fused_experts(x, *args) if x.is_cuda else experts_of_host(x, *args)

    return experts_of_device


def experts_of_host(
    x: torch.Tensor, permutation: TokenPermutation, sizes: GroupSizes, scores: Any, weights: Any, score_before: bool
) -> torch.Tensor | None:
    """Apply `host_experts` to float32 or float64 on the CPU; return None for other inputs."""
    applies = (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and all(weight.dtype == x.dtype for weight in weights)
        and not torch.compiler.is_compiling()
    )
    return host_experts(x, permutation, sizes, scores, weights, score_before) if applies else None


def torch_grouped_matmul(x: torch.Tensor, weight: torch.Tensor, sizes: GroupSizes) -> torch.Tensor:
    """Apply `F.grouped_mm`, or a loop for inputs that it does not support (float64, unaligned widths, no rows).

    On Ascend, torch_npu's grouped product takes the place of `F.grouped_mm`.
    """
    if ascend.takes_grouped_matmul(x, weight):
        return ascend.grouped_matmul(x, weight, sizes.tensor)
    if not _fits(x, weight):
        looped: torch.Tensor = loop_grouped_matmul(x, weight, sizes)
        return looped
    product = F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=sizes.offsets)
    if product.requires_grad:
        # The backward of `grouped_mm` does not support gradients with expanded strides, such as that of a sum.
        product.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
    return product


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    groups, out_features, in_features = weight.shape
    widths = (out_features * x.element_size(), in_features * x.element_size())
    return (
        x.dtype in _GROUPED_MM_DTYPES
        # On CUDA, float32 has no kernel of its own.
        and (x.device.type == "cpu" or (x.device.type == "cuda" and x.dtype == torch.bfloat16))
        and groups > 0
        # Tensors without elements may have any strides.
        and x.shape[0] > 0
        and all(width > 0 and width % _STRIDE_BYTES == 0 for width in widths)
    )
