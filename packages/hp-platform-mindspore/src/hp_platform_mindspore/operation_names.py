"""MindSpore's primitives in terms of torch's operations: names, and arguments where their order differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspore import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

SAME_ARGUMENTS: dict[str, str] = {
    "AddScalar": "add",
    "SubScalar": "sub",
    "Sub": "sub",
    "Mul": "mul",
    "Muls": "mul",
    "Div": "div",
    "Divs": "div",
    "Pow": "pow",
    "PowTensorScalar": "pow",
    "PowScalarTensor": "pow",
    "FloorDiv": "floor_divide",
    "RemainderTensorScalar": "remainder",
    "RemainderTensorTensor": "remainder",
    "Neg": "neg",
    "Abs": "abs",
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Rsqrt": "rsqrt",
    "Reciprocal": "reciprocal",
    "Sin": "sin",
    "Cos": "cos",
    "Tanh": "tanh",
    "Erf": "erf",
    "Sigmoid": "sigmoid",
    "ReLU": "relu",
    "SiLU": "silu",
    "IsFinite": "isfinite",
    "Square": "square",
    "ClampScalar": "clamp",
    "ClampTensor": "clamp",
    "Maximum": "maximum",
    "Minimum": "minimum",
    "Equal": "eq",
    "NotEqual": "ne",
    "Less": "lt",
    "LessEqual": "le",
    "Greater": "gt",
    "GreaterEqual": "ge",
    "LogicalAnd": "logical_and",
    "LogicalOr": "logical_or",
    "LogicalNot": "logical_not",
    "BitwiseAndTensor": "bitwise_and",
    "BitwiseOrTensor": "bitwise_or",
    "Select": "where",
    "MaskedFillScalar": "masked_fill",
    "MaskedFill": "masked_fill",
    "ToDtype": "cast",
    "Clone": "clone",
    "ZerosLike": "zeros_like",
    "OnesLike": "ones_like",
    "StopGradient": "detach",
    "ReduceMax": "amax",
    "ReduceMin": "amin",
    "MatMulExt": "matmul",
    "BatchMatMulExt": "bmm",
    "Dense": "linear",
    "Softmax": "softmax",
    "LogSoftmax": "log_softmax",
    "FlattenExt": "flatten",
    "TExt": "t",
    "TransposeExtView": "transpose",
    "ExpandDims": "unsqueeze",
    "ExpandDimsView": "unsqueeze",
    "Concat": "cat",
    "SplitWithSizeView": "split",
    "ChunkView": "chunk",
    "NarrowView": "narrow",
    "UnstackExtView": "unbind",
    "ReverseV2": "flip",
    "GatherD": "gather",
    "IndexSelect": "index_select",
    "InplaceCopy": "copy_",
    **{
        name: name.lower()
        for name in """
            Expm1 Erfc Sinh Cosh Asinh Acosh Atanh Atan Asin Tan Sinc Softsign Floor Ceil Trunc ReLU6 Elu SeLU CeLU Mish
            Softplus Log1p Lgamma Digamma Sign IsInf Round Erfinv Logit Atan2 Fmax Hypot Xlogy IsClose Heaviside
            NextAfter Lerp Addcmul Addcdiv PReLU GLU Cdist Tile Triu Diagonal Scatter LogAddExp LogAddExp2
        """.split()
    },
    "ACos": "acos",
    "BesselI0": "i0",
    "HSwish": "hardswish",
    "HSigmoid": "hardsigmoid",
    "HShrink": "hardshrink",
    "SoftShrink": "softshrink",
    "Mod": "fmod",
    "FmodTensor": "fmod",
    "FmodScalar": "fmod",
    "LessScalar": "lt",
    "EqScalar": "eq",
    "NeScalar": "ne",
    "GreaterScalar": "gt",
    "GreaterEqualScalar": "ge",
    "LessEqualScalar": "le",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
    "LeftShift": "bitwise_left_shift",
    "RightShift": "bitwise_right_shift",
    "LogicalXor": "logical_xor",
    "NanToNum": "nan_to_num",
    "EmptyLike": "empty_like",
    "Narrow": "narrow",
    "NewZeros": "new_zeros",
    "NewOnes": "new_ones",
    "NewEmpty": "new_empty",
    "ProdExt": "prod",
    "Nansum": "nansum",
    "ReduceAll": "all",
    "ReduceAny": "any",
    "AnyExt": "any",
    "MaxDim": "max",
    "MinDim": "min",
    "Ger": "outer",
}


def _scaled_second(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """`add(x, y, alpha=a)` is `x + a * y`."""
    x, y, *rest = args
    alpha = rest[0] if rest else kwargs.get("alpha", 1)
    return (x, y if alpha == 1 else y * alpha), {}


def _without_dtype(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    names = ("dim", "keepdim", "dtype")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    if given.pop("dtype", None) is not None:
        raise TypeError("sum and mean of a DTensor take no dtype; cast before")
    return args[:1], given


def _by_axis(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    given = dict(zip(("axis", "keepdims"), args[1:], strict=False)) | kwargs
    axis = given.get("axis")
    return args[:1], {"dim": None if axis in ((), []) else axis, "keepdim": bool(given.get("keepdims", False))}


def _first_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return args[:2], {}


def _matmul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, y, *transposed = args
    x, y = (t.transpose(-2, -1) if flag else t for t, flag in zip((x, y), (*transposed, False, False), strict=False))
    return (x, y), {}


def _gather(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, index, dim, *_ = args
    return (x, dim, index), {}


def _even_pieces(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, piece, dim = args
    size = x.shape[dim]
    return (x, [min(piece, size - start) for start in range(0, size, piece)], dim), {}


def _topk(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return (args[0], args[1], -1), {}


def _variadic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """`x.reshape(2, 3)` is `reshape(x, (2, 3))`."""
    if len(args) == 2 and isinstance(args[1], (list, tuple)):
        return (args[0], tuple(args[1])), {}
    return (args[0], tuple(args[1:])), {}


def _squeeze(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dim = args[0], args[1] if len(args) > 1 else ()
    if dim in ((), [], None):
        dim = tuple(i for i, size in enumerate(x.shape) if size == 1)
    return (x, dim if isinstance(dim, int) else tuple(dim)), {}


def _all_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return args[:1], {"dim": tuple(range(args[0].ndim))}


def _axis_as_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return (args[0], int(args[1].asnumpy())), {}


def _spread(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dims, unbiased, keepdim = args
    return (x, tuple(dims) or None, unbiased, keepdim), {}


def _pad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, pads, value = args
    return (x, tuple(pads)), {"value": float(value.asnumpy())}


def _searched(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    boundaries, x, sorter, _, right = args
    if sorter is not None:
        raise TypeError("searchsorted of DTensors takes no sorter")
    return (boundaries, x), {"right": right}


def _slice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, begin, size = args
    return (x, tuple(slice(b, b + n) for b, n in zip(begin, size, strict=True))), {}


def _strided_slice(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, begin, end, strides, *masks = args
    if any(masks):
        raise TypeError("StridedSlice with masks on a DTensor: index it with [ ] instead")
    return (x, tuple(slice(*item) for item in zip(begin, end, strides, strict=True))), {}


def _equal_pieces(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dim, count = args
    return (x, [x.shape[dim] // count] * count, dim), {}


_REDUCTIONS = {0: "sum", 1: "mean", 2: "none"}


def _loss(*names: str) -> Adapter:
    """`loss(input, target, *names, reduction)`."""

    def adapt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        x, target, *values, reduction = args
        given = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        return (x, target), {"reduction": _REDUCTIONS[reduction], **given}

    return adapt


def _likelihood(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """MindSpore makes weights of one for a call that gives none."""
    x, target, weight, reduction, ignore_index = args
    plain = type(weight) is Tensor and bool((weight.asnumpy() == 1).all())
    options = {"reduction": _REDUCTIONS[reduction], "ignore_index": ignore_index}
    return (x, target), options if plain else {"weight": weight, **options}


def _all_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return args, kwargs


Adapter = Callable[[tuple[Any, ...], dict[str, Any]], Arguments]

ADAPTED: dict[str, tuple[str, Adapter]] = {
    "AddExt": ("add", _scaled_second),
    "SubExt": ("sub", _scaled_second),
    "SumExt": ("sum", _without_dtype),
    "MeanExt": ("mean", _without_dtype),
    "DeprecatedSum": ("sum", _by_axis),
    "ReduceSum": ("sum", _by_axis),
    "ReduceMean": ("mean", _by_axis),
    "Max": ("amax", _all_of),
    "Min": ("amin", _all_of),
    "MatMul": ("matmul", _matmul),
    "BatchMatMul": ("matmul", _matmul),
    "BiasAdd": ("add", _first_two),
    "Argmax": ("argmax", _first_two),
    "CumSum": ("cumsum", _first_two),
    "Gather": ("index_select", _gather),
    "Embedding": ("embedding", _first_two),
    "SplitTensorView": ("split", _even_pieces),
    "TopK": ("topk", _topk),
    "Reshape": ("reshape", _variadic),
    "View": ("reshape", _variadic),
    "BroadcastTo": ("expand", _variadic),
    "BroadcastToView": ("expand", _variadic),
    "Transpose": ("permute", _variadic),
    "TransposeView": ("permute", _variadic),
    "DeprecatedTranspose": ("permute", _variadic),
    "Squeeze": ("squeeze", _squeeze),
    "Argmin": ("argmin", _first_two),
    "CumProd": ("cumprod", _first_two),
    "CumulativeLogsumexp": ("logcumsumexp", _axis_as_tensor),
    "ReduceStd": ("std_mean", _spread),
    "PadV3": ("pad", _pad),
    "SearchSorted": ("searchsorted", _searched),
    "Slice": ("getitem", _slice),
    "StridedSlice": ("getitem", _strided_slice),
    "Split": ("split", _equal_pieces),
    "SmoothL1Loss": ("smooth_l1_loss", _loss("beta")),
    "BinaryCrossEntropy": ("binary_cross_entropy", _loss("weight")),
    "BCEWithLogitsLoss": ("binary_cross_entropy_with_logits", _loss("weight", "pos_weight")),
    "NLLLoss": ("nll_loss", _likelihood),
    "StackExt": ("stack", _first_two),
    "Stack": ("stack", _first_two),
    "Unstack": ("unbind", _first_two),
    "Sort": ("sort", _all_arguments),
}

ATTRIBUTES: dict[str, tuple[str, ...]] = {"Unstack": ("axis",), "Sort": ("axis", "descending"), "Stack": ("axis",)}
"""Attributes of primitives of the older kind that are arguments here, behind the tensors."""


def primitives_of(name: str) -> list[str]:
    """The primitives that are taken for an operation: what error messages and profiles of MindSpore show."""
    same = [primitive for primitive, known in SAME_ARGUMENTS.items() if known == name]
    return sorted({*same, *(primitive for primitive, (known, _) in ADAPTED.items() if known == name)})


def canonical(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[str, Arguments]:
    """torch's name and arguments of a primitive's call; an unknown primitive keeps its own."""
    given = tuple(args)
    if _is_older_kind(args):
        given = (*args[2], *(getattr(args[0], attribute) for attribute in ATTRIBUTES.get(name, ())))
    if name in ADAPTED:
        known, adapt = ADAPTED[name]
        return known, adapt(given, dict(kwargs or {}))
    return SAME_ARGUMENTS.get(name, name), (given, dict(kwargs or {}))


def caller(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """`func` as a function of the arguments that `canonical` gives, for an operation with the same arguments."""
    if not _is_older_kind(args):
        return func
    primitive, name, _ = args
    return lambda *given: func(primitive, name, given)


def _is_older_kind(args: tuple[Any, ...]) -> bool:
    """Primitives of the older kind come as (primitive, name, arguments)."""
    return len(args) == 3 and isinstance(args[1], str)
