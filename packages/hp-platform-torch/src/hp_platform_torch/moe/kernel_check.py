"""A check of the fused experts against plain products, once for each kind of device and shape, before they are used.

A compiler that is new to a device has been seen to give wrong gradients in silence; a fault found here is a warning,
and the layer runs on torch's own products.
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

# Measured: 4e-3 for bfloat16 and 5e-4 for float16, on an H100, as the norm of the difference over the norm.
_LARGEST_ERROR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Kind:
    """Everything that decides which code a compiler makes of the kernels.

    Attributes:
        score_before: as in `GroupedExperts`; None: results are not weighted.
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
    """`fused_experts` where it applies and has passed its check; else None."""
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
        # Products of float32 are quicker by the device's own library: measured 68 ms against 50.
        and x.dtype in (torch.bfloat16, torch.float16)
        and permutation.keys.numel() < 2**31
        and all(weight.dtype == x.dtype and weight.numel() > 0 for weight in weights)
        and permutation.num_copies > 0
        and not torch.compiler.is_compiling()
    )


def _passes(kind: Kind, platform: Platform) -> bool:
    """Tell if results and gradients of a small layer of this kind are those of plain products."""
    if kind not in _passed:
        if kind.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # A check waits for the device, which would end the capture.
            return False
        _passed[kind] = _check(kind, platform)
    return _passed[kind]


def _check(kind: Kind, platform: Platform) -> bool:
    try:
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
    """Norm of the difference over the norm, the largest of the output's and of all gradients'; infinite for NaN.

    The layer has two experts with rows that fill no tile, and one without rows.
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
    """`[tokens, dim]`, in twice the precision: each expert that has rows on every token."""
    wide = torch.float64 if x.dtype == torch.float32 else torch.float32
    x, (w1, w2, w3) = x.to(wide), (weight.to(wide) for weight in weights)
    factors = torch.ones(experts.shape, dtype=wide, device=x.device) if scores is None else scores.to(wide)
    out = torch.zeros_like(x)
    for expert in (0, 2):
        of_slots = torch.where(experts == expert, factors, 0.0)
        # A score inside the activation is one of a slot; those behind it add up.
        for factor in of_slots.split(1, 1) if score_before else (of_slots.sum(1, keepdim=True),):
            rows = x * factor if score_before else x
            results = (F.silu(rows @ w1[expert].T) * (rows @ w3[expert].T)) @ w2[expert].T
            out = out + (results if score_before else results * factor)
    return out


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
