"""MindSpore's own functions by canonical name, where they work on its CPU as they are.

They consist of primitives, so they take DTensors by the primitives' rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import mint, ops

from hp_platform_mindspore.cpu_kernels.shapes import tensor_split

F = mint.nn.functional

_OF_MINT = """
    expm1 erf erfc sinh cosh tan sinc floor ceil trunc log1p reciprocal isnan isinf sign round atanh erfinv fmod
    remainder
    xlogy logical_xor isclose nan_to_num lerp ravel t swapaxes concat hstack dstack
    diff
"""
_OF_OPS = """
    exp2 asinh atan deg2rad rad2deg softsign tanhshrink frac i0 positive relu6 elu celu mish softplus hardtanh
    log2 log10 lgamma digamma sgn signbit acos asin acosh atan2 fmax logaddexp2 hypot true_divide bitwise_and bitwise_or
    bitwise_xor bitwise_left_shift bitwise_right_shift heaviside nextafter ldexp addcmul addcdiv type_as
    inner kron addmv addbmm addr adjoint movedim moveaxis fliplr flipud rot90 vstack column_stack atleast_2d
    pixel_shuffle pixel_unshuffle
"""
_OF_F = "hardswish hardsigmoid hardshrink softshrink glu broadcast_to"
_METHODS = "float double int long short bool byte half bfloat16 contiguous to type view new_zeros new_ones new_empty"

FOUND: dict[str, Callable[..., Any]] = {
    **{name: getattr(mint, name) for name in _OF_MINT.split()},
    **{name: getattr(ops, name) for name in _OF_OPS.split()},
    **{name: getattr(F, name) for name in _OF_F.split()},
    **{name: (lambda x, *args, name=name: getattr(x, name)(*args)) for name in _METHODS.split()},
    "flatten": mint.flatten,
    "tensor_split": tensor_split,
    "hsplit": lambda x, parts: tensor_split(x, parts, 0 if x.ndim == 1 else 1),
    "vsplit": lambda x, parts: tensor_split(x, parts, 0),
}
