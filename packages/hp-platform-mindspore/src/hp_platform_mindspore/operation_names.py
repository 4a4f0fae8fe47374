"""MindSpore's primitives in terms of torch's operations: names, and arguments where their order differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspore import Tensor
from mindspore._c_expression import typing

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
    "Outer": "outer",
    "BitwiseNot": "bitwise_not",
    "BitwiseAndScalar": "bitwise_and",
    "BitwiseOrScalar": "bitwise_or",
    "BitwiseXorTensor": "bitwise_xor",
    "BitwiseXorScalar": "bitwise_xor",
    "FloorDivScalar": "floor_divide",
    "RemainderScalarTensor": "remainder",
    "Atan2Ext": "atan2",
    "Conv1DExt": "conv1d",
    "Conv2DExt": "conv2d",
    "Conv3DExt": "conv3d",
    "Conv1DPadding": "conv1d",
    "Conv2DPadding": "conv2d",
    "Conv3DPadding": "conv3d",
    "ConvTranspose2D": "conv_transpose2d",
    "AvgPool1D": "avg_pool1d",
    "AvgPool2D": "avg_pool2d",
    "AvgPool3DExt": "avg_pool3d",
    "AdaptiveAvgPool1D": "adaptive_avg_pool1d",
    "AdaptiveAvgPool2DExt": "adaptive_avg_pool2d",
    "AdaptiveAvgPool3DExt": "adaptive_avg_pool3d",
    "EluExt": "elu",
    "SoftplusExt": "softplus",
    "MishExt": "mish",
    "LeakyReLUExt": "leaky_relu",
    "Hardtanh": "hardtanh",
    "Threshold": "threshold",
    "GeluExt": "gelu",
    "LogSumExp": "logsumexp",
    "CountNonZero": "count_nonzero",
    "MedianExt": "median",
    "MedianDim": "median",
    "Kthvalue": "kthvalue",
    "Cummax": "cummax",
    "Cummin": "cummin",
    "CumminExt": "cummin",
    "ArgMaxExt": "argmax",
    "ArgMinExt": "argmin",
    "TopkExt": "topk",
    "ArgSort": "argsort",
    "TrilExt": "tril",
    "Roll": "roll",
    "Repeat": "repeat",
    "RepeatInterleaveInt": "repeat_interleave",
    "IndexFillScalar": "index_fill",
    "IndexFillTensor": "index_fill",
    "ScatterAddExt": "scatter_add",
    "MaskedSelect": "masked_select",
    "NonZero": "nonzero",
    "UniqueConsecutive": "unique_consecutive",
    "Mm": "mm",
    "Mv": "mv",
    "Dot": "dot",
    "SeLUExt": "selu",
    "Log2": "log2",
    "Log10": "log10",
    "IsNan": "isnan",
    "BitwiseAnd": "bitwise_and",
    "Fmin": "fmin",
    "SelectExtView": "select",
    "SelectView": "select",
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


def _embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    ids, weight, *settings = args
    padding_idx, max_norm, _, scale_grad_by_freq = (*settings, *(None, None, 2.0, False)[len(settings) :])
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq:
        raise TypeError("embedding of a DTensor takes no padding_idx, max_norm or scale_grad_by_freq; mask its result")
    return (ids, weight), {}


def _scan(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dim, *exclusive_or_reverse = args
    if any(exclusive_or_reverse):
        raise TypeError("a cumulative operation on a DTensor is neither exclusive nor reverse; flip its input instead")
    return (x, dim), {}


def _matmul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, y, *transposed = args
    x, y = (t.transpose(-2, -1) if flag else t for t, flag in zip((x, y), (*transposed, False, False), strict=False))
    return (x, y), {}


def _gather(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, index, dim, *batch_dims = args
    if any(batch_dims):
        raise TypeError("gather of a DTensor takes no batch_dims; use gather_elements")
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


def likelihood(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """MindSpore makes weights of one for a call that gives none."""
    x, target, weight, reduction, ignore_index = args
    plain = type(weight) is Tensor and bool((weight.asnumpy() == 1).all())
    options = {"reduction": _REDUCTIONS[reduction], "ignore_index": ignore_index}
    return (x, target), options if plain else {"weight": weight, **options}


def _first(count: int) -> Adapter:
    """Only the first arguments; behind them come seeds, or what is the same for all."""
    return lambda args, kwargs: (args[:count], {})


def _random_like(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Seed and offset are MindSpore's generator's."""
    x, _, _, wanted, *_ = args
    return (x,), {} if wanted is None else {"dtype": dtype_of(wanted)}


def _typed(*names: str) -> Adapter:
    """Arguments after the tensor by name, the last of them a dtype, which is left out where there is none."""

    def adapt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        given = dict(zip(names, args[1:], strict=False)) | kwargs
        wanted = given.pop(names[-1], None)
        return args[:1], given if wanted is None else given | {"dtype": dtype_of(wanted)}

    return adapt


def dtype_of(value: Any) -> Any:
    """Primitives get a dtype as its number."""
    return typing.type_id_to_type(value) if isinstance(value, int) else value


def _cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    return (args[0], dtype_of(args[1])), {}


def _sorted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dim, descending, stable = args
    return (x, dim, descending), {"stable": stable}


def _counted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, weights, minlength = args
    if weights is not None:
        raise TypeError("bincount of DTensors takes no weights")
    return (x,), {"minlength": minlength}


def _hot(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, classes, on, off, axis = args
    if (float(on), float(off), axis) != (1.0, 0.0, -1):
        raise TypeError("one_hot of DTensors gives ones and zeros in a last dimension")
    return (x, classes), {}


def _constant_pad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, pads, *value = args
    return (x, tuple(pads)), {"value": float(value[0]) if value else 0.0}


def _scaled_sum(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """`addmm` and its like: `beta` and `alpha` by name, where they are not 1."""
    given = dict(zip(("beta", "alpha"), args[3:], strict=False)) | kwargs
    return args[:3], {name: value for name, value in given.items() if value != 1}


def _rounded(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    mode = args[2] if len(args) > 2 else kwargs.get("rounding_mode")
    known = {None: None, 0: None, 1: "trunc", 2: "floor", "trunc": "trunc", "floor": "floor"}[mode]
    return args[:2], {} if known is None else {"rounding_mode": known}


def _upsampled(mode: str) -> Adapter:
    def adapt(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        x, size, scales, *align_corners = args
        corners = {"align_corners": align_corners[0]} if align_corners else {}
        return (x,), {"size": size, "scale_factor": scales, "mode": mode, **corners}

    return adapt


def _spread_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    given = dict(zip(("dim", "correction", "keepdim"), args[1:], strict=False)) | kwargs
    return (args[0], given.get("dim")), {
        "keepdim": given.get("keepdim", False),
        "correction": given.get("correction", 1),
    }


def _divergence(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, target, reduction, *log_target = args
    return (x, target), {"reduction": _REDUCTIONS[reduction], "log_target": bool(log_target and log_target[0])}


def _put(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, *both = args[:3]
    indices, values = both if isinstance(both[0], (tuple, list)) else both[::-1]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return (x, tuple(indices), values), {"accumulate": bool(accumulate)}


def _scaled_index(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    alpha = args[4] if len(args) > 4 else kwargs.get("alpha", 1)
    return args[:4], {} if alpha == 1 else {"alpha": alpha}


def _scattered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, dim, index, src, *reduce = args
    how = {} if not reduce or reduce[0] in (0, "none") else {"reduce": {1: "add", 2: "multiply"}.get(*reduce[:1] * 2)}
    if isinstance(src, Tensor):
        return (x, dim, index, src), how
    return (x, dim, index), {"value": src, **how}


def _of_logits(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    x, target, weight, reduction, ignore_index, smoothing, *_ = args
    options = {"reduction": _REDUCTIONS[reduction], "ignore_index": ignore_index, "label_smoothing": smoothing}
    return (x, target), options if weight is None else {"weight": weight, **options}


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
    "Argmax": ("argmax", _first_two),
    "CumSum": ("cumsum", _scan),
    "Gather": ("index_select", _gather),
    "Embedding": ("embedding", _embedding),
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
    "CumProd": ("cumprod", _scan),
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
    "StackExt": ("stack", _first_two),
    "Stack": ("stack", _first_two),
    "Unstack": ("unbind", _first_two),
    "Sort": ("sort", _all_arguments),
    "IndexAddExt": ("index_add", _scaled_index),
    "IndexPut": ("index_put", _put),
    "LinalgVectorNorm": ("linalg_vector_norm", _typed("p", "dim", "keepdim", "dtype")),
    "Norm": ("norm", _typed("p", "dim", "keepdim", "dtype")),
    "LogSoftmaxExt": ("log_softmax", _typed("dim", "dtype")),
    "CumsumExt": ("cumsum", _typed("dim", "dtype")),
    "FullLike": ("full_like", _typed("fill_value", "dtype")),
    "NewFull": ("new_full", _typed("size", "fill_value", "dtype")),
    "Cast": ("cast", _cast),
    "SortExt": ("sort", _sorted),
    "BincountExt": ("bincount", _counted),
    "OneHotExt": ("one_hot", _hot),
    "ConstantPadND": ("pad", _constant_pad),
    "Tril": ("tril", _all_arguments),
    **{name: (name.lower(), _scaled_sum) for name in ("Addmm", "Addmv", "Addbmm", "Baddbmm")},
    "DivMod": ("div", _rounded),
    "DivMods": ("div", _rounded),
    "Scatter": ("scatter", _scattered),
    "ScatterValue": ("scatter", _scattered),
    "KLDiv": ("kl_div", _divergence),
    "SoftMarginLoss": ("soft_margin_loss", _loss()),
    "L1LossExt": ("l1_loss", _loss()),
    "MSELossExt": ("mse_loss", _loss()),
    "HuberLoss": ("huber_loss", _loss()),
    "CrossEntropyLoss": ("cross_entropy", _of_logits),
    "Std": ("std", _spread_of),
    "Var": ("var", _spread_of),
    "StdMean": ("std_mean", _spread_of),
    "VarMean": ("var_mean", _spread_of),
    "FuncDropoutExt": ("dropout", _first(3)),
    "Dropout1dExt": ("dropout1d", _first(3)),
    "Dropout2dExt": ("dropout2d", _first(3)),
    "Dropout3dExt": ("dropout3d", _first(3)),
    "RandLikeExt": ("rand_like", _random_like),
    "RandnLike": ("randn_like", _random_like),
    "ZerosLikeExt": ("zeros_like", _typed("dtype")),
    "OnesLikeExt": ("ones_like", _typed("dtype")),
    "BernoulliExt": ("bernoulli", _first(1)),
    "MultinomialExt": ("multinomial", _first(3)),
    **{f"UpsampleNearest{n}D": ("interpolate", _upsampled("nearest")) for n in (1, 2, 3)},
    "UpsampleLinear1D": ("interpolate", _upsampled("linear")),
    "UpsampleBilinear2D": ("interpolate", _upsampled("bilinear")),
    "UpsampleTrilinear3D": ("interpolate", _upsampled("trilinear")),
    "UpsampleBicubic2D": ("interpolate", _upsampled("bicubic")),
}

WRITING: dict[str, tuple[str, Adapter]] = {
    "InplaceCopy": ("copy_", _all_arguments),
    "Assign": ("copy_", _first_two),
    "AssignAdd": ("add_", _first_two),
    "AssignSub": ("sub_", _first_two),
    "InplaceFillScalar": ("fill_", _all_arguments),
    "InplaceFillTensor": ("fill_", _all_arguments),
    "InplaceFloorDivide": ("floor_divide_", _all_arguments),
    "InplaceZero": ("zero_", _all_arguments),
    "InplaceMaskedFillTensor": ("masked_fill_", _all_arguments),
    "InplaceAddsExt": ("add_", _scaled_second),
    "InplaceSubScalar": ("sub_", _scaled_second),
    "InplaceFloorDivides": ("floor_divide_", _all_arguments),
    "InplaceReLU": ("relu_", _all_arguments),
    "InplaceScatterSrc": ("scatter_", _scattered),
    "InplaceScatterValue": ("scatter_", _scattered),
    "InplaceScatterSrcReduce": ("scatter_", _scattered),
    "InplaceScatterValueReduce": ("scatter_", _scattered),
    "InplaceScatterAdd": ("scatter_add_", _all_arguments),
    "InplaceIndexCopy": ("index_copy_", _all_arguments),
    "InplaceUniform": ("uniform_", _first(3)),
    "InplaceNormal": ("normal_", _first(3)),
    "InplaceExponential": ("exponential_", _first(2)),
    "InplaceBernoulliScalar": ("bernoulli_", _first(2)),
    "InplaceBernoulliTensor": ("bernoulli_", _first(2)),
    "InplaceRandom": ("random_", _first(3)),
}
"""In-place primitives; others are called as the operation that they are the in-place form of."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "Unstack": ("axis",),
    "Sort": ("axis", "descending"),
    "Stack": ("axis",),
    "Tril": ("diagonal",),
}
"""Attributes of primitives of the older kind that are arguments here, behind the tensors."""


WITHOUT_KERNEL = frozenset(
    """
    EluExt MishExt SoftplusExt SeLUExt Hardtanh Mm Mv Addmm Addmv Addbmm Baddbmm Log2 Log10 IsNan BitwiseAnd
    BitwiseAndScalar BitwiseOrScalar BitwiseXorTensor BitwiseXorScalar RemainderScalarTensor Atan2Ext
    """.split()
)
"""Primitives that the CPU lacks, of operations for which another one does."""


def primitives_of(name: str) -> list[str]:
    """The primitives that are taken for an operation: what error messages and profiles of MindSpore show."""
    same = [primitive for primitive, known in SAME_ARGUMENTS.items() if known == name]
    adapted = [primitive for primitive, (known, _) in (ADAPTED | WRITING).items() if known == name]
    return sorted({*same, *adapted})


def canonical(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[str, Arguments]:
    """torch's name and arguments of a primitive's call; an unknown primitive keeps its own."""
    given, named = tuple(args), dict(kwargs or {})
    if is_older_kind(args):
        given = (*args[2], *(getattr(args[0], attribute) for attribute in ATTRIBUTES.get(name, ())))
    if name in WRITING:
        known, adapt = WRITING[name]
        return known, adapt(given, named)
    if name.startswith("Inplace"):
        known, arguments = canonical(name.removeprefix("Inplace"), given, named)
        return f"{known}_", arguments
    if name in ADAPTED:
        known, adapt = ADAPTED[name]
        return known, adapt(given, named)
    return SAME_ARGUMENTS.get(name, name), (given, named)


def caller(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """`func` as a function of the arguments that `canonical` gives, for an operation with the same arguments."""
    if not is_older_kind(args):
        return func
    primitive, name, _ = args
    return lambda *given: func(primitive, name, given)


def is_older_kind(args: tuple[Any, ...]) -> bool:
    """Primitives of the older kind come as (primitive, name, arguments)."""
    return len(args) == 3 and isinstance(args[1], str)
