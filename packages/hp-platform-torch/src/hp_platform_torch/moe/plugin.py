"""The hooks with which torch's platform serves hp-moe; loaded through the entry-point group `hp_moe`."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F

from hp_dtensor.platform.interface import Platform
from hp_moe import FusedExperts, GroupedMatmul, GroupSizes, TokenPermutation, loop_grouped_matmul
from hp_moe.plugins import hookimpl
from hp_platform_torch.moe.host_experts import host_experts

_GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STRIDE_BYTES = 16


@hookimpl
def hp_grouped_matmul(platform: Platform) -> GroupedMatmul | None:
    """torch's `grouped_mm` where it applies, for torch's platform only."""
    return torch_grouped_matmul if platform.name == "torch" else None


@hookimpl
def hp_fused_experts(platform: Platform) -> FusedExperts | None:
    """Triton kernels on CUDA devices where triton is, and a loop in one node on the CPU; for torch's platform only."""
    if platform.name != "torch":
        return None
    if importlib.util.find_spec("triton") is None:
        return experts_of_host
    from hp_platform_torch.moe.kernel_check import checked_fused_experts

    def experts_of_device(x: torch.Tensor, *args: Any) -> torch.Tensor | None:
        return checked_fused_experts(x, *args) if x.is_cuda else experts_of_host(x, *args)

    return experts_of_device


@hookimpl
def hp_wire_format(platform: Platform, name: str) -> Any | None:
    """`fp8`: torch's `float8_e4m3fn`, for torch's platform only."""
    return Float8Format() if platform.name == "torch" and name == "fp8" else None


class Float8Format:
    """8-bit floating point with a scale that brings a block's largest magnitude to the format's, 448."""

    def encode(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = blocks.abs().amax(2, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        # A block of zeros has a scale of zero; any divisor does.
        codes = (blocks / torch.where(scales > 0, scales, 1.0)).to(torch.float8_e4m3fn)
        # gloo takes no 8-bit floating point.
        return codes.view(torch.int8), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.float8_e4m3fn).to(scales.dtype) * scales


def experts_of_host(
    x: torch.Tensor, permutation: TokenPermutation, sizes: GroupSizes, scores: Any, weights: Any, score_before: bool
) -> torch.Tensor | None:
    """`host_experts` for float32 and float64 on the CPU; else None."""
    applies = (
        x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and all(weight.dtype == x.dtype for weight in weights)
        and not torch.compiler.is_compiling()
    )
    return host_experts(x, permutation, sizes, scores, weights, score_before) if applies else None


def torch_grouped_matmul(x: torch.Tensor, weight: torch.Tensor, sizes: GroupSizes) -> torch.Tensor:
    """`F.grouped_mm`, or the loop for what it refuses (float64, odd widths, no row or no group at all)."""
    if not _fits(x, weight):
        looped: torch.Tensor = loop_grouped_matmul(x, weight, sizes)
        return looped
    product = F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=sizes.offsets)
    if product.requires_grad:
        # The backward refuses a gradient with expanded strides, such as a sum's.
        product.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
    return product


def _fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    groups, out_features, in_features = weight.shape
    widths = (out_features * x.element_size(), in_features * x.element_size())
    return (
        x.dtype in _GROUPED_MM_DTYPES
        # float32 has no CUDA kernel behind it.
        and (x.device.type == "cpu" or x.dtype == torch.bfloat16)
        and groups > 0
        # Tensors without elements may have any strides.
        and x.shape[0] > 0
        and all(width > 0 and width % _STRIDE_BYTES == 0 for width in widths)
    )
