"""Rules of pointwise operations: every dimension may be sharded, broadcast dimensions aside.

A linear operation keeps partial operands partial. The sum of two tensors is partial only if both are, and a product
only if one of them is: with x = sum x_r and y = sum y_r, x y is not the sum of x_r y_r. torch's own rules agree.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hp_dtensor.platform.interface import Platform
from hp_dtensor.rules.factors import Factorization, PartialResults
from hp_dtensor.rules.registry import DATA_DEPENDENT, OpCall, Rule, RuleRegistry, dim_factors
from hp_dtensor.spec.tensor_spec import TensorSpec

NONLINEAR = (
    "exp log log2 log10 log1p expm1 sqrt rsqrt abs sin cos tan asin acos atan sinh cosh tanh erf erfc sigmoid relu "
    "relu6 silu gelu mish softplus elu leaky_relu hardtanh hardsigmoid hardswish selu celu logsigmoid log_sigmoid "
    "isfinite isnan isinf logical_not bitwise_not sign floor ceil round trunc frac reciprocal square clamp "
    "clamp_min clamp_max nan_to_num pow eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or "
    "bitwise_xor "
    "maximum minimum fmod remainder atan2 floor_divide masked_fill zeros_like ones_like empty_like full_like "
    "lerp addcmul addcdiv acosh asinh atanh exp2 erfinv lgamma digamma i0 sinc sgn signbit deg2rad rad2deg logit "
    "softsign softshrink hardshrink tanhshrink threshold heaviside hypot logaddexp logaddexp2 copysign xlogy "
    "nextafter isclose float_power fmax fmin ldexp bitwise_left_shift bitwise_right_shift int long bool "
    "short byte char gcd lcm igamma igammac isneginf isposinf isreal mvlgamma polygamma special_airy_ai "
    "special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t "
    "special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr "
    "special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e "
    "special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 "
    "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtr special_ndtri "
    "special_polygamma special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 "
    "special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u "
    "special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 "
    "special_xlog1py special_zeta fill"
)
LINEAR_UNARY = "neg clone contiguous positive cast float double half bfloat16"
NO_IN_PLACE = frozenset(
    "isfinite isnan isinf zeros_like ones_like empty_like full_like maximum minimum fmax fmin isclose signbit "
    "int long bool short byte char gelu mish softplus softsign softshrink hardshrink tanhshrink logsigmoid "
    "log_sigmoid logaddexp logaddexp2 isneginf isposinf isreal fill".split()
)


def register(registry: RuleRegistry) -> None:
    nonlinear, unary = pointwise(None), pointwise("unary")
    registry.register(NONLINEAR, "input ...", nonlinear, by_type=True)
    registry.register(LINEAR_UNARY, "input ...", unary)
    registry.register("detach", "input ...", unary, view=True)
    registry.register("alias", "input ...", unary, view=True, variants="_copy")
    registry.register("conj real imag", "input", unary, view=True)
    registry.register("conj_physical resolve_conj resolve_neg cfloat cdouble chalf", "input ...", unary)
    registry.register("angle", "input", nonlinear)
    registry.register("complex", "real imag", pointwise("add"))
    registry.register("polar", "abs angle", nonlinear)
    registry.register("to type_as type", "input other=None ...", _converted)
    registry.register("add sub", "input other ...", pointwise("add"), by_type=True, variants="_")
    registry.register("mul", "input other ...", pointwise("mul"), by_type=True)
    registry.register("div", "input other ...", pointwise("div"), by_type=True, variants="_")
    registry.register("true_divide", "input other ...", pointwise("div"), by_type=True)
    registry.register("where", "condition input=None other=None", _where, by_type=True, data_dependent=True)
    registry.register("rsub", "input other ...", pointwise("add"), by_type=True)
    registry.register("frexp", "input", _frexp)
    names = [name for name in NONLINEAR.split() if name not in NO_IN_PLACE and not name.startswith("special_")]
    written = " ".join(f"{name}_" for name in names)
    registry.register(f"{written} fill_", "input ...", nonlinear, in_place=True, by_type=True)
    registry.register("neg_ zero_", "input", unary, in_place=True)
    registry.register("mul_", "input other", pointwise("mul"), in_place=True, by_type=True)
    registry.register("prelu", "input weight", _prelu)
    registry.register("copy_", "input other non_blocking=False", _copied, in_place=True)


def pointwise(linearity: str | None) -> Rule:
    """Return the rule of a pointwise operation that is linear as `unary`, `add`, `mul`, `div` or `where`; None: not."""

    def rule(call: OpCall) -> Factorization:
        shape = call.broadcast_shape(call.tensors)
        output, sizes = dim_factors("d", shape)
        inputs = tuple(call.broadcast_factors("the shape", spec.shape, shape, output) for spec in call.tensors)
        terms = _terms(linearity, len(call.tensors))
        # `2 / x` is not linear in x, and neither is a rounded quotient.
        is_rounded = call.arguments.get("rounding_mode") is not None
        if linearity == "div" and (is_rounded or not isinstance(call["input"], TensorSpec)):
            terms = None
        return Factorization(inputs, (output,), sizes, partial=PartialResults(terms=terms))

    return rule


def _frexp(call: OpCall) -> Factorization:
    rule = pointwise(None)(call)
    return replace(rule, outputs=rule.outputs * 2)


def _prelu(call: OpCall) -> Factorization:
    """Apply one slope for each channel (dimension 1), or one for all."""
    shape, weight = (spec.shape for spec in call.tensors)
    dims, sizes = dim_factors("d", shape)
    if math.prod(weight) == 1:
        return Factorization((dims, ((),) * len(weight)), (dims,), sizes)
    if weight != shape[1:2]:
        raise call.refuse(
            f"expected one slope per channel (dimension 1 of {list(shape)}), got the shape {list(weight)}"
        )
    return Factorization((dims, dims[1:2]), (dims,), sizes)


def _where(call: OpCall) -> Factorization:
    if call["other"] is None:
        raise call.refuse(DATA_DEPENDENT)
    return pointwise("where")(call)


def _copied(call: OpCall) -> Factorization:
    """Copy partial values into a partial tensor as they are, unless that rounds them to integers."""
    first, *others = call.tensors
    rounded = any(rounds(call.platform, other.dtype, first.dtype) for other in others)
    return pointwise("add" if others and not rounded else None)(call)


def rounds(platform: Platform, dtype: Any, wanted: Any) -> bool:
    """Return whether casting partial values from `dtype` to `wanted` before their sum may change the result."""
    # Floating-point casts round too, but so does every sum: the difference is that of another order of operations.
    # Rounding 0.5 + 0.5 to integers before the sum gives 0, and a sum of booleans is no boolean.
    if platform.is_floating(wanted):
        return False
    to_truth = platform.dtype_name(wanted) == "bool" != platform.dtype_name(dtype)
    return to_truth or platform.is_floating(dtype)


def _converted(call: OpCall) -> Factorization:
    """Cast to a dtype, or to the dtype of another tensor, whose shape and placements do not matter."""
    rule = pointwise("unary")(OpCall(call.name, call.arguments, call.tensors[:1]))
    if len(call.tensors) == 1:
        return rule
    first, other = call.tensors
    dims, sizes = dim_factors("other", other.shape)
    rounded = rounds(call.platform, first.dtype, other.dtype)
    return replace(
        rule,
        inputs=(*rule.inputs, dims),
        sizes={**rule.sizes, **sizes},
        limits=replace(rule.limits, fixed=frozenset(sizes)),
        partial=replace(rule.partial, terms=None if rounded else rule.partial.terms),
        operands=replace(rule.operands, ignored=frozenset({1})),
    )


def _terms(linearity: str | None, tensors: int) -> tuple[frozenset[int], ...] | None:
    """Return the output as a sum of products of inputs (`PartialResults.terms`), or None if it is not linear."""
    match linearity, tensors:
        case ("unary", 1) | ("mul", 1) | ("div", 1):
            return (frozenset({0}),)
        # One product: it is partial if exactly one of its operands is.
        case ("mul", 2):
            return (frozenset({0, 1}),)
        # Two summands: the sum is partial if both are.
        case ("add", 2):
            return (frozenset({0}), frozenset({1}))
        # Linear in the dividend only.
        case ("div", 2):
            return (frozenset({0}),)
        # Both choices must be partial: a rank that contributes to one contributes nothing where the other is chosen.
        case ("where", 3):
            return (frozenset({1}), frozenset({2}))
    return None
