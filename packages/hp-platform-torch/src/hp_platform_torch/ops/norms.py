"""RMS normalization that saves its input and the reciprocal RMS of each row, as torch's own kernel on CUDA does.

On the CPU torch composes `rms_norm` of single operations, which save the normalized input in float32, and in 16 bits a
float32 copy of the input too: five times the input instead of once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from hp_dtensor.tensor.dtensor import DTensor
from hp_platform_torch.ops import ascend

Tensor = torch.Tensor
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_DTYPES = (*_WIDE, torch.float32, torch.float64)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Return `F.rms_norm` of the same arguments, with a backward that needs less memory where torch composes it."""
    # The compiler fuses torch's composition. What follows would end its graph.
    if torch.compiler.is_compiling() or not _is_local(input, normalized_shape, weight):
        return F.rms_norm(input, normalized_shape, weight, eps)
    by_ascend = weight is not None and eps is not None and ascend.takes_rms_norm(input, weight)
    if not (by_ascend or _is_ours(input, weight, eps)):
        return F.rms_norm(input, normalized_shape, weight, eps)
    if has_torch_function((input, weight)):
        # A mode, since no class of the operands overrides functions: it calls this function again.
        noted: Tensor = handle_torch_function(rms_norm, (input, weight), input, normalized_shape, weight, eps)
        return noted
    if by_ascend:
        assert weight is not None
        assert eps is not None
        return ascend.rms_norm(input.as_subclass(Tensor), weight.as_subclass(Tensor), eps)
    # Backward must read the local data of DTensors, and runs where their operations are intercepted.
    local = [x.as_subclass(Tensor) if isinstance(x, DTensor) else x for x in (input, weight)]
    normalized: Tensor = _RMSNorm.apply(*local, eps)  # type: ignore[no-untyped-call]
    return normalized


def _is_local(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None) -> bool:
    """Return True for local operands, a normalization over the last dimension, and a weight of its size or none."""
    return (
        x.dim() > 0
        and tuple(normalized_shape) == tuple(x.shape[-1:])
        and (weight is None or weight.shape == x.shape[-1:])
        and not _is_overridden(x)
        and not _is_overridden(weight)
    )


def _is_overridden(x: Tensor | None) -> bool:
    """Return whether functions of torch on `x` go to its class.

    `has_torch_function` is also True in every mode, but a mode, such as that of a recording, must not change a kernel.
    """
    if x is None or type(x) in (Tensor, torch.nn.Parameter):
        return False
    own = type(x).__torch_function__ is not torch._C._disabled_torch_function_impl
    return own and torch._C._is_torch_function_enabled()


def _is_ours(x: Tensor, weight: Tensor | None, eps: float | None) -> bool:
    if not torch.is_grad_enabled() or not (x.requires_grad or (weight is not None and weight.requires_grad)):
        return False
    return (
        x.device.type == "cpu"
        and x.dtype in _DTYPES
        and (weight is None or weight.dtype is x.dtype)
        and eps is not None
        # Compositions have what this function lacks: rules for `torch.func` and derivatives of forward mode.
        and not torch._C._are_functorch_transforms_active()
        and torch.autograd.forward_ad._current_level < 0
    )


def _reciprocal_rms(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = x.to(_WIDE.get(x.dtype, x.dtype))
        reciprocal = _reciprocal_rms(wide, eps)
        ctx.save_for_backward(x, weight, reciprocal)
        ctx.eps = eps
        result = wide * reciprocal
        return (result if weight is None else result.mul_(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, reciprocal = ctx.saved_tensors
        wide, grad = x.to(reciprocal.dtype), grad.to(reciprocal.dtype)
        if torch.is_grad_enabled():
            # Computed again, because a second derivative also passes through the reciprocal.
            reciprocal = _reciprocal_rms(wide, ctx.eps)
        normalized = wide * reciprocal
        product = grad * normalized
        of_input = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = product.sum_to_size(weight.shape).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            scaled, product = (grad, product) if weight is None else (grad * weight, product * weight)
            # y = x / rms(x) does not depend on the length of x: the gradient has no part along y.
            of_input = (torch.addcmul(scaled, normalized, product.mean(-1, keepdim=True), value=-1) * reciprocal).to(
                x.dtype
            )
        return of_input, of_weight, None
