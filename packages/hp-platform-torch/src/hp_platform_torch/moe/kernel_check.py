"""Check of the fused experts against unfused matrix products, before the first use of each device, dtype and shape.

Triton has been seen to compile kernels with wrong gradients, without an error, for a device that it supported only
recently. If the check fails, a warning is issued and the layer uses torch's own grouped products.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hp_dtensor.parallel.recompute import saved_value
from hp_dtensor.platform.interface import Platform
from hp_moe import GroupSizes, TokenPermutation
from hp_platform_torch.moe.fused_experts import fused_experts, order_rows
from hp_platform_torch.moe.tile_sizes import TileSizes, choose_tile_sizes

# Tolerances of the relative error (norm of the difference over the norm). Measured on an H100: 4e-3 for bfloat16 and
# 5e-4 for float16.
_LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Kind:
    """The arguments that the compiled code of the kernels depends on.

    Attributes:
        score_before: `score_before_experts` of `GroupedExperts`; None without scores.
    """

    device: torch.device
    dtype: torch.dtype
    dim: int
    hidden_dim: int
    num_slots: int
    score_before: bool | None
    tiles: TileSizes


_passed: dict[Kind, bool] = {}


def checked_fused_experts(
    x: torch.Tensor,
    permutation: TokenPermutation,
    sizes: GroupSizes,
    scores: torch.Tensor | None,
    weights: tuple[torch.Tensor, ...],
    score_before_experts: bool,
) -> torch.Tensor | None:
    """Apply `fused_experts`. Return None if the inputs are not supported or the kernels failed their check."""
    if not _applies(x, permutation, weights):
        return None
    tiles = choose_tile_sizes(x, permutation.num_copies, len(sizes))
    _, hidden_dim, dim = weights[0].shape
    score_before = None if scores is None else score_before_experts
    kind = Kind(x.device, x.dtype, dim, hidden_dim, permutation.num_slots, score_before, tiles)
    if not _passes(kind, permutation.platform):
        return None
    order = saved_value(lambda: order_rows(permutation, len(sizes)))
    return fused_experts(x, order, sizes.tensor, scores, weights, score_before_experts, tiles)


def _applies(x: torch.Tensor, permutation: TokenPermutation, weights: tuple[torch.Tensor, ...]) -> bool:
    return (
        x.is_cuda
        # For float32 the device's own library is faster: measured 50 ms, and 68 ms with the kernels.
        and x.dtype in (torch.bfloat16, torch.float16)
        # Slots and rows are int32 in the kernels.
        and permutation.keys.numel() < 2**31
        and all(weight.dtype == x.dtype and weight.numel() > 0 for weight in weights)
        and permutation.num_copies > 0
        and not torch.compiler.is_compiling()
    )


def _passes(kind: Kind, platform: Platform) -> bool:
    """Return whether the kernels of this kind are correct, by a check on a small layer at the first call."""
    if kind not in _passed:
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # The check synchronizes with the device, which is an error while a CUDA graph is captured. The result is
            # not cached, so that a later call outside of a capture checks.
            return False
        _passed[kind] = _check(kind, platform)
    return _passed[kind]


def _check(kind: Kind, platform: Platform) -> bool:
    try:
        # The caller may be in evaluation, but the check compares gradients.
        with torch.inference_mode(False), torch.enable_grad():
            error = largest_error(kind, platform)
    except Exception as failure:  # compilers and drivers raise errors of any class
        reason = f"{type(failure).__name__}: {failure}"
    else:
        if error <= _LARGEST_ERROR[kind.dtype]:
            return True
        reason = f"relative error {error:.1e}, expected at most {_LARGEST_ERROR[kind.dtype]:.0e}"
    warnings.warn(
        f"hp-platform-torch: the Triton kernels failed their check on {_name(kind.device)} for experts of dim "
        f"{kind.dim}, hidden_dim {kind.hidden_dim} in {kind.dtype}: {reason}. torch's grouped products are used "
        "instead, which is slower; please report it",
        stacklevel=2,
    )
    return False


def largest_error(kind: Kind, platform: Platform) -> float:
    """Return the largest relative error of the output and of all gradients of a small layer; infinity for NaN.

    The error is the norm of the difference divided by the norm. The layer has two experts with a partly filled last
    tile, and one without rows.
    """
    tokens, device = kind.tiles.rows + kind.tiles.rows // 2 + 3, kind.device
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, grad = normal(tokens, kind.dim).to(kind.dtype), normal(tokens, kind.dim).to(kind.dtype)
    shapes = ((3, kind.hidden_dim, kind.dim), (3, kind.dim, kind.hidden_dim), (3, kind.hidden_dim, kind.dim))
    weights = tuple((normal(*shape) / shape[2] ** 0.5).to(kind.dtype).requires_grad_() for shape in shapes)
    leaves, scores = [x.requires_grad_(), *weights], None
    if kind.score_before is not None:
        scores = (torch.rand((tokens, kind.num_slots), generator=generator, device=device) + 0.5).requires_grad_()
        leaves.append(scores)
    # Experts 0 and 2 only: expert 1 has no rows, and a token may have the same expert in two slots.
    experts = 2 * torch.randint(2, (tokens, kind.num_slots), generator=generator, device=device)
    order = order_rows(TokenPermutation(platform, experts, experts.numel()), 3)
    counts = torch.bincount(experts.reshape(-1), minlength=3)
    y = fused_experts(x, order, counts, scores, weights, bool(kind.score_before), kind.tiles)
    plain = _plain(x, experts, scores, weights, bool(kind.score_before))
    got = (y, *torch.autograd.grad(y, leaves, grad))
    expected = (plain, *torch.autograd.grad(plain, leaves, grad.to(plain.dtype)))
    errors = [(a - b).norm() / b.norm() for a, b in zip(got, expected, strict=True)]
    return float(torch.stack(errors).detach().nan_to_num(nan=torch.inf).max())


def _plain(
    x: torch.Tensor,
    experts: torch.Tensor,
    scores: torch.Tensor | None,
    weights: tuple[torch.Tensor, ...],
    score_before: bool,
) -> torch.Tensor:
    """Return the reference output `[tokens, dim]` in twice the precision, computing each expert on every token."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    x, (w1, w2, w3) = x.to(wide), (weight.to(wide) for weight in weights)
    factors = torch.ones(experts.shape, dtype=wide, device=x.device) if scores is None else scores.to(wide)
    out = torch.zeros_like(x)
    for expert in (0, 2):
        of_slots = torch.where(experts == expert, factors, 0.0)
        # Scores of results may be summed over the slots of an expert. Scores of inputs may not, since the activation is
        # not linear.
        for factor in of_slots.split(1, 1) if score_before else (of_slots.sum(1, keepdim=True),):
            rows = x * factor if score_before else x
            results = (F.silu(rows @ w1[expert].T) * (rows @ w3[expert].T)) @ w2[expert].T
            out = out + (results if score_before else results * factor)
    return out


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
