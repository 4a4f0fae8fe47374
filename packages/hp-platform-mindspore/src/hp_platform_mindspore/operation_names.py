"""MindSpore's primitives in terms of torch's operations: names, and arguments where their order differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
}


def canonical(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[str, Arguments]:
    """torch's name and arguments of a primitive's call; an unknown primitive keeps its own."""
    given = tuple(args[2]) if _is_older_kind(args) else tuple(args)
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
